"""Steps over caches of four bits: uniform ones by `fp4_decode`, which reads codes as they are, others gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import LayerCall, is_causal
from attnops.backends.capability import SIXTEEN_BIT
from attnops.backends.gathered import GatheredSteps, whole_queries
from attnops.backends.prepared import in_one_thread
from attnops.backends.torch_native import TorchNativeAttnBackend
from attnops.layers.radix_attention import RadixAttention
from attnops.pools import MHATokenToKVPoolFP4, MLATokenToKVPoolFP4
from attnops.types import AttentionSpec, Limits

MOST_ROWS = 16  # of a KV head with K and V of its own, in a kernel on CUDA: tokens times heads of a group


class Fp4Steps(GatheredSteps):
    """Where all requests bring as many tokens, which see what stands before them: `fp4_decode`. Else as in the base.

    Raises:
        NotImplementedError: `spec` asks for what such steps do not have.
    """

    def __init__(self, owner: str, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        if spec.deterministic:
            raise NotImplementedError(f"attnops: backend {owner} is not batch-invariant over an FP4 cache")
        super().__init__(owner, spec, limits, device, TorchNativeAttnBackend.softmax)
        self._on_cpu = device.type == "cpu"

    def _kernel_takes(self, seqlen_q: int) -> bool:
        """Whether the device has a kernel for so many tokens of each request; the CPU's takes any."""
        spec = self.spec
        rows = seqlen_q * spec.num_q_heads // spec.num_kv_heads
        fits = spec.head_dim == spec.v_head_dim and spec.head_dim in (64, 128) and rows <= MOST_ROWS
        return self._on_cpu or (spec.dtype in SIXTEEN_BIT and (spec.is_mla or fits))

    @in_one_thread
    def attend(self, call: LayerCall) -> None:
        layer, batch, pool = call.layer, call.batch, call.batch.token_to_kv_pool
        plain = batch.tree_mask is None and not batch.draft_steps and not layer.attention_chunk_size
        plain = plain and is_causal(layer) and self._kernel_takes(batch.tokens_per_request)
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
