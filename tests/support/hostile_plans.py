"""Plans of decode ops whose memory somebody else has written, between guards that show what is written beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
WAYS = ["words", "small", "some", "rows", "ones", "most", "least", "nan", "zeros", "edges"]
_GUARD = 1024  # elements on each side
_GUARD_VALUE = 0x5A


def spoil(tensor: Tensor, way: str, generator: torch.Generator) -> None:
    """Overwrites an int32 tensor, in place.

    Args:
        way: "words": any 32 bits. "small": numbers that a plan might hold. "some": of its own, one in five is anything.
            "rows": its own rows in another order. "edges": the ends of int32, and what lies near zero. Otherwise one
            value everywhere.
    """

    def numbers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, tensor.shape, generator=generator)

    was = tensor.cpu()
    if way in ("ones", "most", "least", "nan", "zeros"):
        now = torch.full_like(was, {"ones": -1, "most": INT_MAX, "least": INT_MIN, "nan": 0x7FC00000, "zeros": 0}[way])
    elif way == "small":
        now = numbers(-2, 9)
    elif way == "some":
        now = torch.where(numbers(0, 5) == 0, numbers(-3, 40), was)
    elif way == "rows":
        now = was[torch.randperm(len(was), generator=generator)]
    elif way == "edges":
        edges = torch.tensor([INT_MIN, INT_MIN + 1, -64, -1, 0, 1, 2, 63, 1 << 16, 1 << 22, INT_MAX - 64, INT_MAX])
        now = edges[numbers(0, len(edges))]
    else:
        now = numbers(INT_MIN, INT_MAX)
    tensor.copy_(now.to(torch.int32))


class Between:
    """A tensor of a plan in one allocation with guards on both sides."""

    def __init__(self, tensor: Tensor):
        size = tensor.numel() * tensor.element_size()
        self._whole = torch.full((size + 8 * _GUARD,), _GUARD_VALUE, dtype=torch.uint8, device=tensor.device)
        self._inner = slice(4 * _GUARD, 4 * _GUARD + size)
        self.view = self._whole[self._inner].view(tensor.dtype).view(tensor.shape)
        self.view.copy_(tensor)

    def is_whole(self) -> bool:
        guards = torch.cat([self._whole[: self._inner.start], self._whole[self._inner.stop :]])
        return bool((guards == _GUARD_VALUE).all())


class HostilePlan:
    """A copy of a plan, spoiled. `unharmed` tells whether a call has written beside its tensors.

    Args:
        plan: As a `*_plan` op made it.
        way: See `spoil`.
        counters: Also the semaphores, which a plan's calls count with.
    """

    def __init__(self, plan: Any, way: str, seed: int, counters: bool = False):
        generator = torch.Generator().manual_seed(seed)
        names = ["tile_scheduler_metadata", "num_splits", "out_partial", "lse_partial", "semaphores"]
        self._tensors = {name: Between(getattr(plan, name)) for name in names}
        self.plan = dataclasses.replace(plan, **{name: tensor.view for name, tensor in self._tensors.items()})
        for name in names[:2] + names[4:] * counters:
            spoil(self._tensors[name].view, way, generator)

    def unharmed(self) -> bool:
        return all(tensor.is_whole() for tensor in self._tensors.values())
