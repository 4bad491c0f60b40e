"""Drafts of linear layers: their convolutions, and what remains once some are accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.pools import MambaPool
from attnops.types import Limits


class ConvolvedDrafts:
    """The state that each of the last step's drafts would leave in the convolutions of all layers.

    Args:
        pool: States of the requests, with rings.
        limits: The largest step to come.
    """

    def __init__(self, pool: MambaPool, limits: Limits) -> None:
        self.most = min(limits.max_tokens_per_request, pool.speculative_num_draft_tokens)
        self._windows: Tensor | None = None
        conv = pool.states.conv
        if conv is not None:
            self._windows = conv.new_zeros(pool.num_layers, limits.max_batch_size * self.most, *conv.shape[2:])

    def of(self, place: int, batch_size: int, drafts: int) -> Tensor:
        """``[B, T, channels, width - 1]``: those of a layer, at an address that stays."""
        assert self._windows is not None
        return self._windows[place, : batch_size * drafts].unflatten(0, (batch_size, drafts))

    def commit(
        self, conv: Tensor, slots: Tensor, accepted_path: Tensor, accepted_len: Tensor, report: Tensor | None
    ) -> None:
        """The last accepted draft's windows into the states of all layers, ``[layers, slots, channels, width - 1]``.

        A request that accepts none keeps its states. Device work.
        """
        batch_size, drafts = accepted_path.shape
        last = (accepted_len.clamp(max=drafts) - 1).long()
        draft = accepted_path.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1).clamp(0, drafts - 1)
        rows = torch.arange(0, batch_size * drafts, drafts, dtype=torch.int32, device=slots.device)
        kept = torch.where(last >= 0, rows + draft, -1).int()
        ops.copy_states(conv, kept, slots, source=self._windows, report=report)
