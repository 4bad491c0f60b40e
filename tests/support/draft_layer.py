"""A layer of linear attention with drafts: a pool of states with their rings, tokens, trees, and both ops."""

from __future__ import annotations

import random

import torch
from attnops import ops

IO = [torch.float32, torch.float16, torch.bfloat16]


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Layer:
    """A pool of states of one kind of layer with rings, and the same states without."""

    def __init__(self, seed, device, kind, drafts=None, dims=None, io=None, kept=torch.float32):
        r = self.random = random.Random(seed)
        self.kind, self.device = kind, device
        self.generator = torch.Generator().manual_seed(seed)
        self.io, self.batch = io or r.choice(IO), r.choice([1, 3])
        self.drafts = drafts or r.choice([1, 2, 4, 8, 9, 16])
        self.groups = r.choice([1, 2])
        self.heads = self.groups * r.choice([1, 2])
        self.keys, self.rows = dims or (r.choice([64, 128, 256, 20, 5]), r.choice([64, 128, 7]))
        self.num_slots = 2 * self.batch + 1
        slots = r.sample(range(self.num_slots), self.batch)
        self.slots = [s if r.random() < 0.85 else -1 for s in slots]
        self.states = self.normal(self.num_slots, self.heads, self.rows, self.keys).to(kept)
        self.twin = self.states.clone()
        ring = self.drafts + r.choice([0, 1, 5, 20])
        per_channel = [self.keys] if kind == "kda" else []
        nan = lambda *shape: torch.full(shape, float("nan"), device=device)  # noqa: E731
        self.rings = {
            "ring_u": nan(self.num_slots, self.heads, ring, self.rows),
            "ring_k": nan(self.num_slots, self.groups, ring, self.keys),
            "ring_decay": nan(self.num_slots, self.heads, ring, *per_channel),
            "ring_len": torch.zeros(self.num_slots, dtype=torch.int32, device=device),
        }
        self.rate, self.bias = 0.5 * self.normal(self.heads), 0.5 * self.normal(self.heads, *per_channel)
        self.skip = self.normal(self.heads)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.device)

    def tokens(self):
        """[B, T, ...] of a step."""
        shape = (self.batch, self.drafts)
        channels = [self.keys] if self.kind == "kda" else []
        made = [self.normal(*shape, self.groups, self.keys) for _ in range(2)]
        made += [self.normal(*shape, self.heads, self.rows), 2 * self.normal(*shape, self.heads, *channels)]
        return [t.to(self.io) for t in (*made, self.normal(*shape, self.heads))]

    def call(self, name, tokens, slots, **options):
        q, k, v, a, b = (t.flatten(0, 1) if name == "verify" else t for t in tokens)
        options["state_indices"] = indices(slots, self.device)
        if self.kind == "ssd":
            op = getattr(ops, f"ssd_{name}")
            return op(v, a, -self.rate.exp(), k, q, D=self.skip, dt_bias=self.bias, dt_softplus=True, **options)
        op = getattr(ops, f"delta_{name}")
        return op(q, k, v, a, b, A_log=self.rate, dt_bias=self.bias, **options)

    def commit(self, paths, **options):
        path = indices([(p + [99] * self.drafts)[: self.drafts] for p in paths], self.device)
        lengths = indices([len(p) for p in paths], self.device)
        commit = ops.ssd_commit if self.kind == "ssd" else ops.delta_commit
        given = {**self.rings, "state_indices": indices(self.slots, self.device)}
        commit(self.states, path, lengths, **given, **options)

    def trees(self):
        """A parent for each draft; -1: the state. And the packed mask."""
        parents = [[-1] + [self.random.randrange(-1, t) for t in range(1, self.drafts)] for _ in range(self.batch)]
        mask = torch.zeros(self.batch, self.drafts, (self.drafts + 7) // 8, dtype=torch.uint8)
        for i, own in enumerate(parents):
            for t in range(self.drafts):
                for seen in [*path_to(own, t)]:
                    mask[i, t, seen // 8] |= 1 << seen % 8
        return parents, mask.to(self.device)


def path_to(parents, t):
    """From the first ancestor to t."""
    path = []
    while t >= 0:
        path.insert(0, t)
        t = parents[t]
    return path
