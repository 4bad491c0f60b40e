"""Tensors in memory that punishes: NaN, huge indices and guard bytes wherever the contract says nobody looks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .draw import Draw, Failure

HUGE_INDEX = 2**30
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_KINDS = (FP8, E5M2)
FP8_NAN = 0x7F  # in both kinds
GUARD = 0xA5


def poison_value(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return math.nan
    return 0xFF if dtype == torch.uint8 else HUGE_INDEX


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor that torch can index, copy and compare on every device: FP8 as its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_KINDS else tensor


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if dtype in FP8_KINDS:
        return torch.full(shape, FP8_NAN, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, poison_value(dtype), dtype=dtype, device=device)


def _frame(draw: Draw, shape: tuple[int, ...], odd: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """The order of the dimensions in memory, the last one innermost, and how much lies before and after each."""
    rank = len(shape)
    order = list(range(rank - 1))
    pads = [(0, 0)] * rank
    if draw.chance(0.5):
        return [*order, rank - 1], pads
    if draw.chance(0.4):
        draw.random.shuffle(order)
    for axis in range(rank - 1):
        if draw.chance(0.4):
            pads[axis] = (draw.number(0, 2), draw.number(0, 2))
    if draw.chance(0.4):
        unit = draw.pick([1, 3]) if odd and draw.chance(0.5) else 16
        pads[-1] = (unit * draw.number(0, 1), unit * draw.number(0, 2))
    return [*order, rank - 1], pads


def _place(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> tuple[Tensor, Tensor]:
    """(all memory, a view of `shape` in it whose last dimension is dense)."""
    order, pads = _frame(draw, shape, odd)
    whole_shape = tuple(shape[axis] + sum(pads[axis]) for axis in order)
    whole = torch.empty(whole_shape, dtype=dtype, device=draw.device)
    window = tuple(slice(pads[axis][0], pads[axis][0] + shape[axis]) for axis in order)
    inverse = [order.index(axis) for axis in range(len(shape))]
    return whole, whole[window].permute(inverse)


def strided(draw: Draw, values: Tensor, odd: bool = True) -> Tensor:
    """`values` on the case's device, as a view into poisoned memory, its last dimension dense.

    Args:
        odd: Rows may start at any element, not only on 16-byte boundaries.
    """
    whole, view = _place(draw, tuple(values.shape), values.dtype, odd)
    bytes_of(whole).fill_(FP8_NAN if bytes_of(whole) is not whole else poison_value(whole.dtype))
    bytes_of(view).copy_(bytes_of(values), non_blocking=True)  # a GPU that others use is slow to wait for
    return view


class Guarded:
    """A destination among guard bytes.

    Attributes:
        view: What the call gets.
    """

    def __init__(self, draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, *, odd: bool = True, dense=False):
        if dense:
            whole = torch.empty(math.prod(shape) + 32, dtype=dtype, device=draw.device)
            self.whole, self.view = whole, whole[16 : 16 + math.prod(shape)].view(shape)
        else:
            self.whole, self.view = _place(draw, shape, dtype, odd)
        self.whole.view(torch.uint8).fill_(GUARD)

    def check(self, name: str) -> None:
        """Nothing but the view was written. The view is overwritten."""
        bytes_of(self.view).copy_(torch.zeros((), dtype=bytes_of(self.view).dtype, device=self.view.device))
        rest = self.whole.clone()
        guard = self.whole.view(torch.uint8)
        bytes_of(self.view).copy_(self._guard())
        if not bool((guard == GUARD).all()):
            wrong = int((guard != GUARD).sum())
            raise Failure(f"{name}: {wrong} bytes beside the destination were written")
        del rest

    def _guard(self) -> Tensor:
        size = bytes_of(self.view).element_size()
        one = torch.full((size,), GUARD, dtype=torch.uint8, device=self.view.device)
        return one.view(bytes_of(self.view).dtype).squeeze(0)


class Untouched:
    """What a call must not write."""

    def __init__(self, **tensors: Tensor | None) -> None:
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.given = {name: (bytes_of(tensor), bytes_of(tensor).clone()) for name, tensor in given.items()}

    def check(self) -> None:
        for name, (now, before) in self.given.items():
            same = torch.equal(now.view(torch.uint8), before.view(torch.uint8)) if now.is_contiguous() else True
            if not same:
                raise Failure(f"{name} was written, and is no destination")


class Paging:
    """Pages of a batch: shuffled, in both forms, with huge indices in the cells that no length needs.

    Attributes:
        num_pages: Of the pool.
        slots: int64, of every token, requests one after the other.
        table, indptr, indices: int32 ``[B, columns]``, and the same as CSR, on the case's device.
    """

    def __init__(self, draw: Draw, lengths: list[int], page_size: int) -> None:
        counts = [-(-length // page_size) for length in lengths]
        self.page_size = page_size
        used, spare = sum(counts), draw.number(0, 3)
        self.num_pages = used + spare if used + spare or draw.chance(0.5) else 1
        order = draw.permutation(self.num_pages).tolist()
        columns = max(counts, default=0) + draw.number(0, 2)
        if draw.chance(0.1):  # as an engine's: kernels that are chosen by the table's width
            columns = max(columns, min(131072 // page_size, 400_000 // max(len(lengths), 1)))
        self.counts = counts
        rows, flat, indptr, slots, taken = [], [HUGE_INDEX] * draw.number(0, 2), [], [], 0
        indptr.append(len(flat))
        for length, count in zip(lengths, counts):
            mine = order[taken : taken + count]
            taken += count
            rows.append(mine + [HUGE_INDEX] * (columns - count))
            flat += mine + [HUGE_INDEX] * draw.number(0, 1)
            indptr.append(len(flat))
            slots += [mine[i // page_size] * page_size + i % page_size for i in range(length)]
        self.slots = torch.tensor(slots, dtype=torch.int64)
        self.rows = rows
        table = torch.tensor(rows, dtype=torch.int32).view(len(lengths), columns)
        self.table = strided(draw, table)
        self.indptr = torch.tensor(indptr, dtype=torch.int32).to(draw.device, non_blocking=True)
        self.indices = torch.tensor(flat, dtype=torch.int32).to(draw.device, non_blocking=True)


def fill_pages(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes tokens' rows into pages on any device."""
    page_size, slots = pages.shape[1], slots.to(pages.device, non_blocking=True)
    bytes_of(pages)[slots // page_size, slots % page_size] = bytes_of(values.to(pages.device, non_blocking=True))
