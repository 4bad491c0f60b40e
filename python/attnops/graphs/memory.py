"""What captures take: bytes by size, by piece, and of the pool that they share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of device memory.

    Attributes:
        static: Inputs and outputs, shared by all sizes.
        pieces: What each capture added to the device's memory in use; other programs there count, too. By size in the
            order of capture, and by piece in the model's order. A whole step is one piece. The first and largest size
            takes what the smaller ones reuse.
        pool: All that the graphs' memory pool holds (of every runner that shares it); None: nothing was recorded, or
            the recorder has no pool.
        unit: What sizes count: "requests" or "tokens".
    """

    static: int
    pieces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pool: int | None = None
    unit: str = "requests"

    @property
    def graphs(self) -> dict[int, int]:
        """What each size added."""
        return {size: sum(taken) for size, taken in self.pieces.items()}

    @property
    def total(self) -> int:
        """Static memory and what the captures added: the pool, and what the driver keeps for the graphs themselves."""
        return self.static + sum(self.graphs.values())

    def __str__(self) -> str:
        lines = []
        for size, taken in self.pieces.items():
            apart = ""
            if len(taken) > 1:
                largest = max(range(len(taken)), key=taken.__getitem__)
                apart = f" in {len(taken)} pieces, at most {_mib(taken[largest])} (piece {largest})"
            lines.append(f"{size:>6} {self.unit}: {_mib(sum(taken)):>11}{apart}")
        if self.pool is not None:
            lines.append(f"pool of the graphs: {_mib(self.pool)}")
        return "\n".join([*lines, f"static inputs and outputs: {_mib(self.static)}"])


class MemoryMeter:
    """Adds up what captures take, piece by piece.

    Args:
        device: Of the graphs.
        used_bytes: Device memory in use; by default of the device (a CPU: 0).
    """

    def __init__(self, device: torch.device, used_bytes: Callable[[], int] | None = None) -> None:
        self._used_bytes = used_bytes or (lambda: _used_bytes(device))
        self._pieces: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Before the first capture. Memory that dead Python cycles hold is not to be freed between two of them."""
        gc.collect()
        self._pieces.clear()

    @contextlib.contextmanager
    def piece(self, size: int) -> Iterator[None]:
        """Around the capture of a size's next piece.

        Python collects no garbage meanwhile: what that frees on the device would count, and a capture may fail by it.
        """
        before, collects = self._used_bytes(), gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
        self._pieces.setdefault(size, []).append(self._used_bytes() - before)

    def report(self, static: int, recorder: object, unit: str) -> MemoryReport:
        """Args:
        recorder: With `pool_bytes()`, where it has a pool.
        """
        pool_bytes = getattr(recorder, "pool_bytes", None) if self._pieces else None
        pieces = {size: tuple(taken) for size, taken in self._pieces.items()}
        return MemoryReport(static, pieces, None if pool_bytes is None else pool_bytes(), unit)


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # what eager steps left is free, but the driver does not know it
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
