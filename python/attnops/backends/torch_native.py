"""Attention in plain torch, all requests at once: what every other backend is compared with.

Keys are merged by online softmax in float32, a chunk at a time. So memory is bounded by the chunk. A chunk that no
query sees changes no bit of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnops.backends.gathered import CAPABILITY, Chunks, GatheredBackend, Queries, visible_keys
from attnops.backends.registry import register_attention_backend
from attnops.layers.radix_attention import RadixAttention

# From queries, those of each KV head, keys of a chunk and the first one's position to scores: see `attend_gathered`.
Scores = Callable[[Queries, Tensor, Tensor, int], Tensor]


def attend_gathered(queries: Queries, chunks: Chunks, layer: RadixAttention, scores_of: Scores | None = None) -> Tensor:
    """Online softmax over the chunks (Milakov and Gimelshein, arXiv:1805.02867): float32 ``[B, S_q, H_q, D_v]``.

    Args:
        scores_of: From scaled q, ``[B, H_kv, group * S_q, D]``, and k, ``[B, C, H_kv, D_k]``, to scores; None: their
            product.
    """
    batch_size, seqlen_q = queries.q.shape[:2]
    num_kv_heads = layer.num_kv_heads
    # Query heads of one KV head and the rows of a request are rows of one matrix.
    q = queries.q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, H_kv, group, S_q, D]
    group = q.shape[2]
    q = (q * layer.scaling).flatten(2, 3)
    highest = q.new_full((batch_size, num_kv_heads, group * seqlen_q, 1), -math.inf)
    total = torch.zeros_like(highest)
    acc = q.new_zeros(batch_size, num_kv_heads, group * seqlen_q, layer.v_head_dim)
    for k, v, begin in chunks:
        scores = q @ k.permute(0, 2, 3, 1) if scores_of is None else scores_of(queries, q, k, begin)
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        visible = visible_keys(queries, layer, begin, k.shape[1]).unsqueeze(1).unsqueeze(1)  # [B, 1, 1, S_q, C]
        scores = scores.unflatten(2, (group, seqlen_q)).masked_fill(~visible, -math.inf).flatten(2, 3)
        if queries.drafts is not None:  # a token outside every mask may hold NaN, which a weight of 0 does not hide
            v = v.masked_fill(~visible.any(3).view(batch_size, -1, 1, 1), 0.0)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        safe = new_highest.masked_fill(new_highest == -math.inf, 0.0)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
        weights = torch.exp(scores - safe)
        fade = torch.exp(highest - safe)
        total = total * fade + weights.sum(-1, keepdim=True)
        acc = acc * fade + weights @ v.permute(0, 2, 1, 3)
        highest = new_highest
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, num_kv_heads, group, 1).expand(-1, -1, -1, seqlen_q).flatten(2, 3)
        total = total + torch.exp(sinks.unsqueeze(-1) - highest)  # an empty row divides 0 by inf
    out = torch.where(highest == -math.inf, 0.0, acc / total)
    return out.unflatten(2, (group, seqlen_q)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@register_attention_backend("torch_native")
class TorchNativeAttnBackend(GatheredBackend):
    """Every mode and option in torch, on any device. Exact, and slow.

    A layer walks keys 256 at a time, until the host knows that no request has more. A CPU's lengths say so at once. A
    GPU's are asked for when an eager step is planned. Nobody waits for them, so the first layer may walk some chunks in
    vain. A captured step walks all keys that `Limits`, `AttentionBatch.max_cache_seqlen` and `max_prefix_tokens` allow.
    """

    capability = dataclasses.replace(
        CAPABILITY, devices=frozenset({"cpu", "cuda", "hip", "xpu", "npu"}), cuda_graph=True
    )
    softmax = staticmethod(attend_gathered)
