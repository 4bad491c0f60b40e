"""Lists of blocks and single keys from vertical and slash indices, for attention over lists."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._errors import names_the_peers

__all__ = ["convert_vertical_slash_indexes", "convert_vertical_slash_indexes_mergehead"]

Lists = tuple[Tensor, Tensor, Tensor, Tensor]


@names_the_peers("convert_vertical_slash_indexes")
def convert_vertical_slash_indexes(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
) -> Lists:
    """What every `block_size_M` queries of a head attend to: blocks along diagonals, and the columns beside them.

    A slash index is a distance from a query back to a key. Slashes close to each other share a range of blocks, as the
    peer merges them. A column inside a range is in no list. With `causal`, a column behind the last range is in none.

    Args:
        q_seqlens, kv_seqlens: int32 ``[B]``.
        vertical_indexes: int32 ``[B, H, V]``, rising: keys.
        slash_indexes: int32 ``[B, H, S]``, falling.
        context_size: The most queries of a request; there are ``R = ceil(context_size / block_size_M)`` lists a head.
        block_size_M, block_size_N: Queries that share a list, and keys of a block: not fewer.

    Returns:
        int32 ``block_count [B, H, R]``, ``block_offset [B, H, R, S]`` (first keys of blocks), ``column_count [B, H,
        R]``, ``column_index [B, H, R, V]``: arguments of `sparse_attn_func`. Entries that are not in use are 0.

    Raises:
        ValueError: Indices have no entry, or blocks of keys are shorter than those of queries.
    """
    return _lists(
        "convert_vertical_slash_indexes",
        (q_seqlens, kv_seqlens, vertical_indexes, slash_indexes),
        None,
        (context_size, block_size_M, block_size_N),
        causal,
    )


@names_the_peers("convert_vertical_slash_indexes_mergehead")
def convert_vertical_slash_indexes_mergehead(
    q_seqlens: Tensor,
    kv_seqlens: Tensor,
    vertical_indexes: Tensor,
    slash_indexes: Tensor,
    vertical_indices_count: Tensor,
    slash_indices_count: Tensor,
    context_size: int,
    block_size_M: int,
    block_size_N: int,
    causal: bool = True,
) -> Lists:
    """`convert_vertical_slash_indexes` where each head has its own number of indices in use, int32 ``[H]``.

    The peer leaves entries that are not in use as it found them in memory. Here they are 0.
    """
    return _lists(
        "convert_vertical_slash_indexes_mergehead",
        (q_seqlens, kv_seqlens, vertical_indexes, slash_indexes),
        (vertical_indices_count, slash_indices_count),
        (context_size, block_size_M, block_size_N),
        causal,
    )


def _lists(
    name: str,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    counts: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int, int],
    causal: bool,
) -> Lists:
    q_lens, kv_lens, vertical, slash = (t.long() for t in given)
    context, size_m, size_n = sizes
    if not vertical.shape[-1] or not slash.shape[-1]:
        raise ValueError(f"attnops.compat: {name}: vertical_indexes and slash_indexes must have an entry each")
    if size_n < size_m:
        raise ValueError(
            f"attnops.compat: {name}: block_size_N must be at least block_size_M ({size_m}), got {size_n}: "
            "block_offset has room for one block a slash"
        )
    device = vertical.device
    of_vertical = torch.arange(vertical.shape[-1], device=device)
    of_slash = torch.arange(slash.shape[-1], device=device)
    used_vertical, used_slash = (
        (of_vertical < of_vertical.shape[0], of_slash < of_slash.shape[0])
        if counts is None
        else (of_vertical < counts[0].view(1, -1, 1, 1), of_slash < counts[1].view(1, -1, 1, 1))
    )
    first = torch.arange(-(-context // size_m), device=device) * size_m  # queries, [R]
    kv = kv_lens.view(-1, 1, 1)
    reach = first + size_m + (kv - q_lens.view(-1, 1, 1) if causal else kv)  # [B, 1, R]
    behind = reach if causal else kv.expand_as(reach)  # where keys end that no query of a list may see
    starts, ends = _ranges(slash.unsqueeze(2), used_slash, reach, behind, first, (size_m, size_n), causal)

    following = torch.nn.functional.pad(starts[..., 1:], (0, 1), value=-1)
    limit = torch.minimum(ends, kv.unsqueeze(-1))
    blocks = torch.where(starts != following, (limit - starts + size_n - 1) // size_n, 0).clamp_(min=0)
    alive = (first < q_lens.view(-1, 1, 1)).unsqueeze(-1)  # [B, 1, R, 1]
    through = (blocks * alive).cumsum(-1)
    at = torch.searchsorted(through, of_slash.expand(through.shape).contiguous(), right=True)
    at = at.clamp_(max=starts.shape[-1] - 1)
    before = (through - blocks * alive).gather(-1, at)
    offset = starts.gather(-1, at) + (of_slash - before) * size_n
    block_count = through[..., -1]
    offset = torch.where(of_slash < block_count.unsqueeze(-1), offset, 0)

    columns = vertical.unsqueeze(2).expand(*starts.shape[:3], -1).contiguous()
    at = torch.searchsorted(ends, columns, right=True)
    after = at == ends.shape[-1]
    inside = ~after & (starts.gather(-1, at.clamp(max=ends.shape[-1] - 1)) <= columns)
    kept = ~inside & used_vertical & alive & (~after if causal else columns < kv.unsqueeze(-1))
    order = kept.logical_not().sort(dim=-1, stable=True).indices
    column_count = kept.sum(-1)
    columns = torch.where(of_vertical < column_count.unsqueeze(-1), columns.gather(-1, order), 0)
    return (
        block_count.to(torch.int32),
        offset.to(torch.int32),
        column_count.to(torch.int32),
        columns.to(torch.int32),
    )


def _ranges(
    slash: Tensor, used: Tensor, reach: Tensor, behind: Tensor, first: Tensor, sizes: tuple[int, int], causal: bool
) -> tuple[Tensor, Tensor]:
    """First keys and ends of the range that each slash ends up in, ``[B, H, R, S]``, both rising.

    A slash reaches `size_m` keys before `reach` less its distance. It opens a range where it lies further than that
    behind the last range's end; nearer, it moves that end by `size_m`. Without a slash near enough the range begins
    `behind` the keys.
    """
    size_m, size_n = sizes
    reach, behind = reach.unsqueeze(-1), behind.unsqueeze(-1)
    seen = (slash < reach) & used  # falling: a slash too far back comes first
    last = (used.expand_as(slash).sum(-1, keepdim=True) - 1).clamp(min=0)
    chosen = torch.where(seen.any(-1, keepdim=True), seen.to(torch.uint8).argmax(-1, keepdim=True), last)
    begin = slash.expand(seen.shape).gather(-1, chosen)
    end = (reach - begin).clamp(min=size_m)
    none = begin > reach
    start, end = torch.where(none, behind, end - size_m)[..., 0], torch.where(none, behind + size_n, end)[..., 0]
    ahead = used & (torch.arange(slash.shape[-1], device=slash.device) > chosen)
    if not causal:
        ahead = ahead & (slash >= first.view(1, 1, -1, 1))
    reached = torch.where(ahead, (reach - slash).clamp(min=size_m), -1)
    starts, ends = [], []
    for mine in reached.unbind(-1):
        opens = mine > end + size_m
        start = torch.where(opens, mine - size_m, start)
        end = torch.where(opens, mine, torch.where(mine > end, end + size_m, end))
        starts.append(start)
        ends.append(end)
    return torch.stack(starts, -1), torch.stack(ends, -1)
