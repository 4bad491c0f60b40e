"""Whole steps captured, one graph per batch size: decode, target verify, draft extend of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.graphs.recorder import CudaGraphs, Recorder, RecorderFactory
from attnops.graphs.sizes import checked_sizes, default_capture_sizes, pad_to_size
from attnops.graphs.static_step import StaticStep
from attnops.layers import RadixAttention, collect_layers, forward_context
from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.backends.base import AttentionBackend
    from attnops.pools import KVCache

# model(input_ids [num_tokens], positions [num_tokens], batch) -> [num_tokens, ...]
StepModel = Callable[[Tensor, Tensor, AttentionBatch], Tensor]
# progress(graphs captured, graphs in all, size of the last)
Progress = Callable[[int, int, int], None]

CAPTURED_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of device memory.

    Attributes:
        static: Inputs and outputs, shared by all graphs.
        graphs: What each capture added, by size, in the order of capture. The first and largest takes what the
            smaller ones reuse.
    """

    static: int
    graphs: dict[int, int]

    @property
    def total(self) -> int:
        return self.static + sum(self.graphs.values())

    def __str__(self) -> str:
        lines = [f"{size:>6} requests: {taken / 2**20:8.1f} MiB" for size, taken in self.graphs.items()]
        return "\n".join([*lines, f"static inputs and outputs: {self.static / 2**20:.1f} MiB"])


class GraphRunner:
    """Captures a model's uniform steps, one graph per batch size, and replays them for any lengths and requests.

    Page tables and plans are recorded with the layers, so a replay launches one graph after copying the step's inputs.

    Args:
        model: Called as ``model(input_ids, positions, batch)``; gives one row per token.
        backend: Serves the steps; its limits hold the largest graph.
        req_to_token, token_to_kv_pool: Those of every batch to come.
        sizes: Batch sizes to capture; by default `default_capture_sizes` up to the backend's limit.
        forward_mode: DECODE, TARGET_VERIFY or DRAFT_EXTEND.
        tokens_per_request: 1 for DECODE.
        tree: TARGET_VERIFY with a tree mask.
        layers: The model's attention layers by id; collected from a `torch.nn.Module` when None.
        recorder: Makes a recorder per graph; by default CUDA graphs that share one pool.
        padding_row: As of `StaticStep`.
        used_bytes: Device memory in use, for the report; by default of the backend's device (a CPU: 0).

    Raises:
        ValueError: a mode or a backend that is not captured, sizes above the backend's limits, a device without graphs.
    """

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend,
        req_to_token: Tensor,
        token_to_kv_pool: KVCache,
        *,
        sizes: Iterable[int] | None = None,
        forward_mode: ForwardMode = ForwardMode.DECODE,
        tokens_per_request: int = 1,
        tree: bool = False,
        layers: Mapping[int, RadixAttention] | None = None,
        recorder: RecorderFactory | None = None,
        padding_row: int = 0,
        used_bytes: Callable[[], int] | None = None,
    ) -> None:
        if forward_mode not in CAPTURED_MODES:
            names = ", ".join(mode.name for mode in CAPTURED_MODES)
            raise ValueError(f"attnops: whole steps are captured for {names}, not for {forward_mode.name}")
        select = getattr(backend, "select", None)  # a hybrid's
        serving = backend if select is None else select(forward_mode)
        if not serving.capability.cuda_graph:
            raise ValueError(f"attnops: steps of backend {serving.name} cannot be captured; use PiecewiseRunner")
        if layers is None:
            layers = collect_layers(model) if isinstance(model, torch.nn.Module) else {}
        if recorder is None:
            if backend.device.type != "cuda":
                raise ValueError(f"attnops: there are no graphs on {backend.device}; pass a recorder")
            recorder = CudaGraphs(backend.device)
        self._model, self._backend, self._layers, self._recorder = model, backend, layers, recorder
        most = backend.limits.max_batch_size
        self.sizes = checked_sizes(default_capture_sizes(most) if sizes is None else sizes)
        backend.init_cuda_graph_state(self.sizes[-1], self.sizes[-1] * tokens_per_request)
        self.static = StaticStep(
            backend,
            req_to_token,
            token_to_kv_pool,
            max_batch_size=self.sizes[-1],
            forward_mode=forward_mode,
            tokens_per_request=tokens_per_request,
            fill_value=backend.get_cuda_graph_seq_len_fill_value(),
            padding_row=padding_row,
            tree=tree,
        )
        self._used_bytes = used_bytes or (lambda: _used_bytes(backend.device))
        self._batches = {size: self.static.batch(size) for size in self.sizes}
        self._graphs: dict[int, Recorder] = {}
        self._taken: dict[int, int] = {}
        self._out: Tensor | None = None

    @torch.no_grad()
    def capture(self, progress: Progress | None = None, warmups: int = 1) -> MemoryReport:
        """Captures every size, largest first, so that smaller graphs find their memory in the pool.

        Nothing is stored in the cache meanwhile: all rows are padding.

        Args:
            progress: Called after each graph.
            warmups: Steps run before each capture, at least 1: they do what happens once, such as compilation.
        """
        self._graphs.clear()
        self._taken.clear()
        self.static.clear()
        for done, size in enumerate(reversed(self.sizes), 1):
            for _ in range(max(1, warmups)):
                out = self._prepare(size)
            if self._out is None:
                self._out = torch.zeros_like(out)
            before = self._used_bytes()
            self._graphs[size] = self._capture_one(size)
            self._taken[size] = self._used_bytes() - before
            if progress is not None:
                progress(done, len(self.sizes), size)
        return self.memory

    @property
    def memory(self) -> MemoryReport:
        out = 0 if self._out is None else self._out.numel() * self._out.element_size()
        return MemoryReport(self.static.nbytes() + out, dict(self._taken))

    def reason_against(self, batch: AttentionBatch) -> str:
        """Why no graph serves a batch; empty: one does."""
        if not self._graphs:
            return "nothing has been captured yet"
        if pad_to_size(self.sizes, batch.batch_size) is None:
            return f"the batch has {batch.batch_size} requests, the largest graph {self.sizes[-1]}"
        return self.static.reason_against(batch)

    def can_replay(self, batch: AttentionBatch) -> bool:
        return not self.reason_against(batch)

    @torch.no_grad()
    def replay(self, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Runs a step.

        Args:
            input_ids: int64 ``[num_tokens]``.
            batch: Its tensors are copied; its `attn_backend` is not used.

        Returns:
            ``[num_tokens, ...]``: what the model gives, in memory that the next replay overwrites.

        Raises:
            ValueError: no graph serves the batch, or it is above the backend's limits; says why.
        """
        if reason := self.reason_against(batch):
            raise ValueError(f"attnops: no captured graph serves this batch: {reason}")
        if tuple(input_ids.shape) != (batch.num_tokens,):
            raise ValueError(f"attnops: input_ids must have shape {(batch.num_tokens,)}, got {tuple(input_ids.shape)}")
        self._backend.limits.check(batch)
        size = pad_to_size(self.sizes, batch.batch_size)
        assert size is not None and self._out is not None
        self.static.fill(input_ids, batch)
        self._backend.init_forward_metadata_out_graph(self._batches[size])
        self._graphs[size].replay()
        return self._out[: batch.num_tokens]

    def _prepare(self, size: int) -> Tensor:
        """One eager step of a size, with the host work that a capture needs."""
        self._backend.init_forward_metadata_out_graph(self._batches[size], in_capture=True)
        return self._step(size)

    def _step(self, size: int) -> Tensor:
        """What a graph holds."""
        batch = self._batches[size]
        with forward_context(batch, self._layers):
            self._backend.init_forward_metadata_in_graph(batch)
            assert batch.positions is not None
            out = self._model(self.static.input_ids[: batch.num_tokens], batch.positions, batch)
        if out.shape[0] != batch.num_tokens:
            raise ValueError(
                f"attnops: the model gave {out.shape[0]} rows for {batch.num_tokens} tokens; a graph serves batches "
                "of fewer requests, so it needs a row per token"
            )
        return out

    def _capture_one(self, size: int) -> Recorder:
        assert self._out is not None
        graph = self._recorder()
        with graph.capture():
            # Into memory of all graphs' own, so that the pool holds no output per graph.
            out = self._step(size)
            self._out[: out.shape[0]].copy_(out)
            del out
        return graph


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
