"""Prefill and extend on a GPU: attnops beside every peer that this machine has, in one run.

A time is the median over replays of a CUDA graph that holds R back-to-back calls, over R. Every call of a graph reads
another slice of random pools. Contenders take turns. Plans are made before the graph, like the peers'; the group "plan"
times attnops' own, and calls with the plan inside. Accuracy is checked on the same buffers against float64 before
anything is timed. A cell below its bar is measured again over five turns, and the median of the turns counts.

    python benchmarks/bench_fmha.py --groups table,hopper,plan,sustained --write
    python benchmarks/bench_fmha.py --seed 7 --cells 60      # any shape: the law is fmha_law.draw
    python benchmarks/bench_fmha.py --groups table --peers "attnops sm_80,FA3,SDPA flash"  # the portable kernels, too
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fmha_law
import fmha_peers
import torch
from bench_xqa_decode import read_ceiling, record_graph, replay_ms
from fmha_cells import BF16, DEVICE, FP8, Cell, Pools
from records import Record, version_of, write

NAME = "h200-fmha"
TURNS, TURNS_BELOW_BAR = 2, 5
SUSTAINED_MS = 800.0


@dataclasses.dataclass
class Contender:
    """One that is right on this cell, with the medians of its turns, in ms per call."""

    name: str
    error: float
    turn: Callable[[float], list[float]]  # budget in ms -> times of replays, in ms per call
    turns: list[float] = dataclasses.field(default_factory=list)

    @property
    def ms(self) -> float:
        return statistics.median(self.turns)


@dataclasses.dataclass
class Outcome:
    """A measured cell. `ratio`: best peer over attnops, None where one of them is missing."""

    cell: Cell
    contenders: list[Contender]
    state: str

    @property
    def ours(self) -> Contender | None:
        return next((c for c in self.contenders if c.name == "attnops"), None)

    @property
    def best(self) -> Contender | None:
        peers = (c for c in self.contenders if not c.name.startswith("attnops"))
        return min(peers, key=lambda c: c.ms, default=None)

    @property
    def ratio(self) -> float | None:
        return self.best.ms / self.ours.ms if self.ours and self.best else None

    def records(self, case: str) -> list[Record]:
        return [
            Record(
                case=case,
                peer=c.name,
                params=self.cell.params,
                ms=round(c.ms, 6),
                version=version_of(c.name),
                gbs=round(self.cell.bytes / c.ms / 1e6, 1),
                tflops=round(self.cell.flops / c.ms / 1e9, 2),
                rel_err=c.error,
                state=self.state,
                note=f"{len(c.turns)} turns, spread {max(c.turns) / min(c.turns) - 1:.3f}",
            )
            for c in self.contenders
        ]

    def line(self) -> str:
        if not self.contenders:
            return f"{self.cell.name:58s} nobody ran it"
        lead = self.ours or self.best
        text = (
            f"{self.cell.name:58s} {lead.name:8s} {lead.ms * 1e3:9.1f} us {self.cell.flops / lead.ms / 1e9:6.1f} TF/s "
        )
        text += f"{self.cell.bytes / lead.ms / 1e9:5.2f} TB/s, {lead.ms / self.cell.roofline_ms:5.2f} of roofline, "
        text += f"error {lead.error:.4f}"
        for peer in sorted((c for c in self.contenders if c is not lead), key=lambda c: c.ms)[:3]:
            text += f"; {peer.name} {peer.ms * 1e3:.1f} ({peer.ms / lead.ms:.3f}x)"
        if self.ratio is not None:
            text += f"  bar {self.cell.bar}: {'ok' if self.ratio >= self.cell.bar else 'BELOW'}"
        return text


def turn_of(step: fmha_peers.Step, rotation: int) -> Callable[[float], list[float]]:
    if DEVICE == "cuda":
        return functools.partial(_replays, record_graph(step, rotation), step, rotation)
    return functools.partial(_host_calls, step, rotation)


def _replays(graph: torch.cuda.CUDAGraph, step: fmha_peers.Step, rotation: int, budget_ms: float) -> list[float]:
    """`step` is held here, since a graph keeps no tensors alive."""
    return [ms / rotation for ms in replay_ms(graph, budget_ms)]


def _host_calls(step: fmha_peers.Step, rotation: int, budget_ms: float) -> list[float]:
    """Without a GPU: only to try the harness."""
    begin = time.perf_counter()
    for r in range(rotation):
        step(r)
    return [(time.perf_counter() - begin) * 1e3 / rotation]


def sustained_ms(turn: Callable[[float], list[float]]) -> list[float]:
    """The second half of replays that follow each other for long enough to reach the power limit."""
    times: list[float] = []
    begin = time.monotonic()
    while time.monotonic() - begin < SUSTAINED_MS / 1e3:
        times += turn(SUSTAINED_MS / 10)
    return times[len(times) // 2 :]


def measure(cell: Cell, named: list, budget_ms: float, state: str = "burst", verbose: bool = False) -> Outcome:
    """Check, then time in turns. A contender that is wrong is named, and not timed."""
    ready = []
    tolerance = 0.1 if FP8 in (cell.dtype, cell.kv_dtype) else 0.02
    for name, prepare in named:
        try:
            step = prepare()
            error = cell.relative_error(step(0))
            if not error < tolerance:
                raise RuntimeError(f"WRONG: relative error {error:.3g}")
            ready.append(Contender(name, error, turn_of(step, cell.rotation)))
        except Exception as problem:  # a peer may be absent, or refuse the cell: say so and go on
            text = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:120]}"
            if verbose or name == "attnops" or "WRONG" in text:
                print(f"    {name}: {text} [{cell.name}]", flush=True)
    outcome = Outcome(cell, ready, state)

    def turns(count: int) -> None:
        for _ in range(count):
            for contender in ready:
                if DEVICE == "cuda" and cell.flops > 1e11 and state == "burst":
                    time.sleep(0.05)  # the card is power-limited: everybody begins rested
                times = sustained_ms(contender.turn) if state == "sustained" else contender.turn(budget_ms)
                contender.turns.append(statistics.median(times))

    turns(TURNS)
    if outcome.ratio is not None and outcome.ratio < cell.bar:
        turns(TURNS_BELOW_BAR - TURNS)
    for contender in ready:
        del contender.turn  # its graph and its buffers
    return outcome


def measure_plans(pools: Pools, budget_ms: float) -> list[Record]:
    """attnops' plan alone, and the same call without and with its plan inside."""
    records = []
    for batch in (1, 32, 256):
        cell = Cell((32, 8), [64] * batch, [1088] * batch, page=64).build(pools)
        plan = fmha_peers.allocate_plan(cell)

        def alone(r: int, cell: Cell = cell, plan: object = plan) -> None:
            fmha_peers.fill_plan(cell, plan)

        ms = statistics.median(turn_of(alone, 64)(budget_ms))
        print(f"fmha_plan, {batch} requests: {ms * 1e3:.2f} us", flush=True)
        records.append(Record(case="plan", peer="attnops", params={"batch": batch, "op": "fmha_plan"}, ms=round(ms, 6)))
        both = {"attnops": "never", "with plan": "always"}
        named = [(name, functools.partial(fmha_peers.attnops, cell, inside)) for name, inside in both.items()]
        outcome = measure(cell, named, budget_ms)
        print(outcome.line(), flush=True)
        records += outcome.records("plan")
    return records


def summary(title: str, outcomes: list[Outcome]) -> None:
    """Geometric mean, 5th percentile and worst of the ratios to the best peer, whole and by third."""

    def row(name: str, ratios: list[float]) -> None:
        if not ratios:
            print(f"{name:34s} {0:4d}")
            return
        ordered = sorted(ratios)
        mean = math.exp(statistics.fmean(math.log(x) for x in ordered))
        low = ordered[max(0, math.ceil(0.05 * len(ordered)) - 1)]
        print(f"{name:34s} {len(ordered):4d} {mean:8.3f} {low:8.3f} {ordered[0]:8.3f}")

    print(f"\n{title:34s} cells     mean       5%    worst")
    measured = [o for o in outcomes if o.ratio is not None]
    row("all", [o.ratio for o in measured])
    for i, name in enumerate(("roofline below 50 us", "50 to 500 us", "above 500 us")):
        row(name, [o.ratio for o in measured if o.cell.third == i])
    below = [o for o in measured if o.ratio < o.cell.bar]
    alone = [o for o in outcomes if o.ours and not o.best]
    slow = [o for o in alone if o.ours.ms > o.cell.bar_alone_ms]
    print(f"below their bar: {len(below)}; no peer ran {len(alone)}, {len(slow)} of them above their roofline's bar")
    print(f"not run by attnops: {sum(o.ours is None for o in outcomes)}")
    for outcome in sorted(below, key=lambda o: o.ratio) + slow:
        print(f"  {outcome.line()}")


def groups() -> dict[str, list[Cell]]:
    return {
        "table": fmha_law.table(),
        "hopper": fmha_law.hopper(),
        "sustained": [cell for cell in fmha_law.table() if cell.sustained],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", help="of table, hopper, plan, sustained; all unless --cells is given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=0, help="how many to sample")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--seconds", type=float, default=600, help="stop starting cells after this long")
    parser.add_argument("--budget-ms", type=float, default=12, help="of replays per contender and turn")
    parser.add_argument("--peers", help="comma-separated; a name's beginning is enough; none: attnops alone")
    parser.add_argument("--pool", type=float, default=0, help="elements of a pool; smaller cells alone are run then")
    parser.add_argument("--verbose", action="store_true", help="say why a peer did not run a cell")
    parser.add_argument("--write", action="store_true", help=f"to benchmarks/results/{NAME}.jsonl")
    arguments = parser.parse_args()
    chosen = arguments.groups or ("" if arguments.cells else "table,hopper,plan,sustained")
    lists = {name: groups()[name] for name in chosen.split(",") if name and name != "plan"}
    if arguments.cells:
        lists[f"sample {arguments.seed}"] = fmha_law.sample(arguments.seed, arguments.cells)
    torch.manual_seed(0)
    begin = time.monotonic()
    pools = Pools(*([int(arguments.pool)] if arguments.pool else []))
    records: list[Record] = []
    if DEVICE == "cuda":
        sweep, product = read_ceiling() * 1e3, product_ceiling(arguments.budget_ms)
        print(f"read ceiling {sweep:.0f} GB/s, bf16 product {product:.0f} TFLOP/s", flush=True)
        records.append(Record(case="ceiling", peer="read sweep", params={}, ms=0.0, gbs=round(sweep, 1)))
        records.append(Record(case="ceiling", peer="bf16 product", params={}, ms=0.0, tflops=round(product, 1)))
    outcomes: dict[str, list[Outcome]] = {}
    print("peers not found:", ", ".join(fmha_peers.missing()) or "none")
    for group, cells in lists.items():
        outcomes[group] = []
        for i, cell in enumerate(c for c in cells if arguments.only in c.name):
            if time.monotonic() - begin > arguments.seconds:
                print(f"out of time in {group}, {len(cells) - i} cells left")
                break
            if not cell.fits(pools.elements):
                continue
            named = [n for n in fmha_peers.contenders(cell.build(pools)) if _asked(n[0], arguments.peers)]
            state = "sustained" if group == "sustained" else "burst"
            outcome = measure(cell, named, arguments.budget_ms, state, arguments.verbose)
            print(outcome.line(), flush=True)
            records += outcome.records(group)
            outcomes[group].append(outcome)
            vars(cell).pop("expected", None)
        if arguments.write:
            write(records, NAME)  # a peer may end the process
    if "plan" in chosen.split(","):
        records += measure_plans(pools, arguments.budget_ms)
    for group, measured in outcomes.items():
        summary(group, measured)
    if arguments.write:
        print(f"written to {write(records, NAME)}")


def product_ceiling(budget_ms: float) -> float:
    """TFLOP/s of an 8192^3 bf16 product on random data."""
    x, y = (torch.randn(8192, 8192, dtype=BF16, device=DEVICE) for _ in range(2))
    out = torch.empty_like(x)
    graph = record_graph(lambda r: torch.mm(x, y, out=out), 2)
    return 2 * 2 * 8192**3 / statistics.median(replay_ms(graph, budget_ms)) / 1e9


def _asked(name: str, peers: str | None) -> bool:
    if peers is None:
        return name != fmha_peers.PORTABLE
    return name == "attnops" or any(name.startswith(p) for p in peers.split(",") if p)


if __name__ == "__main__":
    main()
