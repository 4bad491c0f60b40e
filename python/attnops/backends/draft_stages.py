"""Draft steps in two stages, through kernels whose tree masks are over the new tokens alone.

The first stage is over a request's prefix, which all of its branches see whole, so it is read once. The second is over
each branch's own drafts, which stand anywhere behind the prefix. So it takes the pool for pages of one token. Its page
table is the slots that a row of the mask names. `merge_state` joins both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import LayerCall
from attnops.backends.store import FP8, heads
from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plan_buffers import FmhaPlans
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits


@dataclass(frozen=True)
class Stage:
    """One call of `fmha_paged`, not causal.

    Attributes:
        seqlens: int32, keys of each of its requests.
        bounds: int32, where the queries of each begin, and the end.
    """

    seqlens: Tensor
    bounds: Tensor
    plan: FmhaPlan


@dataclass(frozen=True)
class DraftStep:
    """Views for one shape of a draft step.

    Attributes:
        prefix: Its requests are the batch's.
        drafts: Its requests are the batch's rows.
        slots: int32 ``[T, tree_keys]``: of each row the drafts that it sees, then others.
    """

    prefix: Stage
    drafts: Stage
    slots: Tensor


class DraftStages:
    """Buffers, plans and calls of draft steps, for `FmhaSteps`. The layers have no window and no sinks."""

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        whole = dataclasses.replace(spec, attn_type=AttentionType.DECODER_BIDIRECTIONAL)  # all see all of a stage
        rows = limits.max_num_tokens
        self._prefix = FmhaPlans(whole, limits, device)
        self._drafts = FmhaPlans(whole, limits, device, max_batch_size=rows)
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._prefix_lens = torch.zeros(limits.max_batch_size, **options)
        self._counts = torch.zeros(rows, **options)
        self._places = torch.arange(rows + 1, **options)
        self._slots: dict[int, Tensor] = {}  # by tokens that a mask is over
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def views(self, batch: AttentionBatch, bounds: Tensor) -> DraftStep:
        """bounds: int32 ``[B + 1]``, where the branches of each request begin."""
        size, rows, keys = batch.batch_size, batch.num_tokens, batch.tree_keys
        if keys not in self._slots:
            self._slots[keys] = self._counts.new_zeros(len(self._counts), keys)
        return DraftStep(
            Stage(self._prefix_lens[:size], bounds, self._prefix.views(size, rows)[-1]),
            Stage(self._counts[:rows], self._places[: rows + 1], self._drafts.views(rows, rows)[-1]),
            self._slots[keys][:rows],
        )

    def plan(self, step: DraftStep, batch: AttentionBatch) -> None:
        """Device work, recorded in a graph; static shapes."""
        mask, table = batch.tree_mask, batch.req_to_token
        assert mask is not None and table is not None, "AttentionBatch and PagedBuffers have checked"
        torch.sub(batch.cache_seqlens, batch.tree_keys, out=step.prefix.seqlens).clamp_(min=0)
        seen = (mask.unsqueeze(-1) >> self._bits & 1).flatten(2)[..., : batch.tree_keys]
        step.drafts.seqlens.copy_(seen.sum(-1, dtype=torch.int32).flatten())
        order = seen.sort(dim=-1, descending=True, stable=True).indices
        cells = (step.prefix.seqlens.view(-1, 1, 1) + order).clamp(max=table.shape[1] - 1)
        rows = batch.req_pool_indices.long().view(-1, 1, 1)
        step.slots.copy_(table[rows, cells].flatten(0, 1))
        for stage in (step.prefix, step.drafts):
            ops.fmha_plan(stage.plan, stage.bounds, cache_seqlens=stage.seqlens)

    def attend(self, call: LayerCall, step: DraftStep, paged: PagedStep, report: Tensor | None) -> None:
        """Serves a layer whose k and v are stored."""
        layer, pool = call.layer, call.batch.token_to_kv_pool
        assert pool is not None and paged.page_table is not None, "PagedBuffers.build has checked"
        pages = pool.get_kv_buffer(layer.layer_id)
        q = heads("q", call.q, layer.num_heads, layer.head_dim)
        outs = q.new_empty(2, len(q), layer.num_heads, layer.v_head_dim)
        lses = torch.empty(outs.shape[:-1], dtype=torch.float32, device=q.device)
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if pool.dtype in FP8 else (None, None)
        tokens = [rows.flatten(0, 1).unsqueeze(1) for rows in pages]
        calls = ((step.prefix, pages, paged.page_table), (step.drafts, tokens, step.slots))
        for index, (stage, (k_pages, v_pages), table) in enumerate(calls):
            ops.fmha_paged(
                q,
                k_pages,
                v_pages,
                table,
                stage.seqlens,
                stage.bounds,
                stage.plan,
                softmax_scale=layer.scaling,
                causal=False,
                logit_cap=layer.logit_cap,
                out=outs[index],
                lse=lses[index],
                report=report,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        ops.merge_state(outs[0], lses[0], outs[1], lses[1], out=out, lse=lses[0])
