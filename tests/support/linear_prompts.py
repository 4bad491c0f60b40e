"""Ragged prompts of linear layers, drawn by a seed, and what float64 makes of them token by token."""

from __future__ import annotations

import random

import torch
from attnops import ops
from linear_reference import delta_gates, delta_step, relative, ssd_step

IO = [torch.float32, torch.float16, torch.bfloat16]
OUT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
STATE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}  # by the states' type


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Case:
    """Ragged requests of one kind of layer, some resumed, some padding, with checkpoints."""

    def __init__(self, seed, device, kind, io=None, lengths=None, dims=None, kept=None):
        r = self.random = random.Random(seed)
        self.kind, self.device = kind, device
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        self.io, self.kept_as = io or r.choice(IO), kept or r.choice(IO)
        self.lengths = lengths or [r.choice([0, 1, 63, 64, 65, r.randint(1, 200)]) for _ in range(r.choice([1, 3, 6]))]
        batch, spare = len(self.lengths), r.choice([0, 3])
        self.prefix = [r.choice([0, 0, 64, 128, 5, 100]) for _ in self.lengths]
        groups = r.choice([1, 2])
        keys, rows = dims or (r.choice([64, 128, 128, 256, 5, 100]), r.choice([64, 128, 128, 7, 130]))
        self.heads = heads = groups * r.choice([1, 2])
        self.bounds = [sum(self.lengths[:i]) + spare for i in range(batch + 1)]
        total = self.bounds[-1] + spare
        slots = r.sample(range(5 * batch + 2), 5 * batch)
        self.slots = [slot if r.random() < 0.85 else -1 for slot in slots[:batch]]
        self.checkpoints = [[s if r.random() < 0.8 else -1 for s in slots[batch + 4 * i :][:4]] for i in range(batch)]
        self.before = normal(5 * batch + 2, heads, rows, keys).to(self.kept_as)
        draw = lambda *shape: normal(*shape).to(self.io)  # noqa: E731
        self.q, self.k, self.v = draw(total, groups, keys), draw(total, groups, keys), draw(total, heads, rows)
        channels, gate = kind == "kda", r.choice([self.io, torch.float32])
        self.a = (2 * normal(*(total, heads, keys) if channels else (total, heads))).to(gate)
        self.b, self.z = normal(total, heads).to(gate), draw(total, heads, rows) if r.random() < 0.4 else None
        self.rate, self.bias = 0.5 * normal(heads), 0.5 * normal(*self.a.shape[1:])
        self.skip, self.bound = normal(heads) if r.random() < 0.5 else None, r.choice([0.0, -5.0])
        self.scale = r.choice([0.3, 1.0])
        self.plan, self.cut = r.random() < 0.5, False

    def remember(self):
        """Slow decays: a state keeps what hundreds of tokens wrote. The longest request is none of padding."""
        self.rate, self.bound = self.rate - (4 if self.kind == "lightning" else 6), 0.0
        free = set(range(len(self.before))) - {*self.slots, *(slot for row in self.checkpoints for slot in row)}
        longest = self.lengths.index(max(self.lengths))
        self.slots[longest] = self.slots[longest] if self.slots[longest] >= 0 else min(free)
        return self

    def run(self, part=None, states=None, plan=None):
        """Out and states. part: begin and end of each request; states: of an earlier call."""
        to = lambda t: None if t is None else t.to(self.device)  # noqa: E731
        given = {n: to(getattr(self, n)) for n in ("q", "k", "v", "a", "b", "z")}
        bounds, prefix = self.bounds, self.prefix
        if part is not None:
            chosen = torch.cat([torch.arange(self.bounds[i] + b, self.bounds[i] + e) for i, (b, e) in enumerate(part)])
            given = {n: None if t is None else t[chosen.to(self.device)] for n, t in given.items()}
            bounds = [sum(e - b for b, e in part[:i]) for i in range(len(part) + 1)]
            prefix = [p + b for p, (b, _) in zip(self.prefix, part)]
        states = self.before.to(self.device, copy=True) if states is None else states
        options = {"states": states, "cu_seqlens": indices(bounds, self.device), "scale": self.scale}
        options |= {"prefix_lens": indices(prefix, self.device), "state_indices": indices(self.slots, self.device)}
        options |= {"checkpoint_slots": indices(self.checkpoints, self.device)} if part is None else {}
        options["cut_prompts"] = self.cut
        q, k, v, a, b, z = given.values()
        if self.kind == "ssd":
            options["plan"] = ops.ssd_plan(options["cu_seqlens"]) if self.plan else None
            out = ops.ssd_prefill(v, a, to(-self.rate.exp()), k, q, D=to(self.skip), dt_bias=to(self.bias), z=z,
                                  dt_softplus=True, **options)  # fmt: skip
        elif self.kind == "lightning":
            out = ops.ssd_prefill(v, None, to(-self.rate.exp() / 20), k, q, **options)
        else:
            options["plan"] = ops.delta_plan(options["cu_seqlens"]) if self.plan else None
            gates = {"A_log": to(self.rate), "dt_bias": to(self.bias), "lower_bound": self.bound}
            out = ops.delta_prefill(q, k, v, a, b, **gates, **options)
        return out, states

    def assert_as_the_cpu_in_float32(self, out, states):
        """What a call in bf16 gave, beside the same inputs in float32 on the CPU; the case is these from then on."""
        self.device = "cpu"
        for name in ("q", "k", "v", "z", "a", "b"):
            given = getattr(self, name)
            setattr(self, name, None if given is None else given.float())
        expected, after = self.run()
        assert out.isfinite().all() and relative(out, expected) < OUT[torch.bfloat16]
        for slot in range(len(after)):
            assert relative(states[slot], after[slot]) < 1.2 * STATE[torch.bfloat16]

    def expected(self):
        """In float64."""
        out, after = torch.zeros(self.v.shape, dtype=torch.float64), self.before.double()
        wide = [None if t is None else t.double() for t in (self.q, self.k, self.v, self.a, self.b, self.z)]
        rate, bias = self.rate.double(), self.bias.double()
        skip = None if self.skip is None else self.skip.double()
        for i, slot in enumerate(self.slots):
            if slot < 0 or not self.lengths[i]:
                continue
            S = self.before[slot : slot + 1].double() * (self.prefix[i] > 0)
            for j, t in enumerate(range(self.bounds[i], self.bounds[i + 1])):
                q, k, v, a, b, z = (None if x is None else x[t : t + 1] for x in wide)
                if self.kind == "ssd":
                    S, out[t] = ssd_step(S, v, a, -rate.exp(), k, q, skip, bias, z, self.scale, True)
                elif self.kind == "lightning":
                    S, out[t] = ssd_step(S, v, None, -rate.exp() / 20, k, q, None, None, None, self.scale, False)
                else:
                    S, out[t] = delta_step(S, q, k, v, *delta_gates(a, b, rate, bias, self.bound), self.scale, True)
                seen = self.prefix[i] + j + 1
                cell = seen // 64 - self.prefix[i] // 64 - 1
                if seen % 64 == 0 and cell < 4 and self.checkpoints[i][cell] >= 0:
                    after[self.checkpoints[i][cell]] = S[0]
            after[slot] = S[0]
        return out, after
