"""Threads that share a plan, or a bound layer, in calls that split: each gets the bits of a call alone, on the CPU."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attnops import ops
from attnops.ops.layer_call import mla_layer, repeatable, xqa_layer
from layer_calls import Mla, Xqa
from mla_calls import plan_for
from problems import mla_problem, paged_problem
from torch import Tensor
from xqa_decoding import make_plan

THREADS, CALLS = 4, 100
LENGTHS = [1000, 70, 333]


@pytest.fixture(autouse=True)
def as_in_serving():
    with torch.no_grad():
        yield


def together(run: Callable[[int], bool]) -> list[bool]:
    """`run(i)`, CALLS times by each of THREADS threads, which start at once."""
    start = threading.Barrier(THREADS)

    def repeat(i: int) -> bool:
        start.wait()
        with torch.no_grad():
            return all([run(i) for _ in range(CALLS)])

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(repeat, range(THREADS)))


def xqa_call(fixed: int) -> tuple[Callable[[Tensor], Tensor], Any, list[Tensor]]:
    problem = paged_problem(LENGTHS)
    options = {"fixed_split_tokens": fixed, "max_seqlen_k": 1024} if fixed else {}
    plan = make_plan(problem, num_sm_parts=7, **options)
    arguments = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, plan)
    queries = [torch.randn_like(problem.q) for _ in range(THREADS)]
    return lambda q: ops.xqa_decode(q, *arguments, softmax_scale=0.2)[0], plan, queries


def mla_call(fixed: int) -> tuple[Callable[[Tensor], Tensor], Any, list[Tensor]]:
    problem = mla_problem(LENGTHS, num_q_heads=5)
    plan = plan_for(problem, fixed=fixed)
    arguments = (problem.kv_pages, problem.page_table, problem.cache_seqlens, plan)
    queries = [torch.randn_like(problem.q_by_request) for _ in range(THREADS)]
    return lambda q: ops.mla_decode(q, *arguments, softmax_scale=0.07)[0], plan, queries


@pytest.mark.parametrize("fixed", [0, 64])
@pytest.mark.parametrize("make", [xqa_call, mla_call], ids=["xqa_decode", "mla_decode"])
def test_threads_may_share_a_plan(make, fixed):
    call, plan, queries = make(fixed)
    plan.lse_partial.fill_(7.0)
    expected = [call(q) for q in queries]
    assert (plan.lse_partial != 7.0).any(), "no work is split: this would test nothing"
    assert not any(torch.equal(expected[0], other) for other in expected[1:])
    assert all(together(lambda i: torch.equal(call(queries[i]), expected[i])))
    assert not plan.semaphores.any()


def more_parts(case: Xqa | Mla) -> Any:
    """A plan of seven parts, so that works are split however few threads torch has here."""
    heads = {"num_q_heads": case.plan.num_q_heads, "seqlen_q": case.plan.seqlen_q, "num_sm_parts": 7}
    if isinstance(case, Xqa):
        plan = type(case.plan).allocate(3, num_kv_heads=case.plan.num_kv_heads, head_dim=case.plan.head_dim, **heads)
        ops.xqa_decode_plan(plan, case.seqlens)
    else:
        plan = type(case.plan).allocate(3, **heads)
        ops.mla_decode_plan(plan, case.seqlens)
    return plan


@pytest.mark.parametrize("kind", ["xqa", "mla"])
@pytest.mark.parametrize("same_look", [True, False])
def test_threads_may_share_a_bound_layer(kind, same_look):
    """Also where each brings tensors of another look, so that all go through the op and replace what it keeps."""
    case = Xqa("cpu") if kind == "xqa" else Mla("cpu", "bf16", apart=False)
    case.plan = more_parts(case)
    call = repeatable(xqa_layer if kind == "xqa" else mla_layer, case.bind())
    nothing_stored = {name: None for name in case.arguments() if name in ("k", "v", "latent", "k_pe", "slots")}

    def arguments(i: int) -> dict[str, Any]:
        given = {**case.arguments(), **nothing_stored}
        torch.manual_seed(i)
        out, q = (torch.randn_like(given[name]) for name in ("out", "q"))
        if not same_look and i % 2:  # rows of a wider tensor
            wide = torch.zeros(q.shape[0], q[0].numel() + 64, dtype=q.dtype)[:, : q[0].numel()].view_as(q)
            q = wide.copy_(q)
        return {**given, "out": out, "q": q}

    expected = []
    for i in range(THREADS):
        given = arguments(i)
        call(*given.values())
        expected.append(given["out"].clone())
    case.plan.lse_partial.fill_(7.0)
    call(*arguments(0).values())
    assert (case.plan.lse_partial != 7.0).any(), "no work is split: this would test nothing"

    def run(i: int) -> bool:
        given = arguments_of[i]
        given["out"].zero_()
        call(*given.values())
        return torch.equal(given["out"], expected[i])

    arguments_of = [arguments(i) for i in range(THREADS)]
    assert all(together(run))
