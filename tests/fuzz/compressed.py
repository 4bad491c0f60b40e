"""Right calls of compress_plan and compress_kv against float64, in steps of any size; values out of range."""

from __future__ import annotations

import compress_calls
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from torch import Tensor

from .draw import Draw, Failure
from .memory import strided

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def _model(draw: Draw) -> compress_calls.Model:
    dim, overlap = draw.pick([64, 128, 320, 512]), draw.chance(0.5)
    ratio, dtype = draw.pick([1, 2, 4, 4, 7, 128]), draw.pick(FLOATS)
    draw.note(dim=dim, ratio=ratio, overlap=overlap, dtype=dtype)
    width = (2 if overlap else 1) * dim
    cos_sin = draw.normal(600, 64)
    return compress_calls.Model(
        dim, ratio, overlap, dtype, draw.chance(0.5), draw.normal(ratio, width), draw.normal(dim), cos_sin
    )


def _cache(draw: Draw, given: compress_calls.Model, requests: int, dtype: torch.dtype) -> compress_calls.Cache:
    page_size = draw.pick([1, 2, 3, 16, 64])
    columns = -(-(500 // given.ratio + 1) // page_size)
    count = requests * columns + draw.number(0, 3)
    pages = torch.full((count, page_size, given.dim), float("nan"), dtype=dtype, device=draw.device)
    reach = (2 if given.overlap else 1) * given.ratio
    state = torch.full((requests + 1, reach + draw.number(0, 5), given.row), float("nan"), device=draw.device)
    table = draw.permutation(count)[: requests * columns].view(requests, columns).int().to(draw.device)
    slots = draw.permutation(requests + 1)[:requests].tolist()
    none = torch.empty(0, given.row, dtype=given.dtype)
    draw.note(page=page_size, requests=requests)
    return compress_calls.Cache(given, pages, state.to(given.dtype), table, slots, [none] * requests)


def right_entries(draw: Draw) -> None:
    """Requests whose tokens come in steps: prompts, single tokens, none."""
    draw.saw("op compress_plan", "op compress_kv")
    given = _model(draw)
    dtype, requests = draw.pick(FLOATS), draw.pick([1, 2, 5])
    held = _cache(draw, given, requests, dtype)
    lost = draw.number(0, requests - 1) if draw.chance(0.3) else -1
    if lost >= 0:
        held.slots[lost] = -draw.number(1, 9)
    steps = []
    for _ in range(draw.number(1, 4)):
        counts = [draw.pick([0, 1, 1, draw.number(2, 9), draw.length(110)]) for _ in range(requests)]
        steps.append(counts)
        new = [draw.normal(count, given.row).to(given.dtype) for count in counts]
        held.tokens = [torch.cat(both) for both in zip(held.tokens, new)]
        held.call(new, draw.device)
    draw.note(steps=steps, rows=dtype, lost=lost)
    flat, written = held.pages.flatten(0, 1), 0
    for request in range(requests):
        got = flat[held.slots_of(request).to(draw.device).long()].cpu()
        if request == lost:
            if not bool(got.isnan().all()):
                raise Failure("an entry of padding was written")
            continue
        written += len(got)
        _compare(got, compress_calls.entries(given, held.tokens[request]), BOUND[dtype])
    if int((~held.pages.isnan()).any(-1).sum()) != written:
        raise Failure("rows of no entry were written")
    unused = [slot for slot in range(requests + 1) if slot not in held.slots]
    if not bool(held.state[unused].isnan().all()):
        raise Failure("a state of no request was written")


def _compare(got: Tensor, expected: Tensor, bound: float) -> None:
    if not expected.numel():
        return
    error = float((got.double() - expected).norm() / expected.norm())
    if not error <= bound:
        raise Failure(f"entries differ: relative error {error:.3g}")


def hostile_entries(draw: Draw) -> None:
    """One kind of value is out of range: told, and nothing outside the tensors is touched."""
    draw.saw("op compress_plan", "op compress_kv")
    ratio = draw.pick([1, 2, 4])
    given = compress_calls.model(64, ratio, draw.chance(0.5), positions=40)
    lengths, counts = torch.tensor([9, 12, 30]).int(), [9, 1, 17]
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    plan = ops.compress_plan(lengths, bounds, ratio=ratio)
    reach = (2 if given.overlap else 1) * ratio
    call = {"kv_pages": torch.zeros(30, 4, 64), "state": torch.zeros(4, reach, given.row)}
    call |= {"kv_score": strided(draw, draw.normal(27, given.row)), "state_indices": torch.tensor([3, 0, 1]).int()}
    call |= {"ape": given.ape, "norm_weight": given.norm_weight, "cos_sin": given.cos_sin, "cache_seqlens": lengths}
    call |= {"page_table": torch.arange(24).view(3, 8).int(), "cu_seqlens_q": bounds, "entry_indptr": plan}
    kind, huge = draw.pick(["slot", "length", "bound", "plan", "page", "position"]), draw.pick([7, 1 << 20, 2**31 - 1])
    draw.note(kind=kind, huge=huge, ratio=ratio)
    if kind == "slot":
        call["state_indices"] = torch.tensor([3, draw.pick([huge, 3]), 1]).int()
    elif kind == "length":
        call["cache_seqlens"] = torch.tensor([9, 12, draw.pick([-huge, 16])]).int()
    elif kind == "bound":
        call["cu_seqlens_q"] = torch.tensor(draw.pick([[0, 9, 4, 27], [0, 9, 10, 26 + huge], [-huge, 9, 10, 27]])).int()
    elif kind == "plan":
        call["entry_indptr"] = plan + torch.tensor(draw.pick([[0, 0, 0, huge], [1, 0, 0, 0], [0, 0, -9, 0]])).int()
    elif kind == "page":
        call["page_table"] = call["page_table"].clone()
        call["page_table"][0] = draw.pick([-1, 30, max(huge, 30), -huge])
    else:
        call["cos_sin"] = call["cos_sin"][: 12 // ratio * ratio - ratio]
    call = {name: value.to(draw.device) for name, value in call.items()}
    if draw.device == "cpu":
        try:
            ops.compress_kv(**call, ratio=ratio)
        except RuntimeError as error:
            if "attnops::compress_kv: " not in str(error):
                raise
        else:
            raise Failure(f"a {kind} out of range is no error")
    report = new_report(draw.device)
    ops.compress_kv(**call, ratio=ratio, report=report)
    if "compress_kv" not in (first_fault(report) or ""):
        raise Failure(f"a {kind} out of range is not reported")
