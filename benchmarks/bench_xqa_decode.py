"""Paged GQA decode on a GPU: attnops beside every peer that this machine has, in one run.

A time is the median over replays of a CUDA graph that holds R back-to-back calls, over R. Every call of a graph reads
another slice of a random pool, so that the L2 cache serves no repeat. Contenders take turns. attnops' plan is made
before the graph, like the peers'; the case "plan and decode" has it inside. Accuracy is checked on the same buffers
against float64 before anything is timed.

    python benchmarks/bench_xqa_decode.py --groups bf16,fp8,page,speculative,invariant,latency --write

A peer that is not found, or refuses a cell, is named, and not timed. Peers are those of `sampled_contenders.py`. With
`--context 131072` page tables are as wide as an engine's; the cases are then "bf16 at 131072" and so on. The group
"sustained" replays each contender for 0.7 s at a stretch, so that the GPU's clock is that of steady work.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import sampled_cells
import sampled_contenders
import torch
from attnops import ops
from attnops.metadata import XqaDecodePlan
from attnops.metadata.plan_parts import xqa_invariant_cuts
from records import Record, version_of, write

BF16, FP8, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
DEVICE = "cuda"
POOL_ELEMENTS = 2_300_000_000  # of K, and of V
HEADS = [(32, 8), (8, 1), (64, 4), (32, 32)]
RAGGED = torch.randint(256, 16385, (64,), generator=torch.Generator().manual_seed(7)).tolist()
SUSTAINED_MS = 700
Step = Callable[[int], torch.Tensor]  # runs on the r-th slice of the pool, returns out


@dataclasses.dataclass
class Cell:
    heads: tuple[int, int]
    lengths: list[int]
    page_size: int = 64
    kv_dtype: torch.dtype = BF16
    seqlen_q: int = 1
    head_dim: int = 128
    context: int = 0  # tokens that a row of the page table has room for, at least; 0: as the longest request needs

    def build(self, pools: dict) -> Cell:
        """Random queries and a random page table over the pools."""
        self.k_pool, self.v_pool = pools[self.kv_dtype]
        counts = [-(-length // self.page_size) for length in self.lengths]
        self.num_pages = sum(counts)
        order = torch.randperm(self.num_pages, device=DEVICE).to(INT32)
        width = max(*counts, -(-self.context // self.page_size))
        columns = torch.arange(width, device=DEVICE)
        self.page_table = torch.zeros(len(counts), width, dtype=INT32, device=DEVICE)
        self.page_table[columns < torch.tensor(counts, device=DEVICE).unsqueeze(1)] = order
        self.kv_indices = order
        self.kv_indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=INT32)
        self.last_page_len = torch.tensor([(n - 1) % self.page_size + 1 for n in self.lengths], dtype=INT32)
        self.seqlens = torch.tensor(self.lengths, dtype=INT32, device=DEVICE)
        self.q = torch.randn(len(counts), self.seqlen_q, self.heads[0], self.head_dim, dtype=BF16, device=DEVICE)
        self.slice = self.num_pages * self.page_size * self.heads[1] * self.head_dim
        self.rotation = int(max(1, min(256, max(2, math.ceil(1.5e9 / self.bytes)), self.k_pool.numel() // self.slice)))
        return self

    @property
    def bytes(self) -> int:
        """Every key and value once, q and out once."""
        kv = 2 * sum(self.lengths) * self.heads[1] * self.head_dim * self.kv_dtype.itemsize
        return kv + 4 * len(self.lengths) * self.seqlen_q * self.heads[0] * self.head_dim

    @property
    def flops(self) -> int:
        return 4 * self.seqlen_q * self.heads[0] * self.head_dim * sum(self.lengths)

    @property
    def params(self) -> dict:
        uniform = len(set(self.lengths)) == 1
        s_k = self.lengths[0] if uniform else f"{min(self.lengths)}..{max(self.lengths)}"
        names = ("h_q", "h_kv", "d", "batch", "s_k", "page", "kv", "s_q", "tokens")
        kv = str(self.kv_dtype).removeprefix("torch.")
        values = (*self.heads, self.head_dim, len(self.lengths), s_k, self.page_size, kv, self.seqlen_q)
        wide = {"context": self.context} if self.context else {}
        return dict(zip(names, (*values, sum(self.lengths)), strict=True)) | wide

    def kv(self, r: int, hnd: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.num_pages, self.page_size, self.heads[1], self.head_dim)
        if hnd:
            shape = (shape[0], shape[2], shape[1], shape[3])
        at = slice(r * self.slice, (r + 1) * self.slice)
        return self.k_pool[at].view(shape), self.v_pool[at].view(shape)

    def relative_error(self, out: torch.Tensor, request: int, hnd: bool = False) -> float:
        """Of one request of slice 0, against float64."""
        k, v = (x.transpose(1, 2) if hnd else x for x in self.kv(0, hnd))
        token = torch.arange(self.lengths[request], device=DEVICE)
        page = self.page_table[request].long()[token // self.page_size]
        k, v = k[page, token % self.page_size].double(), v[page, token % self.page_size].double()
        q = self.q[request].double().unflatten(1, (self.heads[1], -1))
        scores = torch.einsum("qhgd,khd->hgqk", q, k) / math.sqrt(self.head_dim)
        position = torch.arange(self.seqlen_q, device=DEVICE).unsqueeze(1) + self.lengths[request] - self.seqlen_q
        weights = scores.masked_fill(token > position, -math.inf).softmax(-1)
        expected = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
        actual = out.view(self.q.shape)[request].double()
        return float((actual - expected).norm() / expected.norm())


def attnops_decode(cell: Cell, fixed_split_tokens: int = 0, plan_inside: bool = False) -> Step:
    plan = XqaDecodePlan.allocate(
        len(cell.lengths),
        num_q_heads=cell.heads[0],
        num_kv_heads=cell.heads[1],
        head_dim=cell.head_dim,
        seqlen_q=cell.seqlen_q,
        fixed_split_tokens=fixed_split_tokens,
        max_seqlen_k=cell.page_table.shape[1] * cell.page_size,
        kv_dtype=cell.kv_dtype,
        page_size=cell.page_size,
        device=DEVICE,
    )
    ops.xqa_decode_plan(plan, cell.seqlens)
    out = torch.empty_like(cell.q)

    def step(r: int) -> torch.Tensor:
        if plan_inside:
            ops.xqa_decode_plan(plan, cell.seqlens)
        return ops.xqa_decode(cell.q, *cell.kv(r), cell.page_table, cell.seqlens, plan, out=out)[0]

    return step


class AsSampled:
    """A cell as `sampled_contenders` takes it. Its peers plan before every 32nd call, here before the first one."""

    def __init__(self, cell: Cell) -> None:
        shape = dict(head_dim=cell.head_dim, lengths=tuple(cell.lengths), law="even", page_size=cell.page_size)
        kv = "e4m3" if cell.kv_dtype == FP8 else "bf16"
        self.cell = sampled_cells.Cell(False, cell.heads, seqlen_q=cell.seqlen_q, kv=kv, **shape)
        self.q, self.q_dtype, self.sinks = cell.q, cell.q.dtype, None
        self.scale = 1 / math.sqrt(cell.head_dim)
        self.page_table, self.seqlens, self.last_page_len = cell.page_table, cell.seqlens, cell.last_page_len
        self.kv_indptr, self.kv_indices = cell.kv_indptr, cell.kv_indices
        self._kv = cell.kv

    def kv(self, r: int, hnd: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv(r // sampled_contenders.PLAN_EVERY, hnd)


def contenders(cell: Cell) -> list[tuple[str, Callable[[], Step], bool]]:
    """(name, how to prepare it, whether its pool is HND) of those that may take the cell; each may still refuse."""
    found: list[tuple[str, Callable[[], Step], bool]] = [("attnops", lambda: attnops_decode(cell), False)]
    problem = AsSampled(cell)
    for name, prepare, hnd in sampled_contenders.peers(problem.cell):
        found.append((name, lambda prepare=prepare: sampled_contenders.planned_once(prepare(problem)), hnd))
    return found


def record_graph(step: Step, rotation: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for r in range(rotation):
                step(r)
    torch.cuda.synchronize()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, budget_ms: float, most: int = 30) -> list[float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    graph.replay()
    while len(times) < 4 or (sum(times) < budget_ms and len(times) < most):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def measure(cell: Cell, case: str, named: list, budget_ms: float, tolerance: float) -> list[Record]:
    """Check, then time in turns. A contender that is missing or wrong is named, and not timed."""
    ready, records = [], []
    for name, prepare, hnd in named:
        try:
            step = prepare()
            requests = {0, len(cell.lengths) - 1, min(range(len(cell.lengths)), key=cell.lengths.__getitem__)}
            out = step(0)
            error = max(cell.relative_error(out, r, hnd) for r in requests if cell.lengths[r] <= 40000)
            if not error < tolerance:
                raise RuntimeError(f"WRONG: relative error {error:.3g}")
            ready.append((name, record_graph(step, cell.rotation), error, [], step))  # a graph keeps no tensors alive
        except Exception as problem:  # a peer may be absent, or refuse the cell: say so and go on
            print(f"    {name}: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}", flush=True)
    sustained = case.startswith("sustained")
    for _ in range(1 if sustained else 2):
        for _, graph, _, times, _ in ready:
            times += replay_ms(graph, SUSTAINED_MS, 1 << 20) if sustained else replay_ms(graph, budget_ms)
    for name, _, error, times, _ in ready:
        ms = statistics.median(times) / cell.rotation
        spread = (max(times) - min(times)) / statistics.median(times)
        records.append(
            Record(
                case=case,
                peer=name,
                params=cell.params,
                ms=round(ms, 6),
                version=version_of(name),
                gbs=round(cell.bytes / ms / 1e6, 1),
                tflops=round(cell.flops / ms / 1e9, 2),
                rel_err=error,
                state="sustained" if sustained else "burst",
                note=f"spread {spread:.3f}",
            )
        )
    return records


def read_ceiling() -> float:
    """TB/s of a sweep that only reads, in 16-byte loads, eight in flight per thread."""
    import triton
    import triton.language as tl

    @triton.jit
    def sweep(x, out, block: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * block * 8 + tl.arange(0, block)
        total = tl.zeros([block], dtype=tl.int32)
        for i in tl.static_range(8):
            total += tl.load(x + at + i * block)
        tl.store(out + tl.program_id(0), tl.sum(total))

    block = 1024
    x = torch.randint(0, 100, (1 << 31,), dtype=INT32, device=DEVICE)
    out = torch.empty(x.numel() // (8 * block), dtype=INT32, device=DEVICE)
    graph = record_graph(lambda r: sweep[(out.numel(),)](x, out, block, num_warps=8), 1)
    return x.numel() * 4 / statistics.median(replay_ms(graph, 60)) / 1e9


def grid(dtype: torch.dtype, page_size: int, heads: list) -> list[Cell]:
    shapes = [[s] * b for b in (1, 16, 64, 256) for s in (1024, 8192, 32768)] + [RAGGED]
    cells = [Cell(h, lengths, page_size, dtype) for h in heads for lengths in shapes]
    return [c for c in cells if sum(c.lengths) * c.heads[1] * c.head_dim <= POOL_ELEMENTS]


def groups() -> dict[str, list[Cell]]:
    few = [[1024], [8192], [32768], [1024] * 16, [8192] * 64, RAGGED]
    return {
        "bf16": grid(BF16, 64, HEADS),
        "fp8": grid(FP8, 64, HEADS),
        "page": [Cell((32, 8), n, page, dtype) for dtype in (BF16, FP8) for page in (16, 1) for n in few],
        "speculative": [Cell(h, [8192] * 64, seqlen_q=s) for h in HEADS[:2] for s in (1, 2, 4, 8)],
        "skew": [Cell((32, 8), [65536] + [4096] * 31), Cell((32, 8), [6016] * 32)],
        "invariant": [
            *(Cell((32, 8), n, kv_dtype=dtype) for dtype in (BF16, FP8) for n in few),
            *(Cell((32, 8), n) for n in ([8192] * 16, [1024] * 64, [1024] * 256)),
            *(Cell(h, n) for h in HEADS[1:] for n in (*few, [8192] * 16, [1024] * 64) if h[1] < 32 or sum(n) < 400_000),
            *(Cell((32, 8), n, page) for page in (16, 1) for n in few),
            *(Cell(h, [8192] * 64, seqlen_q=4) for h in HEADS[:2]),
        ],
        "sustained": [Cell(h, [8192] * 64, kv_dtype=dtype) for dtype in (BF16, FP8) for h in HEADS[:2]],
        "latency": [Cell((32, 8), [1024]), Cell((8, 1), [1024])],
    }


def summary(records: list[Record], ceiling: float) -> None:
    ours = next((r for r in records if r.peer == "attnops"), None)
    if ours is None:
        return
    peers = sorted((r for r in records if not r.peer.startswith("attnops")), key=lambda r: r.ms)
    p = ours.params
    floor = ours.gbs / 1000 / ceiling
    line = f"{p['h_q']}/{p['h_kv']} {p['batch']}x{p['s_k']} p{p['page']} {p['kv'][:6]} s_q {p['s_q']}"
    line = f"{line:44s} {ours.ms * 1e3:9.2f} us {floor:5.2f} of the ceiling, error {ours.rel_err:.4f} "
    others = [f"{r.peer} {r.ms * 1e3:.2f} ({r.ms / ours.ms:.2f}x)" for r in peers[:3]]
    others += [f"{r.peer} {r.ms * 1e3:.2f}" for r in records if r.peer.startswith("attnops ")]
    print(line + "; ".join(others), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="bf16,fp8,page,speculative,skew,invariant,latency")
    parser.add_argument("--seconds", type=float, default=600, help="stop starting cells after this long")
    parser.add_argument("--budget-ms", type=float, default=12, help="of replays per contender and turn")
    parser.add_argument("--context", type=int, default=0, help="tokens of every row of page tables, at least")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/h200-xqa_decode.jsonl")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    ceiling = read_ceiling()
    print(f"read ceiling {ceiling:.3f} TB/s")
    pools = {}
    for dtype in (BF16, FP8):
        pools[dtype] = tuple(_random_pool(dtype) for _ in range(2))
    records: list[Record] = []
    for group in arguments.groups.split(","):
        for cell in groups()[group]:
            if time.monotonic() - begin > arguments.seconds:
                print(f"out of time in {group}")
                break
            cell.context = arguments.context
            cell.build(pools)
            named = contenders(cell)[: 1 if arguments.no_peers else None]
            if group == "invariant":
                cuts = xqa_invariant_cuts(
                    cell.heads[1],
                    num_q_heads=cell.heads[0],
                    seqlen_q=cell.seqlen_q,
                    kv_dtype=cell.kv_dtype,
                    page_size=cell.page_size,
                )
                named = [named[0], ("attnops invariant", lambda c=cell, n=cuts: attnops_decode(c, n), False)]
            if group == "latency":
                named += [("attnops plan and decode", lambda c=cell: attnops_decode(c, plan_inside=True), False)]
            case = f"{group} at {arguments.context}" if arguments.context else group
            new = measure(cell, case, named, arguments.budget_ms, 0.1 if cell.kv_dtype == FP8 else 0.02)
            summary(new, ceiling)
            records += new
        if arguments.write:
            sweep = Record(case="ceiling", peer="read sweep", params={}, ms=0.0, gbs=round(ceiling * 1e3, 1))
            write([*records, sweep], "h200-xqa_decode")


def _random_pool(dtype: torch.dtype) -> torch.Tensor:
    pool = torch.empty(POOL_ELEMENTS, dtype=dtype, device=DEVICE)
    for part in pool.split(1 << 28):
        part.copy_(torch.randn(part.numel(), dtype=BF16, device=DEVICE))
    return pool


if __name__ == "__main__":
    main()
