"""Right calls with lists of blocks: `xqa_decode` and `fmha_paged` with a `block_list`, and `label_scores`."""

from __future__ import annotations

import torch
from attnops import ops
from block_problems import (
    blocks_expected,
    decode_blocks,
    decode_plan,
    draw_lists,
    prefill_blocks,
    prefill_plan,
)
from problems import FP8, LAYOUTS, PagedProblem, paged_problem
from torch import Tensor

from .draw import Draw, Failure
from .options import set_isa

OUT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def _draw_problem(draw: Draw, seqlen_q: int | list[int], lengths: list[int], **options) -> PagedProblem:
    heads = draw.pick([(1, 1), (2, 1), (8, 2), (5, 5), (6, 3), (16, 1), (12, 4)])
    kind = draw.pick(["bf16", "bf16", "fp16", "fp8", "fp32"])
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(kind, torch.bfloat16)
    chosen = {
        "num_q_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": draw.pick([64, 64, 128, 128, 256, 72, 96]),
        "page_size": draw.pick([1, 2, 5, 16, 16, 64, 64, 128]),
        "layout": draw.pick(LAYOUTS),
        "seed": draw.number(0, 1 << 30),
    } | options
    draw.note(lengths=lengths, seqlen_q=seqlen_q, kind=kind, **chosen)
    kv_dtype = FP8 if kind == "fp8" else None
    return paged_problem(lengths, seqlen_q, dtype=dtype, kv_dtype=kv_dtype, **chosen).to(draw.device)


def _draw_lists(draw: Draw, problem: PagedProblem) -> tuple[Tensor, int]:
    block = draw.pick([1, 1, 2, 3, 4, 16, 16, 24, 64, 64, 128])
    columns = draw.pick([0, 1, 3, 9, 40] if block > 1 else [1, 20, 130])
    draw.note(block=block, columns=columns)
    lists = draw_lists(problem, block, columns, seed=draw.number(0, 1 << 30))
    if columns > 1 and draw.chance(0.3):
        lists[:, :, 1] = lists[:, :, 0]  # a block that is there twice counts twice
    return lists, block


def _judge(problem: PagedProblem, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (out, lse), (right, right_lse) = got, expected
    empty = right_lse == -torch.inf
    if not bool(out.double().isfinite().all()):
        raise Failure("out is not finite")
    if bool(out[empty].ne(0).any()) or bool(lse[empty].ne(-torch.inf).any()):
        raise Failure("a row without keys is not 0, or its lse not -inf")
    if bool(empty.all()):
        return
    error = float((out.double() - right).norm() / right.norm())
    if error > OUT[problem.q.dtype]:
        raise Failure(f"out differs: relative error {error:.3g}")
    worst = float((lse.double() - right_lse)[~empty].abs().max())
    if worst > 5e-4:
        raise Failure(f"lse differs by {worst:.3g}")


def right_decode(draw: Draw) -> None:
    """`ops.xqa_decode` with a `block_list`: one token or several, plans of both kinds, windows and sinks."""
    draw.saw("block_list of xqa_decode", "op build_block_tables")
    set_isa(draw)
    seqlen_q = draw.pick([1, 1, 1, 2, 4])
    lengths = [max(length, seqlen_q if seqlen_q > 1 else 0) for length in draw.lengths(draw.number(0, 5), 400)]
    problem = _draw_problem(draw, seqlen_q, lengths)
    lists, block = _draw_lists(draw, problem)
    rules = {"causal": draw.chance(0.7), "logit_cap": draw.pick([0.0, 0.0, 20.0])}
    rules["window_left"] = draw.pick([-1, -1, 0, block, draw.number(0, 400)])
    how = {"num_sm_parts": draw.pick([None, 1, 3, 7]), "fixed_split_tokens": draw.pick([0, 0, 64, 128])}
    sinks = draw.chance(0.3)
    draw.note(**rules, **how, sinks=sinks)
    rules["sinks"] = draw.normal(problem.q.shape[1]).to(draw.device) if sinks else None
    plan = decode_plan(problem, lists, block, seqlen_q, window_left=rules["window_left"], **how)
    csr = draw.chance(0.3)
    got = decode_blocks(problem, lists, block, seqlen_q=seqlen_q, csr=csr, plan=plan, **rules)
    _judge(problem, got, blocks_expected(problem, lists, block, **rules))
    if plan.decode.semaphores.any():
        raise Failure("semaphores are not zero after the call")


def right_prefill(draw: Draw) -> None:
    """`ops.fmha_paged` with a `block_list`, causal or not, with sinks."""
    draw.saw("block_list of fmha_paged", "op build_block_tables")
    set_isa(draw)
    lengths = draw.lengths(draw.number(0, 4), 300)
    new = [min(draw.length(100), length) for length in lengths]
    problem = _draw_problem(draw, new, lengths)
    lists, block = _draw_lists(draw, problem)
    causal = draw.chance(0.7)
    sinks = torch.randn(problem.q.shape[1], device=draw.device) if draw.chance(0.3) else None
    rules = {"causal": causal, "logit_cap": draw.pick([0.0, 0.0, 20.0]), "sinks": sinks}
    spare, dtype = (draw.pick([0, 0, 7]), draw.pick([0, 0, 2])), draw.pick([problem.q.dtype] * 3 + [FP8])
    draw.note(causal=causal, sinks=sinks is not None, spare=spare, scratch=dtype)
    plan = prefill_plan(problem, lists, block, spare=spare, causal=causal, dtype=dtype)
    got = prefill_blocks(problem, lists, block, csr=draw.chance(0.3), plan=plan, **rules)
    _judge(problem, got, blocks_expected(problem, lists, block, new_blocks=causal, **rules))


def right_scores(draw: Draw) -> None:
    """`ops.label_scores`, against float64."""
    draw.saw("op label_scores")
    lengths = draw.lengths(draw.number(0, 4), 300)
    problem = _draw_problem(draw, 1, lengths, head_dim=draw.pick([2, 5, 16, 32, 64, 130]), layout="nhd")
    if problem.k_scale is not None:
        return  # labels are of 16 or 32 bits
    batch, heads, page_size = len(lengths), problem.k_pages.shape[2], problem.k_pages.shape[1]
    columns = max(lengths, default=0) + draw.number(0, 5)
    scores = torch.full((batch, heads, columns), 7.0, device=draw.device)
    ops.label_scores(scores, problem.q, problem.k_pages, problem.page_table, problem.cache_seqlens)
    for b, length in enumerate(lengths):
        position = torch.arange(length)
        page = problem.page_table[b].cpu()[position // page_size].long()
        labels = problem.k_pages.cpu()[page, position % page_size].double()
        grouped = problem.q[b].cpu().double().unflatten(0, (heads, -1))
        right = torch.einsum("hgc,khc->hgk", grouped, labels).amax(1)
        got = scores[b].cpu().double()
        if not torch.allclose(got[:, :length], right, rtol=1e-5, atol=1e-3) or bool((got[:, length:] != 7.0).any()):
            raise Failure(f"scores of request {b} differ")
