"""Limits of plans, and the errors for what exceeds them or is used with another call's plan."""

from __future__ import annotations

from typing import Protocol

from attnops.types import check_range

# Limits of the planners: csrc/torch_bindings/split_kv_checks.h, csrc/scheduler/split_kv.h
MAX_CUTS = 1024  # of a request in batch-invariant mode
MAX_LEAST_CUT = 64  # tiles
MAX_SEQLEN_Q = 1 << 16
MAX_WINDOW = (1 << 31) - 1 - MAX_SEQLEN_Q
MAX_SM_PARTS = (1 << 16) - 1


def cut_rule(most: int, least_tiles: int = 0) -> int:
    """`fixed_split_tokens` of at most `most` cuts of a request, none of fewer than `least_tiles` tiles of 64 tokens."""
    return -(most + MAX_CUTS * least_tiles)


def cuts_of_rule(fixed_split_tokens: int) -> tuple[int, int]:
    """`most` and `least_tiles` of a `cut_rule`."""
    least, most = divmod(-fixed_split_tokens - 1, MAX_CUTS)
    return most + 1, least


def check_shared(
    kind: str, batch_size: int, seqlen_q: int, window_left: int, num_sm_parts: int | None, max_seqlen_k: int | None
) -> None:
    """Raises for an argument of `allocate` that is out of its range, whatever the op."""
    owner = f"{kind}.allocate"
    check_range(owner, "batch_size", batch_size, 0)
    check_range(owner, "seqlen_q", seqlen_q, 1, MAX_SEQLEN_Q)
    check_range(owner, "window_left", window_left, -1, MAX_WINDOW)
    if num_sm_parts is not None:
        check_range(owner, "num_sm_parts", num_sm_parts, 1, MAX_SM_PARTS)
    if max_seqlen_k is not None:
        check_range(owner, "max_seqlen_k", max_seqlen_k, 0)


class KeyedPlan(Protocol):
    @property
    def key(self) -> dict[str, int]: ...


def check_plan_key(op: str, plan: KeyedPlan, key: dict[str, int], of: str) -> None:
    """Raise a ValueError naming both sides of every difference between the keys of a plan and of a call with `of`."""
    if plan.key == key:
        return
    differences = [f"{name} {plan.key[name]}, the call has {key[name]}" for name in key if plan.key[name] != key[name]]
    kind = type(plan).__name__
    raise ValueError(
        f"attnops::{op}: plan: make one with {kind}.allocate for this {of}; "
        f"this {kind} was allocated for another geometry: " + "; ".join(differences)
    )
