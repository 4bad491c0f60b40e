"""FlashAttention-3's functions. lse: ``[B, H, S]`` or ``[H, T]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import as_int32, as_sinks, heads_first, refuse
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import new_fmha_plan
from attnops.compat._kvcache import Call
from attnops.compat._plain_cache import plain_call
from attnops.compat._varlen import attend_varlen, check_no_grad

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


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
        window_size: (left, right), both inclusive; -1: off; also a tensor of two. On a GPU it is not read on the host:
            every row is then a request of its own, over a table of tokens.
        softcap: 0: off.
        attention_chunk: A query sees only keys of its own chunk of so many tokens; 0: off. Rows are then decoded one by
            one.
        scheduler_metadata, pack_gqa, sm_margin, ver: Taken: schedules and kernels are attnops'.
        num_splits: 0: balanced. n: at most n splits, so that bits do not depend on the batch.
        sinks: ``[H_q]``, by keyword, as forks have it.

    Returns:
        ``out`` as q, or ``(out, lse)``: natural log ``[B, H_q, S_q]`` or ``[H_q, T]``, -inf for an empty row.
    """
    given = locals()
    if (
        page_table is not None
        and (k is None and v is None and qv is None and rotary_cos is None and rotary_sin is None and out is None)
        and (cache_batch_idx is None and cache_leftpad is None and q_descale is None)
        and not (attention_chunk or only_qv)
        and isinstance(cache_seqlens, Tensor)
        and (max_seqlen_q is None) == (cu_seqlens_q is None)
    ):
        scales = (k_descale, v_descale, softmax_scale, softcap)
        rest = (num_splits, sinks, return_softmax_lse)
        lens = (page_table, cache_seqlens, cu_seqlens_q, window_size, causal)
        plain = plain_call(q, k_cache, v_cache, *lens, *scales, *rest)
        if plain is not None:
            return plain
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
        out_partial: ``[num_splits, B, S, H, D]`` or ``[num_splits, T, H, D]`` float32.
        lse_partial: float32, in that shape without D; any strides.
        out: Destination ``[B, S, H, D]`` or ``[T, H, D]``.
        out_dtype: Of the output; None: as `out`, else float32.

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


@names_the_peers("flash_attn_varlen_func", k_scale="k_descale", v_scale="v_descale", logit_cap="softcap")
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
    window_size: Any = (-1, -1),
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
        q: ``[T, H_q, D]``.
        k, v: ``[T_k, H_kv, D]``, ``[T_k, H_kv, D_v]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.
        max_seqlen_q, max_seqlen_k: Bounds of the lengths.
        seqused_q, seqused_k: int32 ``[B]``: the tokens in use of
            each request's, the first ones; outputs of the others are 0.
        num_splits: 0: balanced. n: keys are not split, so that bits do not depend on the batch.
        pack_gqa, deterministic, sm_margin: Taken: schedules are attnops', and the same call always gives the same bits.
        The others are those of `flash_attn_with_kvcache`.

    Returns:
        ``out``, or with `return_attn_probs` ``(out, lse)``: natural log ``[H_q, T]``, -inf for an empty row.
    """
    name = "flash_attn_varlen_func"
    if (
        q_descale is None
        and k_descale is None
        and v_descale is None
        and seqused_q is None
        and seqused_k is None
        and qv is None
        and not attention_chunk
        and q.dtype == k.dtype == v.dtype
        and q.dtype.itemsize > 1
        and type(window_size) is tuple
    ):  # as little of the host as may be
        check_no_grad(name, q, k, v)
        left, right = window_size
        causal = causal or right == 0
        bounds_q = as_int32(name, "cu_seqlens_q", cu_seqlens_q, q.device)
        bounds_k = as_int32(name, "cu_seqlens_k", cu_seqlens_k, q.device)
        plan = new_fmha_plan(q, k.shape[1], bounds_q.shape[0] - 1, causal, left, num_splits == 0)
        ops.fmha_plan(plan, bounds_q, bounds_k)
        out, lse = ops.fmha_varlen(
            q,
            k,
            v,
            bounds_q,
            bounds_k,
            plan,
            causal=causal,
            window_left=left,
            window_right=-1 if causal else right,
            softmax_scale=softmax_scale,
            logit_cap=softcap,
            sinks=None if sinks is None else as_sinks(sinks, q.shape[1], name),
            return_lse=return_attn_probs,
        )
        return out if lse is None else (out, heads_first(lse))
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    result, lse = attend_varlen(
        name,
        q,
        k,
        v,
        *bounds,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_attn_probs,
        num_splits=num_splits,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk or 0,
    )
    return result if lse is None else (result, heads_first(lse))


@names_the_peers("flash_attn_func", k_scale="k_descale", v_scale="v_descale", logit_cap="softcap")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.fmha_varlen` of requests of one length; no backward pass.

    Args:
        q: ``[B, S_q, H_q, D]``.
        k, v: ``[B, S_k, H_kv, D]``, ``[B, S_k, H_kv, D_v]``.
        qv: ``[B, S_q, H_q, 512]``.
        The others are those of `flash_attn_varlen_func`.

    Returns:
        ``[B, S_q, H_q, D_v]``, or with `return_attn_probs` ``(out, lse)``: natural log ``[B, H_q, S_q]``.
    """
    name = "flash_attn_func"
    for what, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"attnops.compat: {name}: {what} must be [B, S, H, D], got {list(tensor.shape)}")
    batch_size, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    steps = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device)
    result, lse = attend_varlen(
        name,
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        steps * seqlen_q,
        steps * seqlen_k,
        seqlen_q,
        seqlen_k,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_attn_probs,
        num_splits=num_splits,
        qv=None if qv is None else qv.flatten(0, 1),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk or 0,
    )
    result = result.unflatten(0, (batch_size, seqlen_q))
    return result if lse is None else (result, heads_first(lse.unflatten(0, (batch_size, seqlen_q))))


@names_the_peers("get_scheduler_metadata")
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
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
    """What `flash_attn_with_kvcache` takes as `scheduler_metadata`.

    attnops plans on the device within the call, from its own lengths. So this holds no schedule: it is an int32 ``[B +
    1]`` of zeros. It is right for any step, and for a captured graph whose lengths change.

    Args:
        batch_size: Requests.
        cache_seqlens: int32 ``[B]``; it names the device. The others change nothing.

    Raises:
        ValueError: `cache_seqlens` is not ``[B]``.
    """
    if cache_seqlens.shape != (batch_size,):
        raise ValueError(
            f"attnops.compat: get_scheduler_metadata: cache_seqlens must be [{batch_size}] (batch_size), "
            f"got {list(cache_seqlens.shape)}"
        )
    return torch.zeros(batch_size + 1, dtype=torch.int32, device=cache_seqlens.device)
