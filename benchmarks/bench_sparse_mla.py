"""Sparse MLA on a GPU: decode and prefill over lists of rows, alternately with FlashMLA where it is installed.

    python benchmarks/bench_sparse_mla.py [--peer]

Lists are 2048 of 16384 rows a request, at random. Calls rotate over some sets of queries and lists, in one CUDA graph.
Times are the best and the mean of its replays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from attnops import ops, reference
from attnops.metadata import SparseMlaPlan
from torch import Tensor

TOPK, CONTEXT, REQUESTS, PAGE = 2048, 16384, 64, 64
SCALE, SETS, REPLAYS = 0.04, 3, 20
DECODE = [(heads, batch) for heads in (128, 64, 16, 8) for batch in (1, 16, 64, 128)]


def timed(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """Microseconds of a call: best and mean."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return min(times), sum(times) / len(times)


def make_pool(kind: str) -> Tensor:
    """``[P, 64, row]`` of all requests' rows: "fp8", 656 bytes, or "bf16"."""
    pages = REQUESTS * CONTEXT // PAGE
    if kind == "bf16":
        return torch.randn(pages, PAGE, 576, device="cuda", dtype=torch.bfloat16) * 0.3
    part = reference.pack_mla_fp8_rows(torch.randn(4096, 576, device="cuda") * 0.3)
    return part.repeat(pages * PAGE // len(part), 1).view(pages, PAGE, 656)


def lists_of(batch: int, tokens: int, rows: int) -> Tensor:
    """int32 ``[batch, tokens, 2048]``, ascending rows of each request."""
    chosen = [torch.randperm(rows, device="cuda")[:TOPK].sort()[0] for _ in range(batch * tokens)]
    first = torch.arange(batch, device="cuda") % (REQUESTS * CONTEXT // rows) * rows
    return (torch.stack(chosen).view(batch, tokens, TOPK) + first.view(batch, 1, 1)).int()


def decode(pool: Tensor, heads: int, batch: int, peer: bool, tokens: int = 1) -> str:
    ours: list[Callable[[], object]] = []
    theirs: list[Callable[[], object]] = []
    for _ in range(SETS):
        q = torch.randn(batch, tokens, heads, 576, device="cuda", dtype=torch.bfloat16) * 0.2
        indices = lists_of(batch, tokens, CONTEXT)
        plan = SparseMlaPlan.allocate(batch, num_q_heads=heads, topk=TOPK, seqlen_q=tokens, device="cuda")
        ops.sparse_mla_plan(plan)
        out = q.new_empty(batch, tokens, heads, 512)

        def call(q: Tensor = q, indices: Tensor = indices, plan: SparseMlaPlan = plan, out: Tensor = out) -> object:
            return ops.sparse_mla_decode(q, pool, indices, plan, softmax_scale=SCALE, out=out)

        ours.append(call)
        if peer and pool.dtype == torch.uint8 and heads >= 64:
            theirs.append(peer_decode(q, pool, indices))
    text = "{:.1f} / {:.1f}".format(*timed(ours))
    return text + ("   FlashMLA {:.1f} / {:.1f}".format(*timed(theirs)) if theirs else "")


def peer_decode(q: Tensor, pool: Tensor, indices: Tensor) -> Callable[[], object]:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    schedule, _ = get_mla_metadata()
    pages = pool.view(torch.float8_e4m3fn).unsqueeze(2)
    options = {"softmax_scale": SCALE, "is_fp8_kvcache": True, "indices": indices}
    return lambda: flash_mla_with_kvcache(q, pages, None, None, 512, schedule, **options)


def prefill(pool: Tensor, heads: int, peer: bool, tokens: int = 4096, rows: int = 8192) -> str:
    q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16) * 0.2
    indices = torch.stack([torch.randperm(rows, device="cuda")[:TOPK] for _ in range(tokens)]).int()
    out = q.new_empty(tokens, heads, 512)
    best, _ = timed([lambda: ops.sparse_mla_prefill(q, pool, indices, softmax_scale=SCALE, out=out)])
    text = f"{best / 1e3:.2f} ms, {tokens * TOPK * heads * 2 * 1088 / best / 1e6:.0f} TFLOP/s"
    if peer and pool.dtype == torch.bfloat16 and heads >= 64:
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd

        kv = pool.view(-1, 1, 576)[:rows]
        best, _ = timed([lambda: flash_mla_sparse_fwd(q, kv, indices.unsqueeze(1), SCALE)])
        text += f"   FlashMLA {best / 1e3:.2f} ms"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true", help="time FlashMLA of sgl_kernel, too")
    peer = parser.parse_args().peer
    for kind in ("fp8", "bf16"):
        pool = make_pool(kind)
        for heads, batch in DECODE:
            print(f"{kind} rows, {heads} heads x {batch}: {decode(pool, heads, batch, peer)} us", flush=True)
        for heads in (128, 64, 16):
            print(f"{kind} rows, prefill 4096 x 8192, {heads} heads: {prefill(pool, heads, peer)}", flush=True)


if __name__ == "__main__":
    main()
