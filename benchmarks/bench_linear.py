"""The ops of linear attention on a GPU, in turns over more states than its L2 holds, beside their floors and peers.

A cell is a CUDA graph of several calls, each over slots of its own, replayed and timed with events. A floor is the time
of the bytes that a call cannot avoid, at the rates of issue 21: 4.65 TB/s read, 4.2 TB/s copied. `--cpu` times the CPU.
`--peers` times SGLang's and FLA's kernels too, where `linear_peers.py` finds them, in turns with attnops.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from attnops import ops
from bench_paged_kv import graph_ms
from linear_peers import Calls, Peers
from records import Record, cpu_name, write
from torch import Tensor

COPY, READ = 4.2e9, 4.65e9  # bytes a millisecond
POOL = 3 * 2**30  # bytes of states


@dataclass(frozen=True)
class Model:
    """Extents of a layer. groups: heads of keys, or of B and C."""

    name: str
    groups: int
    heads: int
    keys: int
    values: int
    channels: bool = False

    @property
    def delta(self) -> bool:
        return self.name[:3] in ("GDN", "KDA")

    @property
    def constant(self) -> bool:
        """Whether its decay is a head's own: there is no dt."""
        return self.name.startswith("Lightning")


GDN = Model("GDN 16/32", 16, 32, 128, 128)
KDA = Model("KDA 32", 32, 32, 128, 128, channels=True)
MAMBA2 = Model("Mamba2 128 x 64 x 128", 8, 128, 128, 64)
LIGHTNING = Model("Lightning 64", 64, 64, 128, 128)
KDA64 = Model("KDA 64", 64, 64, 128, 128, channels=True)
GDN64 = Model("GDN 16/64", 16, 64, 128, 128)
DECODES = [(GDN, n, torch.float32) for n in (1, 64, 256)] + [(GDN, 64, torch.bfloat16), (KDA, 64, torch.float32)]
# Model, lengths, floor in us: of operations or of bytes, whichever takes longer (issue 21).
PREFILLS = [
    (GDN, [2048], 14),
    (GDN, [8192], 55),
    (GDN, [32768], 219),
    (GDN, [1024] * 8, 55),
    (GDN, [8192] * 4, 219),
    (GDN, [128] * 64, 111),
    (KDA64, [8192], 153),
    (KDA64, [1024] * 8, 167),
    (MAMBA2, [8192], 74),
    (MAMBA2, [1024] * 16, 175),
    (LIGHTNING, [8192], 124),
]
TREE = [-1, 0, 0, 1, 1, 2, 2, 3]  # parents
DECODES += [(MAMBA2, n, torch.float32) for n in (1, 64, 256)] + [(LIGHTNING, 64, torch.float32)]


@dataclass(frozen=True)
class Drawn:
    """A cell that a seed draws: requests are one token each, prompts, or drafts."""

    kind: str
    model: Model
    lengths: list[int]
    kept: torch.dtype = torch.float32
    drafts: int = 1


def drawn_cells(seed: int, count: int) -> list[Drawn]:
    """The law: half decodes, 0.35 prefills, the rest verifications; heads as a model's on 1 to 8 ranks; batches and
    lengths even in their logarithms, prompts equal, one long among short ones, or all drawn."""
    r, cells = random.Random(seed), []
    even = lambda low, high: round(math.exp(r.uniform(math.log(low), math.log(high))))  # noqa: E731
    while len(cells) < count:
        kind = r.choices(["decode", "prefill", "verify"], [0.5, 0.35, 0.15])[0]
        model = r.choice([GDN, GDN64, KDA, MAMBA2, LIGHTNING] if kind != "verify" else [GDN, GDN64])
        ranks = r.choice([1, 2, 4, 8])
        model = replace(model, name=f"{model.name} / {ranks}", groups=model.groups // ranks, heads=model.heads // ranks)
        if kind == "prefill":
            batch, law, most = even(1, 32), r.choice(["equal", "one long", "drawn"]), even(64, 16384)
            short = max(most // 16, 1)
            lengths = [most if law == "equal" else even(16, most) if law == "drawn" else short for _ in range(batch)]
            lengths[0] = most
            if sum(lengths) <= 65536 and (model.name[:3] != "Mam" or len(set(lengths)) == 1):
                cells.append(Drawn(kind, model, lengths))
            continue
        batch = even(1, 256) if kind == "decode" else even(1, 64)
        kept = r.choice([torch.float32, torch.float32, torch.bfloat16]) if kind == "decode" else torch.float32
        cells.append(Drawn(kind, model, [1] * batch, kept, r.choice([2, 3, 4, 6, 8])))
    return cells


class Bench:
    """Cells of one device, and their records."""

    def __init__(self, device: str, rounds: int, peers: Peers | None = None):
        self.device, self.rounds, self.peers = device, rounds, peers
        self.records: list[Record] = []
        self.copied = COPY

    def copy_rate(self) -> None:
        """The floor of a CPU: a plain copy as large as a batch of states."""
        source, target = torch.randn(2, 2**24).unbind(0)
        self.copied = 2 * source.nbytes / _cpu_ms([partial(target.copy_, source)], 9)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def cell(
        self,
        case: str,
        params: dict,
        calls: list[Callable[[], object]],
        floor_ms: float,
        peers: list[Calls] | None = None,
    ) -> None:
        """peers: for each turn, calls by their names."""
        ms = self.time(calls)
        floor_ms *= COPY / self.copied  # on a CPU, of its own rate
        found: dict[str, float] = {}
        for name in peers[0] if peers else ():
            try:
                found[name] = self.time([turn[name] for turn in peers or ()])
            except Exception as error:  # a peer's own
                print(f"{case}: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if found:
            ms = (ms + self.time(calls)) / 2  # before and after them
        note = f"floor {1e3 * floor_ms:.1f} us, {floor_ms / ms:.2f} of it"
        device = {"device": cpu_name()} if self.device == "cpu" else {}
        self.records.append(Record(case, "attnops", params, ms=ms, note=note, **device))
        for name, theirs in found.items():
            self.records.append(Record(case, name, params, ms=theirs, version=Peers.version(name)))
        beside = "".join(f"  {name} {1e3 * theirs:.1f} ({theirs / ms:.2f}x)" for name, theirs in found.items())
        print(f"{case:16s} {1e3 * ms:9.2f} us  {note}{beside}  {params}", flush=True)

    def time(self, calls: list[Callable[[], object]]) -> float:
        return graph_ms(calls, self.rounds) if self.device == "cuda" else _cpu_ms(calls, self.rounds)

    def decode(self, model: Model, batch: int, kept: torch.dtype, pool_bytes: int = POOL) -> None:
        """One token for each request."""
        per_slot = model.heads * model.values * model.keys * kept.itemsize
        num_slots = max(pool_bytes // per_slot // batch, 2) * batch
        states = torch.zeros(num_slots, model.heads, model.values, model.keys, dtype=kept, device=self.device)
        q, k = self.tensor(batch, model.groups, model.keys), self.tensor(batch, model.groups, model.keys)
        v = self.tensor(batch, model.heads, model.values)
        a = self.tensor(batch, model.heads, *([model.keys] if model.channels else []))
        b, per_head = self.tensor(batch, model.heads), torch.zeros(model.heads, device=self.device)
        bias, out = torch.zeros(a.shape[1:], device=self.device), torch.empty_like(v)
        calls, beside = [], []
        for turn in range(min(num_slots // batch, 64)):
            slots = self.indices(list(range(turn * batch, (turn + 1) * batch)))
            given = {"states": states, "state_indices": slots, "out": out}
            if model.delta:
                calls.append(partial(ops.delta_decode, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given))
            else:
                dt = None if model.constant else a
                calls.append(partial(ops.ssd_decode, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given))
            if self.peers and turn < 16:
                if model.delta:
                    beside.append(self.peers.delta_step(q, k, v, a, b, per_head, bias, states, slots))
                elif model.constant:
                    bounds = self.indices(list(range(batch + 1)))
                    beside.append(self.peers.lightning(q, k, v, per_head - 1, states, slots, bounds, True))
                else:
                    beside.append(self.peers.ssd_step(v, a, per_head - 1, k, q, states, slots))
        params = {"model": model.name, "batch": batch, "states": str(kept).removeprefix("torch.")}
        self.cell("linear_decode", params, calls, 2 * batch * per_slot / COPY, beside)

    def prefill(self, model: Model, lengths: list[int], floor_us: float) -> None:
        """Ragged prompts from nothing."""
        total, batch = sum(lengths), len(lengths)
        bounds, zeros = self.indices([sum(lengths[:i]) for i in range(batch + 1)]), self.indices([0] * batch)
        per_head, calls, beside = torch.zeros(model.heads, device=self.device), [], []
        for _ in range(2):
            q, k = self.tensor(total, model.groups, model.keys), self.tensor(total, model.groups, model.keys)
            v = self.tensor(total, model.heads, model.values)
            a = self.tensor(total, model.heads, *([model.keys] if model.channels else []))
            b, bias = self.tensor(total, model.heads), torch.zeros(a.shape[1:], device=self.device)
            states = torch.zeros(batch, model.heads, model.values, model.keys, device=self.device)
            given = {"states": states, "cu_seqlens": bounds, "prefix_lens": zeros, "out": torch.empty_like(v)}
            given |= {"state_indices": self.indices(list(range(batch))), "plan": ops.delta_plan(bounds)}
            if model.delta:
                calls.append(partial(ops.delta_prefill, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given))
            else:
                dt = None if model.constant else a
                calls.append(partial(ops.ssd_prefill, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given))
            if self.peers:
                if model.delta:
                    beside.append(self.peers.delta_prompts(q, k, v, a, b, per_head, bias, states, bounds))
                elif model.constant:
                    slots = given["state_indices"]
                    beside.append(self.peers.lightning(q, k, v, per_head - 1, states, slots, bounds, False))
                else:
                    beside.append(self.peers.ssd_prompts(v, a, per_head - 1, k, q, lengths))
        drawn = f"{batch}, together {total}, the longest {max(lengths)}"
        of_all = f"{batch} x {lengths[0]}" if len(set(lengths)) == 1 else drawn
        params = {"model": model.name, "lengths": of_all}
        self.cell("linear_prefill", params, calls, floor_us / 1e3, beside)

    def verify(self, batch: int, drafts: int, tree: bool, model: Model = GDN) -> None:
        """GDN drafts behind four rows of a ring of sixteen; and folds of seven rows."""
        per_slot, rows = model.heads * model.values * model.keys * 4, 16
        num_slots = max(POOL // per_slot // batch, 2) * batch
        wide = {"dtype": torch.float32}
        states = torch.zeros(num_slots, model.heads, model.values, model.keys, device=self.device)
        rings = {
            "ring_u": self.tensor(num_slots, model.heads, rows, model.values, **wide),
            "ring_k": self.tensor(num_slots, model.groups, rows, model.keys, **wide),
            "ring_decay": torch.ones(num_slots, model.heads, rows, device=self.device),
            "ring_len": torch.full((num_slots,), 4, dtype=torch.int32, device=self.device),
        }
        q, k = (self.tensor(batch * drafts, model.groups, model.keys) for _ in range(2))
        v, out = (self.tensor(batch * drafts, model.heads, model.values) for _ in range(2))
        a, b = (self.tensor(batch * drafts, model.heads) for _ in range(2))
        per_head, mask = torch.zeros(model.heads, device=self.device), None
        if tree:
            seen: list[int] = []
            for t in range(drafts):
                seen.append((seen[TREE[t]] if TREE[t] >= 0 else 0) | 1 << t)
            mask = torch.tensor(seen, dtype=torch.uint8, device=self.device).view(1, drafts, 1)
            mask = mask.expand(batch, -1, -1).contiguous()
        path, kept = self.indices([list(range(drafts))] * batch), self.indices([3] * batch)  # type: ignore[list-item]
        calls, folds, steps, beside = [], [], [], []
        kinds = (model.heads, model.values, model.keys)
        snapshots = torch.zeros(batch, drafts, *kinds, device=self.device) if self.peers and not tree else None
        for turn in range(min(num_slots // batch, 32)):
            given = {**rings, "state_indices": self.indices(list(range(turn * batch, (turn + 1) * batch)))}
            options = {**given, "states": states, "A_log": per_head, "dt_bias": per_head, "tree_mask": mask, "out": out}
            calls.append(partial(ops.delta_verify, q, k, v, a, b, **options))
            folds.append(partial(ops.delta_commit, states, path, kept, fold=True, **given))
            steps += [calls[-1], partial(ops.delta_commit, states, path, kept, **given)]
            if self.peers and snapshots is not None and turn < 8:
                slots = given["state_indices"]
                beside.append(self.peers.verify(q, k, v, a, b, per_head, per_head, states, slots, snapshots, None))
        params = {"model": model.name, "batch": batch, "drafts": drafts, "tree": tree}
        self.cell("linear_verify", params, calls, batch * per_slot / READ)
        self.step(params, steps, batch * per_slot, rings["ring_len"], beside)
        self.cell("linear_fold", params, folds, 2 * batch * per_slot / COPY)

    def fixed(self, only: str) -> None:
        """The cells of issue 21."""
        if only in ("", "decode"):
            for cell in DECODES:
                self.decode(*cell)
        if only in ("", "convolve"):
            self.convolve(8192, 8192, 1, update=False)
            self.convolve(8192, 8192, 64, update=False)
            self.convolve(64, 8192, 64, update=True)
            self.convolve(1, 8192, 1, update=True)
            self.copy()
        if only in ("", "prefill"):
            for prompts in PREFILLS:
                self.prefill(*prompts)
        if only in ("", "verify"):
            for batch, drafts, tree in ((1, 4, False), (64, 4, False), (64, 8, False), (64, 8, True)):
                self.verify(batch, drafts, tree)

    def drawn(self, cell: Drawn) -> None:
        if cell.kind == "decode":
            self.decode(cell.model, len(cell.lengths), cell.kept)
        elif cell.kind == "verify":
            self.verify(len(cell.lengths), cell.drafts, False, cell.model)
        else:
            self.prefill(cell.model, cell.lengths, 0)

    def summary(self) -> None:
        """The best peer of each cell over attnops: geometric mean, 5th percentile, the least."""
        own = {str((r.case, r.params)): r.ms for r in self.records if r.peer == "attnops"}
        best: dict[str, float] = {}
        for record in self.records:
            if record.peer != "attnops":
                key = str((record.case, record.params))
                best[key] = min(best.get(key, math.inf), record.ms)
        ratios = sorted(best[key] / own[key] for key in best)
        if ratios:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            fifth = ratios[len(ratios) // 20]
            print(f"{len(ratios)} cells: best peer {mean:.2f}x, 5th percentile {fifth:.2f}x, least {ratios[0]:.2f}x")

    def step(self, params: dict, calls: list, state_bytes: int, lengths: Tensor, beside: list[Calls]) -> None:
        """A verification and its commit, three drafts accepted. In each step as many rings are folded as in others."""
        per_fold = (16 - params["drafts"]) // 3 + 1  # steps from a fold to the next
        lengths.copy_(3 * (torch.arange(len(lengths), device=self.device) % per_fold))
        pairs = [partial(_both, *calls[i : i + 2]) for i in range(0, len(calls), 2)]
        floor = state_bytes / READ + 2 * state_bytes / COPY / per_fold
        self.cell("linear_verify_commit", params, pairs, floor, beside)
        lengths.fill_(4)

    def convolve(self, tokens: int, channels: int, batch: int, update: bool) -> None:
        calls, beside = [], []
        weight = self.tensor(channels, 4)
        for _ in range(4):
            x, out = self.tensor(tokens, channels), self.tensor(tokens, channels)
            states, slots = self.tensor(batch, channels, 3), self.indices(list(range(batch)))
            given = {"conv_states": states, "state_indices": slots, "out": out}
            if update:
                calls.append(partial(ops.causal_conv1d_update, x, weight, None, **given))
                bounds = None
            else:
                bounds = self.indices([i * tokens // batch for i in range(batch + 1)])
                calls.append(partial(ops.causal_conv1d, x, weight, None, cu_seqlens=bounds, **given))
            if self.peers:
                beside.append(self.peers.convolution(x, weight, states, bounds))
        name = "causal_conv1d_update" if update else "causal_conv1d"
        num_bytes = 4 * tokens * channels + 12 * batch * channels
        self.cell(name, {"tokens": tokens, "channels": channels, "batch": batch}, calls, num_bytes / COPY, beside)

    def copy(self) -> None:
        """75 MB: a request's states of 36 layers."""
        states = torch.zeros(36, 64, 32, 128, 128, device=self.device)
        calls = [partial(ops.copy_states, states, self.indices([2 * i]), self.indices([2 * i + 1])) for i in range(16)]
        self.cell("copy_states", {"bytes": states[:, 0].numel() * 4}, calls, 2 * states[:, 0].numel() * 4 / COPY)


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def _cpu_ms(calls: list[Callable[[], object]], rounds: int) -> float:
    calls[0]()
    times = []
    for i in range(rounds):
        begin = time.perf_counter()
        calls[i % len(calls)]()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="time the CPU's kernels")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peers", action="store_true", help="time SGLang and FLA as well")
    parser.add_argument("--only", default="", help="a group of cells: decode, convolve, prefill, verify")
    parser.add_argument("--seed", type=int, help="cells that this seed draws, in place of the fixed ones")
    parser.add_argument("--cells", type=int, default=40, help="how many of them")
    parser.add_argument("--write", action="store_true", help="record the results")
    parser.add_argument("--name", default="cpu", help="prefix of the CPU's result file")
    options = parser.parse_args()
    bench = Bench("cpu" if options.cpu else "cuda", options.rounds, Peers() if options.peers else None)
    if options.cpu:
        bench.copy_rate()
        bench.decode(GDN, 16, torch.float32, 2**28)
        bench.prefill(GDN, [2048], 0)
    elif options.seed is not None:
        for cell in drawn_cells(options.seed, options.cells):
            bench.drawn(cell)
        bench.summary()
    else:
        bench.fixed(options.only)
    if options.write:
        write(bench.records, f"{options.name}-linear" if options.cpu else "h200-linear")


if __name__ == "__main__":
    main()
