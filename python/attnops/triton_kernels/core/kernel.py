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
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32.

    PRECISION tells of Triton's interpreter. It knows no bfloat16 in products, and the bits of its float32 ones depend
    on a row's place. So it multiplies in float64.
    """
    if PRECISION == "interpreted":
        wide = tl.dot(a.to(tl.float64), b.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64)
        result = wide.to(tl.float32)
    else:
        result = tl.dot(a, b, acc, input_precision=PRECISION)
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
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr, SHARED: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SIGNED: tl.constexpr,
    TREE: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [low, high) of a source, taken from `begin`, a multiple of BLOCK_N, to `end`.

    Args:
        offset: Position of key 0 of the source in its request.
        nearest: First key in the window of each row.
        k_row, v_row, k_step, v_step: Elements from page to page and from token to token; without pages, of tokens.
        scale: Of products; SIGNED: it may be negative.
        ONE_PAGE: The keys of a step lie in one page.
        SHARED: values are the first DV dimensions of keys, and D is DV.
        MASKED: Some row may not see some key of [begin, end); otherwise every row sees all.

    Both ways of MASKED do the same arithmetic to a key that is seen, so a row's bits do not depend on it.
    """
    d = tl.arange(0, BLOCK_D)
    dpe = D + tl.arange(0, BLOCK_DPE)
    dv = tl.arange(0, BLOCK_DV)
    step = tl.arange(0, BLOCK_N)
    k_rows = step.to(tl.int64) * k_step  # of a step's keys behind its first, where they follow one another
    v_rows = step.to(tl.int64) * v_step
    if SIGNED:
        sign = tl.where(scale < 0, -1.0, 1.0)  # of products, so that the highest one is the highest logit
        scale = tl.abs(scale)
    if CAP:
        scale = scale / logit_cap
    per_logit = logit_cap * LOG2_E if CAP else tl.maximum(scale * LOG2_E, 1e-37)  # never 0 x inf
    # A step's pages are asked for a step ahead. So copies of keys wait for no load, and Triton keeps those of two steps
    # on their way.
    if ONE_PAGE:
        coming = tl.load(table + begin // PAGE_SIZE, mask=begin < end, other=0)
    elif PAGE_SIZE > 0:
        coming = tl.load(table + (begin + step) // PAGE_SIZE, mask=begin + step < end, other=0)
    for first in range(begin, end, BLOCK_N):
        key = first + step
        inside = (key >= low) & (key < high)
        k_from = k
        v_from = v
        if PAGE_SIZE == 0:
            k_from = k + tl.cast(first, tl.int64) * k_step
            v_from = v + tl.cast(first, tl.int64) * v_step
            k_at = k_rows
            v_at = v_rows
        elif ONE_PAGE:
            page = coming.to(tl.int64)
            page = tl.where((page >= 0) & (page < num_pages), page, 0)
            in_page = tl.cast(first % PAGE_SIZE, tl.int64)
            following = first + BLOCK_N
            coming = tl.load(table + following // PAGE_SIZE, mask=following < end, other=0)
            k_from = k + (page * k_row + in_page * k_step)
            v_from = v + (page * v_row + in_page * v_step)
            k_at = k_rows
            v_at = v_rows
        else:
            page = coming.to(tl.int64)
            following = key + BLOCK_N
            coming = tl.load(table + following // PAGE_SIZE, mask=following < end, other=0)
            page = tl.where((page >= 0) & (page < num_pages), page, 0)
            k_at = page * k_row + (key % PAGE_SIZE).to(tl.int64) * k_step
            v_at = page * v_row + (key % PAGE_SIZE).to(tl.int64) * v_step
        if MASKED:
            stored = tl.load(k_from + k_at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
        elif D == BLOCK_D:
            stored = tl.load(k_from + k_at[:, None] + d[None, :])
        else:
            stored = tl.load(k_from + k_at[:, None] + d[None, :], mask=(d < D)[None, :], other=0)
        keys = real_values(stored, FP8, q.dtype)
        logits = product(q, tl.trans(keys), tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION)
        if DPE:
            at_pe = k_from + k_at[:, None] + dpe[None, :]
            if MASKED:
                stored_pe = tl.load(at_pe, mask=inside[:, None] & (dpe < D + DPE)[None, :], other=0)
            elif DPE == BLOCK_DPE:
                stored_pe = tl.load(at_pe)
            else:
                stored_pe = tl.load(at_pe, mask=(dpe < D + DPE)[None, :], other=0)
            logits = product(q_pe, tl.trans(real_values(stored_pe, FP8, q.dtype)), logits, PRECISION)
        if SIGNED:
            logits = logits * sign
        if CAP:
            logits = tanh(logits * scale)
        if MASKED:
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
            logits = tl.where(visible, logits, float("-inf"))
        top = tl.max(logits, 1)
        new_highest = tl.maximum(highest, tl.where(top == float("-inf"), top, top * per_logit))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(tl.fma(logits, per_logit, -safe[:, None]))
        fade = tl.exp2(highest - safe)
        total = total * fade + tl.sum(weights, 1)
        if SHARED:
            values = keys
        else:
            if MASKED:
                held = tl.load(v_from + v_at[:, None] + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0)
            elif DV == BLOCK_DV:
                held = tl.load(v_from + v_at[:, None] + dv[None, :])
            else:
                held = tl.load(v_from + v_at[:, None] + dv[None, :], mask=(dv < DV)[None, :], other=0)
            values = real_values(held, FP8, q.dtype)
        if MASKED and TREE:  # a draft token that no row sees may hold NaN
            seen = tl.max(visible.to(tl.int32), 0) > 0
            values = tl.where(seen[:, None], values, 0.0).to(q.dtype)
        acc = product(weights.to(q.dtype), values, acc * fade[:, None], PRECISION)
        highest = new_highest
    return acc, highest, total


@triton.jit
def sweep(
    acc, highest, total, q, q_pe, begin, end, low, high, seen_from, seen_to, offset, position, nearest, window_left,
    logit_cap, scale, k, v, k_row, k_step, v_row, v_step, table, num_pages, tree_row, prefix, seqlen_q,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DPE: tl.constexpr, BLOCK_DPE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr, SHARED: tl.constexpr,
    PEEL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SIGNED: tl.constexpr,
    TREE: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`accumulate` over [begin, end), where PEEL without masks for the steps within [seen_from, seen_to).

    Every row of the tile sees every key there.
    """
    plain = begin
    masked = begin
    if PEEL:
        if WINDOW:
            plain = begin + tl.maximum(seen_from - begin + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
            plain = tl.minimum(plain, begin + (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
            acc, highest, total = accumulate(
                acc, highest, total, q, q_pe, begin, tl.minimum(plain, end), low, high, offset, position, nearest,
                window_left, logit_cap, scale, k, v, k_row, k_step, v_row, v_step, table, num_pages, tree_row, prefix,
                seqlen_q, BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, PAGE_SIZE, ONE_PAGE, SHARED, True, CAUSAL,
                WINDOW, CAP, SIGNED, TREE, FP8, PRECISION,
            )  # fmt: skip
        masked = plain + tl.maximum(tl.minimum(tl.minimum(seen_to, high), end) - plain, 0) // BLOCK_N * BLOCK_N
        acc, highest, total = accumulate(
            acc, highest, total, q, q_pe, plain, masked, low, high, offset, position, nearest, window_left, logit_cap,
            scale, k, v, k_row, k_step, v_row, v_step, table, num_pages, tree_row, prefix, seqlen_q,
            BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, PAGE_SIZE, ONE_PAGE, SHARED, False, CAUSAL, WINDOW,
            CAP, SIGNED, TREE, FP8, PRECISION,
        )  # fmt: skip
    acc, highest, total = accumulate(
        acc, highest, total, q, q_pe, masked, end, low, high, offset, position, nearest, window_left, logit_cap, scale,
        k, v, k_row, k_step, v_row, v_step, table, num_pages, tree_row, prefix, seqlen_q,
        BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, PAGE_SIZE, ONE_PAGE, SHARED, True, CAUSAL, WINDOW,
        CAP, SIGNED, TREE, FP8, PRECISION,
    )  # fmt: skip
    return acc, highest, total


_RUNTIME_ONLY = ["num_requests", "num_tokens", "num_pages", "table_width", "window_left", "seqlen_q", "num_tiles"]
_RUNTIME_ONLY += ["tree_keys"]


@triton.jit(do_not_specialize=_RUNTIME_ONLY)
def attend_kernel(
    out, lse, q, q_pe, k_pages, v_pages, k_new, v_new, page_table, cache_seqlens, cu_seqlens_q, cu_seqlens_k,
    num_splits, sinks, tree_mask, k_scale, v_scale, softmax_scale, logit_cap, window_left, seqlen_q, num_requests,
    num_tokens, num_pages, table_width, num_tiles, tree_keys,
    q_token, q_head, pe_token, pe_head, kp_page, kp_step, kp_head, vp_page, vp_step, vp_head, kn_step, kn_head,
    vn_step, vn_head, table_row, out_token, out_head, out_split, lse_token, lse_head, tree_request, tree_token,
    HEAD_BLOCKS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DPE: tl.constexpr, BLOCK_DPE: tl.constexpr, DV: tl.constexpr, BLOCK_DV:
    tl.constexpr, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr, SHARED: tl.constexpr, PEEL: tl.constexpr, UNIFORM:
    tl.constexpr, PAGED: tl.constexpr, NEW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, FLIP: tl.constexpr, TREE: tl.constexpr, FP8: tl.constexpr, K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr, SPLIT_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of queries, KV heads x blocks of their group, splits).

    PAGED: keys come from pages. NEW: from `k_new`; after the pages' prefix where PAGED, else all of them.
    SPLIT: `out` and `lse` are partial results in float32, one per split.
    ONE_PAGE, SHARED, PEEL: As of `accumulate` and `sweep`.
    FLIP: `softmax_scale` is negative.
    TREE: A row has a bit for each of the last `tree_keys` keys.
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
    drafts = count
    if TREE:
        drafts = tree_keys
    prefix = seqlen_k - drafts
    position = tl.where(is_row, prefix + token, NO_ROW)

    d = tl.arange(0, BLOCK_D)
    q_at = q + at_token[:, None] * q_token + head[:, None] * q_head + d[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & (d < D)[None, :], other=0)
    queries_pe = queries
    if DPE:
        dpe = tl.arange(0, BLOCK_DPE)
        pe_at = q_pe + at_token[:, None] * pe_token + head[:, None] * pe_head + dpe[None, :]
        queries_pe = tl.load(pe_at, mask=is_row[:, None] & (dpe < DPE)[None, :], other=0)
    tree_row = tree_mask + request.to(tl.int64) * tree_request + token * tree_token

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
    # And what every one sees.
    seen_from = 0
    seen_to = seqlen_k
    if TREE:
        seen_to = prefix
    elif CAUSAL:
        seen_to = nearest + 1
    if WINDOW:
        seen_from = (prefix + drafts - 1 if TREE else farthest) - window_left
        if not CAUSAL:
            seen_to = tl.minimum(seen_to, nearest + window_left + 1)
    window_begin = position - window_left
    if TREE and WINDOW:
        window_begin = tree_window_begin(tree_row, is_row, prefix, drafts, window_left)
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

    SIGNED: tl.constexpr = FLIP or K_SCALE > 0
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
        acc, highest, total = sweep(
            acc, highest, total, queries, queries_pe, begin, paged_end, low, paged_high, seen_from, seen_to, 0,
            position, window_begin, window_left, logit_cap, scale, k_pages + kv_head * kp_head,
            v_pages + kv_head * vp_head, kp_page, kp_step, vp_page, vp_step,
            page_table + request.to(tl.int64) * table_row, num_pages, tree_row, prefix, drafts,
            BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, PAGE_SIZE, ONE_PAGE, SHARED, PEEL, CAUSAL, WINDOW,
            CAP, SIGNED, TREE, FP8, PRECISION,
        )  # fmt: skip
    if NEW:
        new_offset = 0
        new_high = high
        if PAGED:
            new_offset = tl.maximum(prefix, 0)
            first_key = first_token
            new_high = tl.minimum(high - new_offset, num_tokens - first_key)
        new_low = tl.maximum(low - new_offset, 0)
        base = first_key.to(tl.int64)
        acc, highest, total = sweep(
            acc, highest, total, queries, queries_pe, new_low // BLOCK_N * BLOCK_N, high - new_offset, new_low,
            new_high, seen_from - new_offset, seen_to - new_offset, new_offset, position, window_begin, window_left,
            logit_cap, scale, k_new + base * kn_step + kv_head * kn_head, v_new + base * vn_step + kv_head * vn_head, 0,
            kn_step, 0, vn_step, page_table, 0, tree_row, prefix, drafts,
            BLOCK_N, D, BLOCK_D, DPE, BLOCK_DPE, DV, BLOCK_DV, 0, False, False, PEEL, CAUSAL, WINDOW, CAP, SIGNED,
            TREE, 0, PRECISION,
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
