"""Right calls of the prefill ops of linear attention, against recurrences in float64."""

from __future__ import annotations

import torch
from attnops import ops
from linear_reference import delta_gates, delta_step, ssd_step
from torch import Tensor

from .draw import Draw, Failure
from .linear import FLOATS, OUT, compare, doubles, draw_slots, index_tensor, on_device
from .memory import Guarded, strided
from .options import set_arch

CELLS = 3  # of checkpoints


def right_prompts(draw: Draw) -> None:
    """`delta_prefill`, `ssd_prefill` and their plans."""
    kept = draw.pick(FLOATS)
    batch, groups = draw.pick([0, 1, 2, 5]), draw.pick([1, 2])
    heads = groups * draw.pick([1, 2, 3])
    set_arch(draw)
    if whole_chunks := draw.chance(0.5):  # what the GPU's kernels of chunks take: bf16 on 16-byte boundaries
        io, keys, rows = torch.bfloat16, draw.pick([40, 64, 64, 128, 128, 256]), draw.pick([16, 64, 72, 128, 256])
    else:
        io = draw.pick(FLOATS)
        keys, rows = draw.pick([1, 16, 64, 100, 128, 128, 200, 256]), draw.pick([1, 16, 64, 100, 128, 256])

    def given_as(*tensors: Tensor | None) -> list[Tensor | None]:
        return [None if tensor is None else strided(draw, tensor, odd=not whole_chunks) for tensor in tensors]

    counts, spare = [draw.length(150) for _ in range(batch)], draw.pick([0, 3])
    prefix = [draw.pick([0, 0, 64, 7, 640]) for _ in counts]
    delta, total, num_slots = draw.chance(0.6), sum(counts) + spare, batch * (1 + CELLS) + 2
    draw.note(delta=delta, io=io, states=kept, counts=counts, prefix=prefix, G=groups, H=heads, K=keys, V=rows)
    before = draw.normal(num_slots, heads, rows, keys).to(kept)
    slots = draw_slots(draw, batch * (1 + CELLS), num_slots)
    slots, cells = slots[:batch], [slots[batch + CELLS * i :][:CELLS] for i in range(batch)]
    states, out = strided(draw, before), Guarded(draw, (total, heads, rows), io, odd=not whole_chunks)
    q, k = (draw.normal(total, groups, keys).to(io) for _ in range(2))
    v = draw.normal(total, heads, rows).to(io)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    given = {"states": states, "state_indices": index_tensor(draw, slots), "out": out.view}
    given |= {"cu_seqlens": index_tensor(draw, bounds.tolist()), "prefix_lens": index_tensor(draw, prefix)}
    if draw.chance(0.7):
        given["checkpoint_slots"] = index_tensor(draw, cells).view(batch, CELLS)
    else:
        cells = [[-1] * CELLS] * batch
    if draw.chance(0.5):
        given["plan"] = (ops.delta_plan if delta else ops.ssd_plan)(given["cu_seqlens"])
    if delta:
        draw.saw("op delta_prefill")
        channels, bound = draw.chance(0.4), draw.pick([0.0, -5.0])
        gate = draw.pick([io, torch.float32])
        a = 2 * draw.normal(*(total, heads, keys) if channels else (total, heads)).to(gate)
        b, rate = draw.normal(total, heads).to(gate), draw.normal(heads)
        bias = draw.normal(*a.shape[1:]) if draw.chance(0.6) else None
        options = {"A_log": on_device(draw, rate), "dt_bias": on_device(draw, bias), "lower_bound": bound}
        ops.delta_prefill(*given_as(q, k, v, a, b), **options, **given, scale=0.3)
        gates = delta_gates(*doubles(a, b, rate, bias), bound)
        wide = doubles(q, k, v)

        def step(S, t):
            return delta_step(S, *(x[t : t + 1] for x in (*wide, *gates)), 0.3, True)
    else:
        draw.saw("op ssd_prefill")
        dt = draw.normal(total, heads).to(draw.pick([io, torch.float32])) if draw.chance(0.7) else None
        z = draw.normal(total, heads, rows).to(io) if draw.chance(0.4) else None
        skip = draw.normal(heads) if draw.chance(0.5) else None
        slope, softplus = -draw.normal(heads).abs(), dt is not None
        x, dts, B, C, zs = given_as(v, dt, k, q, z)
        options = {"D": on_device(draw, skip), "z": zs, "dt_softplus": softplus}
        ops.ssd_prefill(x, dts, slope.to(draw.device, non_blocking=True), B, C, **options, **given)
        wide = doubles(v, dt, k, q, z)

        def step(S, t):
            x, d, B, C, gate = (None if w is None else w[t : t + 1] for w in wide)
            return ssd_step(S, x, d, slope.double(), B, C, *doubles(skip, None), gate, 1.0, softplus)

    expected, after = torch.zeros(total, heads, rows, dtype=torch.float64), {}
    for i, slot in enumerate(slots):
        if slot < 0 or not counts[i]:
            continue
        S = before[slot : slot + 1].double() * (prefix[i] > 0)
        for j in range(counts[i]):
            S, expected[bounds[i] + j] = step(S, int(bounds[i]) + j)
            seen = prefix[i] + j + 1
            cell = seen // 64 - prefix[i] // 64 - 1
            if seen % 64 == 0 and cell < CELLS and cells[i][cell] >= 0:
                after[cells[i][cell]] = S[0]
        after[slot] = S[0]
    compare("out", out.view, expected, OUT[io])
    untouched = [slot for slot in range(num_slots) if slot not in after]
    chunks = 6e-3 if io == torch.bfloat16 else 0.0  # products of bf16
    bound = max(OUT[kept], chunks if draw.device == "cpu" else OUT[io])
    for slot, state in after.items():
        compare(f"slot {slot}", states[slot], state, bound)
    if not torch.equal(states.cpu()[untouched], before[untouched]):
        raise Failure("a slot that no request names has changed")
    out.check("out")
