"""Steps through `fmha_paged`: views, plans and calls, composed.

`fmha_varlen` serves encoders, and prompts that nobody has begun (`AttentionBatch.max_prefix_tokens` is 0): their k and
v are at hand. It needs no page table, and is the faster one over pages that come row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.backends import attend
from attnops.backends.base import LayerCall
from attnops.backends.cascade import Cascade, CascadeStep
from attnops.backends.draft_stages import DraftStages, DraftStep
from attnops.backends.multi_item import hidden_keys_of
from attnops.backends.store import store_kv
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.metadata.fmha_plan import DecodeChunks, FmhaPlan
from attnops.plan_buffers import FmhaPlans
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits


@dataclass(frozen=True)
class FmhaStep:
    """Views for one shape of a step.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``.
        plans: Of each window of the model.
        parts: What the step's two parts need, if it has two.
        drafts: What a draft step's two stages need, by window of the model; it has no other plans.
    """

    paged: PagedStep
    cu_seqlens_q: Tensor
    plans: dict[int, FmhaPlan]
    parts: CascadeStep | None = None
    drafts: dict[int, DraftStep] | None = None


class FmhaSteps:
    """Steps of layers with K and V of their own, ragged or uniform: stored, then attended through their pages.

    Args:
        buffers: Of the page tables; they may be shared with others who serve steps of the same backend.
        cascade: Ragged steps attend in two parts (`backends/cascade.py`).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device,
        buffers: PagedBuffers,
        cascade: bool = False,
    ) -> None:
        self._limits, self._device = limits, device
        self._buffers = buffers
        self._has_cache = spec.attn_type is not AttentionType.ENCODER_ONLY
        self._plans = FmhaPlans(spec, limits, device)
        self._even_bounds: dict[int, Tensor] = {}
        self._steps: dict[tuple[int | DecodeChunks | None, ...], FmhaStep] = {}
        self._stages: DraftStages | None = None  # of draft steps, made at the first one
        self._spec = spec
        self._cascade = Cascade(spec, limits, device) if cascade else None
        self._hidden_keys: Tensor | None = None  # of a step with items

    def step(self, batch: AttentionBatch, paged: PagedStep) -> FmhaStep:
        """The views of the batch's shape: host work.

        Raises:
            NotImplementedError: the batch is a draft step, and the model has chunks.
            ValueError: the batch is a draft step without `draft_step`, and the model has windows.
        """
        most = batch.max_seqlen_q
        windowed = paged.window_out_cache_loc is not None
        # Not `most` itself: a prompt's length would make every step a new one.
        few = self._plans.decode_way(batch.batch_size, batch.num_tokens, most)
        whole = few is not None and few.number == 0  # decode's kernels take requests as they are, not in chunks
        cascade = None if whole or not self._has_two_parts(batch) else self._cascade
        tokens, drafts = batch.tokens_per_request, batch.draft_steps
        draft = (drafts, batch.draft_step)
        key = (batch.batch_size, batch.num_tokens, tokens, *draft, few, windowed, cascade is not None)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            if drafts:
                bounds = self.bounds(batch, paged)
                self._steps[key] = FmhaStep(paged, bounds, {}, drafts=self._draft_stages().views(batch, bounds))
                return self._steps[key]
            plans = self._plans.views(batch.batch_size, batch.num_tokens, most)
            parts = None if cascade is None else cascade.views(batch)
            self._steps[key] = FmhaStep(paged, self.bounds(batch, paged), plans, parts)
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
        if step.drafts is not None:
            self._draft_stages().plan(step.drafts, batch, self._buffers.report)
            return
        keys = batch.cache_seqlens if self._has_cache else None
        for plan in step.plans.values():
            ops.fmha_plan(plan, step.cu_seqlens_q, cache_seqlens=keys)
        if step.parts is not None:
            assert self._cascade is not None
            self._cascade.plan(step.parts, batch, step.cu_seqlens_q)

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
            if call.k.dtype == call.v.dtype == call.q.dtype == self._spec.cache_dtype:  # as the cache holds them
                if step.parts is not None:
                    assert self._cascade is not None
                    self._cascade.attend(call, step.parts, step.paged, step.cu_seqlens_q, report)
                    return
                if self._has_no_prefix(batch, step):
                    bounds, hidden = step.cu_seqlens_q, self._hidden_keys
                    attend.fmha_varlen(call.q, call.k, call.v, layer, bounds, step.plans, call.out, report, hidden)
                    return
        if step.drafts is not None:
            self._draft_stages().attend(call, step.drafts, step.paged, report)
            return
        attend.fmha_paged(
            call.q, layer, batch, step.paged, step.cu_seqlens_q, step.plans, call.out, report, self._hidden_keys
        )

    def _draft_stages(self) -> DraftStages:
        if self._stages is None:
            if self._spec.attention_chunk_size:
                raise NotImplementedError(
                    "attnops: a batch with draft_steps needs layers without chunks (attention_chunk_size 0), got "
                    f"{self._spec.attention_chunk_size}"
                )
            self._stages = DraftStages(self._spec, self._limits, self._device)
        return self._stages

    def _has_two_parts(self, batch: AttentionBatch) -> bool:
        return not batch.is_uniform and batch.multi_item is None and batch.max_prefix_tokens != 0

    def _has_no_prefix(self, batch: AttentionBatch, step: FmhaStep) -> bool:
        """Whether keys are the step's own tokens, by what the host knows; few go by the kernels of decode."""
        if self._spec.deterministic or batch.is_uniform or batch.max_prefix_tokens != 0:
            return False
        return all(plan.decode is None for plan in step.plans.values())

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
