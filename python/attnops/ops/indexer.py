"""The indexer of sparse attention: which keys a query attends to. Its keys and queries: `index_keys`.

A row is a query token. Row t has ``lengths[t]`` keys; a row whose length is below 1 is padding and selects none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def index_logits_paged(
    q: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    weights: Tensor,
    cache_seqlens: Tensor,
    *,
    logits: Tensor | None = None,
    max_seqlen_k: int | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """Logits of index keys in pages, for decode and verify.

    ``logits[t, s] = scale[s] * sum over heads of weights[t, h] * max(q[t, h] . k[s], 0)``. Columns from a token's
    length on are not written. Work is divided by lengths on the device, so no plan is needed.

    Args:
        q: float8_e4m3fn ``[B, S_q, H, D]``, H up to 64, D 64 or 128, last dim dense.
        index_pages: uint8 ``[num_pages, page_size, D + 4]``: `store_index_k`.
        page_table: int32 ``[B, max_pages]``.
        weights: float32 ``[B * S_q, H]``, q's scales in them: `quantize_index_q`.
        cache_seqlens: int32 ``[B, S_q]``: keys that each token sees.
        logits: float32 or bf16 ``[B * S_q, N]``, last dim dense; float32 and allocated when omitted.
        max_seqlen_k: N of logits that are allocated; by default all that the page table holds.
        report: int32 ``[8]`` of the checked mode. Without it, what is out of range is an error on a CPU. On a GPU keys
            outside the pool give 0, and those outside `logits` none.

    Returns:
        `logits`.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a length or page out of range.

    Source: DeepSeek-V3.2, section 2.1.
    """
    if logits is None:
        columns = page_table.shape[1] * index_pages.shape[1] if max_seqlen_k is None else max_seqlen_k
        logits = weights.new_empty(weights.shape[0], columns)
    torch.ops.attnops.index_logits_paged(logits, q, index_pages, page_table, weights, cache_seqlens, report)
    return logits


@names_its_arguments
def index_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    k_start: Tensor,
    k_end: Tensor,
    *,
    compressed: bool = False,
    logits: Tensor | None = None,
    max_seqlen_k: int | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """Logits of ragged index keys, for prefill: `index_logits_paged` with a range of keys per row.

    Args:
        q: float8_e4m3fn ``[T, H, D]``, H up to 64, D 64 or 128, last dim dense.
        k: float8_e4m3fn or uint8 ``[N, D]``, last dim dense.
        k_scale: float32 ``[N]``.
        weights: float32 ``[T, H]``, q's scales in them.
        k_start, k_end: int32 ``[T]``: a row sees keys ``[k_start, k_end)``. Other columns are not written.
        compressed: Column 0 of a row is its first key. Else column j is key j.
        logits: float32 or bf16 ``[T, columns]``, last dim dense; float32 and allocated when omitted.
        max_seqlen_k: Columns of logits that are allocated; N by default.
        report: int32 ``[8]`` of the checked mode.

    Returns:
        `logits`.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a range outside k or the columns.

    Source: DeepSeek-V3.2, section 2.1.
    """
    if logits is None:
        logits = weights.new_empty(q.shape[0], k.shape[0] if max_seqlen_k is None else max_seqlen_k)
    torch.ops.attnops.index_logits(logits, q, k, k_scale, weights, k_start, k_end, compressed, report)
    return logits


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


SCRATCH_BYTES = 256 << 20  # of logits, at most, that `index_topk` allocates


@names_its_arguments
def index_topk(
    q: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    weights: Tensor,
    cache_seqlens: Tensor,
    k: int,
    *,
    max_seqlen_k: int | None = None,
    indices: Tensor | None = None,
    positions: Tensor | None = None,
    scratch: Tensor | None = None,
    report: Tensor | None = None,
    k_start: Tensor | None = None,
) -> Tensor:
    """The `k` best keys of each token: the bits of `index_logits_paged` and `topk_select`, in less memory.

    Logits go through the scratch, a part of them at a time. So a long prompt of one request needs no more memory than
    a step of decode. A flat scratch does for any context.

    With `k_start` a token sees the keys ``[k_start, cache_seqlens)``. So tokens of several requests may be those of
    one, whose pages stand side by side in one row of the page table. Cells in front of `k_start` name pages of the
    pool, too: a GPU makes the logits there, and does not look at them.

    Args:
        q, index_pages, page_table, weights, cache_seqlens: As for `index_logits_paged`.
        k: 0 to 2048.
        max_seqlen_k: The longest row, where the scratch is allocated; by default all that the page table holds.
        indices: int32 ``[B * S_q, k]``: token slots, ``page * page_size + offset``; allocated when omitted.
        positions: int32 ``[B * S_q, k]``: where positions are written, too.
        scratch: float32, in one of two forms; one of 256 MB at most is allocated when omitted. ``[rows, N]``, last dim
            dense, N as wide as the longest row: so many rows at a time. ``[n]``, 16-byte aligned: as many rows of what
            the page table holds as fit. Where these are fewer than 64, and not all, keys come in pieces, each together
            with the best so far. Then n is at least ``3 * k + 19`` and a page's keys.
        report: int32 ``[8]`` of the checked mode.
        k_start: int32 ``[B, S_q]``: where each token's keys begin, 0 by default. Positions count from there.

    Returns:
        `indices`.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a length or page out of range.
    """
    rows = weights.shape[0]
    indices = cache_seqlens.new_empty(rows, k) if indices is None else indices
    if indices.dim() == 2 and indices.shape[1] != k:
        raise ValueError(f"attnops::index_topk: indices.shape[1] must be {k} (k), got {indices.shape[1]}")
    if scratch is None:
        columns = page_table.shape[1] * index_pages.shape[1] if max_seqlen_k is None else max_seqlen_k
        page_size = max(index_pages.shape[1], 1)
        if 4 * rows * columns <= SCRATCH_BYTES:
            scratch = weights.new_empty(rows, columns)
        else:
            page_table = page_table[:, : -(-columns // page_size)]
            scratch = weights.new_empty(max(SCRATCH_BYTES // 4, 4 * k + page_size))
    torch.ops.attnops.index_topk(
        indices, positions, q, index_pages, page_table, weights, cache_seqlens, scratch, report, k_start
    )
    return indices


@names_its_arguments
def expand_rows(
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    num_rows: int,
    topk: int,
    *,
    ratio: int = 1,
    seqlens: Tensor | None = None,
    rows: Tensor | None = None,
    topk_length: Tensor | None = None,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Requests to token rows, for verify, draft extend and extend: what each new token sees, in the graph.

    Args:
        cache_seqlens: int32 ``[B]``: keys of each request, its new tokens included.
        cu_seqlens_q: int32 ``[B + 1]``: where each request's rows begin, from 0 on, and where the last one's end.
        num_rows: T, at least ``cu_seqlens_q[B]``. Rows behind that are padding: 0 in all three.
        topk: What lengths are clipped to.
        ratio: Tokens of a compressed entry: a token sees the entries that are full, ``length // ratio``.
        seqlens, rows, topk_length: int32 ``[T]``; allocated when omitted.
        report: int32 ``[8]`` of the checked mode.

    Returns:
        ``(seqlens, rows, topk_length)``: keys that the row's token sees; its request; keys that it selects.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also bounds that fall or exceed T.
    """
    outputs = [cache_seqlens.new_empty(num_rows) if out is None else out for out in (seqlens, rows, topk_length)]
    if outputs[0].dim() == 1 and outputs[0].shape[0] != num_rows:
        raise ValueError(
            f"attnops::expand_rows: seqlens.shape[0] must be {num_rows} (num_rows), got {outputs[0].shape[0]}"
        )
    torch.ops.attnops.expand_rows(*outputs, cache_seqlens, cu_seqlens_q, topk, ratio, report)
    return outputs[0], outputs[1], outputs[2]


for _op in ("index_logits_paged", "index_logits", "index_topk", "expand_rows", "topk_select"):
    register_fake(_op)
