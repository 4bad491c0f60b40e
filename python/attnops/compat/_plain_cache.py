"""Calls of FlashAttention-3's cache function that need nothing before the op: for as little of the host as may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import FP8, as_int32, as_sinks, heads_first
from attnops.compat._extend import new_fmha_plan
from attnops.compat._kvcache import MAX_DECODE_QUERIES
from attnops.compat._wide import is_wide
from attnops.metadata.plan import XqaDecodePlan
from attnops.metadata.plan_checks import MAX_CUTS

NAME = "flash_attn_with_kvcache"


def plain_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    bounds: Tensor | None,
    window: Any,
    causal: bool,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    num_splits: int,
    sinks: Tensor | None,
    return_lse: bool,
) -> Any:
    """What the function returns; None where the call is not as plain as that."""
    if (q.dtype != k_cache.dtype and k_cache.dtype != FP8) or type(window) is not tuple or num_splits < 0:
        return None
    if k_descale is not None and not _is_shared(k_descale, k_cache):
        return None
    if v_descale is not None and not _is_shared(v_descale, k_cache):
        return None
    left, right = window
    if causal or right == 0:
        causal, right = True, -1
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_left": left,
        "logit_cap": softcap,
        "sinks": None if sinks is None else as_sinks(sinks, q.shape[-2], NAME),
        "k_scale": None if k_descale is None else k_descale[0].contiguous(),
        "v_scale": None if v_descale is None else v_descale[0].contiguous(),
        "return_lse": return_lse,
    }
    lens = as_int32(NAME, "cache_seqlens", lens, q.device)
    if bounds is None:
        if right >= 0 or q.dim() != 4 or q.shape[1] > MAX_DECODE_QUERIES or is_wide(q.shape[3], v_cache.shape[3]):
            return None
        plan = XqaDecodePlan.allocate(
            q.shape[0],
            num_q_heads=q.shape[2],
            num_kv_heads=k_cache.shape[2],
            head_dim=q.shape[3],
            seqlen_q=q.shape[1],
            window_left=left,
            fixed_split_tokens=-min(num_splits, MAX_CUTS),
            page_size=k_cache.shape[1],
            device=q.device,
        )
        ops.xqa_decode_plan(plan, lens)
        out, lse = ops.xqa_decode(q, k_cache, v_cache, table, lens, plan, **options)
        return out if lse is None else (out, heads_first(lse))
    tiles = new_fmha_plan(q, k_cache.shape[2], bounds.shape[0] - 1, causal, left, num_splits == 0)
    ops.fmha_plan(tiles, bounds, cache_seqlens=lens)
    out, lse = ops.fmha_paged(q, k_cache, v_cache, table, lens, bounds, tiles, window_right=right, **options)
    return out if lse is None else (out, heads_first(lse))


def _is_shared(scale: Tensor, cache: Tensor) -> bool:
    """Whether a descale ``[B, H_kv]`` of an FP8 cache is the same for all requests by its strides, and as the op takes
    it."""
    if cache.dtype != FP8 or scale.dim() != 2 or scale.dtype != torch.float32 or scale.shape[0] == 0:
        return False
    return scale.shape[0] == 1 or scale.stride(0) == 0
