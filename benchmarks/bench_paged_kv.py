"""merge_state, the paged_kv ops and the planners on a GPU: rates beside a plain copy, and time in a captured graph.

Every cell is one CUDA graph that runs the op several times over different buffers (together far above the L2), replayed
and timed with events: the median of several replays, divided by the launches in it. `--smoke` runs each cell once.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from attnops import ops
from records import RESULTS, Record, write

DEVICE = "cuda"
BF16, FP8, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32


def graph_ms(calls: list, rounds: int) -> float:
    """Median time of one call, all of them captured in one graph, one after the other."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


class Bench:
    def __init__(self, rounds: int):
        self.rounds = rounds
        self.records: list[Record] = []
        self.copy_gbs = 0.0
        self.fair: dict[int, float] = {}  # by bytes read and written

    def cell(
        self, case: str, peer: str, params: dict, calls: list, num_bytes: int | None = None, note: str = ""
    ) -> float:
        ms = graph_ms(calls, self.rounds)
        gbs = None if num_bytes is None else num_bytes / ms / 1e6
        if gbs and self.copy_gbs and case != "copy":
            rates = f"{gbs / self.copy_gbs:.1%} of the copy bandwidth of this run"
            rates += f", {gbs / self.fair_copy(num_bytes):.1%} of a copy of as many bytes"
            note = rates + (f"; {note}" if note else "")
        version = torch.__version__ if peer == "torch" else ""
        self.records.append(Record(case, peer, params, ms=ms, gbs=gbs, version=version, note=note))
        rate = "" if gbs is None else f"{gbs:8.0f} GB/s  {note}"
        print(f"{case:18s} {peer:8s} {ms * 1e3:9.2f} us {rate}  {params}", flush=True)
        return gbs or 0.0

    def copies(self, num_bytes: int, pairs_in_turn: int) -> float:
        """GB/s of the faster of two plain copies of so many bytes, rounded up to what a tensor of floats holds."""
        best, words = 0.0, -(-num_bytes // 4)
        pairs = [torch.randn(2, words, device=DEVICE).unbind(0) for _ in range(pairs_in_turn)]
        for how in ("memcpy", "kernel"):
            calls = [
                partial(target.copy_, source) if how == "memcpy" else partial(torch.neg, source, out=target)
                for source, target in pairs
            ]
            for _ in range(3):
                calls[0]()
            best = max(best, self.cell("copy", "torch", {"bytes": num_bytes, "how": how}, calls, 2 * num_bytes))
        return best

    def fair_copy(self, num_bytes: int) -> float:
        """GB/s of a plain copy that reads and writes as many bytes together."""
        if num_bytes not in self.fair:
            self.fair[num_bytes] = self.copies(num_bytes // 2, 8)
        return self.fair[num_bytes]

    def copy(self) -> None:
        """The ceiling: large plain copies."""
        self.copy_gbs = self.copies(2**31, 2)
        self.copies(2**27, 3)

    def merge(self, num_tokens=8192, num_heads=32, head_dim=128) -> None:
        shape = (num_tokens, num_heads, head_dim)
        params = {"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": head_dim, "dtype": "bfloat16"}
        for states in (2, 4):
            calls = []
            for _ in range(3):
                outs = torch.randn(states, *shape, device=DEVICE).to(BF16)
                lses = torch.randn(states, num_tokens, num_heads, device=DEVICE)
                out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
                if states == 2:
                    args = (outs[0], lses[0], outs[1], lses[1])
                    calls.append(lambda args=args, out=out, lse=lse: ops.merge_state(*args, out=out, lse=lse))
                else:
                    args = (outs, lses)
                    calls.append(lambda args=args, out=out, lse=lse: ops.merge_states(*args, out=out, lse=lse))
            num_bytes = outs.nbytes + lses.nbytes + out.nbytes + lse.nbytes
            self.cell("merge_state", "attnops", {**params, "num_states": states}, calls, num_bytes)

    def store_kv(self) -> None:
        cells = [(n, h, p, d) for n in (64, 8192) for h, p in ((8, 64), (8, 1), (1, 64), (32, 64)) for d in (BF16, FP8)]
        for num_tokens, num_heads, page_size, dtype in cells:
            num_slots = 2**28 // (num_heads * 128 * dtype.itemsize)  # 256 MiB for K, as much for V
            shape = (num_slots // page_size, page_size, num_heads, 128)
            pools = [torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(2)]
            scale = torch.tensor([0.05], device=DEVICE) if dtype == FP8 else None

            def ours(k, v, slots, pools=pools, scale=scale):
                ops.store_kv(*pools, k, v, slots, k_scale=scale, v_scale=scale)

            def plain(k, v, slots, pools=pools, scale=scale):
                for pool, rows in zip(pools, (k, v), strict=True):
                    if scale is not None:
                        rows = (rows.float() / scale).clamp(-448, 448).to(FP8)
                    pool.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, rows.view(torch.uint8))

            calls, peers = [], []
            for _ in range(8):
                k, v = torch.randn(2, num_tokens, num_heads, 128, device=DEVICE).to(BF16)
                slots = torch.randperm(num_slots, device=DEVICE)[:num_tokens]
                calls.append(partial(ours, k, v, slots))
                peers.append(partial(plain, k, v, slots))
            params = {"num_tokens": num_tokens, "num_kv_heads": num_heads, "head_dim": 128, "page_size": page_size}
            params["kv_dtype"] = str(dtype).removeprefix("torch.")
            num_bytes = 2 * num_tokens * num_heads * 128 * (2 + dtype.itemsize)
            self.cell("store_kv", "attnops", params, calls, num_bytes)
            self.cell("store_kv", "torch", params, peers, num_bytes, "index_copy_, one a pool")

    def store_mla_kv(self, page_size=64) -> None:
        for num_tokens in (64, 8192):
            for name, dim, dtype in (
                ("bfloat16", 576, BF16),
                ("float8_e4m3fn", 576, FP8),
                ("fp8 rows", 656, torch.uint8),
            ):
                pool = torch.empty(2**29 // (page_size * 1152), page_size, dim, dtype=dtype, device=DEVICE)
                scale = torch.tensor([0.05], device=DEVICE) if dtype == FP8 else None
                calls = []
                for _ in range(16):
                    latent = torch.randn(num_tokens, 512, device=DEVICE).to(BF16)
                    k_pe = torch.randn(num_tokens, 64, device=DEVICE).to(BF16)
                    slots = torch.randperm(pool.shape[0] * page_size, device=DEVICE)[:num_tokens]
                    args = (pool, latent, slots)
                    calls.append(
                        lambda args=args, k_pe=k_pe, scale=scale: ops.store_mla_kv(*args, k_pe=k_pe, kv_scale=scale)
                    )
                params = {"num_tokens": num_tokens, "page_size": page_size, "kv_dtype": name}
                num_bytes = num_tokens * (1152 + dim * dtype.itemsize)
                self.cell("store_mla_kv", "attnops", params, calls, num_bytes)

    def tables(self, max_context=32_768, length=8192) -> None:
        for batch_size in (1, 64, 256):
            for page_size in (64, 1):
                req_to_token = torch.randint(0, 2**20, (batch_size, max_context), dtype=I32, device=DEVICE)
                rows = torch.randperm(batch_size, device=DEVICE)
                lengths = torch.full((batch_size,), length, dtype=I32, device=DEVICE)
                table = torch.zeros(batch_size, max_context // page_size, dtype=I32, device=DEVICE)
                kv_indptr = torch.zeros(batch_size + 1, dtype=I32, device=DEVICE)
                last, cells = torch.zeros_like(lengths), table.flatten().clone()
                args = (req_to_token, rows, lengths, page_size)
                params = {
                    "batch_size": batch_size,
                    "length": length,
                    "page_size": page_size,
                    "max_context": max_context,
                }

                def by_table(args=args, table=table):
                    ops.build_page_table(*args, page_table=table)

                def by_csr(args=args, kv_indptr=kv_indptr, cells=cells, last=last):
                    ops.build_kv_indices(*args, kv_indptr=kv_indptr, kv_indices=cells, kv_last_page_len=last)

                def plain(args=args, table=table):
                    torch.div(args[0][args[1]][:, :: args[3]], args[3], rounding_mode="floor", out=table)

                self.cell("build_page_table", "attnops", params, [by_table] * 20)
                self.cell("build_page_table", "torch", params, [plain] * 20, note="of the whole max_context")
                self.cell("build_kv_indices", "attnops", params, [by_csr] * 20)
        for batch_size in (1, 64, 4096):
            lengths = torch.randint(0, 99, (batch_size,), dtype=I32, device=DEVICE)
            cu_seqlens = torch.zeros(batch_size + 1, dtype=I32, device=DEVICE)
            call = [lambda a=lengths, b=cu_seqlens: ops.build_cu_seqlens(a, cu_seqlens=b)] * 20
            self.cell("build_cu_seqlens", "attnops", {"batch_size": batch_size}, call)

    def plans(self, num_sm_parts=132) -> None:
        namespace = torch.ops.attnops
        for batch_size in (1, 64, 256, 4096):
            lengths = torch.randint(256, 16_384, (batch_size,), dtype=I32, device=DEVICE)
            metadata = torch.zeros(num_sm_parts, 8, dtype=I32, device=DEVICE)
            num_splits = torch.zeros(batch_size + 1, dtype=I32, device=DEVICE)
            for op, heads in ((namespace.xqa_decode_plan, 8), (namespace.mla_decode_plan, 128)):
                for fixed in (0, 4096):
                    args = (metadata, num_splits, lengths, 1, heads, -1, fixed)
                    params = {"batch_size": batch_size, "num_sm_parts": num_sm_parts, "fixed_split_tokens": fixed}
                    self.cell(op.__name__.split(".")[0], "attnops", params, [lambda op=op, a=args: op(*a)] * 20)
        if not hasattr(namespace, "fmha_plan") or not torch._C._dispatch_has_kernel_for_dispatch_key(
            "attnops::fmha_plan", "CUDA"
        ):
            return
        for batch_size, length in ((1, 8192), (64, 512), (256, 64), (4096, 1)):
            bounds = torch.arange(batch_size + 1, dtype=I32, device=DEVICE) * length
            order = torch.zeros(batch_size * -(-length // 128), 2, dtype=I32, device=DEVICE)
            call = [lambda o=order, b=bounds: namespace.fmha_plan(o, b, b, None, 128)] * 20
            self.cell("fmha_plan", "attnops", {"batch_size": batch_size, "seqlen": length, "tile_q": 128}, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one replay of each cell")
    parser.add_argument("--parts", default="merge,store_kv,store_mla_kv,tables,plans", help="what to measure")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    bench = Bench(rounds=1 if options.smoke else 15)
    for part in ["copy", *options.parts.split(",")]:
        getattr(bench, part)()
        torch.cuda.empty_cache()
    if not options.smoke:
        write(bench.records, "h200-paged_kv", Path(options.out))


if __name__ == "__main__":
    main()
