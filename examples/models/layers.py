"""What both models are made of: norm, rotary embedding, feed-forward, block, decoder.

A model sees a flat list of tokens with one position each, as a serving engine does; how the tokens form sequences and
where keys and values are kept is known to the `attend` function that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight.float()).to(x.dtype)


class Rotary(nn.Module):
    """Rotates pairs (i, i + dim/2) of the last axis by position-dependent angles, in fp32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, max_context: int, base: float):
        super().__init__()
        inverse_frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(max_context, dtype=torch.float64)[:, None] * inverse_frequency
        self.register_buffer("cos", angles.cos().float(), persistent=False)  # [max_context, dim/2]
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [num_tokens, heads, dim], positions: [num_tokens] -> as x."""
        cos = self.cos[positions].float()[:, None]
        sin = self.sin[positions].float()[:, None]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class SwiGlu(nn.Module):
    def __init__(self, d_model: int, ffn_dim: int):
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: nn.Module, dropout: float):
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGlu(config.d_model, config.ffn_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, attend))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Decoder(nn.Module):
    """Token embedding, blocks, final norm, output projection."""

    def __init__(self, config: ModelConfig, make_attention: Callable[[Any, int], nn.Module], dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(
            Block(config, make_attention(config, layer_id), dropout) for layer_id in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("ffn.down.weight", "attention.out_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Final hidden states, [num_tokens, d_model]. token_ids and positions: int64 [num_tokens]."""
        x = self.embedding(token_ids)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.final_norm(x)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Logits of the next byte, fp32 [num_tokens, vocab_size]."""
        return self.output(self.hidden(token_ids, positions, attend)).float()
