"""`sgl_kernel.flash_attn`: FlashAttention-3's functions with the arguments of that fork."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat import flash_attn_interface
from attnops.compat._convert import heads_first, refuse, to_dtype
from attnops.compat._errors import names_the_peers
from attnops.compat._varlen import attend_varlen
from attnops.compat.flash_attn_interface import flash_attn_with_kvcache

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata", "is_fa3_supported"]


@names_the_peers("flash_attn_varlen_func")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    ver: int = 3,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.fmha_varlen`; no backward pass.

    Args:
        q: ``[T, H_q, D]``.
        k, v: ``[T_k, H_kv, D]``, ``[T_k, H_kv, D_v]``.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``.
        max_seqlen_q, max_seqlen_k: Bounds of the lengths; None: any.
        seqused_q, seqused_k: int32 ``[B]``: the tokens in use of each request's, the first ones.
        num_splits: 0: balanced. n: keys are not split, so that bits do not depend on the batch.
        pack_gqa, sm_margin, ver: Taken: schedules and kernels are attnops'.
        sinks: ``[H_q]``.
        out: Destination.
        The others are those of `attnops.compat.flash_attn_interface.flash_attn_with_kvcache`.

    Returns:
        ``out``, or with `return_softmax_lse` ``(out, lse)``: natural log ``[H_q, T]``, -inf for an empty row.
    """
    name = "flash_attn_varlen_func"
    if page_table is not None:
        raise refuse(name, "page_table", "flash_attn_with_kvcache takes pages")
    if only_qv:
        raise refuse(name, "only_qv=True", "MLA has a rotary part of 64")
    result, lse = attend_varlen(
        name,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] if max_seqlen_k is None else max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_softmax_lse,
        num_splits=num_splits,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk or 0,
    )
    if out is not None:
        result = out.copy_(to_dtype(result, out.dtype))
    return result if lse is None else (result, heads_first(lse))


@names_the_peers("get_scheduler_metadata")
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """`attnops.compat.flash_attn_interface.get_scheduler_metadata`, with the arguments of this fork.

    Args:
        batch_size: Requests.
        cache_seqlens: int32 ``[B]``; it names the device. The others change nothing.

    Returns:
        int32 ``[B + 1]``; SGLang copies it to the front of a longer buffer.

    Raises:
        ValueError: `cache_seqlens` is not ``[B]``.
    """
    return flash_attn_interface.get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens
    )


@names_the_peers("is_fa3_supported")
def is_fa3_supported(device: Any = None) -> bool:
    """True: attnops has a kernel for these calls on every device that it runs on."""
    return True
