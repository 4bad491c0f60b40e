"""What a step derives from its batch, at addresses that never change: page tables, cumulative lengths, slots.

Allocated once per backend. The views for one shape of a step are made once and never change. So a graph that recorded
them can be replayed with any lengths, tables and requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.ops import portable
from attnops.pools import reason_against
from attnops.report import is_checked, new_report
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits, TokenPool, device_of

MAX_CACHED_STEPS = 1024  # shapes whose views are kept; making them again gives the same addresses


@dataclass(frozen=True)
class PagedStep:
    """Views for one shape of a step; what they hold is written by `PagedBuffers.build`, inside the graph.

    Attributes:
        page_table: int32 ``[B, max_pages]``.
        window_page_table: Of the sliding-window pool; `page_table` itself where there is no such pool.
        window_out_cache_loc: int64 ``[num_tokens]``: `out_cache_loc` in the sliding-window pool; None: as it is.
        cu_seqlens_q: int32 ``[B + 1]``: of ragged steps, else None.
    """

    page_table: Tensor | None
    window_page_table: Tensor | None
    window_out_cache_loc: Tensor | None
    cu_seqlens_q: Tensor | None


class PagedBuffers:
    """The memory of `PagedStep`, for every shape up to the limits.

    Attributes:
        report: The checked mode's buffer, int32 ``[8]``; None unless ATTNOPS_CHECK=1 was set at the start.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        self._spec, self._device = spec, device_of(device)
        self._known_pool: tuple[TokenPool, int] | None = None
        portable.serve(torch.device(device))
        self._page_size = spec.page_size
        size = limits.max_batch_size
        has_cache = spec.attn_type is not AttentionType.ENCODER_ONLY
        shape = (size, limits.max_pages(spec.page_size) if has_cache else 0)
        windowed = has_cache and spec.sliding_window_size >= 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._has_cache = has_cache
        self._page_table = zeros(*shape)
        self._window_page_table = zeros(*shape) if windowed else self._page_table
        self._window_out_cache_loc = zeros(limits.max_num_tokens if windowed else 0, dtype=torch.int64)
        self._cu_seqlens = zeros(size + 1)
        self.report = new_report(device) if is_checked() else None
        self._steps: dict[tuple[int, int, bool, bool], PagedStep] = {}

    def step(self, batch: AttentionBatch) -> PagedStep:
        """The views for the batch's shape; the same objects whenever the shape is the same.

        Raises:
            ValueError: the batch's pool is not one of the model that the backend was built for.
        """
        self._check_pool(batch.token_to_kv_pool)
        key = (batch.batch_size, batch.num_tokens, batch.is_uniform, self._translates(batch))
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = self._make(*key)
        return self._steps[key]

    def _check_pool(self, pool: TokenPool | None) -> None:
        """Asked once per pool, and again when buffers of it were replaced."""
        if pool is None or not self._has_cache:
            return
        known = self._known_pool
        if known is not None and known[0] is pool and known[1] == pool.buffers_version:
            return
        if reason := reason_against(pool, self._spec, self._device):
            raise ValueError(f"attnops: the batch's pool does not fit the backend's AttentionSpec: {reason}")
        self._known_pool = (pool, pool.buffers_version)

    def _make(self, batch_size: int, num_tokens: int, uniform: bool, translates: bool) -> PagedStep:
        table = self._page_table[:batch_size]
        return PagedStep(
            page_table=table if self._has_cache else None,
            window_page_table=self._window_page_table[:batch_size] if translates else table,
            window_out_cache_loc=self._window_out_cache_loc[:num_tokens] if translates else None,
            cu_seqlens_q=None if uniform else self._cu_seqlens[: batch_size + 1],
        )

    def build(self, step: PagedStep, batch: AttentionBatch) -> None:
        """Device work, recorded in a graph: fills `step` from what the batch's tensors hold then."""
        if step.cu_seqlens_q is not None:
            if batch.extend_seq_lens is None:  # an idle step, which may leave them out
                step.cu_seqlens_q.zero_()
            else:
                ops.build_cu_seqlens(batch.extend_seq_lens, cu_seqlens=step.cu_seqlens_q)
        if step.page_table is None:
            return
        if batch.req_to_token is None or batch.token_to_kv_pool is None:
            raise ValueError("attnops: a batch with a cache needs req_to_token and token_to_kv_pool")
        self._build_table(step.page_table, batch, None)
        if step.window_out_cache_loc is not None:
            assert step.window_page_table is not None and batch.token_to_kv_pool.slot_map is not None
            self._build_table(step.window_page_table, batch, batch.token_to_kv_pool.slot_map)
            if batch.out_cache_loc is not None:
                ops.translate_slots(
                    batch.out_cache_loc,
                    batch.token_to_kv_pool.slot_map,
                    out=step.window_out_cache_loc,
                    report=self.report,
                )

    def _build_table(self, table: Tensor, batch: AttentionBatch, slot_map: Tensor | None) -> None:
        assert batch.req_to_token is not None
        ops.build_page_table(
            batch.req_to_token,
            batch.req_pool_indices,
            batch.cache_seqlens,
            self._page_size,
            page_table=table,
            slot_map=slot_map,
            report=self.report,
        )

    def _translates(self, batch: AttentionBatch) -> bool:
        pool = batch.token_to_kv_pool
        if pool is None or pool.slot_map is None:
            return False
        if self._window_page_table is self._page_table:
            raise ValueError("attnops: a sliding-window pool needs AttentionSpec.sliding_window_size")
        return True
