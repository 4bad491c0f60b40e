"""Any op with any words: integers, floats, numbers and extents of a right call are spoilt, several at a time.

What is drawn elsewhere is hostile in one known place. Here nobody knows what comes out: an answer, or an error that
names the op. The process lives, what an op does not write stays, and nothing beside a tensor is read or written.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from fenced import Fenced
from recorded_calls import Recorded, recorded_calls, written
from right_calls import moved
from torch import Tensor

from .draw import Draw, Failure, Refused
from .memory import bytes_of
from .options import set_isa

INT32 = [-(2**31), 1 - 2**31, -1, 0, 1, 2, 3, 7, 16, 17, 31, 32, 63, 64, 65, 127, 128, 1000, 10**6, 2**16, 2**22]
INT32 += [2**28 - 1, 2**28, 2**28 + 1, 2**30, 2**31 - 64, 2**31 - 2, 2**31 - 1]
INTEGERS = {torch.int32: INT32, torch.int64: [*INT32, -(2**63), 2**31, 2**32, 2**40, 2**62, 2**63 - 1]}
NUMBERS: dict[str, list[Any]] = {
    "int": [*INTEGERS[torch.int64], -(2**31) - 1, -2, 8, 100],
    "float": [0.0, -0.0, 1.0, -1.0, 0.5, 30.0, 1e-45, 1e-30, 3e38, -3e38, 1e39, math.inf, -math.inf, math.nan],
    "bool": [False, True],
}
FLOATS = [math.nan, math.inf, -math.inf, 6e4]
# On a GPU it follows the rows of a plan as they stand: see SECURITY.md.
FOLLOW_PLANS = {"xqa_decode"}


@functools.cache
def _calls() -> dict[str, Recorded]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return recorded_calls()


class _Spoilt:
    """Arguments of a right call in memory with fences, and what was done to them."""

    def __init__(self, draw: Draw, function: Any, given: dict[str, Any]) -> None:
        self.draw, self.function, self.notes = draw, function, dict[str, Any]()
        self.fences: dict[str, Fenced] = {}
        self.given = {key: self._fence(key, value) for key, value in given.items()}
        self.types = {a.name: str(a.type) for a in function._schema.arguments}

    def _fence(self, key: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
            return [self._fence(f"{key} {i}", part) for i, part in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        self.fences[key] = Fenced(moved(value, self.draw.device), at_end=self.draw.chance(0.8))
        return self.fences[key].view

    def some(self, names: list[str], counts: list[int]) -> list[str]:
        return self.draw.random.sample(names, min(self.draw.pick(counts), len(names)))

    def check_all(self) -> None:
        """In half of the calls: the checked mode."""
        if "report" in self.types and self.draw.chance(0.5):
            self.given["report"] = self._fence("report", torch.zeros(8, dtype=torch.int32))

    def integers(self) -> None:
        names = [key for key, fence in self.fences.items() if fence.view.dtype in INTEGERS and fence.view.numel()]
        for key in self.some(names, [0, 1, 1, 2, 3, len(names)]):
            cells = self.fences[key].view.view(-1)
            way, edges = self.draw.pick(["some", "edges", "small", "same", "order"]), INTEGERS[cells.dtype]
            if way == "some":
                for _ in range(self.draw.number(1, 4)):
                    cells[self.draw.number(0, len(cells) - 1)] = self.draw.pick(edges)
            elif way == "edges":
                cells.copy_(torch.tensor([self.draw.pick(edges) for _ in range(len(cells))]))
            elif way == "small":
                cells.copy_(torch.tensor([self.draw.number(-2, 70) for _ in range(len(cells))]))
            elif way == "same":
                cells.fill_(self.draw.pick(edges))
            else:
                cells.copy_(cells.cpu()[self.draw.permutation(len(cells))])
            self.notes[key] = way

    def floats(self) -> None:
        names = [key for key, fence in self.fences.items() if fence.view.is_floating_point() and fence.view.numel()]
        for key in self.some(names, [0, 0, 0, 1, 2]):
            cells = bytes_of(self.fences[key].view).view(-1)
            if cells.dtype == torch.uint8:
                some = torch.tensor([self.draw.number(0, 255) for _ in range(97)])
                cells.copy_(some.repeat(len(cells) // 97 + 1)[: len(cells)])
            else:
                cells[self.draw.number(0, len(cells) - 1) :] = self.draw.pick(FLOATS)
            self.notes[key] = "floats"

    def numbers(self) -> None:
        for key in self.some([key for key, kind in self.types.items() if kind in NUMBERS], [0, 0, 1, 1, 2, 3]):
            self.notes[key] = self.given[key] = self.draw.pick(NUMBERS[self.types[key]])

    def absence(self) -> None:
        names = [key for key, kind in self.types.items() if kind.startswith("Optional") and self.given[key] is not None]
        if names and self.draw.chance(0.2):
            key = self.draw.pick(names)
            self.notes[key] = self.given[key] = None

    def extents(self) -> None:
        """Fewer elements along an axis of one tensor, or wherever a tensor has as many."""
        tensors = {key: value for key, value in self.given.items() if isinstance(value, Tensor) and value.dim()}
        if not tensors or not self.draw.chance(0.3):
            return
        key = self.draw.pick(sorted(tensors))
        axis = self.draw.number(0, tensors[key].dim() - 1)
        extent, everywhere = tensors[key].shape[axis], self.draw.chance(0.6)
        now = self.draw.number(0, extent)
        for name, value in tensors.items() if everywhere else [(key, tensors[key])]:
            axes = [i for i, size in enumerate(value.shape) if size == extent] if everywhere else [axis]
            if axes:
                self.given[name] = value.narrow(axes[0], 0, now)
        self.notes[f"extent {axis} of {key}"] = f"{now}{' everywhere' if everywhere else ''}"


def any_words(draw: Draw) -> None:
    """One call of `torch.ops.attnops` with anything that the schema lets pass."""
    set_isa(draw)
    name = draw.pick(sorted(_calls().keys() - (set() if draw.device == "cpu" else FOLLOW_PLANS)))
    function, given = _calls()[name]
    call = _Spoilt(draw, function, given)
    for spoil in (call.check_all, call.integers, call.floats, call.numbers, call.absence, call.extents):
        spoil()
    draw.note(op=name, **{key.replace(" ", "_"): value for key, value in call.notes.items()})
    draw.saw("hostile words", f"hostile words of {name}")
    writes = written(function)
    kept = {key: fence for key, fence in call.fences.items() if key.split()[0] not in writes}
    before = {key: fence.bytes() for key, fence in kept.items()}
    refused = ""
    try:
        function(**call.given)
    except RuntimeError as error:
        refused = str(error).split("\n")[0]
    if draw.device != "cpu":
        torch.cuda.synchronize()
    if refused and f"attnops::{name}" not in refused:
        if draw.device != "cpu" and "CUDA error" not in refused:
            raise Refused(refused[:120])  # no kernel of a GPU's tables serves such a call
        raise Failure(f"{name}: an error without its name: {refused[:200]}")
    for key, fence in call.fences.items():
        if not fence.is_whole():
            raise Failure(f"{name} writes beside {key}")
    for key, was in before.items():
        if not torch.equal(kept[key].bytes(), was):
            raise Failure(f"{name} writes {key}, which is none of its outputs")
