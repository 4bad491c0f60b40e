"""Models compiled whole and in pieces around eager attention give the tokens of the eager model."""

from __future__ import annotations

import pytest
import torch
from attnops.graphs import PiecewiseBackend, PiecewiseRunner
from attnops.layers import forward_context
from attnops.types import ForwardMode
from graph_tape import GraphTape
from model_zoo import LAYERS, VOCAB, ZOO, Engine, prompt, run_eager, serve

BACKENDS = ["intel_amx", "torch_native"]
BUCKETS = [2, 5, 16, 90]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


class Piecewise:
    """A host: every step, prompts too, runs in pieces."""

    def __init__(self, **options) -> None:
        self.options, self.runner = options, None

    def __call__(self, engine, input_ids, batch):
        if self.runner is None:
            self.runner = PiecewiseRunner(engine.model, BUCKETS, **self.options)
            self.runner.warm_up()
        return self.runner.run(input_ids, batch)


def assert_same(served, expected):
    (tokens, logits), (expected_tokens, expected_logits) = served, expected
    assert tokens == expected_tokens
    for a, b in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"inner": "aot_eager"}, {"recorder": GraphTape}],
    ids=["eager", "aot_eager", "recorded"],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", ZOO, ids=lambda config: config.name)
def test_pieces_give_the_same_tokens_and_are_traced_once(config, backend, options):
    host = Piecewise(**options)
    assert_same(serve(Engine(config, backend, host)), serve(Engine(config, backend)))
    splitter = host.runner.splitter
    assert splitter.num_graphs == 1, "no break, no recompilation"
    assert splitter.num_pieces == LAYERS + 1
    assert splitter.num_compiled == (LAYERS + 1) * len(BUCKETS), "all of them while warming up"


@pytest.mark.parametrize("config", ZOO, ids=lambda config: config.name)
def test_a_whole_compiled_model_gives_the_same_tokens(config):
    def host(engine, input_ids, batch):
        if not compiled:
            compiled.append(torch.compile(engine.model, backend="aot_eager", fullgraph=True, dynamic=True))
        engine.backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(batch, engine.layers):
            return compiled[0](input_ids, batch.positions)

    compiled: list = []
    assert_same(serve(Engine(config, "intel_amx", host)), serve(Engine(config, "intel_amx")))


def test_pieces_hold_no_attention():
    seen = []

    def inner(graph, example_inputs):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph

    engine = Engine(ZOO[0], "intel_amx", Piecewise(inner=inner))
    engine.add(prompt(5, 0))
    assert seen
    assert not any("unified_attention" in target for targets in seen for target in targets)


def test_verify_steps_run_in_pieces():
    def run(host):
        engine = Engine(ZOO[0], "intel_amx", host)
        engine.add(prompt(9, 0), prompt(40, 1))
        logits = [engine.verify([prompt(2, 10 + i), prompt(2, 20 + i)]) for i in range(3)]
        return [request.tokens for request in engine.running], logits

    assert_same(run(Piecewise()), run(run_eager))


def test_a_batch_above_the_buckets_says_so():
    engine = Engine(ZOO[0], "intel_amx", Piecewise())
    with pytest.raises(ValueError, match="91 tokens, the largest bucket 90"):
        engine.add(prompt(91, 0))
    with pytest.raises(ValueError, match="2 tokens or more"):
        PiecewiseRunner(engine.model, [1])


def test_warming_up_stores_nothing_and_reports_progress():
    engine = Engine(ZOO[0], "intel_amx")
    seen = []
    runner = PiecewiseRunner(engine.model, [2, 4])
    runner.warm_up(lambda *args: seen.append(args))
    assert seen == [(1, 2, 4), (2, 2, 2)]
    assert all(pages.isnan().all() for pages in engine.pool.k_buffer + engine.pool.v_buffer)


def test_a_recorded_piece_refuses_inputs_that_moved():
    backend = PiecewiseBackend(recorder=GraphTape)
    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend, fullgraph=True)
    x = torch.ones(3)
    compiled(x)
    x.fill_(4)
    assert compiled(x).tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="other addresses"):
        compiled(torch.ones(3))


def test_the_logits_of_a_bucket_are_cut_to_the_tokens():
    engine = Engine(ZOO[0], "intel_amx", Piecewise())
    engine.add(prompt(3, 0))
    assert engine.step(ForwardMode.DECODE, engine.running, [1]).shape == (1, VOCAB)
