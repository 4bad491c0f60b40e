"""FlashAttention's place: prefill and extend on `fmha`, decode on `xqa_decode` or `mla_decode`, one for a whole model.

Uniform steps (decode, verify, a draft extend of one size) are those of `DecodeSteps`. Ragged steps are those of
`FmhaSteps`. So are all steps of a model whose K and V have different head dims. A ragged MLA step with absorbed queries
becomes blocks of tokens, which `mla_decode` takes for requests. With unabsorbed queries it is a step of `MlaPrefill`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall, sees_past_window
from attnops.backends.capability import DECODER_MODES, FLOATS, PORTABLE_ARCHS, SIXTEEN_BIT, Capability, HeadDims
from attnops.backends.cascade import check as check_cascade
from attnops.backends.decode_steps import DecodeSteps
from attnops.backends.fmha_steps import FmhaSteps
from attnops.backends.fp4_steps import Fp4Steps
from attnops.backends.local_steps import LocalSteps
from attnops.backends.mla_prefill import MlaPrefill
from attnops.backends.prepared import PreparedStep
from attnops.backends.registry import register_attention_backend
from attnops.graph_buffers import PagedBuffers
from attnops.ops.fp4_kv import FP4
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


@register_attention_backend("fa3")
class FlashAttentionBackend(AttentionBackend):
    """Every mode, with K and V of their own or MLA.

    Args:
        spec, limits, device: As of `AttentionBackend`.
        cascade: Ragged steps attend to new tokens as they came and to the prefix in its pages, and merge
            (`backends/cascade.py`). Mostly the slower way.

    Raises:
        NotImplementedError: listing what of `spec` the backend, or its cascade, does not serve.
    """

    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        chosen_on=frozenset({"cuda"}),
        archs=PORTABLE_ARCHS,
        needs_ops=frozenset({"fmha_varlen", "fmha_paged"}),
        modes=DECODER_MODES,
        attn_types=frozenset(AttentionType),
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.float8_e5m2, FP4}),
        head_dims=HeadDims(32, 256, 8, equal=False),
        mla=True,
        mla_archs=frozenset({90}),
        mla_dtypes=SIXTEEN_BIT,
        mla_kv_dtypes=frozenset({torch.float8_e4m3fn, torch.uint8, FP4}),
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

    def __init__(
        self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu", *, cascade: bool = False
    ) -> None:
        super().__init__(spec, limits, device)
        if cascade:
            check_cascade(spec)
        self._fp4: Fp4Steps | None = None
        self._decode: DecodeSteps | None = None
        if spec.cache_dtype == FP4:
            self._fp4 = Fp4Steps(self.name, spec, limits, self.device)
            self._fmha = self._mla = None
            return
        self._prepared: PreparedStep = PreparedStep()
        decodes = spec.is_mla or (spec.head_dim == spec.v_head_dim and spec.attn_type is not AttentionType.ENCODER_ONLY)
        if decodes:
            self._decode = DecodeSteps(
                self.name,
                spec,
                limits,
                self.device,
                None if spec.is_mla else 0,  # blocks of tokens are MLA's
                modes=DECODER_MODES,
                prepared=self._prepared,
            )
        self._buffers = PagedBuffers(spec, limits, self.device) if self._decode is None else self._decode.buffers
        self._mla = None if spec.up_head_dims is None else MlaPrefill(spec, limits, self.device)
        self._fmha = None if spec.is_mla else FmhaSteps(spec, limits, self.device, self._buffers, cascade)
        self._local: LocalSteps | None = None
        if spec.attention_chunk_size:
            self._local = LocalSteps(spec, limits, self.device, self._buffers, self._fmha_steps)

    @property
    def fault_report(self) -> Tensor | None:
        return (self._buffers if self._fp4 is None else self._fp4.buffers).report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        if self._fp4 is not None:
            self._fp4.out_graph(batch)
            return
        decode = self._decoder_of(batch)
        if decode is not None:
            decode.out_graph(batch)
            return
        self.limits.check(batch)
        self._prepared.begin(batch, self._fmha_steps.step(batch, self._buffers.step(batch)))

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        if self._fp4 is not None:
            self._fp4.in_graph(batch)
            return
        decode = self._decoder_of(batch)
        if decode is not None:
            decode.in_graph(batch)
            self._build_local(batch)
            if self._mla is not None:
                self._mla.begin()
            return
        step = self._prepared.plan(batch)
        if batch.num_tokens > 0 and batch.forward_mode is not ForwardMode.IDLE:
            self._buffers.build(step.paged, batch)
            self._fmha_steps.plan(step, batch)
            self._build_local(batch)

    def forward(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """As of `AttentionBackend.forward`; a decode step goes straight to `DecodeSteps.forward`."""
        decode = self._decoder_of(batch)
        by_decode = decode is not None and not layer.attention_chunk_size and layer.is_absorbed(q)
        serve = decode.forward if by_decode else super().forward  # type: ignore[union-attr]
        return serve(q, k, v, layer, batch, *args, **options)

    def attend(self, call: LayerCall) -> None:
        if self._fp4 is not None:
            self._fp4.attend(call)
            return
        decode = self._decoder_of(call.batch)
        if call.layer.attention_chunk_size:
            paged = self._prepared.of(call.batch).paged
            assert self._local is not None, "AttentionBackend.forward has checked"
            self._local.attend(call, self._local.step(call.batch, paged))
        elif decode is not None and not call.layer.is_absorbed(call.q):
            if self._mla is None:
                raise ValueError("attnops: queries that come unabsorbed need AttentionSpec.up_head_dims")
            self._mla.attend(call, self._prepared.of(call.batch).paged, self._buffers.report)
        elif decode is not None:
            decode.attend(call)
        else:
            self._fmha_steps.attend(call, self._prepared.of(call.batch))

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        return self._mla is None or self._mla.takes_absorbed(batch)

    def _build_local(self, batch: AttentionBatch) -> None:
        if self._local is not None and batch.num_tokens > 0 and batch.forward_mode is not ForwardMode.IDLE:
            self._local.build(self._local.step(batch, self._prepared.of(batch).paged), batch)

    def _decoder_of(self, batch: AttentionBatch) -> DecodeSteps | None:
        """What serves a step, if it is one for the decode ops."""
        if self._decode is None or self._fmha is None:
            return self._decode
        return None if batch.tokens_per_request == 0 or sees_past_window(self.spec, batch) else self._decode

    @property
    def _fmha_steps(self) -> FmhaSteps:
        assert self._fmha is not None, "MLA's steps are all for the decode ops"
        return self._fmha
