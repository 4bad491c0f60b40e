"""Windows whose two sides stand on a device, where no host may read them.

Every row becomes a request of one token, over a table of the tokens that it sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._attend import decode, is_plain
from attnops.compat._cache_tables import one_token_pages, token_table
from attnops.compat._chunks import MOST_REQUESTS
from attnops.compat._extend import extend

_MOST_CELLS = 1 << 24  # of one table


def extend_window(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lens: Tensor,
    bounds: Tensor,
    window: Tensor,
    *,
    causal: bool,
    chunk: int = 0,
    cuts: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Out and natural lse of queries ``[T, H, D]``, of which request b brings those at ``[bounds[b], bounds[b + 1])``.

    Args:
        table: ``[B, max_pages]``.
        window: int ``[2]``: keys to the left and to the right of a row; below 0: all.
        causal: No key to the right, whatever `window` says.
        chunk: A row sees only keys of its own chunk of so many tokens; 0: off.
        cuts: As of `_attend.decode`.
    """
    if table.shape[0] == 0 or q.shape[0] == 0:
        return extend(q, k_pages, v_pages, table, lens, bounds, causal=causal, split_keys=cuts == 0, **options)
    end, row = bounds[1:].long().contiguous(), torch.arange(q.shape[0], device=q.device)
    owner = torch.searchsorted(end, row, right=True)
    spare = owner >= end.shape[0]
    owner = owner.clamp(max=end.shape[0] - 1)
    length = lens.long()[owner].clamp(min=0)
    at = length - end[owner] + row
    left, right = window.to(q.device, torch.int64, non_blocking=True).unbind()
    if causal:
        right = torch.zeros_like(right)
    first, last = torch.where(left < 0, 0, at - left), torch.where(right < 0, length, at + right + 1)
    tokens = table.shape[1] * k_pages.shape[1]
    if chunk > 0:
        start = torch.div(at, chunk, rounding_mode="floor") * chunk
        first, last = first.maximum(start), last.minimum(start + chunk)
        tokens = min(tokens, chunk)
    first = first.clamp(min=0)
    counts = (last.minimum(length) - first).clamp(min=0).masked_fill(spare, 0).int()
    size = k_pages.shape[1]
    k_pages, v_pages = one_token_pages(k_pages), one_token_pages(v_pages)
    wide = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    if not is_plain(q.to(wide), k_pages, None):  # a copy of each row's keys would be larger by far
        common = wide if k_pages.dtype.itemsize == 1 else torch.float32
        q, k_pages, v_pages = q.to(common), k_pages.to(common), v_pages.to(common)
    most = max(min(MOST_REQUESTS, _MOST_CELLS // max(tokens, 1)), 1)
    parts = []
    for begin in range(0, q.shape[0], most):
        some = slice(begin, begin + most)
        cells = token_table(table[owner[some]], size, first[some], tokens)
        parts.append(decode(name, q[some], k_pages, v_pages, cells, counts[some], seqlen_q=1, cuts=cuts, **options))
    if len(parts) == 1:
        out, lse = parts[0]
    else:
        out = torch.cat([part for part, _ in parts])
        lse = torch.cat([part for _, part in parts if part is not None]) if parts[0][1] is not None else None
    return out.to(wide), lse
