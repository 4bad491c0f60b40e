"""delta_decode and ssd_decode on every device, against float64 on the rounded inputs."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from linear_reference import delta_gates, delta_step, relative, ssd_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ISAS = ["scalar", "avx2", "amx"]
IO = [torch.float32, torch.float16, torch.bfloat16]
OUT = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}
STATE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


class Draw:
    """Tensors of one case: views of larger ones, as a packed projection gives them."""

    def __init__(self, seed, device):
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)

    def tensor(self, *shape, dtype=torch.float32, scale=1.0):
        gap = self.random.choice([0, 0, 3, 8])
        full = scale * torch.randn(*shape[:-1], shape[-1] + gap, generator=self.generator)
        return full.to(self.device, dtype)[..., : shape[-1]]

    def per_head(self, *shape):
        return (0.5 * torch.randn(*shape, generator=self.generator)).to(self.device)

    def pool(self, slots, heads, rows, keys, dtype):
        gap = self.random.choice([0, 0, 8])
        return self.tensor(slots, heads, rows + gap, keys, dtype=dtype)[:, :, :rows]

    def slots(self, batch, num_slots):
        """Different slots, and padding among them."""
        chosen = self.random.sample(range(num_slots), batch)
        return [slot if self.random.random() < 0.85 else self.random.choice([-1, -(2**31)]) for slot in chosen]


def doubles(*tensors):
    return [None if t is None else t.double().cpu() for t in tensors]


def check(states, before, after, slots, out, expected, io, kept):
    """Rows that took a step, padding, and slots that nobody named."""
    live = [i for i, slot in enumerate(slots) if slot >= 0]
    padding = [i for i in range(len(slots)) if i not in live]
    assert not out[padding].any(), "padding gives 0"
    if live:
        assert relative(out[live], expected[live]) < OUT[io]
    untouched = torch.ones(len(before), dtype=torch.bool)
    for i in live:
        if kept[i] >= 0:
            untouched[kept[i]] = False
            assert relative(states[kept[i]], after[i]) < STATE[states.dtype]
    assert torch.equal(states.cpu()[untouched], before[untouched]), "a slot that no row names is as it was"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_the_delta_rule_equals_float64(seed, device, monkeypatch):
    draw = Draw(seed, device)
    r = draw.random
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CPU_ISA", r.choice(ISAS))
    io, kept_as = r.choice(IO), r.choice(IO)
    batch, groups = r.choice([1, 2, 5, 33]), r.choice([1, 2, 3])
    heads, keys, rows = groups * r.choice([1, 2, 3]), r.choice([64, 128, 256, 16, 5, 100]), r.choice([64, 128, 7, 130])
    channels, gated = r.random() < 0.4, r.random() < 0.7
    q, k = draw.tensor(batch, groups, keys, dtype=io), draw.tensor(batch, groups, keys, dtype=io)
    v = draw.tensor(batch, heads, rows, dtype=io)
    shape = (batch, heads, keys) if channels else (batch, heads)
    gate = r.choice([io, torch.float32])
    a, b = draw.tensor(*shape, dtype=gate, scale=2), draw.tensor(batch, heads, dtype=gate)
    options = {"scale": r.choice([None, 0.5]), "qk_l2norm": r.random() < 0.7, "lower_bound": 0.0}
    if gated:
        options["A_log"] = draw.per_head(heads)
        options["dt_bias"] = draw.per_head(*shape[1:]) if r.random() < 0.7 else None
        options["lower_bound"] = r.choice([0.0, -5.0])
    else:
        a, b = -a.abs(), b.sigmoid()
    if not options["qk_l2norm"]:
        k = k / 16
    num_slots = 2 * batch + 3
    states = draw.pool(num_slots, heads, rows, keys, kept_as)
    slots = draw.slots(batch, num_slots)
    kept = slots
    if r.random() < 0.3:
        free = [slot for slot in range(num_slots) if slot not in slots]
        kept = [slot if slot < 0 else r.choice([-1, free.pop()]) for slot in slots]
        options["out_state_indices"] = torch.tensor(kept, dtype=torch.int32, device=device)
    before = states.cpu().clone()
    out = ops.delta_decode(
        q, k, v, a, b, states=states, state_indices=torch.tensor(slots, dtype=torch.int32, device=device), **options
    )
    log_decay, beta = delta_gates(*doubles(a, b, options.get("A_log"), options.get("dt_bias")), options["lower_bound"])
    scale = keys**-0.5 if options["scale"] is None else options["scale"]
    S = before.double()[[max(slot, 0) for slot in slots]]
    after, expected = delta_step(S, *doubles(q, k, v), log_decay, beta, scale, options["qk_l2norm"])
    check(states, before, after, slots, out, expected, io, kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_a_convolution_in_front_gives_the_bits_of_the_two_ops(seed, device, monkeypatch):
    draw = Draw(2000 + seed, device)
    r = draw.random
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CPU_ISA", r.choice(ISAS))
    io, kept_as, width = r.choice(IO), r.choice(IO), r.choice([2, 3, 4])
    batch, groups, channelwise = r.choice([0, 1, 2, 5, 33]), r.choice([1, 2, 3]), r.random() < 0.4
    heads, keys, rows = groups * r.choice([1, 2, 3]), r.choice([64, 128, 16, 5, 100]), r.choice([64, 128, 7, 130])
    channels = 2 * groups * keys + heads * rows
    x = draw.tensor(batch, channels, dtype=io)
    weight, bias = draw.per_head(channels, width).to(io), draw.per_head(channels).to(io) if r.random() < 0.5 else None
    a = draw.tensor(batch, heads, keys, dtype=io) if channelwise else draw.tensor(batch, heads, dtype=io)
    b, silu = draw.tensor(batch, heads, dtype=io), r.random() < 0.7
    gates = {
        "A_log": draw.per_head(heads),
        "dt_bias": draw.per_head(*a.shape[1:]),
        "lower_bound": r.choice([0.0, -5.0]),
    }
    gates |= {"scale": r.choice([None, 0.5]), "qk_l2norm": r.random() < 0.7}
    num_slots = 2 * batch + 3
    slots = torch.tensor(draw.slots(batch, num_slots), dtype=torch.int32, device=device)
    states = draw.pool(num_slots, heads, rows, keys, kept_as)
    conv_states = draw.tensor(num_slots, channels, width - 1, dtype=io)
    twins = [states.clone(), conv_states.clone()]
    mixed = ops.causal_conv1d_update(x, weight, bias, conv_states=twins[1], state_indices=slots, silu=silu)
    q, k, v = mixed.split([groups * keys, groups * keys, heads * rows], 1)
    q, k, v = q.unflatten(1, (groups, keys)), k.unflatten(1, (groups, keys)), v.unflatten(1, (heads, rows))
    expected = ops.delta_decode(q, k, v, a, b, states=twins[0], state_indices=slots, **gates)
    given = {"states": states, "conv_states": conv_states, "state_indices": slots, "num_k_heads": groups, "silu": silu}
    out = ops.delta_conv_decode(x, weight, bias, a, b, **given, **gates)
    assert torch.equal(out, expected) and torch.equal(states, twins[0]) and torch.equal(conv_states, twins[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_a_convolution_in_front_of_a_state_space_gives_the_bits_of_the_two_ops(seed, device, monkeypatch):
    draw = Draw(3000 + seed, device)
    r = draw.random
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CPU_ISA", r.choice(ISAS))
    io, kept_as, width = r.choice(IO), r.choice(IO), r.choice([2, 3, 4])
    batch, groups = r.choice([0, 1, 2, 5, 33]), r.choice([1, 2, 3])
    heads, keys, rows = groups * r.choice([1, 2, 16]), r.choice([64, 128, 16, 5, 256]), r.choice([64, 128, 7, 130])
    channels, num_slots = 2 * groups * keys + heads * rows, 2 * batch + 3
    x, silu = draw.tensor(batch, channels, dtype=io), r.random() < 0.7
    weight, bias = draw.per_head(channels, width).to(io), draw.per_head(channels).to(io) if r.random() < 0.5 else None
    dt = draw.tensor(batch, heads, dtype=r.choice([io, torch.float32])) if r.random() < 0.8 else None
    given = {"D": draw.per_head(heads) if r.random() < 0.5 else None, "scale": r.choice([1.0, 0.5])}
    given |= {"z": draw.tensor(batch, heads, rows, dtype=io) if r.random() < 0.5 else None}
    given |= {"dt_bias": draw.per_head(heads), "dt_softplus": True} if dt is not None else {}
    slots = torch.tensor(draw.slots(batch, num_slots), dtype=torch.int32, device=device)
    states = draw.pool(num_slots, heads, rows, keys, kept_as)
    conv_states, A = draw.tensor(num_slots, channels, width - 1, dtype=io), -draw.per_head(heads).abs()
    twins = [states.clone(), conv_states.clone()]
    mixed = ops.causal_conv1d_update(x, weight, bias, conv_states=twins[1], state_indices=slots, silu=silu)
    v, B, C = mixed.split([heads * rows, groups * keys, groups * keys], 1)
    v, B, C = v.unflatten(1, (heads, rows)), B.unflatten(1, (groups, keys)), C.unflatten(1, (groups, keys))
    expected = ops.ssd_decode(v, dt, A, B, C, states=twins[0], state_indices=slots, **given)
    given |= {"states": states, "conv_states": conv_states, "state_indices": slots, "num_groups": groups, "silu": silu}
    given["mixed"] = torch.full_like(x, float("nan")).contiguous() if r.random() < 0.5 else None
    out = ops.ssd_conv_decode(x, weight, bias, dt, A, **given)
    assert torch.equal(out, expected) and torch.equal(states, twins[0]) and torch.equal(conv_states, twins[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, keys, channelwise", [((1, 2), 128, False), ((2, 2), 128, True), ((3, 6), 64, False)])
@pytest.mark.parametrize("batch", [4, 64, 900])
def test_a_convolution_in_front_of_few_states_is_one_launch(batch, heads, keys, channelwise, kept_as):
    """By a kernel of its own on Hopper. Slots outside the pool are padding, in one launch and in two."""
    draw, (groups, heads), io = Draw(batch, "cuda"), heads, torch.bfloat16
    channels, num_slots = (2 * groups + heads) * keys, batch + 3
    slots = draw.random.sample(range(num_slots), batch)
    slots[1], slots[3], slots[-1] = -1, num_slots, 2**31 - 1
    named = torch.tensor([s if 0 <= s < num_slots else -1 for s in slots], dtype=torch.int32, device="cuda")
    slots = torch.tensor(slots, dtype=torch.int32, device="cuda")
    x, b = draw.tensor(batch, channels, dtype=io), draw.tensor(batch, heads, dtype=io)
    a = draw.tensor(batch, heads, *([keys] if channelwise else []), dtype=io)
    gates = {"A_log": draw.per_head(heads), "dt_bias": draw.per_head(*a.shape[1:])}
    weight, bias = draw.per_head(channels, 4).to(io), draw.per_head(channels).to(io)
    states = torch.randn(num_slots, heads, keys, keys, device="cuda").to(kept_as)
    conv_states = torch.randn(num_slots, channels, 3, device="cuda").to(io)
    twins = [states.clone(), conv_states.clone()]
    counts = torch.ops.attnops.impl_counts_cuda
    hits = lambda: sum(int(c) for _, row, c in map(str.split, counts().splitlines()) if "one_launch" in row)  # noqa: E731
    before = hits()
    given = {"states": states, "conv_states": conv_states, "state_indices": slots, "num_k_heads": groups}
    out = ops.delta_conv_decode(x, weight, bias, a, b, **given, **gates)
    few = batch * heads * keys * keys <= 2**17  # more states are faster in two launches
    assert hits() - before == (few and torch.cuda.get_device_capability() == (9, 0))
    mixed = ops.causal_conv1d_update(x, weight, bias, conv_states=twins[1], state_indices=named)
    q, k, v = (t.unflatten(1, (-1, keys)) for t in mixed.split([groups * keys, groups * keys, heads * keys], 1))
    expected = ops.delta_decode(q, k, v, a, b, states=twins[0], state_indices=named, **gates)
    assert torch.equal(out, expected) and torch.equal(states, twins[0]) and torch.equal(conv_states, twins[1])
    assert not out[named < 0].any() and out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("channelwise", [False, True])
def test_requests_alone_have_the_bits_of_many(channelwise):
    """A thread has more rows of 16-bit states where requests are many."""
    draw, batch, heads, io = Draw(7, "cuda"), 900, 4, torch.bfloat16
    q, k, v = (draw.tensor(batch, heads, 128, dtype=io) for _ in range(3))
    a = draw.tensor(batch, heads, *([128] if channelwise else []), dtype=io)
    b, slots = draw.tensor(batch, heads, dtype=io), torch.arange(batch, dtype=torch.int32, device="cuda")
    gates = {"A_log": draw.per_head(heads), "dt_bias": draw.per_head(*a.shape[1:])}
    states = torch.randn(batch, heads, 128, 128, device="cuda").to(io)
    twin = states.clone()
    out = ops.delta_decode(q, k, v, a, b, states=states, state_indices=slots, **gates)
    for first in range(0, batch, 60):
        own = slice(first, first + 60)
        few = ops.delta_decode(q[own], k[own], v[own], a[own], b[own], states=twin, state_indices=slots[own], **gates)
        assert torch.equal(out[own], few)
    assert torch.equal(states, twin)


@pytest.mark.gpu
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16])
def test_state_spaces_alone_have_the_bits_of_many(kept_as):
    draw, batch, heads, io = Draw(8, "cuda"), 300, 8, torch.bfloat16
    x, dt = draw.tensor(batch, heads, 64, dtype=io), draw.tensor(batch, heads, dtype=io)
    B, C = (draw.tensor(batch, 2, 128, dtype=io) for _ in range(2))
    rates, slots = -draw.per_head(heads).abs(), torch.arange(batch, dtype=torch.int32, device="cuda")
    states = torch.randn(batch, heads, 64, 128, device="cuda").to(kept_as)
    twin, options = states.clone(), {"dt_softplus": True, "D": draw.per_head(heads)}
    out = ops.ssd_decode(x, dt, rates, B, C, states=states, state_indices=slots, **options)
    for first, last in [(0, 1), (1, 3), (3, 40), (40, 300)]:
        own = slice(first, last)
        few = ops.ssd_decode(x[own], dt[own], rates, B[own], C[own], states=twin, state_indices=slots[own], **options)
        assert torch.equal(out[own], few)
    assert torch.equal(states, twin)


def conv_step(channels=36, conv_slots=3, groups=1, slots=(0, 1), report=None):
    given = {"states": torch.zeros(3, 1, 4, 16), "conv_states": torch.zeros(conv_slots, channels, 3), "report": report}
    indices, gates = torch.tensor(slots, dtype=torch.int32), torch.zeros(len(slots), 1)
    x, weight = torch.ones(len(slots), channels), torch.ones(channels, 4)
    return ops.delta_conv_decode(x, weight, None, gates, gates, state_indices=indices, num_k_heads=groups, **given)


@pytest.mark.parametrize("io", IO)
def test_groups_fewer_than_threads_have_the_same_bits(io):
    """All channels first, then all heads: threads share the heads of a group."""
    threads, x, weight = torch.get_num_threads(), torch.randn(2, 416).to(io), torch.randn(416, 4).to(io)
    gates, heads = torch.randn(2, 6).to(io), torch.randn(6)
    start, inputs, slots = torch.randn(4, 6, 64, 16), torch.randn(4, 416, 3).to(io), torch.tensor([3, 1]).int()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for call in (
                lambda **pools: ops.delta_conv_decode(x, weight, None, gates, gates, num_k_heads=1, **pools),
                lambda **pools: ops.ssd_conv_decode(x, weight, None, gates, -heads.abs(), num_groups=1, **pools),
            ):
                pools = {"states": start.clone(), "conv_states": inputs.clone()}
                found.append([call(state_indices=slots, **pools), *pools.values()])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, found[0], found[2])) and all(map(torch.equal, found[1], found[3]))


def ssd_conv_step(channels=36, conv_slots=3, groups=1, slots=(0, 1), report=None, mixed=None, **given):
    given |= {"states": torch.zeros(3, 1, 4, 16), "conv_states": torch.zeros(conv_slots, channels, 3), "report": report}
    indices, dt = torch.tensor(slots, dtype=torch.int32), given.pop("dt", torch.zeros(len(slots), 1))
    x, weight = torch.ones(len(slots), channels), torch.ones(channels, 4)
    given |= {"state_indices": indices, "num_groups": groups, "mixed": mixed}
    return ops.ssd_conv_decode(x, weight, None, dt, -torch.ones(1), **given)


def test_errors_of_a_convolution_in_front_of_a_state_space_name_the_argument():
    ssd_conv_step()
    match = (
        r"ssd_conv_decode: x.shape\[1\] must be 36 \(num_heads x head_dim, and num_groups x state_dim twice\), got 40"
    )
    with pytest.raises(RuntimeError, match=match):
        ssd_conv_step(channels=40)
    with pytest.raises(RuntimeError, match=r"conv_states.shape\[0\] must be 3 \(num_slots of states\), got 5"):
        ssd_conv_step(conv_slots=5)
    with pytest.raises(RuntimeError, match="ssd_conv_decode: num_groups must be in"):
        ssd_conv_step(groups=0)
    with pytest.raises(RuntimeError, match="dt must be given with dt_bias or dt_softplus"):
        ssd_conv_step(dt=None, dt_softplus=True)
    with pytest.raises(RuntimeError, match=r"ssd_conv_decode: dt.shape\[0\] \(batch_size\) must be 2 as in x, got 3"):
        ssd_conv_step(dt=torch.zeros(3, 1))
    with pytest.raises(RuntimeError, match=r"ssd_conv_decode: mixed.*36"):
        ssd_conv_step(mixed=torch.zeros(2, 35))
    with pytest.raises(RuntimeError, match=r"ssd_conv_decode: state, request 1, slot.* must be in \[0, 3\)"):
        ssd_conv_step(slots=(0, 3))
    report = new_report("cpu")
    out = ssd_conv_step(slots=(0, 9), report=report)
    assert not out[1].any() and "ssd_conv_decode: state slot 9 at request 1" in first_fault(report)


def test_errors_of_a_convolution_in_front_name_the_argument():
    conv_step()
    with pytest.raises(RuntimeError, match=r"delta_conv_decode: x.shape\[1\] must be 36 \(num_k_heads x key_dim twice"):
        conv_step(channels=40)
    with pytest.raises(RuntimeError, match=r"conv_states.shape\[0\] must be 3 \(num_slots of states\), got 5"):
        conv_step(conv_slots=5)
    with pytest.raises(RuntimeError, match="num_k_heads must be in"):
        conv_step(groups=0)
    with pytest.raises(RuntimeError, match="heads of values must be a multiple of those of keys"):
        conv_step(groups=2, channels=68)
    with pytest.raises(RuntimeError, match=r"delta_conv_decode: state, request 1, slot.* must be in \[0, 3\)"):
        conv_step(slots=(0, 3))
    with pytest.raises(RuntimeError, match="requests 0 and 1 write the same slot, 2"):
        conv_step(slots=(2, 2))
    report = new_report("cpu")
    out = conv_step(slots=(0, 9), report=report)
    assert not out[1].any() and "delta_conv_decode: state slot 9 at request 1" in first_fault(report)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_state_spaces_equal_float64(seed, device, monkeypatch):
    draw = Draw(1000 + seed, device)
    r = draw.random
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CPU_ISA", r.choice(ISAS))
    io, kept_as = r.choice(IO), r.choice(IO)
    batch, groups = r.choice([1, 3, 17]), r.choice([1, 2])
    heads, keys, rows = groups * r.choice([1, 4]), r.choice([64, 128, 256, 24]), r.choice([64, 128, 50])
    x = draw.tensor(batch, heads, rows, dtype=io)
    B, C = draw.tensor(batch, groups, keys, dtype=io), draw.tensor(batch, groups, keys, dtype=io)
    dt = draw.tensor(batch, heads, dtype=r.choice([io, torch.float32])) if r.random() < 0.7 else None
    softplus = dt is not None and r.random() < 0.7
    dt = dt if dt is None or softplus else dt.abs()
    bias = draw.per_head(heads) if softplus else None
    A = -draw.per_head(heads).abs()
    D = draw.per_head(heads) if r.random() < 0.5 else None
    z = draw.tensor(batch, heads, rows, dtype=io) if r.random() < 0.5 else None
    scale = r.choice([1.0, keys**-0.5])
    num_slots = 2 * batch + 1
    states = draw.pool(num_slots, heads, rows, keys, kept_as)
    slots = draw.slots(batch, num_slots)
    before = states.cpu().clone()
    indices = torch.tensor(slots, dtype=torch.int32, device=device)
    out = ops.ssd_decode(
        x, dt, A, B, C, states=states, state_indices=indices, D=D, dt_bias=bias, z=z, scale=scale, dt_softplus=softplus
    )
    S = before.double()[[max(slot, 0) for slot in slots]]
    given = doubles(x, dt, A, B, C, D, bias, z)
    after, expected = ssd_step(S, *given, scale, softplus)
    check(states, before, after, slots, out, expected, io, slots)


def steps_of_gates(draw, op, io, keys, rows, channelwise, gated):
    """What a decode op writes, as a function of the gates' dtype. The gates' numbers are of 16 bits."""
    batch, groups, heads, device = 5, 2, 4, draw.device
    v, slots = draw.tensor(batch, heads, rows, dtype=io), indices_of([0, 6, -1, 3, 4], device)
    k, q = draw.tensor(batch, groups, keys, dtype=io), draw.tensor(batch, groups, keys, dtype=io)
    a, b = draw.tensor(batch, heads, *([keys] if channelwise else []), dtype=io), draw.tensor(batch, heads, dtype=io)
    a = a if gated else -a.abs()
    rates, bias, pool = draw.per_head(heads), draw.per_head(*a.shape[1:]), draw.tensor(7, heads, rows, keys)
    given = {"A_log": rates, "dt_bias": bias} if gated else {}
    weight = draw.per_head((2 * groups * keys + heads * rows), 4).to(io)
    inputs = draw.per_head(7, len(weight), 3).to(io)
    x = torch.cat([t.flatten(1) for t in (q, k, v)], 1)

    def run(dtype):
        states, conv, own = pool.clone(), inputs.clone(), (a.to(dtype), b.to(dtype))
        options = {"states": states, "state_indices": slots}
        if op == "ssd_decode":
            extra = {"dt_bias": rates, "dt_softplus": True} if gated else {}
            out = ops.ssd_decode(v, own[1].abs(), -rates.abs(), k, q, **extra, **options)
        elif op == "delta_decode":
            out = ops.delta_decode(q, k, v, *own, **given, **options)
        else:
            options |= {"num_k_heads": groups, "conv_states": conv}
            out = ops.delta_conv_decode(x, weight, None, *own, **given, **options)
        return out, states, conv

    return run


def indices_of(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys, rows", [(128, 128), (64, 64), (256, 40), (100, 7)])
@pytest.mark.parametrize("gated", [False, True], ids=["values", "logits"])
@pytest.mark.parametrize("op", ["delta_decode", "delta_decode of channels", "ssd_decode", "delta_conv_decode"])
def test_float32_gates_give_the_bits_of_16_bit_ones(op, gated, keys, rows, io, device):
    """Where the numbers are the same. Others change the result."""
    run = steps_of_gates(Draw(11, device), op.split()[0], io, keys, rows, "channels" in op, gated)
    short, wide = run(io), run(torch.float32)
    assert all(map(torch.equal, short, wide)) and short[0].isfinite().all() and not short[0][2].any()


@pytest.mark.parametrize("device", DEVICES)
def test_4096_steps_stay_near_float64(device):
    """A float32 state drifts by less than 1e-5."""
    torch.manual_seed(3)
    states = torch.zeros(1, 2, 64, 64, device=device)
    S, slot = states.double().cpu().clone(), torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(4096):
        q, k, v = (torch.randn(1, 2, 64) for _ in range(3))
        a, b = -0.05 * torch.rand(1, 2), torch.rand(1, 2)
        ops.delta_decode(*(t.to(device) for t in (q, k, v, a, b)), states=states, state_indices=slot)
        S, _ = delta_step(S, *doubles(q, k, v), a.double(), b.double(), 0.125, True)
    assert relative(states, S) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extreme", [-2000.0, -float("inf")])
def test_strong_decay_forgets_and_stays_finite(extreme, device):
    states = torch.full((1, 1, 8, 64), 3.0, device=device)
    q = k = torch.zeros(1, 1, 64, device=device)
    v = torch.ones(1, 1, 8, device=device)
    gate, beta = torch.full((1, 1), extreme, device=device), torch.ones(1, 1, device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    out = ops.delta_decode(q, k, v, gate, beta, states=states, state_indices=slot)
    assert torch.equal(out.cpu(), torch.zeros(1, 1, 8)) and torch.equal(states.cpu(), torch.zeros(1, 1, 8, 64))


def step(device, slots, **options):
    batch = len(slots)
    given = [torch.ones(batch, 1, n, device=device) for n in (16, 16, 4)]
    gates = [torch.zeros(batch, 1, device=device) for _ in range(2)]
    states = torch.zeros(3, 1, 4, 16, device=device)
    indices = torch.tensor(slots, dtype=torch.int32, device=device)
    return ops.delta_decode(*given, *gates, states=states, state_indices=indices, **options)


def test_a_bad_slot_is_an_error_on_the_cpu():
    with pytest.raises(RuntimeError, match=r"delta_decode: state, request 1, slot.* must be in \[0, 3\)"):
        step("cpu", [0, 3])
    with pytest.raises(RuntimeError, match="requests 0 and 2 write the same slot, 1"):
        step("cpu", [1, 0, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_the_checked_mode_says_which_slot(device):
    report = new_report(device)
    out = step(device, [0, 10**6], report=report)
    assert torch.equal(out[1].cpu(), torch.zeros(1, 4)), "a slot outside the pool is not read"
    assert "delta_decode: state slot 1000000 at request 1" in first_fault(report)
    report.zero_()
    step(device, [2, 2], report=report)
    assert "state slot 2 at request 1" in first_fault(report) and "of one request alone" in first_fault(report)


@pytest.mark.gpu
def test_replays_with_other_slots_equal_eager_bit_for_bit():
    """One graph serves any slots."""
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v, a, b = make(4, 2, 128), make(4, 2, 128), make(4, 4, 128), make(4, 4), make(4, 4)
    states = torch.randn(32, 4, 128, 128, device="cuda")
    indices = torch.zeros(4, dtype=torch.int32, device="cuda")
    gates = {"A_log": torch.zeros(4, device="cuda"), "dt_bias": torch.zeros(4, device="cuda")}
    out = torch.empty_like(v)

    def run(pool):
        ops.delta_decode(q, k, v, a, b, states=pool, state_indices=indices, out=out, **gates)

    indices.fill_(-1)
    run(states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(states)
    twin = states.clone()
    for seed in range(200):
        r = random.Random(seed)
        indices.copy_(torch.tensor([s if r.random() < 0.9 else -1 for s in r.sample(range(32), 4)], dtype=torch.int32))
        v.normal_()
        graph.replay()
        replayed = out.clone()
        run(twin)
        assert torch.equal(replayed, out) and torch.equal(states, twin)
