"""Steps of layers that attend locally: chunks of requests are requests of their own to `fmha_paged`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import LayerCall
from attnops.backends.fmha_steps import FmhaSteps
from attnops.backends.store import FP8, heads, store_kv
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.ops.local_batches import max_local_batches
from attnops.plan_buffers import FmhaPlans
from attnops.types import AttentionBatch, AttentionSpec, Limits


@dataclass(frozen=True)
class LocalAttentionMetadata:
    """Views for one shape of a step; `ops.build_local_batches` fills them.

    Attributes:
        local_query_start_loc: int32 ``[V + 1]``.
        local_seqused_k: int32 ``[V]``.
        local_block_table: int32 ``[V, chunk_size / page_size]``.
        cu_seqlens_q: int32 ``[B + 1]``, of the requests themselves.
    """

    paged: PagedStep
    cu_seqlens_q: Tensor
    local_query_start_loc: Tensor
    local_seqused_k: Tensor
    local_block_table: Tensor
    plan: FmhaPlan


class LocalSteps:
    """Serves the layers with `attention_chunk_size` of any step, beside whatever serves the others.

    Args:
        fmha: Of the same backend: it knows where requests begin.
    """

    def __init__(
        self, spec: AttentionSpec, limits: Limits, device: torch.device, buffers: PagedBuffers, fmha: FmhaSteps
    ) -> None:
        self._page_size, self._chunk_size = spec.page_size, spec.attention_chunk_size
        self._buffers, self._fmha = buffers, fmha
        most = max_local_batches(limits.max_num_tokens, limits.max_batch_size, self._chunk_size)
        self.max_requests = most  # that a step's chunks make

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._bounds, self._seqlens = zeros(most + 1), zeros(most)
        self._table = zeros(most, self._chunk_size // self._page_size)
        self._plans = FmhaPlans(spec, limits, device, max_batch_size=most, windows=(-1,))
        self._steps: dict[tuple[int, int, int], LocalAttentionMetadata] = {}

    def step(self, batch: AttentionBatch, paged: PagedStep) -> LocalAttentionMetadata:
        """The views of the batch's shape: host work."""
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            count = max_local_batches(batch.num_tokens, batch.batch_size, self._chunk_size)
            self._steps[key] = LocalAttentionMetadata(
                paged=paged,
                cu_seqlens_q=self._fmha.bounds(batch, paged),
                local_query_start_loc=self._bounds[: count + 1],
                local_seqused_k=self._seqlens[:count],
                local_block_table=self._table[:count],
                plan=self._plans.views(count, batch.num_tokens)[-1],
            )
        return self._steps[key]

    def build(self, step: LocalAttentionMetadata, batch: AttentionBatch) -> None:
        """The virtual requests and their plan, once the page tables are built: device work."""
        assert step.paged.page_table is not None
        ops.build_local_batches(
            step.cu_seqlens_q,
            batch.cache_seqlens,
            step.paged.page_table,
            self._page_size,
            self._chunk_size,
            local_cu_seqlens_q=step.local_query_start_loc,
            local_cache_seqlens=step.local_seqused_k,
            local_page_table=step.local_block_table,
        )
        ops.fmha_plan(step.plan, step.local_query_start_loc, cache_seqlens=step.local_seqused_k)

    def attend(self, call: LayerCall, step: LocalAttentionMetadata) -> None:
        """Serves a layer.

        Raises:
            NotImplementedError: the step has a tree mask, whose bits cross chunks.
            ValueError: the call lacks v.
        """
        layer, batch, report = call.layer, call.batch, self._buffers.report
        if batch.tree_mask is not None:
            raise NotImplementedError("attnops: a tree mask and attention_chunk_size exclude each other: verify chains")
        if call.save_kv_cache and call.k is not None:
            if call.v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, call.k, call.v, report)
        pool = batch.token_to_kv_pool
        assert pool is not None, "PagedBuffers.build has checked"
        k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if pool.dtype in FP8 else (None, None)
        ops.fmha_paged(
            heads("q", call.q, layer.num_heads, layer.head_dim),
            k_pages,
            v_pages,
            step.local_block_table,
            step.local_seqused_k,
            step.local_query_start_loc,
            step.plan,
            softmax_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=layer.sinks,
            out=heads("out", call.out, layer.num_heads, layer.v_head_dim),
            report=report,
            k_scale=k_scale,
            v_scale=v_scale,
        )
