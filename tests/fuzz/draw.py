"""What a case is drawn from: a seed and a number give the same case on every machine."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_BANK_SIZE = 1 << 21
# What a GPU call says that no kernel serves: no row of its table, or none at all in this build.
NO_KERNEL = ("no kernel fits these arguments", "is not available for", "Could not run 'attnops::")


class Refused(Exception):
    """The library says honestly that it has no kernel for a legal call: the case does not count."""


class Void(Exception):
    """What was drawn is no case: nothing was called."""


class Failure(AssertionError):
    """A case that does not hold."""


@functools.cache
def _bank() -> Tensor:
    """Normal values to cut rows from: drawing them anew would take longer than the calls under test."""
    return torch.randn(_BANK_SIZE, generator=torch.Generator().manual_seed(1))


class Draw:
    """Random choices of one case, and what is known of it for the line that reproduces it.

    Attributes:
        notes: What was chosen, by name.
        seen: Things that the run counts: ops, modes, backends.
    """

    def __init__(self, seed: int, index: int, device: str = "cpu") -> None:
        self.random = random.Random(f"{seed}:{index}:{device}")
        self.device = device
        self.notes: dict[str, Any] = {}
        self.seen: list[str] = []

    def note(self, **values: Any) -> None:
        self.notes |= values

    def saw(self, *names: str) -> None:
        self.seen += names

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def number(self, low: int, high: int) -> int:
        """Of [low, high]."""
        return self.random.randint(low, high)

    def normal(self, *shape: int) -> Tensor:
        """float32 of standard deviation 1, on the CPU."""
        count = 1
        for extent in shape:
            count *= extent
        if count > _BANK_SIZE // 2:
            generator = torch.Generator().manual_seed(self.number(0, 1 << 60))
            return torch.randn(*shape, generator=generator)
        begin = self.number(0, _BANK_SIZE - count)
        return _bank()[begin : begin + count].view(shape).clone()

    def permutation(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.number(0, 1 << 60))
        return torch.randperm(count, generator=generator)

    def length(self, longest: int) -> int:
        """A number of tokens in [0, longest]: empty, short, near a multiple of what kernels count in, or any."""
        kind = self.number(0, 9)
        if kind == 0:
            return 0
        if kind == 1:
            return min(self.number(1, 3), longest)
        if kind <= 5:
            unit = self.pick([8, 16, 32, 64, 128])
            return min(max(unit * self.number(1, max(longest // unit, 1)) + self.number(-1, 1), 0), longest)
        return self.number(0, longest)

    def batch(self, few: Sequence[int], query_elements: int) -> int:
        """Requests: none, a few, or more works than a GPU has SMs. `query_elements`: of one of them."""
        if self.chance(0.03):
            return 0
        if not self.chance(0.05):
            return self.pick(few)
        self.saw("mode many requests")
        return max(min(self.pick([30, 80, 150, 300]), 2_000_000 // max(query_elements, 1)), 1)

    def lengths(self, count: int, longest: int) -> list[int]:
        """Of `count` requests: unlike, or all alike."""
        if self.chance(0.1):
            return [self.length(longest)] * count
        return [self.length(longest) for _ in range(count)]
