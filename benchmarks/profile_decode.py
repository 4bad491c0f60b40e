"""One warm call each of a few cells that drawn shapes found slow, for ncu:

ncu --profile-from-start off -k regex:xqa --set full -o report python benchmarks/profile_decode.py [A C ...]
"""

from __future__ import annotations

import random
import sys

import torch
from sampled_cells import Cell, draw_lengths
from sampled_contenders import Pool, Problem, attnops_decode


def cell(heads: tuple[int, int], head_dim: int, law: str, batch: int, longest: int, page: int, *more: object) -> Cell:
    """`more`: seqlen_q, kv, window_left."""
    seqlen_q, kv, window = (*more, *(1, "bf16", -1)[len(more) :])
    lengths = draw_lengths(random.Random(1), law, batch, longest)
    lengths = tuple(max(n, seqlen_q) if n else 0 for n in lengths)
    return Cell(False, heads, head_dim, lengths, law, page, seqlen_q, kv, window, False, 131072)


CELLS = {
    "A 98/49 d 96 x 11, 48 x 17": cell((98, 49), 96, "even", 48, 17, 128, 11),
    "B 128/8 d 112 x 15, 4 x 268": cell((128, 8), 112, "zipf", 4, 268, 18, 15),
    "C 121/11 x 14, 279 x 366": cell((121, 11), 128, "uniform", 279, 366, 127, 14),
    "D 16/2 x 14, 145 x 725": cell((16, 2), 128, "even", 145, 725, 107, 14),
    "E FP8 32/8 d 80, 64 x 4096": cell((32, 8), 80, "even", 64, 4096, 64, 1, "e4m3"),
    "F 64/8 d 112 x 5, 151 x 5071": cell((64, 8), 112, "uniform", 151, 5071, 16, 5, "fp16", 1023),
    "G 35/35 d 192, 15 x 1369": cell((35, 35), 192, "empties", 15, 1369, 110, 1, "bf16", 127),
    "H 103/1 d 192, 472 x 52": cell((103, 1), 192, "straggler", 472, 52, 128),
    "I 36/4 d 192 x 16, 338 x 1451": cell((36, 4), 192, "empties", 338, 1451, 16, 16),
    "J 6/1 d 112, 3 x 4898": cell((6, 1), 112, "straggler", 3, 4898, 127),
}


def main() -> None:
    pool = Pool(6_000_000_000)
    for name, drawn in CELLS.items():
        if len(sys.argv) > 1 and name[0] not in sys.argv[1:]:
            continue
        step, plan = attnops_decode(Problem(drawn, pool))
        plan()
        step(0)
        torch.cuda.synchronize()
        print(f"{name}: roofline {drawn.roofline:.1f} us", flush=True)
        torch.cuda.profiler.start()
        step(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
