"""`triton_unified_extend`."""

from __future__ import annotations

from torch import Tensor

from attnops.triton_kernels.core.checks import Checks, register
from attnops.triton_kernels.core.launch import Options, Pages, attend, query_tiles


@register(
    "triton_unified_extend(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor? q_pe, Tensor k_pages, Tensor v_pages, "
    "Tensor page_table, Tensor cache_seqlens, Tensor cu_seqlens_q, int tile_tokens, float softmax_scale, bool causal, "
    "int window_left, float logit_cap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale) -> ()"
)
def triton_unified_extend(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    q_pe: Tensor | None,
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
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Attend from the new tokens of ragged requests to all their pages; conventions of `attnops.ops.fmha_paged`.

    Args:
        out: ``[T, H_q, D_v]``, written. Rows that belong to no request are left as they are.
        lse: float32 ``[T, H_q]``, natural log, written when given.
        q: ``[T, H_q, D]``; with `q_pe` ``[T, H_q, D_pe]``, the first ``D - D_pe`` dimensions.
        k_pages, v_pages: ``[P, page_size, H_kv, D]`` and ``[.., D_v]``, in q's dtype or FP8, the new tokens stored.
        page_table: int32 ``[B, max_pages]``.
        cache_seqlens: int32 ``[B]``, the new tokens included.
        cu_seqlens_q: int32 ``[B + 1]``.
        tile_tokens: Most tokens of a tile of queries: a hint, on which no bit depends.
        window_left: Keys at positions ``[p - window_left, p]``, without `causal` as many behind p; -1: off.
        k_scale, v_scale: float32 ``[1]`` or ``[H_kv]``, of FP8 pages.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    checks = Checks("triton_unified_extend", q)
    checks.queries(q, q_pe, out, lse)
    checks.pages(q, k_pages, v_pages, page_table, cache_seqlens)
    checks.bounds("cu_seqlens_q", cu_seqlens_q)
    checks.options(sinks, k_scale, v_scale, window_left, logit_cap)
    attend(
        out,
        lse,
        q,
        q_pe,
        Options(softmax_scale=softmax_scale, causal=causal, window_left=window_left, logit_cap=logit_cap),
        query_tiles(q, k_pages.shape[2], k_pages.shape[3], v_pages.shape[3], tile_tokens, decode=False),
        pages=Pages(k=k_pages, v=v_pages, table=page_table, cache_seqlens=cache_seqlens),
        cu_seqlens_q=cu_seqlens_q,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
