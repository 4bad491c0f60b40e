"""The linear attention layer of a model: a recurrence over states in place of a cache. The step's backend answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnops.layers.forward_context import get_forward_context, kv_order
from attnops.types import AttentionBatch, check_range


class RadixLinearAttention(torch.nn.Module):
    """A short convolution and a recurrence, through the linear backend of the batch.

    Args:
        layer_id: The layer's place in the model.
        num_k_heads, num_v_heads: Of keys and queries, and of values; the second is a multiple of the first. Mamba2:
            groups of B and C, and heads of x.
        head_k_dim, head_v_dim: Mamba2: the state's dimension, and that of a head.
        conv_weights: ``[channels, width]`` of the convolution in front; None: there is none.
        bias: ``[channels]`` of the convolution.
        A_log: float32 ``[num_v_heads]``. Mamba2 has ``A = -exp(A_log)``; Lightning: the slopes are ``exp(A_log)``.
        dt_bias: float32 ``[num_v_heads]``, or ``[num_v_heads, head_k_dim]`` with a gate per channel.
        D: float32 ``[num_v_heads]``, Mamba2's skip.
        activation: "silu", or None: what follows the convolution.
        lower_bound: Below 0: KDA's bounded gate. 0: the one by softplus.
        scaling: Of q; None: ``head_k_dim ** -0.5``, and 1 for Mamba2 and Lightning.
        qk_l2norm: q and k by their l2 norms.

    Raises:
        TypeError, ValueError: naming the number that is out of its range, or the activation.
    """

    conv_weights: Tensor | None
    bias: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    D: Tensor | None

    def __init__(
        self,
        layer_id: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_weights: Tensor | None = None,
        bias: Tensor | None = None,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        D: Tensor | None = None,
        activation: str | None = "silu",
        lower_bound: float = 0.0,
        scaling: float | None = None,
        qk_l2norm: bool = True,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        numbers = {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads}
        numbers |= {"head_k_dim": head_k_dim, "head_v_dim": head_v_dim}
        for name, value in numbers.items():
            check_range(owner, name, value, 1)
        check_range(owner, "layer_id", layer_id, 0)
        if num_v_heads % num_k_heads:
            raise ValueError(f"{owner}: num_v_heads ({num_v_heads}) must be a multiple of num_k_heads ({num_k_heads})")
        if activation not in ("silu", None):
            raise ValueError(f"activation must be silu or None, got {activation!r}")
        self.layer_id = layer_id
        self.num_k_heads, self.num_v_heads = num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.activation, self.lower_bound, self.scaling, self.qk_l2norm = activation, lower_bound, scaling, qk_l2norm
        given = {"conv_weights": conv_weights, "bias": bias, "A_log": A_log, "dt_bias": dt_bias, "D": D}
        for name, tensor in given.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)  # the model's own, loaded with its weights
            else:
                self.register_buffer(name, tensor, persistent=False)

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return self.num_v_heads * self.head_v_dim

    def forward(
        self,
        mixed_qkv: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        forward_batch: AttentionBatch | None = None,
        z: Tensor | None = None,
    ) -> Tensor:
        """The step's new tokens through the convolution and the recurrence, from their requests' states.

        Args:
            mixed_qkv: ``[num_tokens, channels]``: q, k and v side by side; Mamba2: x, B and C.
            a: ``[num_tokens, num_v_heads]`` gates, or ``[num_tokens, num_v_heads, head_k_dim]``; Mamba2: dt.
            b: ``[num_tokens, num_v_heads]``, logits of beta.
            forward_batch: The step. May be omitted inside `forward_context`, and is not read by a compiled model.
            z: ``[num_tokens, num_v_heads, head_v_dim]``, Mamba2's gate.

        Returns:
            ``[num_tokens, num_v_heads * head_v_dim]`` in the dtype of `mixed_qkv`.
        """
        if is_compiling():
            out = mixed_qkv.new_empty(mixed_qkv.shape[0], self.out_width)
            order = kv_order(mixed_qkv.device)
            torch.ops.attnops.unified_linear_attention_with_output(mixed_qkv, a, b, z, out, order, self.layer_id)
            return out
        if forward_batch is None:
            context = get_forward_context()
            forward_batch, backend = context.batch, context.backend
        else:
            backend = forward_batch.attn_backend
        return self._server(backend)(self, forward_batch, mixed_qkv, a, b, z)

    def _server(self, backend: object) -> Any:
        serve = getattr(backend, "forward_linear", None)
        if serve is None:
            raise ValueError(
                f"attnops: layer {self.layer_id} is linear, and the batch's attn_backend serves no such layers: join "
                "it with one that does, HybridLinearAttnBackend(full, linear, layers)"
            )
        return serve

    def extra_repr(self) -> str:
        return (
            f"layer_id={self.layer_id}, num_k_heads={self.num_k_heads}, num_v_heads={self.num_v_heads}, "
            f"head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}"
        )


_library = torch.library.Library("attnops", "FRAGMENT")
_library.define(
    "unified_linear_attention_with_output(Tensor mixed_qkv, Tensor? a, Tensor? b, Tensor? z, Tensor(a!) output, "
    "Tensor(b!) kv_order, int layer_id) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)


def _unified_linear_attention_with_output(
    mixed_qkv: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    output: Tensor,
    kv_order: Tensor,
    layer_id: int,
) -> None:
    """Linear layer `layer_id` in the running step. Rows beyond the step's tokens are not read and give zeros."""
    context = get_forward_context()
    layer, tokens = context.layers.get(layer_id), context.batch.num_tokens
    if not isinstance(layer, RadixLinearAttention):
        raise ValueError(
            f"attnops: the running step has no linear layer {layer_id}; give forward_context collect_layers(model)"
        )
    output[tokens:].zero_()
    mixed, a, b, z = (None if x is None else x[:tokens] for x in (mixed_qkv, a, b, z))
    layer._server(context.backend)(layer, context.batch, mixed, a, b, z, out=output[:tokens])


for _key in ("CPU", "CUDA"):
    _library.impl("unified_linear_attention_with_output", _unified_linear_attention_with_output, _key)


@torch.library.register_fake("attnops::unified_linear_attention_with_output")
def _(
    mixed_qkv: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    output: Tensor,
    kv_order: Tensor,
    layer_id: int,
) -> None:
    return None
