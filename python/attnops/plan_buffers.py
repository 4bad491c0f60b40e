"""Plans of the decode ops for every shape of a step, and how ragged steps become what those ops take."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import (
    MOST_CHUNKS_FOR_EACH,
    ChunkTensors,
    DecodeChunks,
    FmhaPlan,
    chunks_for_decode,
    tokens_for_decode,
)
from attnops.metadata.plan import MLA_ROWS_PER_WORK, MlaDecodePlan, XqaDecodePlan
from attnops.metadata.plan_parts import mla_num_sm_parts, suits_prefill, xqa_invariant_cuts, xqa_num_sm_parts
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

MLA_INVARIANT_SPLIT_TOKENS = 1024  # where a deterministic MLA model's requests are cut, whatever else is in the batch

DecodePlan = XqaDecodePlan | MlaDecodePlan


class DecodePlans:
    """Split-KV plans of one number of query tokens per request, for every batch size, over one scratch.

    A model's layers run one after another, so plans for different windows share what the splits of a call write. Each
    window has a plan, which all layers with that window use.

    Args:
        max_batch_size: Of any plan.
        seqlen_q: Query tokens per request.
    """

    def __init__(
        self, spec: AttentionSpec, limits: Limits, max_batch_size: int, seqlen_q: int, device: torch.device
    ) -> None:
        cuts, kv_dtype = MLA_INVARIANT_SPLIT_TOKENS, spec.kv_dtype or spec.dtype
        if not spec.is_mla:
            cuts = xqa_invariant_cuts(
                spec.num_kv_heads,
                num_q_heads=spec.num_q_heads,
                seqlen_q=seqlen_q,
                head_dim=spec.head_dim,
                kv_dtype=kv_dtype,
                page_size=spec.page_size,
            )
        cuts = cuts if spec.deterministic else 0

        def parts_for(batch_size: int) -> int:
            if spec.is_mla:
                return mla_num_sm_parts(device, -(-seqlen_q * spec.num_q_heads // MLA_ROWS_PER_WORK))
            return xqa_num_sm_parts(
                device,
                batch_size,
                spec.num_kv_heads,
                rows=seqlen_q * (spec.num_q_heads // spec.num_kv_heads),
                head_dim=spec.head_dim,
                kv_dtype=kv_dtype,
                page_size=spec.page_size,
                fixed_split_tokens=cuts,
            )

        self._parts = [parts_for(size) for size in range(max_batch_size + 1)]
        options: dict[str, Any] = {
            "num_q_heads": spec.num_q_heads,
            "seqlen_q": seqlen_q,
            "fixed_split_tokens": cuts,
            "max_seqlen_k": limits.max_seqlen,
            "num_sm_parts": max(self._parts),
            "device": device,
        }
        self._whole: dict[int, DecodePlan] = {}
        for window in spec.windows:
            plan: DecodePlan
            if spec.is_mla:
                plan = MlaDecodePlan.allocate(max_batch_size, window_left=window, **options)
            else:
                plan = XqaDecodePlan.allocate(
                    max_batch_size,
                    num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_dim,
                    window_left=window,
                    kv_dtype=kv_dtype,
                    **options,
                )
            first = next(iter(self._whole.values()), plan)
            scratch = {name: getattr(first, name) for name in ("out_partial", "lse_partial", "semaphores")}
            self._whole[window] = dataclasses.replace(plan, **scratch)
        self._max_batch_size, self._seqlen_q = max_batch_size, seqlen_q
        self._by_prefill = [
            not spec.is_mla
            and spec.head_dim == spec.v_head_dim
            and suits_prefill(
                device,
                size,
                spec.num_kv_heads,
                rows=seqlen_q * (spec.num_q_heads // spec.num_kv_heads),
                head_dim=spec.head_dim,
                page_size=spec.page_size,
                dtype=spec.dtype,
                kv_dtype=kv_dtype,
                fixed_split_tokens=cuts,
            )
            for size in range(max_batch_size + 1)
        ]
        self._prefill: dict[int, FmhaPlan] = {}
        if self._by_prefill[-1]:
            self._cu_seqlens_q = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device) * seqlen_q
            self._prefill = _fmha_plans(spec, max_batch_size * seqlen_q, max_batch_size, spec.windows, device)

    def views(self, batch_size: int) -> dict[int, DecodePlan]:
        """A plan per window, for `batch_size` requests: views of the same memory whatever the size.

        A plan has as many shares as suit its own batch, not the largest.
        """
        if batch_size > self._max_batch_size:
            raise ValueError(f"attnops: {batch_size} requests, the plans were allocated for {self._max_batch_size}")
        views: dict[int, DecodePlan] = {
            window: dataclasses.replace(
                plan,
                batch_size=batch_size,
                tile_scheduler_metadata=plan.tile_scheduler_metadata[: self._parts[batch_size]],
                num_splits=plan.num_splits[: batch_size + 1],
            )
            for window, plan in self._whole.items()
        }
        if self._by_prefill[batch_size]:
            for window, plan in views.items():
                assert isinstance(plan, XqaDecodePlan)
                prefill = _tiles_of(self._prefill[window], batch_size, batch_size * self._seqlen_q)
                begins = self._cu_seqlens_q[: batch_size + 1]
                views[window] = dataclasses.replace(plan, prefill=prefill, cu_seqlens_q=begins)
        return views


def _fmha_plans(
    spec: AttentionSpec, max_num_tokens: int, max_batch_size: int, windows: tuple[int, ...], device: torch.device
) -> dict[int, FmhaPlan]:
    """One per window, over one scratch: one call at a time."""
    plans = {
        window: FmhaPlan.allocate(
            max_num_tokens,
            max_batch_size,
            causal=spec.attn_type is AttentionType.DECODER,
            window_left=window,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=max(spec.head_dim, spec.v_head_dim),
            split_keys=not spec.deterministic,
            device=device,
        )
        for window in windows
    }
    partial = next(iter(plans.values())).partial
    return {window: dataclasses.replace(plan, partial=partial) for window, plan in plans.items()}


def _tiles_of(plan: FmhaPlan, batch_size: int, num_tokens: int) -> FmhaPlan:
    """The plan with as many tiles as a step of this shape can have, whatever its lengths."""
    return dataclasses.replace(plan, tile_order=plan.tile_order[: -(-num_tokens // plan.tile_q) + batch_size])


class FmhaPlans:
    """Plans of `fmha_paged` and `fmha_varlen`, one per window of the model, for every shape of a step up to the limits.

    Args:
        max_batch_size: Of any plan; None: that of the limits.
        windows: None: those of the model.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device,
        *,
        max_batch_size: int | None = None,
        windows: tuple[int, ...] | None = None,
    ) -> None:
        size = limits.max_batch_size if max_batch_size is None else max_batch_size
        windows = spec.windows if windows is None else windows
        self._whole = _fmha_plans(spec, limits.max_num_tokens, size, windows, device)
        self._spec, self._limits, self._device, self._max_batch_size = spec, limits, device, size
        self._decode: dict[DecodeChunks, DecodePlans] = {}  # by tokens of a request, where they are few, or of a chunk
        self._chunks: Tensor | None = None  # memory of the chunks of any step

    def views(self, batch_size: int, num_tokens: int, max_seqlen_q: int = 0) -> dict[int, FmhaPlan]:
        """A plan per window, of as many tiles as a step of this shape can have, whatever its lengths.

        `max_seqlen_q`: No request brings more tokens; 0: unknown. A step of few may go by `xqa_decode`'s kernels.
        """
        way = self.decode_way(batch_size, num_tokens, max_seqlen_q)
        few, chunks = (None, None) if way is None else self._decode_plan(batch_size, way)
        views = {}
        for window, plan in self._whole.items():
            views[window] = _tiles_of(plan, batch_size, num_tokens)
            if window < 0:
                views[window] = dataclasses.replace(views[window], decode=few, chunks=chunks)
        return views

    def decode_way(self, batch_size: int, num_tokens: int, max_seqlen_q: int) -> DecodeChunks | None:
        """What the plans of `xqa_decode` in such a step's views are for: its requests, or chunks of them. None: without
        them.

        Steps of one shape have the same views where this is the same.
        """
        spec = self._spec
        if -1 not in self._whole or spec.is_mla or spec.attn_type is not AttentionType.DECODER or not batch_size:
            return None
        if spec.head_dim != spec.v_head_dim:
            return None
        options = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, not spec.deterministic, self._device)
        tokens = tokens_for_decode(max_seqlen_q, *options)
        return DecodeChunks(tokens, 0) if tokens else chunks_for_decode(num_tokens, batch_size, max_seqlen_q, *options)

    def _decode_plan(self, batch_size: int, way: DecodeChunks) -> tuple[XqaDecodePlan | None, ChunkTensors | None]:
        most = self._max_batch_size * (MOST_CHUNKS_FOR_EACH if way.number else 1)
        kind = DecodeChunks(way.tokens, min(way.number, 1))
        if kind not in self._decode:
            self._decode[kind] = DecodePlans(self._spec, self._limits, most, way.tokens, self._device)
        plan = self._decode[kind].views(way.number or batch_size).get(-1)
        assert plan is None or isinstance(plan, XqaDecodePlan)
        if not way.number:
            return plan, None
        if self._chunks is None:
            self._chunks = torch.zeros(3 * (most + 1), dtype=torch.int32, device=self._device)
        return plan, ChunkTensors.within(self._chunks, way.number, batch_size)


class BlockBuffers:
    """The memory and the plans of `TokenBlocks`, for every shape up to the limits.

    Args:
        width: Tokens of a block. By default as many as fill the rows of one work of `mla_decode`; with more heads than
            rows, a token is a block. Models with a sliding window always get this, whatever was asked. The rows before
            a request's first token would look further back than any token's window, where pages may be another's.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device, width: int | None = None) -> None:
        widest = width or max(1, MLA_ROWS_PER_WORK // spec.num_q_heads)
        self.width = 1 if spec.sliding_window_size >= 0 else widest
        tokens, width = limits.max_num_tokens, self.width
        most = tokens // width + limits.max_batch_size
        self.plans = DecodePlans(spec, limits, most, width, device)
        self.cache_seqlens = torch.zeros(most, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(most, limits.max_pages(spec.page_size), dtype=torch.int32, device=device)
        windowed = spec.sliding_window_size >= 0 and not spec.is_mla  # MLA has no window pool
        self.window_page_table = torch.zeros_like(self.page_table) if windowed else self.page_table
        self.token_of_row = torch.zeros(most * width, dtype=torch.int64, device=device)
        self.row_of_token = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.index = torch.arange(max(most, tokens, width), device=device)

    def blocks(self, batch_size: int, num_tokens: int) -> TokenBlocks:
        count = num_tokens // self.width + batch_size if self.width > 1 else num_tokens
        return TokenBlocks(
            width=self.width,
            num_blocks=count,
            cache_seqlens=self.cache_seqlens[:count],
            page_table=self.page_table[:count],
            window_page_table=self.window_page_table[:count],
            token_of_row=self.token_of_row[: count * self.width],
            row_of_token=self.row_of_token[:num_tokens],
            index=self.index,
        )


@dataclasses.dataclass(frozen=True)
class TokenBlocks:
    """A ragged step's tokens in blocks of `width`, so that a decode op takes each block for a request.

    A request's new tokens are cut from the end, where decode ops align queries and keys. Its last block holds the last
    `width` of them. The first block holds what remains, behind rows that no token owns. A block sees the keys up to its
    own last token and has its request's pages.

    Attributes:
        cache_seqlens: int32 ``[num_blocks]``; 0 for blocks that the step does not need.
        page_table: int32 ``[num_blocks, max_pages]``.
        window_page_table: Of the sliding-window pool, where the step has one; unused otherwise.
        token_of_row: int64 ``[num_blocks * width]``: where a block's row takes its query from.
        row_of_token: int64 ``[num_tokens]``: where a token finds its result.
        index: int64, 0, 1, 2, ...
    """

    width: int
    num_blocks: int
    cache_seqlens: Tensor
    page_table: Tensor
    window_page_table: Tensor
    token_of_row: Tensor
    row_of_token: Tensor
    index: Tensor

    def build(self, batch: AttentionBatch, step: PagedStep) -> None:
        """Device work, recorded in a graph."""
        assert step.cu_seqlens_q is not None and step.page_table is not None and batch.extend_seq_lens is not None
        width, first_token, last = self.width, step.cu_seqlens_q.long(), batch.batch_size - 1
        lens = batch.extend_seq_lens.long()
        end = torch.div(lens + (width - 1), width, rounding_mode="floor").cumsum(0)  # of each request's blocks
        block, token = self.index[: self.num_blocks], self.index[: batch.num_tokens]

        request = torch.searchsorted(end, block, right=True).clamp(max=last)
        end_row = lens[request] - (end[request] - 1 - block) * width  # the block ends before this new token
        prefix = batch.cache_seqlens.long() - lens
        self.cache_seqlens.copy_(torch.where(block < end[-1], prefix[request] + end_row, 0))
        torch.index_select(step.page_table, 0, request, out=self.page_table)
        if step.window_out_cache_loc is not None:
            assert step.window_page_table is not None
            torch.index_select(step.window_page_table, 0, request, out=self.window_page_table)
        if width == 1:  # a token is a block: both are in the same order
            return
        rows = (first_token[request] + end_row - width).unsqueeze(1) + self.index[:width]
        self.token_of_row.copy_(rows.clamp(0, batch.num_tokens - 1).flatten())
        owner = (torch.searchsorted(first_token, token, right=True) - 1).clamp(0, last)
        from_end = (first_token[owner] + lens[owner] - 1 - token).clamp(min=0)  # padding tokens find any row
        block_of_token = end[owner] - 1 - torch.div(from_end, width, rounding_mode="floor")
        row = block_of_token * width + (width - 1 - from_end % width)
        self.row_of_token.copy_(row.clamp(min=0))  # a step of padding alone has no block at all

    def gather(self, rows: Tensor) -> Tensor:
        """``[num_blocks * width, ...]`` of the step's ``[num_tokens, ...]``."""
        return rows if self.width == 1 else rows.index_select(0, self.token_of_row)

    def results_for(self, out: Tensor) -> Tensor:
        """Where the blocks write: `out` itself where blocks are its tokens."""
        return out if self.width == 1 else out.new_empty(self.num_blocks * self.width, *out.shape[1:])

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """From the blocks' results to the tokens'."""
        if rows is not out:
            torch.index_select(rows, 0, self.row_of_token, out=out)
