"""The CPU kernels as a backend, under the name that SGLang's users know; any instruction set from AVX2 on serves it.

Decode, and verify or draft extend with as many tokens for every request: `xqa_decode`, or `mla_decode`. Ragged steps,
and all steps where K and V have different head dims: `fmha_paged`; with MLA, blocks of tokens that `mla_decode` takes
for requests. An encoder: `fmha_varlen`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops.backends import attend
from attnops.backends.base import AttentionBackend, LayerCall, sees_past_window
from attnops.backends.capability import DECODER_MODES, FLOATS, Capability, HeadDims
from attnops.backends.draft_windows import DecodeWindows, WindowStep
from attnops.backends.fmha_steps import FmhaStep, FmhaSteps
from attnops.backends.fp4_steps import Fp4Steps
from attnops.backends.local_steps import LocalSteps
from attnops.backends.mla_prefill import MlaPrefill
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import store_kv, store_mla
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.ops.fp4_kv import FP4
from attnops.plan_buffers import BlockBuffers, DecodePlan, DecodePlans, TokenBlocks
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

StepKey = tuple[int, int, int, int, int | None, bool]


@dataclass(frozen=True)
class CpuStep:
    """What one shape of a step needs: plans of a decode op, one per window of the model, or fmha's views.

    Attributes:
        windows: Of a draft step: what layers with a window have in place of page table, lengths and mask.
    """

    paged: PagedStep
    decode: dict[int, DecodePlan]
    fmha: FmhaStep | None
    blocks: TokenBlocks | None
    windows: WindowStep | None = None


@register_attention_backend("intel_amx")
class IntelAMXAttnBackend(AttentionBackend):
    """Every mode on the CPU."""

    capability = Capability(
        devices=frozenset({"cpu"}),
        modes=DECODER_MODES,
        attn_types=frozenset(AttentionType),
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.uint8, FP4}),
        head_dims=HeadDims(32, 256, 8, equal=False),
        mla=True,
        sliding_window=True,
        swa_pool=True,
        logit_cap=True,
        sinks=True,
        tree_mask=True,
        draft_trees=True,
        draft_stages=True,
        draft_windows=True,
        multi_item=True,
        local_attention=True,
        deterministic=True,
        cuda_graph=True,
    )

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._fp4 = None
        if spec.cache_dtype == FP4:
            self._fp4 = Fp4Steps(self.name, spec, limits, self.device)
            self._mla = None
            return
        self._buffers = PagedBuffers(spec, limits, self.device)
        self._decode_plans: dict[int, DecodePlans] = {}
        self._decodes = spec.is_mla or spec.head_dim == spec.v_head_dim
        self._decodes &= spec.attn_type is not AttentionType.ENCODER_ONLY
        if self._decodes:
            for seqlen_q in {1, limits.max_tokens_per_request}:
                self._plans_for(seqlen_q)
        self._blocks = BlockBuffers(spec, limits, self.device) if spec.is_mla else None
        self._mla = None if spec.up_head_dims is None else MlaPrefill(spec, limits, self.device)
        self._fmha = None if spec.is_mla else FmhaSteps(spec, limits, self.device, self._buffers)
        self._windows = DecodeWindows(spec, limits, self.device)
        self._local: LocalSteps | None = None
        if spec.attention_chunk_size:
            assert self._fmha is not None, "AttentionSpec has checked"
            self._local = LocalSteps(spec, limits, self.device, self._buffers, self._fmha)
        self._steps: dict[StepKey, CpuStep] = {}
        self._prepared: PreparedStep[CpuStep] = PreparedStep()

    @property
    def fault_report(self) -> Tensor | None:
        return (self._buffers if self._fp4 is None else self._fp4.buffers).report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        if self._fp4 is not None:
            self._fp4.out_graph(batch)
            return
        self.limits.check(batch)
        paged = self._buffers.step(batch)
        windowed = paged.window_out_cache_loc is not None
        drafts = (batch.draft_steps, batch.draft_step)
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request, *drafts, windowed)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = self._make(batch, paged)
        self._prepared.begin(batch, self._steps[key])

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        if self._fp4 is None:
            self._in_graph(batch)
        else:
            self._fp4.in_graph(batch)

    @in_one_thread
    def _in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0:
            return
        self._buffers.build(step.paged, batch)
        if self._mla is not None:
            self._mla.begin()
        if self._local is not None:
            self._local.build(self._local.step(batch, step.paged), batch)
        cache_seqlens = batch.cache_seqlens
        if step.blocks is not None:
            step.blocks.build(batch, step.paged)
            cache_seqlens = step.blocks.cache_seqlens
        self._windows.plan(step.windows, step.decode, batch, cache_seqlens, self._buffers.report)
        if step.fmha is not None:
            assert self._fmha is not None
            self._fmha.plan(step.fmha, batch)

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        return self._mla is None or self._mla.takes_absorbed(batch)

    def attend(self, call: LayerCall) -> None:
        if self._fp4 is None:
            self._attend(call)
        else:
            self._fp4.attend(call)

    @in_one_thread
    def _attend(self, call: LayerCall) -> None:
        step, report = self._prepared.of(call.batch), self._buffers.report
        q, k, v, layer, batch, out = call.q, call.k, call.v, call.layer, call.batch, call.out
        if self._local is not None and layer.attention_chunk_size:
            self._local.attend(call, self._local.step(batch, step.paged))
            return
        if self._mla is not None and not layer.is_absorbed(q):
            self._mla.attend(call, step.paged, report)
            return
        if self.spec.is_mla:
            if call.save_kv_cache and k is not None:
                store_mla(layer, batch, k, call.k_rope, report)
            shared = (step.paged, step.decode, step.blocks, out, report)
            attend.mla_decode(q, call.q_rope, layer, batch, *shared, step.windows)
            return
        if step.fmha is not None:
            assert self._fmha is not None
            self._fmha.attend(call, step.fmha)
            return
        if call.q_rope is not None or call.k_rope is not None:
            raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
        if call.save_kv_cache and k is not None:
            if v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, k, v, report)
        attend.xqa_decode(q, layer, batch, step.paged, step.decode, out, report, step.windows)

    def _make(self, batch: AttentionBatch, paged: PagedStep) -> CpuStep:
        """The views of one shape. Uniform steps are decode, others fmha, or blocks where there is MLA."""
        if batch.is_uniform and self._decodes and not sees_past_window(self.spec, batch):
            plans = self._plans_for(batch.tokens_per_request).views(batch.batch_size)
            return CpuStep(paged, plans, None, None, self._windows.views(batch, plans))
        if self._blocks is not None:
            blocks = self._blocks.blocks(batch.batch_size, batch.num_tokens)
            return CpuStep(paged, self._blocks.plans.views(blocks.num_blocks), None, blocks)
        assert self._fmha is not None
        return CpuStep(paged, {}, self._fmha.step(batch, paged), None)

    def _plans_for(self, seqlen_q: int) -> DecodePlans:
        """Plans exist for one token and for the limit; any other number gets its own at its first step."""
        if seqlen_q not in self._decode_plans:
            size = self.limits.max_batch_size
            self._decode_plans[seqlen_q] = DecodePlans(self.spec, self.limits, size, seqlen_q, self.device)
        return self._decode_plans[seqlen_q]
