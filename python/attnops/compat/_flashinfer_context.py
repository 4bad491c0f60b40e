"""FlashInfer's trtllm functions of prompts, for `attnops.compat.flashinfer`, on `fmha_paged` and `fmha_varlen`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._convert import (
    FP4_CACHE,
    FP4_OUT,
    Cache,
    as_dtype,
    as_int32,
    as_scale,
    as_sinks,
    check_lse,
    finish,
    fold_scale,
    refuse,
    require_default,
    split_kv,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import extend, varlen


@names_the_peers(
    "trtllm_batch_context_with_kv_cache",
    q="query",
    k_pages="of kv_cache",
    v_pages="of kv_cache",
    page_table="block_tables",
    cache_seqlens="seq_lens",
    cu_seqlens_q="cum_seq_lens_q",
)
def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Tensor | list[Tensor] | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prefill and extend over a paged cache that holds the new tokens already.

    Args:
        query: ``[T, H_q, D]``.
        kv_cache: joint or a pair, HND by default.
        workspace_buffer, multi_ctas_kv_counter_buffer: Their memory is not needed. max_q_len, max_kv_len,
            cum_seq_lens_kv: Nothing depends on them.
        block_tables: int32 ``[B, max_pages]``.
        seq_lens: ``[B]``.
        cum_seq_lens_q: int32 ``[B + 1]``.
        bmm1_scale: q scale x k scale x softmax scale. bmm2_scale: v scale. Numbers, or float32 tensors of one.
        out_dtype: Of the output; None: as `out`, else as `query`. enable_pdl, use_fp16_softmax, uses_spcompress: Taken.
        sinks: ``[H_q]``, or a list of one.

    Returns:
        As `query`, or with `return_lse` ``(out, lse)``: float32 ``[T, H_q]``, base 2, -inf for an empty row.
    """
    name = "trtllm_batch_context_with_kv_cache"
    require_default(
        name,
        {
            "o_sf_scale": FP4_OUT,
            "o_sf_vec_size": FP4_OUT,
            "kv_cache_sf": FP4_CACHE,
            "uses_shared_paged_kv_idx": "K and V share their page indices here; leave it True",
        },
        {"uses_shared_paged_kv_idx": True},
        locals(),
    )
    if cum_seq_lens_q.shape[0] != batch_size + 1:
        raise ValueError(
            f"attnops.compat: {name}: cum_seq_lens_q must have batch_size + 1 = {batch_size + 1} elements, "
            f"got {cum_seq_lens_q.shape[0]}"
        )
    k_pages, v_pages = split_kv(name, kv_cache, kv_layout)
    scale, on_device = fold_scale(name, "bmm1_scale", bmm1_scale, query.device)
    check_lse(name, lse, query)
    result, natural = extend(
        query,
        k_pages,
        v_pages,
        block_tables,
        as_int32(name, "seq_lens", seq_lens.reshape(-1), query.device),
        as_int32(name, "cum_seq_lens_q", cum_seq_lens_q, query.device),
        causal=causal,
        window_left=window_left,
        softmax_scale=scale,
        sinks=as_sinks(sinks, query.shape[1], name),
        k_scale=on_device,
        v_scale=as_scale(name, "bmm2_scale", bmm2_scale, query.device),
        out=out,
        return_lse=return_lse or lse is not None,
    )
    result = finish(result, out, as_dtype(name, "out_dtype", out_dtype) or query.dtype)
    return with_lse(result, natural, lse, return_lse)


@names_the_peers(
    "trtllm_ragged_attention_deepseek",
    q="query",
    k="key",
    v="value",
    cu_seqlens_q="cum_seq_lens_q",
    cu_seqlens_k="cum_seq_lens_kv",
)
def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "auto",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prefill over ragged keys and values, whose head dims may differ (192 and 128 of MLA).

    Args:
        query: ``[T, H, D]``.
        key: ``[T_k, H_kv, D]``.
        value: ``[T_k, H_kv, D_v]``.
        workspace_buffer: Its memory is not needed. seq_lens, max_q_len, max_kv_len, o_sf_scale, q_seq_lens_cpu,
            kv_seq_lens_cpu: Nothing depends on them beside the two cum_seq_lens.
        bmm1_scale, bmm2_scale: Of the scores and of the output. Numbers, or float32 tensors of one.
        enable_pdl, backend, use_fp16_softmax, uses_spcompress: Taken: choices among kernels.

    Returns:
        ``[T, H, D_v]``, or with `return_lse` ``(out, lse)``: float32 ``[T, H]``, base 2, -inf for an empty row.
    """
    name = "trtllm_ragged_attention_deepseek"
    if any(scales is not None for scales in sage_attn_sfs) or any(num_elts_per_sage_attn_blk):
        raise refuse(name, "sage_attn_sfs", "give query, key and value in 16 bits")
    q = query.to(torch.bfloat16) if query.dtype.itemsize == 1 else query
    scale, on_device = fold_scale(name, "bmm1_scale", bmm1_scale, query.device)
    check_lse(name, lse, query)
    direct = out is not None and out.dtype == q.dtype
    result, natural = varlen(
        q,
        key,
        value,
        as_int32(name, "cum_seq_lens_q", cum_seq_lens_q, query.device),
        as_int32(name, "cum_seq_lens_kv", cum_seq_lens_kv, query.device),
        causal=is_causal,
        window_left=window_left,
        softmax_scale=scale,
        sinks=as_sinks(attention_sinks, query.shape[1], name, "attention_sinks"),
        k_scale=on_device,
        v_scale=as_scale(name, "bmm2_scale", bmm2_scale, query.device),
        out=out if direct else None,
        return_lse=return_lse or lse is not None,
    )
    return with_lse(finish(result, out, None), natural, lse, return_lse)
