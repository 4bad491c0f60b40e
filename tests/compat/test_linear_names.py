"""Linear attention by the peers' names, against float64 token by token."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from attnops.compat import causal_conv1d, fla
from linear_reference import convolve, delta_step, relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float32: 2e-5, torch.bfloat16: 6e-3}


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


@pytest.mark.parametrize("device", DEVICES)
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


def raw_gate(g, rate, bias, bound):
    """Float64 of a raw gate [B, T, HV] or [B, T, HV, K], as the issue and arXiv 2510.26692 have it."""
    rate = rate.exp().view(-1, *[1] * (g.dim() - 3))
    shifted = g + bias.view(g.shape[2:])
    return -rate * F.softplus(shifted) if bound is None else bound * torch.sigmoid(rate * shifted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda"])
def test_raw_gates(name, bound, twice, io, device):
    if bound is not None and name != "chunk_kda":
        pytest.skip("Kimi's gate alone has a bound")
    torch.manual_seed(5)
    tokens, H, HV, K, V = 70, 2, 4, 64, 32
    q, k = (torch.randn(2, tokens, H, K).to(io) for _ in range(2))
    v, beta = torch.randn(2, tokens, HV, V).to(io), torch.randn(2, tokens, HV).to(io)
    channels = [K] if name == "chunk_kda" else []
    g, rate, bias = torch.randn(2, tokens, HV, *channels).to(io), torch.randn(HV) - 1, torch.randn(HV, *channels)
    initial = torch.randn(2, HV, V, K)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial, "A_log": rate}
    given = {label: tensor.to(device) for label, tensor in given.items()} | {"dt_bias": bias.flatten().to(device)}
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": twice}
    options |= {"state_v_first": True, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    options |= {"lower_bound": bound} if name == "chunk_kda" else {}
    out, final = getattr(fla, name)(**given, **options)
    decay = raw_gate(g.double(), rate.double(), bias.double(), bound)
    wide = [q.double(), k.double(), v.double(), decay, (1 + twice) * beta.double().sigmoid()]
    flat = [tensor.flatten(0, 1) for tensor in wide]
    rows, states = expected_of(*flat, K**-0.5, initial.double(), True, [0, tokens, 2 * tokens])
    most = BOUND[io] * (2 if twice else 1)  # a beta above 1 turns a state's sign, and chunks of bf16 round more
    assert relative(out.flatten(0, 1), rows) < most and relative(final, states) < most


@pytest.mark.parametrize("device", DEVICES)
def test_a_recurrent_step_of_one_token(device):
    torch.manual_seed(6)
    q, k, v = (torch.randn(3, 1, heads, 64).bfloat16() for heads in (2, 2, 4))
    g, beta, initial = -torch.rand(3, 1, 4), torch.rand(3, 1, 4), torch.randn(3, 4, 64, 64)
    given = [x.to(device) for x in (q, k, v, g)]
    options = {"beta": beta.to(device), "initial_state": initial.to(device), "output_final_state": True}
    out, final = fla.fused_recurrent_gated_delta_rule(*given, **options, use_qk_l2norm_in_kernel=True)
    flat = [x.double().flatten(0, 1) for x in (q, k, v, g, beta)]
    rows, states = expected_of(*flat, 64**-0.5, initial.double().transpose(-1, -2), True, [0, 1, 2, 3])
    assert out.dtype == torch.bfloat16 and relative(out.flatten(0, 1), rows) < 3e-3
    assert relative(final, states.transpose(-1, -2)) < 1e-6, "the step is of float32"


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_one_token_takes_a_dtype_each_and_gives_that_of_v(device):
    torch.manual_seed(2)
    q, k = (torch.randn(3, 1, 2, 64, device=device) for _ in range(2))
    v, g = torch.randn(3, 1, 4, 32, device=device).bfloat16(), -torch.rand(3, 1, 4, device=device)
    out, _ = fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=torch.sigmoid(g))
    wide, _ = fla.fused_recurrent_gated_delta_rule(q, k, v.float(), g, beta=torch.sigmoid(g))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())


def test_gates_of_heads_and_of_channels():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 8)
    g, gk = -torch.rand(1, 30, 2), -torch.rand(1, 30, 2, 16)
    both, _ = fla.fused_recurrent_gated_delta_rule(q, k, v, g, gk)
    expected, _ = fla.chunk_kda(q, k, v, gk + g[..., None], torch.ones(1, 30, 2))
    assert relative(both, expected) < 1e-6
    bounded, _ = fla.chunk_kda(q, k, v, gk, g, use_gate_in_kernel=True, lower_bound=-5.0)
    expected, _ = fla.chunk_kda(q, k, v, -5 * gk.sigmoid(), g)
    assert relative(bounded, expected) < 1e-6, "A_log may be None beside a bound"


def test_the_older_name_of_a_states_layout():
    torch.manual_seed(2)
    q, k, v = torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 8)
    g, beta, initial = -torch.rand(1, 9, 2), torch.rand(1, 9, 2), torch.randn(1, 2, 8, 16)
    options = {"initial_state": initial, "output_final_state": True}
    for function in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        _, old = function(q, k, v, g, beta=beta, transpose_state_layout=True, **options)
        _, new = function(q, k, v, g, beta=beta, state_v_first=True, **options)
        assert torch.equal(old, new) and old.shape == initial.shape
        with pytest.raises(ValueError, match="transpose_state_layout is state_v_first's older name"):
            function(q, k, v, g, beta=beta, transpose_state_layout=True, state_v_first=True, **options)


REFUSED = [
    ("chunk_gated_delta_rule", {"cp_context": object()}, NotImplementedError, "does not honour cp_context="),
    ("chunk_gated_delta_rule", {"A_log": torch.zeros(2)}, NotImplementedError, "does not honour A_log= alone"),
    ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, ValueError, "A_log must be given with use_gate_in_kernel"),
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, ValueError, "needs use_beta_sigmoid_in_kernel=True"),
    ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(1, 30, 2, 8)}, NotImplementedError, "honour gv="),
    ("fused_recurrent_gated_delta_rule", {"dt_bias": torch.zeros(2)}, NotImplementedError, "honour dt_bias= alone"),
    (
        "fused_recurrent_gated_delta_rule",
        {"use_gate_in_kernel": True, "A_log": torch.zeros(3)},
        ValueError,
        r"A_log must have 2 numbers for g \[1, 30, 2\], got \[3\]",
    ),
    ("chunk_kda", {"lower_bound": -5.0}, NotImplementedError, "does not honour lower_bound= alone"),
    (
        "chunk_kda",
        {"use_gate_in_kernel": True, "safe_gate": True},
        ValueError,
        "lower_bound must be given with safe_gate",
    ),
    ("chunk_kda", {"return_intermediate_states": True}, NotImplementedError, "checkpoint_slots="),
    ("chunk_kda", {"initial_state": torch.zeros(2, 2, 16, 8)}, ValueError, "a state for each of 1 sequences"),
]


@pytest.mark.parametrize(("name", "options", "kind", "text"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused_is_named(name, options, kind, text):
    q, k, v = torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 8)
    g = torch.randn(1, 30, 2, *([16] if name == "chunk_kda" else []))
    with pytest.raises(kind, match=text):
        getattr(fla, name)(q, k, v, g, beta=torch.rand(1, 30, 2), **options)


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
