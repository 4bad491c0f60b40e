"""Extend in two stages: the cached prefix from pages, then the step's new tokens from k and v."""

from attnops.triton_kernels.extend.op import triton_extend

__all__ = ["triton_extend"]
