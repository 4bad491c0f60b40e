"""FlashInfer's decode functions, for `attnops.compat.flashinfer`: single_decode, trtllm, xqa, cudnn."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._attend import Positions, decode, ragged_decode
from attnops.compat._convert import (
    FP4_CACHE,
    FP4_OUT,
    NO_SKIP,
    Cache,
    as_dtype,
    as_int32,
    as_scale,
    as_sinks,
    as_tree_mask,
    check_lse,
    finish,
    fold_scale,
    product,
    refuse,
    require_default,
    split_kv,
    to_log2,
    with_lse,
)
from attnops.compat._errors import names_the_peers
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
        q: ``[H_q, D]``. k, v: ``[S, H_kv, D]`` (NHD) or ``[H_kv, S, D]`` (HND).
        use_tensor_cores: Taken. q_scale, k_scale: Multiply the scores. v_scale: Multiplies the output.
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
        workspace_buffer, multi_ctas_kv_counter_buffer: Their memory is not needed. max_seq_len: Nothing depends on it.
        block_tables: int32 ``[B, max_pages]``. seq_lens: ``[B]`` int32 or uint32.
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
    if skip_softmax_threshold_scale_factor:
        raise refuse(name, f"skip_softmax_threshold_scale_factor={skip_softmax_threshold_scale_factor}", NO_SKIP)
    dtype = as_dtype(name, "out_dtype", out_dtype)
    k_pages, v_pages = split_kv(name, kv_cache, kv_layout)
    scale, on_device = fold_scale(name, "bmm1_scale", bmm1_scale, query.device)
    check_lse(name, lse, query)
    result, natural = _paged_decode(
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
        sinks=as_sinks(sinks, query.shape[1], name),
        k_scale=on_device,
        v_scale=as_scale(name, "bmm2_scale", bmm2_scale, query.device),
        return_lse=return_lse or lse is not None,
    )
    return with_lse(finish(result, out, dtype or query.dtype), natural, lse, return_lse)


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
        page_table: int32 ``[B, max_pages]``. seq_lens: uint32 ``[B, 1]``.
        workspace_buffer, semaphores: Their memory is not needed. sm_count, enable_pdl: Taken: choices.
        sinks: float32 ``[H_kv, group]``.
        q_scale: Scores are ``q_scale * kv_scale / sqrt(D) * <q, k>``. kv_scale: K and V. Numbers or tensors of one.
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
    result, _ = _paged_decode(
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
        q: ``[B, H_q, D]``. k_cache, v_cache: ``[P, H_kv, page_size, D]``.
        workspace_buffer: Its memory is not needed. max_sequence_kv: Nothing depends on it.
        actual_seq_lens_kv: ``[B]`` or ``[B, 1, 1, 1]``. block_tables: int32 ``[B, max_pages]``.
        is_cuda_graph_compatible: Taken. batch_offsets_q, batch_offsets_o: Taken where q is dense, as it must be.
    """
    name = "cudnn_batch_decode_with_kv_cache"
    dense = "the cache is paged: give block_tables, and leave it None"
    require_default(name, {"batch_offsets_k": dense, "batch_offsets_v": dense}, {}, locals())
    if block_tables is None or actual_seq_lens_kv is None:
        raise refuse(name, "block_tables=None or actual_seq_lens_kv=None", "give both: the cache is paged")
    k_pages, v_pages = split_kv(name, (k_cache, v_cache), "HND")
    lens = actual_seq_lens_kv.reshape(-1)
    result, _ = _paged_decode(
        name, q, k_pages, v_pages, block_tables, lens, 1, None, None, None, out, softmax_scale=scale
    )
    return finish(result, out, q.dtype)


def _paged_decode(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lens: Tensor,
    seqlen_q: int | None,
    bounds: Tensor | None,
    max_q_len: int | None,
    mask: Tensor | None,
    out: Tensor | None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """One call with a plan of its own: out and natural lse, of uniform queries or of ragged ones."""
    lens = as_int32(name, "seq_lens", lens if lens.dim() == 1 else lens.reshape(-1), q.device)
    if bounds is not None:
        if max_q_len is None:
            raise ValueError(f"attnops.compat: {name}: ragged queries need max_q_len")
        bounds = as_int32(name, "cum_seq_lens_q", bounds, q.device)
        tree = as_tree_mask(name, mask, max_q_len)
        if tree is not None:
            tree = tree.reshape(-1, tree.shape[-1])
        return ragged_decode(
            name,
            q,
            k_pages,
            v_pages,
            table,
            lens,
            bounds,
            max_q_len,
            tree_mask=tree,
            **options,  # type: ignore[arg-type]
        )
    if max_q_len is not None and seqlen_q is None:
        seqlen_q = max_q_len
    batch_size, seqlen_q = table.shape[0], 1 if seqlen_q is None else seqlen_q
    if seqlen_q < 1:
        raise ValueError(f"attnops.compat: {name}: a request must bring at least 1 query token, got {seqlen_q}")
    if q.shape[0] != batch_size * seqlen_q:
        raise ValueError(
            f"attnops.compat: {name}: query must have {batch_size * seqlen_q} rows (q_len_per_req {seqlen_q} for "
            f"each of the {batch_size} rows of the page table), got {q.shape[0]}"
        )
    return decode(
        name,
        q,
        k_pages,
        v_pages,
        table,
        lens,
        seqlen_q=seqlen_q,
        tree_mask=as_tree_mask(name, mask, seqlen_q),
        out=out,
        **options,  # type: ignore[arg-type]
    )
