"""What the indexer's ops must give, in plain torch and float64."""

from __future__ import annotations

import torch
from torch import Tensor


def selected(logits: Tensor, k: int) -> Tensor:
    """Positions of the `k` first keys of a stable sort by value, rising: all where there are no more. NaN is last."""
    values = logits.double() + 0.0  # -0 is 0
    order = torch.sort(values.nan_to_num(nan=-torch.inf), descending=True, stable=True).indices
    order = order[torch.sort(values[order].isnan().int(), stable=True).indices]
    return order[:k].sort().values


def topk_select(
    logits: Tensor,
    lengths: list[int],
    k: int,
    *,
    row_starts: list[int] | None = None,
    page_table: Tensor | None = None,
    row_to_request: list[int] | None = None,
    page_size: int = 1,
    offsets: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """``(indices, positions)``, int32 ``[T, k]`` on the CPU, of rows that lie within `logits` and the table."""
    indices, positions = torch.full((2, len(lengths), k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        first = row_starts[row] if row_starts else 0
        found = selected(logits[row, first : first + max(length, 0)].cpu(), k)
        positions[row, : len(found)] = found.int()
        if page_table is not None:
            pages = page_table[row_to_request[row] if row_to_request else row].cpu()
            found = pages[found // page_size].long() * page_size + found % page_size
        elif offsets is not None:
            found = found + offsets[row]
        indices[row, : len(found)] = found.int()
    return indices, positions
