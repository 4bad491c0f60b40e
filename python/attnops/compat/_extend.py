"""Calls of `attnops.ops.fmha_paged` and `attnops.ops.fmha_varlen` with a plan of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import FP8
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.ops._pages import gathered, own_cells


def new_fmha_plan(
    q: Tensor, num_kv_heads: int, batch_size: int, causal: bool, window_left: int, split_keys: bool = True
) -> FmhaPlan:
    """Memory of a plan for these queries. Without `split_keys` a request's bits do not depend on its batch."""
    return FmhaPlan.allocate(
        q.shape[0],
        batch_size,
        causal=causal,
        window_left=window_left,
        num_q_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
        split_keys=split_keys,
        device=q.device,
    )


def extend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    lens: Tensor,
    bounds: Tensor,
    *,
    indptr: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    split_keys: bool = True,
    out: Tensor | None = None,
    plan: FmhaPlan | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Out and natural lse of queries ``[T, H, D]`` over a paged cache; `bounds` is where each request's begin.

    Without a plan it makes its own.

    A cache whose dtype the op does not take beside q's is read from a copy of the pages in use.
    """
    if q.dtype.itemsize == 1:
        q = q.to(torch.bfloat16)
    dtype = q.dtype
    if out is not None and out.dtype != dtype:
        out = None  # the caller casts
    if k_pages.dtype not in (dtype, FP8):
        common = dtype if k_pages.dtype.itemsize == 1 else torch.float32
        q, k_pages, v_pages = q.to(common), gathered(k_pages, cells).to(common), gathered(v_pages, cells).to(common)
        cells, out = own_cells(cells), None
    if plan is None:
        plan = new_fmha_plan(q, k_pages.shape[2], bounds.shape[0] - 1, causal, window_left, split_keys)
        ops.fmha_plan(plan, bounds, cache_seqlens=lens)
    result, lse = ops.fmha_paged(
        q,
        k_pages,
        v_pages,
        cells,
        lens,
        bounds,
        plan,
        kv_indptr=indptr,
        causal=causal,
        window_left=window_left,
        out=out,
        **options,
    )
    return result if result.dtype == dtype else result.to(dtype), lse


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    bounds_k: Tensor,
    *,
    causal: bool = True,
    window_left: int = -1,
    split_keys: bool = True,
    plan: FmhaPlan | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Out and natural lse of ragged queries over ragged keys. Without a plan it makes its own.

    Keys whose dtype the op does not take beside q's are converted.
    """
    dtype = q.dtype
    if k.dtype not in (dtype, FP8) or v.dtype != k.dtype:
        common = dtype if max(k.dtype.itemsize, v.dtype.itemsize) == 1 else torch.float32
        q, k, v = q.to(common), k.to(common), v.to(common)
    if plan is None:
        plan = new_fmha_plan(q, k.shape[1], bounds.shape[0] - 1, causal, window_left, split_keys)
        ops.fmha_plan(plan, bounds, bounds_k)
    out, lse = ops.fmha_varlen(q, k, v, bounds, bounds_k, plan, causal=causal, window_left=window_left, **options)
    return out if out.dtype == dtype else out.to(dtype), lse
