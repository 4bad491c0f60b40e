"""MLA decode, verify and draft extend on `mla_decode`, pages of 32 or 64; prefill belongs to another backend."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.decode_steps import DecodeSteps
from attnops.backends.mla_capability import mla_capability
from attnops.backends.registry import register_attention_backend
from attnops.types import AttentionBatch, AttentionSpec, Limits

TABLE_TOKENS = 128


@register_attention_backend("trtllm_mla")
class TRTLLMMLABackend(AttentionBackend):
    """Pages of 32 or 64.

    Page tables are as wide as whole blocks of 128 tokens need, which TensorRT-LLM's kernels ask of their users' tables.
    """

    capability = mla_capability(32, 64)

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        padded = -(-limits.max_seqlen // TABLE_TOKENS) * TABLE_TOKENS
        self._steps = DecodeSteps(self.name, spec, dataclasses.replace(limits, max_seqlen=padded), self.device)
        self.forward = self._steps.forward  # type: ignore[method-assign]

    @property
    def fault_report(self) -> Tensor | None:
        return self._steps.buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        self._steps.out_graph(batch)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self._steps.in_graph(batch)

    def attend(self, call: LayerCall) -> None:
        self._steps.attend(call)
