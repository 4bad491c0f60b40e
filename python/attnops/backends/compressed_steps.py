"""What a step of DeepSeek-V4 derives from its batch, at addresses that never change: lists of rows and entries, plans.

A token at position p sees the rows of its window, and the entries whose groups end at p or before. Tokens are requests
of one token to the decode op: their lists have nothing in common that it could share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedStep
from attnops.metadata.sparse_plan import SparseMlaPlan
from attnops.ops.indexer import SCRATCH_BYTES
from attnops.plan_buffers import MLA_INVARIANT_SPLIT_TOKENS
from attnops.types import AttentionBatch, AttentionSpec, Limits

PART_TOKENS = 1024  # of a ragged step, that are planned together
INVARIANT_PART_TOKENS = 128  # the same where each token has room for its own partial results
LIST_BYTES = 64 << 20  # of lists of all entries


@dataclass(frozen=True)
class Part:
    """Tokens that are planned together.

    Attributes:
        tokens: Which of the step's.
        plans: By ratio.
        lists: By ratio, int32 ``[tokens, entries]``: slots of entries. Of ratio 4 the layers write them.
        requests: Rows of `index_table`, each with as many tokens.
        index_table: int32 ``[requests, max_pages]``, for the indexer; None: there is no ratio 4.
        gathers: `index_table` is one row per token, gathered from the step's page table.
        scratch: float32 of the indexer, one dimension.
    """

    tokens: slice
    plans: dict[int, SparseMlaPlan]
    lists: dict[int, Tensor]
    requests: int
    index_table: Tensor | None
    gathers: bool
    scratch: Tensor | None


@dataclass(frozen=True)
class CompressedStep:
    """Views for one shape of a step; what they hold is written by `CompressedSteps.build`, inside the graph.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``, of uniform steps, too.
        states: int32 ``[B]``: rows of states; -1: the request is padding, or brings nothing.
        lengths: int32 ``[B]``: `cache_seqlens`, 0 of padding.
        positions, rows: int32 ``[T]``: tokens up to a token, itself included; its request. 0 of padding.
        windows: int32 ``[T, window]``: slots of window rows, oldest first, then -1.
        window_lengths: int32 ``[T]``.
        entries: By ratio, int32 ``[B + 1]``: `ops.compress_plan`.
        entry_seqlens, entry_lengths: By ratio, int32 ``[T]``: entries that a token sees, and attends to.
    """

    paged: PagedStep
    cu_seqlens_q: Tensor
    states: Tensor
    lengths: Tensor
    positions: Tensor
    rows: Tensor
    windows: Tensor
    window_lengths: Tensor
    entries: dict[int, Tensor]
    entry_seqlens: dict[int, Tensor]
    entry_lengths: dict[int, Tensor]
    parts: list[Part]


class CompressedSteps:
    """The memory of `CompressedStep`, for every shape up to the limits."""

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        self._spec, self._page_size = spec, spec.page_size
        self._window = spec.sliding_window_size + 1
        self._ratios = sorted(set(spec.compress_ratios) - {0})
        size, tokens, pages = limits.max_batch_size, limits.max_num_tokens, limits.max_pages(spec.page_size)
        uniform = size * limits.max_tokens_per_request

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        entries = {ratio: pages * (spec.page_size // ratio) for ratio in self._ratios}
        self._topk = {r: spec.sparse_topk if r == 4 else entries[r] for r in self._ratios}
        per_part = INVARIANT_PART_TOKENS if spec.deterministic else PART_TOKENS
        if self._ratios:
            per_part = min(per_part, max(1, LIST_BYTES // (4 * max(self._topk.values()))))
        self._part_tokens = max(uniform, min(tokens, per_part))
        self._lengths, self._states, self._cu = ints(size), ints(size), ints(size + 1)
        self._positions, self._rows, self._window_lengths = ints(tokens), ints(tokens), ints(tokens)
        self._windows = ints(tokens, self._window)
        self._entries = {ratio: ints(size + 1) for ratio in self._ratios}
        self._seqlens = {ratio: ints(tokens) for ratio in self._ratios}
        self._entry_lengths = {ratio: ints(tokens) for ratio in self._ratios}
        self._lists = {ratio: ints(self._part_tokens, self._topk[ratio]) for ratio in self._ratios}
        self._columns = torch.arange(max(self._window, *entries.values(), 1), dtype=torch.int32, device=device)
        self._bounds = torch.arange(size + 1, dtype=torch.int32, device=device)
        split = MLA_INVARIANT_SPLIT_TOKENS if spec.deterministic else 0
        self._plans = {
            ratio: SparseMlaPlan.allocate(
                self._part_tokens,
                num_q_heads=spec.num_q_heads,
                topk=self._window,
                extra_topk=self._topk.get(ratio, 0),
                fixed_split_tokens=split,
                device=device,
            )
            for ratio in (0, *self._ratios)
        }
        self._scratch = self._token_table = None
        if 4 in self._ratios:
            floats = min(self._part_tokens * -(-entries[4] // 4) * 4, SCRATCH_BYTES // 4)
            floats = max(floats, 4 * spec.sparse_topk + spec.page_size + 32)  # what a piece needs
            self._scratch = torch.zeros(floats, dtype=torch.float32, device=device)
            self._token_table = ints(self._part_tokens, pages)
        self._steps: dict[tuple[int, int, int, bool], CompressedStep] = {}

    def step(self, batch: AttentionBatch, paged: PagedStep) -> CompressedStep:
        """The views for the batch's shape."""
        windowed = paged.window_out_cache_loc is not None
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request, windowed)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = self._make(batch, paged)
        return self._steps[key]

    def _make(self, batch: AttentionBatch, paged: PagedStep) -> CompressedStep:
        size, tokens = batch.batch_size, batch.num_tokens
        uniform = paged.cu_seqlens_q is None
        limit = self._part_tokens
        slices = [slice(begin, min(begin + limit, tokens)) for begin in range(0, tokens, limit)]
        return CompressedStep(
            paged=paged,
            cu_seqlens_q=self._cu[: size + 1] if uniform else paged.cu_seqlens_q,  # type: ignore[arg-type]
            states=self._states[:size],
            lengths=self._lengths[:size],
            positions=self._positions[:tokens],
            rows=self._rows[:tokens],
            windows=self._windows[:tokens],
            window_lengths=self._window_lengths[:tokens],
            entries={ratio: bounds[: size + 1] for ratio, bounds in self._entries.items()},
            entry_seqlens={ratio: lengths[:tokens] for ratio, lengths in self._seqlens.items()},
            entry_lengths={ratio: lengths[:tokens] for ratio, lengths in self._entry_lengths.items()},
            parts=[self._part(tokens, batch, paged) for tokens in slices],
        )

    def _part(self, tokens: slice, batch: AttentionBatch, paged: PagedStep) -> Part:
        count = tokens.stop - tokens.start
        plans = {
            ratio: dataclasses.replace(plan, batch_size=count, num_splits=plan.num_splits[: count + 1])
            for ratio, plan in self._plans.items()
        }
        # Tokens of one request share the reads of its index keys, unless all must be served alike.
        alone = batch.batch_size == count
        gathers = not alone and (self._spec.deterministic or (not batch.is_uniform and batch.batch_size > 1))
        requests = count if gathers else batch.batch_size
        table = None
        if self._token_table is not None:
            table = self._token_table[:count] if gathers else paged.page_table
        lists = {ratio: lists[:count] for ratio, lists in self._lists.items()}
        return Part(tokens, plans, lists, requests, table, gathers, self._scratch)

    def build(self, step: CompressedStep, batch: AttentionBatch, report: Tensor | None) -> None:
        """Device work, recorded in a graph: fills `step` from what the batch's tensors hold then."""
        size, tokens, cu = batch.batch_size, batch.num_tokens, step.cu_seqlens_q
        if batch.is_uniform:
            torch.mul(self._bounds[: size + 1], batch.tokens_per_request, out=cu)
        if batch.out_cache_loc is None:
            is_padding = cu[1:] <= cu[:-1]
        else:
            first = batch.out_cache_loc[cu[:-1].clamp(max=tokens - 1)]
            is_padding = (cu[1:] <= cu[:-1]) | (first < 0)
        step.states.copy_(batch.req_pool_indices).masked_fill_(is_padding, -1)
        step.lengths.copy_(batch.cache_seqlens).masked_fill_(is_padding, 0)
        lengths = (step.lengths, cu, tokens)
        into: dict[str, Any] = {"seqlens": step.positions, "rows": step.rows, "topk_length": step.window_lengths}
        ops.expand_rows(*lengths, self._window, **into, report=report)
        step.positions.clamp_(min=0)
        self._list_windows(step)
        for ratio in self._ratios:
            ops.compress_plan(batch.cache_seqlens, cu, ratio=ratio, entry_indptr=step.entries[ratio], report=report)
            into = {"seqlens": step.entry_seqlens[ratio], "topk_length": step.entry_lengths[ratio]}
            ops.expand_rows(*lengths, self._topk[ratio], ratio=ratio, rows=step.rows, **into, report=report)
        if len(step.parts) == 1:
            self.build_part(step, step.parts[0], report)

    def _list_windows(self, step: CompressedStep) -> None:
        table, size = step.paged.window_page_table, self._page_size
        assert table is not None
        columns = self._columns[: self._window]
        # Below 0 behind a token's rows: the first of them is at its position less their number.
        position = (step.positions - step.window_lengths).unsqueeze(1) + columns
        at = position.clamp(max=table.shape[1] * size - 1)
        page = table[step.rows.unsqueeze(1), at // size]
        slots = torch.where(page < 0, -1, page * size + at % size)
        step.windows.copy_(torch.where(columns < step.window_lengths.unsqueeze(1), slots, -1))

    def build_part(self, step: CompressedStep, part: Part, report: Tensor | None) -> None:
        """Lists of all entries, and plans, of some of the step's tokens."""
        table, rows = step.paged.page_table, step.rows[part.tokens]
        assert table is not None
        if part.gathers and part.index_table is not None:
            torch.index_select(table, 0, rows, out=part.index_table)
        if 128 in part.lists:
            per_page = self._page_size // 128
            entry = self._columns[: self._topk[128]]
            slots = table[:, entry // per_page] * per_page + entry % per_page
            torch.index_select(slots, 0, rows, out=part.lists[128])
        for ratio, plan in part.plans.items():
            extra = step.entry_lengths[ratio][part.tokens] if ratio else None
            ops.sparse_mla_plan(plan, topk_length=step.window_lengths[part.tokens], extra_topk_length=extra)
