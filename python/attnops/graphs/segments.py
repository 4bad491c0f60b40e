"""A model captured in segments, without a compiler: graphs up to each attention, which runs eagerly between them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.graphs.memory import MemoryMeter, MemoryReport
from attnops.graphs.progress import Progress, reporting
from attnops.graphs.recorder import Recorder, RecorderFactory, borrower, recorder_for
from attnops.graphs.runner import StepModel, layers_of
from attnops.graphs.sizes import checked_sizes, pad_to_size, token_buckets
from attnops.graphs.static_inputs import StaticInput
from attnops.graphs.static_output import StaticOutput
from attnops.graphs.token_step import BucketBatch, TokenStep
from attnops.layers import RadixAttention, RadixLinearAttention, forward_context
from attnops.layers.radix_attention import lists_for
from attnops.types import AttentionBatch, ForwardMode, LayerServer

if TYPE_CHECKING:
    from attnops.backends.base import AttentionBackend
    from attnops.layers.forward_context import Layer


class SegmentRunner:
    """Captures the parts of a model between its attentions, one set of graphs per number of tokens.

    The model's code is not changed: while a bucket is captured, each attention layer ends one graph and begins the
    next. A step replays them in turn and runs each attention eagerly between, on its own batch. So the same graphs
    serve every mode, length and mask, and backends whose steps cannot be captured. Tokens that pad the bucket
    reach no backend.

    Args:
        model: Called as ``model(input_ids, positions, batch, **inputs)``; gives one row per token. Of the batch it may
            use `forward_mode`, `num_tokens` and `positions`, and pass it to its layers.
        backend: Serves the steps whose batch carries no `attn_backend`.
        sizes: Numbers of tokens to capture; by default `token_buckets` up to the backend's limit.
        forward_modes: Modes to serve; None: all, with a model that computes them alike. One that asks for the mode
            needs a runner for each.
        inputs, position_axes, layers, recorder, used_bytes: As of `GraphRunner`; inputs per token or per step.

    Raises:
        ValueError: a device without graphs, an input per request, sizes that are none.
    """

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend,
        *,
        sizes: Iterable[int] | None = None,
        forward_modes: Collection[ForwardMode] | None = None,
        inputs: Mapping[str, StaticInput] | None = None,
        position_axes: int = 0,
        layers: Mapping[int, Layer] | None = None,
        recorder: RecorderFactory | None = None,
        used_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._model, self._backend, self._layers = model, backend, layers_of(model, layers)
        self._recorder = recorder_for(backend.device, recorder)
        self.sizes = checked_sizes(token_buckets(backend.limits.max_num_tokens) if sizes is None else sizes)
        self.static = TokenStep(backend.device, self.sizes[-1], inputs, position_axes)
        self._modes = frozenset(ForwardMode if forward_modes is None else forward_modes)
        self._meter = MemoryMeter(backend.device, used_bytes)
        self._steps: dict[int, _CapturedStep] = {}
        self._out: StaticOutput | None = None

    @torch.no_grad()
    def capture(self, progress: Progress | bool = True, warmups: int = 1) -> MemoryReport:
        """Captures every bucket, largest first. No attention runs meanwhile, so nothing is stored.

        Args:
            progress, warmups: As of `GraphRunner.capture`.
        """
        self._steps.clear()
        self._meter.clear()
        self.static.clear()
        with reporting(progress, len(self.sizes), "segments") as report:
            for done, size in enumerate(reversed(self.sizes), 1):
                for _ in range(max(1, warmups)):
                    out = self._run_model(size, NoAttention())
                if self._out is None:
                    self._out = StaticOutput(out, size)
                del out
                self._steps[size] = self._capture_one(size)
                report(done, len(self.sizes), size)
        return self.memory

    @property
    def memory(self) -> MemoryReport:
        """What the runner holds now: its static buffers, and what each capture took."""
        out = 0 if self._out is None else self._out.nbytes()
        return self._meter.report(self.static.nbytes() + out, self._recorder, "tokens")

    def reason_against(self, batch: AttentionBatch) -> str:
        """Why no graphs serve a batch; empty: they do."""
        if not self._steps:
            return "nothing has been captured yet; call capture()"
        if batch.forward_mode not in self._modes:
            return f"the runner was built for {_names(self._modes)}, the batch is {batch.forward_mode.name}"
        if pad_to_size(self.sizes, batch.num_tokens) is None:
            return f"the batch has {batch.num_tokens} tokens, the largest bucket {self.sizes[-1]}; run it eagerly"
        return self.static.reason_against_batch(batch)

    def can_replay(self, batch: AttentionBatch) -> bool:
        """Whether captured graphs serve a batch: `reason_against` gives no reason."""
        return not self.reason_against(batch)

    @torch.no_grad()
    def replay(self, input_ids: Tensor, batch: AttentionBatch, **inputs: Tensor) -> Any:
        """Runs a step, its metadata included. Arguments, result and errors as of `GraphRunner.replay`."""
        reason = self.reason_against(batch) or self.static.reason_against(input_ids, batch, inputs)
        if reason:
            raise ValueError(f"attnops: no captured graphs serve this step: {reason}")
        size = pad_to_size(self.sizes, batch.num_tokens)
        assert size is not None and self._out is not None
        self.static.fill(input_ids, batch, inputs)
        backend = batch.attn_backend or self._backend
        backend.init_forward_metadata(batch)
        self._steps[size].replay(backend, batch)
        return self._out.rows(batch.num_tokens)

    def _run_model(self, size: int, attention: Any) -> Any:
        batch = BucketBatch(self.static, size, self._modes, attention)
        input_ids, inputs = self.static.model_inputs(size)
        with forward_context(batch, self._layers, attention):  # type: ignore[arg-type]
            return self._model(input_ids, batch.positions, batch, **inputs)

    def _capture_one(self, size: int) -> _CapturedStep:
        assert self._out is not None
        cut = _Cut(self._recorder, lambda: self._meter.piece(size))
        with cut.capturing():
            self._out.copy_in(self._run_model(size, cut), size)
        return cut.step


class AttentionCall:
    """One attention of a captured step: its layer, and where the graphs before and behind it left q, k, v and out.

    Args:
        inputs: q, k, v, q_rope, k_rope, topk_indices; each ``[bucket, ...]`` or None.
        out: ``[bucket, num_heads * v_head_dim]``.
    """

    def __init__(
        self, layer: RadixAttention, save_kv_cache: bool, inputs: Sequence[Tensor | None], out: Tensor
    ) -> None:
        self.layer, self.out = layer, out
        self._save_kv_cache, self._inputs = save_kv_cache, tuple(inputs)
        self._see(out.shape[0])

    def run(self, backend: LayerServer, batch: AttentionBatch) -> None:
        """Of the batch's own tokens. The rest of `out` is zeros: what a graph left there before could be NaN."""
        if batch.num_tokens != self._tokens:
            self._see(batch.num_tokens)
        if self._padding is not None:
            self._padding.zero_()
        q, k, v, lists, options = self._views
        assert q is not None
        if lists is not None:
            options = {**options, **lists_for(backend, lists)}
        backend.forward(q, k, v, self.layer, batch, self._save_kv_cache, **options)

    def _see(self, tokens: int) -> None:
        """The rows of so many tokens; kept, because steps of one number of tokens follow one another."""
        q, k, v, q_rope, k_rope, lists = (None if one is None else one[:tokens] for one in self._inputs)
        options = {"q_rope": q_rope, "k_rope": k_rope, "out": self.out[:tokens]}
        self._tokens, self._views = tokens, (q, k, v, lists, options)
        self._padding = self.out[tokens:] if tokens < self.out.shape[0] else None


class LinearCall:
    """One linear layer of a captured step, as `AttentionCall`.

    Args:
        inputs: mixed_qkv, a, b, z; each ``[bucket, ...]`` or None.
        out: ``[bucket, out_width]``.
    """

    def __init__(self, layer: RadixLinearAttention, inputs: Sequence[Tensor | None], out: Tensor) -> None:
        self.layer, self.out, self._inputs = layer, out, tuple(inputs)

    def run(self, backend: Any, batch: AttentionBatch) -> None:
        """Of the batch's own tokens. The rest of `out` is zeros."""
        tokens = batch.num_tokens
        self.out[tokens:].zero_()
        inputs = (None if one is None else one[:tokens] for one in self._inputs)
        backend.forward_linear(self.layer, batch, *inputs, out=self.out[:tokens])


@dataclass
class _CapturedStep:
    """Graphs, and the attentions between them: one less."""

    graphs: list[Recorder] = field(default_factory=list)
    calls: list[AttentionCall | LinearCall] = field(default_factory=list)

    def replay(self, backend: LayerServer, batch: AttentionBatch) -> None:
        for graph, call in zip(self.graphs, self.calls):
            graph.replay()
            call.run(backend, batch)
        self.graphs[-1].replay()


class _Cut:
    """Stands in for a backend while a bucket is captured: an attention ends one graph and begins the next."""

    takes_lists = True  # a call's backend says whether it does, when it runs

    def __init__(self, recorder: RecorderFactory, measure: Callable[[], Any]) -> None:
        self.step = _CapturedStep()
        self._recorder, self._borrow, self._measure = recorder, borrower(recorder), measure
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        except BaseException:
            self._open.__exit__(*sys.exc_info())
            raise
        self._open.close()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        **options: Tensor | None,
    ) -> Tensor:
        """Arguments as of `AttentionBackend.forward`. Nothing is computed: a capture runs nothing anyway."""
        q_rope, k_rope, lists, out = (options.pop(name, None) for name in ("q_rope", "k_rope", "topk_indices", "out"))
        if options:
            raise TypeError(f"attnops: attention takes no argument {', '.join(options)}")
        if out is None:
            # The graph's own memory: the model may keep it as long as any other value that it computes.
            out = q.new_empty(q.shape[0], layer.num_heads * layer.v_head_dim)
        self._open.close()
        kept = [None if one is None else self._borrow(one) for one in (q, k, v, q_rope, k_rope, lists)]
        self.step.calls.append(AttentionCall(layer, save_kv_cache, kept, self._borrow(out)))
        self._begin()
        return out

    def forward_linear(
        self,
        layer: RadixLinearAttention,
        batch: AttentionBatch,
        mixed_qkv: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        z: Tensor | None = None,
    ) -> Tensor:
        """As `forward`, of a linear layer."""
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], layer.out_width)
        self._open.close()
        kept = [None if one is None else self._borrow(one) for one in (mixed_qkv, a, b, z)]
        self.step.calls.append(LinearCall(layer, kept, self._borrow(out)))
        self._begin()
        return out

    def _begin(self) -> None:
        graph = self._recorder()
        self.step.graphs.append(graph)
        self._open = contextlib.ExitStack()
        self._open.enter_context(self._measure())
        self._open.enter_context(graph.capture())


class NoAttention:
    """Stands in for a backend in a step without tokens: zeros, and nothing is stored."""

    takes_lists = True

    def forward(
        self, q: Tensor, k: object, v: object, layer: RadixAttention, *args: object, out: Tensor | None = None, **_: Any
    ) -> Tensor:
        return q.new_zeros(q.shape[0], layer.num_heads * layer.v_head_dim) if out is None else out.zero_()

    def forward_linear(
        self, layer: RadixLinearAttention, batch: object, mixed_qkv: Tensor, *_: object, out: Tensor | None = None
    ) -> Tensor:
        return mixed_qkv.new_zeros(mixed_qkv.shape[0], layer.out_width) if out is None else out.zero_()


def _names(modes: Collection[ForwardMode]) -> str:
    return ", ".join(mode.name for mode in sorted(modes))
