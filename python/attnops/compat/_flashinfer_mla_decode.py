"""FlashInfer's MLA decode functions, for `attnops.compat.flashinfer`: trtllm, xqa."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._attend import padded_rows
from attnops.compat._convert import (
    FP8,
    as_int32,
    as_scale,
    as_sinks,
    check_lse,
    finish,
    refuse,
    require_default,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.metadata.plan import MlaDecodePlan


@names_the_peers(
    "trtllm_batch_decode_with_kv_cache_mla",
    q="query",
    kv_pages="kv_cache",
    page_table="block_tables",
    cache_seqlens="seq_lens",
    kv_scale="bmm2_scale",
)
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    *,
    return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.mla_decode` with FlashInfer's folded scales; several query tokens are causal among themselves.

    Args:
        query: ``[B, q_len, H, 576]``; or, with `cum_seq_lens_q` int32 ``[B + 1]`` and `max_q_len`, ``[T, H, 576]``.
            float8_e4m3fn queries give bfloat16 outputs, and kernels may then round products as the peer's do.
        kv_cache: ``[P, page_size, 576]`` or ``[P, 1, page_size, 576]``.
        workspace_buffer, multi_ctas_kv_counter_buffer: Their memory is not needed. qk_nope_head_dim, max_seq_len,
            kv_scale_format: Nothing depends on them.
        kv_lora_rank, qk_rope_head_dim: 512 and 64.
        block_tables: int32 ``[B, max_pages]``.
        seq_lens: int32 ``[B]``; None: all that the tables hold.
        bmm1_scale: q scale x k scale x softmax scale. bmm2_scale: of the values. Numbers, or float32 tensors of one,
            which are multiplied into a copy of `query`.
        enable_pdl, backend, cute_dsl_impl, use_fp16_softmax: Taken: choices among kernels; softmax is float32 here.
        is_var_seq: Taken: lengths may always differ.
        lse: float32 ``[B, q_len, H]`` or ``[B * q_len, H]``, written when given.
        enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global: With one query token, which sees all keys of its rank.
        return_lse_base: "base2" or "basee"; None is base 2.

    Returns:
        ``[B, q_len, H, 512]``, or with `return_lse` ``(out, lse)``, lse in the shape of the given one or
        ``[B * q_len, H]``, -inf for an empty row.
    """
    name = "trtllm_batch_decode_with_kv_cache_mla"
    if sparse_mla_top_k or sparse_mla_top_k_lens is not None or uses_shared_paged_kv_idx is not True:
        require_default(
            name,
            {
                "sparse_mla_top_k": "compat.flash_mla.flash_mla_with_kvcache takes lists; leave it 0",
                "sparse_mla_top_k_lens": "compat.flash_mla.flash_mla_with_kvcache takes lists; leave it None",
                "uses_shared_paged_kv_idx": "a latent is key and value at once; leave it True",
            },
            {"sparse_mla_top_k": 0, "uses_shared_paged_kv_idx": True},
            locals(),
        )
    if (kv_lora_rank, qk_rope_head_dim) != (512, 64):
        raise refuse(name, f"kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}", "512 and 64 are served")
    if enable_dcp and cp_world > 1 and (query.dim() != 4 or query.shape[1] != 1):
        raise refuse(name, "enable_dcp with several query tokens", "give one query token a call")
    if return_lse_base not in (None, "base2", "basee"):
        raise ValueError(
            f"attnops.compat: {name}: return_lse_base must be base2, basee or None, got {return_lse_base!r}"
        )
    if not isinstance(bmm2_scale, Tensor) and bmm2_scale == 0:
        raise ValueError(f"attnops.compat: {name}: bmm2_scale must not be 0")
    for what, given in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)):
        if isinstance(given, Tensor) and given.numel() != 1:
            raise refuse(name, f"{what} of shape {list(given.shape)}", "give one number or a tensor of one")
    if cum_seq_lens_q is None and query.dim() != 4:
        raise ValueError(f"attnops.compat: {name}: query must be [B, q_len, H, 576], got {list(query.shape)}")
    rounded = query.dtype.itemsize == 1
    q = query.to(torch.bfloat16) if rounded else query
    pages = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
    fp8 = pages.dtype in (FP8, torch.float8_e5m2)  # the op scales keys by kv_scale, too, so bmm1 leaves it out
    kv_scale = as_scale(name, "bmm2_scale", bmm2_scale, query.device) if fp8 else None
    scale: float | Tensor = bmm1_scale / bmm2_scale if fp8 else bmm1_scale
    if isinstance(scale, Tensor):
        q, scale = (q.float() * scale).to(q.dtype), 1.0
    rows, places, padding = None, None, None
    if cum_seq_lens_q is not None:
        if max_q_len is None:
            raise ValueError(f"attnops.compat: {name}: cum_seq_lens_q needs max_q_len")
        bounds = as_int32(name, "cum_seq_lens_q", cum_seq_lens_q, query.device)
        rows, places, padding = padded_rows(bounds, q.shape[0], max_q_len)
        if q.shape[0] == 0:
            return finish(q.new_empty(0, q.shape[1], 512), out, None)
        q = q[rows].unflatten(0, (block_tables.shape[0], max_q_len))
    batch_size, seqlen_q, num_q_heads, _ = q.shape
    flat_lse = lse
    if lse is not None:
        flat_lse = lse.view(-1, num_q_heads) if lse.shape == query.shape[:-1] else lse
        check_lse(name, flat_lse, query.flatten(0, -3))
    if seq_lens is None:
        lens = torch.full((batch_size,), block_tables.shape[1] * pages.shape[1], dtype=torch.int32, device=q.device)
    else:
        flat = seq_lens if seq_lens.dim() == 1 else seq_lens.reshape(-1)
        lens = as_int32(name, "seq_lens", flat, q.device)
    plan = MlaDecodePlan.allocate(batch_size, seqlen_q=seqlen_q, num_q_heads=num_q_heads, device=q.device)
    ops.mla_decode_plan(plan, lens)
    direct = places is None and out is not None and out.dtype == q.dtype
    result, natural = ops.mla_decode(
        q,
        pages,
        block_tables,
        lens,
        plan,
        softmax_scale=scale,
        sinks=as_sinks(sinks, num_q_heads, name),
        kv_scale=kv_scale,
        out=out if direct else None,
        return_lse=return_lse or lse is not None,
        fp8_products=rounded and pages.dtype == FP8,
    )
    if not fp8 and (isinstance(bmm2_scale, Tensor) or bmm2_scale != 1):
        result.mul_(bmm2_scale)
    if places is not None and padding is not None:
        result = result.flatten(0, 1)[places].masked_fill(padding.view(-1, 1, 1), 0)
        if natural is not None:
            natural = natural.flatten(0, 1)[places].masked_fill(padding.unsqueeze(1), -torch.inf)
    result = finish(result, out, None)
    if natural is None:
        return result
    natural = natural.reshape(-1, num_q_heads)
    in_base = with_lse(result, natural, flat_lse, True, return_lse_base == "basee")[1]
    return (result, in_base if lse is None else lse) if return_lse else result


@names_the_peers("xqa_batch_decode_with_kv_cache_mla")
def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | list[Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """`trtllm_batch_decode_with_kv_cache_mla` by another name."""
    return trtllm_batch_decode_with_kv_cache_mla(  # type: ignore[return-value]
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens.reshape(-1),
        max_seq_len,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
    )


@names_the_peers("xqa_mla", q="q", kv_pages="k_cache", cache_seqlens="seq_lens", out="output")
def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    page_size: int,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """`attnops.ops.mla_decode` with XQA's axes.

    Args:
        q, output: ``[B, 1, H, 576]`` and ``[B, 1, H, 512]``.
        k_cache: ``[P, page_size, 1, 576]`` or ``[P, page_size, 576]``.
        v_cache: its first 512, which are read there.
        page_table: int32 ``[B, max_pages]``.
        seq_lens: uint32 ``[B, 1]``.
        workspace_buffer, semaphores: Their memory is not needed.
        sm_count, enable_pdl: Taken: choices.
        q_scale: Scores are ``q_scale * kv_scale / sqrt(576) * <q, k>``.
        kv_scale: of latents as keys and values.
    """
    pages = k_cache.squeeze(2) if k_cache.dim() == 4 else k_cache
    if pages.shape[1] != page_size:
        raise ValueError(f"attnops.compat: xqa_mla: page_size={page_size}, k_cache has {pages.shape[1]}")
    if output.shape != (*q.shape[:-1], 512):
        raise ValueError(f"attnops.compat: xqa_mla: output must be {[*q.shape[:-1], 512]}, got {list(output.shape)}")
    trtllm_batch_decode_with_kv_cache_mla(
        q,
        pages,
        workspace_buffer,
        128,
        512,
        64,
        page_table,
        seq_lens.reshape(-1),
        0,
        out=output,
        bmm1_scale=q_scale * kv_scale * 576**-0.5,
        bmm2_scale=kv_scale,
    )
