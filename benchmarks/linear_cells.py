"""Cells of `bench_linear.py`: the fixed ones of issue 21, and the law by which a seed draws others."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Model:
    """Extents of a layer. groups: heads of keys, or of B and C."""

    name: str
    groups: int
    heads: int
    keys: int
    values: int
    channels: bool = False

    @property
    def delta(self) -> bool:
        return self.name[:3] in ("GDN", "KDA")

    @property
    def constant(self) -> bool:
        """Whether its decay is a head's own: there is no dt."""
        return self.name.startswith("Lightning")


GDN = Model("GDN 16/32", 16, 32, 128, 128)
KDA = Model("KDA 32", 32, 32, 128, 128, channels=True)
MAMBA2 = Model("Mamba2 128 x 64 x 128", 8, 128, 128, 64)
LIGHTNING = Model("Lightning 64", 64, 64, 128, 128)
KDA64 = Model("KDA 64", 64, 64, 128, 128, channels=True)
GDN64 = Model("GDN 16/64", 16, 64, 128, 128)
DECODES = [(GDN, n, torch.float32) for n in (1, 64, 256)] + [(GDN, 64, torch.bfloat16), (KDA, 64, torch.float32)]
# Model, lengths, floor in us: of operations or of bytes, whichever takes longer (issue 21).
PREFILLS = [
    (GDN, [2048], 14),
    (GDN, [8192], 55),
    (GDN, [32768], 219),
    (GDN, [1024] * 8, 55),
    (GDN, [8192] * 4, 219),
    (GDN, [128] * 64, 111),
    (KDA64, [8192], 153),
    (KDA64, [1024] * 8, 167),
    (MAMBA2, [8192], 74),
    (MAMBA2, [1024] * 16, 175),
    (LIGHTNING, [8192], 124),
]
# A rank's heads, where they are too few for a GPU: prompts are cut.
GDN_FEW = [replace(GDN, name=f"GDN 16/32 / {ranks}", groups=16 // ranks, heads=32 // ranks) for ranks in (8, 4)]
MAMBA2_FEW = replace(MAMBA2, name="Mamba2 128 x 64 x 128 / 4", groups=2, heads=32)
FEW_HEADS = [(model, [tokens], tokens * model.heads / 4766) for model in GDN_FEW for tokens in (8192, 32768)]
FEW_HEADS += [(MAMBA2_FEW, [1648], 4), (MAMBA2_FEW, [8192], 19)]
# KDA with gates above -5. These forget in a token or two; with a bias of -6 half a state is left after some 35 tokens.
KDA_FEW = replace(KDA64, name="KDA 64 / 8", groups=8, heads=8)
BOUNDED = [
    (model, lengths, floor, torch.float32, -5.0, bias)
    for bias in (0.0, -6.0)
    for model, lengths, floor in ((KDA64, [8192], 153), (KDA64, [1024] * 8, 167), (KDA_FEW, [8192], 19))
]
TREE = [-1, 0, 0, 1, 1, 2, 2, 3]  # parents
DECODES += [(MAMBA2, n, torch.float32) for n in (1, 64, 256)] + [(LIGHTNING, 64, torch.float32)]
VERIFIES = [(1, 4, False), (64, 4, False), (64, 8, False), (64, 8, True)]  # requests, drafts, whether a tree
CONVOLUTIONS = [(8192, 8192, 1, False), (8192, 8192, 64, False), (64, 8192, 64, True), (1, 8192, 1, True)]
CONV_DRAFTS = [(1, 4, 8192, False), (64, 4, 8192, False), (64, 8, 8192, True)]  # requests, drafts, channels, a tree

CONV_DECODES = [(GDN, n, torch.float32) for n in (1, 8, 64, 256)] + [(GDN, 64, torch.bfloat16)]
CONV_DECODES += [(KDA, 64, torch.float32), (GDN64, 64, torch.float32)]


@dataclass(frozen=True)
class Drawn:
    """A cell that a seed draws: requests are one token each, behind a convolution or not, prompts, or drafts."""

    kind: str
    model: Model
    lengths: list[int]
    kept: torch.dtype = torch.float32
    drafts: int = 1
    tree: bool = False


def drawn_cells(seed: int, count: int) -> list[Drawn]:
    """The law. Half are decodes, 0.35 prefills, the rest verifications of chains and trees, of every kind of layer.

    Of the decodes of a delta rule, one in four has its convolution in front, and its model's own dims.

    Heads are a model's on 1 to 8 ranks, with its dims or, three times in ten, others. Batches and lengths are even in
    their logarithms; prompts are equal, one long among short ones, or all drawn. One state in three is of bf16.
    """
    r, cells = random.Random(seed), []
    even = lambda low, high: round(math.exp(r.uniform(math.log(low), math.log(high))))  # noqa: E731
    while len(cells) < count:
        kind = r.choices(["decode", "prefill", "verify"], [0.5, 0.35, 0.15])[0]
        model, ranks = r.choice([GDN, GDN64, KDA, MAMBA2, LIGHTNING]), r.choice([1, 2, 4, 8])
        model = replace(model, name=f"{model.name} / {ranks}", groups=model.groups // ranks, heads=model.heads // ranks)
        if r.random() < 0.3:
            wide = [] if kind == "verify" or model.channels else [(256, 64), (256, 128)]
            keys, values = r.choice([(64, 64), (64, 128), (128, 64), (128, 128), *wide])
            model = replace(model, name=f"{model.name}, {keys} x {values}", keys=keys, values=values)
        kept = r.choice([torch.float32, torch.float32, torch.bfloat16])
        if kind == "decode" and model.delta and "," not in model.name and r.random() < 0.25:
            kind = "conv_decode"
        if kind == "prefill":
            batch, law, most = even(1, 32), r.choice(["equal", "one long", "drawn"]), even(64, 16384)
            short = max(most // 16, 1)
            lengths = [most if law == "equal" else even(16, most) if law == "drawn" else short for _ in range(batch)]
            lengths[0] = most
            if sum(lengths) <= 65536:
                cells.append(Drawn(kind, model, lengths, kept))
            continue
        batch = even(1, 64) if kind == "verify" else even(1, 256)
        cells.append(Drawn(kind, model, [1] * batch, kept, r.choice([2, 3, 4, 6, 8]), r.random() < 0.3))
    return cells
