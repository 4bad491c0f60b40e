"""FlashAttention-2's `alibi_slopes`: the score of key j to the query at p gets ``-slope * |j - p|``.

Where no key is masked, those behind a query and those ahead of it are two calls, with slopes of two signs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._attend import Positions, decode, padded_rows, ragged_decode
from attnops.compat._cache_tables import one_token_pages, token_table
from attnops.compat._convert import refuse
from attnops.compat._masks import pack_bits

if TYPE_CHECKING:
    from attnops.compat._kvcache import Call


def attend_alibi(
    call: Call,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Tensor,
    causal: bool,
    window: tuple[int, int],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Out and natural lse of queries ``[T, H, D]``."""
    name, seqlen_q, slopes = call.name, call.seqlen_q, call.slopes
    assert slopes is not None
    if call.softcap:
        raise refuse(name, "alibi_slopes with softcap", "the bias would be capped, too; leave one of them out")
    given = {"positions": Positions("ALIBI", slopes=slopes), "window_left": window[0], **options}
    caches = (k_cache, v_cache, table, lens)
    uniform = call.cu_seqlens_q is None
    if causal or seqlen_q == 1:
        if uniform:
            return decode(name, rows, *caches, seqlen_q=seqlen_q, **given)
        return ragged_decode(name, rows, *caches, call.query_bounds(), seqlen_q, **given)
    if rows.shape[0] == 0:
        return rows.clone(), rows.new_zeros(rows.shape[:2], dtype=torch.float32) if call.return_lse else None
    dtype, wide = rows.dtype, rows.float()
    if not uniform:
        index, places, padding = padded_rows(call.query_bounds(), rows.shape[0], seqlen_q)
        wide = wide[index]
    given["return_lse"] = True
    behind = decode(name, wide, *caches, seqlen_q=seqlen_q, **given)
    begin = (lens - seqlen_q).clamp(min=0)
    tail = token_table(table, k_cache.shape[1], begin, seqlen_q), lens.clamp(max=seqlen_q)
    mask = _keys_ahead(seqlen_q, window[1], rows.device)
    given |= {"positions": Positions("ALIBI", slopes=-slopes), "window_left": -1, "sinks": None}
    given["tree_mask"] = mask.expand(lens.shape[0], *mask.shape).contiguous()
    ahead = decode(name, wide, one_token_pages(k_cache), one_token_pages(v_cache), *tail, seqlen_q=seqlen_q, **given)
    assert behind[1] is not None and ahead[1] is not None
    out, lse = ops.merge_state(behind[0].contiguous(), behind[1], ahead[0].contiguous(), ahead[1])
    if not uniform:
        out = out[places].masked_fill(padding.view(-1, 1, 1), 0)
        lse = lse[places].masked_fill(padding.unsqueeze(1), -torch.inf)
    return out.to(dtype), lse if call.return_lse else None


def _keys_ahead(seqlen_q: int, right: int, device: torch.device) -> Tensor:
    """Masks ``[S_q, bytes]`` of a request's new tokens, as the ops take them: tokens after each one, at most `right`
    unless that is below 0."""
    token = torch.arange(-(-seqlen_q // 8) * 8, device=device)
    steps = token - token[:seqlen_q].unsqueeze(1)
    seen = (steps > 0) & (token < seqlen_q)
    return pack_bits(seen if right < 0 else seen & (steps <= right))
