"""One rank of decode context parallelism over gloo, run as a program: its results against one rank with all keys.

Arguments: rank, world size, a file for the rendezvous.
"""

from __future__ import annotations

import itertools
import os
import sys
from datetime import timedelta

import torch
from attnops import distributed, ops
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from graph_tape import GraphTape

LENGTHS = [300, 17, 4, 129, 64, 5]  # with 4 ranks and an interleave of 64, most hold nothing of most
PAGE_SIZE, PAGES_OF_REQUEST = 64, 5
HEADS, SCALE = 8, 0.08


def rows(kind: str, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    if kind == "mla":
        return (torch.randn(num_tokens, 576).to(dtype),)
    return torch.randn(num_tokens, 2, 64).to(dtype), torch.randn(num_tokens, 2, 64).to(dtype)


def pools(kind: str, num_pages: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shapes = [(num_pages, PAGE_SIZE, 576)] if kind == "mla" else [(num_pages, PAGE_SIZE, 2, 64)] * 2
    return tuple(torch.full(shape, torch.nan, dtype=dtype) for shape in shapes)


def store(pages: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], slots: torch.Tensor) -> None:
    (ops.store_kv if len(pages) == 2 else ops.store_mla_kv)(*pages, *new, slots)


def attend(pages, q, table, lens, causal: bool, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`tokens` queries of each request: ``[B * tokens, HEADS, D]`` and its lse."""
    options = {"softmax_scale": SCALE, "causal": causal, "return_lse": True}
    if len(pages) == 1:
        plan = MlaDecodePlan.allocate(lens.shape[0], num_q_heads=HEADS, seqlen_q=tokens)
        ops.mla_decode_plan(plan, lens)
        return ops.mla_decode(q, *pages, table, lens, plan, **options)
    plan = XqaDecodePlan.allocate(lens.shape[0], num_q_heads=HEADS, num_kv_heads=2, head_dim=64, seqlen_q=tokens)
    ops.xqa_decode_plan(plan, lens)
    return ops.xqa_decode(q, *pages, table, lens, plan, **options)


def check(kind: str, interleave: int, tokens: int, dtype: torch.dtype, how: str, rank: int, world_size: int) -> None:
    torch.manual_seed(interleave + tokens)  # every rank makes the same problem
    batch = len(LENGTHS)
    seqlens = torch.tensor(LENGTHS, dtype=torch.int32)
    table = torch.randperm(batch * PAGES_OF_REQUEST).to(torch.int32).view(batch, -1)
    new = rows(kind, sum(LENGTHS), dtype)
    q = torch.randn(batch * tokens, HEADS, 576 if kind == "mla" else 64).to(dtype)

    def slots(page_size: int) -> torch.Tensor:
        position = torch.cat([torch.arange(n) for n in LENGTHS])
        request = torch.repeat_interleave(torch.arange(batch), seqlens)
        return table[request, position // page_size].long() * page_size + position % page_size

    whole = pools(kind, table.numel(), torch.float32)
    store(whole, tuple(t.float() for t in new), slots(PAGE_SIZE))
    expected, expected_lse = attend(whole, q.float(), table, seqlens, True, tokens)
    mine = pools(kind, table.numel(), dtype)
    shared = slots(PAGE_SIZE * world_size)
    with GraphTape().capture():  # refuses host reads
        store(mine, new, ops.context_parallel_slots(shared, rank, world_size, interleave))
        lens = ops.context_parallel_seqlens(seqlens, rank, world_size, interleave, tokens_per_request=tokens)
        out, lse = attend(mine, q, table.repeat_interleave(tokens, 0, output_size=batch * tokens), lens, False, 1)
        out[lse == -torch.inf] = torch.nan  # nobody may look there
        got, got_lse = distributed.combine(out, lse, how=how)
    heads, _ = distributed.heads_of_rank(HEADS, 2, rank, world_size)
    error = relative_error(got, expected[:, heads.start : heads.stop])
    assert error <= MAX_RELATIVE_ERROR[dtype], f"{kind} {interleave} {tokens} {how} {dtype}: {error:.3g}"
    assert_lse_close(got_lse, expected_lse[:, heads.start : heads.stop], atol=2e-2 if dtype != torch.float32 else 1e-4)

    sinks = torch.randn(HEADS)[heads.start : heads.stop]
    sunk, _ = distributed.combine(out, lse, how=how, sinks=sinks)
    share = torch.sigmoid(expected_lse[:, heads.start : heads.stop] - sinks).unsqueeze(-1)
    error = relative_error(sunk, expected[:, heads.start : heads.stop] * share)
    assert error <= 1.5 * MAX_RELATIVE_ERROR[dtype], f"sinks: {error:.3g}"


def check_empty(how: str, world_size: int) -> None:
    out, lse = torch.full((3, HEADS, 16), torch.nan), torch.full((3, HEADS), -torch.inf)
    for sinks in (None, torch.zeros(HEADS // world_size)):
        got, got_lse = distributed.combine(out, lse, how=how, sinks=sinks)
        assert torch.equal(got, torch.zeros(3, HEADS // world_size, 16)), "a row that nobody has keys for"
        assert (got_lse == -torch.inf).all()
    got, _ = distributed.combine(out[:0], lse[:0], how=how)
    assert got.shape == (0, HEADS // world_size, 16)


def main(rank: int, world_size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    dtypes = (torch.float32, torch.bfloat16)
    cases = itertools.product(("gqa", "mla"), (1, 16, 64), (1, 4), dtypes, distributed.HOW)
    done = 0
    for kind, interleave, tokens, dtype, how in cases:
        if dtype != torch.float32 and interleave != 16:
            continue
        check(kind, interleave, tokens, dtype, how, rank, world_size)
        done += 1
    for how in distributed.HOW:
        check_empty(how, world_size)
    torch.distributed.barrier()
    print(f"{done} cases equal one rank", flush=True)
    os._exit(0)  # torch 2.13 now and then aborts a process that ends while gloo's threads do


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
