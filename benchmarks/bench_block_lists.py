"""Lists of blocks on a GPU, beside dense attention over as many keys: decode and prefill.

A time is the median over replays of a CUDA graph that holds calls over several lists and page tables of a pool far
larger than the L2 cache, over their number. Dense calls have the same heads, and as many keys for each KV head.

    python benchmarks/bench_block_lists.py --seconds 40 [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import records
import torch
from attnops import ops
from attnops.metadata import BlockDecodePlan, BlockPrefillPlan, FmhaPlan, XqaDecodePlan
from attnops.metadata.block_plan import unit_size
from attnops.ops.block_lists import unit_pages

BF16, INT32, DEVICE = torch.bfloat16, torch.int32, "cuda"
PAGE, DIM, CALLS, REPLAYS = 64, 128, 8, 12
POOL_TOKENS = 1 << 19
DECODE_NAMES = ("num_q_heads", "num_kv_heads", "batch", "list_keys", "block")
PREFILL_NAMES = ("num_q_heads", "num_kv_heads", "batch", "new", "list_keys", "block")
DECODE = [  # by DECODE_NAMES
    (32, 8, batch, keys, block)
    for batch in (64, 16, 1)
    for keys, block in [(4096, 64), (2048, 1), (4096, 128), (4096, 16)]
] + [(64, 4, 64, 2048, 128), (64, 4, 16, 2048, 128), (32, 8, 128, 1024, 64), (16, 1, 64, 4096, 64)]
PREFILL = [(64, 4, 1, 4096, 2048, 128), (32, 8, 1, 2048, 4096, 64), (32, 8, 8, 64, 4096, 64)]  # by PREFILL_NAMES


def median_us(step: Callable[[int], object]) -> float:
    """Of one call, in a graph of `CALLS` of them."""
    for r in range(2):
        step(r)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for r in range(CALLS):
            step(r)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def lists_of(batch: int, heads: int, count: int, blocks: int) -> torch.Tensor:
    """`count` of `blocks` blocks for each head, rising."""
    chosen = torch.rand(batch * heads, blocks, device=DEVICE).topk(count, dim=1).indices
    return chosen.sort(dim=1).values.view(batch, heads, count).to(INT32)


def tables_of(batch: int, pages: int) -> torch.Tensor:
    return torch.randint(POOL_TOKENS // PAGE, (batch, pages), device=DEVICE, dtype=INT32)


def decode_cell(pools: list, h_q: int, h_kv: int, batch: int, keys: int, block: int) -> dict[str, float]:
    k, v = (pool.view(-1, PAGE, h_kv, DIM) for pool in pools)
    count, context = keys // block, 4 * keys
    q = torch.randn(batch, h_q, DIM, device=DEVICE, dtype=BF16)
    out = torch.empty_like(q)
    kind = {"num_q_heads": h_q, "num_kv_heads": h_kv, "head_dim": DIM, "device": DEVICE}
    lists = [lists_of(batch, h_kv, count, context // block) for _ in range(CALLS)]
    wide, narrow = ([tables_of(batch, n // PAGE) for _ in range(CALLS)] for n in (context, keys))
    long, short = (torch.full((batch,), n, dtype=INT32, device=DEVICE) for n in (context, keys))
    dense = XqaDecodePlan.allocate(batch, **kind)
    own = [BlockDecodePlan.allocate(batch, num_blocks=count, block_size=block, page_size=PAGE, **kind) for _ in lists]
    k_units, v_units, _ = unit_pages("xqa_decode", k, v, unit_size(block, PAGE), heads=True)
    rows = (batch * h_kv, 1, h_q // h_kv, DIM)

    def whole(r: int) -> None:
        ops.xqa_decode(q, k, v, wide[r], long, own[r], block_list=lists[r], out=out)

    def attend(r: int) -> None:
        plan = own[r]
        lengths, tables = plan.block_seqlens.flatten(), plan.block_tables.flatten(0, 1)
        ops.xqa_decode(q.view(rows), k_units, v_units, tables, lengths, plan.decode, out=out.view(rows))

    def dense_attend(r: int) -> None:
        ops.xqa_decode(q, k, v, narrow[r], short, dense, out=out)

    def dense_whole(r: int) -> None:
        ops.xqa_decode_plan(dense, short)
        dense_attend(r)

    ops.xqa_decode_plan(dense, short)
    for r in range(CALLS):
        whole(r)
    steps = {"dense": dense_attend, "dense_plan": dense_whole, "attend": attend, "whole": whole}
    return {name: median_us(step) for name, step in steps.items()}


def prefill_cell(pools: list, h_q: int, h_kv: int, batch: int, new: int, keys: int, block: int) -> dict[str, float]:
    k, v = (pool.view(-1, PAGE, h_kv, DIM) for pool in pools)
    count, context = keys // block, 4 * keys + new
    q = torch.randn(batch * new, h_q, DIM, device=DEVICE, dtype=BF16)
    out = torch.empty_like(q)
    kind = {"num_q_heads": h_q, "num_kv_heads": h_kv, "head_dim": DIM, "device": DEVICE}
    lists = [lists_of(batch, h_kv, count, 4 * keys // block) for _ in range(CALLS)]
    wide, narrow = ([tables_of(batch, n // PAGE) for _ in range(CALLS)] for n in (context, keys + new))
    long, short = (torch.full((batch,), n, dtype=INT32, device=DEVICE) for n in (context, keys + new))
    bounds = torch.arange(batch + 1, device=DEVICE, dtype=INT32) * new
    dense = FmhaPlan.allocate(batch * new, batch, **kind)
    own = BlockPrefillPlan.allocate(
        batch * new, batch, num_blocks=count, block_size=block, page_size=PAGE, max_seqlen_q=new, **kind
    )

    def whole(r: int) -> None:
        ops.fmha_paged(q, k, v, wide[r], long, bounds, own, block_list=lists[r], out=out)

    def dense_attend(r: int) -> None:
        ops.fmha_paged(q, k, v, narrow[r], short, bounds, dense, out=out)

    ops.fmha_plan(dense, bounds, cache_seqlens=short)
    return {name: median_us(step) for name, step in {"dense": dense_attend, "whole": whole}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so long")
    parser.add_argument("--write", action="store_true", help="results/h200-block_lists.jsonl")
    options = parser.parse_args()
    begin, rows = time.monotonic(), []
    torch.manual_seed(0)
    pools = [torch.randn(POOL_TOKENS * 8 * DIM, device=DEVICE, dtype=BF16) for _ in range(2)]
    cells = [(decode_cell, cell) for cell in DECODE] + [(prefill_cell, cell) for cell in PREFILL]
    cells = cells[:2] + cells[-3:-1] + cells[2:-3] + cells[-1:]  # what matters most comes first
    for run, cell in cells:
        if time.monotonic() - begin > options.seconds:
            break
        times = run(pools, *cell)
        case = "block lists, " + run.__name__.removesuffix("_cell")
        params = dict(zip(DECODE_NAMES if run is decode_cell else PREFILL_NAMES, cell))
        for name, us in times.items():
            peer = "attnops" if name == "whole" else f"attnops {name}"
            rows.append(records.Record(case, peer, params, us / 1e3, version=records.version_of("attnops")))
        text = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        ratio = times["whole"] / times["dense"]
        print(f"{run.__name__} {cell}: {text}  whole/dense {ratio:.3f}", flush=True)
    if options.write:
        print(records.write(rows, "h200-block_lists"))


if __name__ == "__main__":
    main()
