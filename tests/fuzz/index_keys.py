"""Right calls of the ops over index keys and their logits, against plain torch and float64; pages that are wrong."""

from __future__ import annotations

import indexer_reference as reference
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from torch import Tensor

from .draw import Draw, Failure
from .indexer import _ints
from .memory import FP8, Guarded, Paging, Untouched, strided
from .options import set_isa

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BOUND = {torch.float32: 1e-3, torch.bfloat16: 4e-3}


def _same(name: str, got: Tensor, expected: Tensor) -> None:
    """Equal bits, but for those of NaN."""
    got, expected = got.cpu().float(), expected.float()
    if not torch.equal(got.isnan(), expected.isnan()) or not torch.equal(got.nan_to_num(), expected.nan_to_num()):
        raise Failure(f"{name} differ")


def _rows(draw: Draw, count: int, dim: int) -> Tensor:
    x = draw.normal(count, dim) * draw.pick([1.0, 1.0, 1e-5, 300.0])
    if count and draw.chance(0.2):
        x[draw.number(0, count - 1)] = draw.pick([0.0, float("nan"), float("inf")])
    return x


def right_quantization(draw: Draw) -> None:
    """`store_index_k`, `quantize_index_q` and `gather_index_k`."""
    dim, dtype, page_size = draw.pick([64, 128]), draw.pick(FLOATS), draw.pick([1, 3, 16, 64])
    options = {"hadamard": draw.chance(0.6), "ue8m0": draw.chance(0.5)}
    how = {"rotate": options["hadamard"], "ue8m0": options["ue8m0"]}
    lengths = draw.lengths(draw.pick([0, 1, 3]), 150)
    paging = Paging(draw, lengths, page_size)
    draw.note(dim=dim, dtype=dtype, page=page_size, lengths=lengths, **options)
    draw.saw("op store_index_k", "op gather_index_k", "op quantize_index_q")
    count = sum(lengths)
    x = _rows(draw, count, dim).to(dtype)
    pages = torch.full((paging.num_pages, page_size, dim + 4), 0xA5, dtype=torch.uint8, device=draw.device)
    slots = paging.slots.clone()
    lost = [i for i in range(count) if draw.chance(0.05)]
    slots[lost] = -draw.number(1, 1 << 40)
    ops.store_index_k(pages, strided(draw, x), slots.to(draw.device, non_blocking=True), **options)
    keys, scales = reference.quantize(x, **how)
    k = Guarded(draw, (count + 2, dim), torch.uint8, dense=True)
    k_scale = Guarded(draw, (count + 2,), torch.float32, dense=True)
    bounds = _ints(draw, torch.tensor([0, *lengths]).cumsum(0).tolist())
    ops.gather_index_k(k.view, k_scale.view, pages, paging.table, bounds)
    kept = [i for i in range(count) if i not in lost]
    _same("keys", k.view[kept].view(FP8), keys[kept])
    _same("scales", k_scale.view[kept], scales[kept])
    if lost and not bool((k.view[lost] == 0xA5).all()):
        raise Failure("a key without a slot was stored")
    if not bool((k.view[count:] == 0xA5).all()):
        raise Failure("rows behind the last request were written")
    k.check("k")
    k_scale.check("k_scale")
    heads, rows = draw.pick([1, 5, 64]), draw.pick([0, 1, 9])
    q, weights = _rows(draw, rows * heads, dim).view(rows, heads, dim).to(dtype), draw.normal(rows, heads).to(dtype)
    out, folded = Guarded(draw, (rows, heads, dim), FP8), Guarded(draw, (rows, heads), torch.float32)
    ops.quantize_index_q(
        strided(draw, q), strided(draw, weights), scale=0.37, q_fp8=out.view, weights_out=folded.view, **options
    )
    values, q_scales = reference.quantize(q, **how)
    _same("queries", out.view, values)
    _same("weights", folded.view, weights.float() * torch.tensor(0.37) * q_scales)
    out.check("q_fp8")
    folded.check("weights_out")


def _compare(got: Tensor, expected: Tensor, size: Tensor, seen: Tensor, dtype: torch.dtype) -> None:
    """`size`: what the heads' terms add up to without their signs. Few keys may have nothing but terms that cancel."""
    got = got.cpu()
    if not bool(got[~seen].isnan().all()):
        raise Failure("a column that no row sees was written")
    if not bool(seen.any()):
        return
    error = float((got.double() - expected)[seen].norm() / size[seen].norm().clamp(min=1e-9))
    if not error < BOUND[dtype]:
        raise Failure(f"logits differ: relative error {error:.3g}")


def _check_topk(draw: Draw, where: tuple[Tensor, ...], columns: int) -> None:
    """`index_topk` over a scratch of any size has the bits of two calls."""
    _, pages, table, weights, ends = where
    rows, k = weights.shape[0], draw.pick([0, 1, 7, 64, 512])
    draw.note(k=k)
    draw.saw("op index_topk", "op topk_select")
    logits = weights.new_full((rows, columns), float("nan"))
    ops.index_logits_paged(*where, logits=logits)
    requests = torch.arange(len(table), dtype=torch.int32, device=table.device).repeat_interleave(ends.shape[1])
    if draw.chance(0.4) and rows and columns and table.shape[1]:
        _check_starts(draw, where, logits, requests, k)
    expected = ops.topk_select(
        logits, ends.flatten(), k, page_table=table, row_to_request=requests, page_size=pages.shape[1]
    )
    scratch = Guarded(draw, (draw.pick([1, 2, 3, 5, 64]), columns), torch.float32)
    indices = Guarded(draw, (rows, k), torch.int32)
    if draw.chance(0.5):  # pieces of keys
        least = 3 * (k + 3) + 7 + pages.shape[1]
        floats = least + draw.pick([0, 1, 50, 500, 5000])
        in_pieces = ops.index_topk(*where, k, scratch=weights.new_empty(floats))
        if not torch.equal(in_pieces, expected):
            raise Failure("indices of index_topk in pieces differ from those of two calls")
    ops.index_topk(*where, k, indices=indices.view, scratch=scratch.view)
    if not torch.equal(indices.view, expected):
        raise Failure("indices of index_topk differ from those of two calls")
    indices.check("indices")
    scratch.check("scratch")


def _check_starts(draw: Draw, where: tuple[Tensor, ...], logits: Tensor, requests: Tensor, k: int) -> None:
    """`index_topk` with a first key for each row."""
    _, pages, table, _, ends = where
    page_size, rows, columns = pages.shape[1], *logits.shape
    starts = _ints(draw, [draw.number(0, columns) for _ in range(rows)])
    positions = ops.topk_select(
        logits, (ends.flatten() - starts).clamp(min=0), k, row_starts=starts.clamp(max=columns - 1)
    )
    at = (positions + starts.view(-1, 1)).clamp(min=0, max=table.shape[1] * page_size - 1)
    slots = table[requests.long()].gather(1, (at // page_size).long()) * page_size + at % page_size
    expected = torch.where(positions < 0, -1, slots).int()
    if not torch.equal(ops.index_topk(*where, k, k_start=starts.view_as(ends), max_seqlen_k=columns), expected):
        raise Failure("indices of index_topk differ from those of two calls, from a first key on")


def right_logits(draw: Draw) -> None:
    """`index_logits_paged` and `index_topk`, or `index_logits`, and `expand_rows` for their lengths."""
    set_isa(draw)
    dim, heads, dtype = draw.pick([64, 128, 128]), draw.pick([1, 8, 13, 32, 64]), draw.pick([*BOUND])
    lengths, seqlen_q = draw.lengths(draw.pick([0, 1, 2, 5]), 700), draw.pick([1, 1, 2, 3, 8])
    count, rows = sum(lengths), len(lengths) * seqlen_q
    k, k_scale = (2 * draw.normal(count, dim)).to(FP8), draw.normal(count).abs() + 0.1
    q, weights = draw.normal(rows, heads, dim).to(FP8), draw.normal(rows, heads)
    paged = draw.chance(0.6)
    draw.note(paged=paged, dim=dim, H=heads, S=seqlen_q, lengths=lengths, dtype=dtype)
    draw.saw("op expand_rows", "op index_logits_paged" if paged else "op index_logits")
    bounds = _ints(draw, [seqlen_q * i for i in range(len(lengths) + 1)])
    ends = ops.expand_rows(_ints(draw, lengths), bounds, rows, 2048)[0]
    columns = max([*lengths, 0] if paged else [count, 0]) + draw.number(0, 3)
    seen, expected = torch.zeros(rows, columns, dtype=torch.bool), torch.zeros(rows, columns, dtype=torch.float64)
    terms = torch.zeros_like(expected)
    out = strided(draw, torch.full((rows, columns), float("nan")).to(dtype))
    none = torch.zeros(rows, 0, dtype=torch.float64)
    right, right_terms = (reference.logits(q, k, k_scale, w) if count else none for w in (weights, weights.abs()))
    given_q, given_weights = (q.to(draw.device, non_blocking=True), weights.to(draw.device, non_blocking=True))
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    begins = [starts[row // seqlen_q] for row in range(rows)]
    sizes = [max(lengths[row // seqlen_q] - seqlen_q + 1 + row % seqlen_q, 0) for row in range(rows)]
    compressed = not paged and draw.chance(0.5)
    for row, (begin, size) in enumerate(zip(begins, sizes)):
        at = 0 if paged or compressed else begin
        expected[row, at : at + size], seen[row, at : at + size] = right[row, begin : begin + size], True
        terms[row, at : at + size] = right_terms[row, begin : begin + size]
    if paged:
        page_size = draw.pick([1, 3, 16, 64, 100])
        paging = Paging(draw, lengths, page_size)
        pages = reference.make_pages(k, k_scale, page_size, paging.slots, paging.num_pages).to(
            draw.device, non_blocking=True
        )
        untouched = Untouched(pages=pages)
        where = (given_q.view(len(lengths), seqlen_q, heads, dim), pages, paging.table, given_weights)
        where += (ends.view(len(lengths), seqlen_q),)
        ops.index_logits_paged(*where, logits=out)
        untouched.check()
        _check_topk(draw, where, columns)
    else:
        first = _ints(draw, begins)
        ops.index_logits(
            given_q,
            k.to(draw.device, non_blocking=True),
            k_scale.to(draw.device, non_blocking=True),
            given_weights,
            first,
            first + ends,
            compressed=compressed,
            logits=out,
        )
    _compare(out, expected, terms, seen, dtype)


def hostile_pages(draw: Draw) -> None:
    """A page or slot outside the pool: an error on the CPU; a report, and nothing read or written, on a GPU."""
    op = draw.pick(["store_index_k", "gather_index_k", "index_logits_paged"])
    value = draw.pick([4, 10**6, 2**31 - 1, *([] if op == "store_index_k" else [-1, -(2**31)])])
    draw.saw(f"hostile index key of {op}")
    draw.note(op=op, value=value)
    pages = torch.zeros(4, 8, 132, dtype=torch.uint8, device=draw.device)
    table = _ints(draw, [0, value]).view(1, 2)
    report = new_report(draw.device)

    def call(**options) -> None:
        if op == "store_index_k":
            slots = torch.tensor([3, value * 8]).to(draw.device, non_blocking=True)
            ops.store_index_k(pages, torch.ones(2, 128, device=draw.device), slots, **options)
        elif op == "gather_index_k":
            k, scale = torch.zeros(12, 128, dtype=torch.uint8, device=draw.device), torch.ones(12, device=draw.device)
            ops.gather_index_k(k, scale, pages, table, _ints(draw, [0, 12]), **options)
            if bool((scale[8:] != 0).any()):
                raise Failure("a key without a page has a scale")
        else:
            q = torch.ones(1, 1, 8, 128, device=draw.device).to(FP8)
            weights, lengths = torch.ones(1, 8, device=draw.device), _ints(draw, [12]).view(1, 1)
            ops.index_logits_paged(q, pages, table, weights, lengths, **options)

    if draw.device == "cpu":
        try:
            call()
        except RuntimeError as error:
            if f"attnops::{op}: " not in str(error) or "got" not in str(error):
                raise
        else:
            raise Failure(f"{value} is accepted")
    call(report=report)
    if first_fault(report) is None:
        raise Failure("nothing is reported")
