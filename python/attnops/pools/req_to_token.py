"""Which slots a request's tokens have."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.types import check_range, device_of

_INT32 = torch.iinfo(torch.int32)


class ReqToTokenPool:
    """A row of token slots per running request.

    Args:
        size: Requests at once.
        max_context_len: Tokens per request.
        device: Where kernels read `req_to_token`.

    Attributes:
        req_to_token: int32 ``[size, max_context_len]`` on `device`.
        host: The same on the host, for the scheduler: reading it waits for nothing.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str = "cpu") -> None:
        owner = f"attnops: {type(self).__name__}"
        check_range(owner, "size", size, 0)
        check_range(owner, "max_context_len", max_context_len, 0)
        self.size = size
        self.max_context_len = max_context_len
        self.device = device_of(device)
        self.req_to_token = torch.zeros(size, max_context_len, dtype=torch.int32, device=self.device)
        on_host = self.device.type == "cpu"
        self.host = self.req_to_token if on_host else torch.zeros(size, max_context_len, dtype=torch.int32)
        self._free = list(range(size - 1, -1, -1))

    def available_size(self) -> int:
        """Free rows: how many new requests there is room for."""
        return len(self._free)

    def alloc(self, need_size: int = 1) -> list[int] | None:
        """Rows for `need_size` new requests, or None when there are not as many."""
        if need_size < 0:
            raise ValueError(f"attnops: need_size must not be negative, got {need_size}")
        if need_size > len(self._free):
            return None
        return [self._free.pop() for _ in range(need_size)]

    def free(self, rows: int | list[int]) -> None:
        """Gives rows back. The slots in them are the allocator's business.

        Raises:
            ValueError: a row is free already.
        """
        given = [rows] if isinstance(rows, int) else list(rows)
        free = set(self._free)
        for row in given:
            if not 0 <= row < self.size or row in free:
                raise ValueError(f"attnops: row {row} of ReqToTokenPool is not in use")
            free.add(row)
        self._free.extend(given)

    def clear(self) -> None:
        """Every row is free again. What is written in them stays."""
        self._free = list(range(self.size - 1, -1, -1))

    def write(self, row: int, start: int, slots: Tensor) -> None:
        """Tokens ``start, start + 1, ...`` of one request are in `slots` (host tensor).

        Raises:
            ValueError: no such row or token, or `slots` are on a device or no integers of 32 bits.
        """
        end = start + slots.shape[0]
        self._check_range(row, start, end)
        slots = _on_host(slots)
        self.host[row, start:end] = slots
        if self.host is not self.req_to_token:
            # From fresh pageable memory: the next step could overwrite a pinned staging buffer before it is read.
            self.req_to_token[row, start:end] = slots.to(self.device, non_blocking=True)

    def write_each(self, rows: list[int], positions: list[int], slots: Tensor) -> None:
        """Token ``positions[i]`` of request ``rows[i]`` is in ``slots[i]``: a decode step, all requests at once.

        Raises:
            ValueError: no such row or token, arguments of unequal length, or `slots` are on a device or no integers of
                32 bits.
        """
        if not len(rows) == len(positions) == slots.shape[0]:
            raise ValueError(
                f"attnops: rows, positions and slots must have one entry per token, got {len(rows)}, {len(positions)} "
                f"and {slots.shape[0]}"
            )
        if rows:  # the extremes stand for all: a step has hundreds
            self._check_range(min(rows), min(positions), max(positions) + 1)
            self._check_range(max(rows), 0, 0)
        index = torch.tensor([rows, positions], dtype=torch.int64)
        slots = _on_host(slots)
        self.host[index[0], index[1]] = slots
        if self.host is not self.req_to_token:
            index = index.to(self.device, non_blocking=True)
            self.req_to_token[index[0], index[1]] = slots.to(self.device, non_blocking=True)

    def slots(self, row: int, start: int, end: int) -> Tensor:
        """Slots of tokens ``[start, end)`` of a request: int32, host.

        Raises:
            ValueError: no such row or token.
        """
        self._check_range(row, start, end)
        return self.host[row, start:end]

    def _check_range(self, row: int, start: int, end: int) -> None:
        if not 0 <= row < self.size:
            raise ValueError(f"attnops: row must be in [0, {self.size}) of ReqToTokenPool, got {row}")
        if not 0 <= start <= end:
            raise ValueError(f"attnops: tokens [{start}, {end}) are none of a row of ReqToTokenPool")
        if end > self.max_context_len:
            raise ValueError(
                f"attnops: token {end - 1} is beyond max_context_len {self.max_context_len} of ReqToTokenPool"
            )


def _on_host(slots: Tensor) -> Tensor:
    if slots.device.type != "cpu":
        raise ValueError("attnops: ReqToTokenPool takes slots in host memory: it never waits for a device")
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"attnops: ReqToTokenPool takes slots of int32 or int64, got {slots.dtype}")
    if slots.dtype == torch.int64 and slots.numel():  # as int32 another slot's number
        least, most = (int(extreme) for extreme in slots.aminmax())
        if least < _INT32.min or most > _INT32.max:
            raise ValueError(f"attnops: ReqToTokenPool takes slots that an int32 holds, got {least} to {most}")
    return slots.to(torch.int32)
