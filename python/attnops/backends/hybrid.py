"""One backend for prefill, one for decode, joined by composition; and which of them serves speculative steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

SPECULATIVE_MODES = ("prefill", "decode")


class HybridAttnBackend(AttentionBackend):
    """DECODE and IDLE go to one backend, EXTEND and MIXED to the other.

    Args:
        prefill: Serves EXTEND and MIXED.
        decode: Serves DECODE.
        speculative_attention_mode: Which of the two serves TARGET_VERIFY and DRAFT_EXTEND: "prefill" or "decode"
            (SGLang's option of that name, and its default).

    Raises:
        ValueError: the two were built for different models or devices, or the mode is neither.
    """

    name = "hybrid"

    def __init__(
        self, prefill: AttentionBackend, decode: AttentionBackend, speculative_attention_mode: str = "prefill"
    ) -> None:
        if speculative_attention_mode not in SPECULATIVE_MODES:
            raise ValueError(
                f"attnops: speculative_attention_mode must be prefill or decode, got {speculative_attention_mode}"
            )
        if prefill.spec != decode.spec or prefill.device != decode.device:
            raise ValueError("attnops: the two backends of a hybrid must be built for one model and one device")
        self.spec, self.limits, self.device = decode.spec, decode.limits, decode.device
        self.prefill_backend, self.decode_backend = prefill, decode
        self.speculative_attention_mode = speculative_attention_mode
        self._forward = {mode: self.select(mode).forward for mode in ForwardMode}

    @property
    def needs_cpu_seq_lens(self) -> bool:  # type: ignore[override]
        return self.prefill_backend.needs_cpu_seq_lens or self.decode_backend.needs_cpu_seq_lens

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]
        return self.prefill_backend.takes_lists and self.decode_backend.takes_lists

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backend that serves a mode."""
        if mode.is_decode_or_idle():
            return self.decode_backend
        if mode.is_speculative() and self.speculative_attention_mode == "decode":
            return self.decode_backend
        return self.prefill_backend

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.select(batch.forward_mode).init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self.select(batch.forward_mode).init_forward_metadata_in_graph(batch)

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        return self.select(batch.forward_mode).takes_absorbed(batch)

    @property
    def _captured(self) -> tuple[AttentionBackend, ...]:
        """Whose steps graphs hold: decode's, and prefill's where it serves the speculative ones."""
        decodes_all = self.speculative_attention_mode == "decode"
        return (self.decode_backend,) if decodes_all else (self.decode_backend, self.prefill_backend)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self._captured:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return max(backend.get_cuda_graph_seq_len_fill_value() for backend in self._captured)

    def raise_on_fault(self) -> None:
        self.decode_backend.raise_on_fault()
        self.prefill_backend.raise_on_fault()

    def forward(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """As of `AttentionBackend.forward`, by the backend that serves the batch's mode."""
        return self._forward[batch.forward_mode](q, k, v, layer, batch, *args, **options)

    def attend(self, call: LayerCall) -> None:
        self.select(call.batch.forward_mode).attend(call)
