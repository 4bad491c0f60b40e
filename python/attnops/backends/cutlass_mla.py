"""MLA decode, verify and draft extend on `mla_decode`, pages of 128; prefill belongs to another backend."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.decode_steps import DecodeSteps
from attnops.backends.mla_capability import mla_capability
from attnops.backends.registry import register_attention_backend
from attnops.types import AttentionBatch, AttentionSpec, Limits


@register_attention_backend("cutlass_mla")
class CutlassMLABackend(AttentionBackend):
    """Pages of 128; queries whole or as q_nope and q_pe (`q_rope`), any number of heads, neither padded nor copied."""

    capability = mla_capability(128)

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._steps = DecodeSteps(self.name, spec, limits, self.device)
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
