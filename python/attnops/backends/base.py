"""What every backend is: a capability that it declares, and the three-method contract of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from attnops.backends.capability import Capability
from attnops.report import first_fault
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits, device_of

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

DECODE, IDLE = ForwardMode.DECODE, ForwardMode.IDLE  # looked up once, not in every layer


@dataclass(slots=True)  # not frozen: that doubles what making one costs, in every layer
class LayerCall:
    """One layer's call of a step, as `AttentionBackend.forward` has checked it.

    Attributes:
        q, k, v, layer, batch, save_kv_cache, q_rope, k_rope: As of `RadixAttention.forward`.
        out: ``[num_tokens, num_heads * v_head_dim]``, to be written.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    layer: RadixAttention
    batch: AttentionBatch
    save_kv_cache: bool
    q_rope: Tensor | None
    k_rope: Tensor | None
    out: Tensor


class AttentionBackend(ABC):
    """Serves the attention of a model, step by step.

    A step calls, in order: `init_forward_metadata_out_graph` (host work), `init_forward_metadata_in_graph` (device work
    that a graph records), then `forward` once per layer (recorded, too). Eager, `init_forward_metadata` does the first
    two. A replay calls `init_forward_metadata_out_graph` and replays the rest.

    No backend inherits from another one.

    Args:
        spec: The model.
        limits: The largest step to come. Every buffer is allocated for it here, so its address holds for every graph.
        device: Where the batches' tensors are.

    Raises:
        NotImplementedError: listing what of `spec` the backend does not serve.
    """

    name: ClassVar[str] = ""
    capability: ClassVar[Capability]
    needs_cpu_seq_lens: ClassVar[bool] = False
    takes_lists: ClassVar[bool] = False  # `topk_indices` of layers

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.limits = limits
        self.device = device_of(device)
        reasons = self.capability.reasons_against(spec)
        if reasons:
            raise NotImplementedError(f"attnops: backend {self.name} does not serve this model: {'; '.join(reasons)}")

    def init_forward_metadata(self, batch: AttentionBatch) -> None:
        """Everything that an eager step needs before its layers."""
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    @abstractmethod
    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        """Host work before a step, eager, captured or replayed. At capture the lengths are placeholders."""

    @abstractmethod
    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        """Device work before a step's layers: static shapes, fixed addresses, no value read on the host."""

    def prepare_with(self, other: AttentionBackend) -> None:
        """Leaves the device work before steps to `other`, of the same model and limits, as far as both can share it.

        From now on `other` prepares each step first, with the same requests, lengths, slots and number of tokens.
        Called before any step. Where nothing can be shared, all is as before.
        """
        return

    def lead_drafts(self, others: Sequence[AttentionBackend]) -> None:
        """Prepares, with the first step of a draft loop, what the later ones of `others` can share with it.

        In each step a request has one token more than before. Called before any step. Where nothing can be shared, all
        is as before.
        """
        return

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called once before the first capture: all buffers exist, so this only compares with the limits.

        Raises:
            ValueError: naming the limit.
        """
        for name, got in (("max_batch_size", max_bs), ("max_num_tokens", max_num_tokens)):
            limit = getattr(self.limits, name)
            if got > limit:
                raise ValueError(f"attnops: graphs of {got} exceed {name} = {limit} that {self.name} was built for")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """What `cache_seqlens` of a padding row holds: enough for its own query tokens, so never 0."""
        return self.limits.max_tokens_per_request

    def raise_on_fault(self) -> None:
        """In the checked mode (ATTNOPS_CHECK=1 when the backend was built): what the kernels met, if anything.

        Waits for the device, so a server asks when it suspects something, and a test after each step.

        Raises:
            RuntimeError: op, request, position and value of the first index or length out of range since the last call.
        """
        report = self.fault_report
        if report is not None and (fault := first_fault(report)):
            report.zero_()
            raise RuntimeError(fault)

    @property
    def fault_report(self) -> Tensor | None:
        """The buffer of the checked mode; None outside it."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One layer of the step; arguments as of `RadixAttention.forward`.

        Args:
            out: Destination ``[num_tokens, num_heads * v_head_dim]``, contiguous; allocated when None.
        """
        if out is None:
            out = q.new_empty(q.shape[0], layer.out_width(q))
        if batch.forward_mode is IDLE or batch.num_tokens == 0:
            return out.zero_()  # an idle rank's rows are padding
        if q.shape[0] != batch.num_tokens:
            raise ValueError(
                f"attnops: q.shape[0] must be {batch.num_tokens} (num_tokens of the step), got {q.shape[0]}"
            )
        if v is None and k is not None and not self.spec.is_mla:
            raise ValueError("attnops: v must be given with k: only MLA's layers have no rows of v")
        if batch.multi_item is not None and not self.capability.multi_item:
            raise NotImplementedError(
                f"attnops: backend {self.name} has no multi-item scoring (AttentionBatch.multi_item)"
            )
        if layer.attention_chunk_size and layer.attention_chunk_size != self.spec.attention_chunk_size:
            raise ValueError(
                f"attnops: layer {layer.layer_id} has attention_chunk_size {layer.attention_chunk_size}, the backend "
                f"was built for {self.spec.attention_chunk_size} (AttentionSpec.attention_chunk_size)"
            )
        self.attend(LayerCall(q, k, v, layer, batch, save_kv_cache, q_rope, k_rope, out))
        return out

    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """`forward` of a DECODE batch: one new token per request. Arguments and result as of `forward`.

        Raises:
            ValueError: the batch is another mode's.
        """
        if not batch.forward_mode.is_decode_or_idle():
            raise ValueError(f"attnops: forward_decode takes a DECODE batch, got {batch.forward_mode.name}")
        return self.forward(q, k, v, layer, batch, *args, **options)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """`forward` of every other batch: EXTEND, MIXED, TARGET_VERIFY, DRAFT_EXTEND. As `forward_decode`."""
        if batch.forward_mode is DECODE:
            raise ValueError("attnops: forward_extend takes any batch but DECODE's, which is forward_decode's")
        return self.forward(q, k, v, layer, batch, *args, **options)

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        """MLA: whether the layers of a step should bring absorbed queries. False: `RadixAttention.up_projection`."""
        return True

    @abstractmethod
    def attend(self, call: LayerCall) -> None:
        """Serves one layer of a step that has tokens: stores what is new, attends, writes ``call.out``."""


def is_causal(layer: RadixAttention) -> bool:
    return layer.attn_type is AttentionType.DECODER


def sees_past_window(spec: AttentionSpec, batch: AttentionBatch) -> bool:
    """Whether the decode ops would show tokens of the step too much: they bound a window on the left alone.

    A layer that is not causal has its window on both sides, and tokens of a request stand behind one another.
    """
    return spec.attn_type is not AttentionType.DECODER and 0 <= spec.sliding_window_size < batch.tokens_per_request - 1
