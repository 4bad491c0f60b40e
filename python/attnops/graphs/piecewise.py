"""Compiled pieces around eager attention, over static token buckets: any step, of any mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from attnops.graphs.recorder import RecorderFactory
from attnops.graphs.runner import Progress
from attnops.graphs.sizes import checked_sizes, pad_to_size
from attnops.graphs.split import Compiler, PiecewiseBackend
from attnops.layers import RadixAttention, collect_layers, forward_context
from attnops.types import AttentionBatch, ForwardMode


class PiecewiseRunner:
    """Runs a model's steps as compiled pieces, padded to a bucket of tokens, with attention between them.

    Attention runs eagerly on the step's own batch, so every mode, length and mask is served, and so is a backend
    whose steps cannot be captured.

    Args:
        model: Called as ``model(input_ids, positions)``; gives one row per token.
        buckets: Numbers of tokens, each 2 or more: compilers make a special case of 1.
        device: Where the model is.
        inner, recorder: As of `PiecewiseBackend`.
        layers: The model's attention layers by id; collected when None.

    Raises:
        ValueError: a bucket below 2.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        buckets: Iterable[int],
        device: torch.device | str = "cpu",
        *,
        inner: str | Compiler = "eager",
        recorder: RecorderFactory | None = None,
        layers: Mapping[int, RadixAttention] | None = None,
    ) -> None:
        self.buckets = checked_sizes(buckets)
        if self.buckets[0] < 2:
            raise ValueError(f"attnops: buckets hold 2 tokens or more, got {self.buckets[0]}")
        self.splitter = PiecewiseBackend(inner, recorder)
        self._compiled = torch.compile(model, backend=self.splitter, fullgraph=True)
        self._layers = collect_layers(model) if layers is None else layers
        self._device = torch.device(device)
        self._ids, self._positions = torch.zeros(2, self.buckets[-1], dtype=torch.int64, device=device)
        self._inputs = {}
        for bucket in self.buckets:
            views = self._ids[:bucket], self._positions[:bucket]
            for view in views:
                torch._dynamo.mark_dynamic(view, 0)
            self._inputs[bucket] = views

    @torch.no_grad()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles (and records) every bucket, largest first, in steps without requests: nothing is stored."""
        empty = torch.empty(0, dtype=torch.int64, device=self._device)
        for done, bucket in enumerate(reversed(self.buckets), 1):
            idle = AttentionBatch(
                forward_mode=ForwardMode.IDLE, req_pool_indices=empty, cache_seqlens=empty.int(), num_tokens=0
            )
            idle.attn_backend = _NoAttention()  # type: ignore[assignment]
            with forward_context(idle, self._layers):
                self._compiled(*self._inputs[bucket])
            if progress is not None:
                progress(done, len(self.buckets), bucket)

    @torch.no_grad()
    def run(self, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """A step, its metadata included.

        Args:
            input_ids: int64 ``[num_tokens]``.
            batch: With `positions` and `attn_backend`.

        Returns:
            ``[num_tokens, ...]``. Of recorded pieces: in memory that the next step overwrites.

        Raises:
            ValueError: the batch has more tokens than the largest bucket, or lacks something.
        """
        if batch.positions is None or batch.attn_backend is None:
            raise ValueError("attnops: a piecewise step needs positions and attn_backend in the batch")
        tokens = batch.num_tokens
        bucket = pad_to_size(self.buckets, tokens)
        if bucket is None:
            raise ValueError(f"attnops: the batch has {tokens} tokens, the largest bucket {self.buckets[-1]}")
        self._ids[:tokens].copy_(input_ids, non_blocking=True)
        self._positions[:tokens].copy_(batch.positions, non_blocking=True)
        # Rows of an earlier step may stay behind these: what the model computes of them is dropped.
        batch.attn_backend.init_forward_metadata(batch)
        with forward_context(batch, self._layers):
            out = self._compiled(*self._inputs[bucket])
        return out[:tokens]


class _NoAttention:
    """Stands in for a backend in a step without tokens."""

    def forward(self, *args: object, out: Tensor, **options: object) -> Tensor:
        return out.zero_()
