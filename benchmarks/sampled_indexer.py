"""Cells of bench_sparse_sampled.py over lists in prefill, logits of the indexer, and selection: laws and contenders."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from functools import partial

import torch
from attnops import ops
from bench_indexer import PAGE, Digest, PagedKeys, Peers, in_rows, random_fp8, selected
from bench_sparse_mla import BF16, DEVICE, SCALE, Call, SparseBench, dequantized, lent, lists_of, padded, paged_rows
from sampled_cells import BF16_FLOPS, READ_BYTES, THIRDS
from torch import Tensor

LAW = """prefill: heads and k as in decode; query tokens log-uniform 16..8192; pools of 4096..65536 rows, log-uniform;
logits: half of the cells 64 heads, a quarter 32, a quarter 8..64;
in pages: batch log-uniform 1..256, one query token or in a third two, lengths log-uniform 256..131072;
ragged: rows log-uniform 64..8192, keys log-uniform from their number to 65536;
top-k: rows log-uniform 1..8192, keys log-uniform 512..131072, k in half of the cells 2048, else log-uniform 64..2048;
lengths of half of the cells are full, those of the others uniform 1..all; of ragged logits causal"""

L2_BYTES, FP8_FLOPS = 6.2e12, 1539e12  # a second, of the H200
MOST_BYTES = 2**32  # of a cell's keys or logits
WIDTHS = {"prefill656": 656, "prefill576": 1152}  # bytes of a row

Contenders = dict[str, tuple[Call, Digest]]  # a call, and what of its answer is compared


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def drawn_heads(rng: random.Random) -> int:
    return rng.choice((128, 64, 32, 16, 8)) if rng.random() < 0.5 else rng.randint(1, 128)


def drawn_k(rng: random.Random) -> int:
    return rng.choice((2048, 1024, 512)) if rng.random() < 0.5 else log_uniform(rng, 64, 2048)


def index_heads(rng: random.Random) -> int:
    kind = rng.random()
    return 64 if kind < 0.5 else 32 if kind < 0.75 else rng.randint(8, 64)


def some_lengths(count: int, most: int, full: bool) -> Tensor:
    if full:
        return torch.full((count,), most, dtype=torch.int32, device=DEVICE)
    return torch.randint(1, most + 1, (count,), dtype=torch.int32, device=DEVICE)


@dataclasses.dataclass(frozen=True)
class _Cell:
    rows: str  # the set's name

    @property
    def roofline(self) -> float:
        """Microseconds."""
        raise NotImplementedError

    @property
    def third(self) -> str:
        return THIRDS[(self.roofline >= 10) + (self.roofline >= 100)]


@dataclasses.dataclass(frozen=True)
class PrefillCell(_Cell):
    heads: int
    tokens: int
    keys: int
    k: int
    full: bool

    @property
    def listed(self) -> int:
        return self.k if self.full else (1 + self.k) // 2

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.heads * self.listed * 1088

    @property
    def roofline(self) -> float:
        """Rows are read from L2 as often as lists name them."""
        size = self.tokens * self.listed * WIDTHS[self.rows] / L2_BYTES
        return 1e6 * max(size, 2 * self.tokens * self.heads * 1088 / READ_BYTES, self.flops / BF16_FLOPS)

    @property
    def fits(self) -> bool:
        return self.tokens * (2 * self.heads * 1088 + 8 * self.keys) <= 2 * MOST_BYTES

    @property
    def name(self) -> str:
        lists = f"{self.k}{'' if self.full else ' at most'} of {self.keys}"
        return f"{self.heads} heads, {self.tokens} tokens, lists of {lists}"

    @classmethod
    def draw(cls, rng: random.Random, rows: str) -> PrefillCell:
        k = drawn_k(rng)
        keys = log_uniform(rng, 4096, 65536) // 4096 * 4096
        return cls(rows, drawn_heads(rng), log_uniform(rng, 16, 8192), keys, k, rng.random() < 0.5)

    def contenders(self, bench: SparseBench) -> Contenders:
        pool = paged_rows("fp8" if self.rows == "prefill656" else "bf16", self.keys)
        q = torch.randn(self.tokens, self.heads, 576, device=DEVICE, dtype=BF16) * 0.2
        lists = lists_of(1, self.tokens, self.k, self.keys, self.keys).view(self.tokens, self.k)
        lengths = None if self.full else some_lengths(self.tokens, self.k, False)
        out = q.new_empty(self.tokens, self.heads, 512)
        given = {"softmax_scale": SCALE, "topk_length": lengths, "out": out, "scratch": lent(q, pool, self.k)}

        def digest(answer: object) -> Tensor:
            assert isinstance(answer, (tuple, list))
            return answer[0].reshape(self.tokens, -1, 512)[:, : self.heads]

        found: Contenders = {"attnops": (lambda: ops.sparse_mla_prefill(q, pool, lists, **given), digest)}
        if "FlashMLA" in bench.peers:
            from sgl_kernel.flash_mla import flash_mla_sparse_fwd

            wide = lists.new_full((self.tokens, -(-self.k // 128) * 128), -1)
            wide[:, : self.k] = lists
            if lengths is not None:
                wide.masked_fill_(torch.arange(wide.shape[1], device=DEVICE) >= lengths.unsqueeze(1), -1)
            kv = pool.view(-1, 1, 576) if self.rows == "prefill576" else dequantized(pool)
            call = partial(flash_mla_sparse_fwd, padded(q, 1), kv, wide.unsqueeze(1), SCALE)
            name = "FlashMLA" if self.rows == "prefill576" else "FlashMLA, bf16 rows"
            found[name] = call, digest
            if lengths is not None:
                found[f"{name}, lengths"] = partial(call, topk_length=lengths), digest
        return found


@dataclasses.dataclass(frozen=True)
class PagedLogitsCell(_Cell):
    heads: int
    batch: int
    tokens: int
    keys: int
    full: bool

    @property
    def seen(self) -> int:
        return self.keys if self.full else (1 + self.keys) // 2

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.tokens * self.seen * self.heads * 128

    @property
    def roofline(self) -> float:
        size = self.batch * self.seen * (132 + 4 * self.tokens)
        return 1e6 * max(size / READ_BYTES, self.flops / FP8_FLOPS)

    @property
    def fits(self) -> bool:
        return self.batch * self.keys * 132 <= MOST_BYTES

    @property
    def name(self) -> str:
        return f"{self.heads} heads, {self.batch} x{self.tokens}, {self.keys} keys{'' if self.full else ' at most'}"

    @classmethod
    def draw(cls, rng: random.Random, rows: str) -> PagedLogitsCell:
        tokens = 2 if rng.random() < 1 / 3 else 1
        keys = -(-log_uniform(rng, 256, 131072) // PAGE) * PAGE
        return cls(rows, index_heads(rng), log_uniform(rng, 1, 256), tokens, keys, rng.random() < 0.5)

    def contenders(self, bench: SparseBench) -> Contenders:
        keys = PagedKeys(self.batch, self.keys)
        q = random_fp8(self.batch, self.tokens, self.heads, 128)
        weights = torch.randn(self.batch * self.tokens, self.heads, device=DEVICE)
        last = some_lengths(self.batch, self.keys, self.full).clamp(min=self.tokens)
        lengths = last[:, None] - torch.arange(self.tokens - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        out = torch.empty(self.batch * self.tokens, self.keys, device=DEVICE)
        given, digest = (q, keys.pages, keys.table, weights, lengths), in_rows(lengths.flatten())
        found: Contenders = {"attnops": (partial(ops.index_logits_paged, *given, logits=out), digest)}
        theirs = _peers().paged_logits(*given, self.keys)
        return found | {name: (call, digest) for name, call in theirs.items()}


@dataclasses.dataclass(frozen=True)
class LogitsCell(_Cell):
    heads: int
    tokens: int
    keys: int

    @property
    def seen(self) -> float:
        return self.keys - (self.tokens - 1) / 2

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.seen * self.heads * 128

    @property
    def roofline(self) -> float:
        return 1e6 * max(4 * self.tokens * self.seen / READ_BYTES, self.flops / FP8_FLOPS)

    @property
    def fits(self) -> bool:
        return 4 * self.tokens * self.keys <= MOST_BYTES

    @property
    def name(self) -> str:
        return f"{self.heads} heads, the last {self.tokens} of {self.keys}"

    @classmethod
    def draw(cls, rng: random.Random, rows: str) -> LogitsCell:
        tokens = log_uniform(rng, 64, 8192)
        return cls(rows, index_heads(rng), tokens, log_uniform(rng, tokens, 65536))

    def contenders(self, bench: SparseBench) -> Contenders:
        q, weights = random_fp8(self.tokens, self.heads, 128), torch.randn(self.tokens, self.heads, device=DEVICE)
        k, scale = random_fp8(self.keys, 128), torch.rand(self.keys, device=DEVICE)
        start = torch.zeros(self.tokens, dtype=torch.int32, device=DEVICE)
        end = torch.arange(self.keys - self.tokens + 1, self.keys + 1, dtype=torch.int32, device=DEVICE)
        out = torch.empty(self.tokens, self.keys, device=DEVICE)
        given, digest = (q, k, scale, weights, start, end), in_rows(end)
        found: Contenders = {"attnops": (partial(ops.index_logits, *given, logits=out), digest)}
        return found | {name: (call, digest) for name, call in _peers().ragged_logits(*given).items()}


@dataclasses.dataclass(frozen=True)
class TopkCell(_Cell):
    tokens: int
    keys: int
    k: int
    full: bool

    flops = 0.0

    @property
    def roofline(self) -> float:
        seen = self.keys if self.full else (1 + self.keys) // 2
        return 1e6 * self.tokens * (4 * seen + 4 * self.k) / READ_BYTES

    @property
    def fits(self) -> bool:
        return 4 * self.tokens * self.keys <= MOST_BYTES

    @property
    def name(self) -> str:
        return f"{self.k} of {self.keys}{'' if self.full else ' at most'}, {self.tokens} rows"

    @classmethod
    def draw(cls, rng: random.Random, rows: str) -> TopkCell:
        k = 2048 if rng.random() < 0.5 else log_uniform(rng, 64, 2048)
        return cls(rows, log_uniform(rng, 1, 8192), log_uniform(rng, 512, 131072), k, rng.random() < 0.5)

    def contenders(self, bench: SparseBench) -> Contenders:
        logits = torch.randn(self.tokens, self.keys, device=DEVICE)
        lengths = some_lengths(self.tokens, self.keys, self.full)
        out = torch.empty(self.tokens, self.k, dtype=torch.int32, device=DEVICE)
        digest = selected(logits)
        found: Contenders = {"attnops": (partial(ops.topk_select, logits, lengths, self.k, indices=out), digest)}
        theirs = _peers().topk(logits, lengths, self.k)
        return found | {name: (call, digest) for name, call in theirs.items()}


_found: list[Peers] = []


def _peers() -> Peers:
    if not _found:
        _found.append(Peers())
    return _found[0]


SETS: dict[str, Callable] = {
    "prefill656": PrefillCell.draw,
    "prefill576": PrefillCell.draw,
    "paged_logits": PagedLogitsCell.draw,
    "logits": LogitsCell.draw,
    "topk": TopkCell.draw,
}
