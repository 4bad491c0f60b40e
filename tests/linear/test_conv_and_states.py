"""causal_conv1d, its update, and the copies of states."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from linear_reference import convolve, relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IO = [torch.float32, torch.float16, torch.bfloat16]
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_a_convolution_equals_float64(seed, device):
    r = random.Random(seed)
    torch.manual_seed(seed)
    io, width = r.choice(IO), r.choice([2, 3, 4])
    channels = r.choice([8, 64, 200, 1024 + 8, 33])
    counts = [r.choice([0, 1, 2, 3, 5, r.randint(0, 150)]) for _ in range(r.choice([1, 4, 40]))]
    total, spare = sum(counts), r.choice([0, 5])
    x = torch.randn(total + spare, channels + r.choice([0, 8]), device=device).to(io)[:, :channels]
    weight = torch.randn(channels, width, device=device).to(io)
    bias = torch.randn(channels, device=device).to(io) if r.random() < 0.5 else None
    num_slots = 2 * len(counts) + 1
    states = torch.randn(num_slots, channels, width - 1, device=device).to(io)
    if r.random() < 0.3:
        states = states.transpose(1, 2).contiguous().transpose(1, 2)
    slots = [s if r.random() < 0.85 else -1 for s in r.sample(range(num_slots), len(counts))]
    initial = [r.random() < 0.6 for _ in counts] if r.random() < 0.6 else None
    silu = r.random() < 0.7
    before = states.cpu().clone()
    bounds = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    has = None if initial is None else torch.tensor(initial, dtype=torch.uint8, device=device)
    out = torch.full_like(x, float("nan")).contiguous()
    given = {"conv_states": states, "cu_seqlens": bounds, "state_indices": indices(slots, device)}
    ops.causal_conv1d(x, weight, bias, **given, has_initial_state=has, silu=silu, out=out)

    expected, after = torch.zeros(total + spare, channels, dtype=torch.float64), before.clone()
    wide = [None if t is None else t.double().cpu() for t in (x, weight, bias)]
    row = 0
    for i, (count, slot) in enumerate(zip(counts, slots)):
        if slot >= 0 and count:
            start = (
                before[slot].double() if initial is None or initial[i] else torch.zeros(channels, width - 1).double()
            )
            expected[row : row + count], new = convolve(wide[0][row : row + count], *wide[1:], start, silu)
            after[slot] = new.to(io)
        row += count
    assert torch.equal(states.cpu(), after), "states are inputs, moved"
    assert relative(out, expected) < BOUND[io]
    padding = torch.ones(total + spare, dtype=torch.bool)
    for i, slot in enumerate(slots):
        if slot >= 0:
            padding[sum(counts[:i]) : sum(counts[: i + 1])] = False
    assert not out.cpu()[padding].any(), "padding gives 0"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("io", IO)
def test_updates_equal_a_ragged_call(io, tokens, device):
    torch.manual_seed(tokens)
    x, weight = torch.randn(5 * tokens, 96, device=device).to(io), torch.randn(96, 4, device=device).to(io)
    states = torch.randn(8, 96, 3, device=device).to(io)
    twin, slots = states.clone(), indices([3, 0, -1, 7, 2], device)
    got = ops.causal_conv1d_update(x, weight, None, conv_states=states, state_indices=slots)
    bounds = torch.arange(0, 5 * tokens + 1, tokens, dtype=torch.int32, device=device)
    expected = ops.causal_conv1d(x, weight, None, conv_states=twin, cu_seqlens=bounds, state_indices=slots)
    assert torch.equal(got, expected) and torch.equal(states, twin)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_equal_the_whole(device):
    """A prompt in pieces gives the bits of the prompt."""
    torch.manual_seed(1)
    x, weight = torch.randn(130, 64, device=device), torch.randn(64, 4, device=device)
    whole, pieces = (torch.zeros(1, 64, 3, device=device) for _ in range(2))
    slot = indices([0], device)

    def run(part, states):
        bounds = indices([0, len(part)], device)
        return ops.causal_conv1d(part, weight, None, conv_states=states, cu_seqlens=bounds, state_indices=slot)

    out = run(x, whole)
    got = torch.cat([run(part, pieces) for part in x.split([1, 2, 64, 60, 3])])
    assert torch.equal(got, out) and torch.equal(pieces, whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", IO)
@pytest.mark.parametrize("shape", [(3, 6, 2, 5, 7), (2, 6, 4, 64, 64), (1, 6), (4, 6, 3)])
def test_copies_and_clears_move_slots_of_all_layers(shape, dtype, device):
    torch.manual_seed(0)
    states = torch.randn(shape, device=device).to(dtype)
    before = states.clone()
    ops.copy_states(states, indices([0, 1, -1, 4], device), indices([5, 2, 3, -7], device))
    expected = before.clone()
    expected[:, 5], expected[:, 2] = before[:, 0], before[:, 1]
    assert torch.equal(states, expected)
    ops.clear_states(states, indices([5, -1], device))
    expected[:, 5] = 0
    assert torch.equal(states, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_nothing(device):
    none, x = indices([], device), torch.zeros(0, 16, device=device)
    states = torch.ones(2, 3, 4, device=device)
    ops.copy_states(states, none, none)
    ops.clear_states(states, none)
    conv = torch.ones(3, 16, 3, device=device)
    weight = torch.ones(16, 4, device=device)
    bounds = indices([0], device)
    assert ops.causal_conv1d(x, weight, None, conv_states=conv, cu_seqlens=bounds, state_indices=none).shape == (0, 16)
    assert ops.causal_conv1d_update(x, weight, None, conv_states=conv, state_indices=none).shape == (0, 16)
    assert states.min() == 1 and conv.min() == 1


def test_bad_slots_and_bounds_are_errors_on_the_cpu():
    states = torch.zeros(2, 3, 4)
    with pytest.raises(RuntimeError, match=r"copy_states: state, request 0, slot.* must be in \[0, 3\)"):
        ops.copy_states(states, indices([0], "cpu"), indices([3], "cpu"))
    with pytest.raises(RuntimeError, match=r"copy_states: requests .* the same slot, 1"):
        ops.copy_states(states, indices([0, 2], "cpu"), indices([1, 1], "cpu"))
    with pytest.raises(RuntimeError, match="without gaps"):
        ops.clear_states(torch.zeros(2, 3, 4, 4)[..., :2], indices([0], "cpu"))
    x, weight, conv = torch.zeros(4, 8), torch.zeros(8, 4), torch.zeros(2, 8, 3)
    with pytest.raises(RuntimeError, match="causal_conv1d"):
        given = {"conv_states": conv, "cu_seqlens": indices([0, 3, 1], "cpu"), "state_indices": indices([0, 1], "cpu")}
        ops.causal_conv1d(x, weight, None, **given)
