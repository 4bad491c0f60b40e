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


def hadamard(x: Tensor) -> Tensor:
    """Rows times the Hadamard matrix and ``D ** -0.5``: float32 sums and differences in the order of the ops."""
    y, half = x.float(), 1
    while half < x.shape[-1]:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return y * torch.tensor(x.shape[-1] ** -0.5, dtype=torch.float32)


def quantize(x: Tensor, *, rotate: bool, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``(float8_e4m3fn rows, float32 scales)``, bit for bit as the ops have them but for the sign of NaN."""
    x = hadamard(x) if rotate else x.float()
    largest = x.abs().amax(-1)  # NaN where there is one
    scale = torch.where(largest < 1e-4, torch.tensor(1e-4), largest) / 448
    if ue8m0:
        bits = scale.view(torch.int32)
        rounded = torch.where(bits & 0x7FFFFF != 0, (bits & 0x7F800000) + 0x800000, bits)
        scale = torch.where(scale.isfinite(), rounded, bits).view(torch.float32)
    values = (x / scale.unsqueeze(-1)).clamp(-448, 448)
    return values.to(torch.float8_e4m3fn), scale


def read_key(pages: Tensor, page: int, offset: int) -> tuple[Tensor, Tensor]:
    """``(float8_e4m3fn [D], float32 [])`` of a token."""
    page_size, width = pages.shape[1:]
    flat = pages[page].contiguous().flatten()
    keys, scales = flat[: page_size * (width - 4)].view(page_size, -1), flat[page_size * (width - 4) :]
    return keys[offset].view(torch.float8_e4m3fn), scales.clone().view(torch.float32)[offset]


def logits(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor) -> Tensor:
    """float64 ``[T, N]`` of q ``[T, H, D]`` and k ``[N, D]``."""
    products = torch.einsum("thd,nd->thn", q.float().cpu().double(), k.float().cpu().double()).clamp(min=0)
    return torch.einsum("th,thn->tn", weights.cpu().double(), products) * k_scale.cpu().double()


def make_pages(k: Tensor, k_scale: Tensor, page_size: int, slots: Tensor, num_pages: int) -> Tensor:
    """uint8 pages that hold keys at token slots, and NaN elsewhere."""
    dim = k.shape[1]
    keys = torch.full((num_pages, page_size, dim), 0x7F, dtype=torch.uint8)
    scales = torch.full((num_pages, page_size), torch.nan)
    keys[slots // page_size, slots % page_size] = k.view(torch.uint8).cpu()
    scales[slots // page_size, slots % page_size] = k_scale.cpu()
    parts = keys.flatten(1), scales.view(torch.uint8).flatten(1)
    return torch.cat(parts, 1).view(num_pages, page_size, dim + 4)
