"""Right calls of `ops.xqa_decode` over ragged requests."""

from __future__ import annotations

import math

import torch
from attnops import ops
from attnops.metadata import XqaDecodePlan

from .draw import Draw, Failure
from .fmha import with_padding
from .judge import check_attention, check_no_fault, check_same_bits
from .memory import FP8, Guarded, Paging, fill_pages, poisoned, strided
from .options import FP8_KINDS, call_options, draw_scales, new_report, real, set_isa, stored
from .oracle import Rules, attend, used_keys
from .xqa import DIMS, PAGE_SIZES, draw_dtypes, draw_heads, draw_pools, mode_of_pages


def _rules(draw: Draw, heads: int, dim: int) -> Rules:
    """Without windows and trees, which ragged requests do not have."""
    return Rules(
        scale=dim**-0.5 * (1.0 if draw.chance(0.6) else draw.random.uniform(0.05, 2.5)),
        causal=draw.chance(0.75),
        cap=0.0 if draw.chance(0.75) else draw.random.uniform(0.5, 30.0),
        sinks=2 * draw.normal(heads) if draw.chance(0.3) else None,
    )


def right(draw: Draw) -> None:
    """One right call, compared with its answer."""
    set_isa(draw)
    on_cpu = draw.device == "cpu"
    heads, kv_heads = draw_heads(draw)
    dim = draw.pick(DIMS["cpu"]) if on_cpu or draw.chance(0.3) else draw.pick([64, 96, 128, 128, 192, 192, 256, 256])
    dtype, kv_dtype = draw_dtypes(draw)
    batch = draw.pick([1, 1, 2, 3, 4, 5, 7, 40])
    most = draw.pick([1, 1, 2, 3, 4, 5, 8, 9, 17, 33])
    if not on_cpu:  # what Hopper's kernels take
        dtype = dtype if dtype != torch.float32 else torch.float16
        kv_dtype = FP8 if kv_dtype in FP8_KINDS else dtype
        dim = max(dim // 16 * 16, 16)
        most = max(min(most, (64 if dim <= 128 else 32) * kv_heads // heads), 1)
    chunked = draw.chance(0.3)  # requests have more tokens, and are cut
    counts = [draw.number(0, 4 * most if chunked and draw.chance(0.3) else most) for _ in range(batch)]
    budget = 60_000 if on_cpu else 1_000_000
    longest = max(min(budget // (kv_heads * dim * batch), 4000 if on_cpu else 20_000), 8)
    lengths = draw.lengths(batch, min(longest, 200) if draw.chance(0.5) else longest)
    padding, page_size = draw.pick([0, 0, 1, 6]), draw.pick(PAGE_SIZES)
    draw.note(B=batch, S=most, H=(heads, kv_heads), D=dim, page=page_size, dtypes=(dtype, kv_dtype), padding=padding)
    draw.note(q=counts, lengths=lengths)
    rules = _rules(draw, heads, dim)
    draw.note(causal=rules.causal, cap=round(rules.cap, 2), sinks=rules.sinks is not None)
    paging = Paging(draw, lengths, page_size)
    tokens = sum(lengths)
    k_scale, v_scale = (draw_scales(draw, kv_heads, kv_dtype) for _ in range(2))
    k, v = (stored(draw.normal(tokens, kv_heads, dim), kv_dtype, s) for s in (k_scale, v_scale))
    shape = (paging.num_pages, page_size, kv_heads, dim)
    if on_cpu:
        k_pages, v_pages = draw_pools(draw, shape, kv_dtype)
    else:
        k_pages, v_pages = (poisoned(shape, kv_dtype, draw.device) for _ in range(2))
    used = used_keys(counts, lengths, rules)
    fill_pages(k_pages, paging.slots[used], k[used])
    fill_pages(v_pages, paging.slots[used], v[used])
    q = draw.normal(sum(counts), heads, dim).to(dtype)
    answer = with_padding(attend(q.double(), real(k, k_scale), real(v, v_scale), counts, lengths, rules), padding)
    q = torch.cat([q, torch.full((padding, heads, dim), math.nan, dtype=dtype)])
    q = strided(draw, q) if on_cpu else q.to(draw.device)
    bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(draw.device)
    seqlens = torch.tensor(lengths, dtype=torch.int32).to(draw.device)
    fixed = 0 if not on_cpu or draw.chance(0.7) else draw.pick([64, 128, -1, -3, -8])
    if fixed > 0:
        fixed = max(fixed, 64 * -(-max(lengths, default=0) // (64 * 256)))
    parts = None if draw.chance(0.3) else draw.number(1, 9) if on_cpu else draw.pick([1, 2, 7, 33, 132])
    chunks = None
    if chunked:
        count = sum(-(-tokens // most) for tokens in counts) + draw.pick([0, 0, 1, 5])
        chunks = torch.full((3, count + 1), -1, dtype=torch.int32, device=draw.device)
        ops.xqa_decode_chunks(chunks, bounds, seqlens, most, causal=rules.causal)
    plan = XqaDecodePlan.allocate(
        batch if chunks is None else chunks.shape[1] - 1,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seqlen_q=most,
        fixed_split_tokens=fixed,
        max_seqlen_k=max(lengths, default=0) if fixed > 0 else None,
        num_sm_parts=parts,
        kv_dtype=kv_dtype,
        device=draw.device,
    )
    plan.out_partial.fill_(math.nan)
    plan.lse_partial.fill_(math.nan)
    if chunks is not None:
        bounds, seqlens = chunks[0], chunks[1, :-1]
        draw.saw("op xqa_decode_chunks", "mode chunks of tokens")
    ops.xqa_decode_plan(plan, seqlens)
    csr = chunks is None and draw.chance(0.4)
    draw.note(fixed=fixed, parts=parts, csr=csr, chunks=chunks is not None)
    draw.saw("mode ragged tokens", "op xqa_decode", mode_of_pages(kv_dtype))
    table = {"page_table": paging.indices, "kv_indptr": paging.indptr} if csr else {"page_table": paging.table}
    options = {name: value for name, value in call_options(draw, rules).items() if name != "window_left"}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    options |= {name: None if s is None else s.to(draw.device) for name, s in scales.items()}
    report = new_report(draw) if on_cpu else None
    out = Guarded(draw, tuple(q.shape), dtype)
    lse = Guarded(draw, tuple(q.shape[:2]), torch.float32, dense=True) if draw.chance(0.8) else None
    given = {"q": q, "k_pages": k_pages, "v_pages": v_pages, **table, "cache_seqlens": seqlens, "plan": plan}
    given |= {"cu_seqlens_q": bounds, **options, "report": report}
    given |= {"table_rows": None if chunks is None else chunks[2, :-1]}
    ops.xqa_decode(**given, out=out.view, lse=None if lse is None else lse.view)
    check_attention(draw, out.view, None if lse is None else lse.view, answer)
    check_no_fault(report)
    if bool(plan.semaphores.any()):
        raise Failure("semaphores are not zero after the call")
    if draw.chance(0.15):
        first = out.view.clone()
        out.view.fill_(math.nan)
        ops.xqa_decode(**given, out=out.view)
        check_same_bits("the same call again", first, out.view)
    out.check("out")
    if lse is not None:
        lse.check("lse")
