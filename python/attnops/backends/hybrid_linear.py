"""One backend for the layers that attend and one for those that keep a state, joined by composition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.capability import Capability
from attnops.backends.linear import LinearAttnBackend
from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention
    from attnops.layers.radix_linear_attention import RadixLinearAttention


class HybridLinearAttnBackend(AttentionBackend):
    """Layers that attend go to one backend, linear layers to the other; a step is prepared for both.

    Args:
        full: Serves `RadixAttention`.
        linear: Serves `RadixLinearAttention`. It is made deterministic where `full` is.
        layers: `layer_id` of the layers that attend.

    Raises:
        ValueError: the two were built for different devices or limits, or have a layer in common.
    """

    name = "hybrid_linear"

    def __init__(self, full: AttentionBackend, linear: LinearAttnBackend, layers: Sequence[int]) -> None:
        if full.device != linear.device:
            raise ValueError(
                f"attnops: the two backends must be built for one device, got {full.device} and {linear.device}"
            )
        if full.limits != linear.limits:
            raise ValueError(
                f"attnops: the two backends must have the same limits, got {full.limits} and {linear.limits}"
            )
        both = sorted(set(layers) & set(linear.layers))
        if both:
            raise ValueError(f"attnops: layers {both} cannot be attention layers and linear ones")
        self.spec, self.limits, self.device = full.spec, full.limits, full.device
        linear.deterministic = linear.deterministic or full.spec.deterministic
        self.full_attn_backend, self.linear_attn_backend = full, linear
        self.full_attn_layers = frozenset(layers)

    @property
    def capability(self) -> Capability:  # type: ignore[override]
        """That of the backend for layers that attend: the linear one takes every step that it serves, captured too."""
        return self.full_attn_backend.capability

    def select(self, forward_mode: ForwardMode) -> AttentionBackend:
        """Who serves the layers that attend, where it is two backends."""
        full = self.full_attn_backend
        select = getattr(full, "select", None)
        return full if select is None else select(forward_mode)

    @property
    def needs_cpu_seq_lens(self) -> bool:  # type: ignore[override]
        return self.full_attn_backend.needs_cpu_seq_lens

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]
        return self.full_attn_backend.takes_lists

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.full_attn_backend.init_forward_metadata_out_graph(batch, in_capture)
        self.linear_attn_backend.init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self.full_attn_backend.init_forward_metadata_in_graph(batch)
        self.linear_attn_backend.init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.full_attn_backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.full_attn_backend.get_cuda_graph_seq_len_fill_value()

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        return self.full_attn_backend.takes_absorbed(batch)

    def raise_on_fault(self) -> None:
        self.full_attn_backend.raise_on_fault()
        self.linear_attn_backend.raise_on_fault()

    def forward(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """As of `AttentionBackend.forward`, of a layer that attends."""
        if layer.layer_id not in self.full_attn_layers:
            raise ValueError(
                f"attnops: layer_id must be one of {sorted(self.full_attn_layers)}, the layers that attend, "
                f"got {layer.layer_id}"
            )
        return self.full_attn_backend.forward(q, k, v, layer, batch, *args, **options)

    def forward_linear(
        self,
        layer: RadixLinearAttention,
        batch: AttentionBatch,
        mixed_qkv: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        z: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As of `RadixLinearAttention.forward`; ``out``: where it goes."""
        return self.linear_attn_backend.forward(layer, batch, mixed_qkv, a, b, z, out)

    def update_mamba_state_after_mtp_verify(self, accepted_path: Tensor, accepted_len: Tensor) -> None:
        """As of `LinearAttnBackend`."""
        self.linear_attn_backend.update_mamba_state_after_mtp_verify(accepted_path, accepted_len)

    def attend(self, call: LayerCall) -> None:
        self.full_attn_backend.attend(call)
