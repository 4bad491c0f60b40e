"""Draft steps over FlashInfer's wrappers, in two stages: the prefix once for all branches, then each branch's drafts.

Both are prefill that is not causal, planned on the host. The first has a request's branches as its tokens. A window
leaves them the same last tokens of the prefix (`backends/draft_windows.py`): pages of one token, as the second stage's
are. A branch sees as many drafts as any other in a step, so a graph's plan of the second stage holds for all replays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.attend import plan_of
from attnops.backends.draft_stages import DraftSlots
from attnops.backends.draft_windows import check_pages, lie_in_a_row, some_pages, spread, tokens_of
from attnops.types import AttentionBatch, AttentionSpec, Limits

if TYPE_CHECKING:
    from attnops.backends.flashinfer_plans import FlashInferStep, GraphBuffers, Wrappers
    from attnops.layers.radix_attention import RadixAttention


@dataclass
class Stage:
    """What a wrapper of one stage reads in a step.

    Attributes:
        name: "prefix" or "drafts".
        bounds_q, bounds_k: Of queries and of pages, on the host.
        last_page_len, seqlens_k: Of each of its requests, on the host.
        indices: int32, its pages on the device.
        graph: The buffers of a captured shape; None: the step is eager.
        replanned: Lengths may differ from step to step of a shape.
    """

    name: str
    bounds_q: Tensor
    bounds_k: Tensor
    last_page_len: Tensor
    seqlens_k: Tensor
    page_size: int
    indices: Tensor
    graph: GraphBuffers | None
    replanned: bool


@dataclass
class PlannedStages:
    """Both stages of a step, by window of the model; of each window how much of a prefix it reaches."""

    prefix: dict[int, Stage] = field(default_factory=dict)
    drafts: dict[int, Stage] = field(default_factory=dict)
    reach: dict[int, int] = field(default_factory=dict)


class FlashInferDrafts:
    """Buffers and calls of draft steps.

    Args:
        indices: Pages of prefixes without a window.
    """

    def __init__(
        self, spec: AttentionSpec, limits: Limits, device: torch.device, wrappers: Wrappers, indices: Tensor
    ) -> None:
        self._spec, self._limits, self._wrappers = spec, limits, wrappers
        self._options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._slots = {window: DraftSlots(window, limits, device) for window in spec.windows}
        self._lens = torch.zeros(limits.max_batch_size, **self._options)
        self._starts = torch.zeros(limits.max_batch_size, **self._options)
        self._bounds = torch.zeros(limits.max_batch_size + 1, **self._options)
        self._indices = {-1: indices}
        if spec.sliding_window_size >= 0:
            cells = limits.max_batch_size * max(1, min(spec.sliding_window_size, limits.max_seqlen))
            self._indices[spec.sliding_window_size] = torch.zeros(cells, **self._options)
            self._spread = torch.zeros(cells, **self._options)

    def stages(self, batch: AttentionBatch, seqlens_k: Tensor, graph: GraphBuffers | None) -> PlannedStages:
        """Host work of a step.

        Args:
            seqlens_k: int32 ``[B]`` on the host, what `cache_seqlens` holds.

        Raises:
            ValueError: the batch does not say which step of the loop it is.
        """
        if batch.draft_step is None:
            raise ValueError(
                "attnops: backend flashinfer plans on the host and needs draft_step in the batch, got None"
            )
        size, rows, stages = batch.batch_size, batch.num_tokens, PlannedStages()
        prefix = (seqlens_k - batch.tree_keys).clamp_(min=0)
        branches = torch.arange(size + 1, dtype=torch.int32) * batch.tokens_per_request
        places = torch.arange(rows + 1, dtype=torch.int32)
        for window, slots in self._slots.items():
            page_size, reached, reach = self._spec.page_size, prefix, self._limits.max_seqlen
            if window >= 0:
                page_size, reach = 1, max(window - batch.draft_step, 0)
                reached = prefix.clamp(max=reach)
            count = slots.count(batch)
            paged = paging(reached, page_size)
            seen = torch.full((rows,), count, dtype=torch.int32)
            kinds = (
                {"prefix": graph, "drafts": graph}
                if graph is None
                else self._wrappers.stage_buffers(graph, window, {"prefix": size, "drafts": rows})
            )
            stages.reach[window] = reach
            stages.prefix[window] = Stage(
                "prefix", branches, *paged, reached, page_size, self._indices[window], kinds["prefix"], True
            )
            stages.drafts[window] = Stage(
                "drafts", places, places * count, torch.ones_like(seen), seen, 1, slots.views(batch).view(-1),
                kinds["drafts"], False,
            )  # fmt: skip
        return stages

    def fill(self, stages: PlannedStages, batch: AttentionBatch, report: Tensor | None) -> None:
        """Device work of a step, recorded in a graph: pages of both stages."""
        pool = batch.token_to_kv_pool
        assert batch.req_to_token is not None and pool is not None, "PagedBuffers.build has checked"
        lens, starts = self._lens[: batch.batch_size], self._starts[: batch.batch_size]
        for window, stage in stages.prefix.items():
            torch.sub(batch.cache_seqlens, batch.tree_keys, out=starts).clamp_(min=0)
            torch.clamp(starts, max=stages.reach[window], out=lens)
            starts.sub_(lens)
            lies = window < 0 or lie_in_a_row(some_pages(pool))
            graph = stage.graph
            ops.build_kv_indices(
                batch.req_to_token,
                batch.req_pool_indices,
                lens,
                stage.page_size,
                kv_indptr=self._bounds[: batch.batch_size + 1] if graph is None else graph.bounds_k,
                kv_indices=stage.indices if lies else self._spread,
                kv_last_page_len=None if graph is None else graph.last_page_len,
                kv_start_idx=None if window < 0 else starts,
                slot_map=None if window < 0 else pool.slot_map,
                report=report,
            )
            if not lies:
                stage.indices.copy_(spread(self._spread, some_pages(pool)))
            slots = stages.drafts[window].indices
            self._slots[window].fill(slots.view(batch.num_tokens, -1), batch)

    def attend(
        self,
        step: FlashInferStep,
        layer: RadixAttention,
        batch: AttentionBatch,
        queries: tuple[Tensor, ...],
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        options: dict[str, Any],
    ) -> None:
        """Serves a layer whose k and v are stored.

        Args:
            queries: q, or of MLA its two parts.
            pages: K and V, or the two parts of latents.
            options: Of the wrappers' `run`.

        Raises:
            ValueError: the backend was not built for the layer's window.
            NotImplementedError: as of `draft_windows.check_pages` and `tokens_of`.
        """
        assert step.drafts is not None and batch.token_to_kv_pool is not None
        prefix, drafts = plan_of(layer, step.drafts.prefix), plan_of(layer, step.drafts.drafts)
        tokens = (tokens_of(pages[0]), tokens_of(pages[1]))
        if layer.sliding_window_size >= 0:
            check_pages(layer, batch.token_to_kv_pool)
            pages = tokens
        parts = []
        for stage, read, destination in ((prefix, pages, out), (drafts, tokens, None)):
            run = self._wrappers.stage(step, layer, stage, batch.token_to_kv_pool.dtype).run
            if self._spec.is_mla:
                parts.append(run(*queries, *read, out=destination, return_lse=True))
            else:
                parts.append(run(*queries, read, out=destination, return_lse=True, **options))
        (_, lse), other = parts
        self._wrappers.flashinfer.merge_state_in_place(out, lse, *other)


def cumulative(lengths: Tensor) -> Tensor:
    bounds = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=bounds[1:])
    return bounds


def paging(lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Bounds of each request's pages, and the tokens in its last one."""
    pages = (lengths + (page_size - 1)).div_(page_size, rounding_mode="floor")
    return cumulative(pages), lengths - (pages - 1).clamp_(min=0) * page_size
