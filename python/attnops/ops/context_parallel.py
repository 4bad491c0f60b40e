"""A rank's part of sequences that are dealt out over ranks: token j belongs to rank ``(j // interleave) % world_size``.

A rank keeps its tokens side by side, in their order, so attention over them is attention over a shorter cache. Device
work only: lengths and slots are never read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake
from attnops.types import check_range


@names_its_arguments
def context_parallel_seqlens(
    seqlens: Tensor,
    rank: int,
    world_size: int,
    interleave: int = 1,
    *,
    tokens_per_request: int = 1,
    local_seqlens: Tensor | None = None,
) -> Tensor:
    """How many of the keys that each new token sees are the rank's own.

    Args:
        seqlens: ``[B]`` int32, contiguous: tokens of each sequence, the new ones included. Negative counts as 0.
        rank, world_size: Of the group that shares the sequences.
        interleave: Neighbouring tokens that stay together.
        tokens_per_request: New tokens of each request, its last ones. No op knows the causal mask over a rank's keys.
            So each new token is a request of its own, with its own length, and attends without a mask.
        local_seqlens: Destination ``[B * tokens_per_request]`` int32, contiguous; allocated when omitted.

    Returns:
        ``local_seqlens``; 0 where the rank holds nothing.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
        ValueError: a number is out of range, and memory of that size would be asked for.
    """
    if local_seqlens is None:
        check_range("attnops::context_parallel_seqlens", "tokens_per_request", tokens_per_request, 1)
        local_seqlens = seqlens.new_empty(seqlens.shape[0] * tokens_per_request)
    torch.ops.attnops.context_parallel_seqlens(local_seqlens, seqlens, rank, world_size, interleave, tokens_per_request)
    return local_seqlens


@names_its_arguments
def context_parallel_slots(
    slots: Tensor, rank: int, world_size: int, interleave: int = 1, *, local_slots: Tensor | None = None
) -> Tensor:
    """Slots of a pool that all ranks share to slots of the rank's own pool.

    Global page p holds `world_size` times as many tokens as a page of a rank, in the order of their positions. So page
    p is page p on every rank. The page size of a rank must be a multiple of `interleave`.

    Args:
        slots: ``[num_tokens]`` int32 or int64, contiguous. Negative: padding.
        rank, world_size, interleave: As in :func:`context_parallel_seqlens`.
        local_slots: Destination like `slots`, or `slots` itself; allocated when omitted.

    Returns:
        ``local_slots``; -1, which no store writes, for padding and for tokens of other ranks.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    local_slots = torch.empty_like(slots) if local_slots is None else local_slots
    torch.ops.attnops.context_parallel_slots(local_slots, slots, rank, world_size, interleave)
    return local_slots


register_fake("context_parallel_seqlens")
register_fake("context_parallel_slots")
