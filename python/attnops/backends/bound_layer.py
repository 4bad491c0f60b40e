"""What the calls of one layer share while the shape of the step stays, bound once: each call is then one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnops import ops
from attnops.backends.attend import plan_of
from attnops.backends.base import is_causal
from attnops.backends.draft_windows import WindowStep, check_pages, lie_in_a_row, tokens_of
from attnops.backends.store import FP8, heads, uses_window_slots
from attnops.graph_buffers import PagedStep
from attnops.metadata.plan import MlaDecodePlan, XqaDecodePlan
from attnops.ops.layer_call import bind_mla_layer, bind_xqa_layer, mla_layer, repeatable, xqa_layer
from attnops.plan_buffers import DecodePlan, TokenBlocks
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import TokenPool

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A layer bound for one shape of a step.

    Attributes:
        version, pool, buffers_version: The layer's version, its pool and how often that had replaced buffers, then;
            with others the layer must be bound again.
        call: The layer's op with what was bound, of `ops.layer_call.repeatable`.
        windowed: The layer's pages are those of a sliding-window pool.
        sinks, k_scale, v_scale: The layer's dictionary that holds the tensor of that name; None: there is none. Models
            replace such tensors, so each call looks them up and passes them.
    """

    version: int
    pool: TokenPool
    buffers_version: int
    call: Callable[..., None]
    windowed: bool
    sinks: Mapping[str, Tensor | None] | None
    k_scale: Mapping[str, Tensor | None] | None
    v_scale: Mapping[str, Tensor | None] | None


def _holder(layer: RadixAttention, name: str) -> Mapping[str, Tensor | None] | None:
    """The dictionary of a layer that has its tensor `name`, if it has one now."""
    tensors = layer._parameters if name in layer._parameters else layer._buffers
    return None if tensors[name] is None else tensors


def _stores_then_attends(
    layer: RadixAttention,
    by_request: Callable[[str, Tensor, int], Tensor],
    stored: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    table: Tensor,
    plan: XqaDecodePlan,
    options: dict[str, Any],
) -> Callable[..., None]:
    """What `xqa_layer` does, where `ops.xqa_decode` leaves attending to other kernels, or has other pages to read."""

    def call(
        out: Tensor,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        slots: Tensor | None,
        cache_seqlens: Tensor,
        tree_mask: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        if k is not None and v is not None:
            assert slots is not None
            k = heads("k", k, layer.num_kv_heads, layer.head_dim)
            v = heads("v", v, layer.num_kv_heads, layer.v_head_dim)
            ops.store_kv(*stored, k, v, slots, k_scale=k_scale, v_scale=v_scale, report=options["report"])
        ops.xqa_decode(
            by_request("q", q, layer.head_dim),
            *pages,
            table,
            cache_seqlens,
            plan,
            sinks=sinks,
            tree_mask=tree_mask,
            k_scale=k_scale,
            v_scale=v_scale,
            out=by_request("out", out, layer.v_head_dim),
            **options,
        )

    return call


def bind_layer(
    layer: RadixAttention,
    pool: TokenPool | None,
    step: PagedStep,
    plans: dict[int, DecodePlan],
    blocks: TokenBlocks | None,
    q: Tensor,
    q_rope: Tensor | None,
    out: Tensor,
    cache_seqlens: Tensor,
    report: Tensor | None,
    fp8_products: bool = False,
    tree_keys: int = 0,
    windows: WindowStep | None = None,
) -> BoundLayer:
    """Binds a layer. `q`, `q_rope`, `out` and `cache_seqlens` are those of the call that needs it; `fp8_products` and
    `tree_keys` as of the decode ops. `windows`: Of a layer with a window, in a draft step.

    Raises:
        ValueError: the pool is not one of the layer's kind, or the backend was not built for the layer's window.
        NotImplementedError: as of `draft_windows.check_pages`.
    """
    assert pool is not None, "PagedBuffers.build has checked"
    buffers_version = pool.buffers_version
    plan = plan_of(layer, plans)
    windowed = uses_window_slots(layer, pool)
    tables = step if blocks is None else blocks
    table = tables.window_page_table if windowed else tables.page_table
    if windows is not None:
        check_pages(layer, pool)
        table = windows.table
    assert table is not None

    def by_request(name: str, rows: Tensor, dim: int) -> Tensor:
        tokens = plan.batch_size * plan.seqlen_q
        if rows.shape[0] != tokens:
            raise ValueError(
                f"attnops: {name}.shape[0] must be {tokens} (num_tokens of the batch), got {rows.shape[0]}"
            )
        return heads(name, rows, layer.num_heads, dim).view(plan.batch_size, plan.seqlen_q, layer.num_heads, dim)

    options: dict[str, Any] = {
        "softmax_scale": layer.scaling,
        "causal": is_causal(layer),
        "window_left": -1 if windows is not None else layer.sliding_window_size,
        "logit_cap": layer.logit_cap,
        "report": report,
        "tree_keys": tree_keys,
    }
    if isinstance(plan, MlaDecodePlan):
        if not isinstance(pool, MLATokenToKVPool):
            raise ValueError(f"attnops: an MLA layer reads an MLATokenToKVPool, the batch has a {type(pool).__name__}")
        pages = pool.get_latent_buffer(layer.layer_id)
        pages = pages if windows is None else tokens_of(pages)
        rope_dim = 0 if q_rope is None else pool.qk_rope_head_dim
        q_pe = None if q_rope is None else by_request("q_rope", q_rope, rope_dim)
        queries = by_request("q", q, layer.head_dim - rope_dim)
        rows = by_request("out", out, layer.v_head_dim)  # behind q, whose shape it has where it was made here
        options["fp8_products"] = fp8_products
        bound = bind_mla_layer(rows, queries, q_pe, pages, table, cache_seqlens, plan, **options)
        call = repeatable(mla_layer, bound)
    else:
        if not isinstance(pool, MHATokenToKVPool | SWAKVPool):
            raise ValueError(f"attnops: a layer with K and V cannot use a {type(pool).__name__}")
        k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
        queries = by_request("q", q, layer.head_dim)
        rows = by_request("out", out, layer.v_head_dim)
        stored, in_a_row = (k_pages, v_pages), windows is None or lie_in_a_row(k_pages)
        if windows is not None:
            k_pages, v_pages = tokens_of(k_pages), tokens_of(v_pages)
        if plan.prefill is None and in_a_row:
            bound = bind_xqa_layer(rows, queries, k_pages, v_pages, table, cache_seqlens, plan, **options)
            call = repeatable(xqa_layer, bound)
        else:
            call = _stores_then_attends(layer, by_request, stored, (k_pages, v_pages), table, plan, options)
    return BoundLayer(
        version=layer.version,
        pool=pool,
        buffers_version=buffers_version,
        call=call,
        windowed=windowed,
        sinks=_holder(layer, "sinks"),
        k_scale=_holder(layer, "k_scale") if pool.dtype in FP8 else None,
        v_scale=_holder(layer, "v_scale") if pool.dtype in FP8 else None,
    )
