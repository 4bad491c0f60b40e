"""The works of a prefill on a GPU: the order and the cuts that `fmha_plan` writes, and who takes which work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.metadata.fmha_plan import (
    MOST_PIECE_WORKS_PER_SM,
    SHORT_ROWS,
    cuda_tile_q,
    cuts_in_part,
    have_few_rows,
    tokens_as_a_rule,
    works_per_tile,
)

if TYPE_CHECKING:
    from attnops.explain import Piece

UNIT_TOKENS = 128  # keys of a unit of cost: csrc/scheduler/varlen_cuts.h


def prefill_plan(
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    *,
    tile_q: int,
    works: int,
    num_sms: int,
    causal: bool = True,
    window_left: int = -1,
    cut_in_part: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What `fmha_plan` writes for a GPU: the tiles ``[n, 2]``, and `FmhaPlan.pieces` where works of a tile are few."""
    bounds = torch.tensor([0, *seqlens_q], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    order = torch.empty(sum(-(-n // tile_q) for n in seqlens_q), 2, dtype=torch.int32)
    max_pieces = MOST_PIECE_WORKS_PER_SM * num_sms // works
    pieces = torch.zeros(max_pieces + 1, 4, dtype=torch.int32) if max_pieces >= 2 else None
    lengths = torch.tensor(list(seqlens_k), dtype=torch.int32)
    rules = (tile_q, causal, window_left, pieces, works, num_sms, cut_in_part)
    torch.ops.attnops.fmha_plan(order, bounds, None, lengths, *rules)
    return order, pieces


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
    """The works of a batch as SMs take them, each the next one when it is free. Pieces of cut tiles come first.

    A work is taken to last as long as its units of `UNIT_TOKENS` keys, and one more.

    Args:
        seqlens_q, seqlens_k: New tokens and all keys of each request.
        num_q_heads, num_kv_heads, head_dim: Of the attention.
        num_sms: SMs of the GPU.
        causal, window_left: As in `FmhaPlan.allocate`.

    Returns:
        Pieces in units, part after part. `Piece.work` counts (tile, KV head or block of query heads) of a request.

    Raises:
        RuntimeError: A length is out of range.
    """
    from attnops.explain import Piece

    group = max(num_q_heads // num_kv_heads, 1)
    few_rows = have_few_rows(group, head_dim, max(seqlens_q, default=0))
    tile_q = cuda_tile_q(group, head_dim, tokens_as_a_rule(sum(seqlens_q), len(seqlens_q)))
    tile_q = SHORT_ROWS // group if few_rows else tile_q
    works = works_per_tile(group, num_kv_heads, head_dim, tile_q)
    shape: dict[str, Any] = {"tile_q": tile_q, "causal": causal, "window_left": window_left}
    in_part = cuts_in_part(head_dim, few_rows)
    order, pieces = prefill_plan(seqlens_q, seqlens_k, works=works, num_sms=num_sms, cut_in_part=in_part, **shape)
    cut = [] if pieces is None else pieces[1 : 1 + int(pieces[0, 0])].tolist()
    whole = {(request, tile) for request, tile, _, _ in cut}
    rows = cut + [[*tile, 0, 1] for tile in order.tolist() if tuple(tile) not in whole]
    free = [(0, sm) for sm in range(num_sms)]
    taken = []
    for request, tile, number, count in rows:
        units = _units(seqlens_q[request], seqlens_k[request], tile, **shape)
        begin, end = units * number // count, units * (number + 1) // count
        for work in range(works):
            when, sm = heapq.heappop(free)
            taken.append(Piece(sm, request, tile * works + work, begin, end, count))
            heapq.heappush(free, (when + end - begin + 1, sm))
    return sorted(taken, key=lambda piece: piece.part)


def _units(seqlen_q: int, seqlen_k: int, tile: int, tile_q: int, causal: bool, window_left: int) -> int:
    """Units of keys that some row of a tile sees, at least 1: `varlen_tile_cost` of csrc/scheduler/varlen_tiles.h."""
    first, offset = tile * tile_q, seqlen_k - seqlen_q
    end = min(offset + min(first + tile_q, seqlen_q), seqlen_k) if causal else seqlen_k
    begin = 0 if window_left < 0 else max(offset + first - window_left, 0)
    return -(-max(end - begin, 1) // UNIT_TOKENS)
