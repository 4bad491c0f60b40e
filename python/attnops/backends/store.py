"""Storing a step's new rows: the same for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.graph_buffers import PagedStep
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import AttentionBatch, TokenPool

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALED = (*FP8, torch.float4_e2m1fn_x2)  # a layer's scales belong to these


def heads(name: str, tensor: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """``[num_tokens, num_heads, head_dim]`` of a tensor that may have its heads side by side.

    Raises:
        ValueError: it has another shape.
    """
    shape = tensor.shape
    if len(shape) == 2 and shape[1] == num_heads * head_dim:
        return tensor.view(shape[0], num_heads, head_dim)
    if shape[1:] == (num_heads, head_dim):
        return tensor
    raise ValueError(
        f"attnops: {name} must have shape [num_tokens, {num_heads * head_dim}] or [num_tokens, {num_heads}, "
        f"{head_dim}], as its layer has {num_heads} heads of {head_dim}, got {list(shape)}"
    )


def uses_window_slots(layer: RadixAttention, pool: TokenPool) -> bool:
    """The layer's pages are those of a sliding-window pool, so its slots and page table are the translated ones."""
    return isinstance(pool, SWAKVPool) and pool.is_windowed(layer.layer_id)


def store_kv(
    layer: RadixAttention,
    batch: AttentionBatch,
    step: PagedStep,
    k: Tensor,
    v: Tensor,
    report: Tensor | None = None,
) -> None:
    """K and V of the step's tokens into the layer's pages."""
    pool, loc = batch.token_to_kv_pool, batch.out_cache_loc
    if pool is not None and uses_window_slots(layer, pool):
        loc = step.window_out_cache_loc
    if loc is None:
        raise ValueError("attnops: save_kv_cache=True needs out_cache_loc in the batch")
    store_rows(layer, pool, loc, k, v, report)


def store_rows(
    layer: RadixAttention,
    pool: TokenPool | None,
    loc: Tensor,
    k: Tensor,
    v: Tensor,
    report: Tensor | None,
) -> None:
    """K and V into the slots `loc` of the layer's pages."""
    if not isinstance(pool, MHATokenToKVPool | SWAKVPool):
        raise ValueError(f"attnops: a layer with K and V cannot store them in a {type(pool).__name__}")
    k = heads("k", k, layer.num_kv_heads, layer.head_dim)
    v = heads("v", v, layer.num_kv_heads, layer.v_head_dim)
    k_scale, v_scale = (layer.k_scale, layer.v_scale) if pool.dtype in SCALED else (None, None)
    pool.set_kv_buffer(layer, loc, k, v, k_scale, v_scale, report)


def store_mla(
    layer: RadixAttention,
    batch: AttentionBatch,
    latent: Tensor,
    k_rope: Tensor | None,
    report: Tensor | None = None,
) -> None:
    """Latents of the step's tokens into the layer's pages."""
    pool = batch.token_to_kv_pool
    if not isinstance(pool, MLATokenToKVPool):
        raise ValueError(f"attnops: an MLA layer cannot store latents in a {type(pool).__name__}")
    if batch.out_cache_loc is None:
        raise ValueError("attnops: save_kv_cache=True needs out_cache_loc in the batch")
    if k_rope is not None:
        k_rope = k_rope.reshape(k_rope.shape[0], -1)
    kv_scale = layer.k_scale if pool.dtype in SCALED else None
    pool.set_mla_kv_buffer(layer, batch.out_cache_loc, latent.reshape(latent.shape[0], -1), k_rope, kv_scale, report)
