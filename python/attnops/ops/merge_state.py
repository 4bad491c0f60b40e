"""Merging attention over disjoint key sets."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def merge_state(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets into attention over their union.

    Args:
        out_a, out_b: ``[num_tokens, num_heads, head_dim]``, one dtype (bf16, fp16, fp32), last dim dense.
        lse_a, lse_b: ``[num_tokens, num_heads]`` float32, natural log. ``-inf`` marks an empty key set;
            the matching row of ``out`` is then not used and may hold anything.
        out, lse: Destinations, same shapes and dtypes; allocated when omitted. May be the ``a`` or the ``b`` side.

    Returns:
        ``(out, lse)``. A row empty on both sides gives zeros and ``-inf``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride or device does not fit.

    Source: section 2.2 of FlashInfer (arXiv:2501.01005).
    """
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    torch.ops.attnops.merge_state.default(out, lse, out_a, lse_a, out_b, lse_b)
    return out, lse


@names_its_arguments
def merge_states(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over ``num_states`` disjoint key sets into attention over their union.

    Args:
        outs: ``[num_states, num_tokens, num_heads, head_dim]`` (bf16, fp16, fp32), last dim dense, any other strides:
            a ``[num_tokens, num_states, ...]`` array passes as ``x.transpose(0, 1)``.
        lses: ``[num_states, num_tokens, num_heads]`` float32, contiguous, natural log; ``-inf``: no keys, row not read.
        out, lse: Destinations ``[num_tokens, num_heads, head_dim]`` and ``[num_tokens, num_heads]``; allocated when
            omitted. They must not overlap ``outs`` and ``lses``.

    Returns:
        ``(out, lse)``; zeros and ``-inf`` where no state has keys.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride or device does not fit.

    Source: section 2.2 of FlashInfer (arXiv:2501.01005).
    """
    out = outs.new_empty(outs.shape[1:]) if out is None else out
    lse = lses.new_empty(lses.shape[1:]) if lse is None else lse
    torch.ops.attnops.merge_states.default(out, lse, outs, lses)
    return out, lse


register_fake("merge_state")
register_fake("merge_states")
