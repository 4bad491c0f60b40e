"""Compiled pieces around eager attention, over static token buckets: any step, of any mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attnops.graphs.memory import MemoryMeter, MemoryReport
from attnops.graphs.progress import Progress, reporting
from attnops.graphs.recorder import RecorderFactory
from attnops.graphs.runner import layers_of
from attnops.graphs.segments import NoAttention
from attnops.graphs.sizes import checked_sizes, pad_to_size, token_buckets
from attnops.graphs.split import Compiler, PiecewiseBackend
from attnops.graphs.static_inputs import StaticInput
from attnops.graphs.token_step import TokenStep
from attnops.layers import forward_context
from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.backends.base import AttentionBackend
    from attnops.layers.forward_context import Layer


class PiecewiseRunner:
    """Runs a model's steps as compiled pieces, padded to a bucket of tokens, with attention between them.

    Attention runs eagerly on the step's own batch. So every mode, length and mask is served, and so is a backend whose
    steps cannot be captured.

    Args:
        model: Called as ``model(input_ids, positions, **inputs)``; gives one row per token.
        backend: Serves the steps whose batch carries no `attn_backend`.
        sizes: Numbers of tokens, each 2 or more: compilers make a special case of 1. By default `token_buckets` up to
            the backend's limit.
        inner, recorder: As of `PiecewiseBackend`.
        inputs, position_axes, layers, used_bytes: As of `GraphRunner`; inputs per token or per step.

    Raises:
        ValueError: a size below 2.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend,
        *,
        sizes: Iterable[int] | None = None,
        inner: str | Compiler = "eager",
        recorder: RecorderFactory | None = None,
        inputs: Mapping[str, StaticInput] | None = None,
        position_axes: int = 0,
        layers: Mapping[int, Layer] | None = None,
        used_bytes: Callable[[], int] | None = None,
    ) -> None:
        if sizes is None:
            most = max(2, backend.limits.max_num_tokens)
            sizes = [size for size in token_buckets(most) if size > 1]
        self.sizes = checked_sizes(sizes)
        if self.sizes[0] < 2:
            raise ValueError(f"attnops: buckets hold 2 tokens or more, got {self.sizes[0]}")
        self._backend, self._layers, self._recorder = backend, layers_of(model, layers), recorder
        self._meter = MemoryMeter(backend.device, used_bytes)
        self._size = 0  # of the bucket that is compiled
        self.splitter = PiecewiseBackend(inner, recorder, lambda: self._meter.piece(self._size))
        self._compiled = torch.compile(model, backend=self.splitter, fullgraph=True)
        self.static = TokenStep(backend.device, self.sizes[-1], inputs, position_axes)
        self._inputs = {size: self._bucket_inputs(size) for size in self.sizes}
        self._is_captured = False

    @torch.no_grad()
    def capture(self, progress: Progress | bool = True) -> MemoryReport:
        """Compiles (and records) every bucket, largest first, in steps without requests: nothing is stored.

        Args:
            progress: As of `GraphRunner.capture`.
        """
        device = self._backend.device
        empty = torch.empty(0, dtype=torch.int64, device=device)
        idle = AttentionBatch(
            forward_mode=ForwardMode.IDLE, req_pool_indices=empty, cache_seqlens=empty.int(), num_tokens=0
        )
        self._meter.clear()
        self.static.clear()
        with reporting(progress, len(self.sizes), "compiled pieces") as report:
            for done, size in enumerate(reversed(self.sizes), 1):
                self._size = size
                with forward_context(idle, self._layers, NoAttention()):
                    self._call(size)
                report(done, len(self.sizes), size)
        self._is_captured = True
        return self.memory

    @property
    def memory(self) -> MemoryReport:
        """What the runner holds now: its static buffers, and what each capture took."""
        return self._meter.report(self.static.nbytes(), self._recorder, "tokens")

    def reason_against(self, batch: AttentionBatch) -> str:
        """Why no bucket serves a batch; empty: one does."""
        if not self._is_captured:
            return "nothing has been compiled yet; call capture()"
        if pad_to_size(self.sizes, batch.num_tokens) is None:
            return f"the batch has {batch.num_tokens} tokens, the largest bucket {self.sizes[-1]}; run it eagerly"
        return self.static.reason_against_batch(batch)

    def can_replay(self, batch: AttentionBatch) -> bool:
        """Whether a bucket serves a batch: `reason_against` gives no reason."""
        return not self.reason_against(batch)

    @torch.no_grad()
    def replay(self, input_ids: Tensor, batch: AttentionBatch, **inputs: Tensor) -> Any:
        """Runs a step, its metadata included. Arguments and errors as of `GraphRunner.replay`.

        Returns:
            ``[num_tokens, ...]``. Of recorded pieces: in memory that the next step overwrites.
        """
        reason = self.reason_against(batch) or self.static.reason_against(input_ids, batch, inputs)
        if reason:
            raise ValueError(f"attnops: no bucket serves this step: {reason}")
        size, tokens = pad_to_size(self.sizes, batch.num_tokens), batch.num_tokens
        assert size is not None
        self.static.fill(input_ids, batch, inputs)
        backend = batch.attn_backend or self._backend
        backend.init_forward_metadata(batch)
        with forward_context(batch, self._layers, backend):
            out = self._call(size)
        return out[:tokens] if isinstance(out, Tensor) else tree_map_only(Tensor, lambda one: one[:tokens], out)

    def _call(self, size: int) -> Any:
        (input_ids, positions), inputs = self._inputs[size]
        return self._compiled(input_ids, positions, **inputs)

    def _bucket_inputs(self, size: int) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        """A bucket's views, the same objects for ever; the compiler is told which extent is the number of tokens."""
        input_ids, inputs = self.static.model_inputs(size)
        positions = self.static.positions(size)
        for name, view in {"input_ids": input_ids, "positions": positions, **inputs}.items():
            declared = self.static.inputs.declared[name]
            if declared.per == "token":
                torch._dynamo.mark_dynamic(view, len(declared.lead))
        return (input_ids, positions), inputs
