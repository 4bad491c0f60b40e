"""MLA decode with absorbed queries: one or several query tokens per request against its paged latents."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.metadata.plan import MLA_HEAD_DIM_V, MlaDecodePlan
from attnops.metadata.plan_checks import check_plan_key
from attnops.ops._arguments import (
    add_sinks,
    by_request,
    check_requests,
    explain,
    lse_like,
    names_its_arguments,
    register_fake,
    shape_by_request,
)
from attnops.ops._pages import gathered, own_cells


@names_its_arguments
def mla_decode_plan(plan: MlaDecodePlan, cache_seqlens: Tensor) -> None:
    """Divide a batch's KV tiles over the parts of a plan, from the lengths alone, on the device.

    Args:
        plan: Allocated by `MlaDecodePlan.allocate`. `tile_scheduler_metadata` and `num_splits` are rewritten.
        cache_seqlens: int32 ``[B]``, the new tokens included; below zero counts as zero.

    Raises:
        RuntimeError, ValueError: naming the argument that does not fit.
    """
    check_requests("mla_decode_plan", plan.batch_size, cache_seqlens)
    torch.ops.attnops.mla_decode_plan.default(
        plan.tile_scheduler_metadata,
        plan.num_splits,
        cache_seqlens,
        plan.seqlen_q,
        plan.num_q_heads,
        plan.window_left,
        plan.fixed_split_tokens,
    )


def mla_decode(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    plan: MlaDecodePlan,
    *,
    softmax_scale: float,
    q_pe: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    tree_keys: int = 0,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    sinks_in_lse: bool = False,
    report: Tensor | None = None,
    fp8_products: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each request's newest tokens to its whole cache of latents, themselves included.

    Args:
        q: ``[B, S_q, H_q, 576]`` or ``[B * S_q, H_q, 576]`` (float32, float16, bfloat16), last dim dense: 512 absorbed
            into the latent space, then 64 of rope. With `q_pe`, only the 512. Row i of a request is its token
            ``cache_seqlens - S_q + i``.
        kv_pages: ``[P, page_size, 576]`` in q's dtype; or float8_e4m3fn or float8_e5m2 with `kv_scale`. Or uint8
            ``[P, page_size, 656]``, rows of 512 e4m3, 4 float32 scales (one per 128) and 64 bfloat16. Last dim dense,
            any other strides, any page size. The first 512 of a row are also its value. The new tokens are stored
            already (`ops.store_mla_kv`).
        plan: Made by `mla_decode_plan` for these `cache_seqlens` and this geometry; its scratch is overwritten. In
            batch-invariant mode the plan may have no room for a request longer than its `max_seqlen_k`. The rows of
            such a request are NaN, and `report` records a fault.
        softmax_scale: Multiplies ``<q, k>``. A model's is rarely ``1 / sqrt(576)``, so there is no default.
        q_pe: ``[B, S_q, H_q, 64]`` or ``[B * S_q, H_q, 64]`` in q's dtype, last dim dense: the rope part, not copied.
        kv_scale: float32 ``[1]``, for float8 only: real value = stored x scale; 1 when None. On a GPU pages of
            float8_e5m2 are copied in q's dtype, with the scale in them.
        out: Destination in q's leading shape and dtype with 512, last dim dense; allocated when None.
        fp8_products: Over float8_e4m3fn pages, lets kernels round q and the probabilities to e4m3 and multiply on the
            e4m3 units. That is faster, and off by some 4 % instead of 0.3 %. Kernels that have no need of it do not.
        page_table, cache_seqlens, kv_indptr, causal, window_left: As of `xqa_decode`.
        logit_cap, sinks, tree_mask, tree_keys, lse, return_lse, sinks_in_lse, report: As of `xqa_decode`.

    Returns:
        ``(out, lse)``, lse natural log, None unless asked for. A row that sees no key has ``out = 0``, ``lse = -inf``.

    Raises:
        TypeError: naming the argument that is no tensor, plan or number.
        ValueError: the plan was allocated for another geometry, which q's rank or batch does not fit.
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit. On the CPU also when
            the plan is not the one of these `cache_seqlens`.

    Source: absorbed MLA of DeepSeek-V2 (arXiv:2405.04434), section 2.1; split-KV as in FlashDecoding.
    """
    try:
        shape = shape_by_request("mla_decode", q, plan.seqlen_q)
        requests, seqlen_q, num_q_heads, _ = shape
        if (
            requests != plan.batch_size
            or seqlen_q != plan.seqlen_q
            or num_q_heads != plan.num_q_heads
            or window_left != plan.window_left
        ):
            key = (requests, seqlen_q, num_q_heads, window_left)
            check_plan_key("mla_decode", plan, dict(zip(plan.key, key, strict=True)), "q and window_left")
        if out is None:
            out = q.new_empty(*q.shape[:-1], MLA_HEAD_DIM_V)
        lse = lse_like(q, lse, return_lse or sinks_in_lse)
        if q_pe is not None:
            q_pe = by_request("mla_decode", "q_pe", q_pe, shape, 3)
        if tree_mask is not None:
            tree_mask = by_request("mla_decode", "tree_mask", tree_mask, shape, 2)

        if kv_pages.dtype == torch.float8_e5m2 and kv_pages.device.type != "cpu":
            kv_pages, page_table, kv_scale = widened(kv_pages, page_table, q.dtype, kv_scale)

        torch.ops.attnops.mla_decode.default(
            out if out.dim() == 4 else by_request("mla_decode", "out", out, shape, 3),
            lse if lse is None or lse.dim() == 3 else by_request("mla_decode", "lse", lse, shape, 2),
            q if q.dim() == 4 else q.view(shape),
            q_pe,
            kv_pages,
            page_table,
            kv_indptr,
            cache_seqlens,
            plan.tile_scheduler_metadata,
            plan.num_splits,
            plan.out_partial,
            plan.lse_partial,
            plan.semaphores,
            softmax_scale,
            causal,
            window_left,
            logit_cap,
            sinks,
            tree_mask,
            kv_scale,
            plan.fixed_split_tokens,
            report,
            fp8_products,
            tree_keys,
        )
        if sinks_in_lse:
            add_sinks(lse, sinks)
        return out, lse
    except Exception as error:
        explain(error, "attnops::mla_decode", mla_decode, locals())
        raise


def widened(
    kv_pages: Tensor, page_table: Tensor, dtype: torch.dtype, kv_scale: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    """Pages of e5m2, which no CUDA kernel reads, in q's dtype: a copy of those that the table names, and its table."""
    pages = gathered(kv_pages, page_table)
    return (pages.to(dtype) if kv_scale is None else (pages.float() * kv_scale).to(dtype)), own_cells(page_table), None


register_fake("mla_decode_plan")
register_fake("mla_decode")
