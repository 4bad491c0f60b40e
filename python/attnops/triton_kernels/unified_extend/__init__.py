"""Extend in one stage: prefix and new tokens alike from pages. A row's bits do not depend on what was cached before."""

from attnops.triton_kernels.unified_extend.op import triton_unified_extend

__all__ = ["triton_unified_extend"]
