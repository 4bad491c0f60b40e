"""What model code calls: `RadixAttention`, `RadixLinearAttention`, and the context of the step that it runs in."""

from attnops.layers.compressed_attention import CompressedAttention, Compressor
from attnops.layers.forward_context import ForwardContext, collect_layers, forward_context, get_forward_context
from attnops.layers.radix_attention import RadixAttention
from attnops.layers.radix_linear_attention import RadixLinearAttention
from attnops.layers.up_projection import UpProjection

__all__ = [
    "CompressedAttention",
    "Compressor",
    "ForwardContext",
    "RadixAttention",
    "RadixLinearAttention",
    "UpProjection",
    "collect_layers",
    "forward_context",
    "get_forward_context",
]
