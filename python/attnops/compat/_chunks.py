"""Attention within chunks: a query sees only keys of its own chunk of so many tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._cache_tables import one_token_pages, token_table
from attnops.compat._extend import extend

MOST_REQUESTS = 1 << 14  # of one plan


def extend_chunks(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lens: Tensor, bounds: Tensor, chunk: int, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`extend`, where every chunk of a request that has queries is a request of its own.

    A chunk's last query stands beside its last key, so masks and windows stay what they are. All of it is made on the
    device: the number of rows bounds the number of chunks.

    Args:
        table: ``[B, max_pages]``.
        chunk: Tokens, above 0.
    """
    batch_size, size = table.shape[0], k_pages.shape[1]
    if batch_size == 0:
        return extend(q, k_pages, v_pages, table, lens, bounds, **options)
    start, end, length = bounds[:-1].long(), bounds[1:].long(), lens.long()
    before = length - (end - start)  # tokens ahead of a request's first query
    first, last = (torch.div(at, chunk, rounding_mode="floor") for at in (before, length - 1))
    counts = torch.where(end > start, last - first + 1, 0)
    ends = counts.cumsum(0)
    index = torch.arange(q.shape[0] // chunk + 2 * batch_size, device=q.device)
    owner = torch.searchsorted(ends, index, right=True)
    spare = owner >= batch_size
    owner = owner.clamp(max=batch_size - 1)
    begin = (first[owner] + index - (ends - counts)[owner]) * chunk
    rows = start[owner] + (begin - before[owner]).clamp(min=0).minimum((end - start)[owner])
    own_bounds = torch.cat([torch.where(spare, end[-1], rows), end[-1:]]).int()
    keys = (begin + chunk).minimum(length[owner]) - begin.clamp(min=0)
    own_lens = torch.where(spare, 0, keys.clamp(min=0)).int()
    tokens = min(chunk, table.shape[1] * size)
    begin = begin.clamp(min=0)
    if chunk % size:
        cells = token_table(table[owner], size, begin, tokens)
        k_pages, v_pages = one_token_pages(k_pages), one_token_pages(v_pages)
    else:
        pages = begin.unsqueeze(1) // size + torch.arange(-(-tokens // size), device=q.device)
        cells = table[owner].gather(1, pages.clamp(max=table.shape[1] - 1))
    if index.numel() <= MOST_REQUESTS:
        return extend(q, k_pages, v_pages, cells, own_lens, own_bounds, **options)
    return _in_parts(q, k_pages, v_pages, cells, own_lens, own_bounds, options)


def _in_parts(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, cells: Tensor, lens: Tensor, bounds: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """`extend` of more requests than a plan takes. Rows of other parts are two requests without a key."""
    row, out, lse = torch.arange(q.shape[0], device=q.device), None, None
    edges = bounds.new_tensor([0, q.shape[0]])
    most = MOST_REQUESTS - 2
    for first in range(0, lens.shape[0], most):
        some = slice(first, first + most)
        mine = bounds[first : first + most + 1]
        part_lens = torch.nn.functional.pad(lens[some], (1, 1))
        part_cells = torch.nn.functional.pad(cells[some], (0, 0, 1, 1))
        part_bounds = torch.cat([edges[:1], mine, edges[1:]])
        part, part_lse = extend(q, k_pages, v_pages, part_cells, part_lens, part_bounds, **options)
        inside = (row >= mine[0]) & (row < mine[-1])
        out = part if out is None else torch.where(inside.view(-1, 1, 1), part, out)
        if part_lse is not None:
            lse = part_lse if lse is None else torch.where(inside.unsqueeze(1), part_lse, lse)
    assert out is not None
    return out, lse
