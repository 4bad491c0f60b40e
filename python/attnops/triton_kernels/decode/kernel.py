"""How many splits a request gets, and their merge."""

# Triton's language has types of its own.
# mypy: ignore-errors

import triton
import triton.language as tl

from attnops.triton_kernels.core.kernel import LN_2, LOG2_E


@triton.jit
def _visible(cache_seqlens, request, num_requests, seqlen_q, window_left):
    length = tl.load(cache_seqlens + request, mask=request < num_requests, other=0)
    length = tl.minimum(tl.maximum(length, 0), 2**30)
    return tl.where(window_left >= 0, tl.minimum(length, window_left + seqlen_q), length)


@triton.jit(do_not_specialize=["num_requests", "seqlen_q", "window_left", "programs", "wanted"])
def plan_kernel(
    num_splits, cache_seqlens, num_requests, seqlen_q, window_left, programs, wanted, MAX_SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr, FIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. FIXED: by a request's own length alone, so that its bits do not depend on its batch."""
    share = tl.full([], SPLIT_TILE, tl.int64)
    if not FIXED:
        total = tl.zeros([], tl.int64)
        for first in range(0, num_requests, BLOCK):
            request = first + tl.arange(0, BLOCK)
            total += tl.sum(_visible(cache_seqlens, request, num_requests, seqlen_q, window_left).to(tl.int64), 0)
        share = tl.maximum((total * programs + wanted - 1) // wanted, SPLIT_TILE)
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        visible = _visible(cache_seqlens, request, num_requests, seqlen_q, window_left).to(tl.int64)
        count = tl.minimum(tl.maximum((visible + share - 1) // share, 1), MAX_SPLITS)
        tl.store(num_splits + request, count.to(tl.int32), mask=request < num_requests)


@triton.jit(do_not_specialize=["seqlen_q"])
def merge_splits_kernel(
    out, lse, out_partial, lse_partial, num_splits, sinks, seqlen_q,
    out_token, out_head, lse_token, lse_head, part_token, part_head, part_split, pl_token, pl_head,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, LSE: tl.constexpr, SINKS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, heads). Splits are merged in their order, in float32; BLOCK_S of them are loaded at once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.minimum(tl.maximum(tl.load(num_splits + token // seqlen_q), 1), MAX_SPLITS)
    dv = tl.arange(0, BLOCK_DV)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        made = split < splits
        value = tl.load(lse_partial + token * pl_token + head * pl_head + split, mask=made, other=float("-inf"))
        value = value * LOG2_E
        part_at = token * part_token + head * part_head + split[:, None] * part_split + dv[None, :]
        part = tl.load(out_partial + part_at, mask=made[:, None] & (dv < DV)[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(value, 0))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(value - safe)  # a NaN that a request's own keys brought stays one
        fade = tl.exp2(highest - safe)
        acc = acc * fade + tl.sum(weight[:, None] * part, 0)
        total = total * fade + tl.sum(weight, 0)
        highest = new_highest
    empty = total == 0
    if LSE:
        found = tl.where(empty, float("-inf"), (highest + tl.log2(total)) * LN_2)
        tl.store(lse + token * lse_token + head * lse_head, found)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        total = total + tl.where(empty, 0.0, tl.exp2(sink - tl.where(empty, 0.0, highest)))
    result = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out + token * out_token + head * out_head + dv, result.to(out.dtype.element_ty), mask=dv < DV)
