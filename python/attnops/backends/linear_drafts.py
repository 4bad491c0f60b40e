"""Drafts of linear layers: which inputs a draft's convolution sees, and what remains once some are accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.ops._drafts import draft_parents
from attnops.pools import MambaPool
from attnops.types import Limits

MAX_DRAFTS = 16  # of a request: csrc/core/linear_verify.h


class DraftInputs:
    """The convolutions' inputs of the last step's drafts, of all layers, at addresses that stay.

    Args:
        pool: States of the requests, with rings.
        limits: The largest step to come.
    """

    def __init__(self, pool: MambaPool, limits: Limits) -> None:
        device, size = pool.device, limits.max_batch_size
        self.most = min(limits.max_tokens_per_request, pool.speculative_num_draft_tokens)
        self.inputs: Tensor | None = None
        self._width = 1
        if pool.states.conv is not None:
            channels, history = pool.states.conv.shape[-2:]
            self._width = history + 1
            rows = (pool.num_layers, size * self.most, channels)
            self.inputs = torch.zeros(rows, dtype=pool.states.conv.dtype, device=device)
            self._weight = torch.zeros(channels, self._width, dtype=pool.states.conv.dtype, device=device)
        self._windows = torch.zeros(size * self.most * self._width, dtype=torch.int64, device=device)

    def windows(self, batch_size: int, drafts: int) -> Tensor:
        """``[B, T, width]``: places of each draft's inputs among the last of its state and the drafts."""
        return self._windows[: batch_size * drafts * self._width].view(batch_size, drafts, self._width)

    def fill(self, windows: Tensor, tree_mask: Tensor | None) -> None:
        """Of a chain, or of a tree with a packed mask. Device work."""
        batch_size, drafts, width = windows.shape
        history = width - 1
        numbers = torch.arange(drafts, device=windows.device)
        parents = draft_parents(tree_mask, batch_size, drafts, windows.device)
        state = torch.arange(history, device=windows.device) - 1  # of an input of the state: the one before it
        earlier = torch.cat([state.clamp(min=0).expand(batch_size, history), parents + history], dim=1)
        place = (numbers + history).expand(batch_size, drafts)
        for i in range(history, -1, -1):
            windows[..., i] = place
            place = earlier.gather(1, place) if history else place

    def convolve(
        self,
        place: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        states: Tensor,
        slots: Tensor,
        windows: Tensor,
    ) -> Tensor:
        """The convolution of drafts ``[B * T, channels]`` of the layer at `place`. States are only read."""
        assert self.inputs is not None
        batch_size, drafts, width = windows.shape
        if width != weight.shape[1]:
            raise ValueError(f"attnops: the convolution must have width {width} as MambaPool, got {weight.shape[1]}")
        self.inputs[place, : batch_size * drafts].copy_(x)
        past = states[slots.clamp(min=0)].transpose(1, 2)
        seen = torch.cat([past, x.view(batch_size, drafts, -1)], dim=1)
        rows = torch.arange(batch_size, device=x.device)[:, None, None]
        out = (seen[rows, windows].float() * weight.T.float()).sum(2)
        out = out if bias is None else out + bias.float()
        out = torch.nn.functional.silu(out) if silu else out
        return out.flatten(0, 1).to(x.dtype)

    def commit(self, conv: Tensor, slots: Tensor, accepted_path: Tensor, accepted_len: Tensor) -> None:
        """Accepted inputs into the states of all layers, ``[layers, slots, channels, width - 1]``."""
        if self.inputs is None:
            return
        batch_size, drafts = accepted_path.shape
        bounds = ops.build_cu_seqlens(accepted_len.clamp(0, drafts))
        rows = torch.arange(batch_size * drafts, device=slots.device)
        request = torch.searchsorted(bounds[1:], rows, right=True, out_int32=True).clamp(max=batch_size - 1).long()
        draft = (rows - bounds[request]).clamp(0, drafts - 1)
        source = request * drafts + accepted_path[request, draft].clamp(0, drafts - 1)
        for states, inputs in zip(conv, self.inputs):
            ops.causal_conv1d(
                inputs[source],
                self._weight,
                None,
                conv_states=states,
                cu_seqlens=bounds,
                state_indices=slots,
                silu=False,
            )
