"""Attention ops in Triton, for machines that attnops' compiled kernels do not serve.

Importing this imports triton. Each folder is one op of `torch.ops.attnops`; `core` is the kernel that they share.
Conventions are those of `attnops.ops`: natural-log lse, ``-inf`` for a row that sees no key, windows of w + 1 keys.
"""

from attnops.triton_kernels.decode import triton_decode, triton_decode_plan
from attnops.triton_kernels.extend import triton_extend
from attnops.triton_kernels.merge import triton_merge_state
from attnops.triton_kernels.ragged_prefill import triton_ragged_prefill
from attnops.triton_kernels.unified_extend import triton_unified_extend

__all__ = [
    "triton_decode",
    "triton_decode_plan",
    "triton_extend",
    "triton_merge_state",
    "triton_ragged_prefill",
    "triton_unified_extend",
]
