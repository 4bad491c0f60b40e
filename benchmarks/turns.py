"""Graphs replayed in turns, rows that are written as they come, bars: for benchmarks that go on where a cell fails."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import records
import torch
from records import Record

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Contender:
    """What is timed in a cell.

    Args:
        calls: Of one graph. `params`, `note`, `version`: As of `Record`; the version is known of attnops and of peers
            that `records.version_of` finds.
    """

    peer: str
    params: dict
    calls: Calls
    num_bytes: int | None = None
    note: str = ""
    version: str = ""


def captured(calls: Calls) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def times_in_turns(calls: Sequence[Calls], rounds: int) -> list[float]:
    """Median ms of one call of each, a replay of each graph after one of the others."""
    graphs = [captured(one) for one in calls]
    taken: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, one, times in zip(graphs, calls, taken, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(one))
    return [statistics.median(times) for times in taken]


class Turns:
    """One run of a benchmark.

    Args:
        name: Of the file of results. rounds: Replays of each graph.
        folder: Where rows are written, after each cell; None: nowhere.
        seconds: No part begins later than this.
    """

    def __init__(self, name: str, rounds: int, folder: Path | None, seconds: float = float("inf")) -> None:
        self.name, self.rounds, self.folder, self.seconds = name, rounds, folder, seconds
        self.records: list[Record] = []
        self.bars: dict[str, str] = {}
        self.failed: list[str] = []
        self.begin = time.monotonic()

    def cell(self, case: str, *contenders: Contender) -> list[float]:
        """ms of each contender, in turns. Their rows are written."""
        times = times_in_turns([one.calls for one in contenders], self.rounds)
        first = len(self.records)
        for one, ms in zip(contenders, times, strict=True):
            gbs = None if one.num_bytes is None else one.num_bytes / ms / 1e6
            version = one.version or records.version_of(one.peer)
            self.records.append(Record(case, one.peer, one.params, ms, version=version, gbs=gbs, note=one.note))
            rate = "" if gbs is None else f"{gbs:8.0f} GB/s"
            print(f"{case:18s} {one.peer:12s} {ms * 1e3:9.2f} us {rate} {one.note} {one.params}", flush=True)
        self.save(self.records[first:], by=("case", "peer", "params"))
        return times

    def beside(self, case: str, ours: Contender, *peers: Contender) -> list[float]:
        """As `cell`, but a peer that fails is left out: first all of them, then ours alone."""
        try:
            return self.cell(case, ours, *peers)
        except Exception as error:
            if not peers:
                raise
            print(f"left out of {case}: {', '.join(one.peer for one in peers)}: {str(error)[:300]!r}", flush=True)
            return self.cell(case, ours)

    def bar(self, what: str, got: float, bar: float, *, at_least: bool = False) -> None:
        """What the last row of attnops shows, and whether that is within a bar; `at_least`: or above it."""
        met = got >= bar if at_least else got <= bar
        told = f"{got:.3f}, bar {bar:g}: {'met' if met else 'MISSED'}"
        self.bars[what] = told
        print(f"{'':18s} {what}: {told}", flush=True)
        last = next(record for record in reversed(self.records) if record.peer == "attnops")
        last.note = "; ".join([*([last.note] if last.note else []), f"{what}: {told}"])
        self.save([last], by=("case", "peer", "params"))

    def part(self, name: str, call: Callable[[], object]) -> None:
        """Runs a part. One that fails is named, and its rows so far are kept."""
        past = time.monotonic() - self.begin
        if past > self.seconds:
            self.failed.append(f"{name} (not begun after {past:.0f} s)")
            print(f"left out: {name}, {past:.0f} s have passed", flush=True)
            return
        try:
            call()
        except Exception as error:
            self.failed.append(f"{name} ({type(error).__name__}: {str(error)[:300]!r})")
            print(f"failed: {self.failed[-1]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def save(self, rows: list[Record], by: Sequence[str]) -> None:
        if self.folder is not None and rows:
            records.write(rows, self.name, self.folder, by=by)

    def end(self, wanted: Sequence[str] = ()) -> int:
        """Tells every bar, and those of `wanted` that nothing was measured for. 1 where a part failed, else 0.

        Where none failed, older rows of the same cases and peers are dropped: those of cells that are no more.
        """
        if not self.failed:
            self.save(self.records, by=("case", "peer"))
        print(f"\n{self.name}: {time.monotonic() - self.begin:.0f} s")
        for what, told in self.bars.items():
            print(f"  {what}: {told}")
        for what in wanted:
            if what not in self.bars:
                print(f"  {what}: not measured")
        for name in self.failed:
            print(f"  failed: {name}")
        return 1 if self.failed else 0
