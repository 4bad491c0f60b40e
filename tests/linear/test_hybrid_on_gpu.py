"""Linear and hybrid backends on a GPU: eager beside float64 on the CPU, and every way to record their steps."""

from __future__ import annotations

import pytest
import torch
from attnops.graphs import CudaGraphs
from attnops.types import ForwardMode
from graph_hosts import Captured, NoSync, Piecewise, Segments
from hybrid_model import BACKENDS, keep_drafts, make_engine, reference_logits
from linear_reference import relative
from model_zoo import FORK, Request, prompt, run_eager, serve

pytestmark = pytest.mark.gpu

IO = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
PLAIN = {"backend": "torch_native", "device": "cuda"}


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", IO)
@pytest.mark.parametrize("kind", BACKENDS)
def test_eager_steps_are_those_of_the_cpu_in_float64(kind, dtype):
    """Prompts together, in chunks, decode, and a request that leaves."""
    engine = make_engine(kind, dtype=dtype, **PLAIN)
    engine.add(prompt(70, 1), prompt(3, 2), prompt(64, 3))
    for _ in range(2):
        engine.decode()
    engine.finish(1)
    request = Request(engine.rows.alloc()[0], prompt(100, 9))
    for count in (64, 1, 35):
        logits = engine.step(ForwardMode.EXTEND, [request], [count])
    assert relative(logits[-1], reference_logits(engine.model, request.tokens)[-1]) < BOUND[dtype]
    logits = engine.decode()
    for i, request in enumerate(engine.running):
        assert relative(logits[i], reference_logits(engine.model, request.tokens[:-1])[-1]) < BOUND[dtype]


@pytest.mark.parametrize("dtype", IO)
@pytest.mark.parametrize("kind", BACKENDS)
def test_captured_steps_equal_eager_bit_for_bit(kind, dtype):
    """One graph for each number of requests, while these come and go with other slots and lengths. Nothing waits."""
    eager = make_engine(kind, dtype=dtype, host=NoSync(), **PLAIN)
    host = Captured(recorder=CudaGraphs())
    captured = make_engine(kind, eager.model, NoSync(host), dtype=dtype, **PLAIN)
    (tokens, logits), (theirs, others) = serve(eager), serve(captured)
    assert theirs == tokens and all(torch.equal(a, b) for a, b in zip(others, logits, strict=True))
    assert host.replays > 10
    for pool, other in zip(eager.rows.mamba_pool.states, captured.rows.mamba_pool.states):
        assert pool is None or torch.equal(pool.nan_to_num(), other.nan_to_num()), "padding is nobody's"


@pytest.mark.parametrize("kind", BACKENDS)
def test_padded_graphs_give_the_same_tokens(kind):
    eager = make_engine(kind, **PLAIN)
    tokens, logits = serve(eager)
    theirs, others = serve(make_engine(kind, eager.model, Captured(sizes=[3, 8], recorder=CudaGraphs()), **PLAIN))
    assert theirs == tokens and all(relative(a, b) < 1e-4 for a, b in zip(others, logits, strict=True))


@pytest.mark.parametrize("host", [Segments, Piecewise])
@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_segments_and_pieces_give_the_same_tokens(kind, host):
    eager = make_engine(kind, **PLAIN)
    tokens, logits = serve(eager)
    theirs, others = serve(make_engine(kind, eager.model, host(recorder=CudaGraphs()), **PLAIN))
    assert theirs == tokens and all(relative(a, b) < 1e-4 for a, b in zip(others, logits, strict=True))


@pytest.mark.parametrize(
    "mode, tree",
    [(ForwardMode.TARGET_VERIFY, None), (ForwardMode.TARGET_VERIFY, FORK), (ForwardMode.DRAFT_EXTEND, None)],
    ids=["chain", "tree", "extend"],
)
@pytest.mark.parametrize("dtype", IO)
@pytest.mark.parametrize("kind", BACKENDS)
def test_captured_verification_equals_eager_bit_for_bit(kind, dtype, mode, tree):
    """Three drafts of two requests, kept or rolled back; rings run full; decode steps fold them. A draft model's
    uniform extend is the same."""
    eager = make_engine(kind, dtype=dtype, drafts=3, **PLAIN)
    host = Captured(sizes=[2], recorder=CudaGraphs())
    captured = make_engine(kind, eager.model, host, dtype=dtype, drafts=3, **PLAIN)
    paths = [[[0, 1], [0]], [[0, 2] if tree is not None else [0, 1, 2], []], [[0], [0, 1]], [[0, 1], [0, 1]]]
    for engine in (eager, captured):
        engine.add(prompt(20, 1), prompt(5, 2))
    for step, kept in enumerate(paths):
        logits = []
        for engine in (eager, captured):
            logits.append(engine.verify([prompt(2, 2 * step + i) for i in range(2)], mode, tree=tree))
            for request in engine.running:
                request.tokens.pop()
            keep_drafts(engine, 3, kept)
            for request in engine.running:
                request.tokens.append(step)
            if step % 2:
                logits.append(engine.decode())
        half = len(logits) // 2
        assert all(torch.equal(a, b) for a, b in zip(logits[:half], logits[half:]))
    assert host.replays > 4
    for i, request in enumerate(captured.running):
        expected = reference_logits(captured.model, request.tokens[:-1])[-1]
        assert relative(logits[-1][i], expected) < BOUND[dtype]


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_states_on_a_prompts_way_are_kept(kind):
    engine = make_engine(kind, checkpoints=2, host=run_eager, **PLAIN)
    pool, rows, text = engine.rows.mamba_pool, engine.rows, prompt(128, 9)
    first = Request(rows.alloc()[0], list(text))
    (kept,) = pool.alloc(1)
    rows.keep_at(first.row, [64], [kept])
    engine.step(ForwardMode.EXTEND, [first], [100])
    logits = engine.step(ForwardMode.EXTEND, [first], [28])
    branch = Request(rows.alloc()[0], list(text), cached=64)
    slots = rows.slots(first.row, 0, 64).clone()
    engine.allocator.share(slots)
    rows.write(branch.row, 0, slots)
    rows.start_from(branch.row, kept)
    again = engine.step(ForwardMode.EXTEND, [branch], [64])
    assert relative(again[-1], logits[-1]) < 1e-4
