"""fp4_decode beside xqa_decode and mla_decode over e4m3, 64 requests of 8192 tokens, in graphs replayed in turns.

python benchmarks/bench_fp4.py --write    # rows are written after each cell; one that fails is named at the end
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from attnops import ops
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from records import RESULTS
from turns import Contender, Turns

DEVICE, BF16, E4M3 = "cuda", torch.bfloat16, torch.float8_e4m3fn
PAGE, CALLS = 64, 5
HEADS = ((32, 8), (8, 1), (64, 8))
MLA_HEADS = (16, 128)
BARS = {"32/8 heads": 1.3, "MLA, 16 heads": 1.1}  # e4m3's time over that of four bits


class Fp4Bench(Turns):
    def compare(self, what: str, params: dict, shape: tuple[int, int], fp8, fp4) -> None:
        params = params | {"batch": shape[0], "seqlen": shape[1]}
        times = self.cell(
            "fp4_decode",
            Contender("attnops over e4m3", params, [fp8] * CALLS),
            Contender("attnops", params, [fp4] * CALLS),
        )
        ratio = times[0] / times[1]
        if what in BARS:
            self.bar(f"e4m3 / fp4, {what}", ratio, BARS[what], at_least=True)
        else:
            print(f"{'':18s} e4m3 / fp4, {what}: {ratio:.3f}", flush=True)

    def tables(self, batch: int, length: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Pages, their table and the lengths."""
        count = batch * -(-length // PAGE)
        table = torch.randperm(count, device=DEVICE).int().view(batch, -1)
        return count, table, torch.full((batch,), length, dtype=torch.int32, device=DEVICE)

    def mha(self, heads: int, kv_heads: int, batch: int, length: int) -> None:
        count, table, lengths = self.tables(batch, length)
        q = torch.randn(batch, 1, heads, 128, device=DEVICE).to(BF16)
        shape = (count, PAGE, kv_heads)
        codes = [torch.randint(0, 256, (*shape, 64), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        scales = [torch.rand(*shape, 8, device=DEVICE).to(E4M3) for _ in range(2)]
        pages = [torch.randn(*shape, 128, device=DEVICE).to(E4M3) for _ in range(2)]
        sizes = {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128}
        plan = XqaDecodePlan.allocate(batch, **sizes, max_seqlen_k=length, kv_dtype=E4M3, device=DEVICE)
        ops.xqa_decode_plan(plan, lengths)
        self.compare(
            f"{heads}/{kv_heads} heads",
            sizes,
            (batch, length),
            lambda: ops.xqa_decode(q, *pages, table, lengths, plan),
            lambda: ops.fp4_decode(q, *codes, *scales, table, lengths),
        )

    def mla(self, heads: int, batch: int, length: int) -> None:
        count, table, lengths = self.tables(batch, length)
        q = torch.randn(batch, 1, heads, 576, device=DEVICE).to(BF16)
        codes = torch.randint(0, 256, (count, PAGE, 1, 288), dtype=torch.uint8, device=DEVICE)
        scales = torch.rand(count, PAGE, 1, 36, device=DEVICE).to(E4M3)
        latents = torch.randn(count, PAGE, 576, device=DEVICE).to(E4M3)
        plan = MlaDecodePlan.allocate(batch, num_q_heads=heads, device=DEVICE)
        ops.mla_decode_plan(plan, lengths)
        self.compare(
            f"MLA, {heads} heads",
            {"heads": heads, "head_dim": 576},
            (batch, length),
            lambda: ops.mla_decode(q, latents, table, lengths, plan, softmax_scale=0.1),
            lambda: ops.fp4_decode(q, codes, None, scales, None, table, lengths),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--smoke", action="store_true", help="one replay of each cell")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no cell later than this")
    parser.add_argument("--write", action="store_true", help="results/h200-fp4.jsonl, after each cell")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    folder = Path(options.out) if options.write else None
    bench = Fp4Bench("h200-fp4", 1 if options.smoke else 20, folder, options.seconds)
    size = (options.batch, options.length)
    for heads in HEADS:
        bench.part(f"{heads[0]}/{heads[1]} heads", lambda heads=heads: bench.mha(*heads, *size))
    for count in MLA_HEADS:
        bench.part(f"MLA, {count} heads", lambda count=count: bench.mla(count, *size))
    return bench.end([f"e4m3 / fp4, {what}" for what in BARS])


if __name__ == "__main__":
    raise SystemExit(main())
