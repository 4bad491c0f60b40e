"""FlashAttention-3's functions. lse: ``[B, H, S]`` or ``[H, T]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import as_sinks, heads_first, refuse, require_default
from attnops.compat._errors import names_the_peers
from attnops.compat._kvcache import Call
from attnops.metadata.fmha_plan import FmhaPlan

_INSTEAD = {
    "qv": "MLA is attnops.ops.mla_decode, or attnops.compat.flash_mla",
    "q_descale": "queries are 16-bit; fold their scale into softmax_scale",
    "attention_chunk": "use window_size, or leave 0",
    "sm_margin": "the whole device is used; leave 0",
}


@names_the_peers(
    "flash_attn_with_kvcache",
    k_pages="k_cache",
    v_pages="v_cache",
    k_scale="k_descale",
    v_scale="v_descale",
    window_left="of window_size",
    window_right="of window_size",
    logit_cap="softcap",
)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool = False,
    ver: int = 3,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode (`attnops.ops.xqa_decode`, `attnops.ops.mla_decode`) and paged extend (`attnops.ops.fmha_paged`).

    Args:
        q: ``[B, S_q, H_q, D]``; or, with `cu_seqlens_q` int32 ``[B + 1]`` and `max_seqlen_q`, ``[T, H_q, D]``.
            float8_e4m3fn gives a bfloat16 output.
        k_cache, v_cache: ``[P, page_size, H_kv, D]`` with `page_table` int32 ``[B, max_pages]``, any page size;
            without, ``[B, max_seqlen, H_kv, D]``. `cache_batch_idx` int32 ``[B]`` may choose rows of either.
        k, v: ``[B, S_new, H_kv, D]``, or ``[T_new, H_kv, D]`` with `cu_seqlens_k_new` ``[B + 1]``: appended in place at
            `cache_seqlens`, which then counts them not.
        qv: ``[B, S_q, H_q, 512]`` or ragged: MLA, with `q` and `k_cache` of 64 and `v_cache` of 512. The two caches are
            read where they lie if they are neighbours in one pool; else the pages in use are copied.
        rotary_cos, rotary_sin: ``[seqlen_ro, R / 2]``: turn q and k, at `rotary_seqlens` ``[B]`` or `cache_seqlens`.
        cache_seqlens: int32 ``[B]`` or a number; None: the whole cache.
        cache_leftpad: int32 ``[B]``: a request's keys begin there.
        q_descale, k_descale, v_descale: float32 ``[B, H_kv]``, of an FP8 cache. The same for all requests, expanded
            from ``[H_kv]`` or one number, they cost nothing; else queries are float32.
        window_size: (left, right), both inclusive; -1: off; also a tensor of two on the CPU. softcap: 0: off.
        attention_chunk: A query sees only keys of its own chunk of so many tokens; 0: off. Rows are then decoded one by
            one.
        scheduler_metadata, pack_gqa, sm_margin, ver: Taken: schedules and kernels are attnops'.
        num_splits: 0: balanced. n: at most n splits, so that bits do not depend on the batch.
        sinks: ``[H_q]``, by keyword, as forks have it.

    Returns:
        ``out`` as q, or ``(out, lse)``: natural log ``[B, H_q, S_q]`` or ``[H_q, T]``, -inf for an empty row.
    """
    given = locals()
    if only_qv:
        raise refuse("flash_attn_with_kvcache", "only_qv=True", "MLA has a rotary part of 64")
    options = {key: value for key, value in given.items() if key not in _NOT_OF_A_CALL}
    options["attention_chunk"] = attention_chunk or 0  # sgl_kernel's default is None
    result, lse = Call("flash_attn_with_kvcache", **options, return_lse=return_softmax_lse).run()
    return result if lse is None else (result, heads_first(lse))


_NOT_OF_A_CALL = ("scheduler_metadata", "pack_gqa", "sm_margin", "return_softmax_lse", "only_qv", "ver")


@names_the_peers("flash_attn_combine", outs="out_partial", lses="lse_partial")
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`attnops.ops.merge_states` of splits.

    Args:
        out_partial: ``[num_splits, B, S, H, D]`` or ``[num_splits, T, H, D]`` float32. lse_partial: float32, in that
            shape without D; any strides.
        out: Destination ``[B, S, H, D]`` or ``[T, H, D]``. out_dtype: Of the output; None: as `out`, else float32.

    Returns:
        ``(out, lse)``: natural log ``[B, S, H]`` or ``[T, H]``, -inf for a row without keys.
    """
    shape = out_partial.shape[1:]
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"attnops.compat: flash_attn_combine: lse_partial must be {list(out_partial.shape[:-1])} as out_partial, "
            f"got {list(lse_partial.shape)}"
        )
    flat = out_partial.flatten(1, -3) if out_partial.dim() > 4 else out_partial
    merged, lse = ops.merge_states(flat, lse_partial.float().flatten(1, -2).contiguous())
    merged, lse = merged.view(shape), lse.view(shape[:-1])
    if out is not None:
        return out.copy_(merged), lse
    return merged.to(out_dtype or out_partial.dtype), lse


@names_the_peers(
    "flash_attn_varlen_func",
    k_scale="k_descale",
    v_scale="v_descale",
    window_left="of window_size",
    window_right="of window_size",
    logit_cap="softcap",
)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.fmha_varlen`; no backward pass.

    Args:
        q: ``[T, H_q, D]``. k, v: ``[T_k, H_kv, D]``, ``[T_k, H_kv, D_v]``. cu_seqlens_q, cu_seqlens_k: int32
            ``[B + 1]``.
        max_seqlen_q, max_seqlen_k: Nothing depends on them. pack_gqa, deterministic: Taken: the same call always gives
            the same bits.

    Returns:
        ``out``, or with `return_attn_probs` ``(out, lse)``: natural log ``[H_q, T]``, -inf for an empty row.
    """
    name = "flash_attn_varlen_func"
    used = "cut the tensors to the tokens in use"
    instead = {key: _INSTEAD[key] for key in ("qv", "q_descale", "attention_chunk", "sm_margin")}
    instead |= {"seqused_q": used, "seqused_k": used}
    attention_chunk = attention_chunk or 0
    require_default(name, instead, {"attention_chunk": 0, "sm_margin": 0}, locals())
    if num_splits not in (0, 1):
        raise refuse(name, f"num_splits={num_splits}", "keys are not split here; leave 1")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise refuse(name, "tensors that require a gradient", "attnops has no backward pass; use torch.no_grad()")
    window_left, window_right = window_size
    if causal or window_right == 0:
        causal, window_right = True, -1
    plan = _fmha_plan(q, k, cu_seqlens_q.shape[0] - 1, causal, window_left)
    ops.fmha_plan(plan, cu_seqlens_q, cu_seqlens_k)
    out, lse = ops.fmha_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        plan,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logit_cap=softcap,
        sinks=as_sinks(sinks, q.shape[1], name),
        k_scale=_descale(name, "k_descale", k_descale),
        v_scale=_descale(name, "v_descale", v_descale),
        return_lse=return_attn_probs,
    )
    return out if lse is None else (out, heads_first(lse))


def _fmha_plan(q: Tensor, k: Tensor, batch_size: int, causal: bool, window_left: int) -> FmhaPlan:
    heads = {"num_q_heads": q.shape[1], "num_kv_heads": k.shape[-2]}
    return FmhaPlan.allocate(q.shape[0], batch_size, causal=causal, window_left=window_left, device=q.device, **heads)


def _descale(function: str, name: str, scale: Tensor | None) -> Tensor | None:
    """``[H_kv]`` of ``[B, H_kv]`` whose requests are the same by its strides; the values are not read."""
    if scale is None:
        return None
    if scale.dim() != 2 or (scale.shape[0] > 1 and scale.stride(0) != 0):
        raise refuse(function, f"{name} per request", "expand one number, or one per KV head, to [B, H_kv]")
    return scale[0].contiguous()
