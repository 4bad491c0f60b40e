"""Attention of ragged batches: prefill over ragged keys, and prefill or extend over paged keys with a prefix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops.metadata.block_plan import BlockPrefillPlan
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan_checks import check_plan_key
from attnops.ops._arguments import names_its_arguments, register_fake
from attnops.ops._block_prefill import prefill_blocks, refuse_with_blocks
from attnops.ops._prefill_calls import (
    attend_pages,
    attend_ragged,
    dtype_of_results,
    in_vectors,
    order_tiles,
    queries_of,
)
from attnops.ops.xqa_decode import xqa_decode, xqa_decode_chunks, xqa_decode_plan

_DECODE_DTYPES = (torch.bfloat16, torch.float16)


@names_its_arguments
def fmha_plan(
    plan: FmhaPlan, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, cache_seqlens: Tensor | None = None
) -> None:
    """Order a batch's query tiles, longest first, from the lengths alone, on the device; a GPU also cuts long ones.

    Args:
        plan: Allocated by `FmhaPlan.allocate`; `tile_order` and `pieces` are rewritten.
        cu_seqlens_q: int32 ``[B + 1]``: request b owns query tokens ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])``.
        cu_seqlens_k: int32 ``[B + 1]``, of `fmha_varlen`'s keys; or
        cache_seqlens: int32 ``[B]``, of `fmha_paged`'s. Neither: as many keys as queries.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also when the plan is too small for the batch.

    Source: longest processing time first (Graham 1969) over binned costs, a stable counting sort.
    """
    order_tiles(plan, cu_seqlens_q, cu_seqlens_k, cache_seqlens)
    decode, chunks = plan.decode, plan.chunks
    if decode is not None and plan.decodes(cu_seqlens_q.shape[0] - 1):
        if cache_seqlens is None:
            cache_seqlens = (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).diff()
        if chunks is not None:
            xqa_decode_chunks(chunks.table, cu_seqlens_q, cache_seqlens, decode.seqlen_q, causal=plan.causal)
            cache_seqlens = chunks.cache_seqlens
        xqa_decode_plan(decode, cache_seqlens)


def _destinations(
    q: Tensor, head_dim_v: int, out: Tensor | None, lse: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], head_dim_v, dtype=dtype_of_results(q))
    if lse is None and return_lse:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return out, lse


@names_its_arguments
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    plan: FmhaPlan,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every request of a ragged batch over its own ragged keys.

    Args:
        q: ``[T, H_q, D_qk]`` (float32, float16, bfloat16; float8_e4m3fn with k and v of it, which GPUs other than
            sm_90 take as a copy in bfloat16). Its last dim is dense, other strides are free, as in k, v, out: slices of
            a fused projection pass as they are. Both head dims are multiples of 8 in [32, 576].
        k, v: ``[T_k, H_kv, D_qk]``, ``[T_k, H_kv, D_v]`` in q's dtype, or both float8_e4m3fn or float8_e5m2 (slow on
            the CPU). ``H_q`` is a multiple of ``H_kv``; query head h uses KV head ``h // (H_q / H_kv)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``: where each request's queries and keys begin. Empty requests are
            legal. Rows of q behind the last request are padding: not read, zeros and ``-inf`` in the results.
        plan: Made by `fmha_plan` for these lengths.
        softmax_scale: Multiplies ``<q, k>``; ``1 / sqrt(D_qk)`` when None.
        causal: Bottom-right aligned: query i of S_q sees keys up to ``S_k - S_q + i``, its position p.
        window_left, window_right: Keys at positions ``[p - window_left, p + window_right]``; -1: off.
        logit_cap: ``cap * tanh(score / cap)`` on scaled scores; 0: off.
        sinks: float32 ``[H_q]``, one more logit per head, with no value; `lse` leaves it out.
        tree_mask: uint8 ``[T, >= ceil(max S_q / 8)]``, little-endian bits. Query i sees new token j of its request when
            bit j is set, in place of the causal rule. Keys before the new tokens stay visible. Windows apply too.
        hidden_keys: int32 ``[T, 2]``: query i does not see keys ``[hidden_keys[i, 0], hidden_keys[i, 1])`` of its
            request, whatever else it may. Within a request neither bound falls from a query to the next. Tiles of keys
            that no query of a tile sees are not read. Keys that nobody sees must not be NaN.
        k_scale, v_scale: float32 ``[1]`` or ``[H_kv]``: real value = stored x scale. A scale of
            float8_e4m3fn queries is multiplied into k_scale.
        out: Destination ``[T, H_q, D_v]`` in q's dtype, bfloat16 for float8_e4m3fn; allocated when None.
        lse: float32 destination ``[T, H_q]``, contiguous, written when given; allocated when None and `return_lse`.
        report: int32 ``[8]`` of the checked mode (core/report.h).

    Returns:
        ``(out, lse)``, lse natural log, None unless asked for. A row that sees no key has ``out = 0``, ``lse = -inf``.
        A request's bits do not depend on the rest of the batch, unless the plan cuts tiles (`split_keys`).

    Raises:
        ValueError: the plan was allocated for another geometry.
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit. On the CPU also when
            the plan is not the one of these `cu_seqlens_q`.

    Source: the online softmax of FlashAttention-2 (arXiv:2307.08691), with the rarely moving reference of
    FlashAttention-4.
    """
    if causal != plan.causal or window_left != plan.window_left:
        check_plan_key("fmha_varlen", plan, {"causal": causal, "window_left": window_left}, "causal and window_left")
    if q.dtype == torch.float8_e4m3fn:
        q = queries_of(q)
    out, lse = _destinations(q, v.shape[-1], out, lse, return_lse)
    attend_ragged(
        out,
        lse,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
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
    return out, lse


@names_its_arguments
def fmha_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    plan: FmhaPlan | BlockPrefillPlan,
    *,
    block_list: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    hidden_keys: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every request's new tokens over its whole paged cache: prefill and extend with a prefix.

    Args:
        q: ``[T, H_q, D_qk]``; the new tokens of a request are its last ones. As in `fmha_varlen`.
        k_pages, v_pages: ``[P, page_size, H_kv, D_qk]``, ``[P, page_size, H_kv, D_v]`` in q's dtype, or both
            float8_e4m3fn or float8_e5m2, last dim dense, any other strides, any page size. The new tokens are stored
            already (`ops.store_kv`).
        page_table: int32 ``[B, max_pages]``; or, with `kv_indptr`, the flat ``[num_indices]``. Cells beyond a request's
            length, or before every window, are not read.
        cache_seqlens: int32 ``[B]``, the new tokens included; below zero counts as zero.
        cu_seqlens_q: int32 ``[B + 1]``: where each request's queries begin.
        plan: Made by `fmha_plan` for these lengths.
        block_list: int32 ``[B, H_kv, N]``: a KV head attends to the keys of these blocks alone, as of
            `build_block_tables`. With `causal`, the blocks of a request's new tokens are in, listed or not. The plan
            is a `BlockPrefillPlan` then, which the call fills. Without windows. All KV heads are one launch of
            attention. Each has its own with sinks, a tree mask, a scale for each head, or rows beyond the plan's
            scratch. So it is where strides of k_pages and v_pages have other ratios, or 2^31 pages are too few. Rows in
            front of the first request may get zeros and ``-inf``, as those behind the last one do.
        kv_indptr: int32 ``[B + 1]``: request b owns the cells ``[kv_indptr[b], kv_indptr[b + 1])`` of `page_table`.
        report: int32 ``[8]`` of the checked mode: page indices outside the pool and lengths beyond the table are
            recorded there, and skipped.

        The other arguments are those of `fmha_varlen`.

    Returns:
        ``(out, lse)`` as `fmha_varlen`.

    Raises:
        ValueError: the plan was allocated for another geometry.
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    if q.dtype == torch.float8_e4m3fn:
        q = queries_of(q)
    if block_list is not None or isinstance(plan, BlockPrefillPlan):
        refuse_with_blocks(plan, block_list, window_left, window_right, hidden_keys)
        assert block_list is not None and isinstance(plan, BlockPrefillPlan)
        out, lse = _destinations(q, v_pages.shape[-1], out, lse, return_lse)
        options = {"softmax_scale": softmax_scale, "causal": causal, "logit_cap": logit_cap, "tree_mask": tree_mask}
        pages = (k_pages, v_pages, page_table, kv_indptr, cache_seqlens)
        by_head = (sinks, k_scale, v_scale)
        prefill_blocks(q, *pages, cu_seqlens_q, plan, block_list, out, lse, report, *by_head, options)
        return out, lse
    if causal != plan.causal or window_left != plan.window_left:
        check_plan_key("fmha_paged", plan, {"causal": causal, "window_left": window_left}, "causal and window_left")
    if plan.decode is not None and _suits_decode(
        plan, q, k_pages, v_pages, kv_indptr, cu_seqlens_q, causal, window_right, tree_mask, hidden_keys, report
    ):
        chunks = plan.chunks
        return xqa_decode(
            q,
            k_pages,
            v_pages,
            page_table,
            cache_seqlens if chunks is None else chunks.cache_seqlens,
            plan.decode,
            kv_indptr=kv_indptr,
            cu_seqlens_q=cu_seqlens_q if chunks is None else chunks.cu_seqlens_q,
            table_rows=None if chunks is None else chunks.table_rows,
            softmax_scale=softmax_scale,
            causal=causal,
            window_left=window_left,
            logit_cap=logit_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
        )
    out, lse = _destinations(q, v_pages.shape[-1], out, lse, return_lse)
    attend_pages(
        out,
        lse,
        q,
        k_pages,
        v_pages,
        page_table,
        kv_indptr,
        cache_seqlens,
        cu_seqlens_q,
        plan,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logit_cap=logit_cap,
        sinks=sinks,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        report=report,
        hidden_keys=hidden_keys,
    )
    return out, lse


def _suits_decode(
    plan: FmhaPlan,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_indptr: Tensor | None,
    cu_seqlens_q: Tensor,
    causal: bool,
    window_right: int,
    tree_mask: Tensor | None,
    hidden_keys: Tensor | None,
    report: Tensor | None,
) -> bool:
    """Whether `xqa_decode` has a kernel for a call of few tokens: csrc/xqa_decode/sm90/limits.h, reject_ragged.

    A compiler does not know addresses, so what it traces goes by prefill's kernels. Chunks of requests share rows of
    the page table, which flat indices do not have.
    """
    shape, keys, decode = q.shape, k_pages.shape, plan.decode
    return (
        decode is not None
        and not torch.compiler.is_compiling()
        and tree_mask is None
        and hidden_keys is None
        and report is None
        and (causal or window_right < 0)
        and len(shape) == 3
        and len(keys) == 4
        and shape[0] > 0
        and plan.decodes(cu_seqlens_q.shape[0] - 1)
        and (plan.chunks is None or kv_indptr is None)
        and (shape[1], keys[2]) == (decode.num_q_heads, decode.num_kv_heads)
        and shape[2] == keys[3] == v_pages.shape[3] == decode.head_dim
        and q.dtype in _DECODE_DTYPES
        and k_pages.dtype in (q.dtype, torch.float8_e4m3fn)
        and shape[2] * k_pages.element_size() % 16 == 0
        and all(map(in_vectors, (q, k_pages, v_pages)))
    )


for _op in ("fmha_plan", "fmha_varlen", "fmha_paged"):
    register_fake(_op)
