"""The checked mode (ATTNOPS_CHECK=1): kernels record what only the device can see, and this says it in words.

A kernel that meets an index or a length out of range records the first such fault and skips it. Nothing waits for the
device until somebody asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.environment import CHECK

# csrc/core/report.h: the words of the buffer, ReportOp and ReportKind.
SIZE = 8
COUNT, OP, KIND, REQUEST, POSITION, VALUE, LIMIT = range(7)
OPS = (
    "none",
    "build_page_table",
    "build_kv_indices",
    "store_kv",
    "store_mla_kv",
    "translate_slots",
    "xqa_decode",
    "mla_decode",
    "fmha_paged",
    "fmha_varlen",
)
KINDS = ("none", "page index", "token slot", "request row", "length")


def is_checked() -> bool:
    """The environment asks for the checked mode."""
    return CHECK.value()


def new_report(device: torch.device | str = "cpu") -> Tensor:
    """An empty buffer, int32 ``[8]``: the `report` argument of the ops."""
    return torch.zeros(SIZE, dtype=torch.int32, device=device)


def first_fault(report: Tensor) -> str | None:
    """The first fault recorded since the buffer was zeroed, or None. Waits for the device."""
    words = report.tolist()
    if not words[COUNT]:
        return None
    op, kind = OPS[words[OP]], KINDS[words[KIND]]
    more = f" ({words[COUNT]} faults in all)" if words[COUNT] > 1 else ""
    return (
        f"attnops::{op}: {kind} {words[VALUE]} at request {words[REQUEST]}, position {words[POSITION]}, "
        f"must be in [0, {words[LIMIT]}){more}"
    )
