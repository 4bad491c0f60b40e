"""FlashInfer's decode functions, for `attnops.compat.flashinfer`: of one request, and of TensorRT-LLM."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._attend import Positions, decode
from attnops.compat._convert import (
    FP4_CACHE,
    FP4_OUT,
    Cache,
    as_dtype,
    as_scale,
    as_sinks,
    check_lse,
    finish,
    fold_scale,
    product,
    require_default,
    split_kv,
    to_log2,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._paged_decode import paged_decode
from attnops.compat._positions import check_mode

_SHARED = "K and V share their page indices here; leave it True"


@names_the_peers("single_decode_with_kv_cache", k_pages="k", v_pages="v")
def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One request's newest token, on `attnops.ops.xqa_decode`.

    Args:
        q: ``[H_q, D]``.
        k, v: ``[S, H_kv, D]`` (NHD) or ``[H_kv, S, D]`` (HND).
        use_tensor_cores: Taken.
        q_scale, k_scale: Multiply the scores.
        v_scale: Multiplies the output.
        pos_encoding_mode: "NONE"; "ROPE_LLAMA" and "ALIBI" act on a copy of k and v.

    Returns:
        ``[H_q, D]``, or with `return_lse` ``(out, lse)``: float32 ``[H_q]``, base 2.
    """
    name = "single_decode_with_kv_cache"
    check_mode(name, pos_encoding_mode)
    k_pages, v_pages = split_kv(name, (k.unsqueeze(0), v.unsqueeze(0)), kv_layout)
    q_factor, q_tensor = fold_scale(name, "q_scale", q_scale, q.device)
    k_factor, k_tensor = fold_scale(name, "k_scale", k_scale, q.device)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out, natural = decode(
        name,
        q.unsqueeze(0),
        k_pages,
        v_pages,
        torch.zeros(1, 1, dtype=torch.int32, device=q.device),
        torch.full((1,), k_pages.shape[1], dtype=torch.int32, device=q.device),
        seqlen_q=1,
        softmax_scale=scale * q_factor * k_factor,
        positions=Positions(pos_encoding_mode, rope_scale, rope_theta),
        window_left=window_left,
        logit_cap=logits_soft_cap or 0.0,
        k_scale=product(q_tensor, k_tensor),
        v_scale=as_scale(name, "v_scale", v_scale, q.device),
        return_lse=return_lse,
    )
    return out[0] if natural is None else (out[0], to_log2(natural[0]))


@names_the_peers(
    "trtllm_batch_decode_with_kv_cache",
    q="query",
    k_pages="of kv_cache",
    v_pages="of kv_cache",
    page_table="block_tables",
    cache_seqlens="seq_lens",
    seqlen_q="q_len_per_req",
    tree_mask="mask",
    k_scale="bmm1_scale",
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
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.xqa_decode` with FlashInfer's folded scales.

    Args:
        query: ``[B * q_len_per_req, H_q, D]``; or ``[T, H_q, D]`` with `cum_seq_lens_q` ``[B + 1]`` and `max_q_len`.
        kv_cache: joint or a pair, HND by default.
        workspace_buffer, multi_ctas_kv_counter_buffer: Their memory is not needed.
        max_seq_len: Nothing depends on it.
        block_tables: int32 ``[B, max_pages]``.
        seq_lens: ``[B]`` int32 or uint32.
        bmm1_scale: q scale x k scale x softmax scale. bmm2_scale: v scale over that of the output. Numbers, or float32
            tensors of one.
        out_dtype: Of the output; None: as `out`, else as `query`. float8_e4m3fn saturates.
        o_scale: Taken: `bmm2_scale` holds it. enable_pdl, backend, bf16q_fp8kv_transform_mode: Taken: choices.
        bmm1_scale_log2: Taken: `bmm1_scale` in other units.
        sinks: ``[H_q]``, or a list of one.
        mask: XQA's tree mask, uint16 ``[B, q_len, ceil(q_len / 32) * 2]``; of ragged queries ``[T, ...]``.
        lse: float32 ``[T, H_q]``, written when given.

    Returns:
        As `query`, or with `return_lse` ``(out, lse)``: base 2, -inf for an empty row.
    """
    name = "trtllm_batch_decode_with_kv_cache"
    usual = o_sf_scale is None and o_sf_vec_size is None and kv_cache_sf is None
    if not usual or uses_shared_paged_kv_idx is not True or enable_block_sparse_attention:
        require_default(
            name,
            {
                "o_sf_scale": FP4_OUT,
                "o_sf_vec_size": FP4_OUT,
                "kv_cache_sf": FP4_CACHE,
                "uses_shared_paged_kv_idx": _SHARED,
                "enable_block_sparse_attention": "every key is attended to; leave it False",
            },
            {"uses_shared_paged_kv_idx": True, "enable_block_sparse_attention": False},
            locals(),
        )
    dtype = as_dtype(name, "out_dtype", out_dtype)
    k_pages, v_pages = split_kv(name, kv_cache, kv_layout)
    scale, on_device = fold_scale(name, "bmm1_scale", bmm1_scale, query.device)
    check_lse(name, lse, query)
    result, natural = paged_decode(
        name,
        query,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        q_len_per_req,
        cum_seq_lens_q,
        max_q_len,
        mask,
        out,
        softmax_scale=scale,
        window_left=window_left,
        sinks=None if sinks is None else as_sinks(sinks, query.shape[1], name),
        k_scale=on_device,
        v_scale=as_scale(name, "bmm2_scale", bmm2_scale, query.device),
        return_lse=return_lse or lse is not None,
    )
    return with_lse(finish(result, out, dtype or query.dtype), natural, lse, return_lse)
