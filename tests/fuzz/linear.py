"""Right calls of the ops of linear attention, against recurrences in float64; slots that are wrong by value."""

from __future__ import annotations

import torch
from attnops import ops
from attnops.report import first_fault, new_report
from linear_reference import convolve, delta_gates, delta_step, ssd_step
from torch import Tensor

from .draw import Draw, Failure
from .memory import Guarded, strided

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
OUT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HUGE = [10**6, 2**31 - 1]


def compare(name: str, got: Tensor, expected: Tensor, bound: float, rounded: float = 0.0) -> None:
    """A relative error of at most `bound`, in the norm; and `rounded` besides, of what was rounded on the way."""
    got = got.detach().cpu().double()
    if got.numel() == 0:
        return
    if not bool(got.isfinite().all()):
        raise Failure(f"{name} is not finite")
    difference, norm = float((got - expected).norm()), max(float(expected.norm()), 1e-6)
    if difference > bound * norm + rounded:
        raise Failure(f"{name} differs: relative error {difference / norm:.3g}")


def draw_slots(draw: Draw, batch: int, num_slots: int) -> list[int]:
    """Different slots, with padding among them."""
    order = draw.permutation(num_slots)[:batch].tolist()
    return [slot if draw.chance(0.85) else draw.pick([-1, -(2**31)]) for slot in order]


def index_tensor(draw: Draw, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(draw.device, non_blocking=True)


def given_as(draw: Draw, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else strided(draw, tensor) for tensor in tensors]


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def on_device(draw: Draw, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(draw.device, non_blocking=True)


def _any_strides(draw: Draw, values: Tensor) -> Tensor:
    """`values`, or their last two dimensions the other way round in memory."""
    return strided(draw, values.mT).mT if draw.chance(0.3) else strided(draw, values)


def right_step(draw: Draw) -> None:
    """`delta_decode` and `ssd_decode`."""
    io, kept = draw.pick(FLOATS), draw.pick(FLOATS)
    batch, groups = draw.pick([0, 1, 2, 7, 40]), draw.pick([1, 2, 4])
    heads = groups * draw.pick([1, 2, 4])
    keys, rows = draw.pick([1, 16, 64, 100, 128, 200, 256]), draw.pick([1, 16, 64, 100, 128, 256])
    batch = min(batch, max(2_000_000 // (heads * keys * rows), 1))
    num_slots = batch + draw.pick([1, 5])
    delta = draw.chance(0.5)
    draw.note(delta=delta, io=io, states=kept, B=batch, G=groups, H=heads, K=keys, V=rows)
    before = draw.normal(num_slots, heads, rows, keys).to(kept)
    slots = draw_slots(draw, batch, num_slots)
    live = [i for i, slot in enumerate(slots) if slot >= 0]
    start = before[[slots[i] for i in live]].double()
    states = strided(draw, before)
    out = Guarded(draw, (batch, heads, rows), io)
    q, k = (draw.normal(batch, groups, keys).to(io) for _ in range(2))
    v = draw.normal(batch, heads, rows).to(io)
    indices = index_tensor(draw, slots)
    if delta:
        draw.saw("op delta_decode")
        channels, gated, bound = draw.chance(0.4), draw.chance(0.7), draw.pick([0.0, -5.0])
        shape = (batch, heads, keys) if channels else (batch, heads)
        a, b = 2 * draw.normal(*shape), draw.normal(batch, heads)
        gate = draw.pick([io, torch.float32])
        a, b = (a.to(gate), b.to(gate)) if gated else (-a.abs().to(gate), b.sigmoid().to(gate))
        a_log = draw.normal(heads) if gated else None
        bias = draw.normal(*shape[1:]) if gated and draw.chance(0.6) else None
        bound = bound if gated else 0.0
        draw.note(channels=channels, gated=gated, bound=bound)
        given = dict(zip("qkvab", given_as(draw, q, k, v, a, b)))
        options = {"A_log": on_device(draw, a_log), "dt_bias": on_device(draw, bias), "lower_bound": bound}
        ops.delta_decode(**given, **options, states=states, state_indices=indices, scale=0.3, out=out.view)
        chosen = [None if t is None else t[live] for t in (q, k, v, a, b)]
        gates = delta_gates(*doubles(*chosen[3:], a_log, bias), bound)
        after, expected = delta_step(start, *doubles(*chosen[:3]), *gates, 0.3, True)
    else:
        draw.saw("op ssd_decode")
        dt = draw.normal(batch, heads).to(draw.pick([io, torch.float32])) if draw.chance(0.7) else None
        z = draw.normal(batch, heads, rows).to(io) if draw.chance(0.5) else None
        skip = draw.normal(heads) if draw.chance(0.5) else None
        bias = draw.normal(heads) if dt is not None and draw.chance(0.5) else None
        slope, softplus = -draw.normal(heads).abs(), dt is not None
        x, B, C, zs = given_as(draw, v, k, q, z)
        dts = None if dt is None else _any_strides(draw, dt)
        options = {"D": on_device(draw, skip), "dt_bias": on_device(draw, bias), "z": zs, "dt_softplus": softplus}
        ops.ssd_decode(
            x,
            dts,
            slope.to(draw.device, non_blocking=True),
            B,
            C,
            states=states,
            state_indices=indices,
            out=out.view,
            **options,
        )
        x, dt, k, q, z = (None if t is None else t[live].double() for t in (v, dt, k, q, z))
        after, expected = ssd_step(start, x, dt, slope.double(), k, q, *doubles(skip, bias), z, 1.0, softplus)
    whole = torch.zeros(batch, heads, rows, dtype=torch.float64)
    whole[live] = expected
    # What a state and its update cancel to may be small: float32 rounds what is added.
    added = [1e-6 * float(start[row].norm() + v[i].double().norm()) for row, i in enumerate(live)]
    compare("out", out.view, whole, OUT[io])
    if bool(out.view.cpu()[[i for i in range(batch) if i not in live]].ne(0).any()):
        raise Failure("padding does not give zeros")
    untouched = torch.ones(num_slots, dtype=torch.bool)
    for row, i in enumerate(live):
        untouched[slots[i]] = False
        compare("states", states[slots[i]], after[row], OUT[kept], added[row])
    if not torch.equal(states.cpu()[untouched], before[untouched]):
        raise Failure("a slot that no row names has changed")
    out.check("out")


def _joined_pools(
    draw: Draw, batch: int, state: tuple[int, ...], inputs: tuple[int, int], io: torch.dtype, kept: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States and a convolution's inputs of two slots more than rows, and the same again for the two ops."""
    pools = {
        "states": strided(draw, draw.normal(batch + 2, *state).to(kept)),
        "conv_states": _any_strides(draw, draw.normal(batch + 2, *inputs).to(io)),
    }
    twins = {name: pool.clone() for name, pool in pools.items()}
    pools["state_indices"] = twins["state_indices"] = index_tensor(draw, draw_slots(draw, batch, batch + 2))
    return pools, twins


def _same_as_two_ops(out: Guarded, expected: Tensor, pools: dict[str, Tensor], twins: dict[str, Tensor]) -> None:
    for name, got, want in [("out", out.view, expected), *((name, pools[name], twins[name]) for name in pools)]:
        if not torch.equal(got, want):
            raise Failure(f"{name} are not the bits of the two ops")
    out.check("out")


def right_convolved_step(draw: Draw) -> None:
    """`delta_conv_decode`, against the two ops that it joins."""
    io, kept, width = draw.pick(FLOATS), draw.pick(FLOATS), draw.pick([2, 3, 4])
    batch, groups = draw.pick([0, 1, 3, 20]), draw.pick([1, 2, 3])
    heads, keys, rows = groups * draw.pick([1, 2, 3]), draw.pick([16, 64, 100, 128]), draw.pick([1, 16, 50, 128])
    channels, silu = 2 * groups * keys + heads * rows, draw.chance(0.6)
    draw.note(io=io, states=kept, W=width, B=batch, G=groups, H=heads, K=keys, V=rows)
    shape = (batch, heads, keys) if draw.chance(0.4) else (batch, heads)
    x, a, b = given_as(draw, *(draw.normal(*s).to(io) for s in ((batch, channels), shape, (batch, heads))))
    weight = on_device(draw, draw.normal(channels, width).to(io))
    bias = on_device(draw, draw.normal(channels).to(io)) if draw.chance(0.5) else None
    gates = {"A_log": on_device(draw, draw.normal(heads)), "dt_bias": on_device(draw, draw.normal(*shape[1:]))}
    pools, twins = _joined_pools(draw, batch, (heads, rows, keys), (channels, width - 1), io, kept)
    out = Guarded(draw, (batch, heads, rows), io)
    draw.saw("op delta_conv_decode")
    ops.delta_conv_decode(x, weight, bias, a, b, num_k_heads=groups, silu=silu, out=out.view, **gates, **pools)
    mixed = ops.causal_conv1d_update(
        x, weight, bias, conv_states=twins["conv_states"], state_indices=twins["state_indices"], silu=silu
    )
    q, k, v = mixed.split([groups * keys, groups * keys, heads * rows], 1)
    q, k, v = q.unflatten(1, (groups, keys)), k.unflatten(1, (groups, keys)), v.unflatten(1, (heads, rows))
    expected = ops.delta_decode(q, k, v, a, b, states=twins["states"], state_indices=twins["state_indices"], **gates)
    _same_as_two_ops(out, expected, pools, twins)


def right_convolved_state_space(draw: Draw) -> None:
    """`ssd_conv_decode`, against the two ops that it joins."""
    io, kept, width = draw.pick(FLOATS), draw.pick(FLOATS), draw.pick([2, 3, 4])
    batch, groups = draw.pick([0, 1, 3, 20]), draw.pick([1, 2, 3])
    heads, keys, rows = groups * draw.pick([1, 2, 8]), draw.pick([16, 64, 128, 256]), draw.pick([1, 16, 50, 64])
    channels, silu = 2 * groups * keys + heads * rows, draw.chance(0.6)
    draw.note(io=io, states=kept, W=width, B=batch, G=groups, H=heads, N=keys, P=rows)
    x, dt = given_as(draw, *(draw.normal(*s).to(io) for s in ((batch, channels), (batch, heads))))
    weight = on_device(draw, draw.normal(channels, width).to(io))
    bias = on_device(draw, draw.normal(channels).to(io)) if draw.chance(0.5) else None
    given = {"dt_bias": on_device(draw, draw.normal(heads)), "dt_softplus": True}
    given["D"] = on_device(draw, draw.normal(heads)) if draw.chance(0.5) else None
    given["z"] = on_device(draw, draw.normal(batch, heads, rows).to(io)) if draw.chance(0.5) else None
    A = on_device(draw, -draw.normal(heads).abs())
    pools, twins = _joined_pools(draw, batch, (heads, rows, keys), (channels, width - 1), io, kept)
    out = Guarded(draw, (batch, heads, rows), io)
    draw.saw("op ssd_conv_decode")
    ops.ssd_conv_decode(x, weight, bias, dt, A, num_groups=groups, silu=silu, out=out.view, **given, **pools)
    mixed = ops.causal_conv1d_update(
        x, weight, bias, conv_states=twins["conv_states"], state_indices=twins["state_indices"], silu=silu
    )
    v, B, C = mixed.split([heads * rows, groups * keys, groups * keys], 1)
    v, B, C = v.unflatten(1, (heads, rows)), B.unflatten(1, (groups, keys)), C.unflatten(1, (groups, keys))
    expected = ops.ssd_decode(v, dt, A, B, C, states=twins["states"], state_indices=twins["state_indices"], **given)
    _same_as_two_ops(out, expected, pools, twins)


def _tree(draw: Draw, batch: int, count: int) -> tuple[Tensor, list[list[list[int]]]]:
    """A packed mask, whose rows may hold bits of no meaning, and the ancestors of each draft."""
    mask, ancestors = torch.zeros(batch, count, (count + 7) // 8, dtype=torch.uint8), []
    for i in range(batch):
        ancestors.append([[a for a in range(t) if draw.chance(0.5)] for t in range(count)])
        for t, own in enumerate(ancestors[i]):
            for bit in [*own, *(b for b in range(t, 8 * mask.shape[2]) if draw.chance(0.3))]:
                mask[i, t, bit // 8] |= 1 << bit % 8
    return mask.to(draw.device), ancestors


def right_convolution(draw: Draw) -> None:
    """`causal_conv1d` and its update."""
    io, width = draw.pick(FLOATS), draw.pick([2, 3, 4])
    channels, batch = draw.pick([1, 8, 33, 64, 200]), draw.pick([0, 1, 3, 20])
    update = draw.chance(0.4)
    drafts = update and draw.chance(0.5)
    counts = [draw.pick([1, 2, 5])] * batch if update else [draw.length(150) for _ in range(batch)]
    spare = 0 if update else draw.pick([0, 3])
    total, num_slots = sum(counts) + spare, batch + 2
    draw.note(update=update, drafts=drafts, io=io, C=channels, W=width, counts=counts, spare=spare)
    x, weight = draw.normal(total, channels).to(io), draw.normal(channels, width).to(io)
    bias = draw.normal(channels).to(io) if draw.chance(0.5) else None
    before = draw.normal(num_slots, channels, width - 1).to(io)
    slots, silu = draw_slots(draw, batch, num_slots), draw.chance(0.6)
    initial = None if update or draw.chance(0.5) else [draw.chance(0.5) for _ in counts]
    states = _any_strides(draw, before)
    out = Guarded(draw, (total, channels), io)
    weights = weight.to(draw.device, non_blocking=True), on_device(draw, bias)
    given = {"conv_states": states, "state_indices": index_tensor(draw, slots), "silu": silu, "out": out.view}
    if update:
        draw.saw("op causal_conv1d_update")
        count = counts[0] if counts else draw.pick([0, 3])
        windows = torch.zeros(batch, count, channels, width - 1, dtype=io)
        windows = _any_strides(draw, windows) if drafts else None
        mask, ancestors = _tree(draw, batch, count) if drafts and draw.chance(0.6) else (None, None)
        ops.causal_conv1d_update(strided(draw, x), *weights, windows=windows, tree_mask=mask, **given)
    else:
        draw.saw("op causal_conv1d")
        bounds = index_tensor(draw, torch.tensor([0, *counts]).cumsum(0).tolist())
        has = None if initial is None else torch.tensor(initial, dtype=torch.uint8).to(draw.device, non_blocking=True)
        ops.causal_conv1d(strided(draw, x), *weights, cu_seqlens=bounds, has_initial_state=has, **given)
    expected, after, row = torch.zeros(total, channels, dtype=torch.float64), before.clone(), 0
    for i, (count, slot) in enumerate(zip(counts, slots)):
        if slot >= 0 and count:
            start = before[slot].double() * (initial is None or initial[i])
            if drafts:
                for t in range(count):
                    path = [*(range(t) if ancestors is None else ancestors[i][t]), t]
                    part, new = convolve(*doubles(x[row : row + count][path], weight, bias), start, silu)
                    expected[row + t] = part[-1]
                    if not torch.equal(windows[i, t].cpu(), new.to(io)):
                        raise Failure("windows are not the last inputs")
                row += count
                continue
            part, new = convolve(*doubles(x[row : row + count], weight, bias), start, silu)
            expected[row : row + count], after[slot] = part, new.to(io)
        row += count
    compare("out", out.view, expected, OUT[io])
    if not torch.equal(states.cpu(), after):
        raise Failure("conv_states are not the last inputs")
    out.check("out")


def right_states(draw: Draw) -> None:
    """`copy_states` and `clear_states`."""
    dtype, layers, slots = draw.pick(FLOATS), draw.pick([0, 1, 3]), draw.pick([2, 9])
    inner = draw.pick([(), (1,), (3, 5), (4, 64), (33,)])
    before = draw.normal(layers, slots, *inner).to(dtype)
    states, expected = before.to(draw.device, copy=True), before.clone()
    order = draw.permutation(slots).tolist()
    half = slots // 2
    src, dst, taken = order[:half], order[half : 2 * half], before
    dst = [slot if draw.chance(0.8) else -1 for slot in dst]
    draw.note(dtype=dtype, layers=layers, inner=inner, src=src, dst=dst)
    if draw.chance(0.5):
        draw.saw("op copy_states")
        source = None
        if draw.chance(0.4):  # any slots of another pool
            taken = draw.normal(layers, draw.pick([1, 3, 20]), *inner).to(dtype)
            source, src = taken.to(draw.device, copy=True), [draw.number(0, taken.shape[1] - 1) for _ in dst]
        ops.copy_states(states, index_tensor(draw, src), index_tensor(draw, dst), source=source)
    else:
        draw.saw("op clear_states")
        ops.clear_states(states, index_tensor(draw, dst))
    for slot, target in zip(src, dst):
        if target >= 0:
            expected[:, target] = taken[:, slot] if "op copy_states" in draw.seen else 0
    if not torch.equal(states.cpu(), expected):
        raise Failure("states differ")


def hostile_slots(draw: Draw) -> None:
    """A slot outside the pool: an error on the CPU, a row of zeros and a report on a GPU."""
    draw.saw("hostile state slot")
    slot = draw.pick(HUGE)
    draw.note(slot=slot)
    report = new_report(draw.device)
    states = torch.zeros(2, 1, 8, 16, device=draw.device)
    q, v = torch.ones(2, 1, 16, device=draw.device), torch.ones(2, 1, 8, device=draw.device)
    gate = torch.zeros(2, 1, device=draw.device)

    def call(**options):
        return ops.delta_decode(
            q, q, v, gate, gate, states=states, state_indices=index_tensor(draw, [0, slot]), **options
        )

    if draw.device == "cpu" and draw.chance(0.5):
        try:
            call()
        except RuntimeError as error:
            if "attnops::delta_decode: state, request 1, slot" not in str(error):
                raise
            return
        raise Failure("a slot outside the pool is accepted")
    out = call(report=report)
    if bool(out[1].ne(0).any()) or "state slot" not in (first_fault(report) or ""):
        raise Failure("a slot outside the pool is read, or not reported")
