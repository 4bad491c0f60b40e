"""Compile the kernels of `bench_linear.py`'s peers before they are timed: in many processes, into Triton's cache.

Each process takes its share of the variants that a kernel is tuned over, runs each once, and keeps no choice: that is
the benchmark's own, on a GPU that does nothing else. Set `TRITON_CACHE_DIR` for both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable

import bench_linear
import torch
from linear_cells import (
    BOUNDED,
    CONV_DECODES,
    CONVOLUTIONS,
    DECODES,
    FEW_HEADS,
    PREFILLS,
    VERIFIES,
    Drawn,
    drawn_cells,
)
from linear_peers import Calls, PeerCall, Peers

Task = tuple[str, tuple, int, int]  # a method of Bench, its arguments, a share of the variants, of how many
GROUPS: dict[str, tuple[str, list]] = {  # of bench_linear.py: the method that takes its cells
    "prefill": ("prefill", PREFILLS),
    "few": ("prefill", FEW_HEADS),
    "bounded": ("prefill", BOUNDED),
    "decode": ("decode", DECODES),
    "conv_decode": ("conv_decode", CONV_DECODES),
    "verify": ("verify", VERIFIES),
    "convolve": ("convolve", CONVOLUTIONS),
}
_share = (0, 1)
_bench: list[bench_linear.Bench] = []


class _Warm(bench_linear.Bench):
    """Runs the peers' first calls alone."""

    def cell(self, case: str, params: dict, calls: list[Callable[[], object]], floor_ms: float,
             peers: list[Calls] | None = None, check: object = None) -> None:  # fmt: skip
        for name, peer in (peers[0] if peers else {}).items():
            if isinstance(peer, PeerCall):
                try:
                    peer()
                    torch.cuda.synchronize()
                except Exception as error:  # told again where it is timed
                    print(f"{case}: {name}: {type(error).__name__}: {str(error)[:160]}", flush=True)


def _shared_tuning() -> None:
    """Of each tuned kernel run this process's share of the variants, once each, and remember nothing."""
    from triton.runtime.autotuner import Autotuner

    run, prune = Autotuner.run, Autotuner.prune_configs

    def run_share(self: Autotuner, *args: object, **options: object) -> object:
        self.cache.clear()
        self.cache_results = False
        return run(self, *args, **options)

    def prune_share(self: Autotuner, options: dict) -> list:
        configs = prune(self, options)
        mine = configs[_share[0] :: _share[1]]
        return mine or configs[:1]

    def once(call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        call()
        return [1.0] * len(quantiles)

    Autotuner.run, Autotuner.prune_configs = run_share, prune_share
    Autotuner.do_bench = property(lambda _: once)


def _begin(also: list[str], folder: str) -> None:
    if folder:
        sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bench_linear.POOL = 2**26
    _shared_tuning()
    _bench.append(_Warm("cuda", 1, Peers(also=also)))


def _work(task: Task) -> float:
    global _share
    method, options, *share = task
    _share, begin = (share[0], share[1]), time.monotonic()
    _bench[0].tried(getattr(_bench[0], method), *options)
    torch.cuda.empty_cache()
    return time.monotonic() - begin


def _kind(cell: tuple[str, tuple]) -> str:
    """What decides most of a cell's kernels: what it is, its model, and the states' dtype."""
    method, options = cell
    if isinstance(options[0], Drawn):
        return f"{options[0].kind} {options[0].model} {options[0].kept}"
    return f"{method} {options[0]} {options[2:]}" if method != "prefill" else f"{method} {options[0]} {options[3:]}"


def tasks(cells: list[tuple[str, tuple]], shares: int) -> list[Task]:
    """The first cell of each kind, in `shares` where it is a prefill; then what the others add to it."""
    seen: set[str] = set()
    first: list[Task] = []
    rest: list[Task] = []
    for method, options in cells:
        prompts = "prefill" in (method, getattr(options[0], "kind", ""))
        if (kind := _kind((method, options))) in seen:
            rest.append((method, options, 0, 1))
            continue
        seen.add(kind)
        first += [(method, options, i, shares if prompts else 1) for i in range(shares if prompts else 1)]
    return sorted(first, key=lambda task: -task[3]) + rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--shares", type=int, default=4, help="processes over which a prefill's variants are spread")
    parser.add_argument("--seconds", type=float, default=150, help="how long at most")
    parser.add_argument("--seed", type=int, help="cells that this seed draws, besides the fixed ones")
    parser.add_argument("--cells", type=int, default=40, help="how many of them")
    parser.add_argument("--only", default="", help=f"groups of cells, with commas: {', '.join(GROUPS)}")
    bench_linear.add_requests(parser)
    options = parser.parse_args()
    also, folder = bench_linear.requested(parser, options), str(options.peer_folder or "")
    names = [name for name in options.only.split(",") if name] or list(GROUPS)
    if unknown := set(names) - GROUPS.keys():
        parser.error(f"--only: expected some of {', '.join(GROUPS)}, got {', '.join(sorted(unknown))}")
    Peers(also=also)  # what does not start is an error here, not in each process
    begin, cells = time.monotonic(), [(GROUPS[name][0], cell) for name in names for cell in GROUPS[name][1]]
    todo = tasks(cells, options.shares)
    if options.seed is not None:
        todo += tasks([("drawn", (cell,)) for cell in drawn_cells(options.seed, options.cells)], options.shares)
    pool, done, longest = multiprocessing.get_context("spawn").Pool(options.workers, _begin, (also, folder)), 0, 0.0
    found = pool.imap_unordered(_work, todo)
    try:
        while done < len(todo):
            longest = max(longest, found.next(max(begin + options.seconds - time.monotonic(), 0.01)))
            done += 1
    except multiprocessing.TimeoutError:
        print("the time is over")
    pool.terminate()
    took = time.monotonic() - begin
    print(f"{done} of {len(todo)} tasks in {took:.0f} s, the longest {longest:.0f} s", flush=True)


if __name__ == "__main__":
    main()
