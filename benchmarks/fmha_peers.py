"""Who runs a cell of bench_fmha.py: attnops, and the peers that this machine has.

A peer that is not installed, or refuses the cell, raises; bench_fmha.py names it. FA3 out of a pack of selected kernels
(`PEERS_COMMON` is set) ends the process when a kernel is missing, so those cells are refused here.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable
from unittest import mock

import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from fmha_cells import BF16, DEVICE, FP8, Cell

Step = Callable[[int], torch.Tensor]  # runs on the r-th slice of the pools, returns out, [T, H, D] or [B, H, S, D]
PORTABLE = "attnops sm_80"  # runs when it is asked for
PACKED_FA3 = {(64, 64, BF16), (128, 128, BF16), (256, 256, BF16), (192, 128, BF16), (128, 128, FP8)}


def allocate_plan(cell: Cell) -> FmhaPlan:
    return FmhaPlan.allocate(
        sum(cell.q_lens),
        len(cell.q_lens),
        causal=cell.causal,
        window_left=cell.window_left,
        num_q_heads=cell.heads[0],
        num_kv_heads=cell.heads[1],
        head_dim=max(cell.head_dim, cell.head_dim_v),
        max_seqlen_q=max(cell.q_lens),
        device=DEVICE,
    )


def fill_plan(cell: Cell, plan: FmhaPlan) -> None:
    if cell.page:
        ops.fmha_plan(plan, cell.cu_q, cache_seqlens=cell.seqlens)
    else:
        ops.fmha_plan(plan, cell.cu_q, cell.cu_k)


def attnops(cell: Cell, plan_inside: str = "never") -> Step:
    """`plan_inside`: before which calls the plan is made again: never, first (slice 0), always."""
    plan = allocate_plan(cell)
    fill_plan(cell, plan)
    out = torch.empty(sum(cell.q_lens), cell.heads[0], cell.head_dim_v, dtype=cell.out_dtype, device=DEVICE)
    options = dict(
        causal=cell.causal,
        window_left=cell.window_left,
        window_right=cell.window_right,
        logit_cap=cell.logit_cap,
        sinks=cell.sink_logits,
        out=out,
    )

    def step(r: int) -> torch.Tensor:
        if plan_inside == "always" or (plan_inside == "first" and r == 0):
            fill_plan(cell, plan)
        if cell.page:
            return ops.fmha_paged(cell.q(r), *cell.kv(r), cell.page_table, cell.seqlens, cell.cu_q, plan, **options)[0]
        return ops.fmha_varlen(cell.q(r), *cell.kv(r), cell.cu_q, cell.cu_k, plan, **options)[0]

    return step


def attnops_portable(cell: Cell) -> Step:
    """By the kernels that every architecture from sm_80 on has."""
    plain = attnops(cell)

    def step(r: int) -> torch.Tensor:
        with mock.patch.dict(os.environ, {"ATTNOPS_CUDA_ARCH": "80"}):
            return plain(r)

    return step


def fa3(cell: Cell) -> Step:
    from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    kind = (cell.head_dim, cell.head_dim_v, cell.dtype)
    capped = cell.logit_cap and kind != (128, 128, BF16)
    if os.environ.get("PEERS_COMMON") and (kind not in PACKED_FA3 or capped):
        raise NotImplementedError("its pack lacks this kernel")
    if cell.kv_dtype != cell.dtype:
        raise NotImplementedError("takes q and K/V of one dtype")
    options = dict(
        softmax_scale=1 / math.sqrt(cell.head_dim),
        causal=cell.causal,
        window_size=(cell.window_left, 0 if cell.causal and cell.window_left >= 0 else cell.window_right),
        softcap=cell.logit_cap,
    )
    if cell.sink_logits is not None:
        options["sinks"] = cell.sink_logits.to(BF16)
    if cell.dtype == FP8:
        one = torch.ones(len(cell.q_lens), cell.heads[1], device=DEVICE)
        options |= dict(q_descale=one, k_descale=one, v_descale=one)
    if cell.page:
        paged = dict(cache_seqlens=cell.seqlens, page_table=cell.page_table, cu_seqlens_q=cell.cu_q)
        paged |= dict(max_seqlen_q=max(cell.q_lens), num_splits=0)
        return lambda r: flash_attn_with_kvcache(cell.q(r), *cell.kv(r), **paged, **options)
    bounds = (cell.cu_q, cell.cu_k, max(cell.q_lens), max(cell.k_lens))
    return lambda r: flash_attn_varlen_func(cell.q(r), *cell.kv(r), *bounds, **options)


def flashinfer(cell: Cell, backend: str) -> Step:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

    if cell.sinks or (cell.window_right >= 0 and not cell.causal):
        raise NotImplementedError("its plain kernels have no sinks and no right window")
    options = dict(
        causal=cell.causal,
        sm_scale=1 / math.sqrt(cell.head_dim),
        window_left=cell.window_left,
        logits_soft_cap=cell.logit_cap or None,
        q_data_type=cell.dtype,
        kv_data_type=cell.kv_dtype,
    )
    out = torch.empty(sum(cell.q_lens), cell.heads[0], cell.head_dim_v, dtype=cell.out_dtype, device=DEVICE)
    if cell.page:
        if os.environ.get("PEERS_COMMON") and backend == "fa3" and (cell.head_dim, cell.dtype) != (128, BF16):
            raise NotImplementedError("its pack lacks this kernel")
        if cell.head_dim != cell.head_dim_v:
            raise NotImplementedError("takes pages of one head dim")
        paged = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
        tables = (cell.cu_q, cell.kv_indptr, cell.kv_indices, cell.last_page_len)
        paged.plan(*tables, *cell.heads, cell.head_dim, cell.page, **options)
        return lambda r: paged.run(cell.q(r), cell.kv(r), out=out)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    options["o_data_type"] = cell.out_dtype
    ragged.plan(cell.cu_q, cell.cu_k, *cell.heads, cell.head_dim, cell.head_dim_v, **options)
    scales = tuple(torch.ones(h, device=DEVICE) for h in (cell.heads[0], *cell.heads[1:] * 2))
    scales = scales if cell.dtype == FP8 else ()
    return lambda r: ragged.run(cell.q(r), *cell.kv(r), *scales, out=out)


def sdpa(cell: Cell, backend: str) -> Step:
    """Dense batches alone: PyTorch's flash kernels, or cuDNN's."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    new, keys = set(cell.q_lens), set(cell.k_lens)
    plain = cell.window_left < 0 and cell.window_right < 0 and not cell.logit_cap and not cell.sinks
    if cell.page or len(new) > 1 or len(keys) > 1 or not plain or (cell.causal and new != keys):
        raise NotImplementedError("takes dense batches, plain or causal")
    if cell.dtype == FP8 or cell.kv_dtype != cell.dtype:
        raise NotImplementedError("takes 16-bit rows")
    kernel = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION

    def step(r: int) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (len(cell.q_lens), -1)).transpose(1, 2) for x in (cell.q(r), *cell.kv(r)))
        with sdpa_kernel([kernel] if DEVICE == "cuda" else list(SDPBackend.__members__.values())):
            return F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=len(set(cell.heads)) > 1)

    return step


def missing() -> list[str]:
    """Packages of peers that this machine lacks."""
    return [name for name in ("sgl_kernel", "flashinfer") if importlib.util.find_spec(name) is None]


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.zeros(768 << 20, dtype=torch.uint8, device=DEVICE)


def contenders(cell: Cell) -> list[tuple[str, Callable[[], Step]]]:
    """(name, how to prepare it); attnops is the first, then its portable kernels."""
    return [
        ("attnops", lambda: attnops(cell)),
        (PORTABLE, lambda: attnops_portable(cell)),
        ("FA3", lambda: fa3(cell)),
        ("FlashInfer fa3", lambda: flashinfer(cell, "fa3")),
        ("FlashInfer fa2", lambda: flashinfer(cell, "fa2")),
        ("SDPA cuDNN", lambda: sdpa(cell, "cudnn")),
        ("SDPA flash", lambda: sdpa(cell, "flash")),
    ]
