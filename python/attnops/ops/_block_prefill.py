"""`fmha_paged` with a `block_list`: lists of blocks become page tables, for all KV heads at once or one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.metadata.block_plan import BlockPrefillPlan, unit_size
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan_checks import check_plan_key
from attnops.ops._prefill_calls import attend_pages, dtype_of_results, in_vectors, order_tiles
from attnops.ops.block_lists import build_block_tables, unit_pages

# Rows (token, head of a group) of a KV head that keep an H200 busy: two tiles for each SM. With a `block_list`, a
# launch for each head is then faster than copies of all rows: 933 us for 963, 64/4 heads and 4096 tokens.
_ROWS_OF_A_GPU = 2 * 132 * 128


def refuse_with_blocks(
    plan: FmhaPlan | BlockPrefillPlan,
    block_list: Tensor | None,
    window_left: int,
    window_right: int,
    hidden_keys: Tensor | None,
) -> None:
    """Raises for what a call with a `block_list` cannot have."""
    if block_list is None or not isinstance(plan, BlockPrefillPlan):
        missing = "block_list must be given" if block_list is None else "plan must be a BlockPrefillPlan"
        raise ValueError(f"attnops::fmha_paged: {missing}: the two go together")
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window != -1:
            raise ValueError(f"attnops::fmha_paged: {name} must be -1 with block_list, got {window}")
    if hidden_keys is not None:
        raise ValueError("attnops::fmha_paged: hidden_keys must be None with block_list")


def prefill_blocks(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_indptr: Tensor | None,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    plan: BlockPrefillPlan,
    block_list: Tensor,
    out: Tensor,
    lse: Tensor | None,
    report: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    options: dict[str, Any],
) -> None:
    """`fmha_paged` with a `block_list`: all KV heads at once, or each in its turn where a call asks for that."""
    op, batch_size, num_q_heads = "fmha_paged", cache_seqlens.shape[0], q.shape[1]
    num_pages, page_size, num_kv_heads = k_pages.shape[:3]
    key = (num_q_heads, num_kv_heads, block_list.shape[2], page_size, options["causal"])
    check_plan_key(op, plan, dict(zip(plan.key, key, strict=True)), "q, k_pages, block_list and causal")
    if batch_size > plan.max_batch_size:
        most = plan.max_batch_size
        raise ValueError(f"attnops::{op}: plan: make one for {batch_size} requests, this one is for at most {most}")
    if q.shape[0] > plan.max_num_tokens:
        most = plan.max_num_tokens
        raise ValueError(f"attnops::{op}: plan: make one for {q.shape[0]} tokens, this one is for at most {most}")
    unit, group = unit_size(plan.block_size, page_size), num_q_heads // num_kv_heads
    units = None
    if num_kv_heads > 1:
        _check_rows(q, cu_seqlens_q, plan, batch_size, k_pages.shape[3], v_pages.shape[3], out, lse)
        # A tree mask has a row for each token of q, and its bits must not end within the rows that no request owns.
        alike = sinks is None and options["tree_mask"] is None and _is_of_all_heads(k_scale, v_scale)
        many = q.is_cuda and q.shape[0] * group >= _ROWS_OF_A_GPU
        at_once = alike and not many and plan.has_room(q, out)
        units = _units_of_heads(k_pages, v_pages, unit) if at_once else None
    by_head = []
    if units is None:
        single = [slice(head, head + 1) for head in range(num_kv_heads)]
        by_head = [unit_pages(op, k_pages[:, :, h], v_pages[:, :, h], unit, heads=False) for h in single]
    page_step, unit_step, head_step = (units or by_head[0])[2]
    tables, lengths, _ = plan.requests(batch_size)
    build_block_tables(
        block_list,
        page_table,
        cache_seqlens,
        block_size=plan.block_size,
        page_size=page_size,
        num_pages=num_pages,
        block_tables=tables[:, 1:].transpose(0, 1),
        block_seqlens=lengths[:, 1:].transpose(0, 1),
        kv_indptr=kv_indptr,
        cu_seqlens_q=cu_seqlens_q if options["causal"] else None,
        page_step=page_step,
        unit_step=unit_step,
        head_step=head_step,
        causal=False,
        report=report,
    )
    options = {**options, "report": report}
    if units is not None:
        options |= {"k_scale": k_scale, "v_scale": v_scale}
        _attend_at_once(q, units[0], units[1], plan, batch_size, cu_seqlens_q, out, lse, options)
        return
    fmha, lse_by_head = plan.fmha_of(q.shape[0], batch_size), None
    if lse is not None:
        lse_by_head = lse.unsqueeze(0) if num_kv_heads == 1 else plan.by_head(lse, plan.lse_by_head)
    for head, (k_units, v_units, _) in enumerate(by_head):
        order_tiles(fmha, cu_seqlens_q, None, lengths[head, 1:])
        own = slice(head * group, (head + 1) * group)
        attend_pages(
            out[:, own],
            None if lse_by_head is None else lse_by_head[head],
            q[:, own],
            k_units,
            v_units,
            tables[head, 1:],
            None,
            lengths[head, 1:],
            cu_seqlens_q,
            fmha,
            sinks=None if sinks is None else sinks[own],
            k_scale=_of_head(k_scale, head),
            v_scale=_of_head(v_scale, head),
            **options,
        )
    if lse is not None and lse_by_head is not None and num_kv_heads > 1:
        _heads_first(lse, num_kv_heads).copy_(lse_by_head)


def _attend_at_once(
    q: Tensor,
    k_units: Tensor,
    v_units: Tensor,
    plan: BlockPrefillPlan,
    batch_size: int,
    cu_seqlens_q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Attention of the requests of `BlockPrefillPlan.requests`: all those of KV head 0, then of 1, and so on.

    Rows of a head must follow each other, so q and the results pass through scratch. Before the requests of a head is
    one without keys. It takes the rows that nobody owns, behind the last head's and in front of its own. They get zeros
    and -inf.
    """
    num_tokens, num_kv_heads = q.shape[0], plan.num_kv_heads
    tables, lengths, bounds = plan.requests(batch_size)
    lengths[:, 0].zero_()
    torch.add(cu_seqlens_q, plan.heads, alpha=num_tokens, out=bounds[1:].view_as(lengths))
    q_by_head, out_by_head = plan.by_head(q, plan.q_by_head), plan.by_head(out, plan.out_by_head)
    lse_by_head = None if lse is None else plan.by_head(lse, plan.lse_by_head)
    _copy_rows(q_by_head, _heads_first(q, num_kv_heads))
    fmha = plan.fmha_of(num_kv_heads * num_tokens, lengths.numel())
    order_tiles(fmha, bounds, None, lengths.flatten())
    attend_pages(
        out_by_head.flatten(0, 1),
        None if lse_by_head is None else lse_by_head.flatten(0, 1),
        q_by_head.flatten(0, 1),
        k_units,
        v_units,
        tables.flatten(0, 1),
        None,
        lengths.flatten(),
        bounds,
        fmha,
        **options,
    )
    _copy_rows(_heads_first(out, num_kv_heads), out_by_head)
    if lse is not None and lse_by_head is not None:
        _heads_first(lse, num_kv_heads).copy_(lse_by_head)


def _check_rows(
    q: Tensor,
    cu_seqlens_q: Tensor,
    plan: BlockPrefillPlan,
    batch_size: int,
    head_dim_qk: int,
    head_dim_v: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Raises for what a copy or a sum would take, and the kernels would not."""
    device, rows = plan.block_tables.device, (q.shape[0], q.shape[1])
    given = (
        ("q", q, q.dtype, (*rows, head_dim_qk)),
        ("cu_seqlens_q", cu_seqlens_q, torch.int32, (batch_size + 1,)),
        ("out", out, dtype_of_results(q), (*rows, head_dim_v)),
        ("lse", lse, torch.float32, rows),
    )
    for name, tensor, dtype, shape in given:
        if tensor is None or (tensor.device == device and tensor.dtype == dtype and tensor.shape == shape):
            continue
        raise ValueError(
            f"attnops::fmha_paged: {name} must be {dtype} {list(shape)} on {device} with block_list and this plan, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def _is_of_all_heads(*scales: Tensor | None) -> bool:
    """Whether no scale is of one KV head alone."""
    return all(scale is None or scale.shape[0] == 1 for scale in scales)


def _units_of_heads(k_pages: Tensor, v_pages: Tensor, unit: int) -> tuple[Tensor, Tensor, tuple[int, int, int]] | None:
    """`unit_pages` with a page for each KV head. None where strides, or the number of such pages, do not allow it."""
    try:
        return unit_pages("fmha_paged", k_pages, v_pages, unit, heads=True)
    except ValueError:
        return None


def _heads_first(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Rows ``[T, H_q, ...]`` as ``[H_kv, T, group, ...]``, a view."""
    return rows.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)


def _copy_rows(to: Tensor, rows: Tensor) -> None:
    """Copies rows as words of 8 bytes, where they lie on these: a GPU would copy each element by itself."""
    if not torch.compiler.is_compiling() and all(map(_is_of_words, (to, rows))):
        to, rows = to.view(torch.int64), rows.view(torch.int64)
    to.copy_(rows)


def _is_of_words(rows: Tensor) -> bool:
    return rows.stride(-1) == 1 and rows.shape[-1] * rows.element_size() % 8 == 0 and in_vectors(rows)


def _of_head(scale: Tensor | None, head: int) -> Tensor | None:
    """The scale of a KV head, where each has its own."""
    return scale if scale is None or scale.shape[0] == 1 else scale[head : head + 1]
