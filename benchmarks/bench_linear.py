"""The ops of linear attention on a GPU, in turns over more states than its L2 holds, beside their floors and peers.

A cell is a CUDA graph of several calls, each over slots of its own, replayed and timed with events. A floor is the time
of the bytes that a call cannot avoid, at the rates of issue 21: 4.65 TB/s read, 4.2 TB/s copied. `--cpu` times the CPU,
beside transformers' plain torch. `--peers` times SGLang's and FLA's kernels too, where `linear_peers.py` finds them, in
turns with attnops. `--only first` times the first call of each op in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attnops import ops
from bench_paged_kv import graph_ms
from linear_cells import CONV_DECODES, DECODES, GDN, PREFILLS, TREE, Drawn, Model, drawn_cells
from linear_peers import Calls, Peers, torch_chunk
from records import Record, cpu_name, write
from torch import Tensor

COPY, READ = 4.2e9, 4.65e9  # bytes a millisecond
POOL = 3 * 2**30  # bytes of states


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

    def conv_decode(self, model: Model, batch: int, kept: torch.dtype) -> None:
        """A step's convolution and recurrence in one call, beside the two."""
        per_slot = model.heads * model.values * model.keys * kept.itemsize
        channels = 2 * model.groups * model.keys + model.heads * model.values
        num_slots = max(POOL // per_slot // batch, 2) * batch
        states = torch.zeros(num_slots, model.heads, model.values, model.keys, dtype=kept, device=self.device)
        conv_states, x = self.tensor(num_slots, channels, 3), self.tensor(batch, channels)
        weight, mixed = self.tensor(channels, 4), self.tensor(batch, channels)
        a = self.tensor(batch, model.heads, *([model.keys] if model.channels else []))
        b, out = self.tensor(batch, model.heads), self.tensor(batch, model.heads, model.values)
        per_head, bias = torch.zeros(model.heads, device=self.device), torch.zeros(a.shape[1:], device=self.device)
        q, k, v = mixed.split([model.groups * model.keys] * 2 + [model.heads * model.values], 1)
        q, k = (t.unflatten(1, (model.groups, model.keys)) for t in (q, k))
        v, gates = v.unflatten(1, (model.heads, model.values)), {"A_log": per_head, "dt_bias": bias}
        calls, beside = [], []
        for turn in range(min(num_slots // batch, 64)):
            slots = self.indices(list(range(turn * batch, (turn + 1) * batch)))
            given = {"states": states, "state_indices": slots, "out": out, **gates}
            whole = {**given, "conv_states": conv_states, "num_k_heads": model.groups}
            calls.append(partial(ops.delta_conv_decode, x, weight, None, a, b, **whole))
            pool = {"conv_states": conv_states, "state_indices": slots, "out": mixed}
            first = partial(ops.causal_conv1d_update, x, weight, None, **pool)
            pair: Calls = {
                "attnops, two launches": partial(_both, first, partial(ops.delta_decode, q, k, v, a, b, **given))
            }
            if self.peers and turn < 16:
                conv = self.peers.convolution(x, weight, conv_states[turn * batch :], None).get("FLA")
                steps = self.peers.delta_step(q, k, v, a, b, per_head, bias, states, slots)
                pair |= {
                    f"{name}, FLA's convolution": partial(_both, conv, call) for name, call in steps.items() if conv
                }
            beside.append(pair)
        params = {"model": model.name, "batch": batch, "states": str(kept).removeprefix("torch.")}
        num_bytes = 2 * batch * (per_slot + 3 * channels * 2)
        beside = beside[:16] if self.peers else beside
        self.cell("linear_conv_decode", params, calls, num_bytes / COPY, beside)

    def first_calls(self) -> None:
        """The first call of each op in a process that has done nothing else with attnops: its kernels are loaded."""
        script = Path(__file__).parent / "linear_first_call.py"
        for op in ("delta_decode", "delta_conv_decode", "delta_prefill", "delta_verify", "ssd_decode", "ssd_prefill"):
            command = [sys.executable, str(script), op, self.device]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            note = f"the second {told['second']:.3f} ms"
            device = {"device": cpu_name()} if self.device == "cpu" else {}
            params = {"op": op}
            self.records.append(Record("linear_first_call", "attnops", params, ms=told["first"], note=note, **device))
            print(f"{'linear_first_call':16s} {told['first']:9.2f} ms  {note}  {params}", flush=True)

    def prefill(self, model: Model, lengths: list[int], floor_us: float, kept: torch.dtype = torch.float32) -> None:
        """Ragged prompts from nothing."""
        total, batch = sum(lengths), len(lengths)
        bounds, zeros = self.indices([sum(lengths[:i]) for i in range(batch + 1)]), self.indices([0] * batch)
        per_head, calls, beside = torch.zeros(model.heads, device=self.device), [], []
        for _ in range(2):
            q, k = self.tensor(total, model.groups, model.keys), self.tensor(total, model.groups, model.keys)
            v = self.tensor(total, model.heads, model.values)
            a = self.tensor(total, model.heads, *([model.keys] if model.channels else []))
            b, bias = self.tensor(total, model.heads), torch.zeros(a.shape[1:], device=self.device)
            states = torch.zeros(batch, model.heads, model.values, model.keys, dtype=kept, device=self.device)
            given = {"states": states, "cu_seqlens": bounds, "prefix_lens": zeros, "out": torch.empty_like(v)}
            given |= {"state_indices": self.indices(list(range(batch))), "plan": ops.delta_plan(bounds)}
            if model.delta:
                calls.append(partial(ops.delta_prefill, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given))
            else:
                dt = None if model.constant else a
                calls.append(partial(ops.ssd_prefill, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given))
            if self.device == "cpu" and model.delta and not model.channels:
                beside.append(torch_chunk(q, k, v, a, b, per_head, bias, batch))
            if self.peers:
                if model.delta:
                    beside.append(self.peers.delta_prompts(q, k, v, a, b, per_head, bias, states, bounds))
                elif model.constant:
                    slots = given["state_indices"]
                    beside.append(self.peers.lightning(q, k, v, per_head - 1, states, slots, bounds, False))
                else:  # whose scan takes prompts of one length
                    equal = len(set(lengths)) == 1
                    beside.append(self.peers.ssd_prompts(v, a, per_head - 1, k, q, lengths) if equal else {})
        drawn = f"{batch}, together {total}, the longest {max(lengths)}"
        of_all = f"{batch} x {lengths[0]}" if len(set(lengths)) == 1 else drawn
        params = {"model": model.name, "lengths": of_all}
        params |= {} if kept == torch.float32 else {"states": str(kept).removeprefix("torch.")}
        self.cell("linear_prefill", params, calls, floor_us / 1e3, beside)

    def verify(
        self, batch: int, drafts: int, tree: bool, model: Model = GDN, kept: torch.dtype = torch.float32
    ) -> None:
        """Drafts behind four rows of a ring of sixteen; and folds of seven rows."""
        per_slot, rows = model.heads * model.values * model.keys * kept.itemsize, 16
        num_slots = max(POOL // per_slot // batch, 2) * batch
        wide = {"dtype": torch.float32}
        states = torch.zeros(num_slots, model.heads, model.values, model.keys, dtype=kept, device=self.device)
        channels = [model.keys] if model.channels else []
        rings = {
            "ring_u": self.tensor(num_slots, model.heads, rows, model.values, **wide),
            "ring_k": self.tensor(num_slots, model.groups, rows, model.keys, **wide),
            "ring_decay": torch.ones(num_slots, model.heads, rows, *channels, device=self.device),
            "ring_len": torch.full((num_slots,), 4, dtype=torch.int32, device=self.device),
        }
        q, k = (self.tensor(batch * drafts, model.groups, model.keys) for _ in range(2))
        v, out = (self.tensor(batch * drafts, model.heads, model.values) for _ in range(2))
        a, b = self.tensor(batch * drafts, model.heads, *channels), self.tensor(batch * drafts, model.heads)
        per_head, mask = torch.zeros(model.heads, device=self.device), None
        bias, dt = torch.zeros(a.shape[1:], device=self.device), None if model.constant else a
        if tree:
            seen: list[int] = []
            for t in range(drafts):
                seen.append((seen[TREE[t]] if TREE[t] >= 0 else 0) | 1 << t)
            mask = torch.tensor(seen, dtype=torch.uint8, device=self.device).view(1, drafts, 1)
            mask = mask.expand(batch, -1, -1).contiguous()
        path = self.indices([list(range(drafts))] * batch)  # type: ignore[list-item]
        count, commit = self.indices([min(3, drafts)] * batch), ops.delta_commit if model.delta else ops.ssd_commit
        calls, folds, steps, beside = [], [], [], []
        kinds = (model.heads, model.values, model.keys)
        plain = model.delta and not model.channels and not tree and drafts >= 3
        snapshots = torch.zeros(batch, drafts, *kinds, device=self.device) if self.peers and plain else None
        for turn in range(min(num_slots // batch, 32)):
            given = {**rings, "state_indices": self.indices(list(range(turn * batch, (turn + 1) * batch)))}
            options = {**given, "states": states, "tree_mask": mask, "out": out}
            if model.delta:
                calls.append(partial(ops.delta_verify, q, k, v, a, b, A_log=per_head, dt_bias=bias, **options))
            else:
                options["dt_softplus"] = dt is not None
                calls.append(partial(ops.ssd_verify, v, dt, per_head - 1, k, q, **options))
            folds.append(partial(commit, states, path, count, fold=True, **given))
            steps += [calls[-1], partial(commit, states, path, count, **given)]
            if self.peers and snapshots is not None and turn < 8:
                slots = given["state_indices"]
                beside.append(self.peers.verify(q, k, v, a, b, per_head, per_head, states, slots, snapshots, None))
        params = {"model": model.name, "batch": batch, "drafts": drafts, "tree": tree}
        params |= {} if kept == torch.float32 else {"states": str(kept).removeprefix("torch.")}
        self.cell("linear_verify", params, calls, batch * per_slot / READ)
        self.step(params, steps, batch * per_slot, rings["ring_len"], beside)
        self.cell("linear_fold", params, folds, 2 * batch * per_slot / COPY)

    def fixed(self, only: str) -> None:
        """The cells of issue 21."""
        if only in ("", "decode"):
            for cell in DECODES:
                self.decode(*cell)
        if only in ("", "conv_decode"):
            for cell in CONV_DECODES:
                self.conv_decode(*cell)
        if only in ("", "first"):
            self.first_calls()
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
            self.verify(len(cell.lengths), cell.drafts, cell.tree, cell.model, cell.kept)
        else:
            self.prefill(cell.model, cell.lengths, 0, cell.kept)

    def summary(self) -> None:
        """The best peer of each cell over attnops: geometric mean, 5th percentile, the least."""
        own = {str((r.case, r.params)): r.ms for r in self.records if r.peer == "attnops"}
        best: dict[str, float] = {}
        for record in self.records:
            if not record.peer.startswith("attnops"):
                key = str((record.case, record.params))
                best[key] = min(best.get(key, math.inf), record.ms)
        ratios = sorted(best[key] / own[key] for key in best)
        if ratios:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            fifth = ratios[len(ratios) // 20]
            print(f"{len(ratios)} cells: best peer {mean:.2f}x, 5th percentile {fifth:.2f}x, least {ratios[0]:.2f}x")

    def step(self, params: dict, calls: list, state_bytes: int, lengths: Tensor, beside: list[Calls]) -> None:
        """A verification and its commit, up to three drafts accepted. In each step as many rings are folded."""
        accepted = min(3, params["drafts"])
        per_fold = (16 - params["drafts"]) // accepted + 1  # steps from a fold to the next
        lengths.copy_(accepted * (torch.arange(len(lengths), device=self.device) % per_fold))
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
    parser.add_argument("--only", default="", help="a group: decode, conv_decode, convolve, prefill, verify, first")
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
        bench.first_calls()
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
