"""Which cells bench_fmha.py measures: the fixed grid, and the sampler.

The law of the sampler is `draw`, and nothing else: a cell depends on its seed, its number and this file alone. Cell i
belongs to third i % 3: draws are repeated until the roofline time (of the constants in fmha_cells.py) lies in it.
"""

from __future__ import annotations

import math
import random

from fmha_cells import BF16, FP8, FP16, THIRDS_MS, Cell

TABLE_TOKENS = 131072  # as wide as an engine allocates a page table for a long context


def draw(generator: random.Random) -> Cell:
    """One cell of the law, of any size."""
    pick = generator.choices
    heads = pick([(32, 8), (64, 8), (8, 1), (16, 16), (28, 4), (40, 8), (32, 32), (12, 2), (5, 5), (71, 1)], k=1)[0]
    dims = [(128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (80, 80), (72, 72), (192, 192)]
    head_dim, head_dim_v = pick(dims, [40, 15, 10, 10, 7, 6, 4, 8], k=1)[0]
    dtype, kv_dtype = pick([(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP8, FP8)], [70, 10, 13, 7], k=1)[0]
    page = pick([0, 1, 16, 24, 64, 128], [35, 15, 10, 5, 25, 10], k=1)[0]
    batch = _log_uniform(generator, 1, 256)
    q_lens = _lengths(generator, batch, _log_uniform(generator, 1, 16384))
    causal = generator.random() < 0.8
    k_lens = list(q_lens)
    if page and generator.random() < 0.8:  # a prefix; now and then one that a single request shares with nobody
        prefix = _lengths(generator, batch, _log_uniform(generator, 16, 65536))
        k_lens = [q + p for q, p in zip(q_lens, prefix, strict=True)]
    elif not causal and generator.random() < 0.4:  # cross attention
        k_lens = _lengths(generator, batch, _log_uniform(generator, 1, 16384))
    window_left = _log_uniform(generator, 64, 8192) if generator.random() < 0.2 else -1
    window_right = window_left if window_left >= 0 and not causal else -1
    table_tokens = pick([0, 2 * max(k_lens), max(TABLE_TOKENS, max(k_lens))], [40, 30, 30], k=1)[0] if page else 0
    return Cell(
        heads,
        q_lens,
        k_lens,
        head_dim,
        head_dim_v,
        page,
        causal,
        dtype,
        kv_dtype,
        window_left,
        window_right,
        table_tokens=table_tokens,
        bar=0.93,
    )


def sample(seed: int, count: int) -> list[Cell]:
    """`count` cells of the law, a third each below 50 us, of 50 to 500 us, and above."""
    cells = []
    for i in range(count):
        generator = random.Random(f"{seed}.{i}")
        low, high = THIRDS_MS[i % len(THIRDS_MS)]
        cell = draw(generator)
        while not (low <= cell.roofline_ms < high and cell.fits()):
            cell = draw(generator)
        cells.append(cell)
    return cells


def _log_uniform(generator: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(generator.uniform(math.log(low), math.log(high + 1)))))


def _lengths(generator: random.Random, batch: int, mean: int) -> list[int]:
    """Even, uniform up to twice the mean, long-tailed, or one long request among short ones; 1 to 131072 each."""
    law = generator.choice(["even", "uniform", "tail", "one"])
    if law == "even":
        return [mean] * batch
    if law == "uniform":
        return [generator.randint(1, 2 * mean) for _ in range(batch)]
    if law == "tail":
        return [max(1, min(TABLE_TOKENS, int(mean * generator.lognormvariate(-0.5, 1.0)))) for _ in range(batch)]
    return [mean, *([max(1, mean // 16)] * (batch - 1))]


def table() -> list[Cell]:
    """The table of the prefill issue, in its order, each with its bar."""
    h, ragged = (32, 8), [512, 7000, 33, 2048, 1500, 4096, 900, 295]

    def even(batch: int, new: int, prefix: int = 0, heads: tuple[int, int] = h, **options) -> Cell:
        return Cell(heads, [new] * batch, [prefix + new] * batch, **options)

    return [
        even(1, 16384, bar=1.0, sustained=True),
        even(1, 32768, bar=1.0, sustained=True),
        even(1, 16384, causal=False, bar=1.0),
        even(1, 16384, head_dim=64, bar=1.1),
        even(1, 16384, head_dim=256, bar=0.99),
        even(1, 8192, heads=(16, 16), head_dim=192, head_dim_v=128, bar=1.03),
        even(16, 1024, bar=1.15),
        even(1, 1024, bar=1.2),
        even(128, 128, bar=1.1),
        Cell(h, ragged, ragged, bar=1.05),
        even(1, 16384, dtype=FP8, bar=1.05),
        even(16, 1024, dtype=FP8, bar=1.2),
        even(1, 16384, kv_dtype=FP8),
        even(8, 512, 4096, page=64, bar=1.06),
        even(8, 512, 4096, page=1, bar=1.06),
        even(8, 512, 4096, page=64, kv_dtype=FP8),
        even(64, 8, 4096, page=64, bar=1.0),
        even(1, 512, 65536, page=64, bar=1.0),
        even(1, 64, 65536, page=64, bar=1.15),
        even(1, 16384, window_left=1024, bar=1.05),
        even(1, 16384, sinks=True, bar=0.98),
        even(1, 16384, logit_cap=50.0, bar=0.92),
        even(8, 1024, heads=(16, 16), head_dim=72, causal=False, bar=1.05),
        even(8, 1024, heads=(16, 16), head_dim=80, causal=False, bar=1.05),
    ]


def hopper() -> list[Cell]:
    """What the table leaves out of the prefill and extend cells whose peers were measured before."""
    h = (32, 8)
    return [
        Cell(h, [4096] * 4, [4096] * 4),
        Cell(h, [16384], [16384], dtype=FP8, causal=False),
        *(Cell(h, [512], [16896], page=page) for page in (64, 1)),
        Cell(h, [8] * 64, [4104] * 64, page=1),
        Cell(h, [512] * 8, [4608] * 8, page=64, table_tokens=TABLE_TOKENS),
    ]
