"""The latent-attention model and its plain-PyTorch attention, expanded and absorbed.

Expanded: each cached latent is multiplied out to keys and values per head, as in training. Absorbed: the up-projection
of the keys is moved into the query and that of the values behind the attention,

    q_nope . (W_uk c) = (W_uk^T q_nope) . c,        sum_j p_j (W_uv c_j) = W_uv (sum_j p_j c_j),

so that all heads attend to the latents themselves: one K/V head, keys [c, k_pe] of 576, values c of 512.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import MlaConfig
from .gqa import future_keys
from .layers import Decoder, RMSNorm, Rotary


class MlaAttention(nn.Module):
    def __init__(self, config: MlaConfig, layer_id: int):
        super().__init__()
        self.layer_id = layer_id
        self.config = config
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(config.d_model, config.num_heads * config.qk_head_dim, bias=False)
        self.kv_down = nn.Linear(config.d_model, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_lora_rank, config.norm_eps)
        self.k_up = nn.Linear(config.kv_lora_rank, config.num_heads * config.qk_nope_head_dim, bias=False)
        self.v_up = nn.Linear(config.kv_lora_rank, config.num_heads * config.v_head_dim, bias=False)
        self.out_proj = nn.Linear(config.num_heads * config.v_head_dim, config.d_model, bias=False)
        self.rotary = Rotary(config.qk_rope_head_dim, config.max_context, config.rope_base)

    def forward(self, x: Tensor, positions: Tensor, attend: MlaAttend) -> Tensor:
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, c.qk_head_dim))
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.kv_down(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = self.kv_norm(latent)
        q_pe = self.rotary(q_pe, positions)
        k_pe = self.rotary(k_pe[:, None], positions)[:, 0]
        return self.out_proj(attend(self, q_nope, q_pe, latent, k_pe).flatten(-2))

    def expand(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, heads, qk_nope + qk_rope] and values [n, heads, v_head_dim] of n cached tokens."""
        c = self.config
        k_nope = self.k_up(latent).unflatten(-1, (c.num_heads, c.qk_nope_head_dim))
        v = self.v_up(latent).unflatten(-1, (c.num_heads, c.v_head_dim))
        k = torch.cat([k_nope, k_pe[:, None].expand(-1, c.num_heads, -1)], dim=-1)
        return k, v

    def absorb_query(self, q_nope: Tensor) -> Tensor:
        """[n, heads, qk_nope] -> [n, heads, kv_lora_rank]: the query against latents instead of keys."""
        w_uk = self.k_up.weight.unflatten(0, (self.num_heads, self.config.qk_nope_head_dim))
        return torch.einsum("nhd,hdc->nhc", q_nope, w_uk)

    def expand_output(self, latent_out: Tensor) -> Tensor:
        """[n, heads, kv_lora_rank], attention over latents -> [n, heads, v_head_dim]."""
        w_uv = self.v_up.weight.unflatten(0, (self.num_heads, self.config.v_head_dim))
        return torch.einsum("nhc,hdc->nhd", latent_out, w_uv)


# attend(layer, q_nope [n, heads, qk_nope], q_pe [n, heads, qk_rope], latent [n, kv_lora_rank], k_pe [n, qk_rope])
#   -> [n, heads, v_head_dim]
# latent comes normalized, q_pe and k_pe rotated; the function stores latent and k_pe and attends causally within each
# token's own sequence. `layer` gives layer_id and the projections of either form.
MlaAttend = Callable[[MlaAttention, Tensor, Tensor, Tensor, Tensor], Tensor]


class MlaModel(Decoder):
    """Byte-level decoder with latent attention. forward(token_ids, positions, attend: MlaAttend) -> logits."""

    config: MlaConfig

    def __init__(self, config: MlaConfig, dropout: float = 0.0):
        super().__init__(config, MlaAttention, dropout)


class MlaBatchAttend:
    """Expanded attention for training: `batch` sequences of equal length laid end to end, nothing cached."""

    def __init__(self, config: MlaConfig, batch: int):
        self.config = config
        self.batch = batch

    def __call__(self, layer: MlaAttention, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
        k, v = layer.expand(latent, k_pe)
        q = torch.cat([q_nope, q_pe], dim=-1)
        # Values padded to the width of the keys: the fused kernels take one head dim.
        v = F.pad(v, (0, self.config.qk_head_dim - self.config.v_head_dim))
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))  # [batch, heads, length, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.softmax_scale)
        return out[..., : self.config.v_head_dim].transpose(1, 2).flatten(0, 1)


class MlaContiguousCache:
    """Attention of one sequence over a contiguous latent cache: what a serving run is checked against.

    Appends the latents and rotated keys it is given, then attends to everything so far, absorbed or expanded. Softmax
    in fp32. Works for prefill, chunks and single tokens alike.
    """

    def __init__(
        self, config: MlaConfig, dtype: torch.dtype, device: torch.device | str = "cpu", absorbed: bool = True
    ):
        self.config = config
        self.absorbed = absorbed
        rows = (config.num_layers, config.max_context)
        self.latent = torch.zeros(*rows, config.kv_lora_rank, dtype=dtype, device=device)
        self.k_pe = torch.zeros(*rows, config.qk_rope_head_dim, dtype=dtype, device=device)
        self.lengths = [0] * config.num_layers

    def __call__(self, layer: MlaAttention, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
        begin = self.lengths[layer.layer_id]
        end = begin + q_nope.shape[0]
        self.latent[layer.layer_id, begin:end] = latent
        self.k_pe[layer.layer_id, begin:end] = k_pe
        self.lengths[layer.layer_id] = end
        latents, keys_pe = self.latent[layer.layer_id, :end], self.k_pe[layer.layer_id, :end]
        if self.absorbed:
            q = torch.cat([layer.absorb_query(q_nope), q_pe], dim=-1).float()
            scores = torch.einsum("qhd,kd->hqk", q, torch.cat([latents, keys_pe], dim=-1).float())
        else:
            keys, values = layer.expand(latents, keys_pe)
            scores = torch.einsum("qhd,khd->hqk", torch.cat([q_nope, q_pe], dim=-1).float(), keys.float())
        scores = (scores * self.config.softmax_scale).masked_fill(future_keys(begin, end, q_pe.device), float("-inf"))
        probs = scores.softmax(-1)
        if self.absorbed:
            return layer.expand_output(torch.einsum("hqk,kc->qhc", probs, latents.float()).to(q_nope.dtype))
        return torch.einsum("hqk,khd->qhd", probs, values.float()).to(q_nope.dtype)
