"""fp4_decode beside xqa_decode and mla_decode over e4m3, 64 requests of 8192 tokens, in graphs: us, and the ratio."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import records
import torch
from attnops import ops
from attnops.metadata import MlaDecodePlan, XqaDecodePlan

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def time_of(call: Callable[[], object], calls: int = 5) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[10] / calls * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--write", action="store_true", help="results/h200-fp4.jsonl")
    options = parser.parse_args()
    batch, length, page, device = options.batch, options.length, 64, "cuda"
    rows = []

    def tell(what: str, params: dict, fp8: float, fp4: float) -> None:
        print(f"{what} {batch} x {length}: e4m3 {fp8:.1f} us, fp4 {fp4:.1f} us, {fp8 / fp4:.2f}x", flush=True)
        cell = params | {"batch": batch, "seqlen": length}
        for peer, us in (("attnops", fp4), ("attnops over e4m3", fp8)):
            rows.append(records.Record("fp4_decode", peer, cell, us / 1e3, version=records.version_of("attnops")))

    for heads, kv_heads in ((32, 8), (8, 1), (64, 8)):
        count = batch * length // page
        table = torch.randperm(count, device=device).int().view(batch, -1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        q = torch.randn(batch, 1, heads, 128, device=device).to(BF16)
        shape = (count, page, kv_heads)
        codes = [torch.randint(0, 256, (*shape, 64), dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [torch.rand(*shape, 8, device=device).to(E4M3) for _ in range(2)]
        pages = [torch.randn(*shape, 128, device=device).to(E4M3) for _ in range(2)]
        plan = XqaDecodePlan.allocate(
            batch, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=128, max_seqlen_k=length, kv_dtype=E4M3,
            device=device,
        )  # fmt: skip
        ops.xqa_decode_plan(plan, lengths)
        fp8 = time_of(lambda q=q, p=pages, t=table, n=lengths, plan=plan: ops.xqa_decode(q, *p, t, n, plan))
        fp4 = time_of(lambda q=q, c=codes, s=scales, t=table, n=lengths: ops.fp4_decode(q, *c, *s, t, n))
        tell(f"{heads}/{kv_heads}", {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}, fp8, fp4)
    for heads in (16, 128):
        count = batch * length // page
        table = torch.randperm(count, device=device).int().view(batch, -1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        q = torch.randn(batch, 1, heads, 576, device=device).to(BF16)
        codes = torch.randint(0, 256, (count, page, 1, 288), dtype=torch.uint8, device=device)
        scales = torch.rand(count, page, 1, 36, device=device).to(E4M3)
        latents = torch.randn(count, page, 576, device=device).to(E4M3)
        plan = MlaDecodePlan.allocate(batch, num_q_heads=heads, device=device)
        ops.mla_decode_plan(plan, lengths)
        fp8 = time_of(
            lambda q=q, p=latents, t=table, n=lengths, plan=plan: ops.mla_decode(q, p, t, n, plan, softmax_scale=0.1)
        )
        fp4 = time_of(lambda q=q, c=codes, s=scales, t=table, n=lengths: ops.fp4_decode(q, c, None, s, None, t, n))
        tell(f"MLA {heads}", {"heads": heads, "head_dim": 576}, fp8, fp4)
    if options.write:
        print(records.write(rows, "h200-fp4"))


if __name__ == "__main__":
    main()
