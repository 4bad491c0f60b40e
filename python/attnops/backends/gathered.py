"""Steps of backends in plain torch, all requests at once: keys are gathered from their pages, a chunk at a time.

Torch launches each chunk from the host, and lengths are the device's. So the loop ends where the host knows that all
requests have ended. `most_keys` is what it was told. An eager step also asks the device for its longest request, and
waits for no answer (`longest.py`). Chunks are launched until it is there, and none beyond that request. A CPU answers
at once. A captured step is for lengths to come, so it walks all keys that the host was not told to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall, is_causal
from attnops.backends.capability import DECODER_MODES, FLOATS, Capability, HeadDims
from attnops.backends.longest import LongestRequest
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.store import FP8, heads, store_kv, store_mla, uses_window_slots
from attnops.graph_buffers import PagedBuffers, PagedStep
from attnops.layers.radix_attention import RadixAttention
from attnops.pools import MHATokenToKVPoolFP4, MLATokenToKVPool, MLATokenToKVPoolFP4
from attnops.reference import dequantize_fp4, unpack_mla_fp8_rows, unpack_tree_mask
from attnops.report import record_pages
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

CHUNK_TOKENS = 256  # keys per chunk: large enough for a matrix product, small enough to stay in a cache


@dataclass(frozen=True)
class Queries:
    """The step's queries by request, and what each may see.

    Attributes:
        q: float32 ``[B, S_q, H_q, D]``; rows beyond a request's own hold anything.
        positions: int64 ``[B, S_q]``, of the query in its request, where it has no mask.
        seqlens_k: int64 ``[B]``, keys of each request.
        drafts: bool ``[B, S_q, M]``, which new token sees which of the last M, or None: causal, or all.
        items: Of prompts with items: int64 ``[B]``, tokens of the prefix, and int64 ``[B, S_q]``, places in items.
    """

    q: Tensor
    positions: Tensor
    seqlens_k: Tensor
    drafts: Tensor | None
    items: tuple[Tensor, Tensor] | None = None


# One chunk of every request: keys and values, float32 ``[B, C, H_kv, D]``, and the position of the first.
Chunks = Iterator[tuple[Tensor, Tensor, int]]


# From queries, their keys and their layer to the result, float32 or of q's dtype, ``[B, S_q, H_q, D_v]``.
Softmax = Callable[[Queries, Chunks, RadixAttention], Tensor]


def whole_queries(call: LayerCall) -> Tensor:
    """``[num_tokens, H_q, D]``, of one tensor or of two (`q_rope`)."""
    q, layer = call.q, call.layer
    if call.q_rope is not None:
        q = torch.cat([x.reshape(q.shape[0], layer.num_heads, -1) for x in (q, call.q_rope)], -1)
    return heads("q", q, layer.num_heads, layer.head_dim)


class GatheredSteps:
    """What such backends share by composition: buffers, metadata, stores, and one layer's queries and keys.

    Args:
        owner: The backend's name, for messages.
        softmax: The attention itself.
        ends_early: It takes chunks one after another, and one that no query sees changes no bit. So how many there are
            may be found out on the way.
    """

    def __init__(
        self,
        owner: str,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device,
        softmax: Softmax,
        ends_early: bool = True,
    ) -> None:
        self.name, self.spec, self.limits, self._softmax = owner, spec, limits, softmax
        self.buffers = PagedBuffers(spec, limits, device)
        self.prepared: PreparedStep[PagedStep] = PreparedStep()
        self._ends_early, self._in_capture = ends_early, False
        self._longest: LongestRequest | None = None

    def out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        self.prepared.begin(batch, self.buffers.step(batch))
        self._in_capture, self._longest = in_capture, None

    @in_one_thread
    def in_graph(self, batch: AttentionBatch) -> None:
        step = self.prepared.plan(batch)
        if not batch.forward_mode.is_idle():
            self.buffers.build(step, batch)
            if self._ends_early:
                self._longest = LongestRequest.ask(batch.cache_seqlens, self._in_capture)

    @in_one_thread
    def attend(self, call: LayerCall) -> None:
        layer, batch = call.layer, call.batch
        step, q = self.prepared.of(batch), whole_queries(call)
        if not q.dtype.is_floating_point:  # torch would compute, and cut the result to integers
            raise ValueError(f"attnops: q must be of a floating point dtype, got {q.dtype}")
        out = call.out.view(q.shape[0], layer.num_heads, layer.v_head_dim)
        rows = _rows_of_requests(batch, step)
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            assert call.k is not None and call.v is not None
            queries = _queries(q, batch, rows, batch.extend_seq_lens)
            k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)
            v = heads("v", call.v, layer.num_kv_heads, layer.v_head_dim)

            chunks = _ragged_chunks(k, v, rows, queries)
        else:
            self.store(call, step)
            queries = _queries(q, batch, rows, batch.cache_seqlens)
            chunks = self._paged_chunks(layer, batch, step, queries)
        result = self._softmax(queries, chunks, layer)
        if rows is None:
            out.copy_(result.flatten(0, 1))
        else:
            out.copy_(result[rows.request, rows.row])

    def store(self, call: LayerCall, step: PagedStep) -> None:
        if not call.save_kv_cache or call.k is None:
            return
        if self.spec.is_mla:
            store_mla(call.layer, call.batch, call.k, call.k_rope, self.buffers.report)
        else:
            assert call.v is not None
            store_kv(call.layer, call.batch, step, call.k, call.v, self.buffers.report)

    def _paged_chunks(self, layer: RadixAttention, batch: AttentionBatch, step: PagedStep, queries: Queries) -> Chunks:
        """Keys and values from their pages, until the host knows that no request has more."""
        pool = batch.token_to_kv_pool
        assert pool is not None
        table = step.window_page_table if uses_window_slots(layer, pool) else step.page_table
        assert table is not None
        pages_per_chunk = max(1, CHUNK_TOKENS // pool.page_size)
        max_pages = -(-most_keys(batch, self.limits) // pool.page_size)
        take = _taker(pool, layer)
        for first in range(0, max_pages, pages_per_chunk):
            longest = None if self._longest is None else self._longest.keys()
            if longest is not None and first * pool.page_size >= longest:
                return
            # Cells past a request's length hold anything, and so do the tokens they lead to: both are selected away.
            pages = table[:, first : min(first + pages_per_chunk, max_pages)].long()
            cells = pages.clamp(0, pool.num_pages - 1)
            begin = first * pool.page_size
            key = torch.arange(begin, begin + cells.shape[1] * pool.page_size, device=cells.device)
            valid = key < queries.seqlens_k.unsqueeze(1)
            if layer.sliding_window_size >= 0:  # tokens that have left every window may have no page any more
                valid &= key >= queries.positions[:, :1] - layer.sliding_window_size
            if self.buffers.report is not None:
                used = valid.unflatten(1, (-1, pool.page_size)).any(2)
                record_pages(self.buffers.report, self.name, pages, used, begin // pool.page_size, pool.num_pages)
            k, v = take(cells, valid.view(*valid.shape, 1, 1))
            yield k, v, begin


def most_keys(batch: AttentionBatch, limits: Limits) -> int:
    """Keys of a request that the host cannot rule out, without a look at the device: the least of what it was told.

    These are the limit, `max_cache_seqlen`, the columns of `req_to_token`, and the step's tokens behind all cached ones
    (`max_prefix_tokens`).
    """
    bounds = [limits.max_seqlen]
    if batch.max_cache_seqlen is not None:
        bounds.append(batch.max_cache_seqlen)
    if batch.req_to_token is not None:
        bounds.append(batch.req_to_token.shape[1])
    if batch.max_prefix_tokens is not None:
        new = batch.tokens_per_request * max(batch.draft_steps, 1) or min(batch.max_seqlen_q, batch.num_tokens)
        bounds.append(batch.max_prefix_tokens + new)
    return min(bounds)


CAPABILITY = Capability(
    devices=frozenset({"cpu", "cuda"}),
    needs_cuda_kernels=False,
    modes=DECODER_MODES,
    attn_types=frozenset(AttentionType),
    dtypes=FLOATS,
    kv_dtypes=frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float4_e2m1fn_x2}),
    head_dims=HeadDims(1, 576, equal=False),
    mla=True,
    sliding_window=True,
    swa_pool=True,
    logit_cap=True,
    sinks=True,
    tree_mask=True,
    draft_trees=True,
    draft_trees_two_dims=True,
    draft_windows=True,
    multi_item=True,
    local_attention=True,
)


class GatheredBackend(AttentionBackend):
    """What backends over gathered keys are: they differ in the attention itself, and in what they declare.

    Attributes:
        softmax: That attention, a `Softmax`.
        ends_early: As of `GatheredSteps`.
    """

    softmax: ClassVar[Any]
    ends_early: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._steps = GatheredSteps(self.name, spec, limits, self.device, type(self).softmax, self.ends_early)

    @property
    def fault_report(self) -> Tensor | None:
        return self._steps.buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self._steps.out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self._steps.in_graph(batch)

    def attend(self, call: LayerCall) -> None:
        self._steps.attend(call)


def _taker(pool: object, layer: RadixAttention) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A function from page indices ``[B, n]`` and validity ``[B, C, 1, 1]`` to float32 keys and values."""
    if isinstance(pool, MLATokenToKVPool):
        latents = pool.get_latent_buffer(layer.layer_id)
        if isinstance(pool, MLATokenToKVPoolFP4):
            scales = pool.get_kv_scale_buffer(layer.layer_id)

            def take_codes(cells: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
                k = _real_fp4(latents, scales, cells, layer.k_scale, valid.squeeze(-1)).unsqueeze(2)
                return k, k[..., : layer.v_head_dim]

            return take_codes

        def take_latents(cells: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
            rows = _gather(latents, cells)
            if rows.dtype == torch.uint8:
                rows = unpack_mla_fp8_rows(rows, torch.float32)
            k = _real(rows.unsqueeze(2), layer.k_scale, valid)
            return k, k[..., : layer.v_head_dim]

        return take_latents
    k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)  # type: ignore[attr-defined]
    if isinstance(pool, MHATokenToKVPoolFP4):
        k_scales, v_scales = pool.get_kv_scale_buffer(layer.layer_id)

        def take_fp4(cells: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
            k = _real_fp4(k_pages, k_scales, cells, layer.k_scale, valid)
            return k, _real_fp4(v_pages, v_scales, cells, layer.v_scale, valid)

        return take_fp4

    def take(cells: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        k = _real(_gather(k_pages, cells), layer.k_scale, valid)
        return k, _real(_gather(v_pages, cells), layer.v_scale, valid)

    return take


def _gather(pages: Tensor, cells: Tensor) -> Tensor:
    """``[B, n * page_size, ...]`` of pages ``[P, page_size, ...]``."""
    if pages.dtype in FP8:  # torch does not index these on every device
        return pages.view(torch.uint8)[cells].flatten(1, 2).view(pages.dtype)
    return pages[cells].flatten(1, 2)


def _real_fp4(codes: Tensor, scales: Tensor, cells: Tensor, scale: Tensor | None, valid: Tensor) -> Tensor:
    """float32 values of codes and their scales, zeros where nothing valid is."""
    found = (_gather(codes.view(torch.uint8), cells), _gather(scales, cells))
    return dequantize_fp4(*found, scale, torch.float32).masked_fill(~valid, 0.0)


def _real(stored: Tensor, scale: Tensor | None, valid: Tensor) -> Tensor:
    """float32 values: stored x scale for FP8, zeros where nothing valid is."""
    values = stored.to(torch.float32, copy=True)
    if stored.dtype in FP8 and scale is not None:
        values = values * scale.view(-1, 1)
    return values.masked_fill_(~valid, 0.0)


@dataclass(frozen=True)
class Rows:
    """Where a ragged step's tokens stand: all on the device, shapes from the host's bounds.

    Attributes:
        request, row: int64 ``[T]``: the token's request, and which of its new tokens it is.
        token: int64 ``[B, S_q]``: the inverse, clamped where a request has fewer rows.
    """

    request: Tensor
    row: Tensor
    token: Tensor


def _rows_of_requests(batch: AttentionBatch, step: PagedStep) -> Rows | None:
    """None for a uniform step, whose tokens are a matrix already."""
    if step.cu_seqlens_q is None:
        return None
    begins = step.cu_seqlens_q.long()
    token = torch.arange(batch.num_tokens, device=begins.device)
    # A padding token beyond the last request's counts as its last row: it is computed, and nobody looks.
    request = (torch.searchsorted(begins, token, right=True) - 1).clamp(max=batch.batch_size - 1)
    row = (token - begins[request]).clamp(max=batch.max_seqlen_q - 1)
    tokens = begins[:-1].unsqueeze(1) + torch.arange(batch.max_seqlen_q, device=begins.device)
    return Rows(request, row, tokens.clamp(max=batch.num_tokens - 1))


def _queries(q: Tensor, batch: AttentionBatch, rows: Rows | None, seqlens_k: Tensor | None) -> Queries:
    assert seqlens_k is not None
    seqlens_k = seqlens_k.long()
    if rows is None:
        seqlen_q = batch.tokens_per_request
        by_request = q.unflatten(0, (batch.batch_size, seqlen_q))
        seqlens_q = seqlens_k.new_full((batch.batch_size,), seqlen_q)
    else:
        by_request = q[rows.token]
        assert batch.extend_seq_lens is not None
        seqlens_q = batch.extend_seq_lens.long()
    row = torch.arange(by_request.shape[1], device=q.device)
    behind = batch.tree_keys or seqlens_q  # of the prefix: a draft step's rows stand anywhere among its drafts
    positions = (seqlens_k - behind).unsqueeze(1) + row
    drafts = None
    if batch.tree_mask is not None:
        drafts = unpack_tree_mask(batch.tree_mask, batch.tree_keys or batch.tokens_per_request)
    items = None
    if batch.multi_item is not None:
        prefix = batch.multi_item.prefix_len_ptr.long().clamp(min=0).minimum(seqlens_k)
        request = torch.arange(batch.batch_size, device=q.device).unsqueeze(1).expand(positions.shape)
        items = (prefix, batch.multi_item.places(request, (positions - prefix.unsqueeze(1)).clamp(min=0)))
    return Queries(by_request.float(), positions, seqlens_k, drafts, items)


def _ragged_chunks(k: Tensor, v: Tensor, rows: Rows | None, queries: Queries) -> Chunks:
    """An encoder's keys and values ``[T, H_kv, D]``, all in one chunk, straight from the step's tokens."""
    assert rows is not None, "an encoder's step is ragged"
    valid = torch.arange(rows.token.shape[1], device=k.device) < queries.seqlens_k.unsqueeze(1)
    valid = valid.view(*valid.shape, 1, 1)
    yield _real(k[rows.token], None, valid), _real(v[rows.token], None, valid), 0


def visible_keys(queries: Queries, layer: RadixAttention, begin: int, count: int) -> Tensor:
    """bool ``[B, S_q, count]``: which keys from `begin` on each query sees."""
    key = torch.arange(begin, begin + count, device=queries.q.device)
    position = queries.positions.unsqueeze(-1)
    visible = (key < queries.seqlens_k.view(-1, 1, 1)).expand(-1, position.shape[1], -1)
    if queries.drafts is not None:
        tree_keys = queries.drafts.shape[-1]
        draft = key - (queries.seqlens_k.unsqueeze(1) - tree_keys)  # [B, count]; negative: prefix
        index = draft.clamp(0, tree_keys - 1).unsqueeze(1).expand(-1, position.shape[1], -1)
        visible = visible & ((draft < 0).unsqueeze(1) | queries.drafts.gather(2, index))
    elif is_causal(layer):
        visible = visible & (key <= position)
    if queries.items is not None:
        prefix, place = queries.items
        in_item = (key > position - place.unsqueeze(-1)) & (position >= prefix.view(-1, 1, 1))
        visible = visible & ((key < prefix.view(-1, 1, 1)) | in_item | (position < prefix.view(-1, 1, 1)))
    if layer.attention_chunk_size:
        chunk = torch.div(position, layer.attention_chunk_size, rounding_mode="floor")
        visible = visible & (torch.div(key, layer.attention_chunk_size, rounding_mode="floor") == chunk)
    if layer.sliding_window_size >= 0 and queries.drafts is not None:  # counts steps of the tree
        counted = queries.drafts.cumsum(2)
        total = counted[..., -1:]
        behind = torch.where(
            (draft < 0).unsqueeze(1), total.clamp(min=1) - 1 - draft.unsqueeze(1), total - counted.gather(2, index)
        )
        visible = visible & (behind <= layer.sliding_window_size)
    elif layer.sliding_window_size >= 0:
        visible = visible & (key >= position - layer.sliding_window_size)
        if layer.attn_type is not AttentionType.DECODER:
            visible = visible & (key <= position + layer.sliding_window_size)
    return visible
