"""The prefill ops as they stand, for `ops.fmha` and for decode of many rows, which their kernels may serve."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops.environment import CUDA_ARCH
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan_parts import runs_hopper_kernels

# Looked up once: three names cost a tenth of a microsecond in each call.
attend_ragged = torch.ops.attnops.fmha_varlen.default
_order_tiles = torch.ops.attnops.fmha_plan.default
_attend_pages = torch.ops.attnops.fmha_paged.default


def order_tiles(
    plan: FmhaPlan, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, cache_seqlens: Tensor | None
) -> None:
    """`ops.fmha_plan` without the plan of `xqa_decode` that may belong to it."""
    _order_tiles(
        plan.tile_order,
        cu_seqlens_q,
        cu_seqlens_k,
        cache_seqlens,
        plan.tile_q,
        plan.causal,
        plan.window_left,
        plan.pieces,
        plan.works_per_tile,
        0,
        plan.cut_in_part,
    )


def attend_pages(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_indptr: Tensor | None,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    plan: FmhaPlan,
    *,
    softmax_scale: float | None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    report: Tensor | None = None,
    hidden_keys: Tensor | None = None,
) -> None:
    """`ops.fmha_paged` by its own kernels."""
    _attend_pages(
        out,
        lse,
        q,
        k_pages,
        v_pages,
        page_table,
        kv_indptr,
        cache_seqlens,
        cu_seqlens_q,
        plan.tile_order,
        plan.tile_q,
        1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale,
        causal,
        window_left,
        window_right,
        logit_cap,
        sinks,
        tree_mask,
        k_scale,
        v_scale,
        report,
        plan.semaphores,
        plan.pieces,
        plan.partial,
        hidden_keys,
    )


def dtype_of_results(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def queries_of(q: Tensor) -> Tensor:
    """q as its device's kernels take it. Hopper and CPUs multiply e4m3 queries; elsewhere they become bfloat16, which
    holds every value of theirs. ATTNOPS_CUDA_ARCH is heard, as in the kernels' choice."""
    if q.dtype != torch.float8_e4m3fn or q.device.type != "cuda":
        return q
    cap = CUDA_ARCH.value()
    return q if runs_hopper_kernels(q.device) and (cap is None or cap >= 90) else q.to(torch.bfloat16)


def in_vectors(rows: Tensor) -> bool:
    """Whether rows start on 16 bytes, and are within 64 GB."""
    steps, size = rows.stride(), rows.element_size()
    whole = all(step * size % 16 == 0 for step in steps[:-1]) and rows.data_ptr() % 16 == 0
    return whole and rows.shape[0] * steps[0] * size < 1 << 36
