"""No plan, whatever somebody wrote into its memory, ends a CUDA context, hangs a call or writes beside its tensors."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from hostile_plans import WAYS, HostilePlan
from kernel_rows import ROWS, Case, case_of, finite
from mla_calls import SCALE, plan_for, queries
from sparse_calls import KINDS, sparse_problem
from sparse_calls import plan_of as sparse_plan_of
from xqa_decoding import make_plan

gpu = pytest.mark.gpu
each_row = pytest.mark.parametrize("op,row", ROWS.values(), ids=ROWS)
LENGTHS = [130, 64, 5, 517, 0, 66, 1900]


def plan_of(case: Case, parts: int, fixed: int):
    if case.op == "mla_decode":
        return plan_for(case.problem, fixed=max(fixed, 0), num_sm_parts=parts)
    tokens = case.call["seqlen_q"]
    return make_plan(case.problem, seqlen_q=tokens, num_sm_parts=parts, fixed_split_tokens=fixed, max_seqlen_k=4096)


def attend(case: Case, plan) -> torch.Tensor:
    """The output by a plan as it is, whatever its counters say afterwards."""
    problem, call = case.problem, {k: v for k, v in case.call.items() if k not in ("seqlen_q", "num_sm_parts")}
    if call.pop("checked", False):
        call["report"] = torch.zeros(8, dtype=torch.int32, device="cuda")
    table = (problem.page_table, problem.cache_seqlens, plan)
    if case.op == "mla_decode":
        call |= {"kv_scale": problem.kv_scale, "softmax_scale": SCALE}
        return ops.mla_decode(queries(problem), problem.kv_pages, *table, **call)[0]
    call |= {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    return ops.xqa_decode(problem.q, problem.k_pages, problem.v_pages, *table, **call)[0]


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
    case = case_of(op, row, LENGTHS).with_pools(finite)
    for number, (shape, parts) in enumerate([(case, 6), (wide(case), 33), (case, 2 if "ring" in row else 132)]):
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
