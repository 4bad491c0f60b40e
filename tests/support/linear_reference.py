"""Linear recurrences in float64: what the ops of `attnops.ops.linear` are held against.

`delta_step` and `ssd_step` are the rules. `delta_tokens` and `ssd_tokens` are the same for some tokens at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_step(S, q, k, v, log_decay, beta, scale, normalize):
    """One token. S [B, HV, V, K], q and k [B, H, K], v [B, HV, V], log_decay [B, HV] or [B, HV, K], beta [B, HV]."""
    groups = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = log_decay.exp()
    S = S * (decay[..., None, :] if decay.dim() == 3 else decay[..., None, None])
    u = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", S, k))
    S = S + u[..., None] * k[..., None, :]
    return S, scale * torch.einsum("bhvk,bhk->bhv", S, q)


def delta_gates(a, b, A_log, dt_bias, lower_bound):
    """Log of the decay, and beta."""
    if A_log is None:
        return a, b
    rate = A_log.exp()[:, None] if a.dim() == 3 else A_log.exp()
    x = a if dt_bias is None else a + dt_bias
    g = lower_bound * torch.sigmoid(rate * x) if lower_bound < 0 else -rate * F.softplus(x)
    return g, torch.sigmoid(b)


def ssd_step(S, x, dt, A, B, C, D, dt_bias, z, scale, softplus):
    """One token. S [B, H, P, N], x and z [B, H, P], dt [B, H], B and C [B, G, N]."""
    groups = x.shape[1] // B.shape[1]
    B, C = (t.repeat_interleave(groups, dim=1) for t in (B, C))
    dt = torch.ones_like(x[..., 0]) if dt is None else dt
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    S = S * (dt * A).exp()[..., None, None] + (dt[..., None] * x)[..., None] * B[..., None, :]
    y = scale * torch.einsum("bhpn,bhn->bhp", S, C)
    y = y if D is None else y + D[:, None] * x
    return S, y if z is None else y * F.silu(z)


def _earlier(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """[HV, T, T]: k_t k_s and q_t k_s, with the decay from s to t; 0 where s is later. total: of log decays."""
    count = total.shape[1]
    t, s = torch.tril_indices(count, count)
    pairs = torch.zeros(2, len(total), count, count, dtype=q.dtype)
    if total.dim() == 3:
        decayed = k[:, s] * (total[:, t] - total[:, s]).exp()
        pairs[:, :, t, s] = torch.stack([(x[:, t] * decayed).sum(-1) for x in (k, q)])
    else:
        decay = (total[:, t] - total[:, s]).exp()
        pairs[:, :, t, s] = torch.stack([(x @ k.mT)[:, t, s] * decay for x in (k, q)])
    return pairs[0], pairs[1]


def _over_tokens(S, q, k, log_decay, make_u):
    """The state behind some tokens, and `S q` of each; make_u: from `S k` [HV, T, V] of the old state, and k_t k_s."""
    total = log_decay.cumsum(0).transpose(0, 1)
    wide = total if total.dim() == 3 else total[..., None]
    among, seen = _earlier(q, k, total)
    from_start = wide.exp()
    u = make_u((k * from_start) @ S.mT, among)
    out = (q * from_start) @ S.mT + seen @ u
    last = wide[:, -1:]
    return S * last.exp() + u.mT @ (k * (last - wide).exp()), out.transpose(0, 1)


def delta_tokens(S, q, k, v, log_decay, beta, scale, normalize):
    """Some tokens of one request at once, at least one: a few dozen. S [HV, V, K], the others as in `delta_step`."""
    groups = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (q, k))
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))

    def make_u(seen, among):
        share = beta.T[..., None]
        lower = torch.eye(among.shape[1], dtype=among.dtype) + share * among.tril(-1)
        return torch.linalg.solve_triangular(lower, share * (v.transpose(0, 1) - seen), upper=False)

    S, out = _over_tokens(S, q, k, log_decay, make_u)
    return S, scale * out


def ssd_tokens(S, x, dt, A, B, C, D, dt_bias, z, scale, softplus):
    """As `delta_tokens`, for `ssd_step`."""
    groups = x.shape[1] // B.shape[1]
    B, C = (t.repeat_interleave(groups, dim=1).transpose(0, 1) for t in (B, C))
    dt = torch.ones_like(x[..., 0]) if dt is None else dt
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    S, y = _over_tokens(S, C, B, dt * A, lambda *_: (dt[..., None] * x).transpose(0, 1))
    y = scale * y
    y = y if D is None else y + D[:, None] * x
    return S, y if z is None else y * F.silu(z)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """One request. x [T, C], weight [C, W], state [C, W - 1]; out and the new state."""
    inputs = torch.cat([state.T, x])
    width = weight.shape[1]
    out = torch.stack([(inputs[t : t + width] * weight.T).sum(0) for t in range(len(x))]) if len(x) else x.clone()
    out = out if bias is None else out + bias
    return F.silu(out) if silu else out, inputs[len(inputs) - width + 1 :].T


def relative(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    got, expected = got.double().cpu(), expected.double().cpu()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
