"""One layer of a decode step in one call: store the new rows, then attend.

While the shape of a step stays, a layer's calls share pages, page table, plan and options. These are checked once and
bound. A call brings q, the new rows and the lengths. A decode op takes over twenty arguments, and their passing is most
of a call's time on the host: docs/graphs.md has what this saves.

`bound` holds addresses, and keeps the tensors alive whose addresses they are. Whoever binds does so again when one of
them is replaced. The layer ops write pages and scratch that are not among their arguments. So they are for callers that
a compiler does not trace, such as `unified_attention_with_output`.

Passing a layer's tensors through torch's dispatcher takes longer than a launch. `repeatable` gives a function that
passes the first call to the op. From then on it repeats that call with other addresses, while the tensors look the same
and nobody watches torch's ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnops.metadata.plan import MlaDecodePlan, XqaDecodePlan
from attnops.ops._arguments import register_fake

BOUND_BYTES = 2048  # csrc/layer_call/header.h

# Called by position: keyword arguments cost a lookup each.
#   xqa_layer(out, q, k, v, out_cache_loc, cache_seqlens, tree_mask, sinks, k_scale, v_scale, bound)
#   mla_layer(out, q, q_pe, latent, k_pe, out_cache_loc, cache_seqlens, tree_mask, sinks, kv_scale, bound)
#   xqa_pages_layer(out, q, k_pages, v_pages, page_table, cache_seqlens, tree_mask, sinks, k_scale, v_scale, bound)
# Rows of tokens are [num_tokens, heads * dim] or [num_tokens, heads, dim], the last dimension dense. k None: nothing to
# store. out_cache_loc as of `ops.store_kv`, all else as of `ops.xqa_decode` and `ops.mla_decode`. A call of
# xqa_pages_layer stores nothing and brings its own pages: out and q are [B, S_q, H_q, D], any strides but the last.
xqa_layer = torch.ops.attnops.xqa_layer.default
xqa_pages_layer = torch.ops.attnops.xqa_pages_layer.default
mla_layer = torch.ops.attnops.mla_layer.default


# Who may watch torch's ops: modes (fake tensors, tracers, tapes, users' own), profilers, TorchScript's tracer. The
# gradient mode is asked, too; wrapped tensors show by themselves.
_WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch.autograd._profiler_enabled,
    torch._C._is_tracing,
)
try:
    from attnops import _layer_call

    # False: this torch has no DLPack C exchange.
    _REPEATS = _layer_call.setup(torch.Tensor, torch.nn.Parameter, _WATCHERS)
except ImportError:  # a build of the op modules alone
    _REPEATS = False


def is_watched() -> bool:
    """Whether somebody watches torch's ops: what a caller may skip where nobody does, they would miss."""
    in_dispatch, in_function, profiles, traces = _WATCHERS
    return bool(in_dispatch() or in_function() or profiles() or traces())


def repeatable(op: Callable[..., None], bound: Tensor) -> Callable[..., None]:
    """``call(*tensors)``: ``op(*tensors, bound)``, at a fraction of its host time where it only repeats the last call.

    Args:
        op: `xqa_layer`, `xqa_pages_layer` or `mla_layer`.
        bound: Of the matching bind function. The returned call keeps it alive, and so what it keeps.

    The call takes the op's tensors by position, all but `bound`. It raises what the op raises. It reads memory as it
    lies: of a view that torch negates only when it is read (`Tensor.is_neg`), the caller gives `resolve_neg()`.
    """
    if _REPEATS:
        return _layer_call.LayerCall(op, bound, bound.data_ptr()).run
    return lambda *tensors: op(*tensors, bound)


def bind_xqa_layer(
    out: Tensor,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    plan: XqaDecodePlan,
    *,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    report: Tensor | None,
    tree_keys: int = 0,
) -> Tensor:
    """What calls of `xqa_layer` share; arguments as of `ops.xqa_decode`.

    Args:
        out, q, cache_seqlens: Of any such call, ``q`` as ``[B, S_q, H_q, D]``: the others must fit them.

    Returns:
        `bound`, uint8 ``[2048]`` in host memory. It keeps pages, table, plan and report alive; a copy of it does not.

    Raises:
        RuntimeError: what `ops.xqa_decode` refuses; the message names op, argument, dimension, expected and got.
    """
    memory, options = (k_pages, v_pages, page_table), (softmax_scale, causal, window_left, logit_cap)
    op = torch.ops.attnops._xqa_layer_bind.default
    return _bind(op, (out, q), memory, cache_seqlens, plan, options, report, tree_keys)


def bind_xqa_pages_layer(
    out: Tensor,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    plan: XqaDecodePlan,
    *,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    heads_first: bool = False,
) -> Tensor:
    """What calls of `xqa_pages_layer` share: plan and options. The plan must have `fixed_split_tokens` 0.

    Args:
        out, q, k_pages, v_pages, page_table, cache_seqlens: Of any such call, in the shapes of `ops.xqa_decode`. None
            is kept.
        heads_first: Calls bring q, k_pages and v_pages with dims 1 and 2 swapped, as Hugging Face's caches are.

    Returns and raises as `bind_xqa_layer`.
    """
    options = (softmax_scale, causal, window_left, logit_cap)
    op, memory = torch.ops.attnops._xqa_layer_bind.default, (k_pages, v_pages, page_table)
    bound = _bind(op, (out, q), memory, cache_seqlens, plan, options, None, 0, heads_first)
    bound.keeps = bound.keeps[1:]  # type: ignore[attr-defined]
    return bound


def bind_mla_layer(
    out: Tensor,
    q: Tensor,
    q_pe: Tensor | None,
    kv_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    plan: MlaDecodePlan,
    *,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    logit_cap: float,
    report: Tensor | None,
    fp8_products: bool = False,
    tree_keys: int = 0,
) -> Tensor:
    """What calls of `mla_layer` share; arguments as of `ops.mla_decode`, otherwise as `bind_xqa_layer`."""
    memory, options = (kv_pages, page_table), (softmax_scale, causal, window_left, logit_cap)
    op = torch.ops.attnops._mla_layer_bind.default
    return _bind(op, (out, q, q_pe), memory, cache_seqlens, plan, options, report, fp8_products, tree_keys)


def _bind(
    op: Callable[..., None],
    rows: tuple[Tensor | None, ...],
    memory: tuple[Tensor, ...],
    cache_seqlens: Tensor,
    plan: XqaDecodePlan | MlaDecodePlan,
    options: tuple[float | int, ...],
    report: Tensor | None,
    *more: int,
) -> Tensor:
    """Calls a bind op: its tensors, the plan's, its options, in the schema's order.

    Each call brings rows and lengths of its own, so `bound` keeps the rest."""
    bound = torch.zeros(BOUND_BYTES, dtype=torch.uint8, device="cpu")  # whatever torch's default device is
    of_plan = (plan.tile_scheduler_metadata, plan.num_splits, plan.out_partial, plan.lse_partial, plan.semaphores)
    op(bound, *rows, *memory, cache_seqlens, *of_plan, *options, plan.fixed_split_tokens, report, *more)
    bound.keeps = (memory, of_plan, report)  # type: ignore[attr-defined]
    return bound


for _name in ("_xqa_layer_bind", "xqa_layer", "xqa_pages_layer", "_mla_layer_bind", "mla_layer"):
    register_fake(_name, on_host=("bound",))
