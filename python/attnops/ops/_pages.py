"""Copies of the pages that a table names, for what no kernel reads where it lies."""

from __future__ import annotations

import torch
from torch import Tensor


def gathered(pages: Tensor, cells: Tensor) -> Tensor:
    """A copy of the pages that a table's cells name, in their order; a cell out of range gets any page."""
    if pages.shape[0] == 0:
        return pages.new_zeros(cells.numel(), *pages.shape[1:])
    index = cells.reshape(-1).long().clamp(0, pages.shape[0] - 1)
    if pages.element_size() == 1:  # index_select knows no float8
        return pages.view(torch.uint8).index_select(0, index).view(pages.dtype)
    return pages.index_select(0, index)


def own_cells(cells: Tensor) -> Tensor:
    """The page table of what `gathered` returned: its pages lie in the order of the cells."""
    return torch.arange(cells.numel(), dtype=torch.int32, device=cells.device).view(cells.shape)
