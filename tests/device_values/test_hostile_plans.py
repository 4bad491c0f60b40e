"""No plan, whatever somebody wrote into its memory, ends a process, hangs a call or writes beside its tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops
from fmha_calls import split_plan
from hostile_plans import INT_MAX, INT_MIN, WAYS, Between, HostilePlan, spoil
from kernel_rows import ROWS, Case, case_of, finite
from mla_calls import SCALE, plan_for, queries
from problems import FP8, RaggedProblem, mla_problem, paged_problem, ragged_problem
from sparse_calls import KINDS, sparse_problem
from sparse_calls import plan_of as sparse_plan_of
from xqa_decoding import make_plan

gpu = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
each_row = pytest.mark.parametrize("op,row", ROWS.values())
LENGTHS = [130, 64, 5, 517, 0, 66, 1900]


def plan_of(case: Case, parts: int, fixed: int):
    if case.op == "mla_decode":
        return plan_for(case.problem, fixed=max(fixed, 0), num_sm_parts=parts)
    tokens = case.call["seqlen_q"]
    return make_plan(case.problem, seqlen_q=tokens, num_sm_parts=parts, fixed_split_tokens=fixed, max_seqlen_k=4096)


def attend(case: Case, plan) -> torch.Tensor:
    """The output by a plan as it is, whatever its counters say afterwards. Nothing is written beside it."""
    problem, call = case.problem, {k: v for k, v in case.call.items() if k not in ("seqlen_q", "num_sm_parts")}
    if call.pop("ragged", False):
        call["cu_seqlens_q"] = problem.cu_seqlens_q
    if call.pop("checked", False):
        call["report"] = torch.zeros(8, dtype=torch.int32, device="cuda")
    table = (problem.page_table, problem.cache_seqlens, plan)
    if case.op == "mla_decode":
        call |= {"kv_scale": problem.kv_scale, "softmax_scale": SCALE}
        return ops.mla_decode(queries(problem), problem.kv_pages, *table, **call)[0]
    out = Between(torch.zeros_like(problem.q))
    call |= {"k_scale": problem.k_scale, "v_scale": problem.v_scale, "out": out.view}
    ops.xqa_decode(problem.q, problem.k_pages, problem.v_pages, *table, **call)
    assert out.is_whole()
    return out.view


def wide(case: Case) -> Case:
    """The page table with room for thousands of tokens: where it is wide, lengths may choose the plan on the device."""
    table = case.problem.page_table
    more = torch.zeros(len(table), 4096 // case.page_size, dtype=table.dtype, device=table.device)
    more[:, : table.shape[1]] = torch.where(table < case.pools[0].shape[0], table, 0)
    return case.having(page_table=more)


@gpu
@each_row
@pytest.mark.parametrize("fixed", [0, 64, -16], ids=["balanced", "cuts", "sixteen cuts"])
def test_a_plan_of_any_words_ends_nothing(op, row, fixed):
    if op == "mla_decode" and fixed < 0:
        pytest.skip("takes no number of cuts")
    if "ragged" in row and fixed:
        pytest.skip("takes balanced plans")
    case = case_of(op, row, LENGTHS).with_pools(finite)
    shapes = [(case, 6), (wide(case), 33), (case, 2 if "ring" in row else 132)]
    if op == "xqa_decode":  # heads side by side: a work is a request then; and neighbours of two heads in a CTA
        shapes.append((case, 2 * case.pools[0].shape[2]))
    for number, (shape, parts) in enumerate(shapes):
        good = attend(shape, plan_of(shape, parts, fixed))
        assert good.isfinite().all()
        plan = plan_of(shape, parts, fixed)
        for seed, way in enumerate(WAYS * 2):
            hostile = HostilePlan(plan, way, seed + 100 * number, counters=seed >= len(WAYS))
            attend(shape, hostile.plan)
            torch.cuda.synchronize()
            assert hostile.unharmed(), (parts, way, seed)
        # The plan's own scratch holds what it did: a clean call of the same kernel is right.
        assert torch.equal(attend(shape, plan), good)


# (query heads, KV heads): by the rows of a KV head kernels differ, within a row of the table, too. Of 28 KV heads there
# are more works than clusters take.
HEADS = [(28, 28), (56, 4), (96, 4), (200, 4), (400, 4)]
EDGES = ["edges", "words", "some", "rows", "least"]


@gpu
@pytest.mark.parametrize("head_dim,dtype,kv_dtype", [(128, BF16, BF16), (128, BF16, FP8), (192, FP16, FP16)], ids=str)
@pytest.mark.parametrize("page_size", [64, 3])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("fixed", [0, -16], ids=["balanced", "sixteen cuts"])
def test_any_words_by_the_rows_of_q(head_dim, dtype, kv_dtype, page_size, heads, fixed):
    options = {"head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size}
    problem = paged_problem(LENGTHS, num_q_heads=heads[0], num_kv_heads=heads[1], **options).to("cuda")
    case = Case("xqa_decode", "any", problem, {"seqlen_q": 1}).with_pools(finite)
    short = case.having(cache_seqlens=case.problem.cache_seqlens.clamp(max=100))  # parts of many short works
    for number, (shape, parts) in enumerate([(case, 132), (short, 10), (short, 2 * heads[1])]):
        plan = plan_of(shape, parts, fixed)
        good = attend(shape, plan)
        assert good.isfinite().all()
        for seed, way in enumerate(EDGES * 3):
            hostile = HostilePlan(plan, way, seed + 1000 * number, counters=seed % 2 == 1)
            attend(shape, hostile.plan)
            torch.cuda.synchronize()
            assert hostile.unharmed(), (parts, way, seed)
        assert torch.equal(attend(shape, plan), good)


WRAPS = [
    (INT_MAX - 8, 0, INT_MIN, 0, 0, 0, 0, 0),  # its works are eight, by subtraction
    (INT_MAX, -1, INT_MIN, 0, 0, 1, 1, 0),
    (0, INT_MAX, 1, 0, 0, 1, 1, 0),  # its first token is -64
    (0, INT_MAX - 64, 1, 0, 0, 1, 1, 0),
    (1, 1 << 26, 3, INT_MAX, 0, 1, 1, 0),
    (0, 0, INT_MAX, INT_MAX, INT_MIN, INT_MAX, INT_MAX, INT_MIN),
    (0, 0, 2, -1, INT_MAX, INT_MIN, INT_MIN, 1),
    (0, 1, 0, INT_MIN, 0, 2, 2, 0),
    (-1, 0, 1, 0, 0, 1, 1, 0),
]


@gpu
@pytest.mark.parametrize("row", ["sm90_bf16_hd128", "sm90_fp8_hd128", "sm90_gather_fp8_hd128", "bf16_hd128", "fp32"])
def test_ends_of_numbers_that_wrap(row):
    """Where one number of a row less another, or a tile's first token, is beyond 32 bits."""
    case = case_of("xqa_decode", row, LENGTHS).with_pools(finite)
    for parts in (6, 2 * case.pools[0].shape[2]):
        plan = plan_of(case, parts, 0)
        good = attend(case, plan)
        for words in WRAPS:
            hostile = HostilePlan(plan, "zeros", 0)
            hostile.plan.tile_scheduler_metadata.copy_(torch.tensor(words, dtype=torch.int32))
            attend(case, hostile.plan)
            torch.cuda.synchronize()
            assert hostile.unharmed(), (parts, words)
        assert torch.equal(attend(case, plan), good)


@gpu
@pytest.mark.parametrize("fixed", [0, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [16, 72])
@pytest.mark.parametrize("parts", [6, 132])
def test_a_plan_of_lists_of_any_words_ends_nothing(kind, heads, parts, fixed):
    problem = sparse_problem(kind, shape=(5, 1), heads=heads, topk=700, page_size=64, lengths=True, device="cuda")
    lists = problem.selected

    def decode(plan):
        options = {"topk_length": lists.lengths, "softmax_scale": SCALE}
        return ops.sparse_mla_decode(problem.q, lists.kv_pages, lists.indices, plan, **options)[0]

    plan = sparse_plan_of(problem, fixed=fixed, num_sm_parts=parts)
    good = decode(plan)
    assert good.isfinite().all()
    for seed, way in enumerate(WAYS * 2):
        hostile = HostilePlan(plan, way, seed, counters=seed >= len(WAYS))
        decode(hostile.plan)
        torch.cuda.synchronize()
        assert hostile.unharmed(), (way, seed)
    assert torch.equal(decode(plan), good)


CPU_CALLS = {
    "xqa_decode": {"head_dim": 64},
    "xqa_decode e4m3": {"head_dim": 64, "kv_dtype": FP8},
    "xqa_decode heads": {"head_dim": 64, "num_q_heads": 9, "num_kv_heads": 3},
    "mla_decode": {},
    "mla_decode many": {"num_q_heads": 72},
}


@pytest.mark.parametrize("fixed", [0, 64, -16], ids=["balanced", "cuts", "sixteen cuts"])
@pytest.mark.parametrize("name", CPU_CALLS)
def test_a_plan_of_any_words_is_an_error_on_the_cpu(name, fixed):
    """Or what the planner wrote, where the words happen to be that."""
    op = name.split()[0]
    if op == "mla_decode" and fixed < 0:
        pytest.skip("takes no number of cuts")
    if op == "xqa_decode":
        case = Case(op, name, paged_problem(LENGTHS, page_size=16, **CPU_CALLS[name]), {"seqlen_q": 1})
    else:
        case = Case(op, name, mla_problem(LENGTHS, page_size=16, **CPU_CALLS[name]), {})
    case = case.with_pools(finite)
    refused = 0
    for parts in (6, 33):
        plan = plan_of(case, parts, fixed)
        good = attend(case, plan)
        for seed, way in enumerate(WAYS * 2):
            hostile = HostilePlan(plan, way, seed)
            try:
                assert torch.equal(attend(case, hostile.plan), good), (parts, way, seed)
            except RuntimeError as error:
                assert f"attnops::{op}" in str(error), (parts, way, seed)
                refused += 1
            assert hostile.unharmed(), (parts, way, seed)
        assert torch.equal(attend(case, plan), good)
    assert refused > len(WAYS)


# Paged and, where there is no page size, ragged prefills.
PREFILLS = {
    "hd128": {"head_dim": 128, "page_size": 64},
    "pairs": {"head_dim": 128, "page_size": 64, "num_q_heads": 8, "num_kv_heads": 2},
    "rows": {"head_dim": 64, "page_size": 1},
    "e4m3": {"head_dim": 128, "page_size": 16, "kv_dtype": FP8},
    "hd256": {"head_dim": 256, "page_size": 32},
    "ragged": {"head_dim": 128},
    "ragged pairs": {"head_dim": 64, "num_q_heads": 8, "num_kv_heads": 2},
    "ragged hd192 beside 128": {"head_dim": 192, "head_dim_v": 128},
    "ragged float16": {"head_dim": 96, "dtype": FP16},
}
COUNTERS = [(-1, 0, 0), (5, 0, 0), (0, 7, 0), (0, 0, -1), (0, 0, INT_MAX), (INT_MIN, INT_MIN, INT_MIN)]


class HostileOrder:
    """A copy of a plan of `fmha_paged` or `fmha_varlen` between guards."""

    def __init__(self, plan):
        self.tensors = {
            name: Between(getattr(plan, name)) for name in ("tile_order", "pieces", "partial", "semaphores")
        }
        self.plan = dataclasses.replace(plan, **{name: tensor.view for name, tensor in self.tensors.items()})

    def unharmed(self) -> bool:
        return all(tensor.is_whole() for tensor in self.tensors.values())


def prefill(kind: str):
    """A problem with a long request, its plan, whose tiles are cut, and the call by any plan."""
    lengths = ([9000, 50, 300, 7], [130, 50, 300, 0])
    if "page_size" not in PREFILLS[kind]:
        problem = ragged_problem(lengths[1], lengths[0], **PREFILLS[kind]).to("cuda")
        plan = split_plan(problem)
        ops.fmha_plan(plan, problem.cu_seqlens_q, problem.cu_seqlens_k)
    else:
        problem = paged_problem(*lengths, **PREFILLS[kind]).to("cuda")
        plan = split_plan(problem)
        ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    assert plan.pieces[0, 0] > 1

    def attend(plan):
        if isinstance(problem, RaggedProblem):
            return ops.fmha_varlen(problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan)[0]
        pools = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
        return ops.fmha_paged(problem.q, *pools, plan, k_scale=problem.k_scale, v_scale=problem.v_scale)[0]

    return plan, attend


@gpu
@pytest.mark.parametrize("kind", PREFILLS)
def test_an_order_of_any_words_ends_nothing(kind):
    plan, attend = prefill(kind)
    good = attend(plan)
    for seed, way in enumerate(WAYS):
        for which in ("order", "pieces", "both", "head kept"):
            generator = torch.Generator().manual_seed(seed)
            hostile = HostileOrder(plan)
            if which in ("order", "both"):
                spoil(hostile.plan.tile_order, way, generator)
            if which != "order":
                spoil(hostile.plan.pieces[1 if which == "head kept" else 0 :], way, generator)
            attend(hostile.plan)
            torch.cuda.synchronize()
            assert hostile.unharmed(), (way, which)
            assert not hostile.plan.semaphores.any(), (way, which)
    # One piece claims more than there are, behind pieces of its tile that there are.
    hostile = HostileOrder(plan)
    hostile.plan.pieces[2:, 3] = INT_MAX
    attend(hostile.plan)
    torch.cuda.synchronize()
    assert torch.equal(attend(plan), good)


@gpu
@pytest.mark.parametrize("counters", COUNTERS, ids=str)
@pytest.mark.parametrize("kind", ["pairs", "rows", "ragged pairs"])
def test_counters_of_any_words_end_nothing(kind, counters):
    plan, attend = prefill(kind)
    good = attend(plan)
    hostile = HostileOrder(plan)
    hostile.plan.semaphores.copy_(torch.tensor(counters, dtype=torch.int32))
    attend(hostile.plan)
    torch.cuda.synchronize()
    assert hostile.unharmed()
    hostile.plan.semaphores.zero_()
    assert torch.equal(attend(hostile.plan), good)
    assert torch.equal(attend(plan), good)
