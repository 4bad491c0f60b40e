"""`sgl_kernel.flash_mla`: FlashMLA's functions with the argument order of that fork."""

from __future__ import annotations

from torch import Tensor

from attnops.compat import flash_mla
from attnops.compat._convert import to_log2
from attnops.compat._errors import names_the_peers
from attnops.compat.flash_mla import FlashMLASchedMeta, get_mla_metadata

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


@names_the_peers("flash_mla_with_kvcache")
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | FlashMLASchedMeta,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attnops.compat.flash_mla.flash_mla_with_kvcache`; the descales stand before `is_fp8_kvcache` here."""
    return flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        is_fp8_kvcache,
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        descale_q=descale_q,
        descale_k=descale_k,
    )


@names_the_peers("flash_mla_sparse_fwd", softmax_scale="sm_scale", sinks="attn_sink")
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attnops.compat.flash_mla.flash_mla_sparse_fwd`, whose max_logits and lse are in base 2 here."""
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return out, to_log2(max_logits), to_log2(lse)
