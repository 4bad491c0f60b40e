"""The one attention kernel: a tile of queries over a range of keys, in pages, in a ragged tensor, or in both.

A row of a tile is a token and a query head of one KV head's group. So a key is loaded once for the whole group.
Keys are taken in steps of BLOCK_N that begin at multiples of BLOCK_N. A step in which a row sees nothing leaves its
bits as they are. So a row's result depends on its own keys alone, unless SPLIT divides them by the batch's lengths.

Source: the online softmax of FlashAttention-2 (arXiv:2307.08691); splits as in FlashDecoding.
"""

# Triton's language has types of its own.
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
E4M3: tl.constexpr = tl.constexpr(1)
E5M2: tl.constexpr = tl.constexpr(2)
NO_ROW: tl.constexpr = tl.constexpr(-(2**30))  # position of a row of the tile that is no query


@triton.jit
def real_values(stored, FP8: tl.constexpr, dtype: tl.constexpr):
    """Stored keys or values in q's dtype. FP8 comes as bytes: not every GPU has a conversion, and this one is exact."""
    if FP8 == 0:
        values = stored
    elif FP8 == E5M2:
        values = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:  # e4m3 in the place of a float16's exponent and mantissa is too small by 2^8; 0x7f is its only NaN
        bits = stored.to(tl.uint16)
        shifted = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide = shifted.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(dtype)
    return values


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. Triton's interpreter knows no bfloat16 in products; it is told by PRECISION."""
    if PRECISION == "interpreted":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def tanh(x):
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    positive = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -positive, positive)


@triton.jit
def request_of_tile(cu_seqlens_q, tile, num_requests, BLOCK_Q: tl.constexpr):
    """The last request whose first tile is not behind `tile`, where each begins at cu_seqlens_q[b] // BLOCK_Q + b."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= tile
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return tl.maximum(low - 1, 0)


@triton.jit
def tree_window_begin(tree_row, is_row, prefix, count, window_left):
    """The first key in the window of each row of a tree, which counts steps: the set bits of the row, less one."""
    room = is_row.to(tl.int32) * 0 + window_left + 1
    begin = room * 0 + NO_ROW
    for back in range(0, count):
        draft = count - 1 - back
        bits = tl.load(tree_row + draft // 8, mask=is_row, other=0).to(tl.int32)
        room -= (bits >> (draft % 8)) & 1
        begin = tl.where((room == 0) & (begin == NO_ROW), prefix + draft, begin)
    return tl.where(begin == NO_ROW, prefix - tl.minimum(room, window_left), begin)


@triton.jit
def accumulate(
    acc, highest, total, q, q_pe, begin, end, low, high, offset, position, nearest, window_left, logit_cap, scale,
    k, v, k_row, k_step, v_row, v_step, table, num_pages, tree_row, prefix, seqlen_q,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DPE: tl.constexpr, BLOCK_DPE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, TREE: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [low, high) of a source, taken from `begin`, a multiple of BLOCK_N, to `end`.

    Args:
        offset: Position of key 0 of the source in its request.
        nearest: First key in the window of each row.
        k_row, v_row, k_step, v_step: Elements from page to page and from token to token; without pages, of tokens.
    """
    d = tl.arange(0, BLOCK_D)
    dpe = D + tl.arange(0, BLOCK_DPE)
    dv = tl.arange(0, BLOCK_DV)
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = (key >= low) & (key < high)
        if PAGE_SIZE == 0:
            k_at = key.to(tl.int64) * k_step
            v_at = key.to(tl.int64) * v_step
        else:
            page = tl.load(table + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            inside = inside & (page >= 0) & (page < num_pages)
            k_at = page * k_row + (key % PAGE_SIZE).to(tl.int64) * k_step
            v_at = page * v_row + (key % PAGE_SIZE).to(tl.int64) * v_step
        k_mask = inside[None, :] & (d < D)[:, None]
        keys = real_values(tl.load(k + k_at[None, :] + d[:, None], mask=k_mask, other=0), FP8, q.dtype)
        scores = product(q, keys, PRECISION)
        if DPE:
            pe_mask = inside[None, :] & (dpe < D + DPE)[:, None]
            k_pe = real_values(tl.load(k + k_at[None, :] + dpe[:, None], mask=pe_mask, other=0), FP8, q.dtype)
            scores += product(q_pe, k_pe, PRECISION)
        scores = scores * scale
        if CAP:
            scores = logit_cap * tanh(scores / logit_cap)
        at = offset + key
        visible = inside[None, :] & (position > NO_ROW)[:, None]
        if TREE:
            draft = at - prefix
            is_draft = (draft >= 0) & (draft < seqlen_q)
            bits = tl.load(tree_row[:, None] + (draft // 8)[None, :], mask=visible & is_draft[None, :], other=0)
            bit = (bits.to(tl.int32) >> (draft % 8)[None, :]) & 1
            visible = visible & ((draft < 0)[None, :] | (bit != 0))
        elif CAUSAL:
            visible = visible & (at[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (at[None, :] >= nearest[:, None])
            if not CAUSAL:
                visible = visible & (at[None, :] <= position[:, None] + window_left)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(highest - safe)
        total = total * fade + tl.sum(weights, 1)
        v_mask = inside[:, None] & (dv < DV)[None, :]
        values = real_values(tl.load(v + v_at[:, None] + dv[None, :], mask=v_mask, other=0), FP8, q.dtype)
        if TREE:  # a draft token that no row sees may hold NaN
            seen = tl.max(visible.to(tl.int32), 0) > 0
            values = tl.where(seen[:, None], values, 0.0).to(q.dtype)
        acc = acc * fade[:, None] + product(weights.to(q.dtype), values, PRECISION)
        highest = new_highest
    return acc, highest, total


_RUNTIME_ONLY = ["num_requests", "num_tokens", "num_pages", "table_width", "window_left", "seqlen_q", "num_tiles"]


@triton.jit(do_not_specialize=_RUNTIME_ONLY)
def attend_kernel(
    out, lse, q, q_pe, k_pages, v_pages, k_new, v_new, page_table, cache_seqlens, cu_seqlens_q, cu_seqlens_k,
    num_splits, sinks, tree_mask, k_scale, v_scale, softmax_scale, logit_cap, window_left, seqlen_q, num_requests,
    num_tokens, num_pages, table_width, num_tiles,
    q_token, q_head, pe_token, pe_head, kp_page, kp_step, kp_head, vp_page, vp_step, vp_head, kn_step, kn_head,
    vn_step, vn_head, table_row, out_token, out_head, out_split, lse_token, lse_head, tree_token,
    HEAD_BLOCKS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DPE: tl.constexpr, BLOCK_DPE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIFORM: tl.constexpr, PAGED: tl.constexpr,
    NEW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    TREE: tl.constexpr, FP8: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr,
    SPLIT: tl.constexpr, SPLIT_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of queries, KV heads x blocks of their group, splits).

    PAGED: keys come from pages. NEW: from `k_new`; after the pages' prefix where PAGED, else all of them.
    SPLIT: `out` and `lse` are partial results in float32, one per split.
    K_SCALE, V_SCALE: 0: none; 1: one per tensor; 2: one per KV head.
    """
    tile = num_tiles - 1 - tl.program_id(0)  # causal: what is last has most keys, so it begins first
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    split = tl.program_id(2)
    if UNIFORM:
        tiles_per_request = (seqlen_q + BLOCK_Q - 1) // BLOCK_Q
        request = tile // tiles_per_request
        tile = tile % tiles_per_request
        first_token = request * seqlen_q
        count = seqlen_q
    else:
        request = request_of_tile(cu_seqlens_q, tile, num_requests, BLOCK_Q)
        first_token = tl.load(cu_seqlens_q + request)
        count = tl.load(cu_seqlens_q + request + 1) - first_token
        tile = tile - first_token // BLOCK_Q - request
    if tile * BLOCK_Q >= count:
        return
    first_key = 0
    if PAGED:
        seqlen_k = tl.load(cache_seqlens + request)
        seqlen_k = tl.minimum(tl.maximum(seqlen_k, 0), table_width * PAGE_SIZE)
    else:
        first_key = tl.load(cu_seqlens_k + request)
        seqlen_k = tl.maximum(tl.load(cu_seqlens_k + request + 1) - first_key, 0)

    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    token = tile * BLOCK_Q + row // BLOCK_H
    in_group = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_H + row % BLOCK_H
    head = kv_head * GROUP + in_group
    at_token = (first_token + token).to(tl.int64)
    is_row = (token < count) & (in_group < GROUP) & (at_token >= 0) & (at_token < num_tokens)
    prefix = seqlen_k - count
    position = tl.where(is_row, prefix + token, NO_ROW)

    d = tl.arange(0, BLOCK_D)
    q_at = q + at_token[:, None] * q_token + head[:, None] * q_head + d[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & (d < D)[None, :], other=0)
    queries_pe = queries
    if DPE:
        dpe = tl.arange(0, BLOCK_DPE)
        pe_at = q_pe + at_token[:, None] * pe_token + head[:, None] * pe_head + dpe[None, :]
        queries_pe = tl.load(pe_at, mask=is_row[:, None] & (dpe < DPE)[None, :], other=0)
    tree_row = tree_mask + at_token * tree_token

    # What any row of the tile sees. A row of a tree may have any depth.
    nearest = prefix
    if not TREE:
        nearest += tile * BLOCK_Q
    farthest = prefix + tl.minimum(tile * BLOCK_Q + BLOCK_Q, count) - 1
    low = 0
    high = seqlen_k
    if WINDOW:
        low = tl.maximum(nearest - window_left, 0)
    if CAUSAL and not TREE:
        high = tl.minimum(high, farthest + 1)
    if WINDOW and not CAUSAL:
        high = tl.minimum(high, farthest + window_left + 1)
    window_begin = position - window_left
    if TREE and WINDOW:
        window_begin = tree_window_begin(tree_row, is_row, prefix, count, window_left)
    begin = low // BLOCK_N * BLOCK_N
    end = high
    if SPLIT:
        splits = tl.minimum(tl.maximum(tl.load(num_splits + request), 1), tl.num_programs(2))
        if split >= splits:
            return
        share = (tl.maximum(end - begin, 0) + splits - 1) // splits
        share = tl.maximum((share + SPLIT_TILE - 1) // SPLIT_TILE * SPLIT_TILE, SPLIT_TILE)
        begin = begin + split * share
        end = tl.minimum(end, begin + share)
        high = end  # a split may end within a step

    scale = softmax_scale
    value_scale = 1.0
    if K_SCALE:
        scale = scale * tl.load(k_scale + (kv_head if K_SCALE == 2 else 0))
    if V_SCALE:
        value_scale = tl.load(v_scale + (kv_head if V_SCALE == 2 else 0))
    highest = tl.full([BLOCK_Q * BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_Q * BLOCK_H, BLOCK_DV], tl.float32)
    if PAGED:
        paged_end = end
        paged_high = high
        if NEW:
            paged_end = tl.minimum(end, prefix)
            paged_high = tl.minimum(high, prefix)
        acc, highest, total = accumulate(
            acc, highest, total, queries, queries_pe, begin, paged_end, low, paged_high, 0, position,
            window_begin, window_left, logit_cap, scale, k_pages + kv_head * kp_head, v_pages + kv_head * vp_head,
            kp_page, kp_step, vp_page, vp_step, page_table + request.to(tl.int64) * table_row, num_pages, tree_row,
            prefix, count, BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, PAGE_SIZE, CAUSAL, WINDOW, CAP, TREE,
            FP8, PRECISION,
        )  # fmt: skip
    if NEW:
        new_offset = 0
        if PAGED:
            new_offset = tl.maximum(prefix, 0)
            first_key = first_token
        new_low = tl.maximum(low - new_offset, 0)
        base = first_key.to(tl.int64)
        acc, highest, total = accumulate(
            acc, highest, total, queries, queries_pe, new_low // BLOCK_N * BLOCK_N, high - new_offset, new_low,
            tl.minimum(high - new_offset, num_tokens - first_key) if PAGED else high, new_offset, position,
            window_begin, window_left, logit_cap, softmax_scale,
            k_new + base * kn_step + kv_head * kn_head, v_new + base * vn_step + kv_head * vn_head, 0, kn_step, 0,
            vn_step, page_table, 0, tree_row, prefix, count, BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, 0,
            CAUSAL, WINDOW, CAP, TREE, 0, PRECISION,
        )  # fmt: skip

    empty = total == 0  # no key seen: the highest weight of any other row is 1
    found = tl.where(empty, float("-inf"), (highest + tl.log2(total)) * LN_2)
    if LSE or SPLIT:
        tl.store(lse + at_token * lse_token + head * lse_head + split, found, mask=is_row)
    if SINKS and not SPLIT:  # a logit that takes probability and gives no value
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E
        total = total + tl.where(empty, 0.0, tl.exp2(sink - tl.where(empty, 0.0, highest)))
    result = tl.where(empty[:, None], 0.0, acc * value_scale / tl.where(empty, 1.0, total)[:, None])
    dv = tl.arange(0, BLOCK_DV)
    out_at = at_token[:, None] * out_token + head[:, None] * out_head + split * out_split + dv[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < DV)[None, :])
