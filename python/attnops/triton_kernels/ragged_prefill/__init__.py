"""Prefill without pages: queries, keys and values of ragged requests."""

from attnops.triton_kernels.ragged_prefill.op import triton_ragged_prefill

__all__ = ["triton_ragged_prefill"]
