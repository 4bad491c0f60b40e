"""One of two ranks over NCCL, each on its own GPU: attention and its collectives in a graph, against eager calls.

A graph holds lengths, plan, stores, attention and the exchange. It is replayed with new lengths, queries and rows; each
replay equals an eager call of the same step bit for bit. Some are also compared with plain attention in float32.

Arguments: rank, world size, a file for the rendezvous, replays; then the kinds of steps, none for all.
"""

from __future__ import annotations

import itertools
import os
import sys
from datetime import timedelta

import torch
from attnops import distributed, ops
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from checks import MAX_RELATIVE_ERROR, relative_error

BATCH, PAGE_SIZE, PAGES_OF_REQUEST, INTERLEAVE = 6, 64, 48, 16
LONGEST = PAGE_SIZE * PAGES_OF_REQUEST
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, SCALE = 32, 8, 128, 1024, 0.08


def plan_of(kind: str, batch: int, tokens: int, heads: int, kv_heads: int):
    if kind == "mla":
        return MlaDecodePlan.allocate(batch, num_q_heads=heads, seqlen_q=tokens, device="cuda")
    return XqaDecodePlan.allocate(
        batch, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, seqlen_q=tokens, device="cuda"
    )


def attend(kind: str, pages, q, table, lens, plan, causal: bool):
    options = {"softmax_scale": SCALE, "causal": causal, "return_lse": True}
    if kind == "mla":
        ops.mla_decode_plan(plan, lens)
        return ops.mla_decode(q, *pages, table, lens, plan, **options)
    ops.xqa_decode_plan(plan, lens)
    return ops.xqa_decode(q, *pages, table, lens, plan, **options)


def store(pages, new, slots) -> None:
    (ops.store_kv if len(pages) == 2 else ops.store_mla_kv)(*pages, *new, slots)


class Problem:
    """Pools full of random rows, the same on both ranks, and what a step brings."""

    def __init__(self, kind: str, tokens: int) -> None:
        self.kind, self.tokens = kind, tokens
        num_pages = BATCH * PAGES_OF_REQUEST
        rows = [576] if kind == "mla" else [KV_HEADS, HEAD_DIM]
        count = 1 if kind == "mla" else 2
        self.row = rows
        self.whole = [torch.randn(num_pages, PAGE_SIZE, *rows, device="cuda").bfloat16() for _ in range(count)]
        self.table = torch.randperm(num_pages, device="cuda").to(torch.int32).view(BATCH, -1)
        self.q_dim = 576 if kind == "mla" else HEAD_DIM
        self.lens = torch.full((BATCH,), LONGEST, dtype=torch.int32, device="cuda")
        self.q = torch.zeros(BATCH * tokens, HEADS, self.q_dim, dtype=torch.bfloat16, device="cuda")
        self.new = [torch.zeros(BATCH * tokens, *rows, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        self.slots = torch.zeros(BATCH * tokens, dtype=torch.int64, device="cuda")

    def slots_of(self, positions: torch.Tensor, page_size: int) -> torch.Tensor:
        """``[B, n]`` positions of each request as slots of pages of that size."""
        pages = self.table.long().gather(1, positions // page_size)
        return pages * page_size + positions % page_size

    def draw(self, page_size: int) -> None:
        """New lengths, rows and queries, in place."""
        self.lens.copy_(torch.randint(self.tokens, LONGEST + 1, (BATCH,), device="cuda"))
        self.lens[0] = self.tokens  # of two ranks, one holds next to nothing
        self.q.copy_(torch.randn_like(self.q))
        for rows in self.new:
            rows.copy_(torch.randn_like(rows))
        last = self.lens.long().unsqueeze(1) - self.tokens + torch.arange(self.tokens, device="cuda")
        self.slots.copy_(self.slots_of(last, page_size).flatten())
        store(self.whole, self.new, self.slots_of(last, PAGE_SIZE).flatten())

    def expected(self) -> torch.Tensor:
        """One rank's attention, by plain products in float32: ``[B * tokens, HEADS, D_v]``."""
        outs = []
        for request, length in enumerate(self.lens.tolist()):
            positions = torch.arange(length, device="cuda").unsqueeze(0)
            slots = self.table[request].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            rows = [pages.flatten(0, 1)[slots[0]].float() for pages in self.whole]
            k = rows[0].unsqueeze(1) if self.kind == "mla" else rows[0]
            v = k[..., :512] if self.kind == "mla" else rows[1]
            k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
            q = self.q[request * self.tokens : (request + 1) * self.tokens].float()
            scores = torch.einsum("thd,khd->htk", q, k) * SCALE
            seen = positions <= torch.arange(length - self.tokens, length, device="cuda").unsqueeze(1)
            outs.append(torch.einsum("htk,khd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        return torch.cat(outs)


def context_parallel(problem: Problem, how: str, rank: int, world_size: int):
    """A step of decode context parallelism, as a function that fills and returns fixed tensors."""
    kind, tokens = problem.kind, problem.tokens
    mine = [torch.full_like(pages, torch.nan) for pages in problem.whole]
    everywhere = torch.arange(LONGEST, device="cuda").expand(BATCH, -1)
    shared = problem.slots_of(everywhere, PAGE_SIZE * world_size).flatten()
    theirs = [pages.flatten(0, 1)[problem.slots_of(everywhere, PAGE_SIZE).flatten()] for pages in problem.whole]
    store(mine, theirs, ops.context_parallel_slots(shared, rank, world_size, INTERLEAVE))
    rows = problem.table.repeat_interleave(tokens, 0, output_size=BATCH * tokens)

    def step(plan):
        store(mine, problem.new, ops.context_parallel_slots(problem.slots, rank, world_size, INTERLEAVE))
        lens = ops.context_parallel_seqlens(problem.lens, rank, world_size, INTERLEAVE, tokens_per_request=tokens)
        out, lse = attend(kind, mine, problem.q, rows, lens, plan, causal=False)
        return distributed.combine(out, lse, how=how)

    def check(got: torch.Tensor) -> float:
        heads, _ = distributed.heads_of_rank(HEADS, KV_HEADS, rank, world_size)
        return relative_error(got, problem.expected()[:, heads.start : heads.stop])

    return step, lambda: plan_of(kind, BATCH * tokens, 1, HEADS, KV_HEADS), check, PAGE_SIZE * world_size


def tensor_parallel(problem: Problem, rank: int, world_size: int):
    """A step of a layer under tensor parallelism: own heads, own columns of the projection, a sum over the ranks."""
    kind = problem.kind
    heads, kv_heads = distributed.heads_of_rank(HEADS, KV_HEADS, rank, world_size)
    mine = [pages.clone() for pages in problem.whole]
    if kind == "gqa":
        mine = [pages[:, :, kv_heads.start : kv_heads.stop].contiguous() for pages in mine]
    width = 512 if kind == "mla" else HEAD_DIM
    weight = (torch.randn(HEADS * width, HIDDEN, device="cuda") / 50).bfloat16()
    own = weight[heads.start * width : heads.stop * width]

    def step(plan):
        new = problem.new
        if kind == "gqa":
            new = [rows[:, kv_heads.start : kv_heads.stop] for rows in new]
        store(mine, new, problem.slots)
        q = problem.q[:, heads.start : heads.stop].contiguous()
        out, lse = attend(kind, mine, q, problem.table, problem.lens, plan, causal=True)
        hidden = out.flatten(1) @ own
        torch.distributed.all_reduce(hidden)
        return hidden, lse

    def check(got: torch.Tensor) -> float:
        return relative_error(got, problem.expected().flatten(1) @ weight.float())

    return step, lambda: plan_of(kind, BATCH, problem.tokens, len(heads), len(kv_heads)), check, PAGE_SIZE


def run(name: str, problem: Problem, made, replays: int) -> None:
    step, new_plan, check, page_size = made
    plan, other = new_plan(), new_plan()
    problem.draw(page_size)
    for _ in range(2):
        step(plan)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(plan)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    errors = []
    for i in range(replays):
        problem.draw(page_size)
        graph.replay()
        expected, expected_lse = step(other)
        different += (out.view(torch.int16) != expected.view(torch.int16)).any() | (lse != expected_lse).any()
        if i % max(replays // 4, 1) == 0:
            errors.append(check(out))
    torch.cuda.synchronize()
    assert not different.item(), f"{name}: {different.item()} of {replays} replays differ from eager"
    bound = 2 * MAX_RELATIVE_ERROR[torch.bfloat16]  # two roundings: of the ranks' results, and of their sum
    assert max(errors) <= bound, f"{name}: relative error {max(errors):.3g} to one rank in float32"
    print(f"{name}: {replays} replays equal eager, {max(errors):.2e} to one rank in float32", flush=True)


def kinds() -> list[tuple[str, int, str]]:
    """Attention, tokens of a request, and how ranks join: a way of `combine`, or "tp"."""
    return list(itertools.product(("gqa", "mla"), (1, 4), (*distributed.HOW, "tp")))


def main(rank: int, world_size: int, rendezvous: str, replays: int, only: list[str]) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    done = 0
    for kind, tokens, how in kinds():
        name = f"{kind} {tokens} {how}"
        if only and name not in only:
            continue
        torch.manual_seed(tokens)  # both ranks draw the same
        problem = Problem(kind, tokens)
        sharing = (rank, world_size)
        made = tensor_parallel(problem, *sharing) if how == "tp" else context_parallel(problem, how, *sharing)
        run(name, problem, made, replays)
        done += 1
    torch.distributed.barrier()
    print(f"{done} cases are equal", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
