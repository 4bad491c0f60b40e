"""Lists of blocks over a paged problem, the float64 answer, and calls of the ops that take them."""

from __future__ import annotations

import dataclasses
import math

import torch
from attnops import ops
from attnops.metadata import BlockDecodePlan, BlockPrefillPlan
from checks import assert_attention_close, assert_lse_close
from problems import FP8, PagedProblem
from torch import Tensor

# (page_size, block_size, columns): a block is a page, some of it, several pages, and neither
SIZES = [
    (16, 16, 9),
    (64, 64, 4),
    (64, 16, 12),
    (16, 64, 4),
    (64, 1, 150),
    (1, 1, 40),
    (16, 128, 3),
    (24, 16, 7),
    (5, 3, 30),
]


def draw_lists(problem: PagedProblem, block_size: int, columns: int, *, seed: int = 0, last: float = 0.5) -> Tensor:
    """int32 ``[B, H_kv, columns]``: blocks of each request, each once, in any order, with negatives between them.

    `last`: how often a list has the last block of its request, which may not be whole.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads = problem.batch_size, problem.k_pages.shape[2]
    lists = torch.full((batch, heads, columns), -1, dtype=torch.int32)
    for b, length in enumerate(problem.cache_seqlens.tolist()):
        blocks = -(-max(length, 0) // block_size)
        for h in range(heads):
            most = min(blocks, columns)
            count = int(torch.randint(most + 1, (), generator=generator)) if most else 0
            mine = torch.randperm(blocks, generator=generator)[:count]
            if count and torch.rand((), generator=generator) < last:
                mine = torch.cat([mine[mine != blocks - 1][: count - 1], torch.tensor([blocks - 1])])
            places = torch.randperm(columns, generator=generator)[: len(mine)]
            lists[b, h, places] = mine[torch.randperm(len(mine), generator=generator)].int()
    lists[lists == -1] = torch.randint(-(2**31), 0, ((lists == -1).sum(),), generator=generator).int()
    return lists


def blocks_expected(
    problem: PagedProblem,
    lists: Tensor,
    block_size: int,
    *,
    causal: bool = True,
    new_blocks: bool = False,
    softmax_scale: float | None = None,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    window_left: int = -1,
) -> tuple[Tensor, Tensor]:
    """(out ``[T, H_q, D]``, lse ``[T, H_q]``) in float64, by plain loops over rows and heads.

    `new_blocks`: those that hold new tokens are in, listed or not.
    """
    page_size, heads = problem.k_pages.shape[1:3]
    tokens, q_heads, dim = problem.q.shape
    group, scale = q_heads // heads, dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(tokens, q_heads, problem.v_pages.shape[3], dtype=torch.float64)
    lse = torch.full((tokens, q_heads), -math.inf, dtype=torch.float64)
    bounds, q = problem.cu_seqlens_q.tolist(), problem.q.cpu().double()
    of = [(problem.k_pages.cpu(), problem.k_scale), (problem.v_pages.cpu(), problem.v_scale)]
    for b, length in enumerate(problem.cache_seqlens.tolist()):
        new = bounds[b + 1] - bounds[b]
        position = torch.arange(length)
        page = problem.page_table[b].cpu()[position // page_size].long()
        for h in range(heads):
            mine = lists[b, h].cpu()
            counts = torch.zeros(-(-length // block_size) + 1)
            counts.index_add_(0, mine[mine >= 0].long(), torch.ones(int((mine >= 0).sum())))
            if new_blocks:
                counts[max(length - new, 0) // block_size :] = 1
            keys, values = (
                pages[page, position % page_size, h].double()
                * (1.0 if s is None else s.flatten().cpu().double()[h if s.numel() > 1 else 0])
                for pages, s in of
            )
            for i in range(new):
                last = length - new + i if causal else length - 1
                often = counts.clone()
                if (last + 1) % block_size:
                    often[(last + 1) // block_size].clamp_(max=1)  # a block that the row cuts counts once
                first = length - new + i - window_left if window_left >= 0 else 0
                if first > 0 and first % block_size:
                    often[min(first // block_size, len(often) - 1)].clamp_(max=1)  # and so does one that a window cuts
                weight = often[position // block_size] * (position <= last) * (position >= first)
                seen = weight > 0
                if not bool(seen.any()):
                    continue
                own = slice(h * group, (h + 1) * group)
                scores = scale * q[bounds[b] + i, own] @ keys[seen].T
                if logit_cap:
                    scores = logit_cap * torch.tanh(scores / logit_cap)
                scores = scores + weight[seen].double().log()
                total = torch.logsumexp(scores, dim=1)
                lse[bounds[b] + i, own] = total
                if sinks is not None:
                    total = torch.logaddexp(total, sinks[own].cpu().double())
                out[bounds[b] + i, own] = torch.exp(scores - total[:, None]) @ values[seen]
    return out, lse


def assert_blocks_close(problem: PagedProblem, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """(out, lse) beside float64's, and zeros in rows without keys."""
    assert_attention_close(got[0], expected[0], problem.q.dtype)
    assert_lse_close(got[1], expected[1], atol=2e-4 if problem.k_pages.dtype == FP8 else 1e-4)
    assert not got[0][expected[1] == -math.inf].any(), "a row without keys must be zero"


def decode_plan(problem: PagedProblem, lists: Tensor, block_size: int, seqlen_q: int = 1, **options) -> BlockDecodePlan:
    return BlockDecodePlan.allocate(
        problem.batch_size,
        seqlen_q=seqlen_q,
        num_q_heads=problem.q.shape[1],
        num_kv_heads=problem.k_pages.shape[2],
        head_dim=problem.q.shape[2],
        num_blocks=lists.shape[2],
        block_size=block_size,
        page_size=problem.k_pages.shape[1],
        device=problem.q.device,
        **options,
    )


def decode_blocks(
    problem: PagedProblem,
    lists: Tensor,
    block_size: int,
    *,
    seqlen_q: int = 1,
    csr: bool = False,
    plan: BlockDecodePlan | None = None,
    num_sm_parts: int | None = 3,
    fixed_split_tokens: int = 0,
    window_left: int = -1,
    **options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `xqa_decode`, both on the CPU, by token."""
    if plan is None:
        how = {"num_sm_parts": num_sm_parts, "fixed_split_tokens": fixed_split_tokens, "window_left": window_left}
        plan = decode_plan(problem, lists, block_size, seqlen_q, **how)
    plan.block_tables.fill_(2**30)  # what no row needs
    plan.decode.out_partial.fill_(torch.nan)
    plan.decode.lse_partial.fill_(torch.nan)
    plan.sink_lse.fill_(torch.nan)
    out, lse = ops.xqa_decode(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.kv_indices if csr else problem.page_table,
        problem.cache_seqlens,
        plan,
        block_list=lists.to(problem.q.device),
        kv_indptr=problem.kv_indptr if csr else None,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        out=torch.full_like(problem.q, torch.nan),
        return_lse=True,
        window_left=window_left,
        **options,
    )
    return out.cpu(), lse.cpu()


def prefill_plan(
    problem: PagedProblem, lists: Tensor, block_size: int, *, spare: tuple[int, int] = (0, 0), **options
) -> BlockPrefillPlan:
    """`spare`: tokens and requests that the plan is for beyond the problem's."""
    options.setdefault("dtype", problem.q.dtype)
    return BlockPrefillPlan.allocate(
        problem.q.shape[0] + spare[0],
        problem.batch_size + spare[1],
        num_q_heads=problem.q.shape[1],
        num_kv_heads=problem.k_pages.shape[2],
        head_dim=problem.q.shape[2],
        num_blocks=lists.shape[2],
        block_size=block_size,
        page_size=problem.k_pages.shape[1],
        device=problem.q.device,
        **options,
    )


def prefill_blocks(
    problem: PagedProblem,
    lists: Tensor,
    block_size: int,
    *,
    csr: bool = False,
    causal: bool = True,
    plan: BlockPrefillPlan | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `fmha_paged`, both on the CPU."""
    plan = prefill_plan(problem, lists, block_size, causal=causal) if plan is None else plan
    plan.block_tables.fill_(2**30)
    plan.block_seqlens.fill_(2**30)
    plan.bounds[1:].fill_(2**30)
    plan.q_by_head.fill_(0xFF)  # NaN
    plan.out_by_head.fill_(0xFF)
    plan.lse_by_head.fill_(torch.nan)
    out, lse = ops.fmha_paged(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.kv_indices if csr else problem.page_table,
        problem.cache_seqlens,
        problem.cu_seqlens_q,
        plan,
        block_list=lists.to(problem.q.device),
        kv_indptr=problem.kv_indptr if csr else None,
        causal=causal,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        out=torch.full_like(problem.q, torch.nan),
        return_lse=True,
        **options,
    )
    return out.cpu(), lse.cpu()


def hide_unlisted(problem: PagedProblem, lists: Tensor, block_size: int, *, new_blocks: bool) -> PagedProblem:
    """The problem with NaN in all keys that a KV head's list does not name.

    `new_blocks`: those that hold new tokens are kept, listed or not.
    """
    k_pages, v_pages = problem.k_pages.clone(), problem.v_pages.clone()
    page_size, bounds = k_pages.shape[1], problem.cu_seqlens_q.tolist()
    for b, length in enumerate(problem.cache_seqlens.tolist()):
        position = torch.arange(length)
        page, offset = problem.page_table[b].cpu()[position // page_size].long(), position % page_size
        first_new = max(length - (bounds[b + 1] - bounds[b]), 0) // block_size if new_blocks else length
        for h in range(k_pages.shape[2]):
            block = position // block_size
            hidden = ~torch.isin(block, lists[b, h].cpu()) & (block < first_new)
            for pages in (k_pages, v_pages):
                pages[page[hidden].to(pages.device), offset[hidden].to(pages.device), h] = torch.nan
    return dataclasses.replace(problem, k_pages=k_pages, v_pages=v_pages)


def moved(problem: PagedProblem, device: str) -> PagedProblem:
    return dataclasses.replace(problem) if device == "cpu" else problem.to(device)
