"""Paged GQA decode: one or several query tokens per request against its cached keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.metadata.block_plan import BlockDecodePlan
from attnops.metadata.plan import XqaDecodePlan
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
from attnops.ops._prefill_calls import attend_pages, order_tiles
from attnops.ops.block_lists import build_block_tables, unit_pages
from attnops.ops.merge_state import merge_state


@names_its_arguments
def xqa_decode_plan(plan: XqaDecodePlan, cache_seqlens: Tensor) -> None:
    """Divide a batch's KV tiles over the parts of a plan, from the lengths alone, on the device.

    Args:
        plan: Allocated by `XqaDecodePlan.allocate`; `tile_scheduler_metadata` and `num_splits` are rewritten.
        cache_seqlens: int32 ``[B]``, the new tokens included; below zero counts as zero.

    Raises:
        RuntimeError, ValueError: naming the argument that does not fit.
    """
    check_requests("xqa_decode_plan", plan.batch_size, cache_seqlens)
    torch.ops.attnops.xqa_decode_plan.default(
        plan.tile_scheduler_metadata,
        plan.num_splits,
        cache_seqlens,
        plan.seqlen_q,
        plan.num_kv_heads,
        plan.window_left,
        plan.fixed_split_tokens,
        plan.rows,
        plan.kv_bytes,
    )
    if plan.prefill is not None and plan.cu_seqlens_q is not None:
        order_tiles(plan.prefill, plan.cu_seqlens_q, None, cache_seqlens)


def xqa_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    plan: XqaDecodePlan | BlockDecodePlan,
    *,
    block_list: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    tree_keys: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    sinks_in_lse: bool = False,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each request's newest tokens to its whole paged cache, themselves included.

    Args:
        q: ``[B, S_q, H_q, D]`` or ``[B * S_q, H_q, D]`` (float32, float16, bfloat16), last dim dense. Row i of a
            request is its token ``cache_seqlens - S_q + i``. With `cu_seqlens_q`: ``[T, H_q, D]``.
        k_pages, v_pages: ``[P, page_size, H_kv, D]`` in q's dtype, or float8_e4m3fn or float8_e5m2 (slower), last dim
            dense, any other strides, any page size. The new tokens are stored already (`ops.store_kv`).
        page_table: int32 ``[B, max_pages]``; or, with `kv_indptr`, the flat ``[num_indices]``. Cells beyond a request's
            length are not read.
        cache_seqlens: int32 ``[B]``, the new tokens included. A request of length 0 gets zeros and ``-inf``.
        plan: Made by `xqa_decode_plan` for these `cache_seqlens` and this geometry; its scratch is overwritten.
        block_list: int32 ``[B, H_kv, N]``: a KV head attends to the keys of these blocks alone, as of
            `build_block_tables`. The plan is a `BlockDecodePlan` then, which the call fills. Tokens and heads of q, out
            and lse lie at one distance. Sinks of several KV heads round `out` a second time. Without trees and scales
            per head.
        kv_indptr: int32 ``[B + 1]``: request b owns the cells ``[kv_indptr[b], kv_indptr[b + 1])`` of `page_table`.
        cu_seqlens_q: int32 ``[B + 1]``, of a ragged batch: request b brings the tokens ``[cu_seqlens_q[b],
            cu_seqlens_q[b + 1])`` of q. They are its newest, up to the plan's `seqlen_q`, and may be none. Rows of q
            behind the last request get zeros and ``-inf``. Without windows, trees and block lists. A GPU must be a
            Hopper. It takes up to 64 rows (`seqlen_q` times heads of a group), 32 above head dim 128. Rows of q start
            on 16 bytes and have 16 bits, plans are balanced, and there is no `report`.
        softmax_scale: Multiplies ``<q, k>``; ``1 / sqrt(D)`` when None.
        causal: Row i sees keys up to its own position; False: all keys of the request.
        window_left: Keys at positions ``[p - window_left, p]``; -1: off. Must be the plan's.
        logit_cap: ``cap * tanh(score / cap)`` on scaled scores; 0: off.
        sinks: float32 ``[H_q]``, a logit per head with no value, or None.
        tree_mask: uint8 ``[B, S_q, ceil(S_q / 8)]`` (or ``[B * S_q, ...]``), little-endian bits. Row i sees new token j
            when bit j is set, in place of the causal rule. Tokens before the new ones stay visible. Windows apply too.
        tree_keys: M, at least S_q: the mask is ``[B, S_q, ceil(M / 8)]`` over the last M keys, and the new tokens stand
            anywhere among them. So the branches of a draft loop are rows of one request. 0: S_q. Above S_q, no window.
        k_scale, v_scale: float32 ``[1]`` or ``[H_kv]``: real value = stored x scale.
        out: Destination in q's shape and dtype, last dim dense; allocated when None.
        lse: float32 destination in q's shape without D, contiguous, written when given; allocated when None and
            `return_lse`.
        sinks_in_lse: Add the sinks to the returned lse.
        report: int32 ``[8]`` of the checked mode: bad page indices and lengths are recorded there and skipped.

    Returns:
        ``(out, lse)``, lse natural log, None unless asked for. A row that sees no key has ``out = 0``, ``lse = -inf``.

    Raises:
        TypeError: naming the argument that is no tensor, plan or number.
        ValueError: q's rank is neither, or the plan was allocated for another geometry.
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit. On the CPU also when
            the plan is not the one of these `cache_seqlens`.

    Source: the online softmax of FlashAttention-2 (arXiv:2307.08691) over a split-KV plan as in FlashDecoding.
    """
    try:
        if block_list is not None or isinstance(plan, BlockDecodePlan):
            _refuse_with_blocks(plan, block_list, tree_mask, k_scale, v_scale, tree_keys)
            if cu_seqlens_q is not None:
                raise ValueError("attnops::xqa_decode: cu_seqlens_q must be None with block_list")
            assert block_list is not None and isinstance(plan, BlockDecodePlan)
            if out is None:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
            lse = lse_like(q, lse, return_lse or sinks_in_lse)
            options = {"softmax_scale": softmax_scale, "logit_cap": logit_cap, "k_scale": k_scale, "v_scale": v_scale}
            pages = (k_pages, v_pages, page_table, kv_indptr, cache_seqlens)
            _decode_blocks(q, *pages, plan, block_list, causal, window_left, sinks, out, lse, report, options)
            if sinks_in_lse:
                add_sinks(lse, sinks)
            return out, lse
        seqlen_q = plan.seqlen_q
        if cu_seqlens_q is None:
            shape = shape_by_request("xqa_decode", q, seqlen_q)
        else:
            shape = _shape_of_ragged(q, cu_seqlens_q, seqlen_q)
        requests, seqlen_q, num_q_heads, head_dim = shape
        if (
            requests != plan.batch_size
            or seqlen_q != plan.seqlen_q
            or num_q_heads != plan.num_q_heads
            or head_dim != plan.head_dim
            or k_pages.shape[2] != plan.num_kv_heads
            or window_left != plan.window_left
        ):
            key = (requests, seqlen_q, num_q_heads, k_pages.shape[2], head_dim, window_left)
            check_plan_key("xqa_decode", plan, dict(zip(plan.key, key, strict=True)), "q, k_pages and window_left")
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = lse_like(q, lse, return_lse or sinks_in_lse)
        plain = causal and logit_cap == 0.0 and tree_mask is None and report is None and cu_seqlens_q is None
        if plan.prefill is not None and plain:
            pages = (k_pages, v_pages, page_table, kv_indptr, cache_seqlens)
            if _decode_by_prefill(q, *pages, plan, softmax_scale, sinks, k_scale, v_scale, out, lse):
                if sinks_in_lse:
                    add_sinks(lse, sinks)
                return out, lse
        if tree_mask is not None and cu_seqlens_q is None:
            tree_mask = by_request("xqa_decode", "tree_mask", tree_mask, shape, 2)

        is_ragged = cu_seqlens_q is not None
        torch.ops.attnops.xqa_decode.default(
            out if is_ragged or out.dim() == 4 else by_request("xqa_decode", "out", out, shape, 3),
            lse if lse is None or is_ragged or lse.dim() == 3 else by_request("xqa_decode", "lse", lse, shape, 2),
            q if is_ragged or q.dim() == 4 else q.view(shape),
            k_pages,
            v_pages,
            page_table,
            kv_indptr,
            cache_seqlens,
            plan.tile_scheduler_metadata,
            plan.num_splits,
            plan.out_partial,
            plan.lse_partial,
            plan.semaphores,
            head_dim**-0.5 if softmax_scale is None else softmax_scale,
            causal,
            window_left,
            logit_cap,
            sinks,
            tree_mask,
            k_scale,
            v_scale,
            plan.fixed_split_tokens,
            report,
            tree_keys,
            cu_seqlens_q,
            seqlen_q if is_ragged else 0,
        )
        if sinks_in_lse:
            add_sinks(lse, sinks)
        return out, lse
    except Exception as error:
        explain(error, "attnops::xqa_decode", xqa_decode, locals())
        raise


def _shape_of_ragged(q: Tensor, cu_seqlens_q: Tensor, seqlen_q: int) -> Sequence[int]:
    """``[B, S_q, H_q, D]`` of the rows of a ragged batch."""
    if q.dim() != 3 or cu_seqlens_q.dim() != 1:
        raise ValueError(
            "attnops::xqa_decode: with cu_seqlens_q [B + 1] q must be [T, H_q, D], "
            f"got {list(cu_seqlens_q.shape)} and {list(q.shape)}"
        )
    return (cu_seqlens_q.shape[0] - 1, seqlen_q, *q.shape[1:])


def _decode_by_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_indptr: Tensor | None,
    cache_seqlens: Tensor,
    plan: XqaDecodePlan,
    softmax_scale: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> bool:
    """The call by `fmha_paged`'s kernels, if its tensors suit that: pages of q's type, and tokens at one distance."""
    queries, rows = _tokens_in_a_row(q), _tokens_in_a_row(out)
    if queries is None or rows is None or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        return False
    assert plan.prefill is not None and plan.cu_seqlens_q is not None
    attend_pages(
        rows,
        None if lse is None else lse.view(-1, q.shape[-2]),
        queries,
        k_pages,
        v_pages,
        page_table,
        kv_indptr,
        cache_seqlens,
        plan.cu_seqlens_q,
        plan.prefill,
        softmax_scale=softmax_scale,
        window_left=plan.window_left,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return True


def _tokens_in_a_row(tensor: Tensor) -> Tensor | None:
    """``[B * S_q, H_q, D]``; None where no view is that."""
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() != 4 or tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        return None
    return tensor.flatten(0, 1)


def _refuse_with_blocks(
    plan: XqaDecodePlan | BlockDecodePlan,
    block_list: Tensor | None,
    tree_mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_keys: int,
) -> None:
    """Raises for what a call with a `block_list` cannot have."""
    if block_list is None or not isinstance(plan, BlockDecodePlan):
        missing = "block_list must be given" if block_list is None else "plan must be a BlockDecodePlan"
        raise ValueError(f"attnops::xqa_decode: {missing}: the two go together")
    if tree_keys:
        raise ValueError(f"attnops::xqa_decode: tree_keys must be 0 with block_list, got {tree_keys}")
    if tree_mask is not None:
        raise ValueError("attnops::xqa_decode: tree_mask must be None with block_list")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.shape[0] != 1:
            raise ValueError(f"attnops::xqa_decode: {name}.shape[0] must be 1 with block_list, got {scale.shape[0]}")


def _decode_blocks(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_indptr: Tensor | None,
    cache_seqlens: Tensor,
    plan: BlockDecodePlan,
    block_list: Tensor,
    causal: bool,
    window_left: int,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    report: Tensor | None,
    options: dict[str, Any],
) -> None:
    """`xqa_decode` with a `block_list`: every token and KV head is a request of its own, whose pages are its units."""
    op = "xqa_decode"
    requests, seqlen_q, num_q_heads, head_dim = shape_by_request(op, q, plan.seqlen_q)
    num_pages, page_size, num_kv_heads = k_pages.shape[:3]
    key = (requests, seqlen_q, num_q_heads, num_kv_heads, head_dim, block_list.shape[2], page_size, window_left)
    check_plan_key(op, plan, dict(zip(plan.key, key, strict=True)), "q, k_pages, block_list and window_left")
    k_units, v_units, (page_step, unit_step, head_step) = unit_pages(op, k_pages, v_pages, plan.unit, heads=True)
    apart = sinks is not None and num_kv_heads > 1
    if apart:
        lse = _lse_for_sinks(q, sinks, plan, lse)
    build_block_tables(
        block_list,
        page_table,
        cache_seqlens,
        block_size=plan.block_size,
        page_size=page_size,
        num_pages=num_pages,
        block_tables=plan.block_tables,
        block_seqlens=plan.block_seqlens,
        kv_indptr=kv_indptr,
        page_step=page_step,
        unit_step=unit_step,
        head_step=head_step,
        causal=causal,
        report=report,
        window_left=window_left,
    )
    lengths = plan.block_seqlens.flatten()
    xqa_decode_plan(plan.decode, lengths)
    rows = (plan.decode.batch_size, 1, plan.decode.num_q_heads)
    xqa_decode(
        _side_by_side("q", q, (*rows, head_dim)),
        k_units,
        v_units,
        plan.block_tables.flatten(0, 1),
        lengths,
        plan.decode,
        out=_side_by_side("out", out, (*rows, head_dim)),
        lse=None if lse is None else _side_by_side("lse", lse, rows),
        sinks=None if apart else sinks,
        report=report,
        **options,
    )
    if apart:
        assert sinks is not None and lse is not None
        _join_sinks(out, lse, sinks, plan)


def _lse_for_sinks(q: Tensor, sinks: Tensor | None, plan: BlockDecodePlan, lse: Tensor | None) -> Tensor:
    """Where a call with sinks writes its lse: into the plan's scratch where nobody asked for it."""
    expected = (torch.float32, (plan.num_q_heads,), q.device)
    if sinks is not None and (sinks.dtype, tuple(sinks.shape), sinks.device) != expected:
        raise ValueError(
            f"attnops::xqa_decode: sinks must be {expected[0]} {list(expected[1])} on {q.device}, "
            f"got {sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        )
    return plan.sink_lse[0].view(q.shape[:-1]) if lse is None else lse


def _join_sinks(out: Tensor, lse: Tensor, sinks: Tensor, plan: BlockDecodePlan) -> None:
    """Each row's share of what its head's sink leaves: the requests of a call's KV heads have one kernel's sinks."""
    tokens, shape = plan.sink_lse[1], (*plan.sink_lse.shape[1:], plan.head_dim)
    rows = _side_by_side("out", out, shape)
    tokens.copy_(sinks.detach())  # else a parameter's gradients would follow the plan's scratch
    values = plan.no_values.view(out.dtype)[: plan.head_dim].expand(shape)
    merge_state(rows, _side_by_side("lse", lse, shape[:2]), values, tokens, out=rows, lse=tokens)


def _side_by_side(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return tensor.view(shape)
    except RuntimeError as error:
        raise ValueError(
            f"attnops::xqa_decode: {name} must have its tokens and heads at one distance with block_list "
            f"({name}.contiguous() has), got shape {list(tensor.shape)} and strides {list(tensor.stride())}"
        ) from error


register_fake("xqa_decode_plan")
register_fake("xqa_decode")
