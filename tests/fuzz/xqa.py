"""Right calls of `ops.xqa_decode`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from attnops import ops
from attnops.metadata import XqaDecodePlan
from torch import Tensor

from .alone import check_alone
from .draw import Draw, Failure
from .judge import check_attention, check_no_fault, check_same_bits
from .memory import E5M2, FP8, Guarded, Paging, Untouched, fill_pages, poisoned, strided
from .options import call_options, draw_rules, draw_scales, new_report, pack, real, set_isa, stored, widened
from .oracle import Answer, Rules, attend, used_keys

DIMS = {
    "cpu": [8, 16, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256],
    "cuda": [64, 64, 128, 128, 128, 128, 192, 256],
}
PAGE_SIZES = [1, 2, 3, 5, 7, 8, 16, 16, 32, 32, 48, 64, 64, 64, 100, 128, 256]


@dataclass
class Call:
    """A right call and its answer.

    Args:
        lengths: Of the requests, the new tokens included.
        options: Keyword arguments of the op, the tree mask excepted.
        fixed: `fixed_split_tokens` of the plan.
    """

    q: Tensor  # [B, S_q, H_q, D]
    k_pages: Tensor
    v_pages: Tensor
    paging: Paging
    lengths: list[int]
    options: dict[str, object]
    tree_mask: Tensor | None  # [B * S_q, bytes]
    rules: Rules
    answer: Answer
    fixed: int
    parts: int | None

    @property
    def seqlens(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32).to(self.q.device, non_blocking=True)


def draw_heads(draw: Draw) -> tuple[int, int]:
    """(H_q, H_kv): groups of any size, powers of two more often."""
    kv_heads = draw.pick([1, 1, 1, 2, 2, 3, 4, 5, 8])
    group = draw.pick([1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16])
    return kv_heads * group, kv_heads


def draw_dtypes(draw: Draw) -> tuple[torch.dtype, torch.dtype]:
    """(of q, of the cache)."""
    dtype = draw.pick([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    return dtype, draw.pick([FP8, FP8, E5M2]) if draw.chance(0.35) else dtype


def mode_of_pages(kv_dtype: torch.dtype) -> str:
    """What the run counts."""
    return {FP8: "mode fp8", E5M2: "mode e5m2"}.get(kv_dtype, "mode plain")


def draw_pools(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Poisoned K and V pools ``[P, page_size, H_kv, D]`` in one of many layouts."""
    pages, size, heads, dim = shape
    layout = draw.pick(["nhd", "hnd", "joint", "free", "free"])
    draw.note(layout=layout)
    if layout == "joint":
        joint = poisoned((pages, 2, size, heads, dim), dtype, draw.device)
        return joint[:, 0], joint[:, 1]
    if layout == "hnd":
        k, v = (poisoned((pages, heads, size, dim), dtype, draw.device).transpose(1, 2) for _ in range(2))
    elif layout == "nhd":
        k, v = (poisoned(shape, dtype, draw.device) for _ in range(2))
    else:
        odd = draw.chance(0.3)
        k, v = (strided(draw, poisoned(shape, dtype, "cpu"), odd) for _ in range(2))
    return k, v


def draw_call(draw: Draw, *, heads: tuple[int, int] | None = None) -> Call:
    many_bytes = heads is None and draw.chance(0.06)  # more works over e4m3 than clusters of CTAs take
    num_heads, kv_heads = (8 * draw.pick([1, 2, 4]), 8) if many_bytes else heads or draw_heads(draw)
    dim = draw.pick(DIMS["cuda" if draw.device != "cpu" and draw.chance(0.8) else "cpu"])
    if draw.chance(0.06):
        dim = draw.number(1, 256)
    dtype, kv_dtype = draw_dtypes(draw)
    if many_bytes:
        dim, dtype, kv_dtype = draw.pick([128, 128, 96, 64]), draw.pick([torch.bfloat16, torch.float16]), FP8
    seqlen = draw.pick([1, 1, 1, 1, 2, 3, 4, 5, 8, 9, 17])
    batch = draw.batch([20, 40] if many_bytes else [1, 1, 2, 3, 4, 5, 7], seqlen * num_heads * dim)
    budget = (60_000 if draw.device == "cpu" else 1_000_000) * (4 if batch > 10 else 1)
    longest = max(min(budget // (kv_heads * dim * max(batch, 1)), 4000 if draw.device == "cpu" else 20_000), 8)
    if draw.chance(0.5):
        longest = min(longest, 200)
    lengths = draw.lengths(batch, longest)
    page_size = draw.pick([16, 32, 64, 64, 128] if many_bytes else PAGE_SIZES)
    draw.note(B=batch, S=seqlen, H=(num_heads, kv_heads), D=dim, page=page_size, dtypes=(dtype, kv_dtype))
    draw.note(lengths=lengths)
    rules = draw_rules(draw, [seqlen] * batch, lengths, num_heads, dim, widest=seqlen)
    rules = widened(draw, rules, seqlen)
    paging = Paging(draw, lengths, page_size)
    tokens = sum(lengths)
    k_scale, v_scale = (draw_scales(draw, kv_heads, kv_dtype) for _ in range(2))
    k, v = (stored(draw.normal(tokens, kv_heads, dim), kv_dtype, s) for s in (k_scale, v_scale))
    k_pages, v_pages = draw_pools(draw, (paging.num_pages, page_size, kv_heads, dim), kv_dtype)
    used = used_keys([seqlen] * batch, lengths, rules)
    fill_pages(k_pages, paging.slots[used], k[used])
    fill_pages(v_pages, paging.slots[used], v[used])
    q = draw.normal(batch, seqlen, num_heads, dim).to(dtype)
    answer = attend(q.double().flatten(0, 1), real(k, k_scale), real(v, v_scale), [seqlen] * batch, lengths, rules)
    if draw.chance(0.5):
        q.flatten(0, 1)[answer.lse == -math.inf] = math.nan
    options = call_options(draw, rules)
    options["k_scale"], options["v_scale"] = (
        None if s is None else s.to(draw.device, non_blocking=True) for s in (k_scale, v_scale)
    )
    fixed = 0 if draw.chance(0.6) else draw.pick([64, 64, 128, 192, 512, -1, -2, -3, -5, -8])
    if fixed > 0:
        fixed = max(fixed, 64 * -(-max(lengths, default=0) // (64 * 256)))
    parts = None if draw.chance(0.2) else draw.number(1, 9) if draw.device == "cpu" else draw.pick([1, 2, 7, 33, 132])
    draw.note(fixed=fixed, parts=parts)
    draw.saw("mode batch-invariant" if fixed else "mode balanced", mode_of_pages(kv_dtype))
    tree_mask = None if rules.tree is None else strided(draw, pack(draw, rules.tree))
    return Call(strided(draw, q), k_pages, v_pages, paging, lengths, options, tree_mask, rules, answer, fixed, parts)


def plan_of(call: Call) -> XqaDecodePlan:
    batch, seqlen, heads, dim = call.q.shape
    plan = XqaDecodePlan.allocate(
        batch,
        num_q_heads=heads,
        num_kv_heads=call.k_pages.shape[2],
        head_dim=dim,
        seqlen_q=seqlen,
        window_left=call.rules.window_left,
        fixed_split_tokens=call.fixed,
        max_seqlen_k=max(call.lengths, default=0) if call.fixed > 0 else None,
        num_sm_parts=call.parts,
        kv_dtype=call.k_pages.dtype,
        device=call.q.device,
    )
    plan.out_partial.fill_(math.nan)
    plan.lse_partial.fill_(math.nan)
    ops.xqa_decode_plan(plan, call.seqlens)
    return plan


def _arguments(draw: Draw, call: Call, plan: XqaDecodePlan) -> dict[str, object]:
    """Of the function, in one of the forms that it takes."""
    flat, csr = draw.chance(0.4), draw.chance(0.4)
    batch, seqlen = call.q.shape[:2]
    q, mask = call.q, call.tree_mask
    if flat:
        q = strided(draw, q.flatten(0, 1))
    elif mask is not None and draw.chance(0.7):
        mask = mask.reshape(batch, seqlen, mask.shape[1])
    draw.note(flat=flat, csr=csr)
    draw.saw("mode csr" if csr else "mode page table")
    table = {"page_table": call.paging.indices, "kv_indptr": call.paging.indptr}
    if not csr:
        table = {"page_table": call.paging.table}
    fixed = {"k_pages": call.k_pages, "v_pages": call.v_pages, "cache_seqlens": call.seqlens}
    return {"q": q, **fixed, **table, "plan": plan, "tree_mask": mask, **call.options}


def right(draw: Draw) -> None:
    """One right call, compared with its answer."""
    set_isa(draw)
    call = draw_call(draw)
    plan = plan_of(call)
    given = _arguments(draw, call, plan)
    q, report = given["q"], new_report(draw)
    out = Guarded(draw, tuple(q.shape), q.dtype)
    lse = Guarded(draw, tuple(q.shape[:-1]), torch.float32, dense=True) if draw.chance(0.8) else None
    with_sinks = call.rules.sinks is not None and lse is not None and draw.chance(0.3)
    destinations = {"out": out.view, "lse": None if lse is None else lse.view, "sinks_in_lse": with_sinks}
    untouched = Untouched(k_pages=call.k_pages, table=call.paging.indices, q=q) if draw.chance(0.1) else None
    draw.saw("op xqa_decode")
    ops.xqa_decode(**given, **destinations, report=report)
    heads, dim = call.q.shape[2:]
    got_lse = None if lse is None else lse.view.reshape(-1, heads)
    check_attention(draw, out.view.reshape(-1, heads, dim), got_lse, call.answer, sinks_in_lse=with_sinks)
    check_no_fault(report)
    if bool(plan.semaphores.any()):
        raise Failure("semaphores are not zero after the call")
    if draw.chance(0.15):
        first = out.view.clone()
        out.view.fill_(math.nan)
        ops.xqa_decode(**given, **destinations, report=report)
        check_same_bits("the same call again", first, out.view)
    if call.fixed and call.lengths and draw.chance(0.5):
        check_alone(draw, call, plan, plan_of, run_rows)
    out.check("out")
    if lse is not None:
        lse.check("lse")
    if untouched:
        untouched.check()


def run_rows(of: Call, table: Tensor, plan: XqaDecodePlan, mask: Tensor | None) -> Tensor:
    return ops.xqa_decode(of.q, of.k_pages, of.v_pages, table, of.seqlens, plan, tree_mask=mask, **of.options)[0]
