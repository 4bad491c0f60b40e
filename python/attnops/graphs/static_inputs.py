"""Inputs at addresses that never change: a graph sees as many rows of each as it has, a step fills those it brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("token", "request", "step")
MAX_CACHED_TARGETS = 1024  # shapes of steps whose views are kept


@dataclass(frozen=True)
class StaticInput:
    """An input of captured steps beside ids and positions: hidden states of a draft model, position offsets, ...

    Args:
        shape: Of a row; of the whole input when it is per step.
        dtype: Exactly that of the tensors to come.
        per: "token" or "request": as many rows as the step has; "step": one tensor of `shape`.
        lead: Of dimensions before the rows: ``(3,)`` for positions of three axes, ``[3, num_tokens]``.
        padding: What rows behind the step's own hold. The model computes them, too, and nobody reads the result.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    per: str = "token"
    padding: float = 0
    lead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.per not in KINDS:
            raise ValueError(f"attnops: per must be one of {', '.join(KINDS)}, got {self.per!r}")
        if self.lead and self.per == "step":
            raise ValueError("attnops: an input per step has no rows, so no dimensions before them (lead)")

    def rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a tensor of this input."""
        return tensor.narrow(len(self.lead), begin, end - begin)


class StaticInputs:
    """The memory of some `StaticInput`, shared by graphs of all sizes.

    Args:
        declared: By name.
        max_tokens, max_requests: Of the largest graph.
    """

    def __init__(
        self, declared: Mapping[str, StaticInput], device: torch.device, max_tokens: int, max_requests: int
    ) -> None:
        self.declared = dict(declared)
        self._rows = {"token": max_tokens, "request": max_requests}
        self._filled = {"token": 0, "request": 0}  # rows from here on hold padding, in every graph
        self._targets: dict[tuple[int, int], list[tuple[list[str], list[Tensor]]]] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, one in self.declared.items():
            shape = one.shape if one.per == "step" else (*one.lead, self._rows[one.per], *one.shape)
            self.tensors[name] = torch.full(shape, one.padding, dtype=one.dtype, device=device)

    def views(self, tokens: int, requests: int) -> dict[str, Tensor]:
        """Of a graph of so many tokens and requests."""
        counts = {"token": tokens, "request": requests}
        return {
            name: self.tensors[name] if one.per == "step" else one.rows(self.tensors[name], 0, counts[one.per])
            for name, one in self.declared.items()
        }

    def reason_against(self, values: Mapping[str, Tensor], tokens: int, requests: int) -> str:
        """Why values cannot be copied in; empty: they can."""
        if values.keys() != self.declared.keys():
            missing, unknown = self.declared.keys() - values.keys(), values.keys() - self.declared.keys()
            what = f"misses {', '.join(sorted(missing))}" if missing else f"has unknown {', '.join(sorted(unknown))}"
            return f"the step {what}; the static inputs are {', '.join(self.declared) or 'none'} (inputs=...)"
        counts = {"token": (tokens,), "request": (requests,), "step": ()}
        for name, one in self.declared.items():
            value, shape = values[name], (*one.lead, *counts[one.per], *one.shape)
            if tuple(value.shape) != shape:
                return f"{name} must have shape {shape}, got {tuple(value.shape)}"
            # Integers may be of either width: engines differ, and no value that fits changes.
            if value.dtype != one.dtype and not {value.dtype, one.dtype} <= {torch.int32, torch.int64}:
                return f"{name} must be {one.dtype}, got {value.dtype}"
        return ""

    def fill(self, values: Mapping[str, Tensor], tokens: int, requests: int) -> None:
        """Copies a step in, of a `reason_against` that is empty. Device work on the current stream; nothing waits.

        Rows that an earlier step used and this one does not become padding again.
        """
        for names, targets in self._targets_of(tokens, requests):
            # One launch for all of a dtype; torch copies one by one where they are elsewhere, or of another width.
            torch._foreach_copy_(targets, [values[name] for name in names], non_blocking=True)
        counts = {"token": tokens, "request": requests}
        if counts != self._filled:
            for name, one in self.declared.items():
                if one.per != "step" and counts[one.per] < self._filled[one.per]:
                    one.rows(self.tensors[name], counts[one.per], self._filled[one.per]).fill_(one.padding)
            self._filled = counts

    def _targets_of(self, tokens: int, requests: int) -> list[tuple[list[str], list[Tensor]]]:
        """By dtype: names, and the rows that a step of so many tokens and requests fills."""
        key = (tokens, requests)
        if key not in self._targets:
            if len(self._targets) >= MAX_CACHED_TARGETS:
                self._targets.clear()
            groups: dict[torch.dtype, tuple[list[str], list[Tensor]]] = {}
            for name, view in self.views(tokens, requests).items():
                names, targets = groups.setdefault(view.dtype, ([], []))
                names.append(name)
                targets.append(view)
            self._targets[key] = list(groups.values())
        return self._targets[key]

    def clear(self) -> None:
        """Padding everywhere, as before the first step."""
        for name, tensor in self.tensors.items():
            tensor.fill_(self.declared[name].padding)
        self._filled = {"token": 0, "request": 0}

    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
