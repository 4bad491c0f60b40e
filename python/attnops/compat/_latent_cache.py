"""FlashAttention's `qv`: MLA on `ops.mla_decode`, other heads and dims on keys with their values behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._attend import padded_rows
from attnops.compat._cache_tables import one_number
from attnops.compat._convert import FP8, as_sinks, joined_latents, refuse
from attnops.metadata.plan import MlaDecodePlan
from attnops.ops._pages import gathered, own_cells

if TYPE_CHECKING:
    from attnops.compat._kvcache import Call


def is_mla(call: Call) -> bool:
    """Whether `mla_decode` serves q and qv: 64 and 512 dims, and one KV head."""
    return call.qv is not None and (call.q.shape[-1], call.qv.shape[-1], call.k_cache.shape[2]) == (64, 512, 1)


def joined_values(
    call: Call, rows: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q with qv behind it, and copies of the pages in use: keys with values behind them, and values."""
    assert call.qv is not None
    if any(scale is not None for scale in (call.q_descale, call.k_descale, call.v_descale)):
        raise refuse(call.name, "descales with qv", "MLA of 512 and 64 dims and one KV head has them")
    qv = call.qv if call.cu_seqlens_q is not None else call.qv.flatten(0, 1)
    v = gathered(v_cache, table)
    return torch.cat([rows, qv], -1), torch.cat([gathered(k_cache, table), v], -1), v, own_cells(table)


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
    qv, kv_scale = qv.to(dtype), None
    if call.q_descale is not None:
        factor = one_number(call.name, "q_descale", call.q_descale)
        rows, qv = (rows.float() * factor).to(dtype), (qv.float() * factor).to(dtype)
    if call.v_descale is not None or call.k_descale is not None:
        one = torch.ones(1, device=rows.device)
        kv_scale = one if call.v_descale is None else one_number(call.name, "v_descale", call.v_descale)
        rope = one if call.k_descale is None else one_number(call.name, "k_descale", call.k_descale)
        rows = (rows.float() * (rope / kv_scale)).to(dtype)
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
    if places is None:
        return out, lse
    out = out[places].masked_fill(padding.view(-1, 1, 1), 0)
    return out, None if lse is None else lse[places].masked_fill(padding.unsqueeze(1), -torch.inf)
