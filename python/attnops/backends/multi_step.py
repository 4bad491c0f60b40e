"""A draft loop over any backend: one view per step, all of them prepared at once, so that one graph holds the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import AttentionBackend, LayerCall
from attnops.ops._arguments import MAX_TREE_TOKENS
from attnops.reference import pack_tree_mask
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits, TokenPool, device_of

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

MakeBackend = Callable[[AttentionSpec, Limits, torch.device], AttentionBackend]


class MultiStepDraftBackend(AttentionBackend):
    """Serves the steps of a draft loop: in each, `topk` branches of every request bring a token.

    A batch of the loop is a DECODE batch of B requests, whose `cache_seqlens` count one token beyond the prefix. Where
    its `out_cache_loc` is negative, the request is padding. The model runs step s with `step(s)`: a DECODE batch of
    ``B * topk`` tokens, branch k of request b at row ``b * topk + k``.

    Branches are tokens of their request where the backend has trees over drafts (`Capability.draft_trees`): they read
    the prefix together. Their drafts stand at the request's cells ``length + k * draft_steps + i``, at any page size.
    Elsewhere each row is a request of its own, which every backend serves. Drafts then stand where
    `ops.generate_draft_decode_kv_indices` has them. Where branches begin with a copy of the prefix's partial page, it
    is copied here. Slots are read from `req_to_token` in both ways.

    Args:
        make: Makes the backend of one step: `select_backend`, or a backend's class. Called `draft_steps` - 1 times.
        spec: The draft model.
        limits: Of the loop's batches. `max_seqlen` counts the prefix and the drafts of a branch.
        device: Where the batches' tensors are.
        topk: Branches per request.
        draft_steps: Tokens per branch. The last one is only proposed, so there is one step less.
        trees: False: branches are requests, whatever the backend has.

    Raises:
        ValueError: `topk` is below 1, or above the nodes of a tree. Or `draft_steps` is below 2, where a loop has no
            step, or it leaves no room for a prefix.
    """

    name = "multi_step"

    def __init__(
        self,
        make: MakeBackend,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        topk: int,
        draft_steps: int,
        trees: bool = True,
    ) -> None:
        if topk < 1 or draft_steps < 2:
            raise ValueError(
                f"attnops: a draft loop needs topk >= 1 and draft_steps >= 2, got {topk} and {draft_steps}"
            )
        if draft_steps >= limits.max_seqlen:
            raise ValueError(
                f"attnops: draft_steps must be below Limits.max_seqlen {limits.max_seqlen}, which counts a prefix and "
                f"the drafts of a branch, got {draft_steps}"
            )
        if any(spec.compress_ratios):
            raise NotImplementedError(
                "attnops: branches of a draft loop have no states of their own, which compress_ratios "
                f"{spec.compress_ratios} need. A draft model of ratio 0 needs none"
            )
        if topk > MAX_TREE_TOKENS:
            raise ValueError(f"attnops: topk must be at most {MAX_TREE_TOKENS}, the nodes of a tree, got {topk}")
        self.spec, self.limits, self.device = spec, limits, device_of(device)
        self.topk, self.draft_steps = topk, draft_steps
        rows, count = limits.max_batch_size * topk, draft_steps - 1
        one_dim = spec.is_mla or spec.head_dim == spec.v_head_dim
        self.has_trees = trees and topk > 1 and not spec.attention_chunk_size
        if self.has_trees:
            longest = limits.max_seqlen + (topk - 1) * draft_steps
            shared = Limits(max_batch_size=limits.max_batch_size, max_seqlen=longest, max_tokens_per_request=topk)
            self.backends = [make(spec, shared, self.device)]
            able = _decoder(self.backends[0]).capability
            dims = one_dim or able.draft_trees_two_dims or able.draft_stages
            windows = able.draft_windows and spec.attn_type is AttentionType.DECODER
            self.has_trees = able.draft_trees and dims and (spec.sliding_window_size < 0 or windows)
        per_step = shared if self.has_trees else Limits(max_batch_size=rows, max_seqlen=limits.max_seqlen)
        made = self.backends if self.has_trees else []
        self.backends = [*made, *(make(spec, per_step, self.device) for _ in range(count - len(made)))]
        self.capability = _decoder(self.backends[0]).capability  # type: ignore[misc]
        if self.has_trees:  # all steps have the same lengths and slots, and masks hide what is still to come
            for backend in self.backends[1:]:
                _decoder(backend).prepare_with(_decoder(self.backends[0]))
        else:
            first, *later = map(_decoder, self.backends)
            first.lead_drafts(later)
        options: dict[str, Any] = {"device": self.device}
        self._rows = torch.arange(rows, **options)
        if self.has_trees:
            self._tree_masks = _branch_masks(topk, draft_steps).to(self.device)
        else:
            self._branch_to_token = torch.zeros(rows, limits.max_seqlen, dtype=torch.int32, **options)
            self._columns = torch.arange(limits.max_seqlen, **options)
        shape = (len(self.backends), rows)
        self._seqlens = torch.zeros(shape, dtype=torch.int32, **options)
        self._slots = torch.full(shape, -1, dtype=torch.int64, **options)
        self._positions = torch.zeros(shape, dtype=torch.int64, **options)
        self._requests = torch.zeros(limits.max_batch_size, dtype=torch.int64, **options)
        self._steps: dict[tuple[int, ForwardMode, int], list[AttentionBatch]] = {}
        self._now: list[AttentionBatch] = []
        self._serving: dict[int, AttentionBackend] = {}

    @property
    def needs_cpu_seq_lens(self) -> bool:  # type: ignore[override]
        return self.backends[0].needs_cpu_seq_lens

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]
        return self.backends[0].takes_lists

    def step(self, index: int) -> AttentionBatch:
        """The batch of a step of the loop that is prepared. Idle batches have idle steps.

        Raises:
            RuntimeError: `init_forward_metadata_out_graph` has not run.
            IndexError: there is no such step.
        """
        if not self._now:
            raise RuntimeError("attnops: init_forward_metadata must run before a draft loop's steps")
        return self._now[index]

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        """Host work of all steps.

        Raises:
            ValueError: the batch exceeds the limits, or is no DECODE batch.
        """
        mode = batch.forward_mode
        if not mode.is_decode_or_idle():
            raise ValueError(f"attnops: a draft loop takes a DECODE batch, got {mode.name}")
        self.limits.check(batch)
        key = (batch.batch_size, mode, id(batch.token_to_kv_pool))
        known = self._steps.get(key)
        if known is None or not self._is_for(known[0], batch):
            known = self._steps[key] = [self._make_step(batch, index) for index in range(len(self.backends))]
        self._now = known
        self._serving = {id(step): backend for step, backend in zip(self._now, self.backends)}
        for index, (step, backend) in enumerate(zip(self._now, self.backends)):
            step.actual_forward_mode = batch.actual_forward_mode
            step.cache_seqlens_cpu = self._lengths_on_the_host(batch, index)
            backend.init_forward_metadata_out_graph(step, in_capture)

    def _lengths_on_the_host(self, batch: AttentionBatch, index: int) -> Tensor | None:
        """`cache_seqlens_cpu` of a step, if the loop's batch has it and a backend asks for it."""
        lengths = batch.cache_seqlens_cpu
        if lengths is None or not self.needs_cpu_seq_lens or batch.forward_mode.is_idle():
            return None
        prefix = (lengths - 1).clamp_(min=0)
        if self.has_trees:
            return prefix + self.topk * self.draft_steps
        return (prefix + (index + 1)).repeat_interleave(self.topk)

    def _is_for(self, step: AttentionBatch, batch: AttentionBatch) -> bool:
        same_rows = not self.has_trees or step.req_to_token is batch.req_to_token
        return same_rows and step.token_to_kv_pool is batch.token_to_kv_pool

    def _make_step(self, batch: AttentionBatch, index: int) -> AttentionBatch:
        rows = batch.batch_size * self.topk
        idle = batch.forward_mode.is_idle()
        shared: dict[str, Any] = {
            "forward_mode": batch.forward_mode,
            "num_tokens": batch.num_tokens * self.topk,
            "out_cache_loc": None if idle else self._slots[index, :rows],
            "positions": None if idle else self._positions[index, :rows],
            "token_to_kv_pool": batch.token_to_kv_pool,
            "attn_backend": self.backends[index],
        }
        if self.has_trees and not idle:
            size = batch.batch_size
            return AttentionBatch(
                req_pool_indices=self._requests[:size],
                cache_seqlens=self._seqlens[index, :size],
                req_to_token=batch.req_to_token,
                tokens_per_request=self.topk,
                draft_steps=self.draft_steps,
                draft_step=index,
                tree_mask=self._tree_masks[index].expand(size, -1, -1),
                **shared,
            )
        return AttentionBatch(
            req_pool_indices=self._rows[:rows],
            cache_seqlens=self._seqlens[index, :rows],
            req_to_token=batch.req_to_token if self.has_trees else self._branch_to_token,
            **shared,
        )

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        if not batch.forward_mode.is_idle() and batch.batch_size:
            self._fill(batch)
        for step, backend in zip(self._now, self.backends):
            backend.init_forward_metadata_in_graph(step)

    def _fill(self, batch: AttentionBatch) -> None:
        """Of each step lengths, slots and positions. Static shapes, no value on the host."""
        pool, table = batch.token_to_kv_pool, batch.req_to_token
        if pool is None or table is None or batch.out_cache_loc is None:
            raise ValueError("attnops: a draft loop's batch needs req_to_token, out_cache_loc and token_to_kv_pool")
        prefix = (batch.cache_seqlens - 1).clamp(min=0)
        padding = (batch.out_cache_loc < 0).view(-1, 1)
        if self.has_trees:
            self._fill_trees(batch, table, prefix, padding)
        else:
            self._fill_branches(batch, pool, table, prefix, padding)

    def _fill_trees(self, batch: AttentionBatch, table: Tensor, prefix: Tensor, padding: Tensor) -> None:
        """Branches that are tokens of their request."""
        size, topk, steps, count = batch.batch_size, self.topk, len(self.backends), batch.batch_size * self.topk
        self._requests[:size].copy_(batch.req_pool_indices)
        self._seqlens[:, :size].copy_(prefix + topk * self.draft_steps)
        length = prefix.long().view(1, size, 1)
        step = torch.arange(steps, device=self.device).view(steps, 1, 1)
        self._positions[:, :count].copy_((length + step).expand(steps, size, topk).flatten(1))
        cells = length + self._rows[:topk] * self.draft_steps + step
        rows = table[batch.req_pool_indices.long()].expand(steps, size, -1)
        slots = rows.gather(2, cells.clamp(max=table.shape[1] - 1)).long()
        self._slots[:, :count].copy_(slots.masked_fill(padding, -1).flatten(1))

    def _fill_branches(
        self, batch: AttentionBatch, pool: TokenPool, table: Tensor, prefix: Tensor, padding: Tensor
    ) -> None:
        """Branches that are requests: their rows of slots, too."""
        size, topk, count = batch.batch_size, self.topk, batch.batch_size * self.topk
        with_tails = pool.page_size > 1 and topk > 1
        length = prefix.long().view(size, 1, 1)
        branch = self._rows[:topk].view(1, topk, 1)
        tail = length % pool.page_size if with_tails else torch.zeros_like(length)
        per_branch = self.draft_steps
        if with_tails:
            pages = (tail + self.draft_steps + pool.page_size - 1) // pool.page_size
            shift = branch * (pages * pool.page_size)
        else:
            shift = branch * per_branch
        # Cells from the copied tail on, or from the first draft on, stand further on in all branches but the first.
        columns = self._columns.view(1, 1, -1)
        cells = torch.where(columns >= length - tail, columns + shift, columns).clamp(max=table.shape[1] - 1)
        rows = table[batch.req_pool_indices.long()].unsqueeze(1).expand(size, topk, -1)
        self._branch_to_token[:count].copy_(rows.gather(2, cells).flatten(0, 1))
        steps = torch.arange(len(self.backends), device=self.device).view(-1, 1)
        by_row = prefix.long().view(-1, 1).expand(size, topk).reshape(-1)
        position = by_row + steps
        self._seqlens[:, :count].copy_(position + 1)
        self._positions[:, :count].copy_(position)
        at = position.clamp(max=self.limits.max_seqlen - 1).t()
        slots = self._branch_to_token[:count].gather(1, at).t().long()
        self._slots[:, :count].copy_(slots.masked_fill(padding.expand(size, topk).reshape(-1), -1))
        if with_tails:
            self._copy_tails(pool, batch, prefix)

    def _copy_tails(self, pool: TokenPool, batch: AttentionBatch, prefix: Tensor) -> None:
        full, window = pool.all_buffers()
        ops.copy_page_tail(
            batch.req_to_token,  # type: ignore[arg-type]
            batch.req_pool_indices,
            prefix,
            full,
            self.topk,
            self.draft_steps,
            window_pages=window,
            slot_map=pool.slot_map if window else None,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        for backend in self.backends:
            backend.init_cuda_graph_state(max_bs * (1 if self.has_trees else self.topk), max_num_tokens * self.topk)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def fault_report(self) -> Tensor | None:
        return self.backends[0].fault_report

    def raise_on_fault(self) -> None:
        for backend in self.backends:
            backend.raise_on_fault()

    def forward(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """As of `AttentionBackend.forward`; `batch` is one of `step(...)`."""
        return self._of(batch).forward(q, k, v, layer, batch, *args, **options)

    def attend(self, call: LayerCall) -> None:
        self._of(call.batch).attend(call)

    def _of(self, batch: AttentionBatch) -> AttentionBackend:
        backend = self._serving.get(id(batch))
        if backend is None:
            raise RuntimeError("attnops: a layer of a draft loop runs with step(s) of its backend, not with the batch")
        return backend


def _decoder(backend: AttentionBackend) -> AttentionBackend:
    """What serves DECODE of a backend: a hybrid has two."""
    return getattr(backend, "select", lambda mode: backend)(ForwardMode.DECODE)


def _branch_masks(topk: int, draft_steps: int) -> Tensor:
    """uint8 ``[draft_steps - 1, topk, ceil(topk * draft_steps / 8)]``: in step s branch k sees its drafts 0 to s."""
    steps, branches = torch.arange(draft_steps - 1).view(-1, 1, 1), torch.arange(topk).view(1, -1, 1)
    cell = torch.arange(topk * draft_steps).view(1, 1, -1)
    return pack_tree_mask((cell // draft_steps == branches) & (cell % draft_steps <= steps))
