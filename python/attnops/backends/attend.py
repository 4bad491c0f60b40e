"""One layer's call of each attention op, from what a step prepared: shared by the backends that use the op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from attnops import ops
from attnops.backends.base import is_causal
from attnops.backends.draft_windows import WindowStep, check_pages, tokens_of
from attnops.backends.store import FP8, heads, uses_window_slots
from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import MlaDecodePlan, XqaDecodePlan
from attnops.plan_buffers import DecodePlan, TokenBlocks
from attnops.pools import MLATokenToKVPool
from attnops.types import AttentionBatch, TokenPool

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

Plan = TypeVar("Plan")


def plan_of(layer: RadixAttention, plans: Mapping[int, Plan]) -> Plan:
    """The plan for a layer's window.

    Raises:
        ValueError: the backend was not built for that window.
    """
    if layer.attention_chunk_size:
        raise ValueError(
            f"attnops: layer {layer.layer_id} attends in chunks of {layer.attention_chunk_size}, which the decode ops "
            "do not know: give AttentionSpec.attention_chunk_size to a backend that serves it"
        )
    plan = plans.get(layer.sliding_window_size)
    if plan is None:
        raise ValueError(
            f"attnops: layer {layer.layer_id} has sliding_window_size {layer.sliding_window_size}, the backend was "
            f"built for {' and '.join(map(str, plans))} (AttentionSpec.sliding_window_size)"
        )
    return plan


def _cache_of(layer: RadixAttention, batch: AttentionBatch, step: PagedStep) -> tuple[TokenPool, Tensor]:
    """The batch's pool, and the page table that leads to the layer's pages in it."""
    pool = batch.token_to_kv_pool
    assert pool is not None, "PagedBuffers.build has checked"
    table = step.window_page_table if uses_window_slots(layer, pool) else step.page_table
    assert table is not None
    return pool, table


def _scales(layer: RadixAttention, pool: TokenPool) -> tuple[Tensor | None, Tensor | None]:
    """Of K and V: a layer's scales belong to an FP8 cache."""
    return (layer.k_scale, layer.v_scale) if pool.dtype in FP8 else (None, None)


def xqa_decode(
    q: Tensor,
    layer: RadixAttention,
    batch: AttentionBatch,
    step: PagedStep,
    plans: Mapping[int, DecodePlan],
    out: Tensor,
    report: Tensor | None,
    windows: WindowStep | None = None,
) -> None:
    """A uniform step with K and V in pages. windows: Of a draft step."""
    pool, table = _cache_of(layer, batch, step)
    plan = plan_of(layer, plans)
    assert isinstance(plan, XqaDecodePlan)
    shape = (plan.batch_size, plan.seqlen_q, layer.num_heads)
    k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
    cache_seqlens, tree_mask = batch.cache_seqlens, batch.tree_mask
    if windows is not None and layer.sliding_window_size >= 0:
        check_pages(layer, pool)
        k_pages, v_pages = tokens_of(k_pages), tokens_of(v_pages)
        table, cache_seqlens, tree_mask = windows.of(batch)
    k_scale, v_scale = _scales(layer, pool)
    ops.xqa_decode(
        heads("q", q, layer.num_heads, layer.head_dim).view(*shape, layer.head_dim),
        k_pages,
        v_pages,
        table,
        cache_seqlens,
        plan,
        softmax_scale=layer.scaling,
        causal=is_causal(layer),
        window_left=plan.window_left,
        logit_cap=layer.logit_cap,
        sinks=layer.sinks,
        tree_mask=tree_mask,
        tree_keys=batch.tree_keys,
        out=out.view(*shape, layer.v_head_dim),
        report=report,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def fmha_paged(
    q: Tensor,
    layer: RadixAttention,
    batch: AttentionBatch,
    step: PagedStep,
    cu_seqlens_q: Tensor,
    plans: Mapping[int, FmhaPlan],
    out: Tensor,
    report: Tensor | None,
    hidden_keys: Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> None:
    """A step with K and V in pages. A layer that is not causal has its window on both sides.

    Args:
        prefix: All queries see the whole of the first tokens alone: int32 ``[B]``, how many, and where `lse` goes.
    """
    pool, table = _cache_of(layer, batch, step)
    causal = is_causal(layer) and prefix is None
    k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
    k_scale, v_scale = _scales(layer, pool)
    ops.fmha_paged(
        heads("q", q, layer.num_heads, layer.head_dim),
        k_pages,
        v_pages,
        table,
        batch.cache_seqlens if prefix is None else prefix[0],
        cu_seqlens_q,
        plan_of(layer, plans),
        softmax_scale=layer.scaling,
        causal=causal,
        window_left=layer.sliding_window_size,
        window_right=-1 if causal else layer.sliding_window_size,
        logit_cap=layer.logit_cap,
        sinks=layer.sinks,
        tree_mask=None if batch.tree_mask is None else batch.tree_mask.flatten(0, 1),
        hidden_keys=hidden_keys,
        out=heads("out", out, layer.num_heads, layer.v_head_dim),
        lse=None if prefix is None else prefix[1],
        report=report,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: RadixAttention,
    cu_seqlens_q: Tensor,
    plans: Mapping[int, FmhaPlan],
    out: Tensor,
    report: Tensor | None,
    hidden_keys: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """New tokens among themselves, straight from k and v: causal, or an encoder's, which see their whole request."""
    causal = is_causal(layer)
    ops.fmha_varlen(
        heads("q", q, layer.num_heads, layer.head_dim),
        heads("k", k, layer.num_kv_heads, layer.head_dim),
        heads("v", v, layer.num_kv_heads, layer.v_head_dim),
        cu_seqlens_q,
        cu_seqlens_q,
        plan_of(layer, plans),
        softmax_scale=layer.scaling,
        causal=causal,
        window_left=layer.sliding_window_size,
        window_right=-1 if causal else layer.sliding_window_size,
        logit_cap=layer.logit_cap,
        sinks=layer.sinks,
        hidden_keys=hidden_keys,
        out=heads("out", out, layer.num_heads, layer.v_head_dim),
        lse=lse,
        report=report,
    )


def mla_decode(
    q: Tensor,
    q_rope: Tensor | None,
    layer: RadixAttention,
    batch: AttentionBatch,
    step: PagedStep,
    plans: Mapping[int, DecodePlan],
    blocks: TokenBlocks | None,
    out: Tensor,
    report: Tensor | None,
    windows: WindowStep | None = None,
) -> None:
    """A step with latents in pages; a ragged one in blocks of tokens. windows: Of a draft step."""
    pool, table = _cache_of(layer, batch, step)
    if not isinstance(pool, MLATokenToKVPool):
        raise ValueError(f"attnops: an MLA layer reads an MLATokenToKVPool, the batch has a {type(pool).__name__}")
    plan = plan_of(layer, plans)
    assert isinstance(plan, MlaDecodePlan)
    rope_dim = 0 if q_rope is None else pool.qk_rope_head_dim
    q = heads("q", q, layer.num_heads, layer.head_dim - rope_dim)
    q_pe = None if q_rope is None else heads("q_rope", q_rope, layer.num_heads, rope_dim)
    out = rows = heads("out", out, layer.num_heads, layer.v_head_dim)
    latents, cache_seqlens, tree_mask = pool.get_latent_buffer(layer.layer_id), batch.cache_seqlens, batch.tree_mask
    if windows is not None and layer.sliding_window_size >= 0:
        latents = tokens_of(latents)
        table, cache_seqlens, tree_mask = windows.of(batch)
    if blocks is not None:
        table, cache_seqlens = blocks.page_table, blocks.cache_seqlens
        q, q_pe = blocks.gather(q), None if q_pe is None else blocks.gather(q_pe)
        rows = blocks.results_for(out)
    shape = (plan.batch_size, plan.seqlen_q, layer.num_heads)
    ops.mla_decode(
        q.view(*shape, -1),
        latents,
        table,
        cache_seqlens,
        plan,
        softmax_scale=layer.scaling,
        q_pe=None if q_pe is None else q_pe.view(*shape, -1),
        causal=is_causal(layer),
        window_left=plan.window_left,
        logit_cap=layer.logit_cap,
        sinks=layer.sinks,
        tree_mask=tree_mask,
        tree_keys=batch.tree_keys,
        kv_scale=layer.k_scale if pool.dtype in FP8 else None,
        out=rows.view(*shape, -1),
        report=report,
    )
    if blocks is not None:
        blocks.scatter(rows, out)
