"""The sparse indexer on a GPU: keys and queries in FP8, logits, selection, and a layer's calls of all of them.

Times are those of bench_paged_kv.py: a captured graph of many calls, its median over replays, by call.

    python benchmarks/bench_indexer.py --parts topk,logits,fused,prefill,keys,layer --write
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from attnops import ops
from attnops.ops.indexer import SCRATCH_BYTES
from bench_paged_kv import Bench
from records import RESULTS, write

DEVICE, HEADS, DIM, PAGE, K = "cuda", 64, 128, 64, 2048
FP8 = torch.float8_e4m3fn
DECODE = [(64, 65536), (64, 16384), (64, 4096), (1, 65536)]
PREFILL = [(8192, 8192), (8192, 65536)]
CALLS = 20


def lengths_of(count: int, length: int) -> torch.Tensor:
    return torch.full((count,), length, dtype=torch.int32, device=DEVICE)


def causal_lengths(rows: int, keys: int) -> torch.Tensor:
    """Of the last `rows` queries of a prompt."""
    return torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=DEVICE)


def random_fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(FP8)


class PagedKeys:
    """A batch's index keys in shuffled pages, and its queries."""

    def __init__(self, batch: int, length: int) -> None:
        pages = batch * length // PAGE
        self.pages = torch.empty(pages, PAGE, DIM + 4, dtype=torch.uint8, device=DEVICE)
        flat = self.pages.view(pages, -1)
        for first in range(0, pages, 4096):
            part = flat[first : first + 4096]
            part[:, : PAGE * DIM] = random_fp8(len(part), PAGE * DIM).view(torch.uint8)
            part[:, PAGE * DIM :] = torch.rand(len(part), PAGE, device=DEVICE).view(torch.uint8)
        self.table = torch.randperm(pages, device=DEVICE).int().view(batch, -1)
        self.q, self.weights = random_fp8(batch, 1, HEADS, DIM), torch.randn(batch, HEADS, device=DEVICE)
        self.lengths = lengths_of(batch, length)


class IndexerBench(Bench):
    def topk(self) -> None:
        for rows, keys in [*DECODE, (8192, 65536), (8192, 8192)]:
            logits = torch.randn(rows, keys, device=DEVICE)
            lengths = causal_lengths(rows, keys) if rows > 64 else lengths_of(rows, keys)
            out = torch.empty(rows, K, dtype=torch.int32, device=DEVICE)
            call = partial(ops.topk_select, logits, lengths, K, indices=out)
            self.cell(
                "topk_select", "attnops", {"rows": rows, "keys": keys, "k": K}, [call] * (CALLS if rows <= 64 else 3)
            )
            if rows <= 64:
                other = partial(torch.topk, logits, K, dim=1)
                self.cell("topk_select", "torch.topk", {"rows": rows, "keys": keys, "k": K}, [other] * 3)

    def logits(self) -> None:
        for batch, length in DECODE:
            keys = PagedKeys(batch, length)
            out = torch.empty(batch, length, device=DEVICE)
            call = partial(
                ops.index_logits_paged, keys.q, keys.pages, keys.table, keys.weights, keys.lengths[:, None], logits=out
            )
            size = batch * length * (DIM + 8)
            self.cell("index_logits_paged", "attnops", {"batch_size": batch, "keys": length}, [call] * CALLS, size)

    def fused(self) -> None:
        """`index_topk`, over a scratch of all rows and, for a prompt of one request, of as many as 256 MB hold."""
        for batch, length, tokens in [(*cell, 1) for cell in DECODE] + [(1, 65536, 4096)]:
            keys = PagedKeys(batch, length)
            q = random_fp8(batch, tokens, HEADS, DIM)
            weights = torch.randn(batch * tokens, HEADS, device=DEVICE)
            ends = keys.lengths[:, None] - torch.arange(tokens - 1, -1, -1, dtype=torch.int32, device=DEVICE)
            chosen = torch.empty(batch * tokens, K, dtype=torch.int32, device=DEVICE)
            scratch = torch.empty(min(batch * tokens, SCRATCH_BYTES // (4 * length)), length, device=DEVICE)
            call = partial(ops.index_topk, q, keys.pages, keys.table, weights, ends, K, indices=chosen, scratch=scratch)
            params = {"batch_size": batch, "keys": length, "tokens": tokens, "k": K}
            self.cell("index_topk", "attnops", params, [call] * (CALLS if tokens == 1 else 1))

    def prefill(self) -> None:
        for rows, count in PREFILL:
            q, weights = random_fp8(rows, HEADS, DIM), torch.randn(rows, HEADS, device=DEVICE)
            k, scale = random_fp8(count, DIM), torch.rand(count, device=DEVICE)
            start, end = lengths_of(rows, 0), causal_lengths(rows, count)
            out = torch.empty(rows, count, device=DEVICE)
            call = partial(ops.index_logits, q, k, scale, weights, start, end, logits=out)
            params = {"rows": rows, "keys": count, "heads": HEADS}
            self.cell("index_logits", "attnops", params, [call] * 3)
            chosen = torch.empty(rows, K, dtype=torch.int32, device=DEVICE)
            select = partial(ops.topk_select, out, end, K, indices=chosen)
            self.cell("logits and selection", "attnops", params, [lambda c=call, s=select: (c(), s())] * 3)

    def keys(self) -> None:
        for tokens in (1, 64, 8192):
            pages = torch.zeros(8192 // PAGE + 1, PAGE, DIM + 4, dtype=torch.uint8, device=DEVICE)
            k = torch.randn(tokens, DIM, device=DEVICE).bfloat16()
            q, weights = (
                torch.randn(tokens, HEADS, DIM, device=DEVICE).bfloat16(),
                torch.randn(tokens, HEADS, device=DEVICE),
            )
            store = partial(ops.store_index_k, pages, k, torch.arange(tokens, device=DEVICE))
            self.cell("store_index_k", "attnops", {"tokens": tokens}, [store] * CALLS)
            out, folded = torch.empty_like(q, dtype=FP8), torch.empty_like(weights)
            quantize = partial(ops.quantize_index_q, q, weights, scale=0.01, q_fp8=out, weights_out=folded)
            self.cell("quantize_index_q", "attnops", {"tokens": tokens, "heads": HEADS}, [quantize] * CALLS)

    def layer(self) -> None:
        """What a layer does before attention: store, quantize, logits, selection."""
        for batch, length in ((1, 65536), (64, 65536)):
            keys = PagedKeys(batch, length)
            k, q = (torch.randn(batch, *shape, device=DEVICE).bfloat16() for shape in ((DIM,), (HEADS, DIM)))
            slots = (keys.table[:, -1].long() + 1) * PAGE - 1
            logits, chosen = (
                torch.empty(batch, length, device=DEVICE),
                torch.empty(batch, K, dtype=torch.int32, device=DEVICE),
            )
            folded = torch.empty_like(keys.weights)

            def call(keys=keys, k=k, q=q, slots=slots, logits=logits, chosen=chosen, folded=folded) -> None:
                ops.store_index_k(keys.pages, k, slots)
                ops.quantize_index_q(q, keys.weights, scale=0.01, q_fp8=keys.q.squeeze(1), weights_out=folded)
                ops.index_logits_paged(keys.q, keys.pages, keys.table, folded, keys.lengths[:, None], logits=logits)
                ops.topk_select(logits, keys.lengths, K, page_table=keys.table, page_size=PAGE, indices=chosen)

            self.cell("a layer's indexer", "attnops", {"batch_size": batch, "keys": length}, [call] * 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one replay of each cell")
    parser.add_argument("--parts", default="topk,logits,fused,prefill,keys,layer", help="what to measure")
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    bench = IndexerBench(rounds=1 if options.smoke else 15)
    for part in options.parts.split(","):
        getattr(bench, part)()
        torch.cuda.empty_cache()
    if options.write:
        write(bench.records, "h200-indexer", Path(options.out))


if __name__ == "__main__":
    main()
