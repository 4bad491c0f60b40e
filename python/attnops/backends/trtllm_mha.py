"""GQA decode, verify and draft extend on `xqa_decode`; prefill belongs to another backend."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.capability import FLOATS, Capability, HeadDims
from attnops.backends.decode_steps import MODES, DecodeSteps
from attnops.backends.registry import register_attention_backend
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits


@register_attention_backend("trtllm_mha")
class TRTLLMHAAttnBackend(AttentionBackend):
    """Any page size; windows with or without a pool of their own, sinks, soft cap, tree masks, FP8 cache."""

    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        chosen_on=frozenset({"cuda"}),
        archs=frozenset({80, 86, 87, 89, 90}),
        modes=MODES,
        delegates_prefill=True,
        attn_types=frozenset({AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL}),
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn}),
        head_dims=HeadDims(32, 256, 8),
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
        self._steps = DecodeSteps(self.name, spec, limits, self.device, draft_width=limits.max_tokens_per_request)
        self.forward = self._steps.forward  # type: ignore[method-assign]

    @property
    def fault_report(self) -> Tensor | None:
        return self._steps.buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self._steps.out_graph(batch)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self._steps.in_graph(batch)

    def attend(self, call: LayerCall) -> None:
        self._steps.attend(call)
