"""FlashMLA's `get_mla_metadata` and `flash_mla_with_kvcache`, in the forms of all three generations.

Generation 1: ``get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)`` returns two tensors. Generation 2:
``(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk)`` returns the same.
Generation 3: ``get_mla_metadata()`` returns ``(FlashMLASchedMeta, None)``. `flash_mla_with_kvcache` takes all three.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import E5M2, as_sinks, empty_is_plus_inf, heads_first, refuse, require_default
from attnops.compat._errors import names_the_peers
from attnops.compat._flash_mla_sparse import SparsePlans, flash_mla_sparse_fwd
from attnops.compat._flash_mla_sparse import decode_lists as _decode_lists
from attnops.metadata.plan import MLA_HEAD_DIM_V, MlaDecodePlan
from attnops.metadata.plan_parts import MLA_PARTS_PER_SM, default_num_sm_parts

_NO_LIST = "it belongs to `indices`; leave it None"
_OF_LISTS = dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"), _NO_LIST)
_FP8 = torch.float8_e4m3fn
_ROW_BYTES = 656


__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


class FlashMLASchedMeta:
    """Generation 3's schedule. Every call plans again, on the device, from the lengths of that moment.

    So one object serves every step, batch and geometry, and a captured graph that holds the call follows lengths that
    change between replays. Its memory is kept for the last geometry: share one object among calls of one stream only.
    """

    @names_the_peers("FlashMLASchedMeta")
    def __init__(self) -> None:
        self._plan: MlaDecodePlan | None = None
        self.lists = SparsePlans()

    def plan(self, batch_size: int, seqlen_q: int, num_q_heads: int, device: torch.device) -> MlaDecodePlan:
        """The memory for a geometry; the same while it does not change."""
        key = (batch_size, seqlen_q, num_q_heads, device)
        plan = self._plan
        if plan is None or key != (plan.batch_size, plan.seqlen_q, plan.num_q_heads, plan.out_partial.device):
            plan = MlaDecodePlan.allocate(batch_size, seqlen_q=seqlen_q, num_q_heads=num_q_heads, device=device)
            self._plan = plan
        return plan


@names_the_peers("get_mla_metadata", num_q_heads="num_q_tokens_per_head_k")
def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[Tensor | FlashMLASchedMeta, Tensor | None]:
    """A schedule for `flash_mla_with_kvcache`.

    Args:
        cache_seqlens: int32 ``[B]``; None: generation 3.
        num_q_tokens_per_head_k (generation 1: num_heads_per_head_k): ``S_q * H_q // H_k``.
        num_heads_k: Taken: the works of every head's call are the same.
        num_heads_q, is_fp8_kvcache, topk: Taken; the schedule does not depend on them. A call with `indices` plans by
            itself.

    Returns:
        ``(int32 [num_sm_parts, 8], int32 [B + 1])``, planned on the device; or ``(FlashMLASchedMeta, None)``.
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    rows = num_q_tokens_per_head_k if num_heads_per_head_k is None else num_heads_per_head_k
    if rows is None:
        raise ValueError("attnops.compat: get_mla_metadata: num_q_tokens_per_head_k is needed with cache_seqlens")
    parts = default_num_sm_parts(cache_seqlens.device, MLA_PARTS_PER_SM)
    metadata = cache_seqlens.new_zeros(parts, 8)
    num_splits = cache_seqlens.new_zeros(cache_seqlens.shape[0] + 1)
    torch.ops.attnops.mla_decode_plan(metadata, num_splits, cache_seqlens, 1, rows, -1, 0)
    return metadata, num_splits


@names_the_peers(
    "flash_mla_with_kvcache",
    kv_pages="k_cache",
    page_table="block_table",
    kv_scale="descale_k",
    sinks="attn_sink",
)
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | FlashMLASchedMeta,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attnops.ops.mla_decode`, or with `indices` `attnops.ops.sparse_mla_decode`, without a host synchronization.

    Args:
        q: ``[B, S_q, H_q, 576]`` in bf16 or fp16. Over a float8 cache it may be float8_e4m3fn, with `descale_q`.
            Products over e4m3 may then round to e4m3, as the peer's do, and the output is bf16.
        k_cache: ``[P, page_size, H_k, 576]``, any page size; float8_e4m3fn or float8_e5m2 with `descale_k`, where
            `is_fp8_kvcache` may be left out; with it rows ``[P, page_size, 1, 656]`` of a one-byte dtype. Of several
            heads, each is a call of the op with its share of the query heads.
        block_table: int32 ``[B, max_blocks]``.
        cache_seqlens: int32 ``[B]``.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: What `get_mla_metadata` returned. Tensors hold for the lengths that they
            were made for; a `FlashMLASchedMeta` follows the lengths.
        softmax_scale: ``576 ** -0.5`` when None.
        indices: int32 ``[B, S_q, topk]``: ``page * page_size + offset`` of rows, below 0: none. `k_cache` may then also
            be of 16-bit rows, or hold rows of 584 bytes or 512 values. `block_table`, `cache_seqlens` and `num_splits`
            are not read. Every call plans anew.
        extra_k_cache, extra_indices_in_kvcache: A second cache of such rows, and its lists.
        topk_length, extra_topk_length: int32 ``[B]``: how many of a list count.
        attn_sink: ``[H_q]``, a logit per head with no value.
        descale_q, descale_k: float32 ``[1]``: real value = stored x scale. By keyword only: forks differ in where they
            stand.

    Returns:
        ``(out [B, S_q, H_q, 512], lse [B, H_q, S_q])``, lse natural log, ``+inf`` for a row without a key.

    Raises:
        NotImplementedError: naming the argument that is not honoured.
    """
    name = "flash_mla_with_kvcache"
    if head_dim_v != MLA_HEAD_DIM_V:
        raise refuse(name, f"head_dim_v={head_dim_v}", "values are the first 512 of a latent")
    if indices is not None:
        for argument, given in (("causal=True", causal), ("descale_q", descale_q), ("descale_k", descale_k)):
            if given is not None and given is not False:
                raise refuse(name, f"{argument} with indices", "lists say what is seen, and rows carry their scales")
        if (k_cache.element_size() == 1) != is_fp8_kvcache:
            raise ValueError(f"attnops.compat: {name}: is_fp8_kvcache={is_fp8_kvcache} with k_cache of {k_cache.dtype}")
        plans = tile_scheduler_metadata
        return _decode_lists(
            name,
            plans.lists if isinstance(plans, FlashMLASchedMeta) else SparsePlans(),
            q,
            k_cache,
            indices,
            softmax_scale,
            attn_sink,
            extra_k_cache,
            extra_indices_in_kvcache,
            topk_length,
            extra_topk_length,
        )
    if not (extra_k_cache is extra_indices_in_kvcache is topk_length is extra_topk_length is None):
        require_default(name, _OF_LISTS, {}, locals())
    if block_table is None or cache_seqlens is None:
        raise refuse(name, "block_table=None or cache_seqlens=None", "dense attention needs both")
    num_heads_k = k_cache.shape[2] if k_cache.dim() == 4 else 0
    if not num_heads_k or q.dim() != 4 or q.shape[2] % num_heads_k:
        raise ValueError(
            f"attnops.compat: {name}: k_cache must be [P, page_size, H_k, D] with H_k of which q's {q.shape[-2]} heads "
            f"are a multiple, got {list(k_cache.shape)}"
        )
    k_cache = _checked_pages(name, k_cache, is_fp8_kvcache, descale_k)
    rounded = q.dtype == _FP8
    if rounded and k_cache.dtype not in (_FP8, E5M2):
        raise refuse(name, f"q of float8_e4m3fn with a cache of {k_cache.dtype}", "give q in bf16")
    if rounded:
        q = (q.float() if descale_q is None else q.float() * descale_q).to(torch.bfloat16)
        rounded = k_cache.dtype == _FP8
    elif descale_q is not None:
        raise refuse(name, f"descale_q with q of {q.dtype}", "only float8_e4m3fn queries have a scale")
    num_q_heads, head_dim = q.shape[2:]
    group = num_q_heads // num_heads_k
    sinks = as_sinks(attn_sink, num_q_heads, name, "attn_sink")
    plan = _plan_of(name, q, group, cache_seqlens, tile_scheduler_metadata, num_splits)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    kv_scale = None if descale_k is None else descale_k.reshape(1).float()
    if num_heads_k == 1:
        out, lse = ops.mla_decode(
            q,
            k_cache.squeeze(2),
            block_table,
            cache_seqlens,
            plan,
            softmax_scale=scale,
            causal=causal,
            sinks=sinks,
            kv_scale=kv_scale,
            return_lse=True,
            fp8_products=rounded,
        )
        assert lse is not None
        return out, heads_first(empty_is_plus_inf(lse))
    out = q.new_empty(*q.shape[:-1], MLA_HEAD_DIM_V)
    parts = []
    for head in range(num_heads_k):
        mine = slice(head * group, (head + 1) * group)
        _, lse = ops.mla_decode(
            q[:, :, mine],
            k_cache[:, :, head],
            block_table,
            cache_seqlens,
            plan,
            softmax_scale=scale,
            causal=causal,
            sinks=None if sinks is None else sinks[mine].contiguous(),
            kv_scale=kv_scale,
            out=out[:, :, mine],
            return_lse=True,
            fp8_products=rounded,
        )
        assert lse is not None
        parts.append(lse)
    return out, heads_first(empty_is_plus_inf(torch.cat(parts, -1)))


def _checked_pages(name: str, pages: Tensor, is_fp8_kvcache: bool, descale_k: Tensor | None) -> Tensor:
    """The cache as the op takes it: rows of 656 bytes are uint8."""
    one_byte = pages.element_size() == 1
    if one_byte != is_fp8_kvcache and pages.dtype not in (_FP8, E5M2):
        raise ValueError(f"attnops.compat: {name}: is_fp8_kvcache={is_fp8_kvcache} with k_cache of {pages.dtype}")
    if one_byte and pages.shape[-1] == _ROW_BYTES:
        if descale_k is not None:
            raise refuse(name, "descale_k with rows of 656 bytes", "they carry their scales; leave it None")
        return pages.view(torch.uint8)
    if descale_k is not None and not one_byte:
        raise refuse(name, f"descale_k with a cache of {pages.dtype}", "only float8 caches have a scale")
    return pages


def _plan_of(
    name: str,
    q: Tensor,
    num_q_heads: int,
    cache_seqlens: Tensor,
    metadata: Tensor | FlashMLASchedMeta,
    num_splits: Tensor | None,
) -> MlaDecodePlan:
    """The schedule that the caller has, or one made now for a `FlashMLASchedMeta`."""
    batch_size, seqlen_q = q.shape[:2]
    if isinstance(metadata, FlashMLASchedMeta):
        if num_splits is not None:
            raise refuse(name, "num_splits beside a FlashMLASchedMeta", "it plans by itself; leave None")
        plan = metadata.plan(batch_size, seqlen_q, num_q_heads, q.device)
        ops.mla_decode_plan(plan, cache_seqlens)
        return plan
    if num_splits is None:
        raise ValueError(f"attnops.compat: {name}: num_splits is needed beside a tile_scheduler_metadata tensor")
    parts = metadata.shape[0]
    scratch = MlaDecodePlan.allocate(
        batch_size, seqlen_q=seqlen_q, num_q_heads=num_q_heads, num_sm_parts=parts, device=q.device
    )
    return dataclasses.replace(scratch, tile_scheduler_metadata=metadata, num_splits=num_splits)
