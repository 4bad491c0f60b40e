"""Linear attention by the peers' names, against float64 token by token."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from attnops.compat import causal_conv1d, fla
from linear_reference import convolve, delta_step, relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


def expected_of(q, k, v, g, beta, scale, states, l2norm, bounds):
    """States [N, HV, V, K]."""
    rows, final = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        S = states[i : i + 1]
        for t in range(begin, end):
            S, row = delta_step(S, *(x[t : t + 1] for x in (q, k, v, g, beta)), scale, l2norm)
            rows.append(row)
        final.append(S)
    return torch.cat(rows), torch.cat(final)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_delta_rule(ragged, name, io, device):
    torch.manual_seed(3)
    batch, tokens, H, HV, K, V = (1, 150, 2, 4, 64, 48) if ragged else (2, 75, 2, 4, 64, 48)
    bounds = [0, 20, 20, 150] if ragged else [0, 75, 150]
    count = len(bounds) - 1
    q, k = (torch.randn(batch, tokens, H, K).to(io) for _ in range(2))
    v, beta = torch.randn(batch, tokens, HV, V).to(io), torch.rand(batch, tokens, HV).to(io)
    channels = name == "chunk_kda"
    g = -torch.rand(batch, tokens, HV, *([K] if channels else []))
    initial = torch.randn(count, HV, K, V)
    function = getattr(fla, name)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial}
    given |= {"cu_seqlens": torch.tensor(bounds)} if ragged else {}
    given = {n: t.to(device) for n, t in given.items()}
    out, final = function(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    flat = [x.double().flatten(0, 1) for x in (q, k, v, g, beta)]
    rows, states = expected_of(*flat, K**-0.5, initial.double().transpose(-1, -2), True, bounds)
    assert relative(out.flatten(0, 1), rows) < BOUND[io]
    assert final.shape == initial.shape and relative(final, states.transpose(-1, -2)) < BOUND[io]
    assert torch.equal(given["initial_state"].cpu(), initial), "the initial state is not written"
    unscaled, none = function(**{**given, "initial_state": None}, scale=1.0, use_qk_l2norm_in_kernel=True)
    rows, _ = expected_of(*flat, 1.0, torch.zeros_like(states), True, bounds)
    assert none is None and relative(unscaled.flatten(0, 1), rows) < BOUND[io]


def test_gates_of_the_peers():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 8)
    raw, beta, rate, bias = torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2), torch.randn(2), torch.randn(32)
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "A_log": rate, "dt_bias": bias}
    shifted = raw + bias.view(2, 16)
    for bound, gate in ((None, -rate.exp()[:, None] * F.softplus(shifted)), (-5.0, None)):
        gate = -5.0 * torch.sigmoid(rate.exp()[:, None] * shifted) if gate is None else gate
        got, _ = fla.chunk_kda(q, k, v, raw, beta, lower_bound=bound, **options)
        expected, _ = fla.chunk_kda(q, k, v, gate, beta.sigmoid())
        assert relative(got, expected) < 1e-6
    g, gk = -torch.rand(1, 30, 2), -torch.rand(1, 30, 2, 16)
    both, _ = fla.fused_recurrent_gated_delta_rule(q, k, v, g, gk)
    expected, _ = fla.chunk_kda(q, k, v, gk + g[..., None], torch.ones(1, 30, 2))
    assert relative(both, expected) < 1e-6
    with pytest.raises(NotImplementedError, match="gv="):
        fla.fused_recurrent_gated_delta_rule(q, k, v, g, None, v)
    with pytest.raises(NotImplementedError, match="lower_bound="):
        fla.chunk_kda(q, k, v, gk, beta, lower_bound=-5.0)
    with pytest.raises(ValueError, match="a state for each of 1 sequences"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=torch.zeros(2, 2, 16, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("last", [False, True], ids=["tokens dense", "channels dense"])
def test_convolutions(last, activation, device):
    torch.manual_seed(1)
    x, weight, bias = torch.randn(3, 24, 50), torch.randn(24, 4), torch.randn(24)
    initial = torch.randn(3, 24, 3)
    wide = [t.double() for t in (weight, bias)]
    expected = [convolve(x[i].double().T, *wide, initial[i].double(), activation is not None) for i in range(3)]
    rows, states = (torch.stack(parts) for parts in zip(*expected))
    moved = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
    to = [t.to(device) for t in (moved, weight, bias, initial)]
    out, final = causal_conv1d.causal_conv1d_fn(*to[:3], None, to[3], True, activation=activation)
    assert relative(out.transpose(1, 2), rows) < 2e-6 and torch.equal(final.cpu(), states.float())
    kept = to[3].clone()
    parts = [causal_conv1d.causal_conv1d_update(to[0][..., 0], kept, *to[1:3], activation)[..., None]]
    parts.append(causal_conv1d.causal_conv1d_update(to[0][..., 1:], kept, *to[1:3], activation))
    assert relative(torch.cat(parts, -1).transpose(1, 2), rows) < 2e-6 and torch.equal(kept, final)
    with pytest.raises(NotImplementedError, match="seq_idx="):
        causal_conv1d.causal_conv1d_fn(*to[:3], torch.zeros(3, 50, device=device))
