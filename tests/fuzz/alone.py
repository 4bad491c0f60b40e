"""Batch invariance, of either decode op: a request's bits do not depend on those beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from .draw import Draw
from .judge import check_same_bits


def check_alone(
    draw: Draw,
    call: Any,
    plan: Any,
    plan_of: Callable[[Any], Any],
    attend: Callable[[Any, Tensor, Any, Tensor | None], Tensor],
) -> None:
    """A batch-invariant request has the same bits alone, whatever plan it runs on.

    Both calls have rows that start alike: on a GPU, which kernel serves depends on that.

    Args:
        call: The `Call` of the op's module, and `plan` its plan.
        plan_of: Makes a plan for a call.
        attend: The op on a call, a page table, a plan and a tree mask; its out.
    """
    which = draw.number(0, len(call.lengths) - 1)
    draw.note(alone=which)
    draw.saw("mode alone")
    one = replace(call, lengths=[call.lengths[which]], parts=draw.number(1, 9))
    mask = None if call.tree_mask is None else call.tree_mask.reshape(*call.q.shape[:2], call.tree_mask.shape[1])
    bits = []
    for rows, a_plan, of in ((slice(None), plan, call), (slice(which, which + 1), None, one)):
        of = replace(of, q=call.q[rows].contiguous())
        rows_mask = None if mask is None else mask[rows]
        bits.append(attend(of, call.paging.table[rows], plan_of(of) if a_plan is None else a_plan, rows_mask))
    check_same_bits("a request alone", bits[0][which], bits[1][0])
