"""causal-conv1d's two functions, forward alone."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import refuse
from attnops.compat._errors import names_the_peers

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def _is_silu(name: str, activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise refuse(name, f"activation={activation!r}", "None, silu and swish are served")
    return activation is not None


def _rows(x: Tensor) -> Tensor:
    """``[B * T, C]`` of ``[B, C, T]``, a view where channels are dense."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@names_the_peers("causal_conv1d_fn", conv_states="initial_states")
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A convolution over the tokens of each sequence: `attnops.ops.causal_conv1d`.

    Args:
        x: ``[B, C, T]``; without a copy where channels are dense.
        weight: ``[C, W]``.
        bias: ``[C]``.
        seq_idx: Not honoured.
        initial_states: ``[B, C, W - 1]``; None: zeros.
        return_final_states: Return the last inputs, too, in `final_states_out` where it is given.
        activation: None, "silu" or "swish".

    Returns:
        ``[B, C, T]``, channels dense; with the final states if they are asked for.
    """
    silu = _is_silu("causal_conv1d_fn", activation)
    if seq_idx is not None:
        raise refuse("causal_conv1d_fn", "seq_idx=", "attnops.ops.causal_conv1d takes ragged sequences by cu_seqlens")
    batch, channels, tokens = x.shape
    if initial_states is None:
        states = x.new_zeros(batch, channels, weight.shape[1] - 1)
    else:
        states = initial_states.clone(memory_format=torch.contiguous_format)
    rows = _rows(x)
    slots = torch.arange(batch, dtype=torch.int32, device=x.device)
    out = ops.causal_conv1d_update(rows, weight, bias, conv_states=states, state_indices=slots, silu=silu)
    out = out.view(batch, tokens, channels).transpose(1, 2)
    if not return_final_states:
        return out
    if final_states_out is None:
        return out, states
    return out, final_states_out.copy_(states)


@names_the_peers("causal_conv1d_update", conv_states="conv_state", state_indices="conv_state_indices")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Some tokens of each sequence: `attnops.ops.causal_conv1d_update`.

    Args:
        x: ``[B, C]`` or ``[B, C, T]``.
        conv_state: ``[slots, C, W - 1]``, updated in place.
        cache_seqlens: Not honoured: states in a ring.
        conv_state_indices: int32 ``[B]``; None: the first B slots. Below 0: padding.

    Returns:
        Of x's shape.
    """
    silu = _is_silu("causal_conv1d_update", activation)
    if cache_seqlens is not None:
        raise refuse("causal_conv1d_update", "cache_seqlens=", "states hold the last inputs in order")
    wide = x.unsqueeze(-1) if x.dim() == 2 else x
    batch, channels, tokens = wide.shape
    if conv_state_indices is None:
        conv_state_indices = torch.arange(batch, dtype=torch.int32, device=x.device)
    rows = _rows(wide)
    out = ops.causal_conv1d_update(
        rows, weight, bias, conv_states=conv_state, state_indices=conv_state_indices, silu=silu
    )
    return out.view(batch, tokens, channels).transpose(1, 2).reshape(x.shape)
