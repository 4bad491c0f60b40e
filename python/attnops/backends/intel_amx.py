"""The CPU kernels as a backend, under the name that SGLang's users know; any instruction set from AVX2 on serves it.

Decode, and verify or draft extend with as many tokens for every request: `xqa_decode`, or `mla_decode`. Ragged steps:
`fmha_paged`; with MLA, blocks of tokens that `mla_decode` takes for requests. An encoder: `fmha_varlen`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends import attend
from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.capability import DECODER_MODES, FLOATS, Capability, HeadDims
from attnops.backends.prepared import PreparedStep
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import store_kv, store_mla
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import MlaDecodePlan
from attnops.plan_buffers import BlockBuffers, DecodePlan, DecodePlans, TokenBlocks
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

StepKey = tuple[int, int, int, bool]


@dataclass(frozen=True)
class CpuStep:
    """What one shape of a step needs: a plan per window of the model, of the op that serves the shape."""

    paged: PagedStep
    decode: dict[int, DecodePlan]
    fmha: dict[int, FmhaPlan]
    blocks: TokenBlocks | None


@register_attention_backend("intel_amx")
class IntelAMXAttnBackend(AttentionBackend):
    """Every mode on the CPU."""

    capability = Capability(
        devices=frozenset({"cpu"}),
        modes=DECODER_MODES,
        attn_types=frozenset(AttentionType),
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.uint8}),
        head_dims=HeadDims(32, 256, 8),
        mla=True,
        sliding_window=True,
        swa_pool=True,
        logit_cap=True,
        sinks=True,
        tree_mask=True,
        deterministic=True,
        cuda_graph=True,
    )

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._buffers = PagedBuffers(spec, limits, self.device)
        self._decode_plans: dict[int, DecodePlans] = {}
        self._fmha_plans: dict[int, FmhaPlan] = {}
        self._blocks: BlockBuffers | None = None
        self._causal = spec.attn_type is AttentionType.DECODER
        if spec.attn_type is not AttentionType.ENCODER_ONLY:
            for seqlen_q in {1, limits.max_tokens_per_request}:
                self._plans_for(seqlen_q)
        if spec.is_mla:
            self._blocks = BlockBuffers(spec, limits, self.device)
        else:
            size = (limits.max_num_tokens, limits.max_batch_size)
            for window in spec.windows:
                options: dict[str, Any] = {
                    "causal": self._causal,
                    "window_left": window,
                    "num_q_heads": spec.num_q_heads,
                    "num_kv_heads": spec.num_kv_heads,
                    "device": self.device,
                }
                self._fmha_plans[window] = FmhaPlan.allocate(*size, **options)
        self._steps: dict[StepKey, CpuStep] = {}
        self._prepared: PreparedStep[CpuStep] = PreparedStep()

    @property
    def fault_report(self) -> Tensor | None:
        return self._buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        paged = self._buffers.step(batch)
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request, paged.window_out_cache_loc is not None)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = self._make(batch, paged)
        self._prepared.begin(batch, self._steps[key])

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0:
            return
        self._buffers.build(step.paged, batch)
        cache_seqlens = batch.cache_seqlens
        if step.blocks is not None:
            step.blocks.build(batch, step.paged)
            cache_seqlens = step.blocks.cache_seqlens
        for decode_plan in step.decode.values():
            if isinstance(decode_plan, MlaDecodePlan):
                ops.mla_decode_plan(decode_plan, cache_seqlens)
            else:
                ops.xqa_decode_plan(decode_plan, cache_seqlens)
        for fmha_plan in step.fmha.values():
            assert step.paged.cu_seqlens_q is not None
            keys = cache_seqlens if step.paged.page_table is not None else None
            ops.fmha_plan(fmha_plan, step.paged.cu_seqlens_q, cache_seqlens=keys)

    def attend(self, call: LayerCall) -> None:
        step, report = self._prepared.of(call.batch), self._buffers.report
        q, k, v, layer, batch, out = call.q, call.k, call.v, call.layer, call.batch, call.out
        if self.spec.is_mla:
            if call.save_kv_cache and k is not None:
                store_mla(layer, batch, k, call.k_rope, report)
            attend.mla_decode(q, call.q_rope, layer, batch, step.paged, step.decode, step.blocks, out, report)
            return
        if call.q_rope is not None or call.k_rope is not None:
            raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            if k is None or v is None:
                raise ValueError("attnops: an encoder's layer needs k and v")
            attend.fmha_varlen(q, k, v, layer, step.paged, step.fmha, out, report)
            return
        if call.save_kv_cache and k is not None:
            if v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, k, v, report)
        if step.decode:
            attend.xqa_decode(q, layer, batch, step.paged, step.decode, out, report)
        else:
            attend.fmha_paged(q, layer, batch, step.paged, step.fmha, out, report)

    def _make(self, batch: AttentionBatch, paged: PagedStep) -> CpuStep:
        """The views of one shape. Uniform steps are decode, ragged ones fmha, or blocks where there is MLA."""
        if batch.is_uniform:
            return CpuStep(paged, self._plans_for(batch.tokens_per_request).views(batch.batch_size), {}, None)
        if self._blocks is not None:
            blocks = self._blocks.blocks(batch.batch_size, batch.num_tokens)
            return CpuStep(paged, self._blocks.plans.views(blocks.num_blocks), {}, blocks)
        plans = {window: _fmha_view(plan, batch) for window, plan in self._fmha_plans.items()}
        return CpuStep(paged, {}, plans, None)

    def _plans_for(self, seqlen_q: int) -> DecodePlans:
        """Plans exist for one token and for the limit; any other number gets its own at its first step."""
        if seqlen_q not in self._decode_plans:
            size = self.limits.max_batch_size
            self._decode_plans[seqlen_q] = DecodePlans(self.spec, self.limits, size, seqlen_q, self.device)
        return self._decode_plans[seqlen_q]


def _fmha_view(plan: FmhaPlan, batch: AttentionBatch) -> FmhaPlan:
    """As many tiles as a step of this shape can have, whatever its lengths."""
    tiles = -(-batch.num_tokens // plan.tile_q) + batch.batch_size
    return dataclasses.replace(plan, tile_order=plan.tile_order[:tiles])
