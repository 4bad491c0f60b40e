"""Drafts of linear layers whose states are all kept: one of the two ways to verify, for engines that expect it.

`attnops.ops.delta_verify` and `ssd_verify` keep rings: they read a state once for all drafts and write none. These
functions write the state after each draft to a slot of its own, as FLA, vLLM and FlashInfer do. Accepting is then
choosing a slot. The price is a decode step for each draft: T launches, which read and write T states of each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.ops._drafts import draft_parents

__all__ = ["accepted_slots", "delta_verify_snapshots", "ssd_verify_snapshots"]


def delta_verify_snapshots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    states: Tensor,
    state_indices: Tensor,
    snapshot_slots: Tensor,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Draft tokens of each request through the gated delta rule, with the state after each draft.

    The bits are those of `attnops.ops.delta_decode`, draft by draft. The request's own state is only read.

    Args:
        q, k, v, a, b: As in `attnops.ops.delta_decode`, of ``B * T`` tokens, those of a request side by side.
        states: ``[num_slots, HV, V, K]``; slots named by `snapshot_slots` are written.
        state_indices: int32 ``[B]``: slots that are only read; below 0: padding, nothing is touched and out is 0.
        snapshot_slots: int32 ``[B, T]``: where the state after each draft goes. Slots of no other cell, nor of
            `state_indices`. Below 0: nowhere, which a draft without a successor may have; out of its successors is 0.
        tree_mask: uint8 ``[B, T, ceil(T / 8)]``, as in `attnops.ops.delta_verify`; None: a chain.
        out: ``[B * T, HV, V]``; allocated when omitted.
        options: `A_log`, `dt_bias`, `scale`, `lower_bound`, `qk_l2norm` and `report` of `attnops.ops.delta_decode`.

    Raises:
        ValueError: tokens that are not T for each request, or a tree of another shape.
        RuntimeError: as of `attnops.ops.delta_decode`.
    """
    out = v.new_empty(v.shape) if out is None else out
    decode: Callable[..., Tensor] = ops.delta_decode

    def step(tokens: Sequence[Tensor | None], **where: Any) -> None:
        decode(*tokens, **where, **options)

    _steps("delta_verify_snapshots", step, [q, k, v, a, b], out, states, state_indices, snapshot_slots, tree_mask)
    return out


def ssd_verify_snapshots(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    states: Tensor,
    state_indices: Tensor,
    snapshot_slots: Tensor,
    z: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Draft tokens of each request through a state space, with the state after each draft.

    Args:
        x, dt, B, C, z: As in `attnops.ops.ssd_decode`, of ``B * T`` tokens, those of a request side by side.
        A: float32 ``[H]``.
        states: ``[num_slots, H, P, N]``.
        state_indices, snapshot_slots, tree_mask: As in `delta_verify_snapshots`.
        out: ``[B * T, H, P]``; allocated when omitted.
        options: `D`, `dt_bias`, `scale`, `dt_softplus` and `report` of `attnops.ops.ssd_decode`.

    Raises:
        ValueError: tokens that are not T for each request, or a tree of another shape.
        RuntimeError: as of `attnops.ops.ssd_decode`.
    """
    out = x.new_empty(x.shape) if out is None else out
    decode: Callable[..., Tensor] = ops.ssd_decode

    def step(tokens: Sequence[Tensor | None], **where: Any) -> None:
        u, rate, keys, queries, gate = tokens
        decode(u, rate, A, keys, queries, z=gate, **where, **options)

    _steps("ssd_verify_snapshots", step, [x, dt, B, C, z], out, states, state_indices, snapshot_slots, tree_mask)
    return out


def accepted_slots(snapshot_slots: Tensor, accepted_path: Tensor, accepted_len: Tensor) -> Tensor:
    """Where the state after the accepted drafts is: `src` of `attnops.ops.copy_states`, or the request's slot to come.

    Args:
        snapshot_slots: int32 ``[B, T]``, as of the verification.
        accepted_path: int32 ``[B, T]``: the accepted drafts of each request, rising.
        accepted_len: int32 ``[B]``: how many of them count.

    Returns:
        int32 ``[B]``; -1 where none was accepted: the request's own state still holds.
    """
    last = (accepted_len.long() - 1).clamp(min=0).unsqueeze(1)
    draft = accepted_path.long().gather(1, last).clamp(0, snapshot_slots.shape[1] - 1)
    return torch.where(accepted_len > 0, snapshot_slots.gather(1, draft).squeeze(1), -1).to(torch.int32)


def _steps(
    name: str,
    step: Callable[..., None],
    tokens: Sequence[Tensor | None],
    out: Tensor,
    states: Tensor,
    state_indices: Tensor,
    snapshot_slots: Tensor,
    tree_mask: Tensor | None,
) -> None:
    """One after another, each from the slot of the draft before it to its own."""
    if snapshot_slots.dim() != 2 or snapshot_slots.shape[0] != state_indices.shape[0]:
        raise ValueError(
            f"attnops: {name}: snapshot_slots must have shape [{state_indices.shape[0]}, T] (batch_size of "
            f"state_indices), got {list(snapshot_slots.shape)}"
        )
    batch, drafts = snapshot_slots.shape
    for tensor in (*tokens, out):
        if tensor is not None and tensor.shape[0] != batch * drafts:
            raise ValueError(
                f"attnops: {name}: tokens and out must have {batch * drafts} rows ({drafts} drafts of {batch} "
                f"requests, as snapshot_slots), got {list(tensor.shape)}"
            )
    if tree_mask is not None and tree_mask.shape != (batch, drafts, (drafts + 7) // 8):
        raise ValueError(
            f"attnops: {name}: tree_mask must have shape {[batch, drafts, (drafts + 7) // 8]}, "
            f"got {list(tree_mask.shape)}"
        )
    live = (state_indices >= 0).unsqueeze(1)
    own = torch.cat([state_indices.unsqueeze(1), torch.where(live, snapshot_slots, -1)], 1).to(torch.int32)
    parents = draft_parents(tree_mask, batch, drafts, state_indices.device)
    sources = own.gather(1, parents + 1).T.contiguous()
    targets = own[:, 1:].T.contiguous()
    rows = [None if tensor is None else tensor.unflatten(0, (batch, drafts)) for tensor in tokens]
    cells = out.unflatten(0, (batch, drafts))
    for t in range(drafts):
        where = {"states": states, "state_indices": sources[t], "out_state_indices": targets[t], "out": cells[:, t]}
        step([None if tensor is None else tensor[:, t] for tensor in rows], **where)
