"""The works of a prefill on a GPU: the order that `fmha_plan` writes, and which SM takes which work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnops import ops
from attnops.metadata.fmha_plan import FmhaPlan, cuda_tile_q

if TYPE_CHECKING:
    from attnops.explain import Piece

UNIT_TOKENS = 128  # keys of a step of the kernel's main loop


def prefill_schedule(
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    num_sms: int = 132,
    head_dim: int = 128,
    causal: bool = True,
    window_left: int = -1,
) -> list[Piece]:
    """The works of a batch as SMs take them, each the next one when it is free.

    A work is a query tile and a KV head. It is taken to last as long as its units of `UNIT_TOKENS` keys, and one more.

    Args:
        seqlens_q, seqlens_k: New tokens and all keys of each request.
        num_q_heads, num_kv_heads, head_dim: Of the attention.
        num_sms: SMs of the GPU.
        causal, window_left: As in `FmhaPlan.allocate`.

    Returns:
        Pieces in units, part after part. `Piece.work` counts (tile, KV head) of a request.

    Raises:
        RuntimeError: A length is out of range.
    """
    from attnops.explain import Piece

    shape: dict[str, Any] = {"causal": causal, "window_left": window_left}
    shape["tile_q"] = cuda_tile_q(max(num_q_heads // num_kv_heads, 1), head_dim)
    plan = FmhaPlan.allocate(sum(seqlens_q), len(seqlens_q), **shape)
    bounds = torch.tensor([0, *seqlens_q], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ops.fmha_plan(plan, bounds, cache_seqlens=torch.tensor(list(seqlens_k), dtype=torch.int32))
    free = [(0, sm) for sm in range(num_sms)]
    taken = []
    for request, tile in plan.tile_order.tolist():
        if request < 0:
            break
        units = _units(seqlens_q[request], seqlens_k[request], tile, **shape)
        for head in range(num_kv_heads):
            when, sm = heapq.heappop(free)
            taken.append(Piece(sm, request, tile * num_kv_heads + head, 0, units, 1))
            heapq.heappush(free, (when + units + 1, sm))
    return sorted(taken, key=lambda piece: piece.part)


def _units(seqlen_q: int, seqlen_k: int, tile: int, tile_q: int, causal: bool, window_left: int) -> int:
    """Units of keys that some row of a tile sees, at least 1: `varlen_tile_cost` of csrc/scheduler/varlen_tiles.h."""
    first, offset = tile * tile_q, seqlen_k - seqlen_q
    end = min(offset + min(first + tile_q, seqlen_q), seqlen_k) if causal else seqlen_k
    begin = 0 if window_left < 0 else max(offset + first - window_left, 0)
    return -(-max(end - begin, 1) // UNIT_TOKENS)
