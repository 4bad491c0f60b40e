"""What prompts are held against: the rules for some tokens at once are the rules token by token."""

from __future__ import annotations

import pytest
import torch
from linear_reference import delta_step, delta_tokens, relative, ssd_step, ssd_tokens


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def one_by_one(step, S, tokens):
    """Out and state of `step`, a rule that takes a state and some tokens."""
    rows = []
    for t in range(tokens):
        S, row = step(S[None], slice(t, t + 1))
        S, rows = S[0], [*rows, row]
    return S, torch.cat(rows)


@pytest.mark.parametrize("tokens", [1, 7, 16, 40])
@pytest.mark.parametrize("rate", [0.0, 0.01, 1000.0])
@pytest.mark.parametrize("channels", [False, True])
def test_delta_rule(channels, rate, tokens):
    S, q, k, v = normal(4, 24, 32), normal(tokens, 2, 32), normal(tokens, 2, 32), normal(tokens, 4, 24)
    k[: tokens // 2] = k[0].clone()
    decay = -rate * normal(tokens, 4, *([32] if channels else [])).abs()
    decay[tokens // 2] *= 2
    wide, normalize = (q, k, v, decay, normal(tokens, 4).sigmoid()), tokens != 7
    k /= 1 if normalize else 32
    after, expected = one_by_one(lambda S, t: delta_step(S, *(x[t] for x in wide), 0.3, normalize), S, tokens)
    state, out = delta_tokens(S, *wide, 0.3, normalize)
    assert relative(out, expected) < 1e-11 and relative(state, after) < 1e-11


@pytest.mark.parametrize("tokens", [1, 7, 16, 40])
@pytest.mark.parametrize("rate", [0.0, 0.01, 1000.0])
@pytest.mark.parametrize("whole", [False, True])
def test_state_space(whole, rate, tokens):
    S, B, C, x = normal(4, 24, 32), normal(tokens, 2, 32), normal(tokens, 2, 32), normal(tokens, 4, 24)
    dt, z = (normal(tokens, 4), normal(tokens, 4, 24)) if whole else (None, None)
    skip, bias = (normal(4), normal(4)) if whole else (None, None)

    def rule(of, S, t):
        some = [None if w is None else w[t] for w in (x, dt, B, C, z)]
        return of(S, *some[:2], -rate * torch.arange(4.0).double(), *some[2:4], skip, bias, some[4], 0.5, whole)

    after, expected = one_by_one(lambda S, t: rule(ssd_step, S, t), S, tokens)
    state, out = rule(ssd_tokens, S, slice(None))
    assert relative(out, expected) < 1e-11 and relative(state, after) < 1e-11
