"""The grouped-query model and its plain-PyTorch attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import GqaConfig
from .layers import Decoder, Rotary

# attend(layer_id, q [n, num_heads, d], k [n, num_kv_heads, d], v [n, num_kv_heads, d]) -> [n, num_heads, d]
# q and k come rotated; the function stores k and v and attends causally within each token's own sequence.
GqaAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class GqaAttention(nn.Module):
    def __init__(self, config: GqaConfig, layer_id: int):
        super().__init__()
        self.layer_id = layer_id
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.num_kv_heads * config.head_dim, bias=False)
        self.out_proj = nn.Linear(config.num_heads * config.head_dim, config.d_model, bias=False)
        self.rotary = Rotary(config.head_dim, config.max_context, config.rope_base)

    def forward(self, x: Tensor, positions: Tensor, attend: GqaAttend) -> Tensor:
        q = self.rotary(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)), positions)
        k = self.rotary(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)), positions)
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.out_proj(attend(self.layer_id, q, k, v).flatten(-2))


class GqaModel(Decoder):
    """Byte-level decoder with grouped-query attention. forward(token_ids, positions, attend: GqaAttend) -> logits."""

    config: GqaConfig

    def __init__(self, config: GqaConfig, dropout: float = 0.0):
        super().__init__(config, GqaAttention, dropout)


class GqaBatchAttend:
    """Attention for training: `batch` sequences of equal length laid end to end, nothing cached."""

    def __init__(self, config: GqaConfig, batch: int):
        self.config = config
        self.batch = batch

    def __call__(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.config.num_heads // self.config.num_kv_heads
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))  # [batch, heads, length, d]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.softmax_scale)
        return out.transpose(1, 2).flatten(0, 1)


class GqaContiguousCache:
    """Attention of one sequence over a contiguous K/V cache: what a serving run is checked against.

    Appends the keys and values it is given, then attends to everything so far. Softmax in fp32. Works for prefill,
    chunks and single tokens alike.
    """

    def __init__(self, config: GqaConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.config = config
        shape = (config.num_layers, config.max_context, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * config.num_layers

    def __call__(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin = self.lengths[layer_id]
        end = begin + q.shape[0]
        self.k[layer_id, begin:end] = k
        self.v[layer_id, begin:end] = v
        self.lengths[layer_id] = end
        group = self.config.num_heads // self.config.num_kv_heads
        keys = self.k[layer_id, :end].float().repeat_interleave(group, dim=1)
        values = self.v[layer_id, :end].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self.config.softmax_scale
        probs = scores.masked_fill(future_keys(begin, end, q.device), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)


def future_keys(begin: int, end: int, device: torch.device) -> Tensor:
    """True where key j lies after query i, for queries begin..end-1 and keys 0..end-1."""
    return torch.arange(end, device=device)[None, :] > torch.arange(begin, end, device=device)[:, None]
