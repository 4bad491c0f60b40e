"""Split-KV decode: few queries per request over its pages, cut into splits that a second kernel merges."""

from attnops.triton_kernels.decode.op import triton_decode, triton_decode_plan

__all__ = ["triton_decode", "triton_decode_plan"]
