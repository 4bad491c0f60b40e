"""FlashInfer's decode functions and wrappers. lse is ``[T, H]`` in base 2 here, as its users have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import (
    LEAVE_PDL,
    ONE_KERNEL,
    OUT_16BIT,
    Cache,
    as_dtype,
    as_int32,
    as_scale,
    as_sinks,
    as_tree_mask,
    check_lse,
    from_log2,
    refuse,
    require_default,
    split_kv,
    to_log2,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from attnops.compat._flashinfer_wrapper import BatchDecodeWithPagedKVCacheWrapper
from attnops.metadata.plan import XqaDecodePlan

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "merge_state",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa",
]


@names_the_peers("merge_state", out_a="v_a", lse_a="s_a", out_b="v_b", lse_b="s_b")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """`attnops.ops.merge_state` of ``[T, H, D]`` and base-2 lse float32 ``[T, H]``."""
    out, lse = ops.merge_state(v_a, from_log2(s_a), v_b, from_log2(s_b))
    return out, to_log2(lse)


@names_the_peers(
    "trtllm_batch_decode_with_kv_cache",
    q="query",
    k_pages="of kv_cache",
    v_pages="of kv_cache",
    page_table="block_tables",
    cache_seqlens="seq_lens",
    seqlen_q="q_len_per_req",
    tree_mask="mask",
    v_scale="bmm2_scale",
)
def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | list[Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.xqa_decode` with FlashInfer's folded scales.

    Args:
        query: ``[B * q_len_per_req, H_q, D]``. kv_cache: joint or a pair, HND by default.
        workspace_buffer: Its memory is not needed. max_seq_len: Nothing depends on it.
        block_tables: int32 ``[B, max_pages]``. seq_lens: ``[B]`` int32 or uint32.
        bmm1_scale: q scale x k scale x softmax scale, a number. bmm2_scale: v scale; of an FP8 cache.
        sinks: ``[H_q]``, or a list of one.
        mask: XQA's tree mask, uint16 ``[B, q_len, ceil(q_len / 32) * 2]``.
        lse: float32 ``[B * q_len_per_req, H_q]``, written when given.

    Returns:
        As `query`, or with `return_lse` ``(out, lse)``: base 2, -inf for an empty row.
    """
    name = "trtllm_batch_decode_with_kv_cache"
    ragged = "every request brings q_len_per_req tokens; use attnops.ops.fmha_paged for ragged queries"
    require_default(
        name,
        {
            "o_sf_scale": OUT_16BIT,
            "o_sf_vec_size": OUT_16BIT,
            "o_scale": OUT_16BIT,
            "enable_pdl": LEAVE_PDL,
            "backend": ONE_KERNEL,
            "max_q_len": ragged,
            "cum_seq_lens_q": ragged,
            "skip_softmax_threshold_scale_factor": "no probability is dropped here; leave it None",
            "kv_cache_sf": "caches are 16-bit or float8_e4m3fn; leave it None",
            "uses_shared_paged_kv_idx": "K and V share their page indices here; leave it True",
        },
        {"backend": "auto", "o_scale": 1.0, "uses_shared_paged_kv_idx": True},
        locals(),
    )
    if out_dtype is not None and as_dtype(name, "out_dtype", out_dtype) != query.dtype:
        raise refuse(name, f"out_dtype={out_dtype}", OUT_16BIT)
    if isinstance(bmm1_scale, Tensor):
        raise refuse(name, "bmm1_scale=a tensor", "give a number, with the softmax scale in it")
    k_pages, v_pages = split_kv(name, kv_cache, kv_layout)
    check_lse(name, lse, query)
    result, natural = _paged_decode(
        name,
        query,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        seqlen_q=1 if q_len_per_req is None else q_len_per_req,
        softmax_scale=bmm1_scale,
        window_left=window_left,
        sinks=as_sinks(sinks, query.shape[1], name),
        v_scale=as_scale(name, "bmm2_scale", bmm2_scale, v_pages),
        tree_mask=as_tree_mask(name, mask),
        out=out,
        return_lse=return_lse or lse is not None,
    )
    return with_lse(result, natural, lse, return_lse)


@names_the_peers(
    "xqa",
    k_pages="k_cache",
    v_pages="v_cache",
    cache_seqlens="seq_lens",
    seqlen_q="q_seq_len",
    window_left="sliding_win_size - 1",
    tree_mask="mask",
    out="output",
)
def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
) -> None:
    """`attnops.ops.xqa_decode` with XQA's axes.

    Args:
        q, output: ``[B, 1, H_q, D]``, or ``[B, 1, q_seq_len, H_q, D]``: the second axis is the beam, of one.
        k_cache, v_cache: ``[P, page_size, H_kv, D]`` (NHD) or ``[P, H_kv, page_size, D]`` (HND).
        page_table: int32 ``[B, max_pages]``. seq_lens: uint32 ``[B, 1]``.
        workspace_buffer, semaphores: Their memory is not needed.
        sinks: float32 ``[H_kv, group]``.
        q_scale: Scores are ``q_scale * kv_scale / sqrt(D) * <q, k>``. kv_scale: of an FP8 cache, K and V.
        sliding_win_size: Keys that a query sees, itself included; 0: off.
        mask: uint16 ``[B, q_seq_len, ceil(q_seq_len / 32) * 2]``.
    """
    require_default(
        "xqa",
        {
            "sm_count": "the plan uses the whole device; leave it None",
            "enable_pdl": LEAVE_PDL,
            "rcp_out_scale": OUT_16BIT,
            "q_cu_seq_lens": "every request brings q_seq_len tokens; use attnops.ops.fmha_paged for ragged queries",
        },
        {"rcp_out_scale": 1.0},
        locals(),
    )
    if q.shape[1] != 1:
        raise refuse("xqa", f"a beam of {q.shape[1]}", "give each beam as a request, or q_seq_len with a mask")
    if isinstance(q_scale, Tensor):
        raise refuse("xqa", "q_scale=a tensor", "give a number")
    k_pages, v_pages = split_kv("xqa", (k_cache, v_cache), kv_layout)
    for what, given, actual in (
        ("num_kv_heads", num_kv_heads, k_pages.shape[2]),
        ("page_size", page_size, k_pages.shape[1]),
        ("q_seq_len", q_seq_len, 1 if q.dim() == 4 else q.shape[2]),
    ):
        if given != actual:
            raise ValueError(f"attnops.compat: xqa: {what}={given}, the tensors have {actual}")
    if output.shape != q.shape:
        raise ValueError(f"attnops.compat: xqa: output must be {list(q.shape)} as q, got {list(output.shape)}")
    num_q_heads, head_dim = q.shape[-2:]
    folded = 1.0 if isinstance(kv_scale, Tensor) else kv_scale  # a number needs no tensor for K
    scale = as_scale("xqa", "kv_scale", kv_scale, v_pages)
    _paged_decode(
        "xqa",
        q.reshape(-1, num_q_heads, head_dim),
        k_pages,
        v_pages,
        page_table,
        seq_lens[:, 0],
        seqlen_q=q_seq_len,
        softmax_scale=q_scale * folded * head_dim**-0.5,
        window_left=sliding_win_size - 1,
        sinks=as_sinks(sinks, num_q_heads, "xqa"),
        k_scale=scale if isinstance(kv_scale, Tensor) else None,
        v_scale=scale,
        tree_mask=as_tree_mask("xqa", mask),
        out=output.view(-1, num_q_heads, head_dim),
    )


def _paged_decode(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    seqlen_q: int,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """One call with a plan of its own: out and natural lse."""
    batch_size = table.shape[0]
    if seqlen_q < 1:
        raise ValueError(f"attnops.compat: {name}: a request must bring at least 1 query token, got {seqlen_q}")
    if q.shape[0] != batch_size * seqlen_q:
        raise ValueError(
            f"attnops.compat: {name}: there must be {batch_size * seqlen_q} rows of queries ({seqlen_q} for each "
            f"of the {batch_size} rows of the page table), got {q.shape[0]}"
        )
    lens = as_int32(name, "seq_lens", lens, q.device)
    plan = XqaDecodePlan.allocate(
        batch_size,
        num_q_heads=q.shape[1],
        num_kv_heads=k_pages.shape[2],
        head_dim=q.shape[2],
        seqlen_q=seqlen_q,
        window_left=options["window_left"],
        device=q.device,
    )
    ops.xqa_decode_plan(plan, lens)
    return ops.xqa_decode(q, k_pages, v_pages, table, lens, plan, **options)
