"""Right calls of the sparse indexer's ops against plain torch; values that are wrong."""

from __future__ import annotations

import indexer_reference as reference
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from torch import Tensor

from .draw import Draw, Failure
from .memory import HUGE_INDEX, Guarded, Untouched, strided
from .options import set_arch, set_isa

SPECIALS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0]


def _ints(draw: Draw, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(draw.device, non_blocking=True)


def _logits(draw: Draw, rows: int, columns: int) -> Tensor:
    kind = draw.pick(["normal", "normal", "equal", "one bin", "few", "specials", "zeros", "bits", "bf16 grid"])
    draw.note(logits=kind)
    x = draw.normal(rows, columns)
    if kind == "equal":
        return torch.zeros_like(x) + draw.pick(SPECIALS)
    if kind == "one bin":
        return 1 + 1e-6 * (10 * x).round()
    if kind == "few":
        return x.round()
    if kind == "zeros":
        return torch.where(x.abs() > 2, x, x.sign() * 0.0)
    if kind == "specials":
        return torch.tensor(SPECIALS)[(x.abs() * 3).long() % len(SPECIALS)]
    if kind == "bits":
        return (x * 1e9).to(torch.int32).view(torch.float32)
    return x.bfloat16().float() if kind == "bf16 grid" else x


def right_select(draw: Draw) -> None:
    """`topk_select`: any distribution, rows anywhere in poisoned memory."""
    set_isa(draw)
    set_arch(draw)
    draw.saw("op topk_select")
    rows, columns = draw.pick([0, 1, 2, 5, 9]), draw.pick([1, 3, 60, 300, 2100, 5000, 5000])
    columns = draw.pick([20001, 66000]) if draw.chance(0.1) else columns
    if draw.chance(0.1):  # more rows than a GPU has places for
        rows, columns = draw.pick([(70, 66000), (140, 20001), (300, 2100), (300, 5000), (400, 300)])
    counts = [0, 1, 2, 7, 64, 65, 512, 1000, 2047, 2048]
    k = draw.pick([n for n in counts if n < columns] if draw.chance(0.7) else counts)
    dtype = draw.pick([torch.float32, torch.float32, torch.bfloat16])
    started, mapped = draw.chance(0.5), draw.pick(["none", "pages", "pages", "offsets"])
    page_size = draw.pick([1, 2, 7, 64, 100])
    starts = [draw.number(0, columns - 1) if started else 0 for _ in range(rows)]
    lengths = [draw.pick([columns - s, columns - s, min(columns - s, k), min(columns - s, k + 1)]) for s in starts]
    lengths = [draw.pick([n, n, n, draw.number(0, n), -draw.number(0, 1 << 31)]) for n in lengths]
    draw.note(T=rows, N=columns, k=k, dtype=dtype, lengths=lengths, starts=starts, mapped=mapped, page=page_size)
    values = _logits(draw, rows, columns).to(dtype)
    options = {"row_starts": starts} if started else {}
    if mapped == "offsets":
        options["offsets"] = [draw.number(0, (1 << 31) - 1 - columns) for _ in range(rows)]
    elif mapped == "pages":
        requests = draw.number(1, 4)
        used = [draw.number(0, requests - 1) for _ in range(rows)]
        cells = -(-columns // page_size)
        table = (draw.normal(requests, cells).abs() * 1e8).to(torch.int64) % ((1 << 31) // page_size)
        for request in range(requests):
            longest = max((n for n, r in zip(lengths, used) if r == request), default=0)
            table[request, -(-max(longest, 0) // page_size) :] = draw.pick([-1, HUGE_INDEX])
        options |= {"page_table": table.int(), "row_to_request": used, "page_size": page_size}
    visible = values.clone()
    for row, (start, length) in enumerate(zip(starts, lengths)):  # nobody looks at the rest
        visible[row, :start] = draw.pick(SPECIALS)
        visible[row, start + max(length, 0) :] = draw.pick(SPECIALS)
    given = {
        name: _ints(draw, v) if isinstance(v, list) else strided(draw, v) if isinstance(v, Tensor) else v
        for name, v in options.items()
    }
    logits, ends = strided(draw, visible), _ints(draw, lengths)
    untouched = Untouched(logits=logits, lengths=ends, **{n: v for n, v in given.items() if isinstance(v, Tensor)})
    indices = Guarded(draw, (rows, k), torch.int32)
    positions = Guarded(draw, (rows, k), torch.int32) if draw.chance(0.6) else None
    report = new_report(draw.device) if draw.chance(0.3) else None
    placed = None if positions is None else positions.view
    ops.topk_select(logits, ends, k, indices=indices.view, positions=placed, report=report, **given)
    expected = reference.topk_select(visible, lengths, k, **options)
    for name, out, right in zip(("indices", "positions"), (indices, positions), expected):
        if out is None:
            continue
        if not torch.equal(out.view.cpu(), right):
            row = int((out.view.cpu() != right).any(1).nonzero()[0]) if right.numel() else -1
            raise Failure(f"{name} of row {row} differ")
        out.check(name)
    untouched.check()
    if report is not None and first_fault(report):
        raise Failure(f"a right call is reported: {first_fault(report)}")


def hostile_rows(draw: Draw) -> None:
    """One value out of range: an error on the CPU, a report and other rows as they should be on a GPU."""
    draw.saw("hostile selected row")
    rows, columns, k = 3, draw.pick([10, 3000]), draw.pick([4, 2048])
    values = {"lengths": [2, columns, 5], "row_starts": [3, 0, 1], "row_to_request": [1, 0, 1]}
    name, row = draw.pick(sorted(values)), draw.number(0, rows - 1)
    limit = {"lengths": columns, "row_starts": columns - 1, "row_to_request": 1}[name]
    value = draw.pick([limit + 1, (1 << 31) - 1, *([] if name == "lengths" else [-1, -(1 << 31)])])
    values[name][row] = value
    draw.note(argument=name, row=row, value=value, N=columns, k=k)
    table = torch.arange(2 * columns, dtype=torch.int32, device=draw.device).view(2, columns)
    logits = draw.normal(rows, columns).to(draw.device, non_blocking=True)
    given = {key: _ints(draw, value) for key, value in values.items()}
    lengths = given.pop("lengths")
    if draw.device == "cpu":
        try:
            ops.topk_select(logits, lengths, k, page_table=table, **given)
        except RuntimeError as error:
            if f"attnops::topk_select: {name}[{row}]" not in str(error) and "columns from" not in str(error):
                raise
        else:
            raise Failure(f"{name}[{row}] = {value} is accepted")
    report = new_report(draw.device)
    got = ops.topk_select(logits, lengths, k, page_table=table, report=report, **given).cpu()
    if first_fault(report) is None:
        raise Failure("nothing is reported")
    for other in {0, 1, 2} - {row}:
        first, length, request = (values[key][other] for key in ("row_starts", "lengths", "row_to_request"))
        found = reference.selected(logits[other, first : first + length].cpu(), k) + request * columns
        if not torch.equal(got[other, : len(found)].long(), found):
            raise Failure(f"row {other} differs")
    if bool((got >= 2 * columns).any()):
        raise Failure("an index that no page has")
