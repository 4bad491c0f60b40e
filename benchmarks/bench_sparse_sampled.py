"""Sparse MLA of random shapes on a GPU, beside the best peer: figures over a law, not over chosen cells.

    python benchmarks/bench_sparse_sampled.py --seed 1 --cells 30 [--sets rows656,rows584,rows576] [--seconds 60]

A seed draws cells by the law below. FlashMLA gets heads padded to 64 or 128, lists padded to a multiple of 64 by -1,
and pages of 64. A cell's figure is the best peer's time over attnops', plans and schedules made before. A cell that no
peer runs is judged against its roofline: 1.15x of it, or 8 us more, whichever is longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from attnops import ops
from attnops.metadata import SparseMlaPlan
from bench_sparse_mla import BF16, SCALE, Call, SparseBench, captured, lists_of, milliseconds, paged_rows
from records import Record, write
from sampled_cells import BF16_FLOPS, READ_BYTES, THIRDS
from torch import Tensor

LAW = """a third of the cells each with a roofline time below 10 us, of 10 to 100 us, above 100 us;
heads: half of the cells 128, 64, 32, 16 or 8, half 1..128; batch log-uniform 1..1024;
one query token, or in a third of the cells 2 to 8; k: half of the cells 2048, 1024 or 512, half log-uniform 64..2048;
rows of 584 bytes have a window of 128 and k entries, a quarter of these cells 2048 to 8192;
lists of half of the cells are full, those of the others uniform 1..k; ascending, at random, of 16384 rows a request;
pages: half of 64, else 1..256; of rows of 584 bytes 64"""

WIDTHS = {"rows656": 656, "rows584": 584, "rows576": 1152}  # bytes of a row
KINDS = {"rows656": "fp8", "rows584": "v4", "rows576": "bf16"}
POOL_ROWS, CONTEXT, WINDOW, MOST_LISTED = 2**20, 16384, 128, 2**23
TOLERANCE, CALLS = 0.02, 3


@dataclasses.dataclass(frozen=True)
class Cell:
    rows: str
    heads: int
    batch: int
    tokens: int
    k: int  # of rows of 584 bytes: of the list of entries
    page_size: int
    full: bool

    @property
    def keys(self) -> int:
        """That a query token sees, in the mean."""
        listed = self.k if self.full else (1 + self.k) // 2
        return listed + WINDOW if self.rows == "rows584" else listed

    @property
    def head_dims(self) -> int:
        return 512 + (512 if self.rows == "rows584" else 576)

    @property
    def roofline(self) -> float:
        """Microseconds."""
        queries = self.batch * self.tokens
        size = queries * (self.keys * WIDTHS[self.rows] + 2 * self.heads * self.head_dims)
        return 1e6 * max(size / READ_BYTES, self.flops / BF16_FLOPS)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.tokens * self.heads * self.keys * self.head_dims

    @property
    def third(self) -> str:
        return THIRDS[(self.roofline >= 10) + (self.roofline >= 100)]

    @property
    def name(self) -> str:
        lists = f"{self.k}{'' if self.full else ' at most'}"
        return f"{self.heads} heads, {self.batch} x{self.tokens}, lists of {lists}, page {self.page_size}"


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def draw(rng: random.Random, rows: str) -> Cell:
    heads = rng.choice((128, 64, 32, 16, 8)) if rng.random() < 0.5 else rng.randint(1, 128)
    k = rng.choice((2048, 1024, 512)) if rng.random() < 0.5 else log_uniform(rng, 64, 2048)
    if rows == "rows584" and rng.random() < 0.25:
        k = log_uniform(rng, 2048, 8192)
    page = 64 if rows == "rows584" or rng.random() < 0.5 else rng.randint(1, 256)
    tokens = rng.randint(2, 8) if rng.random() < 1 / 3 else 1
    return Cell(rows, heads, log_uniform(rng, 1, 1024), tokens, k, page, rng.random() < 0.5)


def cells(rows: str, seed: int, count: int) -> Iterator[Cell]:
    """`count` cells, a third of each class of roofline times, in turns."""
    rng = random.Random(f"{rows} {seed}")
    for i in range(count):
        while True:
            cell = draw(rng, rows)
            if cell.third == THIRDS[i % 3] and cell.batch * cell.tokens * cell.k <= MOST_LISTED:
                break
        yield cell


def padded_lists(lists: Tensor, lengths: Tensor | None) -> Tensor:
    """As FlashMLA takes them: -1 behind a list's end, to a multiple of 64."""
    k = lists.shape[-1]
    wide = lists.new_full((*lists.shape[:-1], -(-k // 64) * 64), -1)
    wide[..., :k] = lists
    if lengths is not None:
        wide.masked_fill_(torch.arange(wide.shape[-1], device=wide.device) >= lengths.unsqueeze(-1), -1)
    return wide


class SampledBench(SparseBench):
    def __init__(self) -> None:
        super().__init__(sustained=False)
        self.pools: dict[str, Tensor] = {}

    def pool(self, rows: str, number: int = 0) -> Tensor:
        name = f"{rows} {number}"
        if name not in self.pools:
            self.pools[name] = paged_rows(KINDS[rows], POOL_ROWS)
        return self.pools[name]

    def contenders(self, cell: Cell) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = defaultdict(list)
        shared = cell.rows == "rows584"
        pool, size = self.pool(cell.rows), 512 if shared else 576
        ours = pool
        if not shared and cell.page_size != 64:
            whole = POOL_ROWS // cell.page_size * cell.page_size
            ours = pool.view(POOL_ROWS, -1)[:whole].view(-1, cell.page_size, pool.shape[-1])
        for _ in range(CALLS):
            q = torch.randn(cell.batch, cell.tokens, cell.heads, size, device="cuda", dtype=BF16) * 0.2
            lists = lists_of(cell.batch, cell.tokens, cell.k, CONTEXT, POOL_ROWS)
            # The last request's rows end where whole pages do.
            lists.clamp_(max=POOL_ROWS // cell.page_size * cell.page_size - 1)
            lengths = None
            if not cell.full:
                lengths = torch.randint(1, cell.k + 1, lists.shape[:2], device="cuda", dtype=torch.int32)
            if shared:
                window = lists_of(cell.batch, cell.tokens, WINDOW, 2048, POOL_ROWS)
                sinks = torch.randn(cell.heads, device="cuda")
                entries = self.pool(cell.rows, 1)
                found["attnops"].append(self.our_two_lists(q, pool, window, entries, lists, lengths, sinks))
                theirs = self.flash_mla(q, pool, window, sinks, entries, padded_lists(lists, lengths))
            else:
                found["attnops"].append(self.our_lists(q, ours, lists, lengths))
                if cell.rows == "rows576":
                    if cell.full and cell.tokens == 1 and "FA3" in self.peers:
                        found["FA3, page 1"].append(self.fa3_list(q, pool, lists))
                    continue
                theirs = self.flash_mla(q, pool, padded_lists(lists, lengths))
            if "FlashMLA" in self.peers:
                found["FlashMLA"].append(theirs)
        return found

    def our_lists(self, q: Tensor, pool: Tensor, lists: Tensor, lengths: Tensor | None) -> Call:
        batch, tokens, heads, _ = q.shape
        shape = {"num_q_heads": heads, "topk": lists.shape[-1], "seqlen_q": tokens}
        plan = SparseMlaPlan.allocate(batch, **shape, device="cuda")
        ops.sparse_mla_plan(plan, topk_length=lengths)
        out = q.new_empty(batch, tokens, heads, 512)
        return lambda: ops.sparse_mla_decode(q, pool, lists, plan, softmax_scale=SCALE, out=out, topk_length=lengths)

    def our_two_lists(
        self,
        q: Tensor,
        pool: Tensor,
        window: Tensor,
        entries: Tensor,
        lists: Tensor,
        lengths: Tensor | None,
        sinks: Tensor,
    ) -> Call:
        batch, tokens, heads, _ = q.shape
        shape = {"num_q_heads": heads, "topk": WINDOW, "extra_topk": lists.shape[-1], "seqlen_q": tokens}
        plan = SparseMlaPlan.allocate(batch, **shape, device="cuda")
        ops.sparse_mla_plan(plan, extra_topk_length=lengths)
        out = q.new_empty(batch, tokens, heads, 512)
        more = {"extra_kv_pages": entries, "extra_indices": lists, "extra_topk_length": lengths, "sinks": sinks}
        return lambda: ops.sparse_mla_decode(q, pool, window, plan, softmax_scale=SCALE, out=out, **more)

    def fa3_list(self, q: Tensor, pool: Tensor, lists: Tensor) -> Call:
        """The list as a table of pages of one row."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        rows = pool.view(-1, 1, 1, 576)
        q_nope, q_pe = q[..., :512].contiguous(), q[..., 512:].contiguous()
        lengths = torch.full((len(q),), lists.shape[-1], device="cuda", dtype=torch.int32)
        options: dict = {"qv": q_nope, "cache_seqlens": lengths, "page_table": lists.view(len(q), -1)}
        options |= {"softmax_scale": SCALE, "causal": True, "num_splits": 0}
        return lambda: flash_attn_with_kvcache(q_pe, rows[..., 512:], rows[..., :512], **options)

    def measure(self, cell: Cell, turns: int) -> dict[str, float]:
        """Microseconds of a call by contender, of those that take the cell and agree."""
        graphs, first = {}, None
        for name, calls in self.contenders(cell).items():
            try:
                result = calls[0]()
                result = result[0] if isinstance(result, (tuple, list)) else result
                out = result.reshape(-1, result.shape[-2], 512)[:, : cell.heads].double()
                if first is None:
                    first = out.clone()
                error = ((out - first).norm() / first.norm()).item()
                if not error < TOLERANCE:
                    raise RuntimeError(f"differs from attnops by {error:.1e}")
                graphs[name] = captured(calls * (1 if cell.roofline > 100 else 4)), calls
            except Exception as problem:  # a peer may refuse the cell: it is named
                print(f"  !! {cell.rows} {cell.name}: {name}: {str(problem).splitlines()[:1]}", flush=True)
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(turns):
            for name, (graph, _) in graphs.items():
                count = CALLS * (1 if cell.roofline > 100 else 4)
                times[name].append(milliseconds(graph) / count * 1e3)
        return {name: statistics.median(t) for name, t in times.items()}


def judged(cell: Cell, times: dict[str, float]) -> tuple[float, str]:
    others = {name: t for name, t in times.items() if name != "attnops"}
    if others:
        best = min(others, key=others.__getitem__)
        return others[best] / times["attnops"], best
    return max(1.15 * cell.roofline, cell.roofline + 8) / times["attnops"], "roofline"


def summary(rows: str, results: list[tuple[Cell, float, str]]) -> None:
    def line(name: str, values: list[float]) -> None:
        ordered = sorted(values)
        mean = math.exp(statistics.fmean(map(math.log, values)))
        fifth = ordered[int(0.05 * (len(ordered) - 1))]
        print(f"  {name:24s} {len(values):4d} cells  mean {mean:.3f}  5th {fifth:.3f}  worst {ordered[0]:.3f}")

    print(f"{rows}:")
    groups: dict[str, list[float]] = {"all": [ratio for _, ratio, _ in results]}
    for cell, ratio, best in results:
        few = "to 16 heads" if cell.heads <= 16 else "to 64 heads" if cell.heads <= 64 else "more heads"
        for group in (cell.third, few, f"beside {best}"):
            groups.setdefault(group, []).append(ratio)
    for name, values in groups.items():
        line(name, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=30, help="of each set")
    parser.add_argument("--sets", default="rows656,rows584,rows576")
    parser.add_argument("--seconds", type=float, default=3600, help="stop starting cells after this long, sets alike")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/h200-sparse_sampled.jsonl")
    options = parser.parse_args()
    begin, records = time.monotonic(), []
    print(LAW + f"\nseed {options.seed}, {options.cells} cells of each set", flush=True)
    torch.manual_seed(options.seed)
    sets = options.sets.split(",")
    for number, rows in enumerate(sets):
        bench, results = SampledBench(), []
        until = begin + options.seconds * (number + 1) / len(sets)
        for cell in cells(rows, options.seed, options.cells):
            if time.monotonic() > until:
                print(f"out of time in {rows}")
                break
            times = bench.measure(cell, options.turns)
            torch.cuda.empty_cache()
            if "attnops" not in times:
                continue
            ratio, best = judged(cell, times)
            results.append((cell, ratio, best))
            others = " ".join(f"{name} {t:.1f}" for name, t in times.items() if name != "attnops")
            print(
                f"{ratio:6.3f} {times['attnops']:9.1f} us ({cell.roofline:.1f})  {cell.name}; {others} [{best}]",
                flush=True,
            )
            for name, t in times.items():
                note = f"best: {best}, {ratio:.3f}" if name == "attnops" else ""
                case, params = f"sampled {rows} seed {options.seed}", dataclasses.asdict(cell)
                records.append(Record(case, name, params, ms=t / 1e3, tflops=cell.flops / t / 1e6, note=note))
        if results:
            summary(rows, results)
    if options.write:
        write(records, "h200-sparse_sampled")


if __name__ == "__main__":
    main()
