"""Runs attnops::xqa_decode on a problem of `problems.py`, the way a backend does: plan, then attend."""

from __future__ import annotations

import math

import torch
from attnops import ops, reference
from attnops.metadata import XqaDecodePlan
from checks import assert_attention_close, assert_lse_close
from problems import FP8, PagedProblem
from torch import Tensor

CPU_ISAS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]


def isas_here() -> list[str]:
    """The instruction sets that this machine has, weakest first."""
    return CPU_ISAS[: CPU_ISAS.index(torch.ops.attnops.cpu_isa()) + 1]


def make_plan(problem: PagedProblem, *, seqlen_q: int = 1, num_sm_parts: int | None = 3, **options) -> XqaDecodePlan:
    """A plan of the problem's geometry, already filled in. Three parts: an odd number, so that works are split."""
    plan = XqaDecodePlan.allocate(
        problem.batch_size,
        seqlen_q=seqlen_q,
        num_q_heads=problem.q.shape[1],
        num_kv_heads=problem.k_pages.shape[2],
        head_dim=problem.q.shape[2],
        num_sm_parts=num_sm_parts,
        device=problem.q.device,
        **options,
    )
    ops.xqa_decode_plan(plan, problem.cache_seqlens)
    return plan


def decode(
    problem: PagedProblem,
    *,
    seqlen_q: int = 1,
    csr: bool = False,
    num_sm_parts: int | None = 3,
    fixed_split_tokens: int = 0,
    max_seqlen_k: int = 4096,
    window_left: int = -1,
    plan: XqaDecodePlan | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """(out, lse), both on the CPU, by token."""
    if plan is None:
        plan = make_plan(
            problem,
            seqlen_q=seqlen_q,
            num_sm_parts=num_sm_parts,
            window_left=window_left,
            fixed_split_tokens=fixed_split_tokens,
            max_seqlen_k=max_seqlen_k,
        )
    plan.out_partial.fill_(torch.nan)  # what unwritten rows may hold
    plan.lse_partial.fill_(torch.nan)
    out, lse = ops.xqa_decode(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.kv_indices if csr else problem.page_table,
        problem.cache_seqlens,
        plan,
        kv_indptr=problem.kv_indptr if csr else None,
        window_left=window_left,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        out=torch.full_like(problem.q, torch.nan),
        return_lse=True,
        **options,
    )
    assert not plan.semaphores.any(), "semaphores must be zero after a call"
    return out.cpu(), lse.cpu()


def assert_decodes(problem: PagedProblem, *, bound: float | None = None, tree_mask: Tensor | None = None, **options):
    """Decode and compare with the float64 answer."""
    of_the_call = ("seqlen_q", "csr", "num_sm_parts", "fixed_split_tokens", "max_seqlen_k", "plan", "report")
    rules = {name: value for name, value in options.items() if name not in of_the_call}
    rules = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in rules.items()}
    mask = {} if tree_mask is None else {"tree_mask": tree_mask.cpu()}
    expected_out, expected_lse = problem.expected(**rules, **mask)
    out, lse = decode(problem, **options, **({} if tree_mask is None else {"tree_mask": tree_mask}))
    assert_attention_close(out, expected_out, problem.q.dtype, bound)
    # P rounded to bf16 does not touch lse; its error is that of float32 sums of exact products.
    assert_lse_close(lse, expected_lse, atol=2e-4 if problem.k_pages.dtype == FP8 else 1e-4)
    empty = expected_lse == -torch.inf
    assert not out[empty].any(), "a row without keys must be zero"


def captured(step):
    """A graph of `step`, which ran once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def check_replays(problem, plan, batches):
    """One captured graph, plan and decode, replayed with other lengths, tables and queries each time."""
    page_size = problem.k_pages.shape[1]
    seqlens = torch.zeros_like(problem.cache_seqlens)
    table = torch.full_like(problem.page_table, 2**30)
    q, out = problem.q.clone(), torch.empty_like(problem.q)
    lse = torch.empty(q.shape[:-1], device="cuda")
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    on_cpu = {name: None if scale is None else scale.cpu() for name, scale in scales.items()}

    def step():
        ops.xqa_decode_plan(plan, seqlens)
        ops.xqa_decode(q, problem.k_pages, problem.v_pages, table, seqlens, plan, out=out, lse=lse, **scales)

    graph = captured(step)
    for now in batches:
        seqlens.copy_(torch.tensor(now, dtype=torch.int32))
        table.fill_(2**30)
        for request, length in enumerate(now):
            pages = -(-length // page_size)
            table[request, :pages] = problem.page_table[request, :pages].flip(0)
        q.copy_(torch.randn_like(q))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_lse = reference.paged_attention(
            q.unflatten(0, (len(now), -1)).cpu(),
            problem.k_pages.cpu(),
            problem.v_pages.cpu(),
            table.cpu(),
            seqlens.cpu(),
            **on_cpu,
        )
        expected, expected_lse = expected.flatten(0, 1), expected_lse.flatten(0, 1)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=4e-3)
        torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-4, atol=1e-4)
