"""MLA decode on one GPU, alternately with FlashMLA, FA3 (`qv`) and FlashInfer, in one run with the ceilings.

    python benchmarks/bench_mla_decode.py [--write] [--quick] [--sustained] [--only TEXT] [--context N]

A cell's calls are captured in a graph; call r reads the r-th slice of a pool of random latents, so that a replay
touches at least 1.5 GB and L2 serves no repeat. Peers are timed in turns, several rounds; `ms` is the median replay
divided by the calls. `gbs` counts each cached byte once, plus q and out; `tflops` the two products. The plan is made
before, as in a step of many layers; its own time is the case `mla_decode_plan`.

A peer that is not found, or refuses a cell, is named, and not timed. With `--context 131072` page tables are as wide as
an engine's; the cases are then "mla_decode at 131072" and so on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import records
import sampled_cells
import sampled_contenders
from attnops import ops
from attnops.metadata.plan import MlaDecodePlan
from attnops.reference import pack_mla_fp8_rows, unpack_mla_fp8_rows

SCALE = 1 / math.sqrt(192)
POOL_TOKENS = 2_800_000
TOLERANCE = {"bf16": 0.02, "e4m3": 0.12, "rows": 0.12}  # FlashMLA's FP8 op rounds q and the probabilities
BYTES_PER_REPLAY = 1.5e9
ROW_BYTES = {"bf16": 1152, "e4m3": 576, "rows": 656}
RAGGED = torch.randint(256, 16385, (64,), generator=torch.Generator().manual_seed(11)).tolist()


@dataclasses.dataclass
class Cell:
    heads: int
    lengths: list[int]
    page: int = 64
    seqlen_q: int = 1
    fixed: int = 0
    kv: str = "bf16"  # the cache: bf16, e4m3 (one scale), rows (656 bytes, four scales a row)
    context: int = 0  # tokens that a row of the page table has room for, at least; 0: as the longest request needs

    @property
    def params(self) -> dict:
        same = len(set(self.lengths)) == 1
        return {
            "h_q": self.heads,
            "s_q": self.seqlen_q,
            "batch": len(self.lengths),
            "s_k": self.lengths[0] if same else f"ragged {min(self.lengths)}..{max(self.lengths)}",
            "page": self.page,
            "fixed_split_tokens": self.fixed,
            **({"kv": self.kv} if self.kv != "bf16" else {}),
            **({"context": self.context} if self.context else {}),
        }

    @property
    def row_bytes(self) -> int:
        return ROW_BYTES[self.kv]

    @property
    def name(self) -> str:
        p = self.params
        fixed = f" fixed {self.fixed}" if self.fixed else ""
        kv = f" {self.kv}" if self.kv != "bf16" else ""
        wide = f" at {self.context}" if self.context else ""
        return f"{p['h_q']}h x {p['s_q']}q, {p['batch']} x {p['s_k']}, page {p['page']}{fixed}{kv}{wide}"


def cells(quick: bool) -> list[Cell]:
    def even(heads, batch, length, **options):
        return Cell(heads, [length] * batch, **options)

    first = [even(128, b, s) for b, s in ((64, 4096), (128, 4096), (1, 16384), (16, 1024), (64, 1024))]
    first += [even(16, b, s) for b, s in ((1, 16384), (64, 1024), (64, 4096))]
    first += [even(64, 64, 4096), even(128, 64, 4096, page=1), Cell(128, RAGGED), Cell(16, RAGGED)]
    first += [even(heads, 64, 4096, kv=kv) for kv in ("e4m3", "rows") for heads in (16, 128)]
    if quick:
        return first
    more = [even(128, b, s) for b, s in ((1, 1024), (1, 4096), (16, 4096), (16, 16384), (128, 1024), (64, 16384))]
    more += [even(16, b, s) for b, s in ((1, 1024), (1, 4096), (16, 1024), (16, 4096), (64, 16384), (128, 4096))]
    more += [even(64, b, s) for b, s in ((1, 16384), (16, 1024), (64, 1024), (64, 16384))]
    more += [even(128, 128, 16384), even(16, 128, 16384), even(16, 64, 4096, page=1)]
    more += [Cell(128, RAGGED, page=1), Cell(16, RAGGED, page=1), even(128, 64, 4096, seqlen_q=2)]
    more += [even(16, 64, 4096, seqlen_q=n) for n in range(2, 9)]
    more += [even(128, 64, 4096, fixed=2048), even(128, 1, 16384, fixed=512)]
    for kv in ("e4m3", "rows"):
        more += [even(heads, b, s, kv=kv) for heads in (16, 128) for b, s in ((1, 16384), (64, 1024), (64, 16384))]
        more += [even(64, 64, 4096, kv=kv), Cell(16, RAGGED, kv=kv), Cell(128, RAGGED, kv=kv)]
        more += [even(heads, 64, 4096, page=1, kv=kv) for heads in (16, 128)]
    return first + more


class Pools:
    """Random latents in each cache format, made when first asked for."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}

    def __getitem__(self, kv: str) -> torch.Tensor:
        if kv not in self.made:
            self.made[kv] = self.make(kv)
        return self.made[kv]

    def make(self, kv: str) -> torch.Tensor:
        latent = torch.empty(POOL_TOKENS, 576, dtype=torch.bfloat16, device="cuda").normal_()
        if kv == "bf16":
            return latent
        if kv == "e4m3":
            return latent.to(torch.float8_e4m3fn)
        return torch.cat([pack_mla_fp8_rows(part.float()) for part in latent.split(100_000)])


class Problem:
    """A cell's tensors: slices of one pool, read by shuffled pages."""

    def __init__(self, cell: Cell, pools: Pools):
        pool = pools[cell.kv]
        self.cell, device = cell, pool.device
        counts = [-(-length // cell.page) for length in cell.lengths]
        pages = sum(counts)
        self.tokens = sum(cell.lengths)
        slice_tokens = pages * cell.page
        self.kv_bytes = self.tokens * cell.row_bytes
        self.rotations = max(1, min(256, pool.shape[0] // slice_tokens, math.ceil(BYTES_PER_REPLAY / self.kv_bytes)))
        self.pools = [pool[r * slice_tokens :][:slice_tokens].view(pages, cell.page, -1) for r in range(self.rotations)]
        order = torch.randperm(pages, device=device, dtype=torch.int32)
        width = max(*counts, -(-cell.context // cell.page))
        self.page_table = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
        used = torch.arange(width, device=device) < torch.tensor(counts, device=device)[:, None]
        self.page_table[used] = order
        self.kv_indices = order
        self.kv_indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        self.cache_seqlens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
        self.q = torch.randn(len(counts), cell.seqlen_q, cell.heads, 576, dtype=torch.bfloat16, device=device)
        self.flops = 2 * self.tokens * cell.seqlen_q * cell.heads * (576 + 512)
        self.bytes = self.kv_bytes + self.q.numel() * 2 + self.q.numel() // 576 * 1024

    def reference(self, request: int) -> torch.Tensor:
        length, seqlen_q = self.cell.lengths[request], self.cell.seqlen_q
        pages = self.page_table[request][: -(-length // self.cell.page)].long()
        latent = self.latents(self.pools[0].view(torch.uint8)[pages].flatten(0, 1)[:length])
        scores = torch.einsum("qhd,kd->qhk", self.q[request].double(), latent) * SCALE
        position = torch.arange(length - seqlen_q, length, device=latent.device)
        hidden = torch.arange(length, device=latent.device) > position[:, None]
        return scores.masked_fill_(hidden[:, None], -math.inf).softmax(-1) @ latent[:, :512]

    def latents(self, stored: torch.Tensor) -> torch.Tensor:
        """Rows of bytes as float64 latents."""
        if self.cell.kv == "rows":
            return unpack_mla_fp8_rows(stored).double()
        return stored.view(self.pools[0].dtype).double()

    def error(self, out: torch.Tensor) -> float:
        worst = 0.0
        for request in {0, len(self.cell.lengths) // 2, len(self.cell.lengths) - 1}:
            expected = self.reference(request)
            worst = max(worst, ((out[request].double() - expected).norm() / expected.norm()).item())
        return worst


def attnops_call(problem: Problem, rounded: bool = False):
    cell = problem.cell
    plan = MlaDecodePlan.allocate(
        len(cell.lengths),
        num_q_heads=cell.heads,
        seqlen_q=cell.seqlen_q,
        fixed_split_tokens=cell.fixed,
        max_seqlen_k=problem.page_table.shape[1] * cell.page,
        device=problem.q.device,
    )
    ops.mla_decode_plan(plan, problem.cache_seqlens)
    out = problem.q.new_empty(*problem.q.shape[:-1], 512)

    def call(r: int) -> torch.Tensor:
        ops.mla_decode(
            problem.q,
            problem.pools[r],
            problem.page_table,
            problem.cache_seqlens,
            plan,
            softmax_scale=SCALE,
            out=out,
            fp8_products=rounded,
        )
        return out

    return call


def attnops_rounded_call(problem: Problem):
    """With q and the probabilities rounded to e4m3, as FlashMLA's dense FP8 op does it."""
    return attnops_call(problem, rounded=True)


def flashmla_call(problem: Problem):
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    cell = problem.cell
    metadata, _ = get_mla_metadata()

    def call(r: int) -> torch.Tensor:
        out, _ = flash_mla_with_kvcache(
            problem.q,
            problem.pools[r].unsqueeze(2),
            problem.page_table,
            problem.cache_seqlens,
            512,
            metadata,
            softmax_scale=SCALE,
            causal=cell.seqlen_q > 1,
        )
        return out

    return call


def flashmla_fp8_call(problem: Problem):
    """Its dense FP8 op takes q in e4m3, too, and rounds the probabilities to e4m3: compare the errors."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    lengths, rows = problem.cache_seqlens, problem.cell.seqlen_q * problem.cell.heads
    metadata, num_splits = get_mla_metadata(lengths, rows, 1, is_fp8_kvcache=True)
    q = problem.q.to(torch.float8_e4m3fn)
    one = torch.ones(1, dtype=torch.float32, device=q.device)

    def call(r: int) -> torch.Tensor:
        out, _ = flash_mla_with_kvcache(
            q,
            problem.pools[r].unsqueeze(2),
            problem.page_table,
            lengths,
            512,
            metadata,
            num_splits,
            softmax_scale=SCALE,
            causal=problem.cell.seqlen_q > 1,
            descale_q=one,
            descale_k=one,
            is_fp8_kvcache=True,
        )
        return out

    return call


class AsSampled:
    """A problem as `sampled_contenders` takes it. Its peers plan before every 32nd call, here before the first one."""

    def __init__(self, problem: Problem) -> None:
        cell = problem.cell
        shape = dict(head_dim=576, lengths=tuple(cell.lengths), law="even", page_size=cell.page)
        self.cell = sampled_cells.Cell(True, (cell.heads, 1), seqlen_q=cell.seqlen_q, kv=cell.kv, **shape)
        self.q, self.q_dtype, self.scale, self.sinks = problem.q, problem.q.dtype, SCALE, None
        self.page_table, self.seqlens = problem.page_table, problem.cache_seqlens
        self.kv_indptr, self.kv_indices = problem.kv_indptr, problem.kv_indices
        self._pools = problem.pools

    def latents(self, r: int) -> torch.Tensor:
        return self._pools[r // sampled_contenders.PLAN_EVERY]


def sampled_call(prepare: Callable, *arguments: str) -> Callable:
    return lambda problem: sampled_contenders.planned_once(prepare(AsSampled(problem), *arguments))


def peers_of(cell: Cell) -> dict[str, Callable]:
    """Who may take the cell; each may still refuse."""
    peers = {"attnops": attnops_call}
    if cell.kv == "e4m3" and cell.heads * cell.seqlen_q > 32:  # fewer rows: the kernel is the same
        peers["attnops rounded"] = attnops_rounded_call
    if cell.fixed or cell.kv == "rows":
        return peers
    if cell.page == 64:
        peers["FlashMLA"] = flashmla_call if cell.kv == "bf16" else flashmla_fp8_call
    if cell.kv == "bf16":
        peers["FA3 qv"] = sampled_call(sampled_contenders.fa3)
    for backend in ("fa2", "fa3"):
        peers[f"FlashInfer {backend}"] = sampled_call(sampled_contenders.flashinfer_mla, backend)
    return peers


def ready(problem: Problem) -> dict[str, tuple[Callable, float]]:
    """Calls of those that run the cell, and their errors. Calls own what graphs read."""
    found = {}
    for peer, make in peers_of(problem.cell).items():
        try:
            call = make(problem)
            error = problem.error(call(0).view(*problem.q.shape[:-1], 512))
            if not error < TOLERANCE[problem.cell.kv]:
                raise RuntimeError(f"WRONG: relative error {error:.3g}")
            found[peer] = (call, error)
        except Exception as problem_of_peer:
            if peer.startswith("attnops"):
                raise
            reason = (str(problem_of_peer).splitlines() or [""])[0][:90]
            print(f"    {peer}: {type(problem_of_peer).__name__}: {reason}", flush=True)
    return found


def capture(call, rotations: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for r in range(rotations):
                call(r)
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def time_in_turns(graphs: dict, rotations: int, rounds: int = 4, burst_ms: float = 8.0) -> dict[str, float]:
    """Median milliseconds of one call, by peer; peers take turns, a short rest before each."""
    times = {peer: [] for peer in graphs}
    for graph in graphs.values():
        replay_ms(graph, 2)
    for _ in range(rounds):
        for peer, graph in graphs.items():
            torch.cuda._sleep(20_000_000)
            one = replay_ms(graph, 1)[0]
            times[peer] += replay_ms(graph, max(3, min(20, int(burst_ms / max(one, 1e-3)))))
    return {peer: statistics.median(values) / rotations for peer, values in times.items()}


def ceilings() -> tuple[float, float]:
    """(read GB/s, bf16 TFLOP/s): a reduction over 8 GB, and a product of 8192^3 on random data."""
    data = torch.randn(1 << 31, dtype=torch.float32, device="cuda").view(torch.int64)
    read = capture(lambda r: torch.max(data.view(torch.int32)), 1)
    gbs = data.numel() * 8 / min(replay_ms(read, 6)) / 1e6
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda").unbind()
    product = capture(lambda r: torch.mm(a, b), 2)
    torch.cuda._sleep(200_000_000)
    tflops = 2 * 2 * 8192**3 / statistics.median(replay_ms(product, 8)) / 1e9
    return gbs, tflops


def run(cell: Cell, pools: Pools, state: str) -> list[records.Record]:
    problem = Problem(cell, pools)
    calls = ready(problem)
    errors = {peer: error for peer, (_, error) in calls.items()}
    graphs = {peer: capture(call, problem.rotations) for peer, (call, _) in calls.items()}
    if state == "sustained":
        times = time_in_turns(graphs, problem.rotations, rounds=1, burst_ms=700.0)
    else:
        times = time_in_turns(graphs, problem.rotations)
    rows = []
    case = "mla_decode" if state == "burst" else "mla_decode-sustained"
    case += f" at {cell.context}" if cell.context else ""
    for peer, ms in times.items():
        gbs, tflops = problem.bytes / ms / 1e6, problem.flops / ms / 1e9
        text = f"{cell.name:44s} {state:9s} {peer:15s} {1e3 * ms:8.1f} us {gbs:6.0f} GB/s {tflops:5.0f} TFLOP/s"
        others = {name: t for name, t in times.items() if not name.startswith("attnops")}
        best = min(others, key=others.__getitem__, default="")
        ratio = f" {others[best] / ms:5.2f}x {best}" if best and peer.startswith("attnops") else ""
        print(f"{text} err {errors[peer]:.1e}{ratio}", flush=True)
        rows.append(
            records.Record(
                case=case,
                peer=peer,
                params=cell.params,
                ms=round(ms, 6),
                version=records.version_of(peer),
                gbs=round(gbs, 1),
                tflops=round(tflops, 1),
                rel_err=errors[peer],
                state=state,
                note=f"{problem.rotations} calls per replay",
            )
        )
    return rows


def run_plan(batch: int, heads: int) -> records.Record:
    plan = MlaDecodePlan.allocate(batch, num_q_heads=heads, device="cuda")
    lengths = torch.full((batch,), 4096, dtype=torch.int32, device="cuda")
    graph = capture(lambda r: ops.mla_decode_plan(plan, lengths), 32)
    ms = statistics.median(replay_ms(graph, 20)) / 32
    print(f"plan, {heads} heads, batch {batch}: {1e3 * ms:.2f} us")
    return records.Record(
        case="mla_decode_plan", peer="attnops", params={"batch": batch, "h_q": heads}, ms=round(ms, 6)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the rows of benchmarks/results")
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder that --write writes to")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sustained", action="store_true")
    parser.add_argument("--context", type=int, default=0, help="tokens of every row of page tables, at least")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    args = parser.parse_args()
    torch.manual_seed(0)
    gbs, tflops = ceilings()
    print(f"ceilings: read {gbs:.0f} GB/s, 8192^3 bf16 {tflops:.0f} TFLOP/s", flush=True)
    ceiling = records.Record(
        case="ceilings", peer="torch", params={}, ms=0.0, gbs=round(gbs, 1), tflops=round(tflops, 1)
    )
    rows = [ceiling, run_plan(64, 128), run_plan(1, 128)]
    pools = Pools()
    plan = [(cell, "burst") for cell in cells(args.quick) if args.only in cell.name]
    if args.sustained:
        plan += [(cell, "sustained") for cell in (Cell(128, [4096] * 64), Cell(128, [16384] * 128))]
    for cell, state in plan:
        cell.context = args.context
        rows += run(cell, pools, state)
        if args.write:  # at once: what was measured stays when the run is stopped
            records.write(rows, "h200-mla_decode", args.results)


if __name__ == "__main__":
    main()
