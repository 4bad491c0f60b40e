"""FlashInfer's decode functions of XQA and cuDNN, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from torch import Tensor

from attnops.compat._convert import (
    FP4_CACHE,
    Cache,
    as_scale,
    as_sinks,
    finish,
    fold_scale,
    product,
    refuse,
    require_default,
    split_kv,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_decode import trtllm_batch_decode_with_kv_cache
from attnops.compat._paged_decode import paged_decode


@names_the_peers("xqa_batch_decode_with_kv_cache")
def xqa_batch_decode_with_kv_cache(
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
    sinks: Tensor | list[Tensor] | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """`trtllm_batch_decode_with_kv_cache` in NHD; with `q_cu_seq_lens` `q_len_per_req` is the most of a request."""
    ragged = q_cu_seq_lens is not None
    return trtllm_batch_decode_with_kv_cache(  # type: ignore[return-value]
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        window_left,
        out,
        sinks=sinks,
        kv_layout=kv_layout,
        q_len_per_req=None if ragged else q_len_per_req,
        mask=mask,
        kv_cache_sf=kv_cache_sf,
        max_q_len=q_len_per_req if ragged else None,
        cum_seq_lens_q=q_cu_seq_lens,
    )


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
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
) -> None:
    """`attnops.ops.xqa_decode` with XQA's axes.

    Args:
        q, output: ``[B, 1, H_q, D]``, or ``[B, 1, q_seq_len, H_q, D]``: the second axis is the beam, of one; or, with
            `q_cu_seq_lens` ``[B + 1]``, ``[T, H_q, D]``, at most `q_seq_len` of a request. `output` may be e4m3.
        k_cache, v_cache: ``[P, page_size, H_kv, D]`` (NHD) or ``[P, H_kv, page_size, D]`` (HND).
        page_table: int32 ``[B, max_pages]``.
        seq_lens: uint32 ``[B, 1]``.
        workspace_buffer, semaphores: Their memory is not needed.
        sm_count, enable_pdl: Taken: choices.
        sinks: float32 ``[H_kv, group]``.
        q_scale: Scores are ``q_scale * kv_scale / sqrt(D) * <q, k>``.
        kv_scale: Of K and V. Both are numbers or tensors of one.
        sliding_win_size: Keys that a query sees, itself included; 0: off.
        rcp_out_scale: Multiplies the output.
        mask: uint16 ``[B, q_seq_len, ceil(q_seq_len / 32) * 2]``, or ``[T, ...]``.
    """
    if k_sf_cache is not None or v_sf_cache is not None:
        require_default("xqa", {"k_sf_cache": FP4_CACHE, "v_sf_cache": FP4_CACHE}, {}, locals())
    ragged = q_cu_seq_lens is not None
    if not ragged and q.shape[1] != 1:
        raise refuse("xqa", f"a beam of {q.shape[1]}", "give each beam as a request, or q_seq_len with a mask")
    k_pages, v_pages = split_kv("xqa", (k_cache, v_cache), kv_layout)
    for what, given, actual in (
        ("num_kv_heads", num_kv_heads, k_pages.shape[2]),
        ("page_size", page_size, k_pages.shape[1]),
        ("q_seq_len", q_seq_len, q_seq_len if ragged else 1 if q.dim() == 4 else q.shape[2]),
    ):
        if given != actual:
            raise ValueError(f"attnops.compat: xqa: {what}={given}, the tensors have {actual}")
    if output.shape != q.shape:
        raise ValueError(f"attnops.compat: xqa: output must be {list(q.shape)} as q, got {list(output.shape)}")
    num_q_heads, head_dim = q.shape[-2:]
    q_factor, q_tensor = fold_scale("xqa", "q_scale", q_scale, q.device)
    kv_factor, kv_tensor = fold_scale("xqa", "kv_scale", kv_scale, q.device)
    v_scale = as_scale("xqa", "kv_scale", kv_factor * rcp_out_scale, q.device)
    flat = output.view(-1, num_q_heads, head_dim)
    result, _ = paged_decode(
        "xqa",
        q.reshape(-1, num_q_heads, head_dim),
        k_pages,
        v_pages,
        page_table,
        seq_lens[:, 0] if seq_lens.dim() == 2 else seq_lens,
        None if ragged else q_seq_len,
        q_cu_seq_lens,
        q_seq_len if ragged else None,
        mask,
        flat,
        softmax_scale=q_factor * kv_factor * head_dim**-0.5,
        window_left=sliding_win_size - 1,
        sinks=as_sinks(sinks, num_q_heads, "xqa"),
        k_scale=kv_tensor if q_tensor is None else product(q_tensor, kv_tensor),
        v_scale=v_scale if kv_tensor is None else product(kv_tensor, v_scale),
    )
    finish(result, flat, None)


@names_the_peers("cudnn_batch_decode_with_kv_cache", page_table="block_tables", cache_seqlens="actual_seq_lens_kv")
def cudnn_batch_decode_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Tensor | None = None,
    block_tables: Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: Tensor | None = None,
    batch_offsets_o: Tensor | None = None,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`attnops.ops.xqa_decode` of one token per request over a paged cache.

    Args:
        q: ``[B, H_q, D]``.
        k_cache, v_cache: ``[P, H_kv, page_size, D]``.
        workspace_buffer: Its memory is not needed.
        max_sequence_kv: Nothing depends on it.
        actual_seq_lens_kv: ``[B]`` or ``[B, 1, 1, 1]``.
        block_tables: int32 ``[B, max_pages]``.
        is_cuda_graph_compatible: Taken.
        batch_offsets_q, batch_offsets_o: Taken where q is dense, as it must be.
    """
    name = "cudnn_batch_decode_with_kv_cache"
    dense = "the cache is paged: give block_tables, and leave it None"
    require_default(name, {"batch_offsets_k": dense, "batch_offsets_v": dense}, {}, locals())
    if block_tables is None or actual_seq_lens_kv is None:
        raise refuse(name, "block_tables=None or actual_seq_lens_kv=None", "give both: the cache is paged")
    k_pages, v_pages = split_kv(name, (k_cache, v_cache), "HND")
    lens = actual_seq_lens_kv.reshape(-1)
    result, _ = paged_decode(
        name, q, k_pages, v_pages, block_tables, lens, 1, None, None, None, out, softmax_scale=scale
    )
    return finish(result, out, q.dtype)
