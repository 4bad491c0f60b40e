"""Random queries and keys of the sparse indexer."""

from __future__ import annotations

import indexer_reference as reference
import torch

FP8 = torch.float8_e4m3fn


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def queries(rows, heads, dim):
    return torch.randn(rows, heads, dim).to(FP8), torch.randn(rows, heads)


def keys_of(count, dim):
    return (2 * torch.randn(count, dim)).to(FP8), torch.rand(count) + 0.1


class Paged:
    """A batch of pages in any order, in a table whose other cells are far outside the pool."""

    def __init__(self, lengths, page_size, dim, device):
        counts = [-(-max(n) // page_size) if max(n) > 0 else 0 for n in lengths]
        num_pages = sum(counts) + 2
        order = torch.randperm(num_pages).tolist()
        table = torch.full((len(lengths), max(counts, default=0) + 1), 2**30, dtype=torch.int32)
        slots, self.bounds = [], [0]
        for request, count in enumerate(counts):
            table[request, :count] = ints([order.pop() for _ in range(count)])
            positions = torch.arange(max(*lengths[request], 0))
            slots.append(table[request, positions // page_size].long() * page_size + positions % page_size)
            self.bounds.append(self.bounds[-1] + len(positions))
        slots = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.long)
        self.k, self.k_scale = keys_of(len(slots), dim)
        self.pages = reference.make_pages(self.k, self.k_scale, page_size, slots, num_pages).to(device)
        self.table = table.to(device)

    def of(self, request):
        part = slice(self.bounds[request], self.bounds[request + 1])
        return self.k[part], self.k_scale[part]
