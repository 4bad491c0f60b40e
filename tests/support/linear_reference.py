"""Linear recurrences in float64, token by token: what the ops of `attnops.ops.linear` are held against."""

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
