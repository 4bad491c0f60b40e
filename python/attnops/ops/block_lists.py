"""Lists of blocks as page tables: what `block_list` of `xqa_decode` and `fmha_paged` becomes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake

_MOST_CELL = (1 << 31) - 1


@names_its_arguments
def build_block_tables(
    block_list: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    block_size: int,
    page_size: int,
    num_pages: int,
    block_tables: Tensor,
    block_seqlens: Tensor,
    kv_indptr: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_step: int = 1,
    unit_step: int = 0,
    head_step: int = 0,
    causal: bool = True,
    report: Tensor | None = None,
    window_left: int = -1,
) -> None:
    """Make a page table and a length of each list of blocks, on the device.

    A row is what a query token, or a request, attends to with one KV head. A unit is ``gcd(block_size, page_size)``
    tokens. A row's cells are the units of its blocks: ``page * page_step + unit of the page * unit_step + head *
    head_step``. Whole blocks come first, in the order of the list. A block that the row's length cuts comes last.
    With a window a unit is one token. What is left of a block that the window cuts stands behind the whole ones.

    Args:
        block_list: int32 ``[B, H_kv, N]``, last dim dense: block j is the tokens ``[j * block_size, (j + 1) *
            block_size)`` of a request. Below 0: none. A block past the request's length is skipped. Whole blocks count
            as often as they are listed, those that are cut once.
        page_table: int32 ``[B, max_pages]``; or, with `kv_indptr`, the flat ``[num_indices]``.
        cache_seqlens: int32 ``[B]``, the new tokens included; below zero counts as zero.
        block_size: 1 to 2^20.
        page_size, num_pages: Of the pool.
        block_tables: int32 ``[R, H_kv, cells]``, written, last dim dense. Cells that no block needs are left as they
            are. R is ``B * S_q``: rows of a request follow each other. With `cu_seqlens_q` it is B.
        block_seqlens: int32 ``[R, H_kv]``, written: keys of each row.
        kv_indptr: int32 ``[B + 1]``: request b owns the cells ``[kv_indptr[b], kv_indptr[b + 1])`` of `page_table`.
        cu_seqlens_q: int32 ``[B + 1]``: where each request's new tokens begin. The blocks that hold them are then in,
            listed or not, and come last. Where cells are missing, listed blocks are left out.
        page_step, unit_step, head_step: Factors of a cell, as above.
        causal: Row i of S_q sees keys up to its own position; False: all of its request.
        report: int32 ``[8]`` of the checked mode: bad blocks, pages, and rows without room are recorded there.
        window_left: Row i sees no key more than so many positions in front of its own; -1: off, as it must be with
            `cu_seqlens_q`.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit. On the CPU also
            where a block, a page or a length is out of range, or a row lacks cells.
    """
    torch.ops.attnops.build_block_tables.default(
        block_tables,
        block_seqlens,
        block_list,
        page_table,
        kv_indptr,
        cache_seqlens,
        cu_seqlens_q,
        page_size,
        num_pages,
        block_size,
        page_step,
        unit_step,
        head_step,
        causal,
        report,
        window_left,
    )


@names_its_arguments
def label_scores(
    scores: Tensor,
    q_labels: Tensor,
    label_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    report: Tensor | None = None,
) -> None:
    """Score every key of a request by some channels of it: what double sparsity selects by.

    Args:
        scores: float32 ``[B, H_kv, columns]``, written up to each request's length, last dim dense: the largest of
            ``<q, label>`` over the query heads of a KV head's group.
        q_labels: ``[B, H_q, n]`` (float32, float16, bfloat16), n up to 1024, last dim dense.
        label_pages: ``[P, page_size, H_kv, n]`` in the dtype of `q_labels`, last dim dense.
        page_table: int32 ``[B, max_pages]``, last dim dense.
        cache_seqlens: int32 ``[B]``; below zero counts as zero.
        report: int32 ``[8]`` of the checked mode: bad pages and lengths are recorded there. A key of such a page has
            the score ``-inf``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit. On the CPU also
            where a page or a length is out of range.

    Source: Double Sparsity (arXiv:2408.07092), section 3.
    """
    torch.ops.attnops.label_scores.default(scores, q_labels, label_pages, page_table, cache_seqlens, report)


def unit_pages(
    op: str, k_pages: Tensor, v_pages: Tensor, unit: int, *, heads: bool
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Pools ``[P, page_size, H_kv, D]`` as pages of `unit` tokens and one KV head, by strides: nothing is copied.

    Pages of the views overlap. Which of them begin where a unit of a head does, the steps say.

    Args:
        heads: The views have a page for each KV head. False: the pools have one head, and keep it.

    Returns:
        The views, and `page_step`, `unit_step` and `head_step` of `build_block_tables`.

    Raises:
        ValueError: the pools' shapes differ, their strides have other ratios, or a page would have no number of int32.
    """
    num_pages, page_size, num_heads, _ = k_pages.shape
    if not heads and unit == page_size:
        return k_pages, v_pages, (1, 0, 0)
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(
            f"attnops::{op}: v_pages.shape[:3] must be {list(k_pages.shape[:3])} as in k_pages with block_list, "
            f"got {list(v_pages.shape[:3])}"
        )
    extents = (num_pages, page_size // unit, num_heads if heads else 1)
    k_step, steps = _common_step(k_pages, unit, extents)
    v_step, v_steps = _common_step(v_pages, unit, extents)
    if steps != v_steps:
        raise ValueError(
            f"attnops::{op}: k_pages and v_pages must have strides in one ratio with block_list, "
            f"got {list(k_pages.stride())} and {list(v_pages.stride())}"
        )
    count = sum((n - 1) * s for n, s in zip(extents, steps, strict=True)) + 1 if num_pages else 0
    if count - 1 > _MOST_CELL:
        raise ValueError(f"attnops::{op}: k_pages must have at most 2^31 units of heads, got {count}")
    return _as_units(k_pages, count, unit, k_step), _as_units(v_pages, count, unit, v_step), steps


def _common_step(pool: Tensor, unit: int, extents: tuple[int, int, int]) -> tuple[int, tuple[int, int, int]]:
    """The largest stride that page, unit and head have in common, and each of them in it."""
    page, token, head, _ = pool.stride()
    page, part, head = (s if n > 1 else 0 for s, n in zip((page, unit * token, head), extents, strict=True))
    step = math.gcd(page, part, head) or 1
    return step, (page // step, part // step, head // step)


def _as_units(pool: Tensor, count: int, unit: int, step: int) -> Tensor:
    token = pool.stride(1)
    return pool.as_strided((count, unit, 1, pool.shape[3]), (step, token, token, 1), pool.storage_offset())


register_fake("build_block_tables")
register_fake("label_scores")
