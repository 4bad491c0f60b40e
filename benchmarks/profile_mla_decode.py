"""How long the kernels of MLA decode calls take, one by one, on a GPU.

    python benchmarks/profile_mla_decode.py profile    calls that were slow at seed 101, by kernel
    python benchmarks/profile_mla_decode.py rows       calls of 33 to 48 query rows, whichever kernel serves them

Graphs of 32 calls with the plan before the first, page tables as wide as an engine's.
"""

from __future__ import annotations

import statistics
import sys

import torch
from bench_decode_sampled import record_graph, replay_ms
from sampled_cells import Cell
from sampled_contenders import PLAN_EVERY, Pool, Problem, attnops_decode, flashmla, planned


def zipf(batch: int, longest: int) -> list[int]:
    return [max(1, longest // (i + 1)) for i in range(batch)]


def cell(heads: int, tokens: int, lengths: list[int], page: int = 64, kv: str = "bf16", context: int = 131072) -> Cell:
    width = max(context, *lengths)
    return Cell(True, (heads, 1), 576, tuple(lengths), "given", page, tokens, kv, -1, False, width)


SLOW = [
    cell(97, 1, [5995] * 7, kv="e4m3"),
    cell(85, 4, [10408] * 2, kv="e4m3"),
    cell(41, 1, zipf(4, 98797), kv="e4m3"),
    cell(51, 4, [28, 2, 2, 2, 2], kv="e4m3"),
    cell(32, 1, [102] * 54, kv="e4m3"),
    cell(74, 3, [766], kv="e4m3"),
    cell(16, 3, [20662] * 20, kv="e4m3"),
    cell(128, 1, [68, 34, 22]),
    cell(128, 1, [68, 34, 22], context=0),
    cell(54, 5, [1500] * 13, page=67),
    cell(40, 1, [1014] + [63] * 22, page=6),
    cell(103, 1, [4012] * 4, page=32),
    cell(64, 5, [2400] * 125, page=7),
    cell(128, 1, [15000] * 100, page=16),
    cell(128, 1, [4096] * 64),
    cell(128, 1, [4096] * 64, kv="e4m3"),
]
ROWS = [
    cell(40, 1, [124] * 34),
    cell(46, 1, [3691] * 20),
    cell(48, 1, [4096] * 64),
    cell(48, 1, [4096] * 64, page=1),
    cell(40, 1, zipf(57, 38981), page=22),
    cell(8, 6, [1386] * 5),
    cell(40, 1, [1014] + [63] * 22, page=6),
    cell(16, 3, [2000] * 128, page=16),
    cell(40, 1, [9638]),
    cell(20, 2, [60] * 300, page=32),
    cell(40, 1, [600] * 10),
    cell(48, 1, [300] * 264, page=16),
]


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median(replay_ms(graph, 6)) / PLAN_EVERY * 1e3


def by_kernel(graph: torch.cuda.CUDAGraph) -> str:
    """The attention's time, and by how much the merge moves a call's end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in profile.events() if "mla" in e.name)
    merges = [(begin, end) for begin, end, name in spans if "merge" in name]
    attentions = [(begin, end) for begin, end, name in spans if "decode" in name and "merge" not in name]
    if not attentions:
        return ""
    text = f"attention {statistics.median(end - begin for begin, end in attentions):.1f}"
    if len(merges) != len(attentions):
        return text
    later = [merge[1] - attention[1] for attention, merge in zip(attentions, merges, strict=True)]
    return f"{text}, the merge ends {statistics.median(later):.1f} later"


def main() -> None:
    profiles = sys.argv[1:] != ["rows"]
    torch.manual_seed(0)
    pool = Pool(int(12e9))
    for c in SLOW if profiles else ROWS:
        problem = Problem(c, pool)
        for options in [{}, {"fp8_products": True}] if c.kv == "e4m3" else [{}]:
            step = planned(attnops_decode(problem, **options))
            graph = record_graph(step, PLAN_EVERY)
            line = f"{microseconds(graph):8.1f} us  {c.name} {'rounded' if options else ''}"
            print(f"{line}  {by_kernel(graph) if profiles else ''}", flush=True)
        if profiles and c.kv == "e4m3":
            try:
                step = flashmla(problem)
                print(f"{microseconds(record_graph(step, PLAN_EVERY)):8.1f} us  FlashMLA", flush=True)
            except ImportError as problem_with_it:
                print(f"FlashMLA: {problem_with_it}")


if __name__ == "__main__":
    main()
