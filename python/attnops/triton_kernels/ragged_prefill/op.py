"""`triton_ragged_prefill`."""

from __future__ import annotations

from torch import Tensor

from attnops.triton_kernels.core.checks import Checks, register
from attnops.triton_kernels.core.launch import Options, attend, query_tiles


@register(
    "triton_ragged_prefill(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, int tile_tokens, float softmax_scale, bool causal, int window_left, float logit_cap, "
    "Tensor? sinks) -> ()"
)
def triton_ragged_prefill(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    tile_tokens: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
) -> None:
    """Attend from ragged queries to ragged keys, aligned at their ends; conventions of `attnops.ops.fmha_varlen`.

    Args:
        out, lse, q, tile_tokens, window_left: As of `triton_unified_extend`.
        k, v: ``[T_k, H_kv, D]`` and ``[T_k, H_kv, D_v]`` in q's dtype; D and D_v may differ (192 and 128).
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    checks = Checks("triton_ragged_prefill", q)
    checks.queries(q, None, out, lse)
    checks.tensor("k", k, ("num_keys", "num_kv_heads", "head_dim"), (q.dtype,))
    checks.tensor("v", v, ("num_keys", "num_kv_heads", "head_dim_v"), (q.dtype,))
    checks.heads()
    checks.bounds("cu_seqlens_q", cu_seqlens_q)
    checks.bounds("cu_seqlens_k", cu_seqlens_k)
    checks.options(sinks, None, None, window_left, logit_cap)
    attend(
        out,
        lse,
        q,
        None,
        Options(softmax_scale=softmax_scale, causal=causal, window_left=window_left, logit_cap=logit_cap),
        query_tiles(q, k.shape[1], k.shape[2], v.shape[2], tile_tokens, decode=False),
        new=(k, v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sinks=sinks,
    )
