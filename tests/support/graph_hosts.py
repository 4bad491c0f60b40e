"""How an engine's steps may run (hosts of `model_zoo`): captured whole, in segments, compiled, in compiled pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from attnops.graphs import GraphRunner, PiecewiseRunner, SegmentRunner
from attnops.layers import forward_context
from attnops.types import AttentionBatch, ForwardMode
from graph_tape import GraphTape
from model_zoo import ZOO, Config, Engine, prompt, run_eager
from torch import Tensor

BUCKETS = (2, 5, 16, 90)


class Captured:
    """Whole steps are replayed, each kind by a runner of its own; prompts run eagerly."""

    def __init__(self, sizes: Iterable[int] | None = range(1, 6), recorder: Callable | None = GraphTape, **options):
        self.options = {"sizes": sizes, "recorder": recorder, **options}
        self.runners: dict[tuple, GraphRunner] = {}
        self.replays = 0

    def make(self, engine: Engine, **options) -> GraphRunner:
        table = engine.rows.req_to_token
        return GraphRunner(engine.model, engine.backend, table, engine.pool, **{**self.options, **options})

    def __call__(self, engine: Engine, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        mode, tree = batch.forward_mode, batch.tree_mask is not None
        if mode is ForwardMode.EXTEND:
            return run_eager(engine, input_ids, batch)
        kind = (mode, batch.tokens_per_request, tree)
        if kind not in self.runners:
            count = batch.tokens_per_request or engine.backend.limits.max_tokens_per_request
            options = {"forward_mode": mode, "tokens_per_request": count, "tree": tree, "ragged": not batch.is_uniform}
            self.runners[kind] = self.make(engine, **options)
            self.runners[kind].capture(progress=False)
        self.replays += 1
        return self.runners[kind].replay(input_ids, batch)


class Segments:
    """Every step, prompts too, is replayed in segments."""

    def __init__(self, sizes: Iterable[int] = BUCKETS, recorder: Callable = GraphTape, **options) -> None:
        self.options = {"sizes": list(sizes), "recorder": recorder, **options}
        self.runner: SegmentRunner | None = None
        self.replays = 0

    def __call__(self, engine: Engine, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        if self.runner is None:
            self.runner = SegmentRunner(engine.model, engine.backend, **self.options)
            self.runner.capture(progress=False)
        self.replays += 1
        return self.runner.replay(input_ids, batch)


class Piecewise:
    """Every step, prompts too, runs in compiled pieces."""

    def __init__(self, sizes: Iterable[int] = BUCKETS, **options) -> None:
        self.options, self.runner = {"sizes": list(sizes), **options}, None

    def __call__(self, engine: Engine, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        if self.runner is None:
            self.runner = PiecewiseRunner(engine.model, engine.backend, **self.options)
            self.runner.capture(progress=False)
        return self.runner.replay(input_ids, batch)


class Compiled:
    """Every step runs through the whole model, compiled by `compiler`, with attention in it as an op."""

    def __init__(self, compiler: str = "eager") -> None:
        self.compiler, self.model = compiler, None

    def __call__(self, engine: Engine, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        if self.model is None:
            self.model = torch.compile(engine.model, backend=self.compiler, fullgraph=True, dynamic=True)
        engine.backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(batch, engine.layers):
            return self.model(input_ids, batch.positions)


class NoSync:
    """A host in which a step that waits for the device is an error, once its kind has been captured."""

    def __init__(self, host=run_eager) -> None:
        self.host, self.seen = host, set()

    def __call__(self, engine, input_ids, batch):
        kind = (batch.forward_mode, batch.tokens_per_request, batch.tree_mask is None)
        mode = "error" if kind in self.seen or self.host is run_eager else "default"
        self.seen.add(kind)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return self.host(engine, input_ids, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def engine_and_batch(
    config: Config = ZOO[0],
    mode: ForwardMode = ForwardMode.DECODE,
    lengths: Sequence[int] = (5, 20),
    counts: Sequence[int] = (1, 1),
    ragged: bool = False,
) -> tuple[Engine, Tensor, AttentionBatch]:
    """An engine, and ids and batch of one more step of it, which has run eagerly; no graph has seen it."""
    seen = []

    def keep(engine: Engine, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
        seen.append((input_ids, batch))
        return run_eager(engine, input_ids, batch)

    engine = Engine(config, "intel_amx", keep)
    engine.add(*(prompt(length, i) for i, length in enumerate(lengths)))
    for request, count in zip(engine.running, counts):
        request.tokens += prompt(count - 1, count)
    engine.step(mode, engine.running, list(counts), ragged=ragged)
    return engine, *seen[-1]


def runner_of(engine: Engine, **options) -> GraphRunner:
    """A runner of whole steps for an engine, not yet captured."""
    return Captured(**options).make(engine)
