"""Two-batch overlap: a step in two halves, each with a backend of its own, so that one computes while one communicates.

Which half runs when is the model's affair. Here stand the halves, and the metadata of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.types import AttentionBatch

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


class TboAttnBackend(AttentionBackend):
    """A backend for whole steps, and one for each of their two halves (SGLang's class of this name).

    `children_of(batch)` are the halves: views of the batch, so a graph runner's static batch has static halves. A
    uniform step is cut after ``B // 2`` requests, a ragged one after the request with which half of its tokens are
    reached. A layer runs with the whole batch or with a half, as the model likes.

    Args:
        primary: Serves whole steps.
        children: Two backends, one per half.

    Raises:
        ValueError: there are not two children, or the three are for different models or devices.
    """

    name = "tbo"

    def __init__(self, primary: AttentionBackend, children: Sequence[AttentionBackend]) -> None:
        if len(children) != 2:
            raise ValueError(f"attnops: two-batch overlap needs 2 children, got {len(children)}")
        if any(child.spec != primary.spec or child.device != primary.device for child in children):
            raise ValueError("attnops: primary and children must be built for one model and one device")
        self.spec, self.limits, self.device = primary.spec, primary.limits, primary.device
        self.capability = primary.capability  # type: ignore[misc]
        self.primary, self.children = primary, tuple(children)
        self._serving: dict[int, AttentionBackend] = {}

    @property
    def needs_cpu_seq_lens(self) -> bool:  # type: ignore[override]
        return any(backend.needs_cpu_seq_lens for backend in (self.primary, *self.children))

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]
        return self.primary.takes_lists

    def children_of(self, batch: AttentionBatch) -> tuple[AttentionBatch, AttentionBatch]:
        """The halves of a batch, the same objects at every call. One of them may have no request; it is skipped.

        Raises:
            ValueError: a ragged batch without `extend_seq_lens_cpu`: the host must know where to cut.
        """
        if batch.tbo_children is None:
            at = _cut_of(batch)
            halves = ((0, at), (at, batch.batch_size))
            made = [_part(batch, *half, child) for half, child in zip(halves, self.children)]
            batch.tbo_children = (made[0], made[1])
        return batch.tbo_children

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.primary.init_forward_metadata_out_graph(batch, in_capture)
        self._serving = {id(batch): self.primary}
        for part, child in self._parts(batch):
            child.init_forward_metadata_out_graph(part, in_capture)
            self._serving[id(part)] = child

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self.primary.init_forward_metadata_in_graph(batch)
        for part, child in self._parts(batch):
            child.init_forward_metadata_in_graph(part)

    def _parts(self, batch: AttentionBatch) -> list[tuple[AttentionBatch, AttentionBackend]]:
        """Halves that have requests, and their backends; none of an idle step."""
        if batch.forward_mode.is_idle():
            return []
        pairs = zip(self.children_of(batch), self.children)
        return [(part, child) for part, child in pairs if part.batch_size]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.primary.init_cuda_graph_state(max_bs, max_num_tokens)
        for child in self.children:
            child.init_cuda_graph_state(-(-max_bs // 2), -(-max_num_tokens // 2))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return max(backend.get_cuda_graph_seq_len_fill_value() for backend in (self.primary, *self.children))

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        return self._of(batch).takes_absorbed(batch)

    def raise_on_fault(self) -> None:
        for backend in (self.primary, *self.children):
            backend.raise_on_fault()

    def forward(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, batch: AttentionBatch, *args: Any, **options: Any
    ) -> Tensor:
        """As of `AttentionBackend.forward`; `batch` is the step's, or one of its halves."""
        return self._of(batch).forward(q, k, v, layer, batch, *args, **options)

    def attend(self, call: LayerCall) -> None:
        self._of(call.batch).attend(call)

    def _of(self, batch: AttentionBatch) -> AttentionBackend:
        return self._serving.get(id(batch), self.primary)


def _cut_of(batch: AttentionBatch) -> int:
    """Requests of the first half."""
    if batch.is_uniform:
        return batch.batch_size // 2
    if batch.extend_seq_lens_cpu is None:
        raise ValueError("attnops: two-batch overlap cuts a ragged batch by its tokens; give it extend_seq_lens_cpu")
    ends = batch.extend_seq_lens_cpu.cumsum(0)
    if not len(ends):
        return 0
    # The border nearest to half of the tokens.
    return int((torch.cat([ends.new_zeros(1), ends]) * 2 - ends[-1]).abs().argmin())


def _part(batch: AttentionBatch, begin: int, end: int, child: AttentionBackend) -> AttentionBatch:
    """Requests [begin, end) of a batch; rows that pad a ragged step belong to the last half."""
    if batch.is_uniform:
        first, last = begin * batch.tokens_per_request, end * batch.tokens_per_request
    else:
        assert batch.extend_seq_lens_cpu is not None
        first = int(batch.extend_seq_lens_cpu[:begin].sum())
        last = batch.num_tokens if end == batch.batch_size else int(batch.extend_seq_lens_cpu[:end].sum())

    def requests(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[begin:end]

    if begin == end:
        last = first
    return dataclasses.replace(
        batch,
        req_pool_indices=batch.req_pool_indices[begin:end],
        cache_seqlens=batch.cache_seqlens[begin:end],
        num_tokens=last - first,
        out_cache_loc=None if batch.out_cache_loc is None else batch.out_cache_loc[first:last],
        extend_seq_lens=requests(batch.extend_seq_lens),
        cache_seqlens_cpu=requests(batch.cache_seqlens_cpu),
        extend_seq_lens_cpu=requests(batch.extend_seq_lens_cpu),
        positions=None if batch.positions is None else batch.positions[..., first:last],
        tree_mask=requests(batch.tree_mask),
        attn_backend=child,
        tbo_children=None,
    )
