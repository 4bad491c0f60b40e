"""Prefill with scratch: rows of 656 bytes that many tokens list become bf16 once, or the pool's are attended to."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops, reference
from attnops.ops.sparse_mla import _scratch_size, sparse_mla_prefill_scratch_size
from attnops.report import first_fault, new_report
from checks import MAX_RELATIVE_ERROR, relative_error
from sparse_calls import SCALE, SparseProblem, assert_right, prefill, sparse_problem
from torch import Tensor

BF16 = torch.bfloat16


def shared(heads: int = 64, tokens: int = 60, topk: int = 150, page_size: int = 64, **options) -> SparseProblem:
    """Lists of some 150 rows: each row is in many of them."""
    return sparse_problem("bytes", BF16, (tokens, 1), heads, topk, page_size, **options, device="cuda")


def scratch_for(problem: SparseProblem, most_rows: int = 1 << 17) -> Tensor:
    """Of the least size, and NaN wherever nothing is written."""
    size = _scratch_size(problem.selected.indices.numel(), len(problem.selected.values), most_rows)
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=problem.q.device)


def parts_of(scratch: Tensor, rows: int, entries: int) -> dict[str, Tensor]:
    """What csrc/sparse_mla/convert_rows.h says lies in scratch that begins at a multiple of 256 bytes."""
    words, at, parts = -(-rows // 32), 0, {}
    sizes = {"counts": (24, torch.int32), "flags": (32 * words, torch.uint8), "words": (8 * words, torch.int32)}
    for name, (size, dtype) in (sizes | {"lists": (4 * entries, torch.int32)}).items():
        parts[name] = scratch[at : at + size].view(dtype)
        at += -(-size // 256) * 256
    held = (len(scratch) - 256 - at) // 1152
    return parts | {"rows": scratch[at : at + held * 1152].view(BF16).view(held, 576)}


def turn_of(scratch: Tensor) -> int:
    """1: the converted rows were attended to; 0: the pool's."""
    return int(scratch[16:20].view(torch.int32))


def converted(values: Tensor) -> Tensor:
    """What the kernel makes of a row: each value is rounded to bf16. Those of the rope part are bf16 already."""
    return values.float().bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [33, 48, 64, 65, 128])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("lengths,holes,sinks", [(False, False, False), (True, True, True)])
def test_converted_rows_are_attended_to(sinks, holes, lengths, page_size, heads):
    problem = shared(heads, page_size=page_size, lengths=lengths, holes=holes, sinks=sinks)
    scratch = scratch_for(problem)
    out, lse, _ = prefill(problem, with_most=False, scratch=scratch)
    assert turn_of(scratch) == 1
    assert_right(problem, out, lse)
    again = prefill(problem, with_most=False, scratch=scratch)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
def test_each_listed_row_is_converted_once():
    problem = shared(lengths=True, holes=True, page_size=3)
    lists = problem.selected
    scratch = scratch_for(problem)
    prefill(problem, with_most=False, scratch=scratch)
    parts = parts_of(scratch.cpu(), len(lists.values), lists.indices.numel())
    listed, rows, _, _, turn, _ = parts["counts"].tolist()
    numbers = parts["lists"].view(len(problem.q), -1)
    named: dict[int, int] = {}
    entries = 0
    for token in range(len(problem.q)):
        length = min(max(int(lists.lengths.flatten()[token]), 0), numbers.shape[1])
        assert numbers[token, length:].eq(-1).all()
        for index, number in zip(lists.indices[token, 0, :length].tolist(), numbers[token].tolist(), strict=False):
            assert (number >= 0) == (index >= 0)
            if index >= 0:
                entries += 1
                assert named.setdefault(index, number) == number
    assert turn == 1 and listed == entries and rows == len(named)
    assert sorted(named.values()) == list(range(rows))
    exact = converted(lists.values[list(named)])
    assert torch.equal(parts["rows"][list(named.values())], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [48, 128])
@pytest.mark.parametrize("lacking", [0, 1, 100])
def test_more_rows_than_scratch_holds(lacking, heads):
    problem = shared(heads, lengths=True, holes=True)
    lists = problem.selected
    rows = len({row for token in range(len(problem.q)) for row in lists.rows_of(token).tolist()})
    scratch = scratch_for(problem, rows - lacking)
    out, lse, _ = prefill(problem, with_most=False, scratch=scratch)
    assert turn_of(scratch) == (lacking == 0)
    assert_right(problem, out, lse)
    if lacking:
        assert torch.equal(out, prefill(problem, with_most=False)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_rows_of_few_tokens_are_not_converted(tokens):
    problem = shared(tokens=tokens)
    scratch = scratch_for(problem)
    out, lse, _ = prefill(problem, with_most=False, scratch=scratch)
    assert turn_of(scratch) == 0
    assert_right(problem, out, lse)
    assert torch.equal(out, prefill(problem, with_most=False)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{"heads": 16}, {"extra_topk": 20}, {"with_most": True}])
def test_other_calls_leave_scratch_alone(change):
    with_most = change.pop("with_most", False)
    problem = shared(**change)
    scratch = scratch_for(problem)
    assert_right(problem, *prefill(problem, with_most=with_most, scratch=scratch))
    assert scratch.eq(0xFF).all()


@pytest.mark.gpu
def test_an_index_past_the_pool_is_reported():
    problem = shared(lengths=True)
    rows, lengths = len(problem.selected.values), problem.selected.lengths
    lengths[7] = 150
    problem.selected.indices[7, 0, 101] = rows
    lengths[8], problem.selected.indices[8, 0, 9] = 9, rows  # behind the list
    report, scratch = new_report("cuda"), scratch_for(problem)
    assert_right(problem, *prefill(problem, with_most=False, report=report, scratch=scratch))
    assert turn_of(scratch) == 1
    fault = first_fault(report) or ""
    assert f"attnops::sparse_mla_prefill: row index {rows}" in fault and "request 7" in fault
    assert f"must be in [0, {rows})" in fault and int(report[0]) == 1 and int(report[4]) == 101


@pytest.mark.gpu
def test_replays_with_other_lists_and_rows():
    """One graph, whose rows are converted in some replays and not in others."""
    generator = torch.Generator("cuda").manual_seed(1)
    tokens, topk, rows = 100, 130, 5000
    pool = reference.pack_mla_fp8_rows(torch.randn(rows, 576)).cuda()
    q = torch.randn(tokens, 64, 576, device="cuda", generator=generator).bfloat16()
    indices = torch.zeros(tokens, topk, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    scratch = torch.empty(_scratch_size(tokens * topk, rows, 700), dtype=torch.uint8, device="cuda")
    out, eager = (torch.empty(tokens, 64, 512, dtype=BF16, device="cuda") for _ in range(2))

    def run(out: Tensor) -> None:
        ops.sparse_mla_prefill(q, pool, indices, softmax_scale=SCALE, topk_length=lengths, out=out, scratch=scratch)

    run(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    turns = set()
    for replay in range(60):
        span = (90, 600, 5000, 700)[replay % 4]
        first = (rows - span) * (replay % 3) // 2
        indices.copy_(torch.randint(first, first + span, indices.shape, device="cuda", generator=generator))
        lengths.copy_(torch.randint(-1, topk + 1, lengths.shape, device="cuda", generator=generator))
        pool[:, :512].random_(0, 120, generator=generator)
        out.fill_(math.nan)
        graph.replay()
        turns.add(turn_of(scratch))
        run(eager)
        assert torch.equal(out, eager), replay
    assert turns == {0, 1}


def test_rows_rounded_to_bf16_are_within_the_contract():
    """float64 over rounded rows, beside float64 over the rows: half of what the contract allows."""
    problem = sparse_problem("bytes", BF16, (8, 1), 16, 600)
    exact, lse, _ = problem.expected()
    problem.selected.values = converted(problem.selected.values).double()
    rounded, rounded_lse, _ = problem.expected()
    assert relative_error(rounded, exact) < MAX_RELATIVE_ERROR[BF16] / 2
    assert (rounded_lse - lse).abs().max() < 5e-3


def test_scratch_is_asked_for_where_it_gains():
    def size(tokens, heads, rows, topk=2048, **more):
        return sparse_mla_prefill_scratch_size(tokens, heads, topk, rows, **more)

    assert size(4096, 128, 8192) == 256 + 256 + 8192 + 2048 + 4096 * 2048 * 4 + 8192 * 1152
    assert size(4096, 64, 1 << 20) == size(4096, 64, 1 << 20, most_rows=131072) > 131072 * 1152
    assert size(512, 64, 8192) and size(1500, 96, 20000) and size(4096, 48, 8192)
    assert size(4096, 32, 8192) == size(4096, 16, 8192) == size(1, 128, 8192) == size(0, 128, 8192) == 0
    assert size(150, 64, 1 << 20) == 0, "may list rows that no other token lists"
    assert size(4096, 128, 0, topk=0) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wrong_scratch_is_named(device):
    problem = sparse_problem("bytes", BF16, (3, 1), 64, 20, device=device)
    scratch = scratch_for(problem, 1)
    plain = prefill(problem, with_most=False)[0]
    assert torch.equal(prefill(problem, with_most=False, scratch=scratch)[0], plain)
    for wrong, message in (
        (scratch[:-1], rf"scratch\.shape\[0\] must be at least {len(scratch)} .* got {len(scratch) - 1}"),
        (scratch.float(), "scratch .*uint8"),
        (scratch[None], "scratch must "),
        (scratch.repeat(2)[::2], "scratch .*contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            prefill(problem, with_most=False, scratch=wrong)
