"""Right calls of `ops.mla_decode`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from attnops import ops
from attnops.metadata import MlaDecodePlan
from torch import Tensor

from .alone import check_alone
from .draw import Draw, Failure
from .judge import check_attention, check_no_fault, check_same_bits
from .memory import FP8, Guarded, Paging, Untouched, fill_pages, poisoned, strided
from .options import call_options, draw_rules, draw_scales, new_report, pack, real, set_isa, stored, widened
from .oracle import Answer, Rules, attend, used_keys

QK, V, ROPE, ROW_BYTES = 576, 512, 64, 656
HEADS = [1, 2, 3, 5, 8, 16, 16, 32, 48, 64, 64, 128]
PAGE_SIZES = [1, 2, 3, 7, 16, 32, 64, 64, 64, 128]


def packed_rows(latent: Tensor) -> Tensor:
    """float32 ``[N, 576]`` as the 656-byte rows: 512 e4m3, four float32 scales, 64 bf16."""
    groups = latent[:, :V].reshape(-1, 4, 128)
    scales = torch.maximum(groups.abs().amax(-1) / 448, torch.tensor(2.0**-126))
    bytes_ = (groups / scales.unsqueeze(-1)).clamp(-448, 448).to(FP8).reshape(-1, V).view(torch.uint8)
    rope = latent[:, V:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([bytes_, scales.contiguous().view(torch.uint8), rope], 1)


def unpacked_rows(rows: Tensor) -> Tensor:
    """float64 ``[N, 576]``."""
    scales = rows[:, V : V + 16].contiguous().view(torch.float32).double()
    latent = rows[:, :V].contiguous().view(FP8).float().double().reshape(-1, 4, 128) * scales.unsqueeze(-1)
    rope = rows[:, V + 16 :].contiguous().view(torch.bfloat16).double()
    return torch.cat([latent.reshape(-1, V), rope], 1)


def stored_latents(latent: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(rows of the cache, their float64 values ``[N, 576]``)."""
    if dtype == torch.uint8:
        rows = packed_rows(latent)
        return rows, unpacked_rows(rows)
    rows = stored(latent.unsqueeze(1), dtype, scale)
    return rows.squeeze(1), real(rows, scale).squeeze(1)


@dataclass
class Call:
    """A right call and its answer."""

    q: Tensor  # [B, S_q, H_q, 576]
    kv_pages: Tensor
    paging: Paging
    lengths: list[int]
    options: dict[str, object]
    tree_mask: Tensor | None
    rules: Rules
    answer: Answer
    fixed: int
    parts: int | None

    @property
    def seqlens(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32).to(self.q.device, non_blocking=True)


def draw_call(draw: Draw) -> Call:
    on_gpu = draw.device != "cpu"
    heads = draw.pick(HEADS)
    dtype = draw.pick([torch.bfloat16, torch.bfloat16, torch.float16, *([] if on_gpu else [torch.float32])])
    kv_dtype = draw.pick([dtype, dtype, FP8, torch.uint8])
    seqlen = draw.pick([1, 1, 1, 1, 2, 3, 5, 9])
    batch = draw.batch([1, 1, 2, 3, 5], seqlen * heads * QK)
    longest = min(max((2_000_000 if on_gpu else 150_000) // (QK * max(batch, 1)), 8), 8000)
    if draw.chance(0.4):
        longest = min(longest, 100)
    lengths = draw.lengths(batch, longest)
    page_size = draw.pick(PAGE_SIZES)
    draw.note(B=batch, S=seqlen, H=heads, page=page_size, dtypes=(dtype, kv_dtype), lengths=lengths)
    rules = draw_rules(draw, [seqlen] * batch, lengths, heads, QK, widest=seqlen)
    rules = widened(draw, rules, seqlen)
    paging = Paging(draw, lengths, page_size)
    scale = draw_scales(draw, 1) if kv_dtype == FP8 else None
    latent, values = stored_latents(draw.normal(sum(lengths), QK), kv_dtype, scale)
    kv_pages = poisoned((paging.num_pages, page_size, latent.shape[1]), kv_dtype, "cpu")
    kv_pages = strided(draw, kv_pages, odd=not on_gpu)
    used = used_keys([seqlen] * batch, lengths, rules)
    fill_pages(kv_pages, paging.slots[used], latent[used])
    q = draw.normal(batch, seqlen, heads, QK).to(dtype)
    keys = values.unsqueeze(1)
    answer = attend(q.double().flatten(0, 1), keys, keys[..., :V], [seqlen] * batch, lengths, rules)
    if draw.chance(0.5):
        q.flatten(0, 1)[answer.lse == -math.inf] = math.nan
    options = call_options(draw, rules)
    options["kv_scale"] = None if scale is None else scale.to(draw.device, non_blocking=True)
    if kv_dtype == FP8 and draw.chance(0.3):
        options["fp8_products"] = True
        draw.saw("mode fp8 products")
        draw.note(fp8_products=True)
    fixed = 0 if draw.chance(0.6) else draw.pick([64, 64, 128, 192, 512])
    parts = None if draw.chance(0.2) else draw.number(1, 9) if not on_gpu else draw.pick([1, 2, 6, 33, 132])
    draw.note(fixed=fixed, parts=parts)
    kinds = {torch.uint8: "mode 656-byte rows", FP8: "mode mla e4m3"}
    draw.saw("mode batch-invariant" if fixed else "mode balanced", kinds.get(kv_dtype, "mode plain"))
    tree_mask = None if rules.tree is None else strided(draw, pack(draw, rules.tree))
    q = strided(draw, q, odd=not on_gpu)
    return Call(q, kv_pages, paging, lengths, options, tree_mask, rules, answer, fixed, parts)


def plan_of(call: Call) -> MlaDecodePlan:
    batch, seqlen, heads, _ = call.q.shape
    plan = MlaDecodePlan.allocate(
        batch,
        num_q_heads=heads,
        seqlen_q=seqlen,
        window_left=call.rules.window_left,
        fixed_split_tokens=call.fixed,
        max_seqlen_k=max(call.lengths, default=0) if call.fixed else None,
        num_sm_parts=call.parts,
        device=call.q.device,
    )
    plan.out_partial.fill_(math.nan)
    plan.lse_partial.fill_(math.nan)
    ops.mla_decode_plan(plan, call.seqlens)
    return plan


def lse_slack(call: Call) -> float:
    """What lse may be off by: by the scale of tests/support/mla_calls.py, and in proportion with others."""
    if call.options.get("fp8_products") and call.q.is_cuda:
        # The e4m3 units cut every addend 13 bits below the largest one. Where q and a key are nearly parallel all of a
        # score's addends are positive, and it loses 1 %: docs/log/mla_decode_fp8.md, "Parallel queries and keys".
        largest = call.answer.lse[call.answer.lse.isfinite()].abs()
        return 0.4 + (float(largest.max()) / 64 if largest.numel() else 0.0)
    if call.kv_pages.dtype != torch.uint8 or not call.q.is_cuda:
        return 1e-4
    return {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}.get(call.q.dtype, 1e-4) * max(1, abs(call.rules.scale) / 0.07)


def right(draw: Draw) -> None:
    """One right call, compared with its answer."""
    set_isa(draw)
    call = draw_call(draw)
    plan = plan_of(call)
    batch, seqlen, heads, _ = call.q.shape
    flat, csr, apart = draw.chance(0.4), draw.chance(0.4), draw.chance(0.4)
    draw.note(flat=flat, csr=csr, apart=apart)
    draw.saw("op mla_decode", "mode csr" if csr else "mode page table", *(["mode rope apart"] if apart else []))
    q = strided(draw, call.q.flatten(0, 1), odd=draw.device == "cpu") if flat else call.q
    given: dict[str, object] = {"q": q, "q_pe": None, "page_table": call.paging.table}
    if apart:
        given |= {"q": q[..., :V], "q_pe": strided(draw, q[..., V:], odd=draw.device == "cpu")}
    if csr:
        given |= {"page_table": call.paging.indices, "kv_indptr": call.paging.indptr}
    mask, report = call.tree_mask, new_report(draw)
    if mask is not None and not flat and draw.chance(0.7):
        mask = mask.reshape(batch, seqlen, mask.shape[1])
    given |= {"kv_pages": call.kv_pages, "cache_seqlens": call.seqlens, "plan": plan, "tree_mask": mask, **call.options}
    out = Guarded(draw, (*q.shape[:-1], V), q.dtype)
    lse = Guarded(draw, tuple(q.shape[:-1]), torch.float32, dense=True) if draw.chance(0.8) else None
    with_sinks = call.rules.sinks is not None and lse is not None and draw.chance(0.3)
    untouched = Untouched(kv_pages=call.kv_pages, table=call.paging.indices, q=q) if draw.chance(0.1) else None
    given |= {"out": out.view, "lse": None if lse is None else lse.view, "sinks_in_lse": with_sinks, "report": report}
    ops.mla_decode(**given)
    slack = {"lse_atol": lse_slack(call), "looser": 8.0 if call.options.get("fp8_products") else 1.0}
    got_lse = None if lse is None else lse.view.reshape(-1, heads)
    check_attention(draw, out.view.reshape(-1, heads, V), got_lse, call.answer, sinks_in_lse=with_sinks, **slack)
    check_no_fault(report)
    if bool(plan.semaphores.any()):
        raise Failure("semaphores are not zero after the call")
    if draw.chance(0.15):
        first = out.view.clone()
        out.view.fill_(math.nan)
        ops.mla_decode(**given)
        check_same_bits("the same call again", first, out.view)
    if call.fixed and call.lengths and draw.chance(0.5):
        check_alone(draw, call, plan, plan_of, run_rows)
    out.check("out")
    if lse is not None:
        lse.check("lse")
    if untouched:
        untouched.check()


def run_rows(of: Call, table: Tensor, plan: MlaDecodePlan, mask: Tensor | None) -> Tensor:
    return ops.mla_decode(of.q, of.kv_pages, table, of.seqlens, plan, tree_mask=mask, **of.options)[0]
