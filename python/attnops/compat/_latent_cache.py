"""FlashAttention's `qv`: MLA on `ops.mla_decode`, other heads and dims on keys with their values behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._attend import padded_rows
from attnops.compat._cache_tables import is_shared
from attnops.compat._convert import FP8, as_sinks, joined_latents, product, refuse
from attnops.metadata.plan import MlaDecodePlan
from attnops.ops._pages import gathered, own_cells

if TYPE_CHECKING:
    from attnops.compat._kvcache import Call


def is_mla(call: Call) -> bool:
    """Whether `mla_decode` serves q and qv: 64 and 512 dims, and one KV head."""
    return call.qv is not None and (call.q.shape[-1], call.qv.shape[-1], call.k_cache.shape[2]) == (64, 512, 1)


def joined_values(
    call: Call, rows: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q with qv behind it, copies of the pages in use (keys with their values, and values), their table, a factor.

    With descales the queries are float32.
    """
    assert call.qv is not None
    qv = call.qv if call.cu_seqlens_q is not None else call.qv.flatten(0, 1)
    qv = qv.to(rows.dtype)
    scales = (call.q_descale, call.k_descale, call.v_descale)
    of_q, of_k, of_v = (call.of_rows(scale, rows) for scale in scales)
    if any(scale is not None for scale in scales):
        rows, qv = _times(rows, of_q, of_k), _times(qv, of_q, of_v)
    v = gathered(v_cache, table)
    keys = [part.view(torch.uint8) if v.dtype.itemsize == 1 else part for part in (gathered(k_cache, table), v)]
    return torch.cat([rows, qv], -1), torch.cat(keys, -1).view(v.dtype), v, own_cells(table), of_v


def _times(rows: Tensor, *factors: Tensor | None) -> Tensor:
    factor = product(*factors)
    return rows.float() if factor is None else rows.float() * factor


def attend_latent(
    call: Call,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    causal: bool,
    left: int,
) -> tuple[Tensor, Tensor | None]:
    """MLA: q is the rotary part, qv the latent one; so are the two caches."""
    qv = call.qv
    assert qv is not None
    if call.slopes is not None:
        raise refuse(call.name, "qv with alibi_slopes", "leave one of them out")
    if call.cu_seqlens_q is None:
        qv = qv.flatten(0, 1)
    dtype = rows.dtype
    scale = (64 + 512) ** -0.5 if call.softmax_scale is None else call.softmax_scale
    qv, kv_scale, of_v = qv.to(dtype), None, None
    scales = (call.q_descale, call.k_descale, call.v_descale)
    if not all(scale is None or is_shared(scale) for scale in scales):
        of_q, of_k, of_v = (call.of_rows(scale, rows) for scale in scales)
        rows, qv = _times(rows, of_q, of_k).to(dtype), _times(qv, of_q, of_v).to(dtype)
    elif any(scale is not None for scale in scales):
        one = torch.ones(1, device=rows.device)
        q_scale, rope, kv_scale = (one if scale is None else scale.reshape(-1)[:1].float() for scale in scales)
        rows = (rows.float() * (q_scale * rope / kv_scale)).to(dtype)
        if call.q_descale is not None:
            qv = (qv.float() * q_scale).to(dtype)
    pages, cells = joined_latents(call.name, v_cache.squeeze(2), k_cache.squeeze(2), table)
    if pages.dtype == FP8 and kv_scale is None:
        kv_scale = torch.ones(1, device=rows.device)
    places = None
    if call.cu_seqlens_q is not None:
        index, places, padding = padded_rows(call.query_bounds(), rows.shape[0], call.seqlen_q)
        rows, qv = rows[index], qv[index]
    plan = MlaDecodePlan.allocate(
        call.batch_size, seqlen_q=call.seqlen_q, num_q_heads=rows.shape[1], window_left=left, device=rows.device
    )
    ops.mla_decode_plan(plan, lens)
    out, lse = ops.mla_decode(
        qv,
        pages,
        cells,
        lens,
        plan,
        softmax_scale=scale,
        q_pe=rows,
        causal=causal,
        window_left=left,
        logit_cap=call.softcap,
        sinks=as_sinks(call.sinks, rows.shape[1], call.name),
        kv_scale=kv_scale,
        return_lse=call.return_lse,
    )
    if places is not None:
        out = out[places].masked_fill(padding.view(-1, 1, 1), 0)
        lse = None if lse is None else lse[places].masked_fill(padding.unsqueeze(1), -torch.inf)
    return (out if of_v is None else (out * of_v).to(dtype)), lse
