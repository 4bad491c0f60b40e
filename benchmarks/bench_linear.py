"""The ops of linear attention on a GPU, in turns over more states than its L2 holds, beside their floors and peers.

A cell is a CUDA graph of several calls, each over slots of its own, replayed and timed with events. A floor is the time
of the bytes that a call cannot avoid, at the rates of issue 21: 4.65 TB/s read, 4.2 TB/s copied. `--cpu` times the CPU,
beside transformers' plain torch. `--peers` times SGLang's and FLA's kernels too, where `linear_peers.py` finds them: as
many calls over the same slots, in a graph as well, replayed in turns with attnops. A peer is compared with attnops
first, and not timed where the two differ. Prompts of a delta rule of at most 2048 tokens also have their errors, and
the peers', against float64 token by token. `--flashinfer` adds FlashInfer's gated delta rule, and `--also` peers that
have to be there, on the path or in `--peer-folder`. `linear_warm.py` compiles the other peers' kernels before, in many
processes. `--only first` times the first call of each op in a process of its own. `--write` records each cell as it is
done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from attnops import ops
from linear_cells import (
    BOUNDED,
    CONV_DECODES,
    CONV_DRAFTS,
    CONVOLUTIONS,
    DECODES,
    FEW_HEADS,
    GDN,
    PREFILLS,
    TREE,
    VERIFIES,
    Drawn,
    Model,
    drawn_cells,
)
from linear_peers import REQUESTED, Calls, Peers, quick_tuning, torch_chunk
from linear_timing import COPY, READ, Check, Timing, both
from records import Record, cpu_name, write
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from linear_reference import delta_gates, delta_step

POOL = 3 * 2**30  # bytes of states
FEW = 64  # heads of all prompts, up to which they may be cut
EXACT = 2048  # tokens of the longest prompt of a delta rule that float64 takes, too


class Bench(Timing):
    """Cells of one device, and their records."""

    def decode(self, model: Model, batch: int, kept: torch.dtype, pool_bytes: int = POOL) -> None:
        """One token for each request."""
        per_slot = model.heads * model.values * model.keys * kept.itemsize
        num_slots = max(pool_bytes // per_slot // batch, 2) * batch
        states = self.pool(num_slots, model.heads, model.values, model.keys, dtype=kept)
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
            if self.peers:
                if model.delta:
                    beside.append(self.peers.delta_step(q, k, v, a, b, per_head, bias, states, slots))
                elif model.constant:
                    bounds = self.indices(list(range(batch + 1)))
                    beside.append(self.peers.lightning(q, k, v, per_head - 1, states, slots, bounds, True))
                else:
                    beside.append(self.peers.ssd_step(v, a, per_head - 1, k, q, states, slots))
        params = {"model": model.name, "batch": batch, "states": str(kept).removeprefix("torch.")}
        check = Check(out, [states], self.indices(list(range(batch))))
        self.cell("linear_decode", params, calls, 2 * batch * per_slot / COPY, beside, check)

    def conv_decode(self, model: Model, batch: int, kept: torch.dtype) -> None:
        """A step's convolution and recurrence in the op that the backends call, beside the two ops."""
        per_slot = model.heads * model.values * model.keys * kept.itemsize
        channels = 2 * model.groups * model.keys + model.heads * model.values
        num_slots = max(POOL // per_slot // batch, 2) * batch
        states = self.pool(num_slots, model.heads, model.values, model.keys, dtype=kept)
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
            calls.append(partial(ops.delta_conv_decode, x, weight, None, a, b, mixed=mixed, **whole))
            pool = {"conv_states": conv_states, "state_indices": slots, "out": mixed}
            first = partial(ops.causal_conv1d_update, x, weight, None, **pool)
            second = partial(ops.delta_decode, q, k, v, a, b, **given)
            pair: Calls = {"attnops, two ops": partial(both, first, second)}
            if self.peers:
                pair |= self.peers.conv_delta_step(
                    x, weight, conv_states, (model.groups, model.heads, model.keys, model.values), a, b, per_head, bias,
                    states, slots,
                )  # fmt: skip
            beside.append(pair)
        params = {"model": model.name, "batch": batch, "states": str(kept).removeprefix("torch.")}
        num_bytes = 2 * batch * (per_slot + 3 * channels * 2)
        check = Check(out, [states, conv_states], self.indices(list(range(batch))))
        self.cell("linear_conv_decode", params, calls, num_bytes / COPY, beside, check)

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

    def prefill(
        self,
        model: Model,
        lengths: list[int],
        floor_us: float,
        kept: torch.dtype = torch.float32,
        lower_bound: float = 0.0,
        gate_bias: float = 0.0,
    ) -> None:
        """Ragged prompts from nothing. lower_bound, gate_bias: of a delta rule's gates, for all heads and channels."""
        total, batch = sum(lengths), len(lengths)
        bounds, zeros = self.indices([sum(lengths[:i]) for i in range(batch + 1)]), self.indices([0] * batch)
        per_head, calls, beside = torch.zeros(model.heads, device=self.device), [], []
        slots, checks = self.indices(list(range(batch))), []
        for _ in range(2):
            q, k = self.tensor(total, model.groups, model.keys), self.tensor(total, model.groups, model.keys)
            v = self.tensor(total, model.heads, model.values)
            a = self.tensor(total, model.heads, *([model.keys] if model.channels else []))
            b, bias = self.tensor(total, model.heads), torch.full(a.shape[1:], gate_bias, device=self.device)
            states = torch.zeros(batch, model.heads, model.values, model.keys, dtype=kept, device=self.device)
            given = {"states": states, "cu_seqlens": bounds, "prefix_lens": zeros, "out": torch.empty_like(v)}
            given |= {"state_indices": slots, "plan": ops.delta_plan(bounds)}
            if model.delta:
                given["lower_bound"] = lower_bound
                call = partial(ops.delta_prefill, q, k, v, a, b, A_log=per_head, dt_bias=bias, **given)
            else:
                dt = None if model.constant else a
                call = partial(ops.ssd_prefill, v, dt, per_head - 1, k, q, dt_softplus=dt is not None, **given)
            calls.append(partial(call, cut_prompts=True))  # as the backends do
            exact, turn = None, {}
            if self.device == "cuda" and batch * model.heads <= FEW:
                turn["attnops, whole prompts"] = call
            if self.device == "cpu" and model.delta and not model.channels:
                turn |= torch_chunk(q, k, v, a, b, per_head, bias, batch)
            if model.delta and max(lengths) <= EXACT:
                tokens = (q, k, v, a, b)
                exact = partial(_exact_prompts, tokens, per_head, bias, states.shape, lengths, lower_bound)
            checks.append(Check(given["out"], [states], slots, exact=exact))
            if self.peers and model.delta:
                bound = (lower_bound,) if lower_bound else ()
                turn |= self.peers.delta_prompts(q, k, v, a, b, per_head, bias, states, slots, bounds, *bound)
            elif self.peers and model.constant:
                turn |= self.peers.lightning(q, k, v, per_head - 1, states, slots, bounds, False)
            elif self.peers:
                turn |= self.peers.ssd_prompts(v, a, per_head - 1, k, q, states, slots, bounds, lengths)
            beside.append(turn)
        drawn = f"{batch}, together {total}, the longest {max(lengths)}"
        of_all = f"{batch} x {lengths[0]}" if len(set(lengths)) == 1 else drawn
        params = {"model": model.name, "lengths": of_all}
        params |= {} if kept == torch.float32 else {"states": str(kept).removeprefix("torch.")}
        params |= {"lower_bound": lower_bound, "gate_bias": gate_bias} if lower_bound else {}
        self.cell("linear_prefill", params, calls, floor_us / 1e3, beside, checks[0] if self.peers else None)

    def verify(
        self, batch: int, drafts: int, tree: bool, model: Model = GDN, kept: torch.dtype = torch.float32
    ) -> None:
        """Drafts behind four rows of a ring of sixteen; and folds of seven rows."""
        per_slot, rows = model.heads * model.values * model.keys * kept.itemsize, 16
        num_slots = max(POOL // per_slot // batch, 2) * batch
        wide = {"dtype": torch.float32}
        states = self.pool(num_slots, model.heads, model.values, model.keys, dtype=kept)
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
        per_head, mask = torch.zeros(model.heads, device=self.device), self.tree(batch, drafts) if tree else None
        bias, dt = torch.zeros(a.shape[1:], device=self.device), None if model.constant else a
        path = self.indices([list(range(drafts))] * batch)  # type: ignore[list-item]
        count, commit = self.indices([min(3, drafts)] * batch), ops.delta_commit if model.delta else ops.ssd_commit
        semaphores = torch.zeros(batch * (model.groups + 1), dtype=torch.int32, device=self.device)
        calls, folds, steps, single, beside = [], [], [], [], []
        turns, peers, accepted = min(num_slots // batch, 32), self.peers, min(3, drafts)
        parents, snapshots = None, []
        if peers:  # a layer has its own snapshots: as many as leave L2
            parents = self.indices([TREE[:drafts]] * batch) if tree else None  # type: ignore[list-item]
            layers = min(turns, max(2**28 // (batch * drafts * per_slot), 1))
            kinds = (layers, batch, drafts, model.heads, model.values, model.keys)
            snapshots = list(torch.zeros(kinds, dtype=kept, device=self.device))
        for turn in range(turns):
            given = {**rings, "state_indices": self.indices(list(range(turn * batch, (turn + 1) * batch)))}
            options = {**given, "states": states, "tree_mask": mask, "out": out}
            if model.delta:
                tokens, options = [q, k, v, a, b], options | {"A_log": per_head, "dt_bias": bias}
            else:
                tokens, options = [v, dt, per_head - 1, k, q], options | {"dt_softplus": dt is not None}
            calls.append(partial(ops.delta_verify if model.delta else ops.ssd_verify, *tokens, **options))
            one = ops.delta_draft_step if model.delta else ops.ssd_draft_step
            single.append(partial(one, *tokens, path, count, semaphores=semaphores, **options))
            folds.append(partial(commit, states, path, count, fold=True, **given))
            steps += [calls[-1], partial(commit, states, path, count, **given)]
            if peers:
                slots, layer = given["state_indices"], snapshots[turn % len(snapshots)]
                kind = model.name.split()[0]
                beside.append(
                    peers.verify(q, k, v, a, b, per_head, bias, kind, states, slots, layer, parents, accepted)
                )
        params = {"model": model.name, "batch": batch, "drafts": drafts, "tree": tree}
        params |= {} if kept == torch.float32 else {"states": str(kept).removeprefix("torch.")}
        self.cell("linear_verify", params, calls, batch * per_slot / READ)
        check = Check(out, [states], self.indices(list(range(batch))), rings["ring_len"])
        self.step(params, steps, single, batch * per_slot, rings["ring_len"], beside, check)
        self.cell("linear_fold", params, folds, 2 * batch * per_slot / COPY)

    def fixed(self, only: str) -> None:
        """The cells of issue 21."""
        if only in ("", "decode"):
            for cell in DECODES:
                self.tried(self.decode, *cell)
        if only in ("", "prefill"):
            for prompts in PREFILLS:
                self.tried(self.prefill, *prompts)
        if only in ("", "prefill", "few"):
            for prompts in FEW_HEADS:
                self.tried(self.prefill, *prompts)
        if only in ("", "prefill", "bounded"):
            for cell in BOUNDED:
                self.tried(self.prefill, *cell)
        if only in ("", "verify"):
            for drafts in VERIFIES:
                self.tried(self.verify, *drafts)
        if only in ("", "conv_decode"):
            for cell in CONV_DECODES:
                self.tried(self.conv_decode, *cell)
        if only in ("", "convolve"):
            for tokens in CONVOLUTIONS:
                self.tried(self.convolve, *tokens)
            for drafts in CONV_DRAFTS:
                self.tried(self.convolve_drafts, *drafts)
            self.tried(self.copy)
        if only in ("", "first"):  # six processes: last, should the time not suffice
            self.tried(self.first_calls)

    def drawn(self, cell: Drawn) -> None:
        if cell.kind == "conv_decode":
            self.conv_decode(cell.model, len(cell.lengths), cell.kept)
        elif cell.kind == "decode":
            self.decode(cell.model, len(cell.lengths), cell.kept)
        elif cell.kind == "verify":
            self.verify(len(cell.lengths), cell.drafts, cell.tree, cell.model, cell.kept)
        else:
            self.prefill(cell.model, cell.lengths, 0, cell.kept)

    def step(self, params: dict, calls: list, single: list, state_bytes: int, lengths: Tensor, beside: list[Calls],
             check: Check) -> None:  # fmt: skip
        """A verification and its commit, up to three drafts accepted; and both as one op, which reads a state once. In
        each step as many rings are folded."""
        accepted = min(3, params["drafts"])
        per_fold = (16 - params["drafts"]) // accepted + 1  # steps from a fold to the next
        spread = accepted * (torch.arange(len(lengths), dtype=lengths.dtype, device=self.device) % per_fold)
        lengths.copy_(spread)
        pairs = [partial(both, *calls[i : i + 2]) for i in range(0, len(calls), 2)]
        floor = state_bytes / READ + 2 * state_bytes / COPY / per_fold
        self.cell("linear_verify_commit", params, pairs, floor, beside, check)
        lengths.copy_(spread)
        self.cell("linear_draft_step", params, single, (1 + 1 / per_fold) * state_bytes / READ)
        lengths.fill_(4)

    def convolve(self, tokens: int, channels: int, batch: int, update: bool) -> None:
        calls, beside, checks = [], [], []
        weight, slots = self.tensor(channels, 4), self.indices(list(range(batch)))
        bounds = None if update else self.indices([i * tokens // batch for i in range(batch + 1)])
        for _ in range(4):
            x, out = self.tensor(tokens, channels), self.tensor(tokens, channels)
            states = self.tensor(batch, channels, 3)
            given = {"conv_states": states, "state_indices": slots, "out": out}
            if update:
                calls.append(partial(ops.causal_conv1d_update, x, weight, None, **given))
            else:
                calls.append(partial(ops.causal_conv1d, x, weight, None, cu_seqlens=bounds, **given))
            checks.append(Check(out, [states], slots))
            if self.peers:
                lengths = [tokens // batch] * batch
                beside.append(self.peers.convolution(x, weight, states, slots, bounds, lengths))
        name = "causal_conv1d_update" if update else "causal_conv1d"
        num_bytes = 4 * tokens * channels + 12 * batch * channels
        params = {"tokens": tokens, "channels": channels, "batch": batch}
        self.cell(name, params, calls, num_bytes / COPY, beside, checks[0])

    def tree(self, batch: int, drafts: int) -> Tensor:
        """The packed mask of TREE for each request, of at most eight drafts."""
        seen: list[int] = []
        for t in range(drafts):
            seen.append((seen[TREE[t]] if TREE[t] >= 0 else 0) | 1 << t)
        mask = torch.tensor(seen, dtype=torch.uint8, device=self.device).view(1, drafts, 1)
        return mask.expand(batch, -1, -1).contiguous()

    def convolve_drafts(self, batch: int, drafts: int, channels: int, tree: bool) -> None:
        """Drafts with the windows that they leave. The floor writes these, too."""
        weight, slots = self.tensor(channels, 4), self.indices(list(range(batch)))
        mask, calls = self.tree(batch, drafts) if tree else None, []
        for _ in range(4):
            x, states = self.tensor(batch * drafts, channels), self.tensor(batch, channels, 3)
            given = {"conv_states": states, "state_indices": slots, "tree_mask": mask, "out": torch.empty_like(x)}
            given["windows"] = torch.empty(batch, drafts, channels, 3, dtype=x.dtype, device=self.device)
            calls.append(partial(ops.causal_conv1d_update, x, weight, None, **given))
        num_bytes = 10 * batch * drafts * channels + 6 * batch * channels
        params = {"batch": batch, "drafts": drafts, "channels": channels, "tree": tree}
        self.cell("causal_conv1d_drafts", params, calls, num_bytes / COPY)

    def copy(self) -> None:
        """75 MB: a request's states of 36 layers."""
        states = torch.zeros(36, 64, 32, 128, 128, device=self.device)
        calls = [partial(ops.copy_states, states, self.indices([2 * i]), self.indices([2 * i + 1])) for i in range(16)]
        self.cell("copy_states", {"bytes": states[:, 0].numel() * 4}, calls, 2 * states[:, 0].numel() * 4 / COPY)


def _exact_prompts(
    tokens: tuple[Tensor, ...],
    A_log: Tensor,
    bias: Tensor,
    shape: torch.Size,
    lengths: list[int],
    lower_bound: float,
) -> tuple[Tensor, Tensor]:
    """Out ``[T, HV, V]`` and states of ragged prompts in float64, a token of all requests at a time."""
    q, k, v, a, b = (x.double() for x in tokens)
    g, beta = delta_gates(a, b, A_log.double(), bias.double(), lower_bound)
    counts = torch.tensor(lengths, device=v.device)
    starts, out = counts.cumsum(0) - counts, torch.zeros_like(v)
    states = torch.zeros(shape, dtype=torch.float64, device=v.device)
    for t in range(max(lengths)):
        live = counts.gt(t).nonzero().flatten()
        at = starts[live] + t
        new, out[at] = delta_step(states[live], *(x[at] for x in (q, k, v, g, beta)), q.shape[-1] ** -0.5, True)
        states[live] = new
    return out, states


def add_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--also", default="", help=f"further peers, of {','.join(REQUESTED)}: each must start")
    parser.add_argument("--peer-folder", type=Path, help="a folder that peers are imported from")


def requested(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Peers by `--also`, importable from `--peer-folder`."""
    if (options.also or options.peer_folder) and not getattr(options, "peers", True):
        parser.error("--also and --peer-folder need --peers")
    if options.peer_folder:
        if not options.peer_folder.is_dir():
            parser.error(f"--peer-folder: expected a folder, got {options.peer_folder}")
        sys.path.insert(0, str(options.peer_folder))
    return [name for name in options.also.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="time the CPU's kernels")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peers", action="store_true", help="time SGLang and FLA as well")
    parser.add_argument("--flashinfer", action="store_true", help="with --peers: FlashInfer, compiled at first calls")
    add_requests(parser)
    parser.add_argument(
        "--only", default="", help="a group: decode, conv_decode, convolve, prefill, few, bounded, verify, first"
    )
    parser.add_argument("--seed", type=int, help="cells that this seed draws, in place of the fixed ones")
    parser.add_argument("--cells", type=int, default=40, help="how many of them")
    parser.add_argument("--from", type=int, default=0, dest="skip", help="how many cells to skip")
    parser.add_argument("--write", action="store_true", help="record the results")
    parser.add_argument("--name", default="cpu", help="prefix of the CPU's result file")
    options = parser.parse_args()
    drawn = options.seed is not None
    name = f"{options.name}-linear" if options.cpu else f"h200-linear{'-drawn' if drawn else ''}"
    also = requested(parser, options)
    if options.peers and not options.cpu:
        quick_tuning()
    peers = Peers(options.flashinfer, also) if options.peers else None
    bench = Bench("cpu" if options.cpu else "cuda", options.rounds, peers, name if options.write else "")
    bench.skip = options.skip
    if options.cpu:
        bench.decode(GDN, 16, torch.float32, 2**28)
        bench.prefill(GDN, [2048], 0)
        bench.first_calls()
    elif drawn:
        for cell in drawn_cells(options.seed, options.cells):
            bench.tried(bench.drawn, cell)
    else:
        bench.fixed(options.only)
    bench.summary()
    if options.write:
        write(bench.records, name, whole=not (drawn or bench.failed or bench.skip))
    if bench.failed:
        raise SystemExit(f"{bench.failed} cells failed")


if __name__ == "__main__":
    main()
