"""Steps through `fmha_paged`, or through `fmha_varlen` where there is no cache: views, plans and calls, composed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.backends import attend
from attnops.backends.base import LayerCall
from attnops.backends.multi_item import hidden_keys_of
from attnops.backends.store import store_kv
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plan_buffers import FmhaPlans
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits


@dataclass(frozen=True)
class FmhaStep:
    """Views for one shape of a step.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``.
        plans: Of each window of the model.
    """

    paged: PagedStep
    cu_seqlens_q: Tensor
    plans: dict[int, FmhaPlan]


class FmhaSteps:
    """Steps of layers with K and V of their own, ragged or uniform: stored, then attended through their pages.

    Args:
        buffers: Of the page tables; they may be shared with others who serve steps of the same backend.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device, buffers: PagedBuffers) -> None:
        self._limits, self._device = limits, device
        self._buffers = buffers
        self._has_cache = spec.attn_type is not AttentionType.ENCODER_ONLY
        self._plans = FmhaPlans(spec, limits, device)
        self._even_bounds: dict[int, Tensor] = {}
        self._steps: dict[tuple[int, int, int, int, bool], FmhaStep] = {}
        self._spec = spec
        self._hidden_keys: Tensor | None = None  # of a step with items

    def step(self, batch: AttentionBatch, paged: PagedStep) -> FmhaStep:
        """The views of the batch's shape: host work.

        Raises:
            NotImplementedError: the batch is a draft step, whose tree is over more than the new tokens.
        """
        if batch.draft_steps:
            raise NotImplementedError("attnops: a batch with draft_steps needs layers with K and V of one head dim")
        most = batch.max_seqlen_q
        windowed = paged.window_out_cache_loc is not None
        few = self._plans.decode_tokens(most)  # not `most` itself: a prompt's length would make every step a new one
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request, few, windowed)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            bounds = self.bounds(batch, paged)
            self._steps[key] = FmhaStep(paged, bounds, self._plans.views(batch.batch_size, batch.num_tokens, most))
        return self._steps[key]

    def plan(self, step: FmhaStep, batch: AttentionBatch) -> None:
        """The plans of a step whose page tables are built: device work.

        Raises:
            NotImplementedError: the batch has items, and the model windows or chunks.
        """
        self._hidden_keys = None
        if batch.multi_item is not None:
            if self._spec.sliding_window_size >= 0 or self._spec.attention_chunk_size > 0:
                raise NotImplementedError("attnops: multi-item scoring knows no windows or chunks")
            self._hidden_keys = hidden_keys_of(batch, step.cu_seqlens_q)
        keys = batch.cache_seqlens if self._has_cache else None
        for plan in step.plans.values():
            ops.fmha_plan(plan, step.cu_seqlens_q, cache_seqlens=keys)

    def attend(self, call: LayerCall, step: FmhaStep) -> None:
        """Serves a layer.

        Raises:
            ValueError: the call lacks k or v, or has an MLA layer's arguments.
        """
        layer, batch, report = call.layer, call.batch, self._buffers.report
        if call.q_rope is not None or call.k_rope is not None:
            raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            if call.k is None or call.v is None:
                raise ValueError("attnops: an encoder's layer needs k and v")
            attend.fmha_varlen(call.q, call.k, call.v, layer, step.cu_seqlens_q, step.plans, call.out, report)
            return
        if call.save_kv_cache and call.k is not None:
            if call.v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, call.k, call.v, report)
        attend.fmha_paged(
            call.q, layer, batch, step.paged, step.cu_seqlens_q, step.plans, call.out, report, self._hidden_keys
        )

    def bounds(self, batch: AttentionBatch, paged: PagedStep) -> Tensor:
        """int32 ``[B + 1]``: where the queries of each request begin."""
        if paged.cu_seqlens_q is not None:
            return paged.cu_seqlens_q
        return self._bounds_of(batch.tokens_per_request)[: batch.batch_size + 1]

    def _bounds_of(self, seqlen_q: int) -> Tensor:
        """Where requests begin that bring the same number of tokens each."""
        if seqlen_q not in self._even_bounds:
            size = self._limits.max_batch_size
            bounds = torch.arange(size + 1, dtype=torch.int32, device=self._device) * seqlen_q
            self._even_bounds[seqlen_q] = bounds
        return self._even_bounds[seqlen_q]
