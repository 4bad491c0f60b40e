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
    "torch_native",  # the backend
    "flex_attention",  # likewise
    "build_draft_tree",
    "verify_tree_greedy",
    "verify_tree_sampling",
    "move_kv",
    "copy_page_tail",
    "generate_draft_decode_kv_indices",
    "pack_tree_mask",
    "delta_decode",
    "ssd_decode",
    "causal_conv1d",
    "causal_conv1d_update",
    "copy_states",
    "clear_states",
    "topk_select",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "delta_prefill",
    "ssd_prefill",
    "store_index_k",
    "gather_index_k",
    "index_logits_paged",
    "index_logits",
    "expand_rows",
    "delta_verify",
    "ssd_verify",
    "delta_commit",
    "ssd_commit",
    "store_kv_fp4",
    "fp4_decode",
    "index_topk",
    "build_block_tables",
    "label_scores",
    "compress_plan",
    "compress_kv",
    "delta_conv_decode",
    "ssd_conv_decode",
    "delta_draft_step",
    "ssd_draft_step",
)
KINDS = (
    "none",
    "page index",
    "token slot",
    "request row",
    "length",
    "token slot",
    "parent",
    "child or sibling",
    "row of the tree",
    "token",
    "probability of token",
    "accepted row",
    "cells of prefix and drafts",
    "mask bytes",
    "mask bit of prefix key",
    "state slot",
    "state slot",
    "end of tokens",
    "first key",
    "keys of a row",
    "request of a row",
    "page of a key",
    "page or offset",
    "row index",
    "row index of the second list",
    "list length",
    "length of the second list",
    "prefix",
    "plan",
    "end of keys",
    "ring length",
    "accepted length",
    "accepted draft",
    "block of a list",
    "cells of a row",
    "length",
    "bound of entries",
    "position of an entry",
)
PAGE_INDEX, SLOT_ORDER, PROBABILITY, ACCEPTED, MASK_BYTES, HIDDEN_PREFIX = 1, 5, 10, 11, 13, 14
SHARED_SLOT, TOKEN_BOUNDS, PREFIX, PLAN, KEY_RANGE = 16, 17, 27, 28, 29
SHORT_LENGTH, ENTRY_BOUND = 35, 36
_EXPECTED = {
    SLOT_ORDER: "{limit}: the tokens of a page have consecutive slots",
    PROBABILITY: "a finite number of at least 0",
    ACCEPTED: "in [{position}, {limit}), of its request and not before its place in the path",
    MASK_BYTES: "as many as {limit} rows of at least {limit} bytes, within mask",
    HIDDEN_PREFIX: "1: every draft token sees the whole prefix",
    SHARED_SLOT: "of one request alone, and request {position} writes it too",
    KEY_RANGE: "in [0, {limit}], as must the first key, {position}",
    TOKEN_BOUNDS: "in [{position}, {limit}], where its tokens begin and those of the call end",
    PREFIX: "at least 0",
    PLAN: "in [0, {limit}), and name each request once",
    SHORT_LENGTH: "at least {limit}, its new tokens",
    ENTRY_BOUND: "{limit}, as the lengths give it: compress_plan makes them",
}


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
    expected = _EXPECTED.get(words[KIND], "in [0, {limit})").format(limit=words[LIMIT], position=words[POSITION])
    return (
        f"attnops::{op}: {kind} {words[VALUE]} at request {words[REQUEST]}, position {words[POSITION]}, "
        f"must be {expected}{more}"
    )


def record_pages(report: Tensor, op: str, pages: Tensor, used: Tensor, first_cell: int, num_pages: int) -> None:
    """What an op's kernel records, for one written in torch: pages that are used and not in the pool. Device work.

    Args:
        report: int32 ``[8]``.
        pages: int64 ``[B, n]``: page of each cell.
        used: bool ``[B, n]``: a query sees a token of the cell.
        first_cell: Which cell of its request the first of `pages` is.
        num_pages: Of the pool.
    """
    bad = (used & ((pages < 0) | (pages >= num_pages))).flatten()
    if bad.numel() == 0:
        return
    first = bad.int().argmax()
    op_word, kind, limit = (first.new_full((), word) for word in (OPS.index(op), PAGE_INDEX, num_pages))
    columns = pages.shape[1]
    place = (first // columns, first % columns + first_cell, pages.flatten().take(first))
    words = torch.stack([op_word, kind, *place, limit]).int()
    is_first = bad.any() & (report[COUNT] == 0)
    report[OP : LIMIT + 1] = torch.where(is_first, words, report[OP : LIMIT + 1])
    report[COUNT] += bad.sum(dtype=torch.int32)
