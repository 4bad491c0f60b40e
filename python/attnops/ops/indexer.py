"""The indexer of sparse attention: which keys a query attends to.

A row is a query token. Row t has ``lengths[t]`` keys; a row whose length is below 1 is padding and selects none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def topk_select(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    *,
    row_starts: Tensor | None = None,
    page_table: Tensor | None = None,
    row_to_request: Tensor | None = None,
    page_size: int = 1,
    offsets: Tensor | None = None,
    indices: Tensor | None = None,
    positions: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """The `k` largest logits of each row: exact, and the same bits every run.

    It is the set that a stable sort has first: by value, then by smaller position. -0 is 0, and NaN comes last. A row
    of up to `k` keys selects all of them, whatever their logits. Positions are written in rising order, then -1. They
    count from the row's first key.

    Args:
        logits: ``[T, N]`` float32 or bf16, last dim dense. What lies outside a row's keys is never looked at.
        lengths: int32 ``[T]``: keys of each row.
        k: 0 to 2048.
        row_starts: int32 ``[T]``: column of a row's first key; 0 by default.
        page_table: int32 ``[B, max_pages]``: an index is then a token slot, ``page * page_size + offset``.
        row_to_request: int32 ``[T]``: row of `page_table`; by default T is B, and row t is of request t.
        page_size: Tokens of a page of `page_table`.
        offsets: int32 ``[T]``: an index is then ``offsets[t] + position``. Not with `page_table`.
        indices: int32 ``[T, k]``; allocated when omitted.
        positions: int32 ``[T, k]``: where positions are written, too.
        report: int32 ``[8]`` of the checked mode. Without it, what is out of range is an error on a CPU. On a GPU a row
            loses the keys that lie outside `logits`, and a key without a slot gets -1.

    Returns:
        `indices`.

    Raises:
        RuntimeError: naming the argument that does not fit. On the CPU that is also a row outside the columns or the
            page table, or a page that makes no slot.
    """
    indices = lengths.new_empty(logits.shape[0], k, dtype=torch.int32) if indices is None else indices
    if indices.dim() == 2 and indices.shape[1] != k:
        raise ValueError(f"attnops::topk_select: indices.shape[1] must be {k} (k), got {indices.shape[1]}")
    torch.ops.attnops.topk_select(
        indices,
        positions,
        logits,
        lengths,
        row_starts,
        page_table,
        row_to_request,
        page_size,
        offsets,
        report,
    )
    return indices


for _op in ("topk_select",):
    register_fake(_op)
