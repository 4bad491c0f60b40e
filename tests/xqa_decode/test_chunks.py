"""Requests of many tokens as chunks of few (`xqa_decode_chunks`, `table_rows`), on every device, against float64."""

import dataclasses
import math
import random

import pytest
import torch
from attnops import info, ops
from attnops.metadata import FmhaPlan, XqaDecodePlan, fmha_plan
from attnops.metadata.fmha_plan import ChunkTensors, chunks_for_decode, most_chunks
from checks import assert_attention_close, assert_lse_close
from problems import FP8, paged_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16
LENGTHS, TOKENS = [300, 7, 65, 40, 1000, 128, 3], [1, 7, 0, 2, 41, 1, 3]


def ints(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def bounds_of(tokens, device="cpu", first=0) -> torch.Tensor:
    return ints([first, *tokens], device).cumsum(0, dtype=torch.int32)


def chunks_of(tokens, lengths, most, causal) -> list[tuple[int, int, int]]:
    """(first token, length, request) of each chunk."""
    chunks, first = [], 0
    for request, (count, length) in enumerate(zip(tokens, lengths, strict=True)):
        for begin in range(0, count, most):
            behind = max(count - begin - most, 0) if causal else 0
            chunks.append((first + begin, max(max(length, 0) - behind, 0), request))
        first += count
    return chunks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [0, 1, 3, 40, 255, 256, 257, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_chunks(causal, batch, device):
    draw = random.Random(batch)
    for most in (1, 3, 64):
        tokens = [draw.choice([0, 1, 1, 2, most, most + 1, 5 * most]) for _ in range(batch)]
        lengths = [draw.choice([-3, 0, 1, 17, 5000]) for _ in range(batch)]
        expected = chunks_of(tokens, lengths, most, causal)
        room = len(expected) + draw.choice([0, 1, 300])
        chunks = torch.full((3, room + 1), -7, dtype=torch.int32, device=device)
        ops.xqa_decode_chunks(chunks, bounds_of(tokens, device), ints(lengths, device), most, causal=causal)
        begins, seqlens, rows = chunks.tolist()
        end, unused = sum(tokens), room - len(expected)
        assert begins == [chunk[0] for chunk in expected] + [end] * (unused + 1)
        assert seqlens[:-1] == [chunk[1] for chunk in expected] + [0] * unused
        assert rows[:-1] == [chunk[2] for chunk in expected] + [0] * unused


@pytest.mark.gpu
def test_too_many_chunks_are_left_out():
    chunks = torch.full((3, 5), -7, dtype=torch.int32, device="cuda")
    ops.xqa_decode_chunks(chunks, bounds_of([3, 10, 2], "cuda"), ints([9, 20, 2], "cuda"), 2)
    assert chunks[0].tolist() == [0, 2, 3, 5, 7] and chunks[2, :4].tolist() == [0, 0, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [[0, 2**30, -5, 9], [-7, -7, -7, -7], [9, 3, 1, 0], [-(2**31), 2**31 - 1, 0, 9]])
def test_bounds_may_hold_anything(bounds):
    problem = paged_problem([200, 50, 9], [3, 3, 3], head_dim=128).to("cuda")
    check(dataclasses.replace(problem, cu_seqlens_q=ints(bounds, "cuda")), 2, compare=False)
    check(problem, 2)


def test_wrong_bounds_are_errors_on_a_cpu():
    chunks = torch.zeros(3, 5, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q\[2\] must be at least 3, got 1"):
        ops.xqa_decode_chunks(chunks, ints([0, 3, 1], "cpu"), ints([3, 3], "cpu"), 2)
    with pytest.raises(RuntimeError, match=r"chunks.shape\[1\] must be more than the 7 chunks of the first 2 requests"):
        ops.xqa_decode_chunks(chunks, bounds_of([3, 10]), ints([9, 20], "cpu"), 2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_named(device):
    problem = paged_problem([20, 30], [1, 2]).to(device)
    rows = ints([0, 1], device)
    options = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": problem.q.shape[2], "device": device}
    plan = XqaDecodePlan.allocate(2, seqlen_q=2, **options)
    ops.xqa_decode_plan(plan, problem.cache_seqlens)
    pages = (problem.k_pages, problem.v_pages)
    with pytest.raises(RuntimeError, match="table_rows must be absent with kv_indptr"):
        ops.xqa_decode(
            problem.q, *pages, problem.kv_indices, problem.cache_seqlens, plan, kv_indptr=problem.kv_indptr,
            cu_seqlens_q=problem.cu_seqlens_q, table_rows=rows,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"table_rows.shape\[0\] .*must be 2"):
        ops.xqa_decode(
            problem.q, *pages, problem.page_table, problem.cache_seqlens, plan,
            cu_seqlens_q=problem.cu_seqlens_q, table_rows=rows[:1],
        )  # fmt: skip
    even = XqaDecodePlan.allocate(2, **options)
    with pytest.raises(RuntimeError, match="table_rows must be absent without cu_seqlens_q"):
        ops.xqa_decode(problem.q[:2], *pages, problem.page_table, problem.cache_seqlens, even, table_rows=rows)


def test_rows_outside_the_table_are_errors_on_a_cpu():
    problem = paged_problem([20, 30], [1, 2])
    with pytest.raises(RuntimeError, match=r"table_rows\[1\] must be in \[0, 2\) \(rows of page_table\), got 2"):
        attend(problem, 2, rows=lambda rows: rows + 1)


def attend(problem, most, *, rows=lambda rows: rows, spare=3, padding=0, **options):
    """(out, lse) by chunks of `most` tokens."""
    device, tokens = problem.q.device, problem.q.shape[0]
    count = most_chunks(tokens, problem.batch_size, max(tokens, 1), most) + spare
    chunks = ChunkTensors.allocate(count, problem.batch_size, device)
    causal = options.get("causal", True)
    ops.xqa_decode_chunks(chunks.table, problem.cu_seqlens_q, problem.cache_seqlens, most, causal=causal)
    heads = {"num_q_heads": problem.q.shape[1], "num_kv_heads": problem.k_pages.shape[2]}
    parts = {"num_sm_parts": 3} if device.type == "cpu" else {}
    plan = XqaDecodePlan.allocate(
        count, seqlen_q=most, **heads, head_dim=problem.q.shape[2], device=device, **parts
    )  # fmt: skip
    ops.xqa_decode_plan(plan, chunks.cache_seqlens)
    plan.out_partial.fill_(math.nan)
    plan.lse_partial.fill_(math.nan)
    q = torch.cat([problem.q, problem.q.new_full((padding, *problem.q.shape[1:]), math.nan)])
    out, lse = torch.full_like(q, math.nan), q.new_full(q.shape[:2], math.nan, dtype=torch.float32)
    ops.xqa_decode(
        q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        chunks.cache_seqlens,
        plan,
        cu_seqlens_q=chunks.cu_seqlens_q,
        table_rows=rows(chunks.table_rows),
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        out=out,
        lse=lse,
        **options,
    )
    assert not plan.semaphores.any(), "semaphores must be zero after a call"
    return out, lse


def check(problem, most, *, padding=0, compare=True, **options):
    out, lse = attend(problem, most, padding=padding, **options)
    if not compare:
        return
    tokens = problem.q.shape[0]
    rules = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected_out, expected_lse = problem.expected(**rules)
    assert_attention_close(out[:tokens].cpu(), expected_out, problem.q.dtype)
    assert_lse_close(lse[:tokens].cpu(), expected_lse, 1e-3 if problem.k_pages.dtype == FP8 else 1e-4)
    assert (out[tokens:] == 0).all() and (lse[tokens:] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_are_the_request(causal, page_size, head_dim, kv_dtype, device):
    problem = paged_problem(LENGTHS, TOKENS, head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype).to(device)
    for most in (1, 4, 8) if head_dim > 128 else (2, 4, 16):
        check(problem, most, padding=5, causal=causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "heads,most", [((8, 1), 8), ((32, 8), 16), ((8, 8), 64), ((6, 2), 9), ((31, 1), 2), ((40, 8), 12)]
)
def test_heads(heads, most, device):
    generator = torch.Generator().manual_seed(most)
    lengths = torch.randint(100, 900, (12,), generator=generator).tolist()
    tokens = [1, 0, 1, 2, 1, 97, 1, 1, most, most + 1, 1, 3]
    problem = paged_problem(lengths, tokens, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128).to(device)
    check(problem, most, padding=1)
    check(problem, most, causal=False, logit_cap=5.0, sinks=torch.linspace(-1, 1, heads[0], device=device))


@pytest.mark.gpu
def test_rows_outside_the_table_are_rows_of_it():
    problem = paged_problem([200, 50, 9], [3, 3, 3], head_dim=128).to("cuda")
    for wrong in (2**30, -(2**31)):
        attend(problem, 2, rows=lambda rows, wrong=wrong: torch.full_like(rows, wrong))
    check(problem, 2)


def _plan_of(problem, most, **options) -> FmhaPlan:
    heads = {"num_q_heads": problem.q.shape[1], "num_kv_heads": problem.k_pages.shape[2], "head_dim": 128}
    device = problem.q.device
    return FmhaPlan.allocate(
        problem.q.shape[0], problem.batch_size, **heads, max_seqlen_q=most, device=device, **options
    )  # fmt: skip


def _prefill(problem, plan, **options):
    return ops.fmha_paged(
        problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q,
        plan, k_scale=problem.k_scale, v_scale=problem.v_scale, return_lse=True, **options,
    )  # fmt: skip


def test_prefill_by_chunks_on_a_cpu():
    """Where a plan has them, whoever put them there."""
    problem = paged_problem(LENGTHS, TOKENS, head_dim=128)
    for causal in (True, False):
        plan = _plan_of(problem, 41, causal=causal)
        assert plan.decode is None and plan.chunks is None
        decode = XqaDecodePlan.allocate(40, seqlen_q=3, num_q_heads=8, num_kv_heads=2, head_dim=128, num_sm_parts=3)
        plan = dataclasses.replace(plan, decode=decode, chunks=ChunkTensors.allocate(40, 7, torch.device("cpu")))
        ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
        out, lse = _prefill(problem, plan, causal=causal)
        expected_out, expected_lse = problem.expected(causal=causal)
        assert_attention_close(out, expected_out, BF16)
        assert_lse_close(lse, expected_lse, 1e-4)
        assert decode.tile_scheduler_metadata.any(), "the call went another way"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_of_few_long_requests_goes_this_way(causal, kv_dtype):
    lengths, tokens = [300 + 37 * b for b in range(40)], [1] * 39 + [50]
    problem = paged_problem(lengths, tokens, head_dim=128, kv_dtype=kv_dtype).to("cuda")
    plan = _plan_of(problem, 50, causal=causal)
    assert plan.decode is not None and plan.chunks is not None
    ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    before = _decodes()
    out, lse = _prefill(problem, plan, causal=causal)
    assert _decodes() == before + 1
    expected_out, expected_lse = problem.expected(causal=causal)
    assert_attention_close(out.cpu(), expected_out, BF16)
    assert_lse_close(lse.cpu(), expected_lse, 1e-3)
    ops.fmha_plan(plan, problem.cu_seqlens_q[:8], cache_seqlens=problem.cache_seqlens[:7])  # fewer requests
    short = dataclasses.replace(
        problem, q=problem.q[:7], cu_seqlens_q=problem.cu_seqlens_q[:8], cache_seqlens=problem.cache_seqlens[:7],
        page_table=problem.page_table[:7],
    )  # fmt: skip
    assert torch.equal(_prefill(short, plan, causal=causal)[0].isnan(), torch.zeros_like(short.q, dtype=torch.bool))


def _decodes() -> int:
    return sum(count for row, count in info.kernel_counts().items() if row.startswith("cuda xqa_decode "))


@pytest.mark.gpu
def test_replays_follow_the_lengths():
    """One graph of plan and call, for batches of other tokens and lengths."""
    make = [([300 + b for b in range(40)], [1] * 39 + [50]), ([70 + 9 * b for b in range(40)], [50] + [1] * 39)]
    problems = [paged_problem(lengths, tokens, head_dim=128).to("cuda") for lengths, tokens in make]
    pages = max(p.page_table.shape[1] for p in problems)
    pool = max(p.k_pages.shape[0] for p in problems)
    static = problems[0]
    table = torch.zeros(40, pages, dtype=torch.int32, device="cuda")
    k, v = (static.k_pages.new_zeros(pool, *static.k_pages.shape[1:]) for _ in range(2))
    static = dataclasses.replace(
        static, q=static.q.clone(), page_table=table, k_pages=k, v_pages=v,
        cache_seqlens=static.cache_seqlens.clone(), cu_seqlens_q=static.cu_seqlens_q.clone(),
    )  # fmt: skip
    plan = _plan_of(static, 50)

    def load(problem) -> None:
        static.q.copy_(problem.q)
        table[:, : problem.page_table.shape[1]].copy_(problem.page_table)
        k[: problem.k_pages.shape[0]].copy_(problem.k_pages)
        v[: problem.v_pages.shape[0]].copy_(problem.v_pages)
        static.cache_seqlens.copy_(problem.cache_seqlens)
        static.cu_seqlens_q.copy_(problem.cu_seqlens_q)

    def step():
        ops.fmha_plan(plan, static.cu_seqlens_q, cache_seqlens=static.cache_seqlens)
        return _prefill(static, plan)[0]

    load(problems[0])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for problem in [*problems, *problems]:
        load(problem)
        graph.replay()
        assert_attention_close(out.cpu(), problem.expected()[0], BF16)


def test_which_calls_are_cut(monkeypatch):
    monkeypatch.setattr(fmha_plan, "runs_hopper_kernels", lambda device: True)

    def cut(tokens, heads, head_dim=128, split_keys=True):
        limits = (sum(tokens), len(tokens), max(tokens))
        return chunks_for_decode(*limits, *heads, head_dim, split_keys, torch.device("cuda"))

    assert cut([1] * 88 + [16], (40, 8)) == (3, 94)  # sixteen rows are cheapest
    assert cut([1] * 16 + [15], (28, 4)) == (9, 18)
    assert cut([40, 6], (32, 8)) == (16, 4) and cut([15], (12, 2)) == (10, 2)  # few works
    assert cut([80, 80], (32, 8)) is None and cut([20] * 131, (12, 2)) is None  # too many chunks
    assert cut([1] * 88 + [16], (40, 8), split_keys=False) is None
    assert cut([1, 9], (71, 1)) is None  # more heads than rows
    assert cut([1] * 40 + [9], (8, 1), 256) == (2, 45) and cut([1] * 40 + [9], (40, 1), 256) is None
    # Many works of more than 16 rows keep prefill's kernels busy, but not up to head dim 64.
    assert cut([1] * 28 + [17], (64, 8)) == (8, 31) and cut([1] * 40 + [17], (64, 8)) is None
    assert cut([1] * 40 + [17], (64, 8), 64) == (4, 45) and cut([1] * 40 + [5], (64, 8)) == (2, 43)
    # Without groups a second reading costs the most.
    assert (
        cut([69, 4], (5, 5)) == (64, 3) and cut([82, 36], (16, 16)) is None and cut([82, 36], (16, 16), 64) == (64, 3)
    )
    assert cut([69] + [4] * 4, (32, 32)) is None and cut([7] * 26 + [79], (5, 5)) is None
    for tokens in ([0, 0, 50], [3], [7] * 9, [1] * 300 + [64]):
        for most in (1, 5, 64):
            needed = sum(-(-count // most) for count in tokens)
            assert needed <= most_chunks(sum(tokens), len(tokens), max(tokens), most)
