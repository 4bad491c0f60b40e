"""Attention in float64, all requests of a batch at once: written from the contract alone, none of it the package's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """Which keys a query sees, and what becomes of its scores.

    Args:
        tree: bool ``[T, widest S_q]``: whether a query token sees a new token of its request; None: by position.
        tree_keys: Keys at the end of a request that `tree` is over; 0: the new tokens'.
        sinks: float ``[H_q]`` or None.
        hidden: int ``[T, 2]``: keys [begin, end) that a query does not see, or None.
        listed: bool ``[T, longest S_k]``: the keys of its request that a query sees at most, or None.
    """

    scale: float
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    cap: float = 0.0
    sinks: Tensor | None = None
    tree: Tensor | None = None
    tree_keys: int = 0
    hidden: Tensor | None = None
    listed: Tensor | None = None


@dataclass(frozen=True)
class Answer:
    """Of every query row.

    Args:
        out: float64 ``[T, H_q, D_v]``.
        lse: float64 ``[T, H_q]``, natural log, without the sinks.
        noise: float64 ``[T, H_q]``: the norm of what independent relative errors of 1 in the weights would add up to.
        total: float64 ``[T, H_q]``, lse with the sinks.
    """

    out: Tensor
    lse: Tensor
    noise: Tensor
    total: Tensor


def _padded(bounds: list[int]) -> tuple[Tensor, Tensor]:
    """(row of every cell, whether it exists) of ``[B, longest]``, from where each request's rows begin."""
    begin = torch.tensor(bounds[:-1], dtype=torch.int64).unsqueeze(1)
    length = torch.tensor(bounds[1:], dtype=torch.int64).unsqueeze(1) - begin
    place = torch.arange(int(length.max()) if len(length) else 0).unsqueeze(0)
    exists = place < length
    return (begin + place) * exists, exists


def visible(lengths_q: list[int], lengths_k: list[int], rules: Rules) -> Tensor:
    """bool ``[B, widest S_q, longest S_k]``."""
    count_q = torch.tensor(lengths_q, dtype=torch.int64).view(-1, 1, 1)
    count_k = torch.tensor(lengths_k, dtype=torch.int64).view(-1, 1, 1)
    row = torch.arange(max(lengths_q, default=0)).view(1, -1, 1)
    key = torch.arange(max(lengths_k, default=0)).view(1, 1, -1)
    first_new = count_k - count_q
    position = first_new + row
    seen = (row < count_q) & (key < count_k)
    if rules.tree is not None:
        index, _ = _padded(_bounds(lengths_q))
        masks = rules.tree[index] if len(rules.tree) else rules.tree.new_zeros(*index.shape, rules.tree.shape[1])
        first_draft = count_k - rules.tree_keys if rules.tree_keys else first_new
        draft = (key - first_draft).expand(seen.shape)
        bits = masks.gather(2, draft.clamp(0, max(masks.shape[2] - 1, 0))) if masks.shape[2] else seen & False
        seen = seen & ((draft < 0) | bits)
    elif rules.causal:
        seen = seen & (key <= position)
    if rules.hidden is not None and len(rules.hidden):
        hidden = rules.hidden[_padded(_bounds(lengths_q))[0]]
        seen = seen & ((key < hidden[:, :, :1]) | (key >= hidden[:, :, 1:]))
    if rules.listed is not None and len(rules.listed):
        seen = seen & rules.listed[_padded(_bounds(lengths_q))[0]]
    if rules.window_left >= 0 and rules.tree is not None:
        seen = seen & (_steps_behind(masks, draft) <= rules.window_left)
    elif rules.window_left >= 0:
        seen = seen & (key >= position - rules.window_left)
    if rules.window_right >= 0:
        seen = seen & (key <= position + rules.window_right)
    return seen


def _steps_behind(masks: Tensor, draft: Tensor) -> Tensor:
    """How far keys stand behind rows ``[B, S_q, S_k]`` in steps of a tree: bits of the row behind the key's own."""
    if not masks.shape[2]:
        return -draft
    behind = masks.long().flip(2).cumsum(2).flip(2)  # bits from each draft on
    total = behind[:, :, :1].clamp(min=1)
    index = draft.clamp(0, masks.shape[2] - 1)
    own = masks.long().gather(2, index)
    return torch.where(draft < 0, total - 1 - draft, behind.gather(2, index) - own)


def _bounds(lengths: list[int]) -> list[int]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def used_keys(lengths_q: list[int], lengths_k: list[int], rules: Rules) -> Tensor:
    """bool ``[sum of S_k]``: keys that some row sees. All others may hold anything.

    Keys in the window of a tree's root count, too, where the tree that was drawn has none.
    """
    seen = visible(lengths_q, lengths_k, rules).any(1)
    if rules.tree is not None and rules.window_left >= 0:
        first = (torch.tensor(lengths_k) - torch.tensor(lengths_q)).unsqueeze(1)
        key = torch.arange(seen.shape[1])
        seen |= (key < first) & (key >= first - rules.window_left)
    _, exists = _padded(_bounds(lengths_k))
    return seen[exists]


def attend(q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_k: list[int], rules: Rules) -> Answer:
    """The answer for queries ``[T, H_q, D]`` over ``[sum of S_k, H_kv, D]`` and ``[.., H_kv, D_v]``, all float64.

    Keys and values that no row sees may be NaN.
    """
    tokens, heads, _ = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    out = torch.zeros(tokens, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    noise = torch.zeros(tokens, heads, dtype=torch.float64)
    rows, row_exists = _padded(_bounds(lengths_q))
    keys, _ = _padded(_bounds(lengths_k))
    if not rows.numel() or not keys.numel() or not len(k):
        return Answer(out, lse, noise, lse.clone())
    seen = visible(lengths_q, lengths_k, rules)
    used = seen.any(1)
    q_all = q[rows].unflatten(2, (kv_heads, group))  # [B, S_q, H_kv, G, D]
    unused = ~used[:, :, None, None]
    k_all = k[keys].masked_fill_(unused, 0).permute(0, 2, 3, 1)  # [B, H_kv, D, S_k]
    v_all = v[keys].masked_fill_(unused, 0).permute(0, 2, 1, 3)  # [B, H_kv, S_k, D_v]
    batch, seqlen = rows.shape
    by_head = q_all.permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, seqlen * group, -1)
    scores = (by_head * rules.scale @ k_all).view(batch, kv_heads, seqlen, group, -1)
    if rules.cap:
        scores = scores.div_(rules.cap).tanh_().mul_(rules.cap)
    scores.masked_fill_(~seen[:, None, :, None, :], -math.inf)
    largest = scores.amax(-1)  # [B, H_kv, S_q, G]
    empty = largest == -math.inf
    largest.masked_fill_(empty, 0)
    weights = scores.sub_(largest.unsqueeze(-1)).exp_()  # the large tensor is changed where it lies
    all_lse = largest + weights.sum(-1).log()
    total = all_lse
    if rules.sinks is not None:
        total = torch.logaddexp(all_lse, rules.sinks.double().view(1, kv_heads, 1, group))
    share = torch.exp(largest - total.masked_fill(empty, 0))  # of a weight in the whole
    flat = weights.view(batch, kv_heads, seqlen * group, -1)
    sums = (flat @ v_all).view(batch, kv_heads, seqlen, group, -1) * share.unsqueeze(-1)
    lengths_v = v_all.square().sum(-1, keepdim=True)
    sizes = (flat.square_() @ lengths_v).sqrt_().view(batch, kv_heads, seqlen, group) * share

    def by_token(values: Tensor) -> Tensor:
        return values.permute(0, 2, 1, 3, *range(4, values.dim())).flatten(2, 3)[row_exists]

    index = rows[row_exists]
    out[index], lse[index], noise[index] = by_token(sums), by_token(all_lse), by_token(sizes)
    totals = lse.clone()
    totals[index] = by_token(torch.where(empty, all_lse, total))
    return Answer(out, lse, noise, totals)
