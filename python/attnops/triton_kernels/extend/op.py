"""`triton_extend`."""

from __future__ import annotations

from torch import Tensor

from attnops.triton_kernels.core.checks import Checks, register
from attnops.triton_kernels.core.launch import Options, Pages, attend, query_tiles


@register(
    "triton_extend(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor? q_pe, Tensor k, Tensor v, Tensor k_pages, "
    "Tensor v_pages, Tensor page_table, Tensor cache_seqlens, Tensor cu_seqlens_q, int tile_tokens, "
    "float softmax_scale, bool causal, int window_left, float logit_cap, Tensor? sinks) -> ()"
)
def triton_extend(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    q_pe: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    tile_tokens: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
) -> None:
    """Attend from the new tokens of ragged requests to their prefix in pages and to themselves in `k` and `v`.

    The pages of the new tokens are not read, so they may be stored before, after, or never.

    Args:
        out, lse, q, q_pe: As of `triton_unified_extend`.
        k, v: ``[T, H_kv, D]`` and ``[T, H_kv, D_v]``, of the same tokens as q.
        k_pages, v_pages: ``[P, page_size, H_kv, D]`` in q's dtype: FP8 pages belong to `triton_unified_extend`.
        cache_seqlens: int32 ``[B]``, the new tokens included.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    checks = Checks("triton_extend", q)
    checks.queries(q, q_pe, out, lse)
    checks.pages(q, k_pages, v_pages, page_table, cache_seqlens)
    checks.require(k_pages.dtype == q.dtype, f"k_pages must have q's dtype, got {k_pages.dtype}")
    checks.tensor("k", k, ("num_tokens", "num_kv_heads", "head_dim"), (q.dtype,))
    checks.tensor("v", v, ("num_tokens", "num_kv_heads", "head_dim_v"), (q.dtype,))
    checks.bounds("cu_seqlens_q", cu_seqlens_q)
    checks.options(sinks, None, None, window_left, logit_cap)
    attend(
        out,
        lse,
        q,
        q_pe,
        Options(softmax_scale=softmax_scale, causal=causal, window_left=window_left, logit_cap=logit_cap),
        query_tiles(q, k_pages.shape[2], k_pages.shape[3], v_pages.shape[3], tile_tokens, decode=False),
        pages=Pages(k=k_pages, v=v_pages, table=page_table, cache_seqlens=cache_seqlens),
        new=(k, v),
        cu_seqlens_q=cu_seqlens_q,
        sinks=sinks,
    )
