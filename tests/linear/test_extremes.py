"""Decays that forget everything, keys of zero, prompts of 65536 tokens, and pools of more than 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops
from linear_reference import delta_step, relative, ssd_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IO = [torch.float32, torch.bfloat16]
OUT = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
STRONG = [-2000.0, -math.inf, -30.0]
H, HV, K, V = 1, 2, 128, 64


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def doubles(*tensors):
    return [None if t is None else t.double().cpu() for t in tensors]


def steps_of_the_delta_rule(S, tokens, scale):
    """[T, ...] of one request in float64."""
    rows = []
    for t in range(len(tokens[0])):
        S, row = delta_step(S, *(x[t : t + 1] for x in tokens), scale, True)
        rows.append(row)
    return torch.cat(rows), S


def delta_tokens(count, kind, gate, io, device):
    """q, k, v, g and beta: every third token has the strong gate, of KDA in half of the channels; two keys are zero."""
    q, k, v = (torch.randn(count, heads, dim) for heads, dim in ((H, K), (H, K), (HV, V)))
    k[min(7, count - 1)] = k[0] = 0
    g = torch.full((count, HV, K) if kind == "kda" else (count, HV), -0.01)
    if kind == "kda":
        g[::3, :, ::2] = gate
    else:
        g[::3] = gate
    return [x.to(device, io) for x in (q, k, v, g, torch.rand(count, HV))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("gate", [*STRONG, 0.0])
def test_prompts_of_kda(gate, io, device):
    tokens = delta_tokens(200, "kda", gate, io, device)
    states = torch.randn(1, HV, V, K, device=device)
    start = states.double().cpu()
    given = {"cu_seqlens": indices([0, 200], device), "prefix_lens": indices([64], device)}
    out = ops.delta_prefill(*tokens, states=states, state_indices=indices([0], device), **given)
    rows, S = steps_of_the_delta_rule(start, doubles(*tokens), K**-0.5)
    assert out.isfinite().all() and states.isfinite().all()
    assert relative(out, rows) < OUT[io] and relative(states, S) < OUT[io]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("gate", STRONG)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_decode_and_drafts_of_the_delta_rule(kind, gate, io, device):
    """Four drafts are verified, kept and folded; then four tokens are decoded."""
    tokens = delta_tokens(8, kind, gate, io, device)
    states = torch.randn(1, HV, V, K, device=device)
    start, slot, channels = states.double().cpu(), indices([0], device), [K] if kind == "kda" else []
    nan = lambda *shape: torch.full(shape, math.nan, device=device)  # noqa: E731
    rings = {"ring_u": nan(1, HV, 5, V), "ring_k": nan(1, H, 5, K), "ring_decay": nan(1, HV, 5, *channels)}
    rings |= {"ring_len": indices([0], device), "state_indices": slot}
    rows = [ops.delta_verify(*(x[:4] for x in tokens), states=states, **rings)]
    path = indices([[0, 1, 2, 3]], device)
    ops.delta_commit(states, path, indices([4], device), **rings, fold=True)
    for t in range(4, 8):
        rows.append(ops.delta_decode(*(x[t : t + 1] for x in tokens), states=states, state_indices=slot))
    expected, S = steps_of_the_delta_rule(start, doubles(*tokens), K**-0.5)
    out = torch.cat(rows)
    assert out.isfinite().all() and states.isfinite().all()
    assert relative(out, expected) < OUT[io] and relative(states, S) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("rate", STRONG)
@pytest.mark.parametrize("stepped", [True, False], ids=["mamba2", "lightning"])
def test_state_spaces(stepped, rate, io, device):
    """A head that forgets all, beside one that keeps all: a prompt, drafts that are folded, and a step."""
    count = 205
    x, z, keys = torch.randn(count, HV, V), torch.randn(count, HV, V), torch.randn(2, count, H, K)
    keys[0, 0] = keys[0, 9] = 0
    dt = torch.rand(count, HV) + 0.1 if stepped else None
    x, z, B, C, dt = (None if t is None else t.to(device, io) for t in (x, z, *keys, dt))
    A, states = torch.tensor([rate, -1e-3], device=device), torch.randn(1, HV, V, K, device=device)
    start, slot = states.double().cpu(), indices([0], device)

    def cut(begin, end):
        return [None if t is None else t[begin:end] for t in (x, dt, B, C, z)]

    def run(op, begin, end, **options):
        u, step, b, c, gate = cut(begin, end)
        return op(u, step, A, b, c, z=gate, states=states, state_indices=slot, **options)

    given = {"cu_seqlens": indices([0, 200], device), "prefix_lens": indices([1], device)}
    rows = [run(ops.ssd_prefill, 0, 200, **given)]
    nan = lambda *shape: torch.full(shape, math.nan, device=device)  # noqa: E731
    rings = {"ring_u": nan(1, HV, 5, V), "ring_k": nan(1, H, 5, K), "ring_decay": nan(1, HV, 5)}
    rings["ring_len"] = indices([0], device)
    rows.append(run(ops.ssd_verify, 200, 204, **rings))
    accepted = (indices([[0, 1, 2, 3]], device), indices([4], device))
    ops.ssd_commit(states, *accepted, state_indices=slot, fold=True, **rings)
    rows.append(run(ops.ssd_decode, 204, 205))
    S, expected = start, []
    for t in range(count):
        u, step, b, c, gate = doubles(*cut(t, t + 1))
        S, row = ssd_step(S, u, step, A.double().cpu(), b, c, None, None, gate, 1.0, False)
        expected.append(row)
    out = torch.cat(rows)
    assert out.isfinite().all() and states.isfinite().all()
    assert relative(out, torch.cat(expected)) < OUT[io] and relative(states, S) < OUT[io]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_a_prompt_of_65536_tokens(kind, device):
    """One head whose decay is weak, so that the first tokens still count. Beside the CPU in float32."""
    count, channels = 65536, [K] if kind == "kda" else []
    q, k, v = (torch.randn(count, 1, dim).bfloat16() for dim in (K, K, V))
    g, beta = -1e-3 * torch.rand(count, 1, *channels), torch.rand(count, 1)
    given = {"cu_seqlens": [0, count], "prefix_lens": [0], "state_indices": [0]}

    def run(where, dtype):
        tokens = [x.to(where, dtype) for x in (q, k, v)] + [x.to(where) for x in (g, beta)]
        states = torch.full((1, 1, V, K), math.nan, device=where)
        options = {"states": states, **{name: indices(values, where) for name, values in given.items()}}
        if kind == "ssd":
            out = ops.ssd_prefill(tokens[2], tokens[4], torch.full((1,), -1e-3, device=where), *tokens[:2], **options)
        else:
            out = ops.delta_prefill(*tokens, **options)
        return out, states

    out, states = run(device, torch.bfloat16)
    assert out.isfinite().all() and states.isfinite().all() and out[-1].any()
    bound = 2e-2 if device == "cuda" else OUT[torch.bfloat16]
    expected, kept = run("cpu", torch.float32)
    assert relative(out, expected) < bound and relative(states, kept) < bound


def large_pool(device, *shape):
    """bf16 states of more than 2^31 elements, of which nothing but what is used is touched."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else math.inf
    if free < 6 * 2**30:
        pytest.skip(f"needs 6 GB of free memory, has {free / 2**30:.1f}")
    try:
        pool = torch.empty(2**31 // math.prod(shape) + 3, *shape, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 4.3 GB of memory: {error}")
    assert pool.numel() > 2**31
    return pool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["delta", "ssd"])
def test_pools_of_more_than_2_to_the_31_elements(kind, device):
    """The last slots, beside a small pool, bit for bit: decode, prompts with checkpoints, drafts, copies."""
    pool = large_pool(device, HV, V, K)
    small = torch.randn(3, HV, V, K).to(device, torch.bfloat16)
    shift = len(pool) - len(small)
    pool[shift:] = small
    q, k, v, a, b = (
        torch.randn(70, *shape).to(device, torch.bfloat16) for shape in [(H, K)] * 2 + [(HV, V), (HV,), (HV,)]
    )
    A = -torch.rand(HV, device=device)

    def call(form, states, count, **options):
        options["states"] = states
        if kind == "ssd":
            tokens = (v[:count], b[:count].abs(), A, k[:count], q[:count])
        else:
            tokens = (q[:count], k[:count], v[:count], -a[:count].abs(), b[:count].sigmoid())
        return getattr(ops, f"{kind}_{form}")(*tokens, **options)

    def run(states, first):
        slots = indices([first + 2], device)
        out = [call("decode", states, 1, state_indices=slots)]
        given = {"cu_seqlens": indices([0, 70], device), "prefix_lens": indices([64], device), "state_indices": slots}
        out.append(call("prefill", states, 70, checkpoint_slots=indices([[first + 1]], device), **given))
        rings = {"ring_u": torch.empty(len(states), HV, 4, V, device=device)}
        rings |= {"ring_k": torch.empty(len(states), H, 4, K, device=device)}
        rings |= {"ring_decay": torch.empty(len(states), HV, 4, device=device), "state_indices": slots}
        rings["ring_len"] = torch.zeros(len(states), dtype=torch.int32, device=device)
        out.append(call("verify", states, 4, **rings))
        commit = getattr(ops, f"{kind}_commit")
        commit(states, indices([[0, 1, 2, 3]], device), indices([3], device), fold=True, **rings)
        ops.copy_states(states[None], slots, indices([first], device))
        kept = states[first : first + 3].clone()
        ops.clear_states(states[None], indices([first + 1], device))
        assert not states[first + 1].any()
        return [*out, kept]

    for got, expected in zip(run(pool, shift), run(small, 0)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_convolutions_of_more_than_2_to_the_31_elements(device):
    channels = 8192
    pool = large_pool(device, channels, 3)
    small = torch.randn(1, channels, 3).to(device, torch.bfloat16)
    pool[-1] = small[0]
    x, weight = torch.randn(5, channels).to(device, torch.bfloat16), torch.randn(channels, 4).to(device, torch.bfloat16)

    def run(states, slot):
        given = {"conv_states": states, "state_indices": indices([slot], device)}
        out = [ops.causal_conv1d(x, weight, None, cu_seqlens=indices([0, 5], device), **given)]
        windows = torch.empty(1, 2, channels, 3, dtype=torch.bfloat16, device=device)
        out += [ops.causal_conv1d_update(x[:2], weight, None, windows=windows, **given), windows]
        return [*out, ops.causal_conv1d_update(x[:2], weight, None, **given), states[slot].clone()]

    for got, expected in zip(run(pool, len(pool) - 1), run(small, 0)):
        assert torch.equal(got, expected)
    # The pool as the windows of drafts: those of the last request lie behind 2^31 elements.
    windows, requests = pool[: len(pool) // 4 * 4].view(-1, 4, channels, 3), len(pool) // 4
    slots = indices([-1] * (requests - 1) + [0], device)
    many = x[:1].expand(4 * requests, channels)
    ops.causal_conv1d_update(many, weight, None, conv_states=small, state_indices=slots, windows=windows)
    expected = torch.empty(1, 4, channels, 3, dtype=torch.bfloat16, device=device)
    given = {"conv_states": small, "state_indices": indices([0], device), "windows": expected}
    ops.causal_conv1d_update(many[:4], weight, None, **given)
    assert torch.equal(windows[-1], expected[0])
    ops.copy_states(small[None], indices([len(pool) // 4 * 4 - 1], device), indices([0], device), source=pool[None])
    assert torch.equal(small[0], expected[0, 3])
