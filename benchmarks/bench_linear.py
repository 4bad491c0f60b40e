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
DECODES = [(GDN, n, torch.float32) for n in (1, 64, 256)] + [(GDN, 64, torch.bfloat16), (KDA, 64, torch.float32)]
DECODES += [(MAMBA2, n, torch.float32) for n in (1, 64, 256)] + [(LIGHTNING, 64, torch.float32)]


class Bench:
    """Cells of one device, and their records."""

    def __init__(self, device: str, rounds: int):
        self.device, self.rounds = device, rounds
        self.records: list[Record] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def cell(self, case: str, params: dict, calls: list[Callable[[], object]], floor_ms: float) -> None:
        ms = graph_ms(calls, self.rounds) if self.device == "cuda" else _cpu_ms(calls, self.rounds)
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
            if model in (GDN, KDA):
                calls.append(partial(ops.delta_decode, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given))
            else:
                dt = None if model is LIGHTNING else a
                calls.append(partial(ops.ssd_decode, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given))
        params = {"model": model.name, "batch": batch, "states": str(kept).removeprefix("torch.")}
        self.cell("linear_decode", params, calls, 2 * batch * per_slot / COPY)

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
        bench.decode(GDN, 16, torch.float32, 2**28)
    else:
        for cell in DECODES:
            bench.decode(*cell)
        bench.convolve(8192, 8192, 1, update=False)
        bench.convolve(8192, 8192, 64, update=False)
        bench.convolve(64, 8192, 64, update=True)
        bench.convolve(1, 8192, 1, update=True)
        bench.copy()
    if options.write:
        write(bench.records, "cpu-linear" if options.cpu else "h200-linear")


if __name__ == "__main__":
    main()
