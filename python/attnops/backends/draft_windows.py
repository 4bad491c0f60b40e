"""Draft steps of layers with a window: what it reaches of the prefix, and the drafts behind, as pages of one token.

All branches of a step stand at one depth, behind as many drafts of their own. So a window leaves all of them the same
last tokens of the prefix. A table that begins with the first of these needs no window: masks over the drafts are all
that is left to ask for. It may begin within a page, so its pages are tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.store import uses_window_slots
from attnops.metadata.plan import MlaDecodePlan
from attnops.plan_buffers import DecodePlan, DecodePlans
from attnops.reference import pack_tree_mask, unpack_tree_mask
from attnops.types import AttentionBatch, AttentionSpec, Limits, TokenPool

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


def tokens_of(pages: Tensor) -> Tensor:
    """Pages ``[P, page_size, ...]`` as pages of one token: a view, in which slot s is page `spread(s)`.

    Raises:
        NotImplementedError: pages do not lie at a multiple of the distance of tokens.
    """
    size = pages.shape[1]
    if size == 1:
        return pages
    by_page, by_token, *others = pages.stride()
    if by_page % by_token:
        raise NotImplementedError(
            f"attnops: draft steps read pages token by token: a page's stride {by_page} must be a multiple of a "
            f"token's, {by_token}"
        )
    count = (pages.shape[0] - 1) * (by_page // by_token) + size
    strides = (by_token, by_token, *others)
    return pages.as_strided((count, 1, *pages.shape[2:]), strides, pages.storage_offset())


def lie_in_a_row(pages: Tensor) -> bool:
    """Whether slots are the pages of `tokens_of`: tokens of all pages lie at one distance."""
    return pages.shape[1] == 1 or pages.stride(0) == pages.stride(1) * pages.shape[1]


def spread(slots: Tensor, pages: Tensor) -> Tensor:
    """Slots as the pages of `tokens_of`: the same where these lie in a row."""
    if lie_in_a_row(pages):
        return slots
    size, apart = pages.shape[1], pages.stride(0) // pages.stride(1)
    return slots.div(size, rounding_mode="floor") * (apart - size) + slots


def some_pages(pool: TokenPool) -> Tensor:
    """Pages of a pool, whose layers' lie alike."""
    full, window = pool.all_buffers()
    return (full or window)[0]


def check_pages(layer: RadixAttention, pool: TokenPool) -> None:
    """Whether a layer with a window has its pages where the tables of draft steps lead.

    Raises:
        NotImplementedError: it has them in the part of a pool that is not for windows.
    """
    if pool.slot_map is not None and not uses_window_slots(layer, pool):
        raise NotImplementedError(
            f"attnops: layer {layer.layer_id} has a window and pages outside the window pool, which a draft step with "
            "branches in one request does not serve"
        )


@dataclass(frozen=True)
class WindowStep:
    """Views for one shape of a draft step.

    Attributes:
        table: int32 ``[B, C]``: pages of one token, from the first of the prefix that the window reaches.
        seqlens: int32 ``[B]``, what is in it: of the prefix, and the cells of all drafts where they are in it.
        reach: Tokens of the prefix that the window reaches at most.
        mask: The step's `tree_mask` without drafts that have left the window, or None: none has.
        slots: What `table` is made from where slots are not the pages of `tokens_of`.
    """

    table: Tensor
    seqlens: Tensor
    reach: int
    mask: Tensor | None
    slots: Tensor

    def of(self, batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Page table, lengths and mask of a layer with a window."""
        return self.table, self.seqlens, batch.tree_mask if self.mask is None else self.mask


class DraftWindows:
    """Buffers of `WindowStep`, for the window of a model.

    Args:
        with_drafts: The cells of the drafts follow those of the prefix.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device, with_drafts: bool = True) -> None:
        self._window, self._limits, self._with_drafts = spec.sliding_window_size, limits, with_drafts
        self._options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._starts = torch.zeros(limits.max_batch_size, **self._options)
        self._seqlens = torch.zeros(limits.max_batch_size, **self._options)
        self._tables: dict[int, Tensor] = {}  # by columns
        self._masks: dict[tuple[int, int], Tensor] = {}

    def columns(self, batch: AttentionBatch) -> int:
        """Of the table of a step, at most: its tokens."""
        reach = max(min(self._window, self._limits.max_seqlen) - (batch.draft_step or 0), 0)
        return reach + batch.tree_keys if self._with_drafts else max(reach, 1)

    def views(self, batch: AttentionBatch) -> WindowStep:
        """Host work.

        Raises:
            ValueError: the batch does not say which step of the loop it is.
        """
        if batch.draft_step is None:
            raise ValueError("attnops: a batch with draft_steps needs draft_step beside a window, got None")
        size, columns = batch.batch_size, self.columns(batch)
        if columns not in self._tables:
            self._tables[columns] = torch.zeros(2, self._limits.max_batch_size, columns, **self._options)
        table, slots = self._tables[columns][:, :size]
        mask = None
        if self._with_drafts and self._window < batch.draft_step:
            shape = (batch.tokens_per_request, -(-batch.tree_keys // 8))
            if shape not in self._masks:
                options = self._options | {"dtype": torch.uint8}
                self._masks[shape] = torch.zeros(self._limits.max_batch_size, *shape, **options)
            mask = self._masks[shape][:size]
        reach = max(self._window - batch.draft_step, 0)
        return WindowStep(table, self._seqlens[:size], reach, mask, slots)

    def build(self, step: WindowStep, batch: AttentionBatch, report: Tensor | None) -> None:
        """Device work, recorded in a graph; static shapes."""
        table, pool, keys = batch.req_to_token, batch.token_to_kv_pool, batch.tree_keys
        assert table is not None and pool is not None, "PagedBuffers.build has checked"
        starts = self._starts[: batch.batch_size]
        torch.sub(batch.cache_seqlens, keys, out=starts).clamp_(min=0)
        torch.clamp(starts, max=step.reach, out=step.seqlens)
        starts.sub_(step.seqlens)
        if self._with_drafts:
            step.seqlens.add_(keys)
        # Rows that begin at any cell: row r of the table, from its cell c on, is row r * stride + c of this view.
        columns = min(step.table.shape[1], table.shape[1])
        count = (table.shape[0] - 1) * table.stride(0) + table.shape[1] - columns + 1
        cells = table.as_strided((count, columns), (1, 1), table.storage_offset())
        rows = torch.add(starts, batch.req_pool_indices.long(), alpha=table.stride(0))
        pages = some_pages(pool)
        slots = step.table if lie_in_a_row(pages) else step.slots
        ops.build_page_table(cells, rows, step.seqlens, 1, page_table=slots, slot_map=pool.slot_map, report=report)
        if slots is not step.table:
            step.table.copy_(spread(slots, pages))
        if step.mask is not None:
            assert batch.tree_mask is not None, "AttentionBatch has checked"
            seen = unpack_tree_mask(batch.tree_mask, keys)
            behind = seen.flip(-1).cumsum(-1).flip(-1)  # of a draft and those behind it, that a row sees
            step.mask.copy_(pack_tree_mask(seen & (behind <= self._window + 1)))


class DecodeWindows:
    """`DraftWindows` with plans of a decode op, for backends that attend by `xqa_decode` or `mla_decode`.

    Buffers are made at the first draft step of a model with a window.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        self._spec, self._limits, self._device = spec, limits, device
        self._windows: DraftWindows | None = None
        self._plans: dict[tuple[int, int], DecodePlans] = {}  # by tokens of a request and columns

    def views(self, batch: AttentionBatch, plans: dict[int, DecodePlan]) -> WindowStep | None:
        """Host work. None: not a draft step, or no window.

        Args:
            plans: Of each window of the model; that of a draft step takes its place.

        Raises:
            ValueError: as of `DraftWindows.views`.
        """
        window = self._spec.sliding_window_size
        if not batch.draft_steps or window < 0:
            return None
        if self._windows is None:
            self._windows = DraftWindows(self._spec, self._limits, self._device)
        step, key = self._windows.views(batch), (batch.tokens_per_request, self._windows.columns(batch))
        if key not in self._plans:
            spec = dataclasses.replace(self._spec, page_size=1, sliding_window_size=-1)
            limits = dataclasses.replace(self._limits, max_seqlen=key[1])
            self._plans[key] = DecodePlans(spec, limits, limits.max_batch_size, key[0], self._device)
        plans[window] = self._plans[key].views(batch.batch_size)[-1]
        return step

    def plan(
        self,
        step: WindowStep | None,
        plans: Mapping[int, DecodePlan],
        batch: AttentionBatch,
        cache_seqlens: Tensor,
        report: Tensor | None,
    ) -> None:
        """Device work, recorded in a graph: the table of `step`, if there is one, and the plans of all windows.

        Args:
            cache_seqlens: int32, of the requests of `plans`.
        """
        if step is not None:
            assert self._windows is not None
            self._windows.build(step, batch, report)
        for window, plan in plans.items():
            lengths = cache_seqlens if step is None or window < 0 else step.seqlens
            if isinstance(plan, MlaDecodePlan):
                ops.mla_decode_plan(plan, lengths)
            else:
                ops.xqa_decode_plan(plan, lengths)
