"""Models compiled in pieces around eager attention: cut where a compiler can see it, traced once, recorded if asked."""

from __future__ import annotations

import pytest
import torch
from attnops.graphs import SPLIT_OP, PiecewiseBackend, PiecewiseRunner, StaticInput
from attnops.layers import collect_layers, forward_context
from attnops.types import ForwardMode
from graph_hosts import BUCKETS, Piecewise, engine_and_batch
from graph_tape import GraphTape
from model_zoo import LAYERS, VOCAB, ZOO, Engine, prompt, run_eager, serve, speculate

LLAMA, DEEPSEEK = ZOO[0], ZOO[4]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def assert_same(served, expected):
    (tokens, logits), (expected_tokens, expected_logits) = served, expected
    assert tokens == expected_tokens
    for a, b in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_recorded_pieces_give_the_same_tokens(config):
    host = Piecewise(recorder=GraphTape)
    engine, eager = Engine(config, "intel_amx", host), Engine(config, "intel_amx")
    assert_same(serve(engine), serve(eager))
    assert_same(speculate(engine), speculate(eager))
    assert host.runner.splitter.num_compiled == (LAYERS + 1) * len(BUCKETS)


def test_pieces_hold_no_attention_and_the_split_point_has_a_name():
    seen = []

    def inner(graph, example_inputs):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph

    engine = Engine(LLAMA, "intel_amx", Piecewise(inner=inner))
    engine.add(prompt(5, 0))
    assert seen
    assert not any("unified_attention" in target for targets in seen for target in targets)
    namespace, _, name = SPLIT_OP.partition("::")
    assert getattr(getattr(torch.ops, namespace), name)._qualified_op_name == SPLIT_OP


def test_a_compilers_graph_holds_one_split_point_per_layer_with_what_it_writes():
    """What vLLM's or any other backend looks for: the op, by name, with `output` and the caches' byte as arguments."""
    found = []

    def backend(graph, example_inputs):
        found.extend(node for node in graph.graph.nodes if getattr(node.target, "_qualified_op_name", "") == SPLIT_OP)
        return graph

    engine, input_ids, batch = engine_and_batch()
    compiled = torch.compile(engine.model, backend=backend, fullgraph=True)
    engine.backend.init_forward_metadata(batch)
    with torch.no_grad(), forward_context(batch, collect_layers(engine.model)):
        compiled(input_ids, batch.positions)
    assert [node.args[5] for node in found] == list(range(LAYERS))
    assert all(node.args[3].target == "new_empty" for node in found)


def test_named_inputs_and_several_results():
    class Draft(torch.nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.whole = whole

        def forward(self, input_ids, positions, hidden, scale):
            logits = self.whole(input_ids, positions)
            return logits * scale + hidden, hidden.sum(1)

    engine, input_ids, batch = engine_and_batch()
    inputs = {"hidden": StaticInput((VOCAB,)), "scale": StaticInput((1,), per="step")}
    runner = PiecewiseRunner(Draft(engine.model), engine.backend, sizes=[2, 4], inputs=inputs)
    runner.capture()
    hidden, scale = torch.randn(2, VOCAB), torch.tensor([2.0])
    logits, sums = runner.replay(input_ids, batch, hidden=hidden, scale=scale)
    torch.testing.assert_close(logits, run_eager(engine, input_ids, batch) * scale + hidden)
    torch.testing.assert_close(sums, hidden.sum(1))
    with pytest.raises(ValueError, match="the step misses hidden, scale"):
        runner.replay(input_ids, batch)
    assert runner.splitter.num_graphs == 1


def test_a_step_that_no_bucket_serves_says_why_and_what_to_do():
    engine, input_ids, batch = engine_and_batch()
    runner = PiecewiseRunner(engine.model, engine.backend, sizes=[2])
    with pytest.raises(ValueError, match=r"nothing has been compiled yet; call capture\(\)"):
        runner.replay(input_ids, batch)
    runner.capture()
    with pytest.raises(ValueError, match=r"input_ids must have shape \(2,\), got \(1,\)"):
        runner.replay(input_ids[:1], batch)
    engine.host = lambda engine, input_ids, batch: runner.replay(input_ids, batch)
    with pytest.raises(ValueError, match="the batch has 3 tokens, the largest bucket 2; run it eagerly"):
        engine.add(prompt(3, 0))
    with pytest.raises(ValueError, match="2 tokens or more, got 1"):
        PiecewiseRunner(engine.model, engine.backend, sizes=[1])
    assert PiecewiseRunner(engine.model, engine.backend).sizes[0] == 2


def test_compiling_stores_nothing_and_reports_progress_and_memory():
    engine, seen, used = Engine(LLAMA, "intel_amx"), [], iter(range(1000))
    options = {"recorder": GraphTape, "used_bytes": lambda: next(used) ** 2}
    runner = PiecewiseRunner(engine.model, engine.backend, sizes=[2, 4], **options)
    report = runner.capture(lambda *args: seen.append(args))
    assert seen == [(1, 2, 4), (2, 2, 2)]
    assert report.pieces == {4: (1, 5, 9), 2: (13, 17, 21)} and report.unit == "tokens"
    assert "in 3 pieces, at most 0.0 MiB (piece 2)" in str(report)
    assert all(pages.isnan().all() for pages in engine.pool.k_buffer + engine.pool.v_buffer)


def test_a_recorded_piece_refuses_inputs_that_moved():
    backend = PiecewiseBackend(recorder=GraphTape)
    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend, fullgraph=True)
    x = torch.ones(3)
    assert compiled(x).tolist() == [3, 3, 3]
    x.fill_(4)
    assert compiled(x).tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match=r"other addresses .* Copy a step's inputs into tensors that stay"):
        compiled(torch.ones(3))


def test_the_logits_of_a_bucket_are_cut_to_the_tokens():
    engine = Engine(LLAMA, "intel_amx", Piecewise())
    engine.add(prompt(3, 0))
    assert engine.step(ForwardMode.DECODE, engine.running, [1]).shape == (1, VOCAB)
