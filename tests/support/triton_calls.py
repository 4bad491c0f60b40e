"""Calls of the Triton ops on problems of `problems.py`: scratch is made full of NaN."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attnops import triton_kernels as tk
from attnops.triton_kernels.core.kernel import real_values

DEFAULTS = {"causal": True, "window_left": -1, "logit_cap": 0.0}


@triton.jit
def decode_bytes(out, stored, FP8: tl.constexpr):
    """All 256 values of an FP8 type, as the kernel sees them."""
    at = tl.arange(0, 256)
    tl.store(out + at, real_values(tl.load(stored + at), FP8, tl.float32))


def filled(*shape, dtype=torch.float32, device="cpu"):
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def pools(problem):
    """(k_pages, v_pages) of a problem with K and V, or with latents."""
    if hasattr(problem, "k_pages"):
        return problem.k_pages, problem.v_pages
    latent = problem.kv_pages.unsqueeze(2)
    return latent, latent[..., :512]


def scales(problem):
    if hasattr(problem, "k_pages"):
        return problem.k_scale, problem.v_scale
    return problem.kv_scale, problem.kv_scale


def decode(
    problem, *, max_splits=8, split_tile=32, fixed=False, q_pe_apart=False, tree_mask=None, tree_keys=0, sinks=None,
    **options,
):  # fmt: skip
    """(out, lse) of `triton_decode` with a plan of its own."""
    options = {**DEFAULTS, **options}
    q, (k, v), device = problem.q, pools(problem), problem.q.device
    seqlen_q = q.shape[0] // max(problem.batch_size, 1)
    num_splits = torch.full((problem.batch_size,), -7, dtype=torch.int32, device=device)
    programs = k.shape[2]
    tk.triton_decode_plan(
        num_splits, problem.cache_seqlens, seqlen_q, programs, max_splits, split_tile, fixed, options["window_left"]
    )
    tokens, heads = q.shape[:2]
    out, lse = filled(tokens, heads, v.shape[-1], dtype=q.dtype, device=device), filled(tokens, heads, device=device)
    partial = filled(tokens + 3, heads, max_splits, v.shape[-1], device=device)
    lse_partial = filled(tokens + 3, heads, max_splits, device=device)
    q_pe = None
    if q_pe_apart:
        q, q_pe = q[..., :512].contiguous(), q[..., 512:].contiguous()
    tk.triton_decode(
        out, lse, partial, lse_partial, q, q_pe, k, v, problem.page_table, problem.cache_seqlens, num_splits, seqlen_q,
        options["softmax_scale"], options["causal"], options["window_left"], options["logit_cap"], sinks, tree_mask,
        *scales(problem), split_tile, tree_keys,
    )  # fmt: skip
    return out, lse


def unified(problem, *, tile_tokens=64, sinks=None, **options):
    """(out, lse) of `triton_unified_extend`."""
    options = {**DEFAULTS, **options}
    q, (k, v) = problem.q, pools(problem)
    out, lse = _destinations(q, v)
    tk.triton_unified_extend(
        out, lse, q, None, k, v, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q, tile_tokens,
        options["softmax_scale"], options["causal"], options["window_left"], options["logit_cap"], sinks,
        *scales(problem),
    )  # fmt: skip
    return out, lse


def extend(problem, k_new, v_new, *, tile_tokens=64, sinks=None, **options):
    """(out, lse) of `triton_extend`."""
    options = {**DEFAULTS, **options}
    q, (k, v) = problem.q, pools(problem)
    out, lse = _destinations(q, v)
    tk.triton_extend(
        out, lse, q, None, k_new, v_new, k, v, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q,
        tile_tokens, options["softmax_scale"], options["causal"], options["window_left"], options["logit_cap"], sinks,
    )  # fmt: skip
    return out, lse


def ragged(problem, *, tile_tokens=64, sinks=None, **options):
    """(out, lse) of `triton_ragged_prefill`."""
    options = {**DEFAULTS, **options}
    out, lse = _destinations(problem.q, problem.v)
    tk.triton_ragged_prefill(
        out, lse, problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, tile_tokens,
        options["softmax_scale"], options["causal"], options["window_left"], options["logit_cap"], sinks,
    )  # fmt: skip
    return out, lse


def _destinations(q, v):
    return filled(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device), filled(*q.shape[:2], device=q.device)


def new_rows(problem):
    """(k, v) of the step's new tokens, taken from their pages; and the problem with these pages' rows made NaN."""
    k_pages, v_pages = pools(problem)
    k, v = [], []
    for request, length in enumerate(problem.cache_seqlens.tolist()):
        count = int(problem.cu_seqlens_q[request + 1] - problem.cu_seqlens_q[request])
        token = torch.arange(length - count, length)
        page = problem.page_table[request].cpu().long()[token // k_pages.shape[1]].to(k_pages.device)
        offset = (token % k_pages.shape[1]).to(k_pages.device)
        k.append(k_pages[page, offset])
        v.append(v_pages[page, offset].clone())
        k_pages[page, offset] = math.nan
        v_pages[page, offset] = math.nan
    return torch.cat(k), torch.cat(v)
