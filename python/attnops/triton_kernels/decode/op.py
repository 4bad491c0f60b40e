"""`triton_decode_plan` and `triton_decode`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnops.triton_kernels.core.checks import Checks, register
from attnops.triton_kernels.core.launch import Options, Pages, attend, query_tiles
from attnops.triton_kernels.core.tiles import padded, processors
from attnops.triton_kernels.decode.kernel import merge_splits_kernel, plan_kernel

_BLOCK_REQUESTS = 1024
_SPLITS_AT_ONCE = 8  # that a merge loads together
_BLOCKS_PER_PROCESSOR = 2  # blocks of a launch for each processor, so that one waits while another computes


@register(
    "triton_decode_plan(Tensor(a!) num_splits, Tensor cache_seqlens, int seqlen_q, int programs, int max_splits, "
    "int split_tile, bool fixed, int window_left) -> ()"
)
def triton_decode_plan(
    num_splits: Tensor,
    cache_seqlens: Tensor,
    seqlen_q: int,
    programs: int,
    max_splits: int,
    split_tile: int,
    fixed: bool,
    window_left: int,
) -> None:
    """Splits per request, from lengths, heads and the device's processors, on the device.

    Args:
        num_splits: int32 ``[B]``, written: 1 to `max_splits`.
        cache_seqlens: int32 ``[B]``.
        programs: Blocks that one split of one request takes: KV heads times blocks of their group times query tiles.
        split_tile: Fewest tokens of a split.
        fixed: A split has `split_tile` tokens (more where that would be more than `max_splits`), whatever the batch.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    checks = Checks("triton_decode_plan", num_splits)
    for name, tensor in (("num_splits", num_splits), ("cache_seqlens", cache_seqlens)):
        checks.tensor(name, tensor, ("batch_size",), (torch.int32,))
    for name, value in (("max_splits", max_splits), ("split_tile", split_tile), ("programs", programs)):
        checks.require(value > 0, f"{name} must be positive, got {value}")
    wanted = processors(num_splits.device) * _BLOCKS_PER_PROCESSOR
    if num_splits.shape[0]:
        plan_kernel[(1,)](
            num_splits,
            cache_seqlens,
            num_splits.shape[0],
            seqlen_q,
            window_left,
            programs,
            wanted,
            MAX_SPLITS=max_splits,
            SPLIT_TILE=split_tile,
            FIXED=fixed,
            BLOCK=min(_BLOCK_REQUESTS, padded(num_splits.shape[0])),
        )


@register(
    "triton_decode(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) out_partial, Tensor(d!) lse_partial, Tensor q, "
    "Tensor? q_pe, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor cache_seqlens, Tensor num_splits, "
    "int seqlen_q, float softmax_scale, bool causal, int window_left, float logit_cap, Tensor? sinks, "
    "Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, int split_tile, int tree_keys=0) -> ()"
)
def triton_decode(
    out: Tensor,
    lse: Tensor | None,
    out_partial: Tensor,
    lse_partial: Tensor,
    q: Tensor,
    q_pe: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    num_splits: Tensor,
    seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    split_tile: int,
    tree_keys: int = 0,
) -> None:
    """Attend from each request's newest `seqlen_q` tokens to its pages; conventions of `attnops.ops.xqa_decode`.

    Args:
        out: ``[B * S_q, H_q, D_v]``, written.
        lse: float32 ``[B * S_q, H_q]``, natural log, written when given.
        out_partial, lse_partial: float32 scratch ``[>= B * S_q, H_q, splits, D_v]`` and ``[.., H_q, splits]``.
        q: ``[B * S_q, H_q, D]``; with `q_pe` ``[B * S_q, H_q, D_pe]``, the first ``D - D_pe`` dimensions.
        num_splits: int32 ``[B]``, of `triton_decode_plan` with these lengths and this `split_tile`.
        k_scale, v_scale: float32 ``[1]`` or ``[H_kv]``, of FP8 pages.
        tree_keys: M, the last keys of each request that ``tree_mask [B, S_q, ceil(M / 8)]`` is over; 0: the new
            tokens. A window counts steps of the tree.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    checks = Checks("triton_decode", q)
    checks.queries(q, q_pe, out, lse)
    checks.pages(q, k_pages, v_pages, page_table, cache_seqlens)
    checks.options(sinks, k_scale, v_scale, window_left, logit_cap)
    checks.tensor("num_splits", num_splits, ("batch_size",), (torch.int32,))
    batch_size, num_tokens = checks.extents["batch_size"], checks.extents["num_tokens"]
    checks.require(
        num_tokens == batch_size * seqlen_q,
        f"q.shape[0] must be {batch_size * seqlen_q} (batch_size * seqlen_q), got {num_tokens}",
    )
    tree_keys = tree_keys or seqlen_q
    checks.tree(tree_mask, seqlen_q, tree_keys)
    v_head_dim = v_pages.shape[-1]
    checks.tensor("out_partial", out_partial, ("rows", "num_q_heads", "splits", "head_dim_v"), (torch.float32,))
    checks.tensor("lse_partial", lse_partial, ("rows", "num_q_heads", "splits"), (torch.float32,))
    checks.require(checks.extents["rows"] >= num_tokens, f"out_partial.shape[0] must be {num_tokens} or more")
    if num_tokens == 0:
        return
    tiles = query_tiles(q, k_pages.shape[2], k_pages.shape[3], v_head_dim, seqlen_q, decode=True)
    attend(
        out_partial[:num_tokens],
        lse_partial[:num_tokens],
        q,
        q_pe,
        Options(softmax_scale=softmax_scale, causal=causal, window_left=window_left, logit_cap=logit_cap),
        tiles,
        pages=Pages(k=k_pages, v=v_pages, table=page_table, cache_seqlens=cache_seqlens),
        seqlen_q=seqlen_q,
        num_splits=num_splits,
        split_tile=split_tile,
        max_splits=out_partial.shape[2],
        tree_mask=tree_mask,
        tree_keys=tree_keys,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    merge_splits_kernel[(num_tokens, q.shape[1])](
        out,
        out if lse is None else lse,
        out_partial,
        lse_partial,
        num_splits,
        q if sinks is None else sinks,
        seqlen_q,
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
        0 if lse is None else lse.stride(1),
        *out_partial.stride()[:3],
        *lse_partial.stride()[:2],
        DV=v_head_dim,
        BLOCK_DV=padded(v_head_dim),
        LSE=lse is not None,
        SINKS=sinks is not None,
        MAX_SPLITS=out_partial.shape[2],
        BLOCK_S=min(_SPLITS_AT_ONCE, triton.next_power_of_2(out_partial.shape[2])),
        num_warps=2 if v_head_dim <= 128 else 4,
    )
