"""delta_prefill and ssd_prefill on every device, against float64 token by token on the rounded inputs."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from linear_prompts import OUT, STATE, Case, indices
from linear_reference import delta_step, relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ISAS = ["scalar", "avx2", "avx512", "amx"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
@pytest.mark.parametrize("seed", range(24))
def test_prefill_equals_float64(seed, kind, device, monkeypatch):
    case = Case(seed, device, kind)
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CPU_ISA", case.random.choice(ISAS))
    out, states = case.run()
    expected, after = case.expected()
    assert out.isfinite().all() and states.isfinite().all()
    assert relative(out, expected) < OUT[case.io]
    touched = [s for s in range(len(after)) if not torch.equal(after[s], case.before[s].double())]
    untouched = [s for s in range(len(after)) if s not in touched]
    is_rounded = device == "cuda" or case.io == torch.bfloat16  # what a CPU's products of bf16 take
    bound = max(STATE[case.kept_as], STATE[case.io] if is_rounded else 0)
    for slot in touched:
        assert relative(states[slot], after[slot]) < bound
    assert torch.equal(states.cpu()[untouched], case.before[untouched]), "a slot that nobody names is as it was"
    live = [t for i, s in enumerate(case.slots) if s >= 0 for t in range(case.bounds[i], case.bounds[i + 1])]
    padding = [t for t in range(len(out)) if t not in live]
    assert not out[padding].any(), "padding gives 0"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
@pytest.mark.parametrize("seed", range(12))
def test_long_prompts_of_bf16_equal_the_cpu_in_float32(seed, kind):
    """Many chunks of many heads, and every width of a CTA."""
    r = random.Random(seed)
    lengths = r.choice([[3000], [700, 1, 64, 1300, 128], [r.randint(1, 400) for _ in range(40)]])
    dims = r.choice([(128, 128), (128, 64), (64, 128), (256, 64), (64, 200), (72, 24)])
    case = Case(100 + seed, "cuda", kind, torch.bfloat16, lengths, dims, kept=r.choice([torch.float32, torch.bfloat16]))
    out, states = case.run()
    case.assert_as_the_cpu_in_float32(out, states)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("bound", [0.0, -5.0])
def test_queries_across_their_own_keys_keep_their_precision(bound, kind, device):
    """One token of bf16 without a prefix: the output is v times k q, and here that is a small part of |k| |q|."""
    batch = 64
    case = Case(9, device, kind, torch.bfloat16, [1] * batch, dims=(128, 64), kept=torch.float32)
    case.prefix, case.slots, case.bound = [0] * batch, list(range(batch)), bound
    k, q = case.k.double(), case.q.double()
    across = q - (k * q).sum(-1, keepdim=True) / (k * k).sum(-1, keepdim=True) * k
    share = 1e-3 * torch.randn(len(q), 1, 1, generator=torch.Generator().manual_seed(9))
    case.q = (across + share * k).to(torch.bfloat16)
    out, states = case.run()
    expected, after = case.expected()
    assert relative(out, expected) < OUT[torch.bfloat16]
    assert relative(states, after) < STATE[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
def test_chunks_and_other_requests_change_no_bit(kind, io, device):
    """Cut at multiples of 64 tokens, alone, with and without checkpoints and plans."""
    case = Case(5, device, kind, io, [300, 70, 1, 0, 129], dims=(128, 64), kept=torch.float32)
    case.prefix, case.slots = [0, 64, 128, 5, 0], [3, 0, 1, 7, 5]
    case.checkpoints = [[-1] * 4] * 5
    whole, states = case.run()
    cuts = [(128, 192), (64, 70), (0, 1), (0, 0), (0, 128)]
    first, pool = case.run([(0, begin) for begin, _ in cuts])
    second, _ = case.run(cuts, pool)
    third, _ = case.run([(end, n) for (_, end), n in zip(cuts, case.lengths)], pool)
    parts, rows = [first.split([b for b, _ in cuts]), second.split([e - b for b, e in cuts])], []
    parts.append(third.split([n - e for (_, e), n in zip(cuts, case.lengths)]))
    for i in range(5):
        rows += [part[i] for part in parts]
    begin, end = case.bounds[0], case.bounds[-1]
    assert torch.equal(torch.cat(rows), whole[begin:end]) and torch.equal(pool, states)
    out, alone = case.run([(0, n if i == 4 else 0) for i, n in enumerate(case.lengths)])
    assert torch.equal(out, whole[case.bounds[4] : end]) and torch.equal(alone[5], states[5])


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dims", [(128, 128), (32, 48), (256, 16)])
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
def test_chunks_of_any_length_on_the_cpu(io, dims, isa, kind, monkeypatch):
    """Few tokens, half a chunk and whole ones, in one call and one by one."""
    monkeypatch.setenv("ATTNOPS_CPU_ISA", isa)
    lengths = [11, 12, 17, 33, 64, 75, 200]
    case = Case(31, "cpu", kind, io, lengths, dims, kept=torch.float32)
    case.prefix, case.slots = [0, 64, 50, 0, 1, 128, 7], list(range(7))
    case.checkpoints = [[-1] * 4] * 7
    out, states = case.run()
    expected, after = case.expected()
    assert relative(out, expected) < OUT[io] and relative(states, after) < STATE[io]
    again, kept = case.run()
    assert torch.equal(again, out) and torch.equal(kept, states)
    for i in range(7):
        alone, kept = case.run([(0, n if j == i else 0) for j, n in enumerate(lengths)])
        assert torch.equal(alone, out[case.bounds[i] : case.bounds[i + 1]]) and torch.equal(kept[i], states[i])


def bf16_prompt_on_the_cpu(k, g, b):
    """Out and states of a prompt of one group, keys of 128 elements, and the same in float64."""
    tokens, heads = b.shape
    q, v = torch.randn(tokens, 1, 128).bfloat16(), torch.randn(tokens, heads, 128).bfloat16()
    states, one = torch.zeros(1, heads, 128, 128), indices([0], "cpu")
    given = {"cu_seqlens": indices([0, tokens], "cpu"), "prefix_lens": one, "state_indices": one}
    out = ops.delta_prefill(q, k, v, g, b, states=states, **given)
    S, rows = torch.zeros_like(states).double(), []
    for t in range(tokens):
        S, row = delta_step(S, *(x[t : t + 1].double() for x in (q, k, v, g, b)), 128**-0.5, True)
        rows.append(row)
    return out, states, torch.cat(rows), S


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("noise, decay", [(0.3, 0.1), (0.3, 0.01), (0.0, 0.001), (0.0, 0.1)])
def test_keys_that_are_alike_keep_their_precision(noise, decay, kind):
    """Each token takes back nearly all that the one before wrote, so errors must not add up within a chunk."""
    torch.manual_seed(0)
    k = (torch.randn(1, 1, 128) + noise * torch.randn(256, 1, 128)).bfloat16()
    g = -decay * torch.rand(*((256, 2, 128) if kind == "kda" else (256, 2)))
    out, states, rows, S = bf16_prompt_on_the_cpu(k, g, torch.ones(256, 2))
    assert relative(out, rows) < 4.5e-3 and relative(states, S) < 4.5e-3


@pytest.mark.parametrize("noise", [0.0, 100.0])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_what_is_left_of_old_tokens_alone_is_the_state(kind, noise):
    """The second half of a chunk writes nothing, and leaves 2^-74 of the first."""
    torch.manual_seed(0)
    k = (torch.randn(1, 1, 128) + noise * torch.randn(64, 1, 128)).bfloat16()
    g, b = torch.full((64, 2, 128) if kind == "kda" else (64, 2), -0.01), torch.ones(64, 2)
    g[32:], b[32:] = -1.6, 0.0
    out, states, rows, S = bf16_prompt_on_the_cpu(k, g, b)
    assert 0 < S.abs().max() < 1e-18
    assert relative(out, rows) < 6e-3 and relative(states, S) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("keys, values", [(128, 128), (64, 64)])
@pytest.mark.parametrize("longest", [1000, 9000])
def test_prompts_alone_have_the_bits_of_many(longest, keys, values, kind):
    """Alone a prompt's chunks are made while others are taken, and among many before all of them. Among many two
    warpgroups have the rows of a state that one has alone, unless one prompt is longer than an SM's share."""
    lengths, heads, device = [1000] * 20 + [longest] + [1000] * 27, 4, "cuda"
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    generator = torch.Generator(device).manual_seed(keys)
    normal = lambda *shape: torch.randn(shape, generator=generator, device=device)  # noqa: E731
    q, k = (0.3 * normal(bounds[-1], 2, keys).bfloat16() for _ in range(2))
    v, a, b = normal(bounds[-1], heads, values).bfloat16(), normal(bounds[-1], heads), normal(bounds[-1], heads)
    before, rate, spread = normal(len(lengths), heads, values, keys), normal(heads), normal(keys)

    def run(first: int, last: int):
        rows, states = slice(bounds[first], bounds[last]), before[first:last].clone()
        index = torch.arange(last - first, dtype=torch.int32, device=device)
        own_bounds = torch.tensor(bounds[first : last + 1], dtype=torch.int32, device=device) - bounds[first]
        given = {"states": states, "cu_seqlens": own_bounds, "state_indices": index}
        given["prefix_lens"] = 7 * index + 7 * first
        if kind == "gdn":
            out = ops.delta_prefill(q[rows], k[rows], v[rows], a[rows], b[rows], A_log=rate, dt_bias=rate, **given)
        elif kind == "kda":
            gate, bias = a[rows, :, None] + spread, spread.expand(heads, keys).contiguous()
            own = {name: x.repeat_interleave(heads // 2, 1) for name, x in (("q", q[rows]), ("k", k[rows]))}
            out = ops.delta_prefill(v=v[rows], a=gate, b=b[rows], A_log=rate, dt_bias=bias, **own, **given)
        else:
            out = ops.ssd_prefill(v[rows], a[rows], -rate.exp(), k[rows], q[rows], dt_softplus=True, **given)
        return out, states

    out, states = run(0, len(lengths))
    assert out.isfinite().all()
    for first, last in [(0, 1), (7, 8), (20, 21), (20, 24), (47, 48)]:
        alone, after = run(first, last)
        assert torch.equal(alone, out[bounds[first] : bounds[last]]) and torch.equal(after, states[first:last])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [-2000.0, -float("inf"), -30.0, 0.0])
def test_any_decay_stays_finite(gate, dtype, device):
    """The gate of every third token."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(200, 2, 128, device=device).to(dtype) for _ in range(3))
    k[7] = 0
    a = torch.full((200, 2), -0.01, device=device).to(dtype)
    a[::3] = gate
    b = torch.rand(200, 2, device=device).to(dtype)
    states = torch.randn(1, 2, 128, 128, device=device)
    start = states.clone()
    one = indices([0], device)
    bounds, prefix = indices([0, 200], device), indices([64], device)
    out = ops.delta_prefill(q, k, v, a, b, states=states, cu_seqlens=bounds, prefix_lens=prefix, state_indices=one)
    assert out.isfinite().all() and states.isfinite().all()
    twin, rows = start.double().cpu(), []
    for t in range(200):
        token = [x[t : t + 1].double().cpu() for x in (q, k, v, a, b)]
        twin, row = delta_step(twin, *token, 128**-0.5, True)
        rows.append(row)
    assert relative(out, torch.cat(rows)) < OUT[dtype] and relative(states, twin) < max(STATE[dtype], 1e-5)


def test_bad_values_are_errors_on_the_cpu():
    q, gate = torch.zeros(4, 1, 16), torch.zeros(4, 1)

    def run(bounds, prefix=(0, 0), slots=(0, 1), cells=((-1, -1), (-1, -1)), plan=(0, 1), **options):
        given = {"cu_seqlens": bounds, "prefix_lens": prefix, "state_indices": slots, "checkpoint_slots": cells}
        given = {name: indices(values, "cpu") for name, values in {**given, "plan": plan}.items()}
        return ops.delta_prefill(q, q, q, gate, gate, states=torch.zeros(3, 1, 16, 16), **given, **options)

    run([0, 2, 4])
    with pytest.raises(RuntimeError, match="delta_prefill: cu_seqlens, request 1 must bound tokens"):
        run([0, 3, 1])
    with pytest.raises(RuntimeError, match=r"prefix_lens\[1\] must be at least 0, got -3"):
        run([0, 2, 4], prefix=[0, -3])
    with pytest.raises(RuntimeError, match=r"plan\[1\] must be in \[0, 2\) \(batch_size\), and name each request once"):
        run([0, 2, 4], plan=[1, 1])
    with pytest.raises(RuntimeError, match="requests 0 and 1 write the same slot, 2"):
        run([0, 2, 4], slots=[2, 2])
    with pytest.raises(RuntimeError, match="requests 0 and 1 write the same slot, 0"):
        run([0, 2, 4], prefix=[0, 63], cells=[[-1, -1], [0, -1]])
    run([0, 2, 4], prefix=[0, 61], cells=[[-1, -1], [0, -1]])  # does not get so far
    with pytest.raises(RuntimeError, match=r"delta_prefill: plan.shape\[0\]"):
        run([0, 2, 4], plan=[0])


@pytest.mark.parametrize("device", DEVICES)
def test_the_checked_mode_records(device):
    q, gate, report = torch.zeros(4, 1, 16, device=device), torch.zeros(4, 1, device=device), new_report(device)
    states = torch.zeros(3, 1, 16, 16, device=device)
    given = {"cu_seqlens": [0, 2, 4], "prefix_lens": [0, 0], "state_indices": [0, 7]}
    given = {name: indices(values, device) for name, values in given.items()}
    out = ops.delta_prefill(q, q, q, gate, gate, states=states, **given, report=report)
    assert not out[2:].any() and "delta_prefill: state slot 7 at request 1" in first_fault(report)
    report.zero_()
    given["state_indices"] = indices([1, 1], device)
    ops.delta_prefill(q, q, q, gate, gate, states=states, **given, report=report)
    assert "of one request alone" in first_fault(report)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_nothing(device):
    none, states = torch.zeros(0, 2, 16, device=device), torch.ones(2, 2, 16, 16, device=device)
    empty, gate = indices([], device), torch.zeros(0, 2, device=device)
    given = {"states": states, "prefix_lens": empty, "state_indices": empty}
    bounds = indices([0], device)
    plan = ops.delta_plan(bounds)
    assert plan.shape == (0,) and ops.delta_prefill(
        none, none, none, gate, gate, cu_seqlens=bounds, plan=plan, **given
    ).shape == (0, 2, 16)
    slot, some = indices([1], device), torch.ones(3, 2, 16, device=device)
    given = {"states": states, "prefix_lens": indices([0], device), "state_indices": slot}
    A = torch.zeros(2, device=device)
    out = ops.ssd_prefill(some, None, A, some, some, cu_seqlens=indices([0, 0], device), **given)
    assert not out.any() and states.min() == 1, "a request without tokens keeps its state"


@pytest.mark.parametrize("device", DEVICES)
def test_plans_take_the_longest_first(device):
    for seed in range(20):
        r = random.Random(seed)
        lengths = [r.choice([0, 5, r.randint(0, 9000)]) for _ in range(r.choice([1, 3, 300, 2000]))]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        expected = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        assert ops.delta_plan(bounds).tolist() == expected and ops.ssd_plan(bounds).tolist() == expected
