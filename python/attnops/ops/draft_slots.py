"""Speculative decoding: where drafts stand in the cache, and moves of accepted ones. Names are those of `speculation`.

``report`` is the buffer of the checked mode, int32 ``[8]``. With it, rows and slots out of range are recorded. Without
it, that is an error on a CPU, and on a GPU the token is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnops.ops._arguments import MAX_TREE_TOKENS, names_its_arguments, register_fake
from attnops.types import check_range


@names_its_arguments
def move_kv(
    accept_index: Tensor,
    out_cache_loc: Tensor,
    pages: Sequence[Tensor],
    *,
    window_pages: Sequence[Tensor] = (),
    slot_map: Tensor | None = None,
    req_to_token: Tensor | None = None,
    req_pool_indices: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """Moves the rows of accepted tokens to the first slots of their request's tree, in all layers at once.

    The i-th accepted token of a request goes from slot ``out_cache_loc[accept_index[b, i]]`` to slot
    ``out_cache_loc[b * N + i]``, whatever it overwrites there.

    Args:
        accept_index: int32 or int64 ``[B, path_length]``, rows dense: rows of the batch, negative: none. The i-th is at
            least ``b * N + i``, as in a path whose parents stand first.
        out_cache_loc: int32 or int64 ``[B * N]``: slots of the trees, no two alike; N at most 1024. Negative: stays.
        pages: K and V of every layer, or its latents: ``[P, page_size, H, D]`` or ``[P, page_size, W]`` of any dtype of
            a pool, last dim dense. All have one page size. One launch moves 160 of them.
        window_pages: Those of layers in the sliding-window pool; `slot_map` as in `build_page_table`.
        req_to_token: int32 ``[max_requests, max_context]``: its cell ``cache_seqlens[b] + i`` gets the i-th token's
            slot. With it go req_pool_indices (int32 or int64 ``[B]``) and cache_seqlens (int32 ``[B]``).
        report: Checked mode, see the module.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    torch.ops.attnops.move_kv(
        accept_index,
        out_cache_loc,
        list(pages),
        list(window_pages),
        slot_map,
        req_to_token,
        req_pool_indices,
        cache_seqlens,
        report,
    )


@names_its_arguments
def copy_page_tail(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    pages: Sequence[Tensor],
    topk: int,
    draft_steps: int,
    *,
    window_pages: Sequence[Tensor] = (),
    slot_map: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """Puts the prefix's partial page in front of the drafts of every branch, in all layers at once.

    Cells are those of :func:`generate_draft_decode_kv_indices`; branch 0 has the page itself.

    Args:
        req_to_token, req_pool_indices, cache_seqlens, topk, draft_steps: As there.
        pages, window_pages, slot_map: As in :func:`move_kv`, at least one buffer. Their page size is the drafts'.
        report: Checked mode, see the module.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    torch.ops.attnops.copy_page_tail(
        req_to_token,
        req_pool_indices,
        cache_seqlens,
        list(pages),
        list(window_pages),
        topk,
        draft_steps,
        slot_map,
        report,
    )


@names_its_arguments
def generate_draft_decode_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    topk: int,
    draft_steps: int,
    page_size: int,
    *,
    num_steps: int | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Slots that each branch of a draft loop sees, step by step: the prefix, and the branch's first s + 1 drafts.

    With pages of one token, or one branch, the drafts of branch k stand at cells ``len + k * draft_steps + i``. Else,
    with ``tail = len % page_size`` and ``new = ceil((tail + draft_steps) / page_size)``, they begin at cell
    ``len // page_size * page_size + k * new * page_size + tail``.

    Args:
        req_to_token: int32 ``[max_requests, max_context]``, last dim dense. ``topk * draft_steps`` cells fit a row.
        req_pool_indices: int32 or int64 ``[B]``.
        cache_seqlens: int32 ``[B]``, without drafts; negative counts as 0.
        topk: Branches, 1 to 1024.
        draft_steps: Drafts of a branch.
        page_size: Tokens per page.
        num_steps: Steps to make indices of, at most `draft_steps`, which it is where omitted.
        kv_indptr: Destination int32 ``[num_steps, B * topk + 1]``, last dim dense.
        kv_indices: Destination int32 ``[num_steps, num_indices]``, last dim dense. What does not fit is not written;
            cells past the last one are left as they are. Allocated when omitted, as zeros, for any lengths.
        report: Checked mode, see the module. A draft beyond the row has slot 0.

    Returns:
        ``(kv_indptr, kv_indices)``. Request b's branch k has row ``b * topk + k`` of kv_indptr.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
        ValueError: a number is out of range, and memory of that size would be asked for.

    Source: SGLang's Triton kernel of this name.
    """
    rows, steps = cache_seqlens.shape[0] * topk, draft_steps if num_steps is None else num_steps
    if kv_indptr is None or kv_indices is None:
        op = "attnops::generate_draft_decode_kv_indices"
        check_range(op, "topk", topk, 1, MAX_TREE_TOKENS)
        check_range(op, "draft_steps", draft_steps, 1, req_to_token.shape[1] // topk)
        check_range(op, "num_steps", steps, 0, draft_steps)
    if kv_indptr is None:
        kv_indptr = cache_seqlens.new_zeros(steps, rows + 1)
    if kv_indices is None:
        kv_indices = cache_seqlens.new_zeros(kv_indptr.shape[0], rows * req_to_token.shape[1])
    torch.ops.attnops.generate_draft_decode_kv_indices(
        kv_indptr, kv_indices, req_to_token, req_pool_indices, cache_seqlens, topk, draft_steps, page_size, report
    )
    return kv_indptr, kv_indices


for _op in ("move_kv", "copy_page_tail", "generate_draft_decode_kv_indices"):
    register_fake(_op)
