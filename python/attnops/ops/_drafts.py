"""Drafts of a request: which one stands before each."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_parents(tree_mask: Tensor | None, batch_size: int, drafts: int, device: torch.device) -> Tensor:
    """int64 ``[B, T]``: the nearest ancestor of each draft; -1: what is before the drafts. Device work.

    Args:
        tree_mask: uint8 ``[B, T, ceil(T / 8)]``, bits packed from the low end; None: a chain.
    """
    numbers = torch.arange(drafts, device=device)
    if tree_mask is None:
        return (numbers - 1).expand(batch_size, drafts)
    sees = tree_mask[..., numbers // 8] >> (numbers % 8).to(torch.uint8) & 1
    before = numbers < numbers[:, None]
    return torch.where(before & (sees != 0), numbers + 1, 0).amax(-1) - 1
