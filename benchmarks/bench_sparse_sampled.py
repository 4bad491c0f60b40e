"""Sparse attention of random shapes on a GPU, beside the best peer: figures over a law, not over chosen cells.

    python benchmarks/bench_sparse_sampled.py --seed 1 --cells 30 [--sets rows656,prefill576,logits] [--seconds 60]
    python benchmarks/bench_sparse_sampled.py --dry    cells made small, once each, on a CPU too

Sets are decode over three kinds of rows, and those of sampled_indexer.py: prefill, logits, selection.

A seed draws cells by the law below. FlashMLA gets heads padded to 64 or 128, lists padded to a multiple of 64 by -1,
and pages of 64. Where lists have lengths it also takes its turns with them: of a request the longest. A cell's figure
is the best peer's time over attnops', plans and schedules made before. A cell that no peer runs is judged against its
roofline: 1.15x of it, or 8 us more, whichever is longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attnops import ops
from attnops.metadata import SparseMlaPlan
from bench_indexer import difference
from bench_sparse_mla import (
    BF16,
    DEVICE,
    SCALE,
    Call,
    SparseBench,
    captured,
    finished,
    first_line,
    lists_of,
    milliseconds,
    paged_rows,
)
from records import Record, version_of, write
from sampled_cells import BF16_FLOPS, READ_BYTES, THIRDS
from sampled_indexer import LAW as MORE_LAWS
from sampled_indexer import SETS as MORE_SETS
from sampled_indexer import drawn_heads, drawn_k, log_uniform
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
    def fits(self) -> bool:
        return self.batch * self.tokens * self.k <= MOST_LISTED

    @property
    def third(self) -> str:
        return THIRDS[(self.roofline >= 10) + (self.roofline >= 100)]

    @property
    def name(self) -> str:
        lists = f"{self.k}{'' if self.full else ' at most'}"
        return f"{self.heads} heads, {self.batch} x{self.tokens}, lists of {lists}, page {self.page_size}"


def draw(rng: random.Random, rows: str) -> Cell:
    heads = drawn_heads(rng)
    k = drawn_k(rng)
    if rows == "rows584" and rng.random() < 0.25:
        k = log_uniform(rng, 2048, 8192)
    page = 64 if rows == "rows584" or rng.random() < 0.5 else rng.randint(1, 256)
    tokens = rng.randint(2, 8) if rng.random() < 1 / 3 else 1
    return Cell(rows, heads, log_uniform(rng, 1, 1024), tokens, k, page, rng.random() < 0.5)


def cells(rows: str, seed: int, count: int) -> Iterator[Any]:
    """`count` cells, a third of each class of roofline times, in turns."""
    rng = random.Random(f"{rows} {seed}")
    for i in range(count):
        while True:
            cell = MORE_SETS.get(rows, draw)(rng, rows)
            if cell.third == THIRDS[i % 3] and cell.fits:
                break
        yield cell


SMALL = {"heads": 8, "batch": 2, "tokens": 4, "keys": 4096, "k": 64}


def made_small(cell: Any) -> Any:
    """Of the same kind, for a dry run."""
    names = {field.name for field in dataclasses.fields(cell)} & set(SMALL)
    return dataclasses.replace(cell, **{name: min(getattr(cell, name), SMALL[name]) for name in names})


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
            q = torch.randn(cell.batch, cell.tokens, cell.heads, size, device=DEVICE, dtype=BF16) * 0.2
            lists = lists_of(cell.batch, cell.tokens, cell.k, CONTEXT, POOL_ROWS)
            # The last request's rows end where whole pages do.
            lists.clamp_(max=POOL_ROWS // cell.page_size * cell.page_size - 1)
            lengths = None
            if not cell.full:
                lengths = torch.randint(1, cell.k + 1, lists.shape[:2], device=DEVICE, dtype=torch.int32)
            if shared:
                window = lists_of(cell.batch, cell.tokens, WINDOW, 2048, POOL_ROWS)
                sinks = torch.randn(cell.heads, device=DEVICE)
                entries = self.pool(cell.rows, 1)
                found["attnops"].append(self.our_two_lists(q, pool, window, entries, lists, lengths, sinks))
                given: tuple[Tensor, ...] = (q, pool, window, sinks, entries, padded_lists(lists, lengths))
            else:
                found["attnops"].append(self.our_lists(q, ours, lists, lengths))
                if cell.rows == "rows576":
                    if cell.full and cell.tokens == 1 and "FA3" in self.peers:
                        found["FA3, page 1"].append(self.fa3_list(q, pool, lists))
                    continue
                given = (q, pool, padded_lists(lists, lengths))
            if "FlashMLA" in self.peers:
                found["FlashMLA"].append(self.flash_mla(*given))
                if lengths is not None:
                    found["FlashMLA, lengths"].append(self.flash_mla(*given, lengths=lengths))
        return found

    def our_lists(self, q: Tensor, pool: Tensor, lists: Tensor, lengths: Tensor | None) -> Call:
        batch, tokens, heads, _ = q.shape
        shape = {"num_q_heads": heads, "topk": lists.shape[-1], "seqlen_q": tokens}
        plan = SparseMlaPlan.allocate(batch, **shape, device=DEVICE)
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
        plan = SparseMlaPlan.allocate(batch, **shape, device=DEVICE)
        ops.sparse_mla_plan(plan, extra_topk_length=lengths)
        out = q.new_empty(batch, tokens, heads, 512)
        more = {"extra_kv_pages": entries, "extra_indices": lists, "extra_topk_length": lengths, "sinks": sinks}
        return lambda: ops.sparse_mla_decode(q, pool, window, plan, softmax_scale=SCALE, out=out, **more)

    def fa3_list(self, q: Tensor, pool: Tensor, lists: Tensor) -> Call:
        """The list as a table of pages of one row."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        rows = pool.view(-1, 1, 1, 576)
        q_nope, q_pe = q[..., :512].contiguous(), q[..., 512:].contiguous()
        lengths = torch.full((len(q),), lists.shape[-1], device=DEVICE, dtype=torch.int32)
        options: dict = {"qv": q_nope, "cache_seqlens": lengths, "page_table": lists.view(len(q), -1)}
        options |= {"softmax_scale": SCALE, "causal": True, "num_splits": 0}
        return lambda: flash_attn_with_kvcache(q_pe, rows[..., 512:], rows[..., :512], **options)

    def calls_of(self, cell: Any) -> tuple[dict[str, list[Call]], Callable[[str, object], Tensor]]:
        """Calls over some inputs by contender, and what of the first call's answer is compared."""
        if isinstance(cell, Cell):

            def compared(name: str, answer: Any) -> Tensor:
                answer = answer[0] if isinstance(answer, (tuple, list)) else answer
                return answer.reshape(-1, answer.shape[-2], 512)[:, : cell.heads]

            return self.contenders(cell), compared
        sets = [cell.contenders(self) for _ in range(1 if cell.roofline > 100 else CALLS)]
        calls = {name: [one[name][0] for one in sets for _ in range(CALLS // len(sets))] for name in sets[0]}
        return calls, lambda name, answer: sets[0][name][1](answer)

    def measure(self, cell: Any, turns: int) -> dict[str, float]:
        """Microseconds of a call by contender, of those that take the cell and agree."""
        graphs, first = {}, None
        contenders, compared = self.calls_of(cell)
        for name, calls in contenders.items():
            try:
                out = compared(name, finished(calls[0]))
                if first is None:
                    first = out.clone()
                error = difference(out, first)
                if not error < TOLERANCE:
                    raise RuntimeError(f"differs from attnops by {error:.1e}")
                graphs[name] = captured(calls * (1 if cell.roofline > 100 else 4)), calls
            except Exception as problem:  # a peer may refuse the cell: it is named
                print(f"  !! {cell.rows} {cell.name}: {name}: {first_line(problem)}", flush=True)
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(turns):
            for name, (graph, _) in graphs.items():
                count = CALLS * (1 if cell.roofline > 100 else 4)
                times[name].append(milliseconds(graph) / count * 1e3)
        return {name: statistics.median(t) for name, t in times.items()}


def judged(cell: Any, times: dict[str, float]) -> tuple[float, str]:
    others = {name: t for name, t in times.items() if name != "attnops"}
    if others:
        best = min(others, key=others.__getitem__)
        return others[best] / times["attnops"], best
    return max(1.15 * cell.roofline, cell.roofline + 8) / times["attnops"], "roofline"


def summary(rows: str, results: list[tuple[Any, float, str]]) -> None:
    def line(name: str, values: list[float]) -> None:
        ordered = sorted(values)
        mean = math.exp(statistics.fmean(map(math.log, values)))
        fifth = ordered[int(0.05 * (len(ordered) - 1))]
        print(f"  {name:24s} {len(values):4d} cells  mean {mean:.3f}  5th {fifth:.3f}  worst {ordered[0]:.3f}")

    print(f"{rows}:")
    groups: dict[str, list[float]] = {"all": [ratio for _, ratio, _ in results]}
    for cell, ratio, best in results:
        kinds = [cell.third, f"beside {best}"]
        if hasattr(cell, "heads"):
            kinds.append("to 16 heads" if cell.heads <= 16 else "to 64 heads" if cell.heads <= 64 else "more heads")
        for group in kinds:
            groups.setdefault(group, []).append(ratio)
    for name, values in groups.items():
        line(name, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=30, help="of each set")
    parser.add_argument("--sets", default=",".join([*WIDTHS, *MORE_SETS]))
    parser.add_argument("--seconds", type=float, default=3600, help="stop starting cells after this long, sets alike")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/h200-sparse_sampled.jsonl")
    parser.add_argument("--dry", action="store_true", help="three small cells of each set, a turn each")
    options = parser.parse_args()
    if options.dry:
        globals().update(POOL_ROWS=2**13, CONTEXT=4096)
        options.cells, options.turns, options.write = 3, 1, False
    begin, records = time.monotonic(), []
    print(f"{LAW}\n{MORE_LAWS}\nseed {options.seed}, {options.cells} cells of each set", flush=True)
    torch.manual_seed(options.seed)
    sets = options.sets.split(",")
    if unknown := set(sets) - {*WIDTHS, *MORE_SETS}:
        parser.error(f"--sets must be of {', '.join([*WIDTHS, *MORE_SETS])}, got {', '.join(sorted(unknown))}")
    for number, rows in enumerate(sets):
        bench, results = SampledBench(), []
        until = begin + options.seconds * (number + 1) / len(sets)
        for cell in cells(rows, options.seed, options.cells):
            if time.monotonic() > until:
                print(f"out of time in {rows}")
                break
            times = bench.measure(made_small(cell) if options.dry else cell, options.turns)
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
                record = Record(case, name, params, ms=t / 1e3, tflops=cell.flops / t / 1e6 or None, note=note)
                record.version = version_of(name)
                records.append(record)
        if results:
            summary(rows, results)
        if options.write and records:  # after each set, so that a run that is ended keeps what it has
            write(records, "h200-sparse_sampled")


if __name__ == "__main__":
    main()
