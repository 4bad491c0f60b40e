"""Multi-item scoring: a prompt's items see its prefix and themselves, through `fmha_paged`, `fmha_varlen` and a merge.

Three calls share a step. The prefix's queries are causal over the prefix. The items' queries see all of the prefix. And
they see the step's own keys of their item, whose delimiter is no key. The paged calls take a request for two. What does
not belong to a call has no keys there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import LayerCall
from attnops.backends.store import FP8, heads, store_kv
from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.types import AttentionBatch, AttentionSpec, Limits


@dataclass(frozen=True)
class MultiItemStep:
    """Device tensors of one step.

    Attributes:
        part_bounds: int32 ``[2 * B + 1]``: queries of each request's prefix, and of its items.
        prefix_keys, item_keys: int32 ``[2 * B]``: keys of the causal call, and of the other.
        page_table: Of the parts.
        bounds_q, bounds_k: int32 ``[T + 1]``: of the items, and of stretches of prefix, which have no keys.
        order: int64 ``[T]``: the tokens that are keys of items, then the others.
    """

    part_bounds: Tensor
    prefix_keys: Tensor
    item_keys: Tensor
    page_table: Tensor
    bounds_q: Tensor
    bounds_k: Tensor
    order: Tensor


class MultiItemSteps:
    """Prefill of prompts with items, of models whose layers have K and V and no window, sinks or chunks.

    Raises:
        NotImplementedError: the model has one of these, or an FP8 cache.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        windowed = spec.sliding_window_size >= 0 or spec.attention_chunk_size > 0
        if spec.is_mla or windowed or spec.has_sinks or spec.cache_dtype in FP8:
            raise NotImplementedError(
                "attnops: multi-item scoring knows no latents, windows, chunks, sinks or FP8 cache"
            )
        options: dict[str, Any] = {"num_q_heads": spec.num_q_heads, "num_kv_heads": spec.num_kv_heads, "device": device}
        options["head_dim"] = max(spec.head_dim, spec.v_head_dim)
        tokens, parts = limits.max_num_tokens, 2 * limits.max_batch_size
        self._plans = [
            FmhaPlan.allocate(tokens, parts, causal=True, **options),
            FmhaPlan.allocate(tokens, parts, causal=False, **options),
            FmhaPlan.allocate(tokens, tokens, causal=True, **options),
        ]
        self._step: MultiItemStep | None = None
        self._views: list[FmhaPlan] = []

    def build(self, batch: AttentionBatch, paged: PagedStep) -> None:
        """Device work of a step, whose page table is built. Nothing is read on the host."""
        params, count, size = batch.multi_item, batch.num_tokens, batch.batch_size
        assert params is not None and batch.extend_seq_lens is not None and paged.page_table is not None
        assert paged.cu_seqlens_q is not None, "AttentionBatch has checked that the step is ragged"
        new, lengths = batch.extend_seq_lens.long(), batch.cache_seqlens.long()
        cached = lengths - new
        prefix = params.prefix_len_ptr.long().clamp(min=0).minimum(lengths)
        own = (prefix - cached).clamp(min=0).minimum(new)  # queries of the prefix
        none = torch.zeros_like(own)
        begins = paged.cu_seqlens_q.long()
        token = torch.arange(count, device=batch.device)
        request = (torch.searchsorted(begins, token, right=True) - 1).clamp(max=size - 1)
        exists = token < begins[-1]
        behind = cached[request] + token - begins[request] - prefix[request]  # tokens behind the prefix's end
        is_item = exists & (behind >= 0)
        place = params.places(request, behind.clamp(min=0))
        is_key = is_item & (place > 0)
        starts = exists & ((is_item & (place == 0)) | (behind == 0) | (token == begins[request]))
        segment = (starts.cumsum(0) - 1).clamp(min=0)

        def per_segment(flags: Tensor) -> Tensor:
            lens = torch.zeros(count, dtype=torch.int64, device=batch.device).index_add_(0, segment, flags.long())
            return ops.build_cu_seqlens(lens.int())

        parts = torch.stack([own, new - own], 1).flatten().int()
        self._step = step = MultiItemStep(
            part_bounds=ops.build_cu_seqlens(parts),
            prefix_keys=torch.stack([cached + own, none], 1).flatten().int(),
            item_keys=torch.stack([none, prefix], 1).flatten().int(),
            page_table=paged.page_table.repeat_interleave(2, 0),
            bounds_q=per_segment(exists),
            bounds_k=per_segment(is_key),
            order=torch.argsort((~is_key).byte(), stable=True),
        )
        sizes = (2 * size, 2 * size, count)
        self._views = [
            dataclasses.replace(plan, tile_order=plan.tile_order[: -(-count // plan.tile_q) + requests])
            for plan, requests in zip(self._plans, sizes)
        ]
        ops.fmha_plan(self._views[0], step.part_bounds, cache_seqlens=step.prefix_keys)
        ops.fmha_plan(self._views[1], step.part_bounds, cache_seqlens=step.item_keys)
        ops.fmha_plan(self._views[2], step.bounds_q, step.bounds_k)

    def attend(self, call: LayerCall, paged: PagedStep, report: Tensor | None) -> None:
        """Serves a layer.

        Raises:
            ValueError: the call lacks k or v, which items attend to.
        """
        layer, batch, step, pool = call.layer, call.batch, self._step, call.batch.token_to_kv_pool
        assert step is not None and pool is not None, "build has run"
        if call.k is None or call.v is None:
            raise ValueError("attnops: multi-item scoring needs the k and v of the step's own tokens")
        if layer.sliding_window_size >= 0 or layer.sinks is not None or layer.attention_chunk_size:
            raise ValueError("attnops: multi-item scoring knows no windows, sinks or chunks")
        if call.save_kv_cache:
            store_kv(layer, batch, paged, call.k, call.v, report)
        q = heads("q", call.q, layer.num_heads, layer.head_dim)
        k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)[step.order]
        v = heads("v", call.v, layer.num_kv_heads, layer.v_head_dim)[step.order]
        outs = q.new_empty(3, q.shape[0], layer.num_heads, layer.v_head_dim)
        lses = torch.empty(outs.shape[:-1], dtype=torch.float32, device=q.device)
        options: dict[str, Any] = {"softmax_scale": layer.scaling, "logit_cap": layer.logit_cap, "report": report}
        (k_pages, v_pages), table = pool.get_kv_buffer(layer.layer_id), step.page_table
        for index, keys in enumerate((step.prefix_keys, step.item_keys)):
            options |= {"causal": index == 0, "out": outs[index], "lse": lses[index]}
            ops.fmha_paged(q, k_pages, v_pages, table, keys, step.part_bounds, self._views[index], **options)
        options |= {"causal": True, "out": outs[2], "lse": lses[2]}
        ops.fmha_varlen(q, k, v, step.bounds_q, step.bounds_k, self._views[2], **options)
        ops.merge_states(outs, lses, out=heads("out", call.out, layer.num_heads, layer.v_head_dim))
