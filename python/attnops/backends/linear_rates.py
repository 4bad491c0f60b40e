"""Decay rates of Mamba2's and Lightning's heads, for all layers of a step at once."""

from __future__ import annotations

import torch
from torch import Tensor


class DecayRates:
    """``-exp(A_log)`` of every layer, in three launches a step in place of two a layer.

    Each step computes them anew, inside the graph. So a weight that is written in place counts from the next step or
    replay on, whatever writes it. Versions would not tell: `param.data.copy_` and collectives raise none.

    A step computes what the layers of the steps before had. A layer whose tensor is another one by now computes its
    own, and so do all layers until each has run.

    Args:
        num_layers, num_heads: Of the pool of states.
        device: Where the layers' tensors are.
    """

    def __init__(self, num_layers: int, num_heads: int, device: torch.device) -> None:
        self._rates = torch.zeros(num_layers, num_heads, device=device)
        self._rows = self._rates.unbind()  # at addresses that stay
        self._seen: dict[int, Tensor] = {}  # A_log that a layer had last, by place
        self._computed: list[Tensor] = []  # A_log of the step's rates, by place; empty: there are none

    def begin(self) -> None:
        """Host work before a step: nothing is computed yet. A replayed graph may not compute what a later one does."""
        self._computed = []

    def compute(self) -> None:
        """Device work before a step's layers."""
        seen = [self._seen[place] for place in range(len(self._rows)) if place in self._seen]
        self._computed = seen if len(seen) == len(self._rows) and all(map(self._fits, seen)) else []
        if self._computed:
            with torch.no_grad():  # A_log may be a parameter
                torch.stack(self._computed, out=self._rates)
                self._rates.exp_().neg_()

    def of(self, place: int, A_log: Tensor) -> Tensor:
        """float32 ``[num_heads]``: the rates of the layer at `place` of the pool, whose `A_log` has that shape."""
        if self._computed and self._computed[place] is A_log:
            return self._rows[place]
        self._seen[place] = A_log
        return -A_log.exp()

    def _fits(self, A_log: Tensor) -> bool:
        """Whether it can be read before its layer runs; what does not fit is for the op to refuse, or is away."""
        return (
            A_log.shape == self._rates.shape[1:]
            and A_log.dtype == self._rates.dtype
            and A_log.device == self._rates.device
            and A_log.untyped_storage().nbytes() > 0
        )
