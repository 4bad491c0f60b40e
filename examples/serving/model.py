"""An example model with `RadixAttention` for its attention: what a server runs, eagerly, in graphs or compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attnops.layers import RadixAttention
from attnops.types import AttentionBatch, AttentionSpec
from models import GqaModel, MlaAttention, MlaModel
from torch import Tensor


class PagedModel(torch.nn.Module):
    """Called as ``model(token_ids, positions, batch)``; gives float32 logits ``[num_tokens, vocab_size]``.

    Without a batch its layers find the step that runs (`attnops.layers.forward_context`), as in a compiled model.
    """

    def __init__(self, model: GqaModel | MlaModel, spec: AttentionSpec) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.layers = torch.nn.ModuleList(
            RadixAttention(
                spec.num_q_heads,
                spec.head_dim,
                model.config.softmax_scale,
                spec.num_kv_heads,
                layer_id,
                v_head_dim=spec.v_head_dim,
            )
            for layer_id in range(model.config.num_layers)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch | None = None) -> Tensor:
        return self.model(token_ids, positions, self._attend(batch))

    def hidden(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """What the logits are made of: ``[num_tokens, d_model]``."""
        return self.model.hidden(token_ids, positions, self._attend(batch))

    def _attend(self, batch: AttentionBatch | None) -> Callable[..., Tensor]:
        heads = self.spec.num_q_heads

        def attend_gqa(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.layers[layer_id](q, k, v, batch).unflatten(-1, (heads, -1))

        def attend_mla(layer: MlaAttention, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
            q = layer.absorb_query(q_nope)
            out = self.layers[layer.layer_id](q, latent, None, batch, q_rope=q_pe, k_rope=k_pe)
            return layer.expand_output(out.unflatten(-1, (heads, -1)))

        return attend_mla if self.spec.is_mla else attend_gqa
