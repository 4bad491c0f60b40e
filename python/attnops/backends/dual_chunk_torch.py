"""Dual-chunk attention in plain torch: one softmax over keys that are gathered from their pages, a chunk at a time."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attnops.backends.base import LayerCall
from attnops.backends.gathered import Chunks, GatheredSteps, Queries
from attnops.backends.torch_native import attend_gathered
from attnops.layers.radix_attention import RadixAttention
from attnops.types import AttentionSpec, Limits

READ = 3  # of the parts of q


class GatheredDualChunks:
    """What `DualChunkFlashAttentionBackend` is made of where it is asked for torch.

    Args:
        chunk_len: Tokens of a chunk. original: The backend's `original_max_position_embeddings`.
    """

    def __init__(
        self, spec: AttentionSpec, limits: Limits, device: torch.device, *, chunk_len: int, original: int
    ) -> None:
        self._chunk_len, self._original = chunk_len, original
        self.steps = GatheredSteps("torch_native", spec, limits, device, self._softmax)  # what faults are reported for
        self._wide: dict[RadixAttention, RadixAttention] = {}

    def attend(self, call: LayerCall, parts: int) -> None:
        """Serves a layer whose q has so many parts; k and v are stored first."""
        layer, tokens = call.layer, call.q.shape[0]
        self.steps.store(call, self.steps.prepared.of(call.batch))
        q = call.q.reshape(tokens, parts, layer.num_heads, layer.head_dim)[:, :READ].transpose(1, 2).flatten(2)
        self.steps.attend(
            dataclasses.replace(call, q=q, layer=self._wide_layer(layer), k=None, v=None, save_kv_cache=False)
        )

    def _wide_layer(self, layer: RadixAttention) -> RadixAttention:
        """The layer as one whose queries are as wide as the parts that are read."""
        wide = self._wide.get(layer)
        if wide is None:
            wide = self._wide[layer] = RadixAttention(
                layer.num_heads,
                READ * layer.head_dim,
                layer.scaling,
                layer.num_kv_heads,
                layer.layer_id,
                layer.logit_cap,
                layer.v_head_dim,
            )
        wide.k_scale, wide.v_scale = layer.k_scale, layer.v_scale
        return wide

    def _softmax(self, queries: Queries, chunks: Chunks, layer: RadixAttention) -> Tensor:
        return attend_gathered(queries, chunks, layer, self._scores)

    def _scores(self, queries: Queries, q: Tensor, k: Tensor, begin: int) -> Tensor:
        """``[B, H_kv, group * S_q, C]`` of q ``[B, H_kv, group * S_q, 3 * D]`` and k ``[B, C, H_kv, D]``."""
        keys = k.permute(0, 2, 3, 1)
        intra, successor, inter = (part @ keys for part in q.chunk(READ, -1))
        chunk = (begin + torch.arange(k.shape[1], device=k.device)) // self._chunk_len
        apart = (queries.positions // self._chunk_len).unsqueeze(-1) - chunk  # [B, S_q, C]
        apart = apart.repeat(1, q.shape[2] // apart.shape[1], 1).unsqueeze(1)
        scores = torch.where(apart == 0, intra, torch.where(apart == 1, successor, inter))
        if self._original:
            ratio = (queries.seqlens_k.float() / self._original).clamp(min=1.0)
            scores = scores * (0.1 * ratio.log() + 1.0).view(-1, 1, 1, 1)
        return scores
