"""Lists of blocks on a GPU, beside dense attention over as many keys: decode and prefill.

A time is the median over replays of a CUDA graph that holds calls over several lists and page tables of a pool far
larger than the L2 cache, over their number. Dense calls have the same heads, and as many keys for each KV head.

Decode's columns `sinks` and `window` are the whole call with sinks, and with a window that holds all keys.

Prefill's columns: `attend` is the launch of attention over all KV heads, whose tables, plan and copy of q are made;
`by_head` is the whole call with a launch for each KV head (a scale of v of 1 for each of them asks for it).

Also: the scores of labels, and a layer of double sparsity beside the same layer that attends densely.

    python benchmarks/bench_block_lists.py --seconds 40 [--write]
    python benchmarks/bench_block_lists.py --dry    small cells, a call each, on a CPU too
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import records
import torch
from attnops import ops
from attnops.backends import DoubleSparseAttnBackend
from attnops.layers import RadixAttention
from attnops.metadata import BlockDecodePlan, BlockPrefillPlan, FmhaPlan, XqaDecodePlan
from attnops.metadata.block_plan import unit_size
from attnops.ops.block_lists import unit_pages
from attnops.pools import DoubleSparseTokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

BF16, INT32, DEVICE = torch.bfloat16, torch.int32, "cuda" if torch.cuda.is_available() else "cpu"
PAGE, DIM, CALLS, REPLAYS = 64, 128, 8, 12
POOL_TOKENS = 1 << 19
DECODE_NAMES = ("num_q_heads", "num_kv_heads", "batch", "list_keys", "block")
PREFILL_NAMES = ("num_q_heads", "num_kv_heads", "batch", "new", "list_keys", "block")
DECODE = [  # by DECODE_NAMES
    (32, 8, batch, keys, block)
    for batch in (64, 16, 1)
    for keys, block in [(4096, 64), (2048, 1), (4096, 128), (4096, 16)]
] + [(64, 4, 64, 2048, 128), (64, 4, 16, 2048, 128), (32, 8, 128, 1024, 64), (16, 1, 64, 4096, 64)]
PREFILL = [  # by PREFILL_NAMES
    (64, 4, 1, 4096, 2048, 128),
    (32, 8, 1, 2048, 4096, 64),
    (32, 8, 8, 64, 4096, 64),
    (32, 8, 4, 512, 2048, 16),
    (32, 8, 4, 512, 2048, 1),
]
SCORE_NAMES = ("num_q_heads", "num_kv_heads", "batch", "context", "channels")
SCORES = [(32, 8, 64, 16384, 32), (32, 8, 16, 65536, 32), (32, 8, 1, 65536, 32), (64, 4, 64, 16384, 16)]
LAYER_NAMES = ("num_q_heads", "num_kv_heads", "batch", "context", "heavy_tokens")
LAYERS = [(32, 8, 64, 16384, 256), (32, 8, 16, 65536, 1024), (32, 8, 1, 65536, 256)]


def median_us(step: Callable[[int], object]) -> float:
    """Of one call, in a graph of `CALLS` of them."""
    for r in range(min(2, CALLS)):
        step(r)
    if DEVICE == "cpu":
        since = time.perf_counter()
        step(0)
        return 1e6 * (time.perf_counter() - since)
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
    listed = {"num_blocks": count, "block_size": block, "page_size": PAGE}
    own = [BlockDecodePlan.allocate(batch, **listed, **kind) for _ in lists]
    windowed = BlockDecodePlan.allocate(batch, **listed, **kind, window_left=context)
    sinks = torch.zeros(h_q, device=DEVICE)
    k_units, v_units, _ = unit_pages("xqa_decode", k, v, unit_size(block, PAGE), heads=True)
    rows = (batch * h_kv, 1, h_q // h_kv, DIM)

    def whole(r: int) -> None:
        ops.xqa_decode(q, k, v, wide[r], long, own[r], block_list=lists[r], out=out)

    def with_sinks(r: int) -> None:
        ops.xqa_decode(q, k, v, wide[r], long, own[r], block_list=lists[r], out=out, sinks=sinks)

    def with_window(r: int) -> None:
        rule = {"window_left": context, "block_list": lists[r]}
        ops.xqa_decode(q, k, v, wide[r], long, windowed, out=out, **rule)

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
    steps |= {"sinks": with_sinks, "window": with_window}
    return {name: median_us(step) for name, step in steps.items()}


def prefill_cell(pools: list, h_q: int, h_kv: int, batch: int, new: int, keys: int, block: int) -> dict[str, float]:
    k, v = (pool.view(-1, PAGE, h_kv, DIM) for pool in pools)
    count, context = keys // block, 4 * keys + new
    q = torch.randn(batch * new, h_q, DIM, device=DEVICE, dtype=BF16)
    out = torch.empty_like(q)
    kind = {"num_q_heads": h_q, "num_kv_heads": h_kv, "head_dim": DIM, "device": DEVICE}
    lists = [lists_of(batch, h_kv, count, 4 * keys // block) for _ in range(CALLS)]
    wide, narrow = ([tables_of(batch, -(-n // PAGE)) for _ in range(CALLS)] for n in (context, keys + new))
    long, short = (torch.full((batch,), n, dtype=INT32, device=DEVICE) for n in (context, keys + new))
    bounds = torch.arange(batch + 1, device=DEVICE, dtype=INT32) * new
    dense = FmhaPlan.allocate(batch * new, batch, **kind)
    listed = {"num_blocks": count, "block_size": block, "page_size": PAGE, "max_seqlen_q": new}
    own = [BlockPrefillPlan.allocate(batch * new, batch, **listed, **kind) for _ in lists]
    k_units, v_units, _ = unit_pages("fmha_paged", k, v, unit_size(block, PAGE), heads=True)
    by_head_scale = torch.ones(h_kv, device=DEVICE)

    def whole(r: int, scale: torch.Tensor | None = None) -> None:
        ops.fmha_paged(q, k, v, wide[r], long, bounds, own[r], block_list=lists[r], out=out, v_scale=scale)

    def attend(r: int) -> None:
        tables, lengths, starts = own[r].requests(batch)
        rows, results = (own[r].by_head(q, scratch) for scratch in (own[r].q_by_head, own[r].out_by_head))
        ops.fmha_paged(
            rows.flatten(0, 1),
            k_units,
            v_units,
            tables.flatten(0, 1),
            lengths.flatten(),
            starts,
            own[r].fmha_of(h_kv * batch * new, lengths.numel()),
            out=results.flatten(0, 1),
        )

    def dense_attend(r: int) -> None:
        ops.fmha_paged(q, k, v, narrow[r], short, bounds, dense, out=out)

    def dense_whole(r: int) -> None:
        ops.fmha_plan(dense, bounds, cache_seqlens=short)
        dense_attend(r)

    ops.fmha_plan(dense, bounds, cache_seqlens=short)
    for r in range(CALLS):
        whole(r)
    steps = {"dense": dense_attend, "dense_plan": dense_whole, "attend": attend, "whole": whole}
    times = {name: median_us(step) for name, step in steps.items()}
    return times | {"by_head": median_us(lambda r: whole(r, by_head_scale))}


def scores_cell(pools: list, h_q: int, h_kv: int, batch: int, context: int, channels: int) -> dict[str, float]:
    """`label_scores`, and beside it a sum over all labels, which reads as many bytes."""
    pages = batch * context // PAGE
    labels = torch.randn(pages, PAGE, h_kv, channels, device=DEVICE, dtype=BF16)
    q = [torch.randn(batch, h_q, channels, device=DEVICE, dtype=BF16) for _ in range(CALLS)]
    table = torch.randperm(pages, device=DEVICE).to(INT32).view(batch, -1)
    lengths = torch.full((batch,), context, dtype=INT32, device=DEVICE)
    scores = torch.empty(batch, h_kv, context, device=DEVICE)
    total = torch.empty((), device=DEVICE)
    return {
        "sum": median_us(lambda r: torch.sum(labels, (0, 1, 2, 3), dtype=torch.float32, out=total)),
        "whole": median_us(lambda r: ops.label_scores(scores, q[r], labels, table, lengths)),
    }


def layer_cell(pools: list, h_q: int, h_kv: int, batch: int, context: int, heavy_tokens: int) -> dict[str, float]:
    """A decoded token's layer: stores, and by a threshold selects or attends to everything."""
    spec = AttentionSpec(num_q_heads=h_q, num_kv_heads=h_kv, head_dim=DIM, page_size=PAGE)
    limits = Limits(max_batch_size=batch, max_seqlen=context)
    pool = DoubleSparseTokenToKVPool(batch * context, PAGE, BF16, h_kv, DIM, 1, DEVICE)
    for buffer in pool.all_buffers()[0]:
        buffer.normal_()
    table = torch.randperm(batch * context // PAGE, device=DEVICE).view(batch, -1, 1) * PAGE
    slots = (table + torch.arange(PAGE, device=DEVICE)).view(batch, context)
    step = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.arange(batch, device=DEVICE),
        cache_seqlens=torch.full((batch,), context, dtype=INT32, device=DEVICE),
        num_tokens=batch,
        req_to_token=slots.to(INT32),
        out_cache_loc=slots[:, -1].contiguous(),
        token_to_kv_pool=pool,
    )
    layer = RadixAttention(h_q, DIM, DIM**-0.5, h_kv, layer_id=0)
    q = [torch.randn(batch, h_q * DIM, device=DEVICE, dtype=BF16) for _ in range(CALLS)]
    k, v = (torch.randn(batch, h_kv * DIM, device=DEVICE, dtype=BF16) for _ in range(2))
    channels = [torch.arange(DIM).expand(h_kv, -1)]
    times = {}
    for name, threshold in (("dense", context + 1), ("whole", 0)):
        backend = DoubleSparseAttnBackend(
            spec,
            limits,
            DEVICE,
            sorted_channels=channels,
            ds_heavy_token_num=heavy_tokens,
            ds_sparse_decode_threshold=threshold,
        )
        backend.init_forward_metadata(step)
        times[name] = median_us(lambda r, backend=backend: backend.forward(q[r], k, v, layer, step))
    return times


SMALL = {
    "POOL_TOKENS": 1 << 12,
    "CALLS": 1,
    "DECODE": [(8, 2, 2, 256, 64), (8, 2, 1, 128, 1)],
    "PREFILL": [(8, 2, 1, 64, 256, 64), (8, 2, 2, 7, 128, 1)],
    "SCORES": [(8, 2, 2, 512, 32)],
    "LAYERS": [(8, 2, 2, 512, 64)],
}
NAMES = {
    "decode_cell": DECODE_NAMES,
    "prefill_cell": PREFILL_NAMES,
    "scores_cell": SCORE_NAMES,
    "layer_cell": LAYER_NAMES,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so long")
    parser.add_argument("--write", action="store_true", help="results/h200-block_lists.jsonl")
    parser.add_argument("--dry", action="store_true", help="small cells, a call each")
    options = parser.parse_args()
    if options.dry:
        globals().update(SMALL)
    begin, rows = time.monotonic(), []
    torch.manual_seed(0)
    pools = [torch.randn(POOL_TOKENS * 8 * DIM, device=DEVICE, dtype=BF16) for _ in range(2)]
    cells = [(decode_cell, cell) for cell in DECODE] + [(prefill_cell, cell) for cell in PREFILL]
    more = [(scores_cell, cell) for cell in SCORES] + [(layer_cell, cell) for cell in LAYERS]
    few, prefill = cells[:2], cells[len(DECODE) :]
    cells = few + prefill[:3] + more + prefill[3:] + cells[2 : len(DECODE)]  # what matters most comes first
    for run, cell in cells:
        if time.monotonic() - begin > options.seconds:
            break
        times = run(pools, *cell)
        case = "block lists, " + run.__name__.removesuffix("_cell")
        params = dict(zip(NAMES[run.__name__], cell))
        for name, us in times.items():
            peer = "attnops" if name == "whole" else "torch, sum" if name == "sum" else f"attnops {name}"
            rows.append(records.Record(case, peer, params, us / 1e3, version=records.version_of(peer)))
        text = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        beside = next(iter(times))
        ratio = times["whole"] / times[beside]
        print(f"{run.__name__} {cell}: {text}  whole/{beside} {ratio:.3f}", flush=True)
    if options.write and not options.dry:
        print(records.write(rows, "h200-block_lists"))


if __name__ == "__main__":
    main()
