"""Steps over caches of four bits: uniform ones by `fp4_decode`, which reads codes as they are, others gathered."""

from __future__ import annotations

from torch import Tensor

from attnops import ops
from attnops.backends.base import LayerCall, is_causal
from attnops.backends.gathered import GatheredSteps, whole_queries
from attnops.backends.prepared import in_one_thread
from attnops.layers.radix_attention import RadixAttention
from attnops.pools import MHATokenToKVPoolFP4, MLATokenToKVPoolFP4


class Fp4Steps(GatheredSteps):
    """Where all requests bring as many tokens, which see what stands before them: `fp4_decode`. Else as in the base."""

    @in_one_thread
    def attend(self, call: LayerCall) -> None:
        layer, batch, pool = call.layer, call.batch, call.batch.token_to_kv_pool
        plain = batch.tree_mask is None and not batch.draft_steps and not layer.attention_chunk_size
        plain = plain and is_causal(layer)
        if not (plain and batch.is_uniform and isinstance(pool, MHATokenToKVPoolFP4 | MLATokenToKVPoolFP4)):
            super().attend(call)
            return
        step = self.prepared.of(batch)
        self.store(call, step)
        shape = (batch.batch_size, batch.tokens_per_request, layer.num_heads)
        k, v, k_scales, v_scales = _pages_of(pool, layer)
        assert step.page_table is not None
        ops.fp4_decode(
            whole_queries(call).reshape(*shape, layer.head_dim),
            k,
            v,
            k_scales,
            v_scales,
            step.page_table,
            batch.cache_seqlens,
            softmax_scale=layer.scaling,
            window_left=layer.sliding_window_size,
            logit_cap=layer.logit_cap,
            sinks=layer.sinks,
            k_scale=layer.k_scale,
            v_scale=None if v is None else layer.v_scale,
            out=call.out.view(*shape, layer.v_head_dim),
            report=self.buffers.report,
        )


def _pages_of(
    pool: MHATokenToKVPoolFP4 | MLATokenToKVPoolFP4, layer: RadixAttention
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Codes of K and V, then their scales; latents hold both."""
    if isinstance(pool, MLATokenToKVPoolFP4):
        latents, scales = pool.get_latent_buffer(layer.layer_id), pool.get_kv_scale_buffer(layer.layer_id)
        return latents.unsqueeze(2), None, scales.unsqueeze(2), None
    return *pool.get_kv_buffer(layer.layer_id), *pool.get_kv_scale_buffer(layer.layer_id)
