"""Calls of `ops.fmha_varlen` and `ops.fmha_paged`: right ones, and ones with hostile values."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from torch import Tensor

from .draw import Draw
from .judge import check_attention, check_no_fault, check_same_bits
from .memory import FP8, HUGE_INDEX, Guarded, Paging, fill_pages, poisoned, strided
from .options import (
    call_options,
    draw_hidden,
    draw_rules,
    draw_scales,
    new_report,
    pack,
    real,
    set_arch,
    set_isa,
    stored,
)
from .oracle import Answer, Rules, attend, used_keys
from .xqa import PAGE_SIZES, draw_dtypes, draw_heads, mode_of_pages

DIMS = [32, 40, 48, 64, 64, 72, 80, 96, 128, 128, 192, 192, 256, 320, 576]


def _bounds(lengths: list[int], first: int = 0) -> list[int]:
    bounds = [first]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def _int32(draw: Draw, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(draw.device, non_blocking=True)


@dataclass
class Call:
    """A right call of `name`, and its answer, padding included.

    Args:
        paging: Of the pages; None: keys lie side by side.
    """

    name: str
    given: dict[str, Any]
    out: Guarded
    lse: Guarded | None
    answer: Answer
    rules: Rules
    lengths_q: list[int]
    lengths_k: list[int]
    paging: Paging | None


@dataclass(frozen=True)
class Shape:
    """What a call is about.

    Args:
        heads: Of queries and of keys.
        dims: Of keys and of values.
        dtypes: Of q and of the cache.
        page_size: 0: any.
        capped, all_keys: Whether scores have a cap, and the causal rule does not hold, where the shape is aimed at one
            of Hopper's kernels.
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    lengths_q: list[int]
    lengths_k: list[int]
    page_size: int = 0
    split_keys: bool = True
    capped: bool = False
    all_keys: bool = False


def draw_shape(draw: Draw, fp8_queries: bool) -> Shape:
    set_arch(draw)
    heads, kv_heads = draw_heads(draw)
    dim = draw.pick(DIMS)
    pair = dim == 192 and draw.chance(0.5)  # 192 beside 128 has kernels of its own
    dim_v = 128 if pair else dim if draw.chance(0.7) else draw.pick(DIMS)
    dtype, kv_dtype = (FP8, FP8) if fp8_queries else draw_dtypes(draw)
    batch = draw.batch([1, 1, 2, 3, 4, 6], heads * max(dim, dim_v))
    longest = max(min(50_000 // (kv_heads * max(dim, dim_v) * max(batch, 1)), 800), 8)
    lengths_k = draw.lengths(batch, longest)
    most_q = max(min(400_000 // (heads * longest), 2_000_000 // (heads * max(dim, dim_v) * max(batch, 1)), 200), 1)
    lengths_q = [min(draw.length(most_q), most_q) for _ in range(batch)]
    if draw.chance(0.6):
        lengths_q = [min(count_q, count_k) for count_q, count_k in zip(lengths_q, lengths_k)]
    return Shape((heads, kv_heads), (dim, dim_v), (dtype, kv_dtype), lengths_q, lengths_k)


def draw_call(draw: Draw, *, paged: bool, fp8_queries: bool = False, shape: Shape | None = None) -> Call:
    """Of any shape, or of one that is for one of Hopper's kernels."""
    set_isa(draw)
    aimed = shape is not None
    shape = shape or draw_shape(draw, fp8_queries)
    (heads, kv_heads), (dim, dim_v), (dtype, kv_dtype) = shape.heads, shape.dims, shape.dtypes
    lengths_q, lengths_k, batch = shape.lengths_q, shape.lengths_k, len(shape.lengths_k)
    draw.note(paged=paged, H=(heads, kv_heads), D=(dim, dim_v), dtypes=(dtype, kv_dtype), q=lengths_q, k=lengths_k)
    rules = draw_rules(draw, lengths_q, lengths_k, heads, dim, right=True)
    if aimed:
        causal, cap = rules.causal and not shape.all_keys, draw.random.uniform(0.5, 30.0) if shape.capped else 0.0
        rules = replace(rules, scale=dim**-0.5, tree=None, cap=cap, causal=causal)
    elif rules.tree is None and draw.chance(0.2):
        rules = replace(rules, hidden=draw_hidden(draw, lengths_q, lengths_k))
    k_scale, v_scale = (draw_scales(draw, kv_heads, kv_dtype) for _ in range(2))
    if aimed and kv_dtype == dtype:
        k_scale = None
    tokens = sum(lengths_k)
    k = stored(draw.normal(tokens, kv_heads, dim), kv_dtype, k_scale)
    v = stored(draw.normal(tokens, kv_heads, dim_v), kv_dtype, v_scale)
    q = draw.normal(sum(lengths_q), heads, dim).to(dtype).float()
    answer = attend(q.double(), real(k, k_scale), real(v, v_scale), lengths_q, lengths_k, rules)
    used = used_keys(lengths_q, lengths_k, replace(rules, hidden=None))  # hidden from all: still no NaN
    if draw.chance(0.5):
        q[answer.lse == -math.inf] = math.nan
    padding = draw.pick([0, 0, 1, 5])
    answer = with_padding(answer, padding)
    q = strided(draw, torch.cat([q, torch.full((padding, heads, dim), math.nan)]).to(dtype), odd=not aimed)
    options = call_options(draw, rules) | {"window_right": rules.window_right}
    options["k_scale"], options["v_scale"] = (
        None if s is None else s.to(draw.device, non_blocking=True) for s in (k_scale, v_scale)
    )
    options["tree_mask"] = None
    if rules.tree is not None:
        mask = pack(draw, rules.tree)
        garbage = torch.full((padding, mask.shape[1]), 0xFF, dtype=torch.uint8)
        options["tree_mask"] = strided(draw, torch.cat([mask, garbage]))
    if rules.hidden is not None:
        garbage = torch.full((padding, 2), HUGE_INDEX, dtype=torch.int64)
        options["hidden_keys"] = torch.cat([rules.hidden, garbage]).int().to(draw.device, non_blocking=True)
    known, spare = draw.chance(0.5), draw.pick([0, 0, 1, 2])
    plan = FmhaPlan.allocate(
        q.shape[0] + draw.number(0, 40),
        batch + spare,
        causal=rules.causal,
        window_left=rules.window_left,
        tile_q=draw.pick([None, 1, 16, 64, 128, 200]),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=max(dim, dim_v) if known else 128,
        max_seqlen_q=max(lengths_q, default=0) if known and not aimed else None,
        split_keys=shape.split_keys,
        device=draw.device,
    )
    cu_seqlens_q = _int32(draw, _bounds(lengths_q))
    draw.note(tile_q=plan.tile_q, padding=padding)
    paging = None
    if paged:
        paging = Paging(draw, lengths_k, shape.page_size or draw.pick(PAGE_SIZES))
        given = _paged(draw, plan, cu_seqlens_q, lengths_k, k, v, used, paging, odd=not aimed)
    else:
        given = _ragged(draw, plan, cu_seqlens_q, lengths_k, k, v, used, odd=not aimed)
    name = "fmha_paged" if paged else "fmha_varlen"
    draw.saw(mode_of_pages(kv_dtype))
    report = new_report(draw)
    out = Guarded(draw, (q.shape[0], heads, dim_v), torch.bfloat16 if fp8_queries else dtype, odd=not aimed)
    lse = Guarded(draw, (q.shape[0], heads), torch.float32, dense=True) if draw.chance(0.8) else None
    given |= {"q": q, "cu_seqlens_q": cu_seqlens_q, "plan": plan, **options}
    given |= {"out": out.view, "lse": None if lse is None else lse.view, "report": report}
    return Call(name, given, out, lse, answer, rules, lengths_q, lengths_k, paging)


def right_fp8_queries(draw: Draw) -> None:
    """bfloat16 rows on the CPU. Hopper rounds probabilities to e4m3, and its e4m3 products keep some 13 bits."""
    draw.saw("mode fp8 queries")
    right(draw, fp8_queries=True)


def right(draw: Draw, *, fp8_queries: bool = False) -> None:
    """One right call, paged or ragged, compared with its answer."""
    run(draw, draw_call(draw, paged=draw.chance(0.5), fp8_queries=fp8_queries), fp8_queries)


def run(draw: Draw, call: Call, fp8_queries: bool = False) -> None:
    op, given, out, lse = getattr(ops, call.name), call.given, call.out, call.lse
    draw.saw(f"op {call.name}")
    op(**given)
    bounds = {}
    if fp8_queries and draw.device != "cpu":  # each product is cut at 2^-13 of the largest, which is below 16
        bounds = {"looser": 6.0, "lse_atol": max(1e-2, given["q"].shape[-1] * 2.0**-9 * abs(call.rules.scale))}
    check_attention(draw, out.view, None if lse is None else lse.view, call.answer, **bounds)
    check_no_fault(given["report"])
    if draw.chance(0.15):
        first = out.view.clone()
        out.view.fill_(math.nan)
        op(**given)
        check_same_bits("the same call again", first, out.view)
    out.check("out")
    if lse is not None:
        lse.check("lse")


def right_forms(draw: Draw) -> None:
    """Calls of one type and head dims for every form of Hopper's kernels (csrc/fmha/sm90/launch.h), which few draws
    would reach. Other kernels have the same calls to serve."""
    if draw.device != "cpu":
        os.environ["ATTNOPS_CUDA_ARCH"] = ""
    dtype = draw.pick([torch.bfloat16, torch.float16])
    dims = draw.pick([(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
    shape = Shape((16, 4), dims, (dtype, dtype), [], [])
    few, near = [draw.number(1, 3), draw.number(1, 2)], [draw.number(100, 140), draw.number(80, 100)]
    whole = replace(shape, split_keys=False)
    long = replace(shape, lengths_q=[draw.number(20, 50)], lengths_k=[draw.number(1030, 1200)])
    narrow = dims[1] <= 128
    shapes = [
        (False, replace(whole, lengths_q=near, lengths_k=near, capped=True)),
        (True, replace(whole, lengths_q=few, lengths_k=near, page_size=draw.pick([3, 5, 7]))),
        (True, replace(whole, lengths_q=few, lengths_k=near, page_size=draw.pick([3, 5, 7]), capped=True)),
        (True, replace(whole, lengths_q=near, lengths_k=[n + draw.number(0, 90) for n in near], page_size=8)),
        (False, replace(whole, dtypes=(dtype, FP8), lengths_q=near, lengths_k=near)),
        (False, replace(whole, dtypes=(dtype, FP8), lengths_q=near, lengths_k=near, capped=True)),
        (True, replace(whole, dtypes=(dtype, FP8), lengths_q=near, lengths_k=near, page_size=64, capped=True)),
        (True, replace(whole, dtypes=(dtype, FP8), lengths_q=few, lengths_k=near, page_size=draw.pick([3, 5, 7]))),
        (False, long),
        (False, replace(long, capped=True)),
        (True, replace(shape, lengths_q=few, lengths_k=near, page_size=draw.pick([3, 5, 7]))),
        (False, replace(shape, lengths_q=near, lengths_k=near)),
    ]
    small = [draw.number(38, 48) if narrow else draw.number(24, 34) for _ in range(2)]
    shapes.append((False, replace(shape, lengths_q=small, lengths_k=small)))
    if dims != (64, 64) and draw.chance(0.5):  # many works of one tile: too many products for a short call
        one_tile = [draw.number(95, 103) if narrow else draw.number(24, 34) for _ in range(48)]
        shapes.append((False, replace(shape, lengths_q=one_tile, lengths_k=one_tile, all_keys=True)))
    for paged, one in shapes:
        run(draw, draw_call(draw, paged=paged, shape=one))


def with_padding(answer: Answer, padding: int) -> Answer:
    """Rows of no request follow: zeros, and -inf."""
    lse = torch.full((padding, answer.lse.shape[1]), -math.inf, dtype=torch.float64)
    out = torch.zeros(padding, *answer.out.shape[1:], dtype=torch.float64)
    return Answer(
        torch.cat([answer.out, out]),
        torch.cat([answer.lse, lse]),
        torch.cat([answer.noise, lse.clone().fill_(0)]),
        torch.cat([answer.total, lse]),
    )


def _paged(
    draw: Draw,
    plan: FmhaPlan,
    cu_seqlens_q: Tensor,
    lengths: list[int],
    k: Tensor,
    v: Tensor,
    used: Tensor,
    paging: Paging,
    odd: bool,
) -> dict[str, object]:
    page_size, csr = paging.page_size, draw.chance(0.4)
    draw.note(page=page_size, csr=csr)
    draw.saw("mode csr" if csr else "mode page table")
    pages = []
    for rows in (k, v):
        pool = strided(draw, poisoned((paging.num_pages, page_size, *rows.shape[1:]), rows.dtype, "cpu"), odd)
        fill_pages(pool, paging.slots[used], rows[used])
        pages.append(pool)
    seqlens = _int32(draw, lengths)
    ops.fmha_plan(plan, cu_seqlens_q, cache_seqlens=seqlens)
    table = {"page_table": paging.indices, "kv_indptr": paging.indptr} if csr else {"page_table": paging.table}
    return {"k_pages": pages[0], "v_pages": pages[1], "cache_seqlens": seqlens, **table}


def _ragged(
    draw: Draw, plan: FmhaPlan, cu_seqlens_q: Tensor, lengths: list[int], k: Tensor, v: Tensor, used: Tensor, odd: bool
) -> dict[str, object]:
    """Keys that no row sees, and rows before the first and behind the last request, are NaN."""
    first, behind = draw.pick([0, 0, 0, 2]), draw.number(0, 2)
    rows = []
    for values in (k, v):
        row = poisoned((first + len(values) + behind, *values.shape[1:]), values.dtype, "cpu")
        fill_pages(row.unsqueeze(0), used.nonzero().flatten() + first, values[used])
        rows.append(strided(draw, row, odd))
    cu_seqlens_k = _int32(draw, _bounds(lengths, first))
    ops.fmha_plan(plan, cu_seqlens_q, cu_seqlens_k)
    draw.note(first=first)
    return {"k": rows[0], "v": rows[1], "cu_seqlens_k": cu_seqlens_k}
