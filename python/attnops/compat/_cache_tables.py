"""What FlashAttention's caches are turned into: tables of tokens, windows as two numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import refuse


def window_of(name: str, window: Any) -> tuple[int, int]:
    """(left, right) of a pair, None, or a tensor of two on the CPU."""
    if window is None:
        return -1, -1
    if isinstance(window, Tensor) and not window.is_cpu:
        raise refuse(name, "window_size=a tensor on a device", "give it on the CPU: the host must know it")
    left, right = (-1 if side is None else int(side) for side in window)
    return max(left, -1), max(right, -1)


def one_token_pages(pages: Tensor) -> Tensor:
    """``[P * page_size, 1, H, D]``: a view where the strides have one, else a copy."""
    return pages.flatten(0, 1).unsqueeze(1)


def token_table(table: Tensor, page_size: int, begin: Tensor, tokens: int) -> Tensor:
    """Slots ``[B, tokens]`` int32 of each request's tokens from `begin` on; beyond its table, any."""
    position = begin.long().unsqueeze(1) + torch.arange(tokens, device=table.device)
    page = torch.div(position, page_size, rounding_mode="floor").clamp(0, max(table.shape[1] - 1, 0))
    slots = table.long().gather(1, page) * page_size + position.remainder(page_size)
    return slots.clamp(-1, 2**31 - 1).int()


def one_number(name: str, what: str, scale: Tensor) -> Tensor:
    """One number of a descale ``[B, 1]`` that is the same for all requests."""
    if scale.numel() != 1 and any(stride != 0 for stride, size in zip(scale.stride(), scale.shape) if size > 1):
        raise refuse(name, f"{what} per request with qv", "expand one number to [B, 1]")
    return scale.reshape(-1)[:1].float()
