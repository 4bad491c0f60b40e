"""Compressed keys of DeepSeek-V4: every `ratio` tokens of a request are pooled into one entry of a paged pool.

Entry j pools tokens ``[ratio * j, ratio * (j + 1))``. With overlap it pools the group before as well. Then a token
brings two sets of channels, the first for the next entry and the second for its own. For each channel, a softmax over
these tokens of ``score + ape`` weighs their values. The sum is normalized (RMS), its last 64 values are rotated by
position ``ratio * j``, and it is stored. All of it is float32.

An entry is written in the step that completes its group. So a request keeps the values and scores of its newest tokens:
token p in row ``p % state_tokens`` of its state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def compress_plan(
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    ratio: int,
    entry_indptr: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """Count the entries that a step completes, on the device.

    Args:
        cache_seqlens: int32 ``[B]``, the new tokens included.
        cu_seqlens_q: int32 ``[B + 1]``: where each request's new tokens begin, from 0 on, and where the last one's end.
        ratio: Tokens of a group, 1 to 1024.
        entry_indptr: int32 ``[B + 1]``, written; allocated when omitted.
        report: int32 ``[8]`` of the checked mode.

    Returns:
        int32 ``[B + 1]``: entries before each request, and all of them.

    Raises:
        RuntimeError: naming the argument that does not fit. On the CPU also bounds that fall, or a length below its new
            tokens.
    """
    if entry_indptr is None:
        entry_indptr = torch.empty_like(cu_seqlens_q)
    torch.ops.attnops.compress_plan(entry_indptr, cache_seqlens, cu_seqlens_q, ratio, report)
    return entry_indptr


@names_its_arguments
def compress_kv(
    kv_pages: Tensor,
    state: Tensor,
    kv_score: Tensor,
    *,
    ape: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    page_table: Tensor,
    state_indices: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    entry_indptr: Tensor,
    ratio: int,
    eps: float = 1e-6,
    interleaved: bool = True,
    hadamard: bool = True,
    ue8m0: bool = False,
    report: Tensor | None = None,
) -> None:
    """Write the entries that new tokens complete, then keep the newest tokens in the requests' states.

    A prompt may come in any chunks: the entries are the same bits. Rejected drafts need nothing: the next step
    overwrites their rows, and their entries once a group is complete again.

    Args:
        kv_pages: ``[P, page_size, row]``, last dim dense, written. Rows of D values in float32, float16 or bfloat16:
            D is a multiple of 64, up to 512. Or uint8: rows of 584 bytes as of `sparse_mla_decode` (D = 512). Or index
            keys of 132 or 68 bytes, as of `store_index_k` (D = 128 or 64).
        state: ``[num_slots, state_tokens, 2 * width]`` in kv_score's dtype, contiguous, written. `state_tokens` is at
            least what an entry pools, and the drafts that may be rejected.
        kv_score: ``[T, 2 * width]`` float32, float16 or bfloat16, last dim dense: values, then scores. `width` is D, or
            2 D with overlap.
        ape: float32 ``[ratio, width]``, added to the scores by a token's place in its group.
        norm_weight: float32 ``[D]``.
        cos_sin: float32 ``[max_positions, 64]``: 32 cosines, then 32 sines.
        page_table: int32 ``[B, max_pages]``: entry j of a request is in page ``page_table[b, j // page_size]``.
        state_indices: int32 ``[B]``: each request's slot of `state`; below 0: padding, of which nothing is written.
        cache_seqlens, cu_seqlens_q: As of `compress_plan`.
        entry_indptr: int32 ``[B + 1]``, made by `compress_plan`.
        ratio: Tokens of a group, 1 to 1024.
        eps: Of the normalization.
        interleaved: The rotation turns values 2i and 2i + 1. Otherwise i and i + 32.
        hadamard, ue8m0: Of index keys, as of `store_index_k`.
        report: int32 ``[8]`` of the checked mode. Without it, what is out of range is an error on a CPU. On a GPU an
            entry without a page, or without a row in `cos_sin`, is left out.

    Raises:
        RuntimeError: naming the argument that does not fit. On the CPU also bounds, lengths, slots, pages or a plan out
            of range, and two requests with one slot.

    Source: DeepSeek-V4's compressed attention, whose layers have ratio 4 (with overlap) or 128.
    """
    torch.ops.attnops.compress_kv(
        kv_pages,
        state,
        kv_score,
        ape,
        norm_weight,
        cos_sin,
        page_table,
        state_indices,
        cache_seqlens,
        cu_seqlens_q,
        entry_indptr,
        ratio,
        eps,
        interleaved,
        hadamard,
        ue8m0,
        report,
    )


for _op in ("compress_plan", "compress_kv"):
    register_fake(_op)
