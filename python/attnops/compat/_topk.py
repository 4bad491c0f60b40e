"""Selections of sparse attention by SGLang's and FlashInfer's names.

All are `attnops.ops.topk_select`: exact, ties by smaller index, in rising positions. The peers promise no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import refuse
from attnops.compat._errors import names_the_peers


def _logits(scores: Tensor) -> Tensor:
    """float16, which `topk_select` does not take, as float32."""
    return scores.float() if scores.dtype == torch.float16 else scores


def _int32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int32)


@names_the_peers("fast_topk_v2", logits="score", k="topk")
def fast_topk_v2(score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
    """Positions of the largest scores: int32 ``[T, topk]``, then -1.

    Args:
        score: ``[T, N]``.
        lengths: ``[T]``.
        row_starts: ``[T]``: a row's first column.
    """
    return ops.topk_select(_logits(score), lengths.to(torch.int32), topk, row_starts=_int32(row_starts))


@names_the_peers("fast_topk_transform_fused", logits="score", k="topk", page_table="page_table_size_1")
def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """`fast_topk_v2` as token slots.

    Args:
        page_table_size_1: int32 ``[B, max_tokens]``: slot of every token.
        cu_seqlens_q: int32 ``[B + 1]``: the rows of each request.
    """
    rows = torch.arange(score.shape[0], device=score.device, dtype=cu_seqlens_q.dtype)
    owner = torch.bucketize(rows, cu_seqlens_q[1:].contiguous(), right=True, out_int32=True)
    return ops.topk_select(
        _logits(score),
        lengths.to(torch.int32),
        topk,
        row_starts=_int32(row_starts),
        page_table=page_table_size_1,
        row_to_request=owner,
    )


@names_the_peers("fast_topk_transform_ragged_fused", logits="score", k="topk", offsets="topk_indices_offset")
def fast_topk_transform_ragged_fused(
    score: Tensor,
    lengths: Tensor,
    topk_indices_offset: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """`fast_topk_v2` as rows of ragged keys: positions plus ``topk_indices_offset[t]``."""
    return ops.topk_select(
        _logits(score),
        lengths.to(torch.int32),
        topk,
        row_starts=_int32(row_starts),
        offsets=topk_indices_offset.to(torch.int32),
    )


def _check_ties(function: str, tie_break: int) -> None:
    if tie_break == 2:
        raise refuse(function, "tie_break=2", "0 or 1: of equal scores the smaller index is taken")
    if tie_break not in (0, 1):
        raise ValueError(f"attnops.compat: {function}: tie_break must be 0, 1 or 2, got {tie_break}")


@names_the_peers(
    "top_k_page_table_transform",
    logits="input",
    page_table="src_page_table",
    row_to_request="row_to_batch",
    indices="out",
    positions="out_raw_indices",
)
def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """The largest of each row as token slots; always deterministic and fit for graphs.

    Args:
        input: ``[T, N]``.
        src_page_table: int32 ``[B, max_pages]``.
        lengths: ``[T]``.
        row_to_batch: ``[T]``.
        row_starts: ``[T]``: a row's first column.
        out, out_raw_indices: int32 ``[T, k]``: slots and positions.

    Raises:
        NotImplementedError: tie_break 2, page_table_row_starts.
    """
    _check_ties("top_k_page_table_transform", tie_break)
    if page_table_row_starts is not None:
        raise refuse("top_k_page_table_transform", "page_table_row_starts=", "slices of src_page_table")
    return ops.topk_select(
        _logits(input),
        lengths.to(torch.int32),
        k,
        row_starts=_int32(row_starts),
        page_table=src_page_table,
        row_to_request=_int32(row_to_batch),
        page_size=page_size,
        indices=out,
        positions=out_raw_indices,
    )


@names_the_peers("top_k_ragged_transform", logits="input", indices="out")
def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The largest of each row as rows of ragged keys: positions plus ``offsets[t]``.

    Raises:
        NotImplementedError: tie_break 2.
    """
    _check_ties("top_k_ragged_transform", tie_break)
    return ops.topk_select(
        _logits(input),
        lengths.to(torch.int32),
        k,
        row_starts=_int32(row_starts),
        offsets=offsets.to(torch.int32),
        indices=out,
    )
