"""Attention of ragged queries over ragged keys, as FlashAttention's users call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import FP8, as_int32, as_sinks, refuse
from attnops.compat._extend import varlen
from attnops.compat._kvcache import Call, window_of


def check_no_grad(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise refuse(name, "tensors that require a gradient", "attnops has no backward pass; use torch.no_grad()")


def attend_varlen(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Out and natural lse of ``[T, H, D]``.

    Args:
        k, v: ``[T_k, H_kv, D]``, ``[T_k, H_kv, D_v]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.
        seqused_q, seqused_k: int32 ``[B]``: the tokens in use of each request's, the first ones.
        num_splits: Other than 0: keys are not split, so that bits do not depend on the batch.
        more: Others of `Call`; they cost tables of tokens, as `seqused_k` does.
    """
    check_no_grad(name, q, k, v)
    bounds = as_int32(name, "cu_seqlens_q", cu_seqlens_q, q.device)
    bounds_k = as_int32(name, "cu_seqlens_k", cu_seqlens_k, q.device)
    index, places, unused = None, None, None
    if seqused_q is not None:
        used = as_int32(name, "seqused_q", seqused_q, q.device)
        index, places, unused, bounds = _packed(bounds, used, q.shape[0])
        q = q.view(torch.uint8)[index].view(q.dtype) if q.dtype == FP8 else q[index]
        if more.get("qv") is not None:
            more["qv"] = more["qv"][index]
    window = window_of(name, window_size)
    left, right = (-1, -1) if isinstance(window, Tensor) else window
    causal, right = (True, -1) if causal or right == 0 else (False, right)
    asked = isinstance(window, Tensor) or any(isinstance(value, Tensor) or value for value in more.values())
    if seqused_k is None and not asked:
        if q.dtype == FP8:
            q = q.to(torch.bfloat16)
        out, lse = varlen(
            q,
            k,
            v,
            bounds,
            bounds_k,
            causal=causal,
            window_left=left,
            window_right=right,
            softmax_scale=softmax_scale,
            logit_cap=softcap,
            sinks=as_sinks(sinks, q.shape[1], name),
            return_lse=return_lse,
            split_keys=num_splits == 0,
        )
    else:
        lens = bounds_k.diff() if seqused_k is None else as_int32(name, "seqused_k", seqused_k, q.device)
        tokens = torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
        call = Call(
            name,
            q,
            k.unsqueeze(1),
            v.unsqueeze(1),
            cache_seqlens=torch.minimum(lens, bounds_k.diff()),
            page_table=bounds_k[:-1].unsqueeze(1) + tokens,
            cu_seqlens_q=bounds,
            max_seqlen_q=max_seqlen_q,
            causal=causal,
            window_size=window if isinstance(window, Tensor) else (left, right),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_lse,
            num_splits=num_splits,
            **more,
        )
        out, lse = call.run()
    if places is None or unused is None:
        return out, lse
    out = out[places].masked_fill(unused.view(-1, 1, 1), 0)
    return out, None if lse is None else lse[places].masked_fill(unused.unsqueeze(1), -torch.inf)


def _packed(bounds: Tensor, used: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in use, one request after the other: their index, the place of every row, which are unused, new bounds."""
    begin, count = bounds[:-1].long(), torch.minimum(used, bounds.diff()).long()
    packed = torch.nn.functional.pad(count.cumsum(0), (1, 0))
    rows = torch.arange(num_rows, device=bounds.device)
    last = max(begin.shape[0] - 1, 0)
    owner = torch.searchsorted(packed[1:].contiguous(), rows, right=True).clamp(max=last)
    index = (begin[owner] + rows - packed[owner]).clamp(0, max(num_rows - 1, 0))
    of_row = torch.searchsorted(bounds[1:].long().contiguous(), rows, right=True)
    padding = of_row > last
    of_row = of_row.clamp(max=last)
    offset = rows - begin[of_row]
    unused = padding | (offset >= count[of_row])
    places = torch.where(unused, 0, packed[of_row] + offset)
    return index, places, unused, packed.int()
