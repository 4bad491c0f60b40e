"""What `bench_linear.py`'s cells have in common: peers that are compared first, times in turns, records.

A cell is a CUDA graph of several calls, replayed and timed with events; on a CPU, calls one after the other.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from linear_peers import Calls, PeerCall, Peers
from records import Record, cpu_name, write
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from linear_reference import relative

COPY, READ = 4.2e9, 4.65e9  # bytes a millisecond
AGREE = 0.03  # the relative Frobenius norm by which a peer may differ: of a state in bf16, two ways of rounding


@dataclass(frozen=True)
class Check:
    """What a first call of attnops changes.

    pools: the states to compare first. lengths: of rings, empty meanwhile. exact: out and states in float64.
    """

    out: Tensor
    pools: list[Tensor]
    slots: Tensor
    lengths: Tensor | None = None
    exact: Callable[[], tuple[Tensor, Tensor]] | None = None


class Timing:
    """What cells of one device need: tensors, peers to compare, times in turns; and their records."""

    def __init__(self, device: str, rounds: int, peers: Peers | None = None, save: str = ""):
        """save: the name of the result file that takes each cell as it is done."""
        self.device, self.rounds, self.peers, self.save = device, rounds, peers, save
        self.records: list[Record] = []
        self.failed = self.tries = self.skip = 0
        self.errors: dict[str, float] = {}  # of the cell that is compared, by contender
        self.generator = torch.Generator(device).manual_seed(0)  # none that a failed capture could spoil

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(dtype)

    def pool(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """States, random where peers read them, since zeros look alike in any layout."""
        states = torch.zeros(shape, dtype=dtype, device=self.device)
        return states.normal_(generator=self.generator) if self.peers else states

    def indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def cell(
        self,
        case: str,
        params: dict,
        calls: list[Callable[[], object]],
        floor_ms: float,
        peers: list[Calls] | None = None,
        check: Check | None = None,
    ) -> None:
        """peers: for each turn, calls by their names."""
        self.errors = {}
        notes = self.compare(case, calls[0], peers[0], check) if peers else {}
        contenders = {"attnops": calls} | {name: [turn[name] for turn in peers or ()] for name in notes}
        if self.device == "cpu" and floor_ms:  # the floor of a CPU: a plain copy of as many bytes, in turns as well
            sides = torch.randn(8, round(floor_ms * COPY / 8))
            contenders["copy"] = [partial(sides[i].copy_, sides[i + 4]) for i in range(4)]
        times = self.time(case, contenders)
        floor_ms = times.pop("copy", floor_ms)
        if "attnops" not in times:
            raise RuntimeError(f"{case}: attnops was not timed: {params}")
        ms, first = times.pop("attnops"), len(self.records)
        note = f"floor {1e3 * floor_ms:.1f} us, {floor_ms / ms:.2f} of it" if floor_ms else ""
        device = {"device": cpu_name()} if self.device == "cpu" else {}
        errors = {name: f"error {error:.2e}" for name, error in self.errors.items()}
        note, error = ", ".join(filter(None, (note, errors.get("attnops")))), self.errors.get("attnops")
        self.records.append(Record(case, "attnops", params, ms=ms, rel_err=error, note=note, **device))
        beside = ""
        for name, theirs in times.items():
            plain = name.removesuffix(", eager")
            told = ", ".join(filter(None, (notes[plain], errors.get(plain))))
            known = {"version": Peers.version(name), "rel_err": self.errors.get(plain), "note": told}
            self.records.append(Record(case, name, params, theirs, **known, **device))
            beside += f"  {name} {1e3 * theirs:.1f} ({theirs / ms:.2f}x{', ' if told else ''}{told})"
        print(f"{case:16s} {1e3 * ms:9.2f} us  {note}{beside}  {params}", flush=True)
        if self.save:
            write(self.records[first:], self.save, whole=False)

    def compare(self, case: str, call: Callable[[], object], peers: Calls, check: Check | None) -> dict[str, str]:
        """The names of the peers that compute what attnops does, each with how much it differs."""
        if check is None or not any(isinstance(peer, PeerCall) for peer in peers.values()):
            return dict.fromkeys(peers, "")
        slots = check.slots.long()
        starts, found = [pool[slots] for pool in check.pools], {}
        lengths = None if check.lengths is None else check.lengths.clone()

        def begin(key_first: bool = False) -> None:
            for pool, start in zip(check.pools, starts, strict=True):
                turned = key_first and pool is check.pools[0]
                pool[slots] = start.mT.reshape(start.shape) if turned else start

        if check.lengths is not None:
            check.lengths.zero_()
        call()
        wanted = [check.out.float(), check.pools[0][slots].float()]
        exact = None if check.exact is None else check.exact()
        if exact:
            self.errors["attnops"] = max(map(relative, wanted, exact))
        for name, peer in peers.items():
            if not isinstance(peer, PeerCall):
                found[name] = ""
                continue
            try:
                begin(peer.key_first)
                out, state = peer.read(peer())
                state = state.mT if peer.key_first and state is not None else state
                pairs = [(out, wanted[0])] + ([] if state is None else [(state, wanted[1])])
                worst = max(float((got.float().reshape(want.shape) - want).norm() / want.norm()) for got, want in pairs)
                if exact:
                    self.errors[name] = max(relative(got.reshape(x.shape), x) for (got, _), x in zip(pairs, exact))
            except Exception as error:  # a peer's own
                print(f"{case}: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            if worst <= AGREE:
                found[name] = f"differs by {worst:.1e}"
            else:
                print(f"{case}: {name}: differs by {worst:.1e} from attnops, and is not timed", flush=True)
        begin()
        if check.lengths is not None:
            check.lengths.copy_(lengths)
        return found

    def time(self, case: str, contenders: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
        """Median milliseconds of a call, the contenders in turns. ", eager": what no graph could capture."""
        if self.device == "cpu":
            return _cpu_times(contenders, self.rounds)
        torch.cuda.empty_cache()
        replays: dict[str, Callable[[], object]] = {}
        for name, calls in contenders.items():
            try:
                for call in calls:
                    call()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{case}: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            try:
                replays[name] = _captured(calls).replay
            except Exception as error:
                print(f"{case}: {name}: no graph: {type(error).__name__}: {str(error)[:200]}", flush=True)
                replays[f"{name}, eager"] = partial(call_all, calls)
        times: dict[str, list[float]] = {name: [] for name in replays}
        for turn in range(self.rounds + 1):
            for name, replay in replays.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                replay()
                end.record()
                end.synchronize()
                if turn:
                    calls = contenders[name.removesuffix(", eager")]
                    times[name].append(start.elapsed_time(end) / len(calls))
        return {name: statistics.median(taken) for name, taken in times.items()}

    def tried(self, cell: Callable[..., None], *options: object, **named: object) -> None:
        """A cell that fails is told, and the others go on: in a new process, if it has spoilt the device for this."""
        self.tries += 1
        if self.tries <= self.skip:
            return
        try:
            cell(*options, **named)
        except Exception as error:
            self.failed += 1
            print(f"{cell.__name__}{options}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            try:
                if self.device == "cuda":
                    torch.cuda.synchronize()
            except Exception:
                print(f"the device is lost: go on with --from {self.tries}", flush=True)
                raise SystemExit(3) from None

    def summary(self) -> None:
        """The best peer of each cell over attnops, prefill apart too: geometric mean, 5th percentile, slow cells."""
        own = {str((r.case, r.params)): r.ms for r in self.records if r.peer == "attnops"}
        best: dict[str, tuple[float, str]] = {}
        for record in self.records:
            if not record.peer.startswith("attnops"):
                key = str((record.case, record.params))
                best[key] = min(best.get(key, (math.inf, "")), (record.ms, record.peer))
        prompts = {key for key in best if "prefill" in key}
        for kind, keys in (("all", set(best)), ("decode and verify", best.keys() - prompts), ("prefill", prompts)):
            ratios = sorted(best[key][0] / own[key] for key in keys)
            if ratios:
                mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
                fifth, share = ratios[len(ratios) // 20], f"{len(ratios)} cells, {kind}"
                print(f"{share}: best peer {mean:.2f}x, 5th percentile {fifth:.2f}x, least {ratios[0]:.2f}x")
        for key, (ms, peer) in best.items():
            if ms < 0.97 * own[key]:
                print(f"below 0.97x: {ms / own[key]:.2f}x {peer} {key}")


def both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of calls that have run once. A call that waits for the device raises before the capture would break."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call_all(calls)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_all(calls)
    return graph


def _cpu_times(contenders: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Median milliseconds of a call, in turns, after one of each."""
    for calls in contenders.values():
        call_all(calls)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, calls in contenders.items():
            begin = time.perf_counter()
            calls[turn % len(calls)]()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(taken) for name, taken in times.items()}
