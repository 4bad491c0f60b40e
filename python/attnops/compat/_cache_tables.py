"""What FlashAttention's caches are turned into: tables of tokens, windows as two numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_may_read(values: Tensor) -> bool:
    """Whether reading costs no wait for a device, and no break of a traced graph."""
    return values.is_cpu and not torch.compiler.is_compiling()


def window_of(name: str, window: Any) -> tuple[int, int] | Tensor:
    """(left, right) of a pair, None, or a tensor of two on the CPU. One that the host may not read is returned as it
    is: on a device, or while a graph is traced."""
    if window is None:
        return -1, -1
    if isinstance(window, Tensor):
        if window.shape != (2,) or window.is_floating_point():
            raise ValueError(
                f"attnops.compat: {name}: window_size must be two integers, got {window.dtype} {list(window.shape)}"
            )
        if not host_may_read(window):
            return window
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


def is_shared(scale: Tensor) -> bool:
    """Whether a descale ``[B, H_kv]`` is the same for all requests by its strides."""
    return scale.shape[0] <= 1 or scale.stride(0) == 0
