"""One launch of the attention kernel, for all ops of this package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops.triton_kernels.core.kernel import attend_kernel
from attnops.triton_kernels.core.tiles import Tiles, choose_tiles, head_dim_parts, padded, shared_bytes

FP8_KINDS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a call asks for beside its tensors; as of `attnops.ops.xqa_decode`."""

    softmax_scale: float
    causal: bool = True
    window_left: int = -1
    logit_cap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Keys and values in pages ``[P, page_size, H_kv, D]``, and who owns them."""

    k: Tensor
    v: Tensor
    table: Tensor
    cache_seqlens: Tensor


def query_tiles(q: Tensor, num_kv_heads: int, head_dim: int, v_head_dim: int, seqlen_q: int, decode: bool) -> Tiles:
    group = q.shape[-2] // num_kv_heads
    limit = shared_bytes(q.device)
    return choose_tiles(seqlen_q, group, head_dim, v_head_dim, q.element_size(), limit, decode)


def attend(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    q_pe: Tensor | None,
    options: Options,
    tiles: Tiles,
    *,
    pages: Pages | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    seqlen_q: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    num_splits: Tensor | None = None,
    split_tile: int = 0,
    max_splits: int = 1,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    tree_keys: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Launches. Flat queries ``[T, H_q, D]``; `seqlen_q` each, or ragged by `cu_seqlens_q`.

    Args:
        new: ``k, v`` ``[T_k, H_kv, D]``: the step's own where there are pages, otherwise all keys, by `cu_seqlens_k`.
        tree_keys: Keys at the end of each request that `tree_mask` is over.
        num_splits: int32 ``[B]``: `out` and `lse` are then partial, ``[T, H_q, max_splits, ...]``.
    """
    num_tokens, num_q_heads = q.shape[:2]
    source = pages.k if pages is not None else new[0]  # type: ignore[index]
    num_kv_heads = source.shape[-2]
    head_dim, v_head_dim = source.shape[-1], (pages.v if pages is not None else new[1]).shape[-1]  # type: ignore[index]
    main, rest = head_dim_parts(head_dim)
    if q_pe is not None:
        main, rest = q.shape[-1], q_pe.shape[-1]
    elif rest:
        q_pe = q[..., main:]
    requests = (pages.cache_seqlens if pages is not None else cu_seqlens_k[1:]).shape[0]  # type: ignore[index]
    per_request = -(-seqlen_q // tiles.block_q)
    num_tiles = requests * per_request if seqlen_q else num_tokens // tiles.block_q + requests
    if num_tokens == 0 or num_tiles == 0:
        return
    fp8 = FP8_KINDS.get(source.dtype, 0)
    none = q  # a pointer that is never followed
    k_pages, v_pages = (none, none) if pages is None else (_bytes(pages.k), _bytes(pages.v))
    k_new, v_new = (none, none) if new is None else new
    table = none if pages is None else pages.table
    k_kind, v_kind = (_scale_kind(scale) if fp8 else 0 for scale in (k_scale, v_scale))
    split = num_splits is not None
    page_size = 0 if pages is None else pages.k.shape[1]
    grid = (num_tiles, num_kv_heads * tiles.head_blocks, max_splits if split else 1)
    attend_kernel[grid](
        out,
        none if lse is None else lse,
        q,
        none if q_pe is None else q_pe,
        k_pages,
        v_pages,
        k_new,
        v_new,
        table,
        none if pages is None else pages.cache_seqlens,
        none if cu_seqlens_q is None else cu_seqlens_q,
        none if cu_seqlens_k is None else cu_seqlens_k,
        none if num_splits is None else num_splits,
        none if sinks is None else sinks,
        none if tree_mask is None else tree_mask,
        none if k_scale is None else k_scale,
        none if v_scale is None else v_scale,
        options.softmax_scale,
        options.logit_cap,
        options.window_left,
        seqlen_q,
        requests,
        num_tokens,
        0 if pages is None else pages.k.shape[0],
        0 if pages is None else table.shape[1],
        num_tiles,
        tree_keys,
        q.stride(0),
        q.stride(1),
        0 if q_pe is None else q_pe.stride(0),
        0 if q_pe is None else q_pe.stride(1),
        *(k_pages.stride()[:3] if pages is not None else (0, 0, 0)),
        *(v_pages.stride()[:3] if pages is not None else (0, 0, 0)),
        *(k_new.stride()[:2] if new is not None else (0, 0)),
        *(v_new.stride()[:2] if new is not None else (0, 0)),
        table.stride(0) if pages is not None else 0,
        out.stride(0),
        out.stride(1),
        out.stride(2) if split else 0,
        lse.stride(0) if lse is not None else 0,
        lse.stride(1) if lse is not None else 0,
        0 if tree_mask is None else tree_mask.stride(0),
        0 if tree_mask is None else tree_mask.stride(1),
        HEAD_BLOCKS=tiles.head_blocks,
        GROUP=num_q_heads // num_kv_heads,
        BLOCK_H=tiles.block_h,
        BLOCK_Q=tiles.block_q,
        BLOCK_N=tiles.block_n,
        D=main,
        BLOCK_D=padded(main),
        DPE=rest,
        BLOCK_DPE=padded(rest) if rest else 1,
        DV=v_head_dim,
        BLOCK_DV=padded(v_head_dim),
        PAGE_SIZE=page_size,
        ONE_PAGE=page_size > 0 and page_size % tiles.block_n == 0 and split_tile % tiles.block_n == 0,
        SHARED=pages is not None and main == v_head_dim and _same_rows(pages.k, pages.v),
        PEEL=tiles.peel,
        UNIFORM=seqlen_q > 0,
        PAGED=pages is not None,
        NEW=new is not None,
        CAUSAL=options.causal,
        WINDOW=options.window_left >= 0,
        CAP=options.logit_cap != 0.0,
        SINKS=sinks is not None,
        FLIP=options.softmax_scale < 0,
        TREE=tree_mask is not None,
        FP8=fp8,
        K_SCALE=k_kind,
        V_SCALE=v_kind,
        LSE=lse is not None,
        SPLIT=split,
        SPLIT_TILE=split_tile,
        PRECISION=_precision(q),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _same_rows(k: Tensor, v: Tensor) -> bool:
    """Values are the first dimensions of keys, as MLA's are."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.dtype == v.dtype


def _bytes(pages: Tensor) -> Tensor:
    """FP8 pages as bytes, which every GPU can load; others as they are."""
    return pages.view(torch.uint8) if pages.dtype in FP8_KINDS else pages


def _precision(q: Tensor) -> str:
    """Of products: float32 is multiplied as such, other types know no difference."""
    if q.device.type == "cpu":
        return "interpreted"
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _scale_kind(scale: Tensor | None) -> int:
    """0: none; 1: one per tensor; 2: one per KV head."""
    return 0 if scale is None else 1 + (scale.numel() > 1)
