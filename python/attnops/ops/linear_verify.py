"""Linear attention: draft tokens from states that are only read, with their updates in rings beside the states.

A slot's state is its state in the pool after the first ``ring_len`` rows of its ring, ``S = decay S + u k^T`` each. A
verification writes the drafts' rows behind them. A commit keeps those of the accepted path, and folds a ring that has
no room for the next drafts into the state. Fold a ring (``fold=True``) before anything else reads or copies its state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def delta_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    states: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_decay: Tensor,
    ring_len: Tensor,
    state_indices: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    tree_mask: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float = 0.0,
    qk_l2norm: bool = True,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """Draft tokens of each request through the gated delta rule, as `delta_decode` would take them after one another.

    Args:
        q, k, v, a, b: as in `delta_decode`, of ``B * T`` tokens, those of a request side by side; T from 1 to 16.
        states: ``[num_slots, HV, V, K]``, only read.
        ring_u: float32 ``[num_slots, HV, R, V]``, dense. Rows ``ring_len + t`` become those of draft t.
        ring_k: float32 ``[num_slots, H, R, K]``.
        ring_decay: float32 ``[num_slots, HV, R]``, or ``[num_slots, HV, R, K]`` for a gate per channel.
        ring_len: int32 ``[num_slots]``: rows of each ring that count, at most ``R - T``.
        state_indices: int32 ``[B]``: slots, each at most once; below 0: padding, nothing is touched and out is 0.
        tree_mask: uint8 ``[B, T, ceil(T / 8)]``, bits packed from the low end: the drafts that a draft sees. The drafts
            before it are its ancestors. None: a chain.
        A_log, dt_bias, scale, lower_bound, qk_l2norm: as in `delta_decode`.
        out: ``[B * T, HV, V]``; allocated when omitted.
        report: int32 ``[8]`` of the checked mode: bad slots and lengths.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot or length.

    Source: arXiv 2412.06464, equation 10.
    """
    out = v.new_empty(v.shape) if out is None else out
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    torch.ops.attnops.delta_verify(
        out,
        ring_u,
        ring_k,
        ring_decay,
        states,
        ring_len,
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state_indices,
        tree_mask,
        scale,
        lower_bound,
        qk_l2norm,
        report,
    )
    return out


@names_its_arguments
def ssd_verify(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    states: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_decay: Tensor,
    ring_len: Tensor,
    state_indices: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    tree_mask: Tensor | None = None,
    scale: float = 1.0,
    dt_softplus: bool = False,
    out: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """Draft tokens of each request through a state space, as `ssd_decode` would take them after one another.

    Args:
        x, dt, A, B, C, D, dt_bias, z, scale, dt_softplus: as in `ssd_decode`, of ``B * T`` tokens.
        states: ``[num_slots, H, P, N]``, only read.
        ring_u: float32 ``[num_slots, H, R, P]``, dense.
        ring_k: float32 ``[num_slots, G, R, N]``.
        ring_decay: float32 ``[num_slots, H, R]``.
        ring_len, state_indices, tree_mask, report: as in `delta_verify`.
        out: ``[B * T, H, P]``; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot or length.

    Source: arXiv 2405.21060, equation 16.
    """
    out = x.new_empty(x.shape) if out is None else out
    torch.ops.attnops.ssd_verify(
        out,
        ring_u,
        ring_k,
        ring_decay,
        states,
        ring_len,
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        z,
        state_indices,
        tree_mask,
        scale,
        dt_softplus,
        report,
    )
    return out


@names_its_arguments
def delta_commit(
    states: Tensor,
    accepted_path: Tensor,
    accepted_len: Tensor,
    *,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_decay: Tensor,
    ring_len: Tensor,
    state_indices: Tensor,
    fold: bool = False,
    report: Tensor | None = None,
) -> None:
    """Keep the accepted drafts of the last `delta_verify`, and forget the others.

    A ring that has no room for T drafts more is folded into its state, and its length becomes 0.

    Args:
        states: ``[num_slots, HV, V, K]``, updated in place where a ring is folded.
        accepted_path: int32 ``[B, T]``: the accepted drafts of each request, rising; T as in the verification.
        accepted_len: int32 ``[B]``: how many of them count. 0 rolls all drafts back.
        ring_u, ring_k, ring_decay, ring_len: as in `delta_verify`, updated in place.
        state_indices: int32 ``[B]``; below 0: padding.
        fold: Fold the rings of these requests, full or not.
        report: int32 ``[8]`` of the checked mode: bad slots, lengths and paths.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot, length or path.
    """
    torch.ops.attnops.delta_commit(
        states, ring_u, ring_k, ring_decay, ring_len, state_indices, accepted_path, accepted_len, fold, report
    )


@names_its_arguments
def ssd_commit(
    states: Tensor,
    accepted_path: Tensor,
    accepted_len: Tensor,
    *,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_decay: Tensor,
    ring_len: Tensor,
    state_indices: Tensor,
    fold: bool = False,
    report: Tensor | None = None,
) -> None:
    """`delta_commit`, after `ssd_verify`.

    Args:
        states: ``[num_slots, H, P, N]``, updated in place where a ring is folded.
        accepted_path, accepted_len, state_indices, fold, report: as of `delta_commit`.
        ring_u, ring_k, ring_decay, ring_len: as in `ssd_verify`, updated in place.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot, length or path.
    """
    torch.ops.attnops.ssd_commit(
        states, ring_u, ring_k, ring_decay, ring_len, state_indices, accepted_path, accepted_len, fold, report
    )


def _semaphores(given: Tensor | None, states: Tensor, ring_k: Tensor, slots: Tensor) -> Tensor | None:
    """Counters of a step, where its kernel has CTAs that count one another."""
    if given is not None or states.device.type == "cpu":
        return given
    return torch.zeros(slots.shape[0] * (ring_k.shape[1] + 1), dtype=torch.int32, device=states.device)


@names_its_arguments
def delta_draft_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    accepted_path: Tensor,
    accepted_len: Tensor,
    *,
    states: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_decay: Tensor,
    ring_len: Tensor,
    state_indices: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    tree_mask: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float = 0.0,
    qk_l2norm: bool = True,
    out: Tensor | None = None,
    semaphores: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """`delta_commit` of the drafts before, then `delta_verify` of these, with the bits of both.

    On CUDA bf16 tokens with keys of 128 elements, up to 128 rows of values and up to eight drafts take one launch. It
    reads each state once, and writes those whose ring is full. Other calls take the launches of both ops.

    Args:
        q, k, v, a, b: as in `delta_verify`: the new drafts of ``B`` requests, T of each.
        accepted_path: int32 ``[B, T]``: the accepted drafts of the verification before, rising.
        accepted_len: int32 ``[B]``: how many of them count. 0: none, and for a request that has no drafts before.
        states: ``[num_slots, HV, V, K]``, updated in place where a ring is folded.
        ring_u, ring_k, ring_decay, ring_len: as in `delta_verify`, updated in place.
        state_indices: int32 ``[B]``: slots, each at most once; below 0: padding, nothing is touched and out is 0.
        A_log, dt_bias, tree_mask, scale, lower_bound, qk_l2norm, out: as in `delta_verify`.
        semaphores: int32, at least ``B * (H + 1)``, zeros before the first call and after each. Calls that may run at
            the same time need their own. Made by a launch more where it is omitted; the CPU needs none.
        report: int32 ``[8]`` of the checked mode: bad slots, lengths and paths.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot, length or path.

    Source: arXiv 2412.06464, equation 10.
    """
    out = v.new_empty(v.shape) if out is None else out
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    torch.ops.attnops.delta_draft_step(
        out,
        ring_u,
        ring_k,
        ring_decay,
        states,
        ring_len,
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state_indices,
        accepted_path,
        accepted_len,
        tree_mask,
        scale,
        lower_bound,
        qk_l2norm,
        _semaphores(semaphores, states, ring_k, state_indices),
        report,
    )
    return out


@names_its_arguments
def ssd_draft_step(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    accepted_path: Tensor,
    accepted_len: Tensor,
    *,
    states: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_decay: Tensor,
    ring_len: Tensor,
    state_indices: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    tree_mask: Tensor | None = None,
    scale: float = 1.0,
    dt_softplus: bool = False,
    out: Tensor | None = None,
    semaphores: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """`ssd_commit` of the drafts before, then `ssd_verify` of these, with the bits of both.

    On CUDA as `delta_draft_step`, with up to 64 rows of values in one launch.

    Args:
        x, dt, A, B, C, D, dt_bias, z, scale, dt_softplus: as in `ssd_verify`: the new drafts.
        states: ``[num_slots, H, P, N]``, updated in place where a ring is folded.
        ring_u, ring_k, ring_decay, ring_len: as in `ssd_verify`, updated in place.
        accepted_path, accepted_len, state_indices, tree_mask, semaphores, report: as in `delta_draft_step`.
        out: ``[B * T, H, P]``; allocated when omitted.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a bad slot, length or path.

    Source: arXiv 2405.21060, equation 16.
    """
    out = x.new_empty(x.shape) if out is None else out
    torch.ops.attnops.ssd_draft_step(
        out,
        ring_u,
        ring_k,
        ring_decay,
        states,
        ring_len,
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        z,
        state_indices,
        accepted_path,
        accepted_len,
        tree_mask,
        scale,
        dt_softplus,
        _semaphores(semaphores, states, ring_k, state_indices),
        report,
    )
    return out


for _op in ("delta_verify", "ssd_verify", "delta_commit", "ssd_commit", "delta_draft_step", "ssd_draft_step"):
    register_fake(_op)
