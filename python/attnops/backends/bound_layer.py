"""What the calls of one layer share while the shape of the step stays, bound once: each call is then one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnops.backends.attend import plan_of
from attnops.backends.base import is_causal
from attnops.backends.store import FP8, uses_window_slots
from attnops.graph_buffers import PagedStep
from attnops.metadata.plan import MlaDecodePlan
from attnops.ops.layer_call import bind_mla_layer, bind_xqa_layer
from attnops.plan_buffers import DecodePlan, TokenBlocks
from attnops.pools import KVCache, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer bound for one shape of a step.

    Attributes:
        version, pool: The layer's version and its pool then; with others it must be bound again.
        bound: Of `ops.layer_call`.
        keeps: What `bound` holds addresses of.
        windowed: The layer's pages are those of a sliding-window pool.
        has_sinks, has_scales: Whether a call reads the layer's; tensors that models replace are passed, not bound.
    """

    version: int
    pool: KVCache
    bound: Tensor
    keeps: tuple[object, ...]
    windowed: bool
    has_sinks: bool
    has_scales: bool

    def serves(self, version: int, pool: KVCache | None) -> bool:
        return self.version == version and self.pool is pool


def bind_layer(
    layer: RadixAttention,
    pool: KVCache | None,
    step: PagedStep,
    plans: dict[int, DecodePlan],
    blocks: TokenBlocks | None,
    q: Tensor,
    q_rope: Tensor | None,
    out: Tensor,
    cache_seqlens: Tensor,
    report: Tensor | None,
) -> BoundLayer:
    """Binds a layer. `q`, `q_rope`, `out` and `cache_seqlens` are those of the call that needs it.

    Raises:
        ValueError: the pool is not one of the layer's kind, or the backend was not built for the layer's window.
    """
    assert pool is not None, "PagedBuffers.build has checked"
    plan = plan_of(layer, plans)
    windowed = uses_window_slots(layer, pool)
    tables = step if blocks is None else blocks
    table = tables.window_page_table if windowed else tables.page_table
    assert table is not None

    def by_request(rows: Tensor, dim: int) -> Tensor:
        return rows.view(plan.batch_size, plan.seqlen_q, layer.num_heads, dim)

    options: dict[str, Any] = {
        "softmax_scale": layer.scaling,
        "causal": is_causal(layer),
        "window_left": layer.sliding_window_size,
        "logit_cap": layer.logit_cap,
        "report": report,
    }
    pages: tuple[Tensor, ...]
    rows = by_request(out, layer.v_head_dim)
    if isinstance(plan, MlaDecodePlan):
        if not isinstance(pool, MLATokenToKVPool):
            raise ValueError(f"attnops: an MLA layer reads an MLATokenToKVPool, the batch has a {type(pool).__name__}")
        pages = (pool.get_latent_buffer(layer.layer_id),)
        rope_dim = 0 if q_rope is None else pool.qk_rope_head_dim
        q_pe = None if q_rope is None else by_request(q_rope, rope_dim)
        queries = by_request(q, layer.head_dim - rope_dim)
        bound = bind_mla_layer(rows, queries, q_pe, *pages, table, cache_seqlens, plan, **options)
    else:
        if not isinstance(pool, MHATokenToKVPool | SWAKVPool):
            raise ValueError(f"attnops: a layer with K and V cannot use a {type(pool).__name__}")
        pages = pool.get_kv_buffer(layer.layer_id)
        queries = by_request(q, layer.head_dim)
        bound = bind_xqa_layer(rows, queries, *pages, table, cache_seqlens, plan, **options)
    return BoundLayer(
        version=layer.version,
        pool=pool,
        bound=bound,
        keeps=(pages, table, plan, report),
        windowed=windowed,
        has_sinks=layer.sinks is not None,
        has_scales=pool.dtype in FP8 and (layer.k_scale is not None or layer.v_scale is not None),
    )
