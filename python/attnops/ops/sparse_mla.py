"""MLA over the rows that a list per query token selects: decode with a plan, prefill without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnops.metadata.plan import MLA_HEAD_DIM_V
from attnops.metadata.plan_checks import check_plan_key
from attnops.metadata.sparse_plan import SparseMlaPlan
from attnops.ops._arguments import (
    by_request,
    explain,
    lse_like,
    names_its_arguments,
    register_fake,
    shape_by_request,
)


@names_its_arguments
def sparse_mla_plan(
    plan: SparseMlaPlan, *, topk_length: Tensor | None = None, extra_topk_length: Tensor | None = None
) -> None:
    """Divide the keys of all lists over the parts of a plan, from the lengths alone, on the device.

    Args:
        plan: Allocated by `SparseMlaPlan.allocate`; its plan tensors are overwritten.
        topk_length, extra_topk_length: int32 ``[B, S_q]`` or ``[B * S_q]``, as the call will have them. None: lists are
            as long as they are wide.

    Raises:
        RuntimeError: naming the argument whose shape, dtype or device does not fit.
    """
    shape = (plan.batch_size, plan.seqlen_q)
    torch.ops.attnops.sparse_mla_plan.default(
        plan.tile_scheduler_metadata,
        plan.num_splits,
        _lists("sparse_mla_plan", "topk_length", topk_length, shape, 1),
        _lists("sparse_mla_plan", "extra_topk_length", extra_topk_length, shape, 1),
        plan.topk,
        plan.extra_topk,
        plan.seqlen_q,
        plan.num_q_heads,
        plan.fixed_split_tokens,
    )


def sparse_mla_decode(
    q: Tensor,
    kv_pages: Tensor,
    indices: Tensor,
    plan: SparseMlaPlan,
    *,
    softmax_scale: float,
    q_pe: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_kv_pages: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    report: Tensor | None = None,
    rounded_keys: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each query token to the rows of the pool that its list names.

    Args:
        q: ``[B, S_q, H_q, 576]`` or ``[B * S_q, H_q, 576]`` (float32, float16, bfloat16), last dim dense, tokens at
            one distance. 512 where the rows are of 512 values. With `q_pe`, only the 512 absorbed.
        kv_pages: ``[P, page_size, row]``, last dim dense, any page size. Rows of 576 values of q's dtype have their
            value in the first 512. Rows of 512 are wholly value. Rows of 656 bytes (uint8) hold 512 e4m3, 4 float32
            scales and 64 bfloat16. Rows of 584 bytes are wholly value, too. A page of n of them holds n times 448 e4m3
            and 64 bfloat16. Then it has n times 7 ue8m0 scales, one per 64 values, and a pad.
        indices: int32 ``[B, S_q, topk]`` or ``[B * S_q, topk]``: ``page * page_size + offset`` of rows, in any order. A
            negative one is no key. One past the pool is skipped. One that is there twice counts twice.
        plan: Made by `sparse_mla_plan` for these lengths and this geometry; its scratch is overwritten.
        softmax_scale: Multiplies ``<q, k>``.
        q_pe: ``[B, S_q, H_q, 64]`` or ``[B * S_q, H_q, 64]`` in q's dtype, for rows of 576 or 656.
        topk_length: int32 ``[B, S_q]`` or ``[B * S_q]``: how many of a list count; 0 or less: none. None: all.
        extra_kv_pages, extra_indices, extra_topk_length: A second pool of such rows, with its own page size, and its
            lists, of any width. A token attends to both.
        sinks: float32 ``[H_q]``, a logit without a value; not in lse. A token without keys stays 0.
        out: Destination in q's leading shape and dtype with 512, last dim dense; allocated when None.
        lse: float32 destination in q's leading shape with heads; `return_lse` allocates one.
        report: int32 ``[8]`` of the checked mode: an index past its pool, a length beyond its list.
        rounded_keys: Of lists with at most 8 keys, scores are those over keys rounded to bfloat16; values may be
            rounded, too. FlashMLA rounds every row of 656 bytes. The tests of its callers can tell in short lists.
            Other rows have no effect, and neither have calls with a second pool on a GPU: these scores are exact.

    Returns:
        ``(out, lse)``, lse natural log, None unless asked for. A token without keys has ``out = 0``, ``lse = -inf``.

    Raises:
        TypeError: naming the argument that is no tensor, plan or number.
        ValueError: the plan was allocated for another geometry.
        RuntimeError: naming the argument that does not fit. On the CPU also for an index past its pool, a length
            beyond its list, or another step's plan.

    Source: sparse attention of DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
    """
    try:
        shape = shape_by_request("sparse_mla_decode", q, plan.seqlen_q)
        requests, seqlen_q, num_q_heads, _ = shape
        key = {
            "batch_size": requests,
            "seqlen_q": seqlen_q,
            "num_q_heads": num_q_heads,
            "topk": indices.shape[-1],
            "extra_topk": 0 if extra_indices is None else extra_indices.shape[-1],
        }
        check_plan_key("sparse_mla_decode", plan, key, "q and these lists")
        if out is None:
            out = q.new_empty(*q.shape[:-1], MLA_HEAD_DIM_V)
        lse = lse_like(q, lse, return_lse)

        def lists(name: str, tensor: Tensor | None, flat_dims: int) -> Tensor | None:
            return _lists("sparse_mla_decode", name, tensor, shape, flat_dims)

        torch.ops.attnops.sparse_mla_decode.default(
            lists("out", out, 3),
            lists("lse", lse, 2),
            q if q.dim() == 4 else q.view(shape),
            lists("q_pe", q_pe, 3),
            kv_pages,
            lists("indices", indices, 2),
            lists("topk_length", topk_length, 1),
            extra_kv_pages,
            lists("extra_indices", extra_indices, 2),
            lists("extra_topk_length", extra_topk_length, 1),
            plan.tile_scheduler_metadata,
            plan.num_splits,
            plan.out_partial,
            plan.lse_partial,
            plan.semaphores,
            softmax_scale,
            sinks,
            plan.fixed_split_tokens,
            report,
            rounded_keys,
        )
        return out, lse
    except Exception as error:
        explain(error, "attnops::sparse_mla_decode", sparse_mla_decode, locals())
        raise


@names_its_arguments
def sparse_mla_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    q_pe: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
    return_lse: bool = False,
    report: Tensor | None = None,
    head_masks: Tensor | None = None,
    head_groups: int = 1,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`sparse_mla_decode` for many query tokens, without a plan: a token's list is one piece of work.

    Args:
        q: ``[T, H_q, 576]``, 512 where rows are of 512 values; as of `sparse_mla_decode`, as are `q_pe`, `sinks`,
            `out`, `lse`, `return_lse` and `report`.
        kv: Pages as of `sparse_mla_decode`, or ragged rows ``[S, row]``, not of 584 bytes.
        indices: int32 ``[T, topk]``, rows of `kv`: ``page * page_size + offset``, or the row of ragged ones.
        topk_length: int32 ``[T]``.
        extra_kv: A second pool, of rows of the kind and dtype of `kv`; a token attends to what both lists name.
        extra_indices, extra_topk_length: int32 ``[T, extra_topk]``, rows of `extra_kv`, and ``[T]``.
        max_logits: float32 destination ``[T, H_q]``: the largest ``softmax_scale * <q, k>``; -inf without keys.
        head_masks: uint8 ``[T, topk]``: who sees an entry of a list, by groups of heads. Bit i is for heads
            ``[i, i + 1) * H_q / head_groups``. Tokens of few heads may be heads of one: see `share_lists`. On a GPU for
            rows of 512 or 576 values, up to 64 heads, on sm_90a. Not beside `extra_kv`.
        head_groups: Groups, 1 to 8, that divide H_q.
        scratch: uint8 ``[sparse_mla_prefill_scratch_size(...)]``, or None. With it, rows of 656 bytes that many tokens
            list may be rounded to bfloat16 once. That is faster for more than 32 heads of bfloat16 on sm_90a. The
            device decides by the lists, so a token's bits depend on the call then. Without scratch they never do.

    Returns:
        ``(out, lse)`` as of `sparse_mla_decode`.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also as `sparse_mla_decode`.

    Source: sparse attention of DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
    """
    out = q.new_empty(*q.shape[:-1], MLA_HEAD_DIM_V) if out is None else out
    lse = lse_like(q, lse, return_lse)
    torch.ops.attnops.sparse_mla_prefill.default(
        out,
        lse,
        max_logits,
        q,
        q_pe,
        kv,
        indices,
        topk_length,
        extra_kv,
        extra_indices,
        extra_topk_length,
        softmax_scale,
        sinks,
        report,
        head_masks,
        head_groups,
        scratch,
    )
    return out, lse


def sparse_mla_prefill_scratch_size(
    num_tokens: int, num_q_heads: int, topk: int, num_rows: int, *, most_rows: int = 131072
) -> int:
    """Bytes that let `sparse_mla_prefill` convert rows of 656 bytes once; 0 where that cannot gain.

    Args:
        num_tokens: Of q.
        num_q_heads: Of q.
        topk: Width of the lists.
        num_rows: Of the pool: pages times page size.
        most_rows: How many rows it shall hold, of 1152 bytes. Where lists name more of them, none is converted.
    """
    entries, blocks = num_tokens * topk, 1 if num_q_heads <= 64 else 2
    if num_q_heads <= 32:
        return 0
    # Nanoseconds on an H200: what entries gain, and what the kernels take that find nothing to convert.
    gain = entries * (0.18 if blocks == 2 else 0.09 if num_q_heads > 48 else 0.045)
    cost = 20e3 + entries * 0.004 + num_rows * 0.001
    certain = num_rows <= most_rows and entries >= _LEAST_ENTRIES[blocks] * num_rows
    if gain < (1.25 * (cost + 0.6 * num_rows) if certain else 8 * cost):
        return 0
    return _scratch_size(entries, num_rows, most_rows)


_LEAST_ENTRIES = {1: 12, 2: 4}  # of a row, by blocks of 64 heads: csrc/sparse_mla/convert_rows.h


def _scratch_size(entries: int, num_rows: int, most_rows: int) -> int:
    """As ConvertLayout there has it: counts, flags, words of listed rows, lists, rows."""
    words = -(-min(num_rows, 1 << 31) // 32)
    parts = (24, 32 * words, 8 * words, 4 * entries)
    return 256 + sum(-(-part // 256) * 256 for part in parts) + 1152 * min(num_rows, entries, most_rows)


@names_its_arguments
def share_lists(
    indices: Tensor,
    together: int,
    *,
    topk_length: Tensor | None = None,
    shared: Tensor | None = None,
    masks: Tensor | None = None,
    shared_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of neighbouring tokens as one: each row once, with a bit for each token that names it.

    So tokens of few heads share the reads of rows and the tiles of products, where their lists overlap::

        shared, masks, lengths = ops.share_lists(indices, 4)
        q = q.view(-1, 4 * 16, 576)
        ops.sparse_mla_prefill(q, kv, shared, topk_length=lengths, head_masks=masks, head_groups=4, softmax_scale=scale)

    Args:
        indices: int32 ``[T, topk]``, as of `sparse_mla_prefill`; T is a multiple of `together`.
        together: Tokens of a group, 1 to 8. On a GPU ``together * topk`` is at most 16384.
        topk_length: int32 ``[T]``; None: lists are as long as they are wide.
        shared: int32 ``[T / together, together * topk]``; this and the next two are allocated when omitted. Rows stand
            in the order in which the group's tokens name them first. Lists that name a row twice stand one behind the
            other.
        masks: uint8 of that shape: bit i is for token i of the group.
        shared_length: int32 ``[T / together]``: how many entries there are. What lies behind them is not written.

    Returns:
        ``(shared, masks, shared_length)``.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    groups, width = indices.shape[0] // max(together, 1), together * indices.shape[-1]
    shared = indices.new_empty(groups, width) if shared is None else shared
    masks = indices.new_empty(groups, width, dtype=torch.uint8) if masks is None else masks
    shared_length = indices.new_empty(groups) if shared_length is None else shared_length
    torch.ops.attnops.share_lists.default(shared, masks, shared_length, indices, topk_length, together)
    return shared, masks, shared_length


def _lists(op: str, name: str, tensor: Tensor | None, shape: Sequence[int], flat_dims: int) -> Tensor | None:
    """``[B, S_q, ...]`` of a tensor that may be ``[B * S_q, ...]``."""
    return None if tensor is None else by_request(op, name, tensor, shape, flat_dims)


for _op in ("sparse_mla_plan", "sparse_mla_decode", "sparse_mla_prefill", "share_lists"):
    register_fake(_op)
