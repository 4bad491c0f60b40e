"""Hostile values in tensors: lengths, pages, rows, slots and bounds may hold anything.

On the CPU a value out of range is an error that names it, on a GPU it is skipped. In checked mode it is recorded, and
requests that it does not belong to are right all the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from attnops.report import KINDS, OPS
from torch import Tensor

from . import fmha, mla, xqa
from .draw import Draw, Failure, Void
from .judge import check_attention
from .memory import Guarded, Paging
from .options import set_isa
from .oracle import Answer

ANYTHING = [-1, -2, -(2**31), 2**31 - 1, 2**30, 10**6]


def _bad_page(draw: Draw, num_pages: int) -> int:
    return draw.pick([*ANYTHING, num_pages, num_pages + 1])


def _others(answer: Answer, keep: Tensor) -> Answer:
    return Answer(answer.out[keep], answer.lse[keep], answer.noise[keep], answer.total[keep])


def hostile_decode(draw: Draw) -> None:
    """A bad page, or a bad length, in one request of a decode call."""
    set_isa(draw)
    family, op = draw.pick([(xqa, "xqa_decode"), (mla, "mla_decode")])
    call = family.draw_call(draw)
    if not call.lengths:
        raise Void
    which = draw.number(0, len(call.lengths) - 1)
    report = torch.zeros(8, dtype=torch.int32, device=draw.device) if draw.chance(0.5) else None
    csr = draw.chance(0.5)
    if draw.chance(0.6):
        kind = "page index"
        cell = _needed_cell(call, which)
        if cell is None:
            raise Void
        bad = _bad_page(draw, call.paging.num_pages)
        _cells(call.paging, which, csr)[cell] = bad
        plan = family.plan_of(call)
    else:
        kind = "length"
        held = _room(call, which, csr)
        bad = draw.pick([held + 1, held + 1000, 2**30, 2**31 - 1])
        lengths = list(call.lengths)
        lengths[which] = bad
        if call.fixed > 0:
            raise Void  # how many cuts a plan has room for decides, and is an error of its own
        call = dataclasses.replace(call, lengths=lengths)
        plan = family.plan_of(call)
    draw.note(hostile=kind, request=which, value=bad, csr=csr, checked=report is not None)
    draw.saw(f"hostile {kind} of {op}")
    table = {"page_table": call.paging.indices, "kv_indptr": call.paging.indptr}
    given: dict[str, Any] = {**(table if csr else {"page_table": call.paging.table}), **call.options}
    given |= {"k_pages": call.k_pages, "v_pages": call.v_pages} if op == "xqa_decode" else {"kv_pages": call.kv_pages}
    batch, seqlen, heads, _ = call.q.shape
    dim = call.answer.out.shape[-1]
    out = Guarded(draw, (batch, seqlen, heads, dim), call.q.dtype)
    given |= {"cache_seqlens": call.seqlens, "plan": plan, "tree_mask": call.tree_mask, "q": call.q, "out": out.view}
    error = _error_of(getattr(ops, op), given | {"report": report})
    _judge_fault(draw, op, kind, which, error, report)
    if error is None:
        keep = torch.arange(batch).repeat_interleave(seqlen) != which
        looser = 8.0 if given.get("fp8_products") else 1.0
        got = out.view.reshape(-1, heads, dim)
        check_attention(draw, got[keep.to(got.device)], None, _others(call.answer, keep), looser=looser)
    out.check("out")


def _room(call: Any, which: int, csr: bool) -> int:
    """Tokens that the cells of a request hold."""
    pages = call.k_pages if hasattr(call, "k_pages") else call.kv_pages
    return len(_cells(call.paging, which, csr)) * pages.shape[1]


def _cells(paging: Paging, which: int, csr: bool) -> Tensor:
    """A request's cells of the table, as a view."""
    if not csr:
        return paging.table[which]
    begin, end = paging.indptr[which : which + 2].tolist()
    return paging.indices[begin:end]


def _needed_cell(call: Any, which: int) -> int | None:
    """A cell whose page holds a key that some row sees; the last one, where rows see any."""
    length, window = call.lengths[which], call.rules.window_left
    pages = call.k_pages if hasattr(call, "k_pages") else call.kv_pages
    if length <= 0 or (call.rules.tree is not None and window >= 0):
        return None
    drafts = 0 if call.rules.tree is None else call.rules.tree_keys or call.q.shape[1]
    last_prefix = length - drafts - 1
    return None if last_prefix < 0 else last_prefix // pages.shape[1]


def _error_of(function: Any, given: dict[str, Any]) -> str | None:
    """What a call raises, as text; only the library's own kinds are let pass."""
    try:
        function(**given)
    except (RuntimeError, ValueError) as error:
        if "no kernel fits" in str(error) or "CUDA error" in str(error) or "attnops::" not in str(error):
            raise
        return str(error)
    return None


def _judge_fault(draw: Draw, op: str, kind: str, request: int, error: str | None, report: Tensor | None) -> None:
    if report is not None:
        words = report.tolist()
        if error is not None:
            raise Failure(f"an error in spite of a report: {error}")
        # Beyond a length lie cells that hold anything: on a GPU such a page may be found first.
        kinds = {kind, "page index"} if kind == "length" and draw.device != "cpu" else {kind}
        if not words[0] or OPS[words[1]] != op or KINDS[words[2]] not in kinds or words[3] != request:
            raise Failure(f"the report {words} does not name {op}, {kind}, request {request}")
        draw.saw("mode checked fault")
    elif draw.device == "cpu":
        if error is None:
            raise Failure(f"{op} accepts a bad {kind} on the CPU")
        if str(request) not in error:
            raise Failure(f"the error does not name request {request}: {error}")
    elif error is not None:
        raise Failure(f"an error where no host sees the value: {error}")


def hostile_fmha(draw: Draw) -> None:
    """A bad page in one request, or bounds and lengths of any value, in a call of the ragged ops."""
    if draw.chance(0.5):
        _bad_fmha_page(draw)
        return
    call = fmha.draw_call(draw, paged=draw.chance(0.5))
    names = ["cu_seqlens_q", "cache_seqlens" if call.paging else "cu_seqlens_k"]
    names += ["kv_indptr"] if "kv_indptr" in call.given else []
    argument = draw.pick(names)
    value = call.given[argument]
    if not value.numel():
        raise Void
    for _ in range(draw.number(1, len(value))):
        value[draw.number(0, len(value) - 1)] = draw.pick([*ANYTHING, 0, 1, 50])
    if draw.chance(0.5) and argument != "kv_indptr":  # the plan is made of the same values, or of others
        bounds = {"cu_seqlens_k": call.given["cu_seqlens_k"]} if call.paging is None else {}
        bounds |= {"cache_seqlens": call.given["cache_seqlens"]} if call.paging else {}
        _error_of(ops.fmha_plan, {"plan": call.given["plan"], "cu_seqlens_q": call.given["cu_seqlens_q"], **bounds})
    draw.note(hostile=argument, values=value.tolist())
    draw.saw(f"hostile bounds of {call.name}")
    error = _error_of(getattr(ops, call.name), call.given)
    if error is not None and draw.device != "cpu":
        raise Failure(f"an error where no host sees the value: {error}")
    call.out.check("out")
    if call.lse is not None:
        call.lse.check("lse")


def _bad_fmha_page(draw: Draw) -> None:
    call = fmha.draw_call(draw, paged=True)
    paging, rules = call.paging, call.rules
    which = [i for i, (q, k) in enumerate(zip(call.lengths_q, call.lengths_k)) if q and k]
    windows = rules.window_left >= 0 or rules.window_right >= 0
    if not which or not rules.causal or windows or rules.tree is not None or rules.hidden is not None:
        raise Void  # pages that no token sees need not be looked up
    request, bad = draw.pick(which), _bad_page(draw, paging.num_pages)
    cells = _cells(paging, request, "kv_indptr" in call.given)
    cells[draw.number(0, (call.lengths_k[request] - 1) // paging.page_size)] = bad
    report = call.given["report"]
    draw.note(hostile="page index", request=request, value=bad, checked=report is not None)
    draw.saw("hostile page index of fmha_paged")
    error = _error_of(ops.fmha_paged, call.given)
    _judge_fault(draw, "fmha_paged", "page index", request, error, report)
    if error is None:
        keep = torch.ones(len(call.answer.out), dtype=torch.bool)
        first = sum(call.lengths_q[:request])
        keep[first : first + call.lengths_q[request]] = False
        check_attention(draw, call.out.view[keep.to(call.out.view.device)], None, _others(call.answer, keep))
    call.out.check("out")


def hostile_tables(draw: Draw) -> None:
    """Bad rows and slots in the builders of tables, bad slots in stores and translations."""
    kind = draw.pick(["row", "slot", "store", "store mla", "seqlens"])
    draw.saw(f"hostile {kind}")
    {"row": _bad_row, "slot": _bad_slot, "store": _bad_store, "store mla": _bad_store, "seqlens": _bad_seqlens}[kind](
        draw
    )


def _tables_call(draw: Draw, page_size: int) -> dict[str, Any]:
    rows, columns, batch = draw.number(1, 6), draw.number(1, 100), draw.number(1, 5)
    pages = torch.stack([draw.permutation(40) for _ in range(rows)])
    token = torch.arange(columns)
    slots = pages[:, (token // page_size) % 40] * page_size + token % page_size
    return {
        "req_to_token": slots.to(torch.int32).to(draw.device, non_blocking=True),
        "req_pool_indices": torch.tensor([draw.number(0, rows - 1) for _ in range(batch)]).to(
            draw.device, non_blocking=True
        ),
        "cache_seqlens": torch.tensor(
            [draw.number(1, columns) for _ in range(batch)], dtype=torch.int32, device=draw.device
        ),
        "page_size": page_size,
    }


def _build(draw: Draw, given: dict[str, Any], kind: str, which: int | None) -> None:
    """Runs a builder; the rows of requests without a fault must be what they are without any."""
    report = torch.zeros(8, dtype=torch.int32, device=draw.device) if draw.chance(0.5) else None
    op = draw.pick(["build_page_table", "build_kv_indices"])
    draw.note(op=op, hostile=kind, request=which, checked=report is not None)
    error = _error_of(getattr(ops, op), given | {"report": report})
    if which is not None:
        _judge_fault(draw, op, kind, which, error, report)


def _bad_row(draw: Draw) -> None:
    given = _tables_call(draw, draw.pick([1, 3, 16, 64]))
    rows, which = given["req_pool_indices"], draw.number(0, len(given["req_pool_indices"]) - 1)
    rows[which] = draw.pick([*ANYTHING, given["req_to_token"].shape[0], 2**62, -(2**63)])
    draw.note(row=int(rows[which]))
    _build(draw, given, "request row", which)


def _bad_slot(draw: Draw) -> None:
    """Of the first token of a request's page, which tells where the page is."""
    page_size = draw.pick([1, 3, 16, 64])
    given = _tables_call(draw, page_size)
    which = draw.number(0, len(given["req_pool_indices"]) - 1)
    row, length = int(given["req_pool_indices"][which]), int(given["cache_seqlens"][which])
    given["req_to_token"][row, draw.number(0, (length - 1) // page_size) * page_size] = draw.pick([-1, -77, -(2**31)])
    same = (given["req_pool_indices"] == row).nonzero().flatten().tolist()
    _build(draw, given, "token slot", which if len(same) == 1 else None)


def _bad_store(draw: Draw) -> None:
    """A slot outside the pool is not stored, and no other row is lost."""
    pages, page_size, tokens = draw.number(0, 4), draw.pick([1, 3, 16]), draw.number(1, 20)
    latents = draw.chance(0.5)
    shape = (pages, page_size, 576) if latents else (pages, page_size, 2, 64)
    targets = [Guarded(draw, shape, torch.bfloat16) for _ in range(1 if latents else 2)]
    rows = draw.normal(tokens, *shape[2:]).to(torch.bfloat16).to(draw.device, non_blocking=True)
    size = pages * page_size
    order = draw.permutation(size).tolist() if size else []
    slots = [order.pop() if order else -1 for _ in range(tokens)]
    which = draw.number(0, tokens - 1)
    slots[which] = draw.pick([size, size + 1, 2**31 - 1, 2**40, 2**62])
    kind = torch.int64 if slots[which] > 2**31 - 1 or draw.chance(0.5) else torch.int32
    loc = torch.tensor(slots, dtype=kind).to(draw.device, non_blocking=True)
    report = torch.zeros(8, dtype=torch.int32, device=draw.device) if draw.chance(0.5) else None
    expected = targets[0].view.clone()
    for token, slot in enumerate(slots):
        if 0 <= slot < size:
            expected[slot // page_size, slot % page_size] = rows[token]
    op = "store_mla_kv" if latents else "store_kv"
    draw.note(op=op, slot=slots[which], P=pages, page=page_size, checked=report is not None)
    views = [target.view for target in targets]
    call = [*views, rows] if latents else [*views, rows, rows]
    getattr(ops, op)(*call, loc, report=report)
    for target in targets:
        if not torch.equal(target.view.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)):
            raise Failure(f"{op} with a slot outside the pool stored other rows wrong")
        target.check("pages")
    if report is not None:
        words = report.tolist()
        if words[0] != 1 or OPS[words[1]] != op or KINDS[words[2]] != "token slot" or words[3] != which:
            raise Failure(f"the report {words} does not name {op}, token slot, token {which}")


def _bad_seqlens(draw: Draw) -> None:
    """Lengths of any sign and size in everything that reads them: no call ends the process."""
    batch = draw.number(1, 5)
    seqlens = torch.tensor(
        [draw.pick([*ANYTHING, 0, 5, 70]) for _ in range(batch)], dtype=torch.int32, device=draw.device
    )
    draw.note(seqlens=seqlens.tolist())
    which = draw.pick(["build_cu_seqlens", "xqa_decode_plan", "mla_decode_plan", "fmha_plan"])
    draw.note(op=which)
    given: dict[str, Any] = {"seqlens": seqlens}
    window, fixed = draw.pick([-1, 0, 100, 2**31 - 1 - 2**16]), draw.pick([0, 64, 1 << 20])
    if which in ("xqa_decode_plan", "mla_decode_plan"):
        options = {"window_left": window, "fixed_split_tokens": fixed, "max_seqlen_k": 64, "device": draw.device}
        heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64} if which[0] == "x" else {"num_q_heads": 16}
        cls = xqa.XqaDecodePlan if which[0] == "x" else mla.MlaDecodePlan
        plan = cls.allocate(batch, seqlen_q=draw.pick([1, 5, 1 << 16]), num_sm_parts=3, **heads, **options)
        given = {"plan": plan, "cache_seqlens": seqlens}
    elif which == "fmha_plan":
        plan = FmhaPlan.allocate(50, batch, window_left=window, device=draw.device)
        bounds = torch.arange(0, 2 * batch + 1, 2, dtype=torch.int32, device=draw.device)
        if draw.chance(0.5):
            bounds[draw.number(0, batch)] = draw.pick(ANYTHING)
        given = {"plan": plan, "cu_seqlens_q": bounds, "cache_seqlens": seqlens}
    error = _error_of(getattr(ops, which), given)
    if error is not None and draw.device != "cpu":
        raise Failure(f"an error where no host sees the value: {error}")
