"""Decode of random shapes on a GPU, beside the best peer of each: figures over a law, not over chosen cells.

    python benchmarks/bench_decode_sampled.py --seed 1 --cells 40 [--sets xqa16,fp8,tokens,mla16,mla8,invariant,width]

A seed draws cells by the law of `sampled_cells.py`. A cell is checked against float64, then timed in turns with every
peer that takes it: the median replay of a graph over its calls, 32 or more, attnops' plan before every 32nd. A cell's
figure is the best peer's time over attnops'. A cell that no peer runs is judged against its roofline: 1.15x of it, or 3
us more, whichever is longer. A cell below its set's bar is measured again over five turns, and the median counts.

The sets "invariant" and "width" put attnops beside itself: batch-invariant over balanced plans, a page table of 131072
tokens over one that is as wide as the longest request.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from attnops.info import kernel_counts
from records import Record, version_of, write
from sampled_cells import LAW, MOST_BYTES, THIRDS, Cell, cells
from sampled_contenders import PLAN_EVERY, Pool, Problem, Step, attnops_decode, peers, planned

BARS = {"xqa16": 0.95, "fp8": 0.95, "tokens": 0.94, "mla16": 0.95, "mla8": 0.92}  # of the worst cell
KINDS = {"invariant": ("xqa16", "fp8", "mla16"), "width": ("xqa16", "fp8", "tokens", "mla16", "mla8")}
WIDE = 131072
TOLERANCE = {"bf16": 0.02, "fp16": 0.02, "e4m3": 0.12}


def record_graph(step: Step, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for r in range(calls):
                step(r)
    torch.cuda.synchronize()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, budget_ms: float) -> list[float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_ms and len(times) < 30):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


class Measurement:
    """A cell's contenders, checked, each with a graph of its calls."""

    def __init__(self, cell: Cell, problem: Problem) -> None:
        self.cell, self.problem = cell, problem
        self.rows: dict[str, tuple] = {}
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.errors: dict[str, float] = {}
        self.kernels: dict[str, str] = {}  # the row of impls.cpp, of attnops' contenders
        self.refused: dict[str, str] = {}
        # Calls in a graph. Of long ones a few, beside which a plan costs nothing.
        self.calls = -(-max(problem.rotation, PLAN_EVERY) // PLAN_EVERY) * PLAN_EVERY if cell.roofline < 300 else 4
        self.keep: list[Step] = []

    def add(self, name: str, prepare: Callable[[], Step], hnd: bool = False) -> None:
        try:
            step = prepare()
            before = kernel_counts()
            out = step(0)
            chosen = [row for row, count in kernel_counts().items() if count != before.get(row, 0)]
            lengths = self.cell.lengths
            longest = max(range(len(lengths)), key=lengths.__getitem__)
            some = {0, len(lengths) - 1, lengths.index(min(lengths)), longest}
            requests = [r for r in some if lengths[r] <= 140_000 // max(1, self.cell.rows // 16)]
            error = max((self.problem.relative_error(out, r, hnd) for r in requests), default=0.0)
            if not error < TOLERANCE[self.cell.kv]:
                raise RuntimeError(f"WRONG: relative error {error:.3g}")
            self.graphs[name] = record_graph(step, self.calls)
            self.errors[name] = error
            self.kernels[name] = " ".join(row.split()[-1] for row in chosen if "_plan" not in row)
            self.keep.append(step)  # a graph keeps no tensors alive
        except Exception as problem:  # a peer may be absent, or refuse the cell: it is named
            self.refused[name] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:90]}"
            if name.startswith("attnops"):
                print(f"  !! {self.cell.name}: {name}: {self.refused[name]}", flush=True)

    def times(self, turns: int, budget_ms: float) -> dict[str, float]:
        """Microseconds of a call: the median over the turns of each turn's median."""
        found = defaultdict(list)
        for graph in self.graphs.values():
            graph.replay()
        for _ in range(turns):
            for name, graph in self.graphs.items():
                found[name].append(statistics.median(replay_ms(graph, budget_ms)))
        return {name: statistics.median(t) / self.calls * 1e3 for name, t in found.items()}


def judged(cell: Cell, times: dict[str, float]) -> tuple[float, str]:
    """How many times faster than the best peer, and who that is."""
    others = {name: t for name, t in times.items() if not name.startswith("attnops")}
    if others:
        best = min(others, key=others.__getitem__)
        return others[best] / times["attnops"], best
    return max(1.15 * cell.roofline, cell.roofline + 3) / times["attnops"], "roofline"


def contenders(kind: str, cell: Cell) -> list[tuple[str, Callable[[Problem], Step], bool]]:
    def attnops(**options: object) -> Callable[[Problem], Step]:
        return lambda problem: planned(attnops_decode(problem, **options))

    if kind == "invariant":
        return [("attnops", attnops(invariant=True), False), ("balanced", attnops(), False)]
    if kind == "width":
        return [("attnops", attnops(context=WIDE), False), ("exact", attnops(context=0), False)]
    ours = [("attnops", attnops(), False)]
    if kind == "mla8":
        ours.append(("attnops rounded", attnops(fp8_products=True), False))
    return [*ours, *peers(cell)]


def names_of(kind: str, cell: Cell) -> str:
    return ", ".join(name for name, _, _ in contenders(kind, cell))


def run(
    kind: str, cell: Cell, pool: Pool, budget_ms: float, bar: float, alone: bool
) -> tuple[Measurement, dict, float, str, bool]:
    problem = Problem(cell, pool)
    measurement = Measurement(cell, problem)
    for name, prepare, hnd in contenders(kind, cell):
        if not alone or name.startswith("attnops"):
            measurement.add(name, functools.partial(prepare, problem), hnd)
    if "attnops" not in measurement.graphs:
        return measurement, {}, 0.0, "nobody: attnops failed", False
    times = measurement.times(2, budget_ms)
    ratio, best = judged(cell, times)
    again = ratio < bar
    if again:
        times = measurement.times(5, budget_ms)
        ratio, best = judged(cell, times)
    return measurement, times, ratio, best, again


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(v, 1e-3)) for v in values))


def summary(kind: str, results: list[tuple[Cell, float, bool]], refused: Counter[tuple[str, str]]) -> None:
    def line(name: str, values: list[float]) -> None:
        ordered = sorted(values)
        fifth = ordered[int(0.05 * (len(ordered) - 1))]
        figures = f"mean {geometric_mean(values):.3f}  5th {fifth:.3f}  worst {ordered[0]:.3f}"
        print(f"  {name:28s} {len(values):4d} cells  {figures}")

    again = sum(again for _, _, again in results) / len(results)
    print(f"{kind}: {again:.0%} of the cells measured again")
    line("all", [ratio for _, ratio, _ in results])
    by_feature: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cell, ratio, _ in results:
        for feature in cell.features.items():
            by_feature[feature].append(ratio)
    order = {name: i for i, name in enumerate(results[0][0].features)}
    for feature, values in sorted(by_feature.items(), key=lambda x: (order[x[0][0]], x[0][1] not in THIRDS, x[0][1])):
        line(": ".join(feature), values)
    for (name, reason), count in sorted(refused.items()):
        print(f"  not run: {name}, {count} cells: {reason}")


def drawn(kind: str, seed: int, count: int, context: int | None, page_size: int | None) -> list[Cell]:
    if kind not in KINDS:
        return list(cells(kind, seed, count, context, page_size))
    each = -(-count // len(KINDS[kind]))
    of_kinds = (cells(k, seed, each, context, page_size) for k in KINDS[kind])
    found = itertools.chain.from_iterable(zip(*of_kinds, strict=True))
    return list(found)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=40, help="of each set")
    parser.add_argument("--sets", default="xqa16,fp8,tokens,mla16,mla8,invariant,width")
    parser.add_argument("--context", type=int, help="of every page table, in place of a drawn one; 0: exact")
    parser.add_argument("--page", type=int, help="tokens of every page, in place of a drawn number")
    parser.add_argument("--seconds", type=float, default=3600, help="stop starting cells after this long, sets alike")
    parser.add_argument("--dry", action="store_true", help="only say who would be asked for each cell; needs no GPU")
    parser.add_argument("--alone", action="store_true", help="no peers: every cell beside its roofline")
    parser.add_argument("--budget-ms", type=float, default=8, help="of replays per contender and turn")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/h200-decode_sampled.jsonl")
    arguments = parser.parse_args()
    begin = time.monotonic()
    print(LAW + f"\nseed {arguments.seed}, {arguments.cells} cells of each set", flush=True)
    if arguments.dry:
        for kind in arguments.sets.split(","):
            for cell in drawn(kind, arguments.seed, arguments.cells, arguments.context, arguments.page):
                print(f"{kind}: {cell.name} ({cell.roofline:.1f} us): {names_of(kind, cell)}")
        return
    torch.manual_seed(arguments.seed)
    pool, records = Pool(int(MOST_BYTES * 1.02)), []
    sets = arguments.sets.split(",")
    for number, kind in enumerate(sets):
        results: list[tuple[Cell, float, bool]] = []
        refused: Counter[tuple[str, str]] = Counter()
        until = begin + arguments.seconds * (number + 1) / len(sets)
        bar = BARS.get(kind, 1 / 1.2)
        for cell in drawn(kind, arguments.seed, arguments.cells, arguments.context, arguments.page):
            if time.monotonic() > until:
                print(f"out of time in {kind}")
                break
            measurement, times, ratio, best, again = run(kind, cell, pool, arguments.budget_ms, bar, arguments.alone)
            ours = times.get("attnops", math.nan)
            others = " ".join(
                f"{name} {t:.1f}" for name, t in sorted(times.items(), key=lambda x: x[1]) if name != "attnops"
            )
            flag, kernel = "  <<" if ratio < bar else "", measurement.kernels.get("attnops", "")
            figures = f"{ratio:6.3f} {ours:9.1f} us ({cell.roofline:.1f})"
            print(f"{figures}  {cell.name}: {kernel}; {others} [{best}]{flag}", flush=True)
            results.append((cell, ratio, again))
            refused.update(measurement.refused.items())
            case = f"sampled {kind} seed {arguments.seed}"
            for name, t in times.items():
                note = f"best: {best}, {ratio:.3f}, by {kernel}" if name == "attnops" else ""
                version = version_of(name)
                gbs, tflops = cell.bytes / t / 1e3, cell.flops / t / 1e6
                error = measurement.errors[name]
                params = cell.params
                records.append(
                    Record(
                        case,
                        name,
                        params,
                        round(t / 1e3, 6),
                        version,
                        round(gbs, 1),
                        round(tflops, 2),
                        error,
                        note=note,
                    )
                )
            del measurement
            gc.collect()
        if results:
            summary(kind, results, refused)
    if arguments.write:
        write(records, "h200-decode_sampled")


if __name__ == "__main__":
    main()
