"""FlashAttention in float64, of one request: which keys a query sees, and what it gives."""

from __future__ import annotations

import math

import torch


def attention(q, k, v, hidden, scale, bias=0.0):
    """Float64: q [S, H, D], k and v [K, H_kv, D], hidden [S, K]; out and natural lse [S, H]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale + bias
    scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(scores, -1).T


def hidden_keys(seqlen_q, length, causal, window, chunk=0):
    """Which of `length` keys no query sees: positions are aligned at the end."""
    at = torch.arange(length - seqlen_q, length)[:, None]
    key = torch.arange(length)
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(seqlen_q, length, dtype=torch.bool)
    if right >= 0:
        hidden |= key > at + right
    if left >= 0:
        hidden |= key < at - left
    if chunk:
        first = at - at.remainder(chunk)
        hidden |= (key < first) | (key >= first + chunk)
    return hidden
