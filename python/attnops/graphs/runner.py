"""Whole steps captured, one graph per batch size: decode, target verify, draft extend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.graphs.memory import MemoryMeter, MemoryReport
from attnops.graphs.progress import Progress, reporting
from attnops.graphs.recorder import Recorder, RecorderFactory, recorder_for
from attnops.graphs.sizes import capture_sizes, checked_sizes, pad_to_size
from attnops.graphs.static_inputs import StaticInput
from attnops.graphs.static_output import StaticOutput
from attnops.graphs.static_step import StaticStep
from attnops.layers import collect_layers, forward_context
from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.backends.base import AttentionBackend
    from attnops.layers.forward_context import Layer
    from attnops.pools import KVCache

# model(input_ids [num_tokens], positions [num_tokens], batch, **inputs) -> [num_tokens, ...], or tuples, dicts of such
StepModel = Callable[..., Any]

CAPTURED_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class GraphRunner:
    """Captures a model's steps of one mode, one graph per batch size, and replays them for any lengths and requests.

    Page tables and plans are recorded with the layers, so a replay launches one graph after copying the step's inputs.

    Args:
        model: Called as ``model(input_ids, positions, batch, **inputs)``; gives one row per token.
        backend: Serves the steps; its limits hold the largest graph.
        req_to_token, token_to_kv_pool: Those of every batch to come.
        sizes: Batch sizes to capture; by default `capture_sizes` up to the backend's limit.
        forward_mode: DECODE, TARGET_VERIFY or DRAFT_EXTEND.
        tokens_per_request: 1 for DECODE; of ragged steps the most that a request brings.
        tree: TARGET_VERIFY with a tree mask.
        ragged: DRAFT_EXTEND in which requests bring different numbers of tokens (those that were accepted).
        inputs: More inputs of the model, by name: hidden states of a draft model, position offsets, ...
        position_axes: 3 for M-RoPE, whose positions are ``[3, num_tokens]``; 0: ``[num_tokens]``.
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
        ragged: bool = False,
        inputs: Mapping[str, StaticInput] | None = None,
        position_axes: int = 0,
        layers: Mapping[int, Layer] | None = None,
        recorder: RecorderFactory | None = None,
        padding_row: int = 0,
        used_bytes: Callable[[], int] | None = None,
    ) -> None:
        _check_options(backend, forward_mode, tokens_per_request, tree, ragged)
        self._model, self._backend, self._layers = model, backend, layers_of(model, layers)
        self._recorder = recorder_for(backend.device, recorder)
        self.sizes = checked_sizes(capture_sizes(backend.limits.max_batch_size) if sizes is None else sizes)
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
            ragged=ragged,
            inputs=inputs,
            position_axes=position_axes,
        )
        self._meter = MemoryMeter(backend.device, used_bytes)
        self._batches = {size: self.static.batch(size) for size in self.sizes}
        self._graphs: dict[int, Recorder] = {}
        self._out: StaticOutput | None = None

    @torch.no_grad()
    def capture(self, progress: Progress | bool = True, warmups: int = 1) -> MemoryReport:
        """Captures every size, largest first, so that smaller graphs find their memory in the pool.

        Nothing is stored in the cache meanwhile: all rows are padding.

        Args:
            progress: True: a tqdm bar, where there are tqdm and a terminal; False: silent; or called after each graph.
            warmups: Steps run before each capture, at least 1: they do what happens once, such as compilation.
        """
        self._graphs.clear()
        self._meter.clear()
        self.static.clear()
        self.static.buffers_version = self.static.pool.buffers_version
        with reporting(progress, len(self.sizes), f"{self.static.forward_mode.name} graphs") as report:
            for done, size in enumerate(reversed(self.sizes), 1):
                for _ in range(max(1, warmups)):
                    out = self._prepare(size)
                if self._out is None:
                    self._out = StaticOutput(out, self._batches[size].num_tokens)
                del out
                with self._meter.piece(size):
                    self._graphs[size] = self._capture_one(size)
                report(done, len(self.sizes), size)
        return self.memory

    @property
    def memory(self) -> MemoryReport:
        """What the runner holds now: its static buffers, and what each capture took."""
        out = 0 if self._out is None else self._out.nbytes()
        return self._meter.report(self.static.nbytes() + out, self._recorder, "requests")

    def reason_against(self, batch: AttentionBatch) -> str:
        """Why no graph serves a batch; empty: one does."""
        against = self.static.reason_against_idle if batch.forward_mode.is_idle() else self.static.reason_against_batch
        return self._reason_against_size(batch) or against(batch)

    def _reason_against_size(self, batch: AttentionBatch) -> str:
        if not self._graphs:
            return "nothing has been captured yet; call capture()"
        requests = self._requests_of(batch)
        if pad_to_size(self.sizes, requests) is None:
            return f"the batch has {requests} requests, the largest graph {self.sizes[-1]}; run it eagerly"
        return ""

    def _requests_of(self, batch: AttentionBatch) -> int:
        """Of an idle batch those that its rows of padding would be."""
        if batch.forward_mode.is_idle():
            return -(-batch.num_tokens // self.static.tokens_per_request)
        return batch.batch_size

    def can_replay(self, batch: AttentionBatch) -> bool:
        """Whether a graph serves a batch: `reason_against` gives no reason."""
        return not self.reason_against(batch)

    @torch.no_grad()
    def replay(self, input_ids: Tensor, batch: AttentionBatch, **inputs: Tensor) -> Any:
        """Runs a step.

        Args:
            input_ids: int64 ``[num_tokens]``.
            batch: Its tensors are copied; its `attn_backend` is not used. An IDLE batch of `num_tokens` rows replays
                the graph that others replay for as many: all rows are padding, nothing is stored, nothing is copied.
            inputs: Of every `StaticInput`.

        Returns:
            ``[num_tokens, ...]``: what the model gives, in memory that the next replay overwrites. Of an IDLE batch
            what padding gives.

        Raises:
            ValueError: no graph serves the batch, or it is above the backend's limits; says why.
        """
        idle = batch.forward_mode.is_idle()
        reason = self._reason_against_size(batch)
        reason = reason or (
            self.static.reason_against_idle(batch) if idle else self.static.reason_against(input_ids, batch, inputs)
        )
        if reason:
            raise ValueError(f"attnops: no captured graph serves this step: {reason}")
        self._backend.limits.check(batch)
        size = pad_to_size(self.sizes, self._requests_of(batch))
        assert size is not None and self._out is not None
        own = self._batches[size]
        own.actual_forward_mode = batch.forward_mode
        if idle:
            self.static.clear()
        else:
            self.static.fill(input_ids, batch, inputs)
        if self._backend.needs_cpu_seq_lens:
            self.static.fill_lengths(own, batch)
        self._backend.init_forward_metadata_out_graph(own)
        self._graphs[size].replay()
        return self._out.rows(batch.num_tokens)

    def _prepare(self, size: int) -> Any:
        """One eager step of a size, with the host work that a capture needs."""
        self._backend.init_forward_metadata_out_graph(self._batches[size], in_capture=True)
        return self._step(size)

    def _step(self, size: int) -> Any:
        """What a graph holds."""
        batch = self._batches[size]
        input_ids, inputs = self.static.model_inputs(size)
        with forward_context(batch, self._layers, self._backend):
            self._backend.init_forward_metadata_in_graph(batch)
            return self._model(input_ids, batch.positions, batch, **inputs)

    def _capture_one(self, size: int) -> Recorder:
        assert self._out is not None
        graph = self._recorder()
        with graph.capture():
            self._out.copy_in(self._step(size), self._batches[size].num_tokens)
        return graph


def layers_of(model: StepModel, layers: Mapping[int, Layer] | None) -> Mapping[int, Layer]:
    """The given layers, or those found in the model; a function that is no module passes its batch to its layers."""
    if layers is not None:
        return layers
    return collect_layers(model) if isinstance(model, torch.nn.Module) else {}


def _check_options(
    backend: AttentionBackend, forward_mode: ForwardMode, tokens_per_request: int, tree: bool, ragged: bool
) -> None:
    if forward_mode not in CAPTURED_MODES:
        names = ", ".join(mode.name for mode in CAPTURED_MODES)
        raise ValueError(
            f"attnops: whole steps are captured for {names}, not for {forward_mode.name}; SegmentRunner and "
            "PiecewiseRunner serve it"
        )
    serving = getattr(backend, "select", lambda mode: backend)(forward_mode)  # a hybrid's
    if not serving.capability.cuda_graph:
        raise ValueError(
            f"attnops: steps of backend {serving.name} cannot be captured; use SegmentRunner or PiecewiseRunner"
        )
    if forward_mode is ForwardMode.DECODE and tokens_per_request != 1:
        raise ValueError(f"attnops: DECODE brings 1 token per request, got tokens_per_request={tokens_per_request}")
    if tree and forward_mode is not ForwardMode.TARGET_VERIFY:
        raise ValueError(f"attnops: tree=True belongs to TARGET_VERIFY, got {forward_mode.name}")
    if ragged and forward_mode is not ForwardMode.DRAFT_EXTEND:
        raise ValueError(f"attnops: ragged=True belongs to DRAFT_EXTEND, got {forward_mode.name}")
