"""FlashAttention-3's `flash_attn_with_kvcache` and `flash_attn_varlen_func`. lse: ``[B, H, S]`` or ``[H, T]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import as_int32, as_sinks, heads_first, refuse, require_default
from attnops.compat._errors import names_the_peers
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import TILE_TOKENS, XqaDecodePlan

MAX_DECODE_QUERIES = 16  # per request; more are served as prefill

_NO_ROPE = "rotate q and k before the call"
_SPLITS = "leave 0, or 1: one split per request, batch-invariant"
_INSTEAD = {
    "qv": "MLA is attnops.ops.mla_decode, or attnops.compat.flash_mla",
    "rotary_cos": _NO_ROPE,
    "rotary_sin": _NO_ROPE,
    "rotary_seqlens": _NO_ROPE,
    "cache_leftpad": "let a request's page table begin with its first page",
    "cu_seqlens_k_new": "append with attnops.ops.store_kv, then leave k and v None",
    "q_descale": "queries are 16-bit; fold their scale into softmax_scale",
    "attention_chunk": "use window_size, or leave 0",
    "scheduler_metadata": "plans are made on the device within the call; leave it None",
    "sm_margin": "the whole device is used; leave 0",
}


@names_the_peers(
    "flash_attn_with_kvcache",
    k_pages="k_cache",
    v_pages="v_cache",
    k_scale="k_descale",
    v_scale="v_descale",
    window_left="of window_size",
    window_right="of window_size",
    logit_cap="softcap",
)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode (`attnops.ops.xqa_decode`) and paged extend (`attnops.ops.fmha_paged`).

    Args:
        q: ``[B, S_q, H_q, D]``; or, with `cu_seqlens_q` int32 ``[B + 1]`` and `max_seqlen_q`, ``[T, H_q, D]``.
        k_cache, v_cache: ``[P, page_size, H_kv, D]`` with `page_table` int32 ``[B, max_pages]``, any page size;
            without, ``[B, max_seqlen, H_kv, D]``, where `cache_batch_idx` int32 ``[B]`` may choose the rows.
        k, v: ``[B, S_new, H_kv, D]``: appended in place at `cache_seqlens`, which then counts them not.
        cache_seqlens: int32 ``[B]`` or a number; None: the whole cache.
        k_descale, v_descale: float32 ``[B, H_kv]``, the same for all requests: expanded from ``[H_kv]`` or one number.
        window_size: (left, right), both inclusive; -1: off. softcap: 0: off.
        rotary_interleaved, pack_gqa: Taken: without rotary tensors the first means nothing, and attnops packs itself.
        num_splits: 0: balanced. 1: one split, so that bits do not depend on the batch.
        sinks: ``[H_q]``, by keyword, as forks have it.

    Returns:
        ``out`` as q, or ``(out, lse)``: natural log ``[B, H_q, S_q]`` or ``[H_q, T]``, -inf for an empty row.
    """
    name = "flash_attn_with_kvcache"
    attention_chunk = attention_chunk or 0  # sgl_kernel's default is None
    require_default(name, _INSTEAD, {"attention_chunk": 0, "sm_margin": 0}, locals())
    if num_splits not in (0, 1):
        raise refuse(name, f"num_splits={num_splits}", _SPLITS)
    if cu_seqlens_q is None and max_seqlen_q not in (None, q.shape[1]):
        raise ValueError(
            f"attnops.compat: {name}: max_seqlen_q must be {q.shape[1]} (q.shape[1]) without cu_seqlens_q, "
            f"got {max_seqlen_q}"
        )
    batch_size = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    table = _table(page_table, cache_batch_idx, batch_size, q.device)
    lens = _lens(cache_seqlens, batch_size, table, k_cache, q.device)
    if k is not None and v is not None:
        lens = _append(k, v, k_cache, v_cache, table, lens)
    elif k is not None or v is not None:
        raise ValueError(f"attnops.compat: {name}: k and v come together")
    window_left, window_right = window_size
    if causal or window_right == 0:
        causal, window_right = True, -1
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_left": window_left,
        "logit_cap": softcap,
        "sinks": as_sinks(sinks, q.shape[-2], name),
        "k_scale": _descale(name, "k_descale", k_descale),
        "v_scale": _descale(name, "v_descale", v_descale),
        "return_lse": return_softmax_lse,
    }
    if cu_seqlens_q is None and window_right < 0 and q.shape[1] <= MAX_DECODE_QUERIES:
        return _decode(q, k_cache, v_cache, table, lens, num_splits == 1, out, options)
    if cu_seqlens_q is None:
        bounds = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    elif max_seqlen_q is None:
        raise ValueError(f"attnops.compat: {name}: cu_seqlens_q needs max_seqlen_q")
    else:
        bounds = cu_seqlens_q
    return _extend(q, k_cache, v_cache, table, lens, bounds, out, options | {"window_right": window_right})


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    one_split: bool,
    out: Tensor | None,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """Few query tokens of each request, as many of all: ``[B, S_q, H_q, D]``."""
    bound = table.shape[1] * k_cache.shape[1]
    plan = XqaDecodePlan.allocate(
        q.shape[0],
        num_q_heads=q.shape[2],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[3],
        seqlen_q=q.shape[1],
        window_left=options["window_left"],
        fixed_split_tokens=-(-bound // TILE_TOKENS) * TILE_TOKENS if one_split else 0,
        max_seqlen_k=bound,
        device=q.device,
    )
    ops.xqa_decode_plan(plan, lens)
    result, lse = ops.xqa_decode(q, k_cache, v_cache, table, lens, plan, out=out, **options)
    return result if lse is None else (result, heads_first(lse))


def _extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    bounds: Tensor,
    out: Tensor | None,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """Any query tokens, ``[T, H_q, D]`` or ``[B, S_q, H_q, D]``; `bounds` is where each request's begin."""
    rows = q if q.dim() == 3 else q.flatten(0, 1)
    flat_out = out if out is None or out.dim() == 3 else out.view(rows.shape)  # never a copy: it is written
    plan = _fmha_plan(rows, k_cache, bounds.shape[0] - 1, options["causal"], options["window_left"])
    ops.fmha_plan(plan, bounds, cache_seqlens=lens)
    result, lse = ops.fmha_paged(rows, k_cache, v_cache, table, lens, bounds, plan, out=flat_out, **options)
    result = result.view(q.shape)
    if lse is None:
        return result
    return result, heads_first(lse if q.dim() == 3 else lse.unflatten(0, q.shape[:2]))


@names_the_peers(
    "flash_attn_varlen_func",
    k_scale="k_descale",
    v_scale="v_descale",
    window_left="of window_size",
    window_right="of window_size",
    logit_cap="softcap",
)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.fmha_varlen`; no backward pass.

    Args:
        q: ``[T, H_q, D]``. k, v: ``[T_k, H_kv, D]``, ``[T_k, H_kv, D_v]``. cu_seqlens_q, cu_seqlens_k: int32
            ``[B + 1]``.
        max_seqlen_q, max_seqlen_k: Nothing depends on them. pack_gqa, deterministic: Taken: the same call always gives
            the same bits.

    Returns:
        ``out``, or with `return_attn_probs` ``(out, lse)``: natural log ``[H_q, T]``, -inf for an empty row.
    """
    name = "flash_attn_varlen_func"
    used = "cut the tensors to the tokens in use"
    instead = {key: _INSTEAD[key] for key in ("qv", "q_descale", "attention_chunk", "sm_margin")}
    instead |= {"seqused_q": used, "seqused_k": used}
    attention_chunk = attention_chunk or 0
    require_default(name, instead, {"attention_chunk": 0, "sm_margin": 0}, locals())
    if num_splits not in (0, 1):
        raise refuse(name, f"num_splits={num_splits}", "keys are not split here; leave 1")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise refuse(name, "tensors that require a gradient", "attnops has no backward pass; use torch.no_grad()")
    window_left, window_right = window_size
    if causal or window_right == 0:
        causal, window_right = True, -1
    plan = _fmha_plan(q, k, cu_seqlens_q.shape[0] - 1, causal, window_left)
    ops.fmha_plan(plan, cu_seqlens_q, cu_seqlens_k)
    out, lse = ops.fmha_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        plan,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logit_cap=softcap,
        sinks=as_sinks(sinks, q.shape[1], name),
        k_scale=_descale(name, "k_descale", k_descale),
        v_scale=_descale(name, "v_descale", v_descale),
        return_lse=return_attn_probs,
    )
    return out if lse is None else (out, heads_first(lse))


def _fmha_plan(q: Tensor, k: Tensor, batch_size: int, causal: bool, window_left: int) -> FmhaPlan:
    heads = {"num_q_heads": q.shape[1], "num_kv_heads": k.shape[-2]}
    return FmhaPlan.allocate(q.shape[0], batch_size, causal=causal, window_left=window_left, device=q.device, **heads)


def _table(table: Tensor | None, rows: Tensor | None, batch_size: int, device: torch.device) -> Tensor:
    """A cache without pages is one of pages as long as its sequences."""
    if table is not None:
        if rows is not None:
            raise refuse("flash_attn_with_kvcache", "cache_batch_idx with page_table", "index the page table's rows")
        return table
    if rows is None:
        rows = torch.arange(batch_size, dtype=torch.int32, device=device)
    return as_int32("flash_attn_with_kvcache", "cache_batch_idx", rows, device).unsqueeze(1)


def _lens(given: int | Tensor | None, batch_size: int, table: Tensor, k_cache: Tensor, device: torch.device) -> Tensor:
    if isinstance(given, Tensor):
        return as_int32("flash_attn_with_kvcache", "cache_seqlens", given, device)
    length = table.shape[1] * k_cache.shape[1] if given is None else given
    return torch.full((batch_size,), length, dtype=torch.int32, device=device)


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Stores the new tokens behind the cached ones; returns the lengths with them. What finds no room is not stored."""
    if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        raise ValueError(
            f"attnops.compat: flash_attn_with_kvcache: k is {k.dtype}, cache {k_cache.dtype}: append rows of its "
            "dtype, or use attnops.ops.store_kv, which quantizes"
        )
    size, new = k_cache.shape[1], k.shape[1]
    position = lens.long().unsqueeze(1) + torch.arange(new, device=lens.device)
    page = torch.div(position, size, rounding_mode="floor")
    slot = table.long().gather(1, page.clamp(max=table.shape[1] - 1)) * size + position % size
    slot = torch.where(page < table.shape[1], slot, -1)
    ops.store_kv(k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), slot.flatten())
    return lens + new


def _descale(function: str, name: str, scale: Tensor | None) -> Tensor | None:
    """``[H_kv]`` of ``[B, H_kv]`` whose requests are the same by its strides; the values are not read."""
    if scale is None:
        return None
    if scale.dim() != 2 or (scale.shape[0] > 1 and scale.stride(0) != 0):
        raise refuse(function, f"{name} per request", "expand one number, or one per KV head, to [B, H_kv]")
    return scale[0].contiguous()
