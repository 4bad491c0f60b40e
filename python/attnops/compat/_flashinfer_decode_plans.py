"""The plans of one of FlashInfer's decode wrappers: one for each window, whose memory stays while the geometry does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._wide import WidePlan, is_wide
from attnops.metadata.plan import XqaDecodePlan

Plan = XqaDecodePlan | WidePlan


class DecodePlans:
    """Plans by window, and the lengths that they are made of.

    Attributes:
        planned: Of the window that `plan` named; None before it.
        lens: int32 ``[B]``: where a captured run reads them.
        cuts: Of batch-invariant plans; 0: balanced.
    """

    planned: Plan | None = None
    lens: Tensor
    cuts: int = 0

    def __init__(self, device: torch.device, graph: bool) -> None:
        self.device, self._graph = device, graph
        self._by_window: dict[int, Plan] = {}

    def set(self, key: dict[str, Any], cuts: int, lengths: Tensor, page_size: int) -> None:
        """Plans for these lengths.

        Raises:
            ValueError: a graph's wrapper gets another geometry.
        """
        last = self.planned
        if last is None or last.key != key or last.fixed_split_tokens != -cuts:
            if last is not None and self._graph:
                raise ValueError("attnops.compat: use_cuda_graph fixes the geometry: make a wrapper for each")
            self.cuts, self.lens, self._page_size = cuts, lengths, page_size
            self.planned = self._new(key)
            self._by_window = {key["window_left"]: self.planned}
        else:
            self.lens.copy_(lengths)
        for plan in self._by_window.values():
            self._fill(plan)

    def for_window(self, window_left: int) -> Plan:
        """That of a window, made at its first call; `set` fills it anew from then on."""
        if window_left not in self._by_window:
            assert self.planned is not None
            key: dict[str, Any] = self.planned.key | {"window_left": window_left}
            plan = self._by_window[window_left] = self._new(key)
            self._fill(plan)
        return self._by_window[window_left]

    def _new(self, key: dict[str, Any]) -> Plan:
        if is_wide(key["head_dim"], key["head_dim"]):
            return WidePlan(key, -self.cuts)
        return XqaDecodePlan.allocate(
            device=self.device, fixed_split_tokens=-self.cuts, page_size=self._page_size, **key
        )

    def _fill(self, plan: Plan) -> None:
        if isinstance(plan, XqaDecodePlan):
            ops.xqa_decode_plan(plan, self.lens)
