"""FlashAttention-2's functions (`flash_attn`). lse: ``[B, H, S]`` or ``[H, T]``, natural log, +inf without a key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import empty_is_plus_inf, heads_first, refuse
from attnops.compat._errors import names_the_peers
from attnops.compat._kvcache import Call, window_of
from attnops.compat._varlen import attend_varlen, check_no_grad

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def _result(out: Tensor, lse: Tensor | None, *more: None) -> Any:
    return out if lse is None else (out, heads_first(empty_is_plus_inf(lse)), *more)


def _check_dropout(name: str, dropout_p: float) -> None:
    if dropout_p:
        raise refuse(name, f"dropout_p={dropout_p}", "attnops serves inference; leave 0")


@names_the_peers("flash_attn_func")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`attnops.ops.fmha_varlen` of sequences of one length; no backward pass.

    Args:
        q: ``[B, S, H_q, D]``.
        k, v: ``[B, S_k, H_kv, D]``, ``[B, S_k, H_kv, D_v]``.
        dropout_p: 0.
        window_size: (left, right), both inclusive; -1: off; also a tensor of two, on any device.
        softcap: 0: off.
        alibi_slopes: float32 ``[H_q]`` or ``[B, H_q]``: ``-slope * |j - p|`` of key j, by a float32 copy of them.
        deterministic: Taken: the same call always gives the same bits.

    Returns:
        ``[B, S, H_q, D_v]``, or with `return_attn_probs` ``(out, lse, None)``: lse ``[B, H_q, S]``.
    """
    name = "flash_attn_func"
    _check_dropout(name, dropout_p)
    check_no_grad(name, q, k, v)
    shared: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    shared |= {"window_size": window_of(name, window_size), "return_lse": return_attn_probs}
    if alibi_slopes is not None:
        out, lse = Call(name, q, k, v, slopes=alibi_slopes, **shared).run()
        return _result(out, lse, None)
    batch_size, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    steps = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device)
    flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), steps * seqlen_q, steps * seqlen_k)
    out, lse = attend_varlen(name, *flat, seqlen_q, seqlen_k, **shared)
    by_request = (batch_size, seqlen_q)
    return _result(out.unflatten(0, by_request), None if lse is None else lse.unflatten(0, by_request), None)


@names_the_peers("flash_attn_varlen_func", k_pages="k", v_pages="v", page_table="block_table")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`attnops.ops.fmha_varlen`, or with `block_table` `attnops.ops.fmha_paged`; no backward pass.

    Args:
        q: ``[T, H_q, D]``.
        k, v: ``[T_k, H_kv, D]``, ``[T_k, H_kv, D_v]``; with `block_table` int32 ``[B, max_pages]``
            pages ``[P, page_size, H_kv, D]``, any page size.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.
        max_seqlen_q, max_seqlen_k: Bounds of their lengths.
        The others are those of `flash_attn_func`.

    Returns:
        ``[T, H_q, D_v]``, or with `return_attn_probs` ``(out, lse, None)``: lse ``[H_q, T]``.
    """
    name = "flash_attn_varlen_func"
    _check_dropout(name, dropout_p)
    shared: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    shared |= {"window_size": window_of(name, window_size), "return_lse": return_attn_probs}
    if block_table is None:
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = attend_varlen(name, q, k, v, *bounds, slopes=alibi_slopes, **shared)
        return _result(out, lse, None)
    check_no_grad(name, q, k, v)
    shared |= {"cache_seqlens": cu_seqlens_k.diff(), "page_table": block_table, "slopes": alibi_slopes}
    out, lse = Call(name, q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, **shared).run()
    return _result(out, lse, None)


@names_the_peers("flash_attn_with_kvcache", k_pages="k_cache", v_pages="v_cache", page_table="block_table")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Decode and extend over a cache, as `attnops.compat.flash_attn_interface.flash_attn_with_kvcache`.

    Args:
        q: ``[B, S_q, H_q, D]``.
        k_cache, v_cache: ``[B, max_seqlen, H_kv, D]``; with `block_table` int32 ``[B, max_pages]`` pages
            ``[P, page_size, H_kv, D]``, any page size.
        k, v: ``[B, S_new, H_kv, D]``: appended in place at `cache_seqlens`, which then counts them not.
        rotary_cos, rotary_sin: ``[seqlen_ro, R / 2]``: turn q and k.
        alibi_slopes: float32 ``[H_q]`` or ``[B, H_q]``: ``-slope * |j - p|`` of key j, by a float32 copy of them.

    Returns:
        ``out`` as q, or ``(out, lse)``: ``[B, H_q, S_q]``.
    """
    arguments = locals()
    given: dict[str, Any] = {key: value for key, value in arguments.items() if key not in _RENAMED}
    shared: dict[str, Any] = {"page_table": block_table, "slopes": alibi_slopes, "return_lse": return_softmax_lse}
    return _result(*Call("flash_attn_with_kvcache", **given, **shared).run())


_RENAMED = ("block_table", "alibi_slopes", "return_softmax_lse")
