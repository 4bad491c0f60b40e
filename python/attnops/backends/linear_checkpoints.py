"""States that prompts leave behind on their way through linear layers, for a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.pools.mamba import STATE_CHUNK, HybridReqToTokenPool
from attnops.types import Limits


@dataclass(frozen=True)
class Checkpoints:
    """Those of one step, at addresses that stay.

    Attributes:
        pairs: int32 ``[B, max_checkpoints, 2]``: after how many tokens of the request, and to which slot; slot -1: the
            step does not get there.
        cells: int32 ``[B, chunks]``: the same slots by the multiples of 64 tokens that the step passes.
        wide_cells: Their memory, with a column behind them for what is nowhere.
    """

    pairs: Tensor
    cells: Tensor
    wide_cells: Tensor

    def keep_inputs(
        self, x: Tensor, weight: Tensor, conv_states: Tensor, bounds: Tensor, slots: Tensor, prefix_lens: Tensor
    ) -> None:
        """States of a convolution, which are its last inputs: of the step's tokens, or of the state before them."""
        size, count, _ = self.pairs.shape
        width = weight.shape[1] - 1
        ends = self.pairs[..., 0] - prefix_lens[:, None]  # tokens of the step until then
        place = ends[..., None].long() - width + torch.arange(width, device=x.device)
        past = conv_states[slots.clamp(min=0)].transpose(1, 2)
        past = torch.where((prefix_lens > 0)[:, None, None], past, 0)
        rows = torch.arange(size, device=x.device)[:, None, None]
        earlier = past[rows, (place + width).clamp(0, width - 1)]
        own = x[(bounds[:-1, None, None] + place).clamp(0, x.shape[0] - 1)]
        inputs = torch.where((place >= 0)[..., None], own, earlier.to(x.dtype)).flatten(0, 2)
        edges = torch.arange(size * count + 1, dtype=torch.int32, device=x.device) * width
        targets = self.pairs[..., 1].flatten().contiguous()
        ops.causal_conv1d(inputs, weight, None, conv_states=conv_states, cu_seqlens=edges, state_indices=targets)


class CheckpointInputs:
    """Buffers for the largest step of a backend."""

    def __init__(self, pool: HybridReqToTokenPool, limits: Limits) -> None:
        self.pool = pool
        chunks = limits.max_num_tokens // STATE_CHUNK + 1
        make = lambda *shape: torch.full(shape, -1, dtype=torch.int32, device=pool.device)  # noqa: E731
        self._pairs = make(limits.max_batch_size, pool.max_checkpoints, 2)
        self._cells = make(limits.max_batch_size, chunks + 1)

    def of(self, batch_size: int) -> Checkpoints:
        wide = self._cells[:batch_size]
        return Checkpoints(self._pairs[:batch_size], wide[:, :-1], wide)

    def fill(self, step: Checkpoints, rows: Tensor, slots: Tensor, prefix_lens: Tensor, new_lens: Tensor) -> None:
        """Device work: what of the rows' wishes the step's tokens reach."""
        named = self.pool.checkpoints[rows.long().clamp(0, self.pool.size - 1)]
        at, targets = named.unbind(2)
        before, after = prefix_lens[:, None], (prefix_lens + new_lens)[:, None]
        reached = (at > before) & (at <= after) & (slots >= 0)[:, None]
        targets = torch.where(reached, targets, -1)
        step.pairs.copy_(torch.stack([at, targets], 2))
        nowhere = step.wide_cells.shape[1] - 1
        cell = at // STATE_CHUNK - before // STATE_CHUNK - 1
        step.wide_cells.fill_(-1)
        step.wide_cells.scatter_(1, torch.where(targets >= 0, cell, nowhere).long(), targets)
