"""Draft steps in two stages, through kernels whose tree masks are over the new tokens alone.

The first stage is over a request's prefix, which all of its branches see whole, so it is read once. A window leaves
them the same last part of it (`backends/draft_windows.py`). The second is over each branch's own drafts, which stand
anywhere behind the prefix. So it takes the pool for pages of one token. Its page table is the slots that a row of the
mask names. `merge_state` joins both. Sinks enter with the first stage: it divides by their share, and its `lse` takes
them in afterwards.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.attend import plan_of
from attnops.backends.base import LayerCall
from attnops.backends.draft_windows import DraftWindows, WindowStep, check_pages, some_pages, spread, tokens_of
from attnops.backends.store import FP8, heads
from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plan_buffers import FmhaPlans
from attnops.reference import unpack_tree_mask
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
    """Views for one shape of a draft step, and one window.

    Attributes:
        prefix: Its requests are the batch's.
        drafts: Its requests are the batch's rows.
        slots: int32 ``[T, M]``: of each row the drafts that it sees, as pages of `tokens_of`, then others.
        window: The part of the prefix that the window reaches; None: no window, the prefix is in its own pages.
    """

    prefix: Stage
    drafts: Stage
    slots: Tensor
    window: WindowStep | None = None


class DraftSlots:
    """The drafts that rows of a mask name, as pages of one token: what makes the page table of a second stage.

    Args:
        window: Of the layers; -1: none.
    """

    def __init__(self, window: int, limits: Limits, device: torch.device) -> None:
        self._window, self._rows = window, limits.max_num_tokens
        self._options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._slots: dict[int, Tensor] = {}  # by drafts of a row

    def count(self, batch: AttentionBatch) -> int:
        """Drafts that a row sees, all rows as many where the batch says its `draft_step`; else the most."""
        seen = batch.tree_keys if batch.draft_step is None else batch.draft_step + 1
        return seen if self._window < 0 else min(seen, self._window + 1)

    def views(self, batch: AttentionBatch) -> Tensor:
        """int32 ``[T, count]``."""
        count = self.count(batch)
        if count not in self._slots:
            self._slots[count] = torch.zeros(self._rows, count, **self._options)
        return self._slots[count][: batch.num_tokens]

    def fill(self, slots: Tensor, batch: AttentionBatch) -> Tensor:
        """Writes `slots`. Device work, recorded in a graph; static shapes.

        Returns:
            bool ``[B, tokens_per_request, M]``, the step's mask.
        """
        table, pool, mask = batch.req_to_token, batch.token_to_kv_pool, batch.tree_mask
        assert table is not None and pool is not None and mask is not None, "AttentionBatch and PagedBuffers ask for it"
        seen = unpack_tree_mask(mask, batch.tree_keys)
        end = batch.tree_keys if batch.draft_step is None else batch.draft_step + 1
        order = seen.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., end - slots.shape[1] : end]
        prefix = (batch.cache_seqlens - batch.tree_keys).clamp(min=0)
        cells = (prefix.view(-1, 1, 1) + order).clamp(max=table.shape[1] - 1)
        found = table[batch.req_pool_indices.long().view(-1, 1, 1), cells]
        if self._window >= 0 and pool.slot_map is not None:
            found = pool.slot_map[found.long()].clamp(min=0)
        slots.copy_(spread(found, some_pages(pool)).flatten(0, 1))
        return seen


class DraftStages:
    """Buffers, plans and calls of draft steps, for `FmhaSteps`."""

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        whole = dataclasses.replace(  # all see all of a stage
            spec, attn_type=AttentionType.DECODER_BIDIRECTIONAL, sliding_window_size=-1, attention_chunk_size=0
        )
        rows = limits.max_num_tokens
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._prefix = {window: FmhaPlans(whole, limits, device) for window in spec.windows}
        self._drafts = {window: FmhaPlans(whole, limits, device, max_batch_size=rows) for window in spec.windows}
        self._slots = {window: DraftSlots(window, limits, device) for window in spec.windows}
        self._counts = {window: torch.zeros(rows, **options) for window in spec.windows}
        self._prefix_lens = torch.zeros(limits.max_batch_size, **options)
        self._places = torch.arange(rows + 1, **options)
        self._windows = DraftWindows(spec, limits, device, with_drafts=False)

    def views(self, batch: AttentionBatch, bounds: Tensor) -> dict[int, DraftStep]:
        """By window of the model. bounds: int32 ``[B + 1]``, where the branches of each request begin."""
        size, rows, steps = batch.batch_size, batch.num_tokens, {}
        for window, slots in self._slots.items():
            reached = self._windows.views(batch) if window >= 0 else None
            lengths = self._prefix_lens[:size] if reached is None else reached.seqlens
            prefix = Stage(lengths, bounds, self._prefix[window].views(size, rows)[-1])
            plan = self._drafts[window].views(rows, rows)[-1]
            drafts = Stage(self._counts[window][:rows], self._places[: rows + 1], plan)
            steps[window] = DraftStep(prefix, drafts, slots.views(batch), reached)
        return steps

    def plan(self, steps: dict[int, DraftStep], batch: AttentionBatch, report: Tensor | None) -> None:
        """Device work, recorded in a graph; static shapes."""
        for window, step in steps.items():
            seen = self._slots[window].fill(step.slots, batch)
            if batch.draft_step is None:
                step.drafts.seqlens.copy_(seen.sum(-1, dtype=torch.int32).flatten())
            else:
                step.drafts.seqlens.fill_(step.slots.shape[1])
            if step.window is None:
                torch.sub(batch.cache_seqlens, batch.tree_keys, out=step.prefix.seqlens).clamp_(min=0)
            else:
                self._windows.build(step.window, batch, report)
            for stage in (step.prefix, step.drafts):
                ops.fmha_plan(stage.plan, stage.bounds, cache_seqlens=stage.seqlens)

    def attend(self, call: LayerCall, steps: dict[int, DraftStep], paged: PagedStep, report: Tensor | None) -> None:
        """Serves a layer whose k and v are stored.

        Raises:
            ValueError: the backend was not built for the layer's window.
            NotImplementedError: as of `draft_windows.check_pages` and `tokens_of`.
        """
        layer, pool = call.layer, call.batch.token_to_kv_pool
        assert pool is not None and paged.page_table is not None, "PagedBuffers.build has checked"
        step = plan_of(layer, steps)
        pages = pool.get_kv_buffer(layer.layer_id)
        q = heads("q", call.q, layer.num_heads, layer.head_dim)
        outs = q.new_empty(2, len(q), layer.num_heads, layer.v_head_dim)
        lses = torch.empty(outs.shape[:-1], dtype=torch.float32, device=q.device)
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if pool.dtype in FP8 else (None, None)
        tokens = (tokens_of(pages[0]), tokens_of(pages[1]))
        first = (step.prefix, pages, paged.page_table, layer.sinks)
        if step.window is not None:
            check_pages(layer, pool)
            first = (step.prefix, tokens, step.window.table, layer.sinks)
        calls = (first, (step.drafts, tokens, step.slots, None))
        for index, (stage, (k_pages, v_pages), table, sinks) in enumerate(calls):
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
                sinks=sinks,
                out=outs[index],
                lse=lses[index],
                report=report,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        if layer.sinks is not None:
            torch.logaddexp(lses[0], layer.sinks.detach(), out=lses[0])
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        ops.merge_state(outs[0], lses[0], outs[1], lses[1], out=out, lse=lses[0])
