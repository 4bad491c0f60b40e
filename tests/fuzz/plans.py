"""Plans whose memory somebody else has written: on a GPU they end nothing, on the CPU they are errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from attnops import ops
from hostile_plans import WAYS, HostilePlan, spoil

from . import fmha, mla, xqa
from .draw import Draw, Failure, Void
from .judge import check_attention
from .memory import Guarded
from .options import set_isa


def hostile_plans(draw: Draw) -> None:
    """A call by a spoiled plan, then the same one by a plan of its own, whose answer is right."""
    set_isa(draw)
    if draw.chance(0.25):
        return _hostile_order(draw)
    family, op = draw.pick([(xqa, "xqa_decode"), (mla, "mla_decode")])
    call = family.draw_call(draw)
    if not call.lengths:
        raise Void
    plan, way = family.plan_of(call), draw.pick(WAYS)
    counters = draw.device != "cpu" and draw.chance(0.3)
    draw.note(hostile="plan", way=way, counters=counters)
    draw.saw(f"hostile plan of {op}")
    hostile = HostilePlan(plan, way, draw.number(0, 1 << 30), counters)
    given: dict[str, Any] = {"page_table": call.paging.table, "tree_mask": call.tree_mask, **call.options}
    if draw.chance(0.3):
        given |= {"page_table": call.paging.indices, "kv_indptr": call.paging.indptr}
    given |= {"k_pages": call.k_pages, "v_pages": call.v_pages} if op == "xqa_decode" else {"kv_pages": call.kv_pages}
    batch, seqlen, heads, _ = call.q.shape
    dim = call.answer.out.shape[-1]
    out = Guarded(draw, (batch, seqlen, heads, dim), call.q.dtype)
    given |= {"cache_seqlens": call.seqlens, "q": call.q, "out": out.view}
    _end_nothing(draw, op, {**given, "plan": hostile.plan})
    if not hostile.unharmed():
        raise Failure("a spoiled plan lets a call write beside its scratch")
    out.check("out")
    getattr(ops, op)(**given, plan=plan)
    looser = 8.0 if given.get("fp8_products") else 1.0
    check_attention(draw, out.view.reshape(-1, heads, dim), None, call.answer, looser=looser)


def _hostile_order(draw: Draw) -> None:
    """The same of the ragged ops, whose plan is an order of tiles and how they are cut."""
    call = fmha.draw_call(draw, paged=draw.chance(0.5))
    plan, way = call.given["plan"], draw.pick(WAYS)
    if not plan.tile_order.numel():
        raise Void
    generator = torch.Generator().manual_seed(draw.number(0, 1 << 30))
    pieces = None if plan.pieces is None else plan.pieces.clone()
    hostile = dataclasses.replace(plan, tile_order=plan.tile_order.clone(), pieces=pieces)
    which = draw.pick(["order", "pieces", "both"])
    if which != "pieces":
        spoil(hostile.tile_order, way, generator)
    if pieces is not None and which != "order":
        spoil(pieces, way, generator)
    draw.note(hostile="plan", way=way, which=which)
    draw.saw(f"hostile plan of {call.name}")
    _end_nothing(draw, call.name, {**call.given, "plan": hostile})
    call.out.check("out")
    getattr(ops, call.name)(**call.given)
    check_attention(draw, call.out.view, None, call.answer)


def _end_nothing(draw: Draw, op: str, given: dict[str, Any]) -> None:
    try:
        getattr(ops, op)(**given)
    except RuntimeError as error:
        if draw.device != "cpu" or f"attnops::{op}" not in str(error):
            raise
    if draw.device != "cpu":
        torch.cuda.synchronize()
