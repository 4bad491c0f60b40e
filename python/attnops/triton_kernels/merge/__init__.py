"""Merging attention over two disjoint key sets."""

from attnops.triton_kernels.merge.op import triton_merge_state

__all__ = ["triton_merge_state"]
