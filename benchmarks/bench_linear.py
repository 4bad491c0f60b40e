"""The ops of linear attention on a GPU, in turns over more states than its L2 holds, beside their floors.

A cell is a CUDA graph of several calls, each over slots of its own, replayed and timed with events. A floor is the time
of the bytes that a call cannot avoid, at the rates of issue 21: 4.65 TB/s read, 4.2 TB/s copied. `--cpu` times the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from attnops import ops
from bench_paged_kv import graph_ms
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


GDN = Model("GDN 16/32", 16, 32, 128, 128)
KDA = Model("KDA 32", 32, 32, 128, 128, channels=True)
MAMBA2 = Model("Mamba2 128 x 64 x 128", 8, 128, 128, 64)
LIGHTNING = Model("Lightning 64", 64, 64, 128, 128)
KDA64 = Model("KDA 64", 64, 64, 128, 128, channels=True)
DELTAS = (GDN, KDA, KDA64)
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


class Bench:
    """Cells of one device, and their records."""

    def __init__(self, device: str, rounds: int):
        self.device, self.rounds = device, rounds
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

    def cell(self, case: str, params: dict, calls: list[Callable[[], object]], floor_ms: float) -> None:
        ms = graph_ms(calls, self.rounds) if self.device == "cuda" else _cpu_ms(calls, self.rounds)
        floor_ms *= COPY / self.copied  # on a CPU, of its own rate
        note = f"floor {1e3 * floor_ms:.1f} us, {floor_ms / ms:.2f} of it"
        device = {"device": cpu_name()} if self.device == "cpu" else {}
        self.records.append(Record(case, "attnops", params, ms=ms, note=note, **device))
        print(f"{case:16s} {1e3 * ms:9.2f} us  {note}  {params}", flush=True)

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
        calls = []
        for turn in range(min(num_slots // batch, 64)):
            slots = self.indices(list(range(turn * batch, (turn + 1) * batch)))
            given = {"states": states, "state_indices": slots, "out": out}
            if model in DELTAS:
                calls.append(partial(ops.delta_decode, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given))
            else:
                dt = None if model is LIGHTNING else a
                calls.append(partial(ops.ssd_decode, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given))
        params = {"model": model.name, "batch": batch, "states": str(kept).removeprefix("torch.")}
        self.cell("linear_decode", params, calls, 2 * batch * per_slot / COPY)

    def prefill(self, model: Model, lengths: list[int], floor_us: float) -> None:
        """Ragged prompts from nothing."""
        total, batch = sum(lengths), len(lengths)
        bounds, zeros = self.indices([sum(lengths[:i]) for i in range(batch + 1)]), self.indices([0] * batch)
        per_head, calls = torch.zeros(model.heads, device=self.device), []
        for _ in range(2):
            q, k = self.tensor(total, model.groups, model.keys), self.tensor(total, model.groups, model.keys)
            v = self.tensor(total, model.heads, model.values)
            a = self.tensor(total, model.heads, *([model.keys] if model.channels else []))
            b, bias = self.tensor(total, model.heads), torch.zeros(a.shape[1:], device=self.device)
            states = torch.zeros(batch, model.heads, model.values, model.keys, device=self.device)
            given = {"states": states, "cu_seqlens": bounds, "prefix_lens": zeros, "out": torch.empty_like(v)}
            given |= {"state_indices": self.indices(list(range(batch))), "plan": ops.delta_plan(bounds)}
            if model in DELTAS:
                calls.append(partial(ops.delta_prefill, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given))
            else:
                dt = None if model is LIGHTNING else a
                calls.append(partial(ops.ssd_prefill, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given))
        params = {"model": model.name, "lengths": f"{batch} x {lengths[0]}"}
        self.cell("linear_prefill", params, calls, floor_us / 1e3)

    def verify(self, batch: int, drafts: int, tree: bool) -> None:
        """GDN drafts behind four rows of a ring of sixteen; and folds of seven rows."""
        per_slot, rows = GDN.heads * GDN.values * GDN.keys * 4, 16
        num_slots = max(POOL // per_slot // batch, 2) * batch
        wide = {"dtype": torch.float32}
        states = torch.zeros(num_slots, GDN.heads, GDN.values, GDN.keys, device=self.device)
        rings = {
            "ring_u": self.tensor(num_slots, GDN.heads, rows, GDN.values, **wide),
            "ring_k": self.tensor(num_slots, GDN.groups, rows, GDN.keys, **wide),
            "ring_decay": torch.ones(num_slots, GDN.heads, rows, device=self.device),
            "ring_len": torch.full((num_slots,), 4, dtype=torch.int32, device=self.device),
        }
        q, k = (self.tensor(batch * drafts, GDN.groups, GDN.keys) for _ in range(2))
        v, out = (self.tensor(batch * drafts, GDN.heads, GDN.values) for _ in range(2))
        a, b = (self.tensor(batch * drafts, GDN.heads) for _ in range(2))
        per_head, mask = torch.zeros(GDN.heads, device=self.device), None
        if tree:
            seen: list[int] = []
            for t in range(drafts):
                seen.append((seen[TREE[t]] if TREE[t] >= 0 else 0) | 1 << t)
            mask = torch.tensor(seen, dtype=torch.uint8, device=self.device).view(1, drafts, 1)
            mask = mask.expand(batch, -1, -1).contiguous()
        path, kept = self.indices([list(range(drafts))] * batch), self.indices([3] * batch)  # type: ignore[list-item]
        calls, folds = [], []
        for turn in range(min(num_slots // batch, 32)):
            given = {**rings, "state_indices": self.indices(list(range(turn * batch, (turn + 1) * batch)))}
            options = {**given, "states": states, "A_log": per_head, "dt_bias": per_head, "tree_mask": mask, "out": out}
            calls.append(partial(ops.delta_verify, q, k, v, a, b, **options))
            folds.append(partial(ops.delta_commit, states, path, kept, fold=True, **given))
        params = {"model": GDN.name, "batch": batch, "drafts": drafts, "tree": tree}
        self.cell("linear_verify", params, calls, batch * per_slot / READ)
        self.cell("linear_fold", params, folds, 2 * batch * per_slot / COPY)

    def convolve(self, tokens: int, channels: int, batch: int, update: bool) -> None:
        calls = []
        weight = self.tensor(channels, 4)
        for _ in range(4):
            x, out = self.tensor(tokens, channels), self.tensor(tokens, channels)
            states, slots = self.tensor(batch, channels, 3), self.indices(list(range(batch)))
            given = {"conv_states": states, "state_indices": slots, "out": out}
            if update:
                calls.append(partial(ops.causal_conv1d_update, x, weight, None, **given))
            else:
                bounds = self.indices([i * tokens // batch for i in range(batch + 1)])
                calls.append(partial(ops.causal_conv1d, x, weight, None, cu_seqlens=bounds, **given))
        name = "causal_conv1d_update" if update else "causal_conv1d"
        num_bytes = 4 * tokens * channels + 12 * batch * channels
        self.cell(name, {"tokens": tokens, "channels": channels, "batch": batch}, calls, num_bytes / COPY)

    def copy(self) -> None:
        """75 MB: a request's states of 36 layers."""
        states = torch.zeros(36, 64, 32, 128, 128, device=self.device)
        calls = [partial(ops.copy_states, states, self.indices([2 * i]), self.indices([2 * i + 1])) for i in range(16)]
        self.cell("copy_states", {"bytes": states[:, 0].numel() * 4}, calls, 2 * states[:, 0].numel() * 4 / COPY)


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
    parser.add_argument("--write", action="store_true", help="record the results")
    options = parser.parse_args()
    bench = Bench("cpu" if options.cpu else "cuda", options.rounds)
    if options.cpu:
        bench.copy_rate()
        bench.decode(GDN, 16, torch.float32, 2**28)
        bench.prefill(GDN, [2048], 0)
    else:
        for cell in DECODES:
            bench.decode(*cell)
        bench.convolve(8192, 8192, 1, update=False)
        bench.convolve(8192, 8192, 64, update=False)
        bench.convolve(64, 8192, 64, update=True)
        bench.convolve(1, 8192, 1, update=True)
        bench.copy()
        for prompts in PREFILLS:
            bench.prefill(*prompts)
        for batch, drafts, tree in ((1, 4, False), (64, 4, False), (64, 8, False), (64, 8, True)):
            bench.verify(batch, drafts, tree)
    if options.write:
        write(bench.records, "cpu-linear" if options.cpu else "h200-linear")


if __name__ == "__main__":
    main()
