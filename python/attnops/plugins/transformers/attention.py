"""Attention over keys and values as transformers' caches have them, ``[B, H_kv, K, D]``, as one op.

A cache is not copied. By its strides it is a page per sequence, or a page per token where each request names the keys
that it sees. All this is inside one op, so a compiler need not know of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops import ops
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import XqaDecodePlan
from attnops.ops.layer_call import bind_xqa_pages_layer, is_watched, repeatable, xqa_pages_layer

MAX_DECODE_QUERIES = 16  # per request; more are a prompt
MAX_PAGES = 2**31 - 1

_library = torch.library.Library("attnops", "FRAGMENT")
_library.define(
    "padded_attention(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? keys, float softmax_scale, bool causal, "
    "int window_left, float logit_cap, Tensor? sinks) -> ()"
)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a padded batch.

    Args:
        q: ``[B, H_q, S, D]``, any strides but a dense last dim, as k and v.
        k, v: ``[B, H_kv, K, D]``, ``[B, H_kv, K, D_v]``.
        keys: Which keys are seen, int32; None: all K.
            ``[B, 1, 1, 1]``: so many, from the first on.
            ``[B, 1, 1, 1 + K]``: a number n, then the n places in k, in the order of their positions.
            ``[B, 1, S, 1 + K]``: the same for each query, which sees just these: `causal` and `window_left` are not
            asked. Where all queries of a request share a list (stride 0), they are served together.
        softmax_scale: Multiplies ``<q, k>``; ``1 / sqrt(D)`` when None.
        causal: The queries are the last S of the keys; each sees keys up to its own. False: all.
        window_left: A query sees this many keys before its own (without `causal`, also behind); -1: off.
        logit_cap: ``cap * tanh(s / cap)`` on scaled scores; 0.0: off.
        sinks: ``[H_q]``, a logit per head with no value.

    Returns:
        ``[B, S, H_q, D_v]`` in q's dtype. A query that sees no key gives zeros.

    Raises:
        ValueError: the shape of `keys` is none of these, or the cache has too many tokens for int32 page tables.
        RuntimeError: naming the argument whose shape, dtype or device does not fit.
    """
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    if sinks is not None:
        sinks = sinks.to(torch.float32)
    arguments = (out, q, k, v, keys, scale, causal, window_left, logit_cap, sinks)
    if torch.compiler.is_compiling() or type(q) is not Tensor or q.device.type not in _DEVICES or is_watched():
        torch.ops.attnops.padded_attention(*arguments)
    else:  # nobody would see the op, and its dispatch would cost more than the rest
        _padded_attention(*arguments, eager=True)
    return out


def _padded_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    eager: bool = False,
) -> None:
    """`eager`: no compiler or graph is about, whose memory a plan may not outlive."""
    if out.numel() == 0:
        return
    if keys is not None:
        _check_keys(keys, q.shape[0], q.shape[2], k.shape[2])
        if keys.shape[2] > 1:
            causal, window_left = False, -1
    if keys is None or keys.shape[3] == 1:
        seen, seqlen_q, rows = _whole_requests(q, k, v, keys), q.shape[2], out
    else:
        seen = _listed_keys(q, k, v, keys)
        seqlen_q, rows = seen.queries.shape[1], out.view(*seen.queries.shape[:3], out.shape[3])
    if seqlen_q <= MAX_DECODE_QUERIES and (causal or window_left < 0) and q.shape[3] == v.shape[3]:
        _decode(seen, rows, _Options(softmax_scale, causal, window_left, logit_cap), sinks, eager)
    else:
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "logit_cap": logit_cap, "sinks": sinks}
        options |= {"causal": causal, "window_left": window_left, "window_right": -1 if causal else window_left}
        _prompt(seen, rows, options)


class _Seen(NamedTuple):
    """What the ops take: ``[requests, queries, H_q, D]`` and pages; or, with `heads_first`, these with dims 1 and 2
    swapped. `tables` makes a page table and lengths, of `keys` and of what `place` holds besides."""

    queries: Tensor
    k_pages: Tensor
    v_pages: Tensor
    tables: Callable[[], tuple[Tensor, Tensor]]
    keys: Tensor | None
    place: tuple[int, ...]
    heads_first: bool

    def by_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and pages as the ops take them."""
        tensors = self.queries, self.k_pages, self.v_pages
        return tuple(tensor.transpose(1, 2) for tensor in tensors) if self.heads_first else tensors  # type: ignore


def _whole_requests(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> _Seen:
    """A request's keys are the first of its row, which is one page."""

    def tables() -> tuple[Tensor, Tensor]:
        table = torch.arange(q.shape[0], dtype=torch.int32, device=q.device).unsqueeze(1)
        lens = table.new_full((q.shape[0],), k.shape[2]) if keys is None else keys[:, 0, 0, 0].contiguous()
        return table, lens

    return _Seen(q, k, v, tables, keys, (k.shape[2],), True)


def _listed_keys(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> _Seen:
    """A page per key. With a list per query, each query is a request."""
    queries, lists = q.transpose(1, 2), keys
    if keys.shape[2] > 1 and keys.stride(2) == 0:
        lists = keys[:, :, :1]
    elif keys.shape[2] > 1:
        queries = queries.flatten(0, 1).unsqueeze(1)
    k_pages, v_pages, batch_step, token_step = _token_pages(k, v)

    def tables() -> tuple[Tensor, Tensor]:
        first = torch.arange(q.shape[0], dtype=torch.int32, device=q.device) * batch_step
        table = (lists[:, 0, :, 1:] * token_step + first.view(-1, 1, 1)).flatten(0, 1)
        return table, lists[:, 0, :, 0].flatten().contiguous()

    return _Seen(queries, k_pages, v_pages, tables, keys, (batch_step, token_step), False)


class _Options(NamedTuple):
    """Of a decode, besides its tensors."""

    softmax_scale: float
    causal: bool
    window_left: int
    logit_cap: float


@dataclass
class _Kind:
    """What calls of one kind share: a plan's memory, what it was planned for, and the call that was bound to it."""

    plan: XqaDecodePlan
    place: tuple[int, ...] = ()
    keys: Tensor | None = None
    version: int = -1
    tables: tuple[Tensor, Tensor] | None = None
    call: Callable[..., None] | None = None


class _Kinds(threading.local):
    """Of a thread's last calls. Layers of a step differ by their windows at most, and are planned once."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], _Kind] = {}


_kinds = _Kinds()
MAX_KINDS = 4


def _allocate(seen: _Seen, window_left: int) -> XqaDecodePlan:
    queries, k_pages, _ = seen.by_token()
    requests, seqlen_q, num_q_heads, head_dim = queries.shape
    return XqaDecodePlan.allocate(
        requests,
        num_q_heads=num_q_heads,
        num_kv_heads=k_pages.shape[2],
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        window_left=window_left,
        page_size=k_pages.shape[1],
        device=queries.device,
    )


def _kind_of(seen: _Seen, options: _Options) -> _Kind:
    """On a GPU, calls of one stream share, since they run one after the other. Of the size of pages a plan asks only
    whether it is a power of two; so it stays while a cache grows."""
    queries, pages = seen.queries, seen.k_pages
    _, heads, page_size, _ = pages.shape
    if not seen.heads_first:
        heads, page_size = page_size, heads
    odd = page_size < 8 or page_size & (page_size - 1) != 0
    stream = torch._C._cuda_getCurrentRawStream(queries.device.index) if queries.is_cuda else 0
    shapes = (queries.shape, heads, odd, seen.heads_first)
    key = (queries.device, stream, queries.dtype, pages.dtype, shapes, options)
    kind = _kinds.kept.get(key)
    if kind is None:
        while len(_kinds.kept) >= MAX_KINDS:
            del _kinds.kept[next(iter(_kinds.kept))]
        kind = _kinds.kept[key] = _Kind(_allocate(seen, options.window_left))
    return kind


def _decode(seen: _Seen, out: Tensor, options: _Options, sinks: Tensor | None, eager: bool) -> None:
    """A graph's call shares nothing: its memory is the graph's."""
    keys = seen.keys
    if seen.queries.is_cuda and (not eager or torch.cuda.is_current_stream_capturing()):
        plan, (table, lens) = _allocate(seen, options.window_left), seen.tables()
        ops.xqa_decode_plan(plan, lens)
        ops.xqa_decode(*seen.by_token(), table, lens, plan, out=out, sinks=sinks, **options._asdict())
        return
    kind = _kind_of(seen, options)
    version = -1 if keys is None or keys.is_inference() else keys._version
    known = kind.place == seen.place and kind.keys is keys and kind.version == version
    if kind.tables is None or not known or (keys is not None and version < 0):
        kind.tables, kind.place, kind.keys, kind.version = seen.tables(), seen.place, keys, version
        ops.xqa_decode_plan(kind.plan, kind.tables[1])
    table, lens = kind.tables
    if kind.call is None:
        given = {**options._asdict(), "heads_first": seen.heads_first}
        bound = bind_xqa_pages_layer(out, *seen.by_token(), table, lens, kind.plan, **given)
        kind.call = repeatable(xqa_pages_layer, bound)
    kind.call(out, seen.queries, seen.k_pages, seen.v_pages, table, lens, None, sinks, None, None)


def _prompt(seen: _Seen, out: Tensor, options: dict[str, Any]) -> None:
    queries, k_pages, v_pages = seen.by_token()
    requests, seqlen_q, num_q_heads, _ = queries.shape
    bounds = torch.arange(requests + 1, dtype=torch.int32, device=out.device) * seqlen_q
    plan = FmhaPlan.allocate(
        requests * seqlen_q,
        requests,
        causal=options["causal"],
        window_left=options["window_left"],
        num_q_heads=num_q_heads,
        num_kv_heads=k_pages.shape[2],
        head_dim=max(k_pages.shape[-1], out.shape[-1]),
        device=out.device,
    )
    table, lens = seen.tables()
    ops.fmha_plan(plan, bounds, cache_seqlens=lens)
    pages = (k_pages, v_pages)
    ops.fmha_paged(queries.flatten(0, 1), *pages, table, lens, bounds, plan, out=out.flatten(0, 1), **options)


def _check_keys(keys: Tensor, requests: int, seqlen_q: int, num_keys: int) -> None:
    per_request = [(requests, 1, 1, 1), (requests, 1, 1, 1 + num_keys)]
    if tuple(keys.shape) not in [*per_request, (requests, 1, seqlen_q, 1 + num_keys)]:
        raise ValueError(
            f"attnops::padded_attention: keys must be [{requests}, 1, 1, 1], [{requests}, 1, 1, {1 + num_keys}] or "
            f"[{requests}, 1, {seqlen_q}, {1 + num_keys}] (requests, queries, keys), got {list(keys.shape)}"
        )


def _token_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """k and v as pages of one token, which may overlap: token t of request b is page ``b * batch_step + t *
    token_step`` of both."""
    steps_k, steps_v = _steps(k), _steps(v)
    if steps_k[:2] != steps_v[:2]:
        k, v = k.contiguous(), v.contiguous()
        steps_k, steps_v = _steps(k), _steps(v)
    batch_step, token_step, _ = steps_k
    num_pages = (k.shape[0] - 1) * batch_step + (k.shape[2] - 1) * token_step + 1
    if num_pages > MAX_PAGES:
        raise ValueError(f"attnops::padded_attention: a cache of {num_pages} places does not fit int32 page tables")

    def pages(tensor: Tensor, stride: int) -> Tensor:
        shape = (num_pages, 1, tensor.shape[1], tensor.shape[3])
        return tensor.as_strided(shape, (stride, stride, tensor.stride(1), 1))

    return pages(k, steps_k[2]), pages(v, steps_v[2]), batch_step, token_step


def _steps(tensor: Tensor) -> tuple[int, int, int]:
    """Of ``[B, H, K, D]``: batch and token stride in units of what divides both, and that unit in elements."""
    batch = tensor.stride(0) if tensor.shape[0] > 1 else 0
    token = tensor.stride(2) if tensor.shape[2] > 1 else 0
    unit = math.gcd(batch, token) or tensor.shape[3]
    return batch // unit, token // unit, unit


_DEVICES = ("cpu", "cuda")
for _key in ("CPU", "CUDA"):
    _library.impl("padded_attention", _padded_attention, _key)


@torch.library.register_fake("attnops::padded_attention")
def _(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
) -> None:
    return None
