"""Whether a pool is the one that a backend was built for."""

from __future__ import annotations

import torch

from attnops.pools.deepseek_v4 import DeepSeekV4TokenToKVPool
from attnops.pools.kv_cache import MLA_FP8_ROW_BYTES, KVCache, MHATokenToKVPool, MLATokenToKVPool
from attnops.pools.sliding_window import SWAKVPool
from attnops.pools.sparse import SCALE_BYTES, DSATokenToKVPool
from attnops.types import AttentionSpec, TokenPool


def reason_against(pool: TokenPool, spec: AttentionSpec, device: torch.device) -> str:
    """What of a pool does not fit a model, in one sentence; empty: it fits.

    Pages of another size would be read at wrong places, and no op sees that. So a backend asks before the first step
    with a pool, and again when its buffers were replaced.
    """
    if not isinstance(pool, KVCache):  # a pool of the engine's own: what it says of itself
        return _difference("the pool", "page_size", spec.page_size, pool.page_size)
    if isinstance(pool, DeepSeekV4TokenToKVPool) or spec.compress_ratios:
        return _reason_against_compressed(pool, spec, device)
    if isinstance(pool, MLATokenToKVPool) != spec.is_mla:
        wanted = "an MLATokenToKVPool" if spec.is_mla else "an MHATokenToKVPool or SWAKVPool"
        return f"the pool must be {wanted}, got {type(pool).__name__}"
    reasons = [_difference("the pool", "page_size", spec.page_size, pool.page_size)]
    reasons += [_reason_against_pages(*buffer, spec, device) for buffer in _buffers(pool)]
    if isinstance(pool, DSATokenToKVPool):
        reasons += [_reason_against_index(pages, pool, device) for pages in pool.index_k_with_scale_buffer]
    return next(filter(None, reasons), "")


def _buffers(pool: KVCache) -> list[tuple[str, torch.Tensor, int]]:
    """Name, pages, and how many there must be: tokens of a page that is missing would be left out without a word."""
    if isinstance(pool, SWAKVPool):
        return [*_buffers(pool.full_kv_pool), *_buffers(pool.swa_kv_pool)]
    if isinstance(pool, MLATokenToKVPool):
        return [("kv_buffer", pages, pool.num_pages) for pages in pool.kv_buffer]
    if isinstance(pool, MHATokenToKVPool):
        sides = {"k_buffer": pool.k_buffer, "v_buffer": pool.v_buffer}
        return [(name, pages, pool.num_pages) for name, side in sides.items() for pages in side]
    return []


def _reason_against_pages(
    name: str, pages: torch.Tensor, num_pages: int, spec: AttentionSpec, device: torch.device
) -> str:
    if spec.is_mla:
        row = MLA_FP8_ROW_BYTES if spec.cache_dtype == torch.uint8 else spec.head_dim
        dims = {"page_size": spec.page_size, "row": row}
    else:
        dims = {"page_size": spec.page_size, "head_num": spec.num_kv_heads}
        dims |= {"head_dim": spec.head_dim} if name == "k_buffer" else {"v_head_dim": spec.v_head_dim}
    if spec.cache_dtype == torch.float4_e2m1fn_x2:  # two values a byte
        last = list(dims)[-1]
        dims[last] = dims[last] // 2
    reason = _difference(name, "dtype", spec.cache_dtype, pages.dtype)
    reason = reason or _difference(name, "device", device, pages.device)
    if pages.dim() != 1 + len(dims):
        return reason or f"{name} must have {1 + len(dims)} dimensions, got shape {list(pages.shape)}"
    for axis, (dim, extent) in enumerate(dims.items(), 1):
        reason = reason or _difference(name, f"shape[{axis}] ({dim})", extent, pages.shape[axis])
    if not reason and pages.shape[0] < num_pages:
        return f"{name}'s shape[0] (num_pages) must be at least {num_pages}, got {pages.shape[0]}"
    return reason


def _reason_against_index(pages: torch.Tensor, pool: DSATokenToKVPool, device: torch.device) -> str:
    name, shape = "index_k_with_scale_buffer", (pool.page_size, pool.index_head_dim + SCALE_BYTES)
    reason = _difference(name, "dtype", torch.uint8, pages.dtype) or _difference(name, "device", device, pages.device)
    reason = reason or _difference(name, "shape[1:] (page_size, index_head_dim + 4)", shape, tuple(pages.shape[1:]))
    if not reason and (pages.stride(2) != 1 or (pages.shape[1] > 1 and pages.stride(1) != shape[1])):
        reason = f"{name} must have pages without gaps, got strides {list(pages.stride())}"
    return reason


def _reason_against_compressed(pool: KVCache, spec: AttentionSpec, device: torch.device) -> str:
    if not isinstance(pool, DeepSeekV4TokenToKVPool):
        return f"the pool must be a DeepSeekV4TokenToKVPool, got {type(pool).__name__}"
    if not spec.compress_ratios:
        return "the pool is a DeepSeekV4TokenToKVPool, and the model has no compress_ratios"
    reason = _difference("the pool", "page_size", spec.page_size, pool.page_size)
    reason = reason or _difference("the pool", "device", device, pool.device)
    if others := sorted(set(pool.compress_ratios) - set(spec.compress_ratios)):
        reason = reason or f"the pool has layers of ratio {others[0]}, compress_ratios are {spec.compress_ratios}"
    return reason


def _difference(owner: str, what: str, expected: object, got: object) -> str:
    return "" if expected == got else f"{owner}'s {what} must be {expected}, got {got}"
