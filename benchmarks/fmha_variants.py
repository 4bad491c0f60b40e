"""Some prefill cells with a chosen tile_q beside FA3, in turns: a quick look between two states of a kernel.

python benchmarks/fmha_variants.py --tile-q 64 --cells 16k,16x1k
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
import fmha_peers
import torch
from attnops.metadata import FmhaPlan
from bench_xqa_decode import record_graph, replay_ms
from fmha_cells import DEVICE, FP8, Cell, Pools

HEADS = (32, 8)
RAGGED = [512, 7000, 33, 2048, 1500, 4096, 900, 295]


def even(batch: int, new: int, prefix: int = 0, heads: tuple[int, int] = HEADS, **options) -> Cell:
    return Cell(heads, [new] * batch, [prefix + new] * batch, **options)


CELLS = {
    "16k": even(1, 16384),
    "16kfull": even(1, 16384, causal=False),
    "16x1k": even(16, 1024),
    "1x1k": even(1, 1024),
    "128x128": even(128, 128),
    "ragged": Cell(HEADS, RAGGED, RAGGED),
    "ext64": even(8, 512, 4096, page=64),
    "ext1": even(8, 512, 4096, page=1),
    "64x8": even(64, 8, 4096, page=1),
    "64on64k": even(1, 64, 65536, page=64),
    "ext8": even(8, 512, 4096, page=64, kv_dtype=FP8),
    "kvfp8": even(1, 16384, kv_dtype=FP8),
    "mha": even(1, 8192, heads=(32, 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tile-q", type=int, help="query tokens of a tile; chosen by the plan when absent")
    parser.add_argument("--cells", default=",".join(CELLS), help=f"comma-separated, of {', '.join(CELLS)}")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    pools = Pools()

    def plan_of(cell: Cell) -> FmhaPlan:
        return FmhaPlan.allocate(
            sum(cell.q_lens),
            len(cell.q_lens),
            num_q_heads=cell.heads[0],
            num_kv_heads=cell.heads[1],
            head_dim=cell.head_dim,
            causal=cell.causal,
            tile_q=arguments.tile_q,
            device=DEVICE,
        )

    for name in arguments.cells.split(","):
        cell = CELLS[name].build(pools)
        ready = []
        for who, prepare in (("attnops", fmha_peers.attnops), ("FA3", fmha_peers.fa3)):
            try:
                with mock.patch.object(fmha_peers, "allocate_plan", plan_of):
                    step = prepare(cell)
                ready.append((who, step, record_graph(step, cell.rotation), cell.relative_error(step(0)), []))
            except Exception as problem:  # a peer may be absent, or refuse the cell
                print(f"{name}: {who}: {problem!r}"[:160], flush=True)
        for _ in range(arguments.turns):
            for _, _, graph, _, times in ready:
                time.sleep(0.04)
                times.append(statistics.median(replay_ms(graph, 8)) / cell.rotation)
        parts = [
            f"{who} {statistics.median(times) * 1e3:.1f} us, error {error:.4f}" for who, _, _, error, times in ready
        ]
        print(f"{name}, tile_q {arguments.tile_q}: {'; '.join(parts)}", flush=True)
        vars(cell).pop("expected", None)


if __name__ == "__main__":
    main()
