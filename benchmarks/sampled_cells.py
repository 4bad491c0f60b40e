"""The law of `bench_decode_sampled.py`: which calls a seed draws. Change it, and old figures are void."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

LAW = """batch log-uniform 1..512, longest length log-uniform 16..131072, at most 60 GB of cache;
a third of the cells each with a roofline time below 10 us, of 10 to 100 us, above 100 us;
lengths even, uniform, Zipf, one straggler (the others a sixteenth), or uniform with a quarter empty;
heads: half of the cells from models, half 1..128 query heads over any divisor;
head dims: half 128, else 64, 80, 96, 112, 192, 256;
pages: half of 64, 32, 16, 128, 1, else any of 1..128; a quarter with a window, a quarter with sinks, an eighth fp16;
table as wide as the longest request, 8192, 32768 or 131072 tokens, never narrower than the longest request;
the plan is made once every 32 calls"""

READ_BYTES, BF16_FLOPS = 4.6e12, 790e12  # a second, of the H200 that the thirds are defined by
MOST_BYTES = 60e9
THIRDS = ("below 10 us", "10 to 100 us", "above 100 us")
WIDTHS = (0, 8192, 32768, 131072)
MODEL_HEADS = (
    *((32, 8), (64, 8), (8, 1), (16, 2), (40, 8), (28, 4), (32, 32), (64, 4), (48, 8), (14, 2), (16, 16)),
    *((71, 1), (128, 8), (96, 8), (12, 2), (4, 1), (6, 1), (24, 8), (20, 4), (8, 2)),
)
MLA_HEADS = (16, 128, 64, 32, 8, 20, 40)
COMMON_PAGES = (64, 32, 16, 128, 1)
LENGTH_LAWS = ("even", "uniform", "zipf", "straggler", "empties")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call: what the ops are given but for the data."""

    is_mla: bool
    heads: tuple[int, int]  # of q, of K and V
    head_dim: int
    lengths: tuple[int, ...]
    law: str  # of the lengths
    page_size: int = 64
    seqlen_q: int = 1
    kv: str = "bf16"  # the cache: bf16, fp16, e4m3
    window_left: int = -1
    sinks: bool = False
    context: int = 0  # tokens that a row of the page table has room for

    @property
    def q_type(self) -> str:
        return "fp16" if self.kv == "fp16" else "bf16"

    @property
    def rows(self) -> int:
        """Query rows that read the same keys."""
        return self.seqlen_q * self.heads[0] // self.heads[1]

    @property
    def token_bytes(self) -> int:
        width = 576 if self.is_mla else 2 * self.head_dim * self.heads[1]
        return width * (1 if self.kv == "e4m3" else 2)

    @property
    def cache_bytes(self) -> int:
        return sum(-(-n // self.page_size) for n in self.lengths) * self.page_size * self.token_bytes

    @property
    def seen_tokens(self) -> int:
        """Keys that some query sees, of all requests."""
        return sum(n if self.window_left < 0 else min(n, self.window_left + self.seqlen_q) for n in self.lengths)

    @property
    def bytes(self) -> int:
        """Each key and value once, q and out once."""
        of_head = 576 + 512 if self.is_mla else 2 * self.head_dim
        return self.seen_tokens * self.token_bytes + 2 * of_head * len(self.lengths) * self.seqlen_q * self.heads[0]

    @property
    def flops(self) -> int:
        of_key = 2 * (576 + 512) if self.is_mla else 4 * self.head_dim
        return of_key * self.seqlen_q * self.heads[0] * self.seen_tokens

    @property
    def roofline(self) -> float:
        """Microseconds."""
        return 1e6 * max(self.bytes / READ_BYTES, self.flops / BF16_FLOPS)

    @property
    def third(self) -> str:
        return THIRDS[(self.roofline >= 10) + (self.roofline >= 100)]

    @property
    def params(self) -> dict:
        names = ("heads", "head_dim", "law", "page_size", "seqlen_q", "kv", "window_left", "sinks", "context")
        shape = {name: getattr(self, name) for name in names}
        longest = max(self.lengths)
        return {**shape, "batch": len(self.lengths), "longest": longest, "tokens": sum(self.lengths)}

    @property
    def features(self) -> dict[str, str]:
        """What figures are grouped by."""
        longest, batch, page = max(self.lengths), len(self.lengths), self.page_size
        works = batch * self.heads[1]
        return {
            "third": self.third,
            "lengths": self.law,
            "longest": "to 1k" if longest <= 1024 else "to 8k" if longest <= 8192 else "above 8k",
            "batch": "1" if batch == 1 else "to 8" if batch <= 8 else "to 64" if batch <= 64 else "above 64",
            "rows": next((f"to {n}" for n in (1, 8, 16, 32, 48, 64) if self.rows <= n), "more"),
            "works": next((f"to {n}" for n in (16, 132, 264) if works <= n), "more"),
            "head dim": str(self.head_dim),
            "page": "boxes" if page >= 8 and page & (page - 1) == 0 else "gathered",
            "type": self.kv,
            "window": "yes" if self.window_left >= 0 else "no",
            "sinks": "yes" if self.sinks else "no",
            "context": str(self.context) if self.context in WIDTHS else "exact",
        }

    @property
    def name(self) -> str:
        lengths = f"{len(self.lengths)} x {max(self.lengths)} {self.law}"
        more = f" window {self.window_left}" if self.window_left >= 0 else ""
        heads = f"MLA {self.heads[0]}" if self.is_mla else f"{self.heads[0]}/{self.heads[1]} d{self.head_dim}"
        shape = f"{heads} x{self.seqlen_q}, {lengths}, page {self.page_size}"
        return f"{shape} {self.kv}{more}{' sinks' if self.sinks else ''}, context {self.context}"


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def draw_lengths(rng: random.Random, law: str, batch: int, longest: int) -> tuple[int, ...]:
    if law == "even":
        return (longest,) * batch
    if law == "zipf":
        lengths = [max(1, longest // (i + 1)) for i in range(batch)]
    elif law == "straggler":
        lengths = [longest] + [max(1, longest // 16)] * (batch - 1)
    else:
        lengths = [longest] + [rng.randint(1, longest) for _ in range(batch - 1)]
        if law == "empties":
            lengths = [n if i == 0 or rng.random() > 0.25 else 0 for i, n in enumerate(lengths)]
    rng.shuffle(lengths)
    return tuple(lengths)


def _heads(rng: random.Random, is_mla: bool) -> tuple[int, int]:
    if is_mla:
        return (rng.choice(MLA_HEADS) if rng.random() < 0.5 else rng.randint(1, 128), 1)
    if rng.random() < 0.5:
        return rng.choice(MODEL_HEADS)
    of_q = rng.randint(1, 128)
    return of_q, rng.choice([n for n in range(1, of_q + 1) if of_q % n == 0])


def draw(rng: random.Random, kind: str, context: int | None = None, page_size: int | None = None) -> Cell:
    """A cell of a kind ("xqa16", "fp8", "tokens", "mla16", "mla8"), of whatever third it falls into.

    Args:
        context: Of the page table, if not drawn; 0: exact.
        page_size: If not drawn.
    """
    is_mla = kind.startswith("mla")
    law = rng.choice(LENGTH_LAWS)
    batch, longest = _log_uniform(rng, 1, 512), _log_uniform(rng, 16, 131072)
    seqlen_q = 1
    heads = _heads(rng, is_mla)
    if kind == "tokens":
        seqlen_q = rng.randint(2, 16)
        while seqlen_q * heads[0] // heads[1] > 256:
            heads = _heads(rng, is_mla)
    elif is_mla:
        seqlen_q = rng.choice((1, 1, 1, 1, *range(2, 9)))
    page = rng.choice(COMMON_PAGES) if rng.random() < 0.5 else rng.randint(1, 128)
    kv = "e4m3" if kind in ("fp8", "mla8") else "fp16" if rng.random() < 0.125 else "bf16"
    window = rng.choice((127, 1023, 4095)) if not is_mla and rng.random() < 0.25 else -1
    width = rng.choice(WIDTHS) if context is None else context
    return Cell(
        is_mla,
        heads,
        576 if is_mla else rng.choice((64, 80, 96, 112, 192, 256, *(128,) * 6)),
        tuple(max(n, seqlen_q) if n else 0 for n in draw_lengths(rng, law, batch, longest)),
        law,
        page_size or page,
        seqlen_q,
        kv,
        window,
        not is_mla and rng.random() < 0.25,
        max(width, longest, seqlen_q),
    )


def cells(kind: str, seed: int, count: int, context: int | None = None, page_size: int | None = None) -> Iterator[Cell]:
    """`count` cells of a kind, a third of each class of roofline times, in turns."""
    rng = random.Random(f"{kind} {seed}")
    for i in range(count):
        while True:
            cell = draw(rng, kind, context, page_size)
            if cell.third == THIRDS[i % 3] and cell.cache_bytes <= MOST_BYTES and cell.seen_tokens:
                break
        yield cell
