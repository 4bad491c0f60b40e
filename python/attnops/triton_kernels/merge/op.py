"""`triton_merge_state`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.triton_kernels.core.checks import Q_DTYPES, Checks, register
from attnops.triton_kernels.core.tiles import padded
from attnops.triton_kernels.merge.kernel import merge_state_kernel


@register(
    "triton_merge_state(Tensor(a!) out, Tensor(b!) lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> ()"
)
def triton_merge_state(out: Tensor, lse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """As `attnops.ops.merge_state`, where there are no compiled kernels.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    checks = Checks("triton_merge_state", out_a)
    for name, tensor in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        dtypes = Q_DTYPES if name == "out_a" else (out_a.dtype,)
        checks.tensor(name, tensor, ("num_tokens", "num_heads", "head_dim"), dtypes)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        checks.tensor(name, tensor, ("num_tokens", "num_heads"), (torch.float32,))
        checks.require(tensor.is_contiguous(), f"{name} must be contiguous")
    num_tokens, num_heads, head_dim = out.shape
    if num_tokens == 0:
        return
    merge_state_kernel[(num_tokens, num_heads)](
        out,
        lse,
        out_a,
        lse_a,
        out_b,
        lse_b,
        *out.stride()[:2],
        *out_a.stride()[:2],
        *out_b.stride()[:2],
        num_heads,
        D=head_dim,
        BLOCK_D=padded(head_dim, 1),
    )
