"""New tokens of FlashAttention's calls, stored behind the cached ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops import ops

if TYPE_CHECKING:
    from attnops.compat._kvcache import Call


def append(call: Call, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Stores the new tokens behind the cached ones; returns the lengths with them. What finds no room is not stored."""
    if k.dtype != call.k_cache.dtype or v.dtype != call.v_cache.dtype:
        raise ValueError(
            f"attnops.compat: {call.name}: k is {k.dtype}, cache {call.k_cache.dtype}: append rows of its "
            "dtype, or use attnops.ops.store_kv, which quantizes"
        )
    size, bounds = call.k_cache.shape[1], call.key_bounds().long()
    if call.cu_seqlens_k_new is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    index = torch.arange(k.shape[0], device=k.device)
    owner = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    padding = owner >= lens.shape[0]
    owner = owner.clamp(max=max(lens.shape[0] - 1, 0))
    position = lens.long()[owner] + index - bounds[owner]
    page = torch.div(position, size, rounding_mode="floor")
    cell = table.long()[owner, page.clamp(0, table.shape[1] - 1)]
    slot = torch.where((page < table.shape[1]) & ~padding & (position >= 0), cell * size + position % size, -1)
    ops.store_kv(call.k_cache, call.v_cache, k, v, slot)
    return lens + bounds.diff().int()
