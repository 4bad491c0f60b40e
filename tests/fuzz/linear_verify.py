"""Right calls of the verify and commit ops of linear attention, against recurrences in float64."""

from __future__ import annotations

import math
from functools import partial

import torch
from attnops import ops
from linear_reference import delta_gates, delta_step, ssd_step
from torch import Tensor
from torch.nn.functional import normalize

from .draw import Draw, Failure
from .linear import FLOATS, OUT, compare, doubles, draw_slots, given_as, index_tensor, on_device
from .memory import Guarded, strided


def _tree(draw: Draw, batch: int, drafts: int) -> tuple[list[list[list[int]]], Tensor | None]:
    """Of each request the path to each draft, and the packed mask; a chain now and then."""
    chain, paths = draw.chance(0.4), []
    mask = torch.zeros(batch, drafts, (drafts + 7) // 8, dtype=torch.uint8)
    for i in range(batch):
        own: list[list[int]] = []
        for t in range(drafts):
            parent = t - 1 if chain else draw.number(-1, t - 1)
            own.append([*(own[parent] if parent >= 0 else []), t])
            for seen in own[t]:
                mask[i, t, seen // 8] |= 1 << seen % 8
        paths.append(own)
    return paths, None if chain and draw.chance(0.7) else mask.to(draw.device, non_blocking=True)


def right_drafts(draw: Draw) -> None:
    """A few verifications with commits between them, alone or by the op that takes both, then a fold."""
    io, kept = draw.pick(FLOATS), draw.pick(FLOATS)
    batch, groups, drafts = draw.pick([1, 2, 5]), draw.pick([1, 2]), draw.pick([1, 2, 4, 8, 11, 16])
    heads = groups * draw.pick([1, 2])
    keys, rows = draw.pick([1, 64, 100, 128, 200, 256]), draw.pick([1, 16, 64, 100])
    delta, num_slots, ring = draw.chance(0.5), batch + 2, drafts + draw.pick([0, 3, 12])
    channels = delta and draw.chance(0.4)
    draw.note(delta=delta, io=io, states=kept, B=batch, T=drafts, R=ring, G=groups, H=heads, K=keys, V=rows)
    before = draw.normal(num_slots, heads, rows, keys).to(kept)
    slots, states = draw_slots(draw, batch, num_slots), strided(draw, before)
    decays = (num_slots, heads, ring, keys) if channels else (num_slots, heads, ring)
    rings = {"ring_u": (num_slots, heads, ring, rows), "ring_k": (num_slots, groups, ring, keys), "ring_decay": decays}
    rings = {name: torch.full(shape, torch.nan, device=draw.device) for name, shape in rings.items()}
    rings |= {"ring_len": torch.zeros(num_slots, dtype=torch.int32, device=draw.device)}
    given = {**rings, "states": states, "state_indices": index_tensor(draw, slots)}
    rate, bias = draw.normal(heads), draw.normal(heads, *([keys] if channels else []))
    now = before.double()
    folds = torch.zeros(num_slots, dtype=torch.bool)  # slots that were rounded to the pool's type on the way
    turns, waits = draw.pick([1, 3]), {}  # the commit that the next op takes
    for turn in range(turns):
        shape = (batch * drafts, heads)
        q, k = (draw.normal(batch * drafts, groups, keys).to(io) for _ in range(2))
        v, a = draw.normal(*shape, rows).to(io), draw.normal(*shape, *([keys] if channels else [])).to(io)
        b = draw.normal(*shape).to(io)
        paths, mask = _tree(draw, batch, drafts)
        out = Guarded(draw, (*shape, rows), io)
        options = {"dt_bias": on_device(draw, bias), "out": out.view, "tree_mask": mask, **given}
        if delta:
            draw.saw("op delta_draft_step" if waits else "op delta_verify")
            verify = partial(ops.delta_draft_step, **waits) if waits else ops.delta_verify
            verify(*given_as(draw, q, k, v, a, b), A_log=on_device(draw, rate), scale=0.3, **options)
            gates = delta_gates(*doubles(a, b, rate, bias), 0.0)
            wide = [*doubles(q, k, v), *gates]
        else:
            draw.saw("op ssd_draft_step" if waits else "op ssd_verify")
            verify = partial(ops.ssd_draft_step, **waits) if waits else ops.ssd_verify
            x, dt, B, C = given_as(draw, v, a, k, q)
            verify(x, dt, -rate.abs().to(draw.device, non_blocking=True), B, C, dt_softplus=True, **options)
            wide = doubles(v, a, k, q)
        if waits:
            folds |= rings["ring_len"].cpu() == 0

        def walk(S: Tensor, i: int, path: list[int], wide: list[Tensor] = wide) -> tuple[Tensor, Tensor, float]:
            """The state behind a path, its last row of `out`, and the norm of that row's terms, which may cancel."""
            row, terms = torch.zeros(1, heads, rows, dtype=torch.float64), 0.0
            for t in path:
                one = [w[i * drafts + t][None] for w in wide]
                if delta:
                    S, row = delta_step(S, *one, 0.3, True)
                else:
                    x, d, B, C = one
                    S, row = ssd_step(S, x, d, -rate.abs().double(), B, C, None, bias.double(), None, 1.0, True)
                q = 0.3 * normalize(one[0], dim=-1) if delta else one[3]
                terms = float((S * q.repeat_interleave(heads // groups, 1).unsqueeze(2)).norm())
            return S, row, terms

        expected, terms = torch.zeros(*shape, rows, dtype=torch.float64), 0.0
        for i, slot in enumerate(slots):
            for t in range(drafts if slot >= 0 else 0):
                _, row, of_row = walk(now[slot][None], i, paths[i][t])
                expected[i * drafts + t] = row[0]
                terms = math.hypot(terms, of_row)
        rounded = OUT[kept] * max(terms, float(expected.norm())) if bool(folds.any()) else 0.0
        compare("out", out.view, expected, OUT[io], rounded)
        out.check("out")
        accepted = [paths[i][draw.number(0, drafts - 1)] if draw.chance(0.8) else [] for i in range(batch)]
        last = draw.chance(0.3)
        filled = [(path + [0] * drafts)[:drafts] for path in accepted]
        waits = {"accepted_path": index_tensor(draw, filled)}
        waits |= {"accepted_len": index_tensor(draw, [len(path) for path in accepted])}
        if turn + 1 == turns or draw.chance(0.5):
            draw.saw("op delta_commit" if delta else "op ssd_commit")
            (ops.delta_commit if delta else ops.ssd_commit)(fold=last, **waits, **given)
            waits = {}
        for i, slot in enumerate(slots):
            if slot >= 0:
                now[slot] = walk(now[slot][None], i, accepted[i])[0][0]
        if not waits:
            folds |= rings["ring_len"].cpu() == 0
    none = torch.zeros(batch, drafts, dtype=torch.int32, device=draw.device)
    (ops.delta_commit if delta else ops.ssd_commit)(
        accepted_path=none, accepted_len=none[:, 0].contiguous(), fold=True, **given
    )
    for slot in range(num_slots):
        if slot in slots:
            compare(f"slot {slot}", states[slot], now[slot], 3 * OUT[kept])
        elif not torch.equal(states[slot].cpu(), before[slot]):
            raise Failure("a slot that no request names has changed")
