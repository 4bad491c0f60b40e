"""Calls of mla_decode on the problems of `problems.py`, with every buffer poisoned before the call."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attnops import ops, reference
from attnops.metadata.plan import MlaDecodePlan
from checks import assert_attention_close, assert_lse_close
from problems import HUGE_INDEX, poisoned, write_tokens
from torch import Tensor

SCALE = 0.07  # softmax_scale: scores of random latents then have a standard deviation near 1.7


def queries(problem) -> Tensor:
    """[B, S_q, H_q, 576], one query token per request when there is no request."""
    return problem.q_by_request if problem.batch_size else problem.q.unsqueeze(1)


def repaged(problem, page_size: int):
    """The same tokens in pages of another size, in backward order. The CSR form is left as it was."""
    lengths = problem.cache_seqlens.tolist()
    counts = [-(-length // page_size) for length in lengths]
    pages = poisoned((sum(counts), page_size, problem.kv_pages.shape[-1]), problem.kv_pages.dtype)
    table = torch.full((len(lengths), max(counts) + 1), HUGE_INDEX, dtype=torch.int32)
    last = sum(counts)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        stored = reference.gather_tokens(problem.kv_pages, problem.page_table, request, length)
        table[request, :count] = torch.arange(last - 1, last - 1 - count, -1, dtype=torch.int32)
        token = torch.arange(length)
        write_tokens(pages, table[request].long()[token // page_size], token % page_size, stored)
        last -= count
    return dataclasses.replace(problem, kv_pages=pages, page_table=table)


def plan_for(
    problem, *, window_left: int = -1, fixed: int = 0, num_sm_parts: int = 6, max_seqlen_k: int = 1 << 12
) -> MlaDecodePlan:
    """A plan, run, whose scratch is full of NaN."""
    batch, seqlen_q, heads, _ = queries(problem).shape
    plan = MlaDecodePlan.allocate(
        batch,
        num_q_heads=heads,
        seqlen_q=seqlen_q,
        window_left=window_left,
        fixed_split_tokens=fixed,
        max_seqlen_k=max_seqlen_k,
        num_sm_parts=num_sm_parts,
        device=problem.q.device,
    )
    plan.out_partial.fill_(math.nan)
    plan.lse_partial.fill_(math.nan)
    ops.mla_decode_plan(plan, problem.cache_seqlens)
    return plan


def skip_without_kernel(q: Tensor) -> None:
    """The CUDA kernels take 16-bit queries, and the table refuses the rest."""
    if q.is_cuda and q.dtype == torch.float32:
        pytest.skip("no CUDA kernel of mla_decode takes q of float32")


def decode(
    problem,
    *,
    fixed: int = 0,
    num_sm_parts: int = 6,
    csr: bool = False,
    apart: bool = False,
    plan: MlaDecodePlan | None = None,
    softmax_scale: float = SCALE,
    **options,
) -> tuple[Tensor, Tensor]:
    """(out [T, H_q, 512], lse [T, H_q]) of a problem, on its device. `options` are those of `ops.mla_decode`."""
    q = queries(problem)
    skip_without_kernel(q)
    if plan is None:
        window_left = options.get("window_left", -1)
        plan = plan_for(problem, window_left=window_left, fixed=fixed, num_sm_parts=num_sm_parts)
    out = q.new_full((*q.shape[:-1], 512), math.nan)
    lse = torch.full(q.shape[:-1], math.nan, device=q.device)
    ops.mla_decode(
        q[..., :512] if apart else q,
        problem.kv_pages,
        problem.kv_indices if csr else problem.page_table,
        problem.cache_seqlens,
        plan,
        q_pe=q[..., 512:] if apart else None,
        kv_indptr=problem.kv_indptr if csr else None,
        kv_scale=problem.kv_scale,
        softmax_scale=softmax_scale,
        out=out,
        lse=lse,
        **options,
    )
    assert not plan.semaphores.any(), "the semaphores must be zero after a call"
    return out.flatten(0, 1), lse.flatten(0, 1)


def lse_tolerance(problem) -> float:
    # The CPU's kernels multiply scales to sums in float32. Ones that round e4m3 x scale of a row lose for bf16 2^-9 of
    # each product, 2e-3 of a score near 1.7 (one standard deviation), and the largest of hundreds of rows is some four
    # of these. fp16 has three more bits.
    if problem.kv_pages.dtype != torch.uint8 or not problem.q.is_cuda:
        return 1e-4
    return {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}.get(problem.q.dtype, 1e-4)


def assert_equals_reference(problem, out: Tensor, lse: Tensor, **options) -> None:
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE, **options)
    assert_attention_close(out.cpu(), expected_out, problem.q.dtype)
    assert_lse_close(lse.cpu(), expected_lse, atol=lse_tolerance(problem))
