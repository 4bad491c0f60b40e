"""Whole steps captured on the CPU's tape and replayed while lengths, tables and requests change, on whole models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends.hybrid import HybridAttnBackend
from attnops.backends.intel_amx import IntelAMXAttnBackend
from attnops.graphs import GraphRunner, default_capture_sizes, pad_to_size
from attnops.types import ForwardMode
from graph_tape import GraphTape
from model_zoo import LIMITS, VOCAB, ZOO, Engine, prompt, run_eager, serve

BACKENDS = ["intel_amx", "torch_native"]
ALL_SIZES = range(1, 6)  # no batch of `serve` needs padding
SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class Uncapturable(IntelAMXAttnBackend):
    capability = dataclasses.replace(IntelAMXAttnBackend.capability, cuda_graph=False)


class Captured:
    """A host: uniform steps are replayed, prompts run eagerly."""

    def __init__(self, **options) -> None:
        self.options, self.runner, self.replays = options, None, 0

    def make(self, engine) -> GraphRunner:
        table = engine.rows.req_to_token
        options = {"recorder": GraphTape, **self.options}
        return GraphRunner(engine.model, engine.backend, table, engine.pool, **options)

    def __call__(self, engine, input_ids, batch):
        if batch.forward_mode is ForwardMode.EXTEND:
            return run_eager(engine, input_ids, batch)
        if self.runner is None:
            self.runner = self.make(engine)
            self.runner.capture()
        self.replays += 1
        return self.runner.replay(input_ids, batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", ZOO, ids=lambda config: config.name)
def test_decode_graphs_equal_eager_bit_for_bit(config, backend):
    tokens, logits = serve(Engine(config, backend))
    host = Captured(sizes=ALL_SIZES)
    replayed_tokens, replayed = serve(Engine(config, backend, host))
    assert host.replays == len(logits)
    assert replayed_tokens == tokens
    assert all(torch.equal(a, b) for a, b in zip(replayed, logits, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", ZOO, ids=lambda config: config.name)
def test_padded_graphs_give_the_same_tokens(config, backend):
    """Graphs of 3 and 8 serve every batch; products of other heights round otherwise, so logits are only close."""
    tokens, logits = serve(Engine(config, backend))
    padded_tokens, padded = serve(Engine(config, backend, Captured(sizes=[3, 8])))
    assert padded_tokens == tokens
    for a, b in zip(padded, logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", SPECULATIVE, ids=lambda mode: mode.name)
@pytest.mark.parametrize("config", ZOO, ids=lambda config: config.name)
def test_verify_and_draft_extend_graphs_equal_eager(config, mode):
    def run(host):
        engine = Engine(config, "intel_amx", host)
        engine.add(prompt(9, 0), prompt(40, 1))
        logits = [engine.verify([prompt(2, 10 + i), prompt(2, 20 + i)], mode) for i in range(3)]
        engine.finish(0)
        logits.append(engine.verify([prompt(2, 30)], mode))
        return [*logits, [request.tokens for request in engine.running]]

    *logits, tokens = run(run_eager)
    host = Captured(sizes=[1, 2], forward_mode=mode, tokens_per_request=3)
    *replayed, replayed_tokens = run(host)
    assert host.replays == 4
    assert replayed_tokens == tokens
    assert all(torch.equal(a, b) for a, b in zip(replayed, logits, strict=True))


def engine_and_batch(config=ZOO[0], mode=ForwardMode.DECODE, lengths=(5, 20), counts=(1, 1)):
    """An engine and one more batch of it, which no graph has seen."""
    seen = []

    def keep(engine, input_ids, batch):
        seen.append((input_ids, batch))
        return run_eager(engine, input_ids, batch)

    engine = Engine(config, "intel_amx", keep)
    engine.add(*(prompt(length, i) for i, length in enumerate(lengths)))
    engine.step(mode, engine.running, list(counts))
    return engine, *seen[-1]


def runner_of(engine, **options) -> GraphRunner:
    return Captured(**options).make(engine)


def test_a_capture_stores_nothing_and_reports_what_it_took():
    engine, *_ = engine_and_batch()
    before = [pages.clone() for pages in engine.pool.k_buffer + engine.pool.v_buffer]
    used = iter(range(0, 600, 100))
    seen = []
    runner = runner_of(engine, sizes=[4, 1, 2], used_bytes=lambda: next(used) ** 2)
    report = runner.capture(progress=lambda *args: seen.append(args))
    assert seen == [(1, 3, 4), (2, 3, 2), (3, 3, 1)], "largest first"
    assert report.graphs == {4: 100**2, 2: 300**2 - 200**2, 1: 500**2 - 400**2}
    per_row = 5 * 8 - 4  # four int64 and one int32 per request of one token
    assert report.static == 4 * per_row + 4 * VOCAB * 4
    assert report.total == report.static + sum(report.graphs.values())
    assert "4 requests" in str(report)
    for now, then in zip(engine.pool.k_buffer + engine.pool.v_buffer, before):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))


def test_outputs_share_memory_and_padding_returns_after_a_larger_batch():
    engine, input_ids, batch = engine_and_batch(lengths=(5, 20, 33), counts=(1, 1, 1))
    runner = runner_of(engine, sizes=[4])
    runner.capture()
    out = runner.replay(input_ids, batch)
    assert out.shape == (3, VOCAB)
    static = runner.static
    fill = engine.backend.get_cuda_graph_seq_len_fill_value()
    assert static.cache_seqlens.tolist() == [*batch.cache_seqlens.tolist(), fill]
    one = dataclasses.replace(
        batch,
        req_pool_indices=batch.req_pool_indices[:1],
        cache_seqlens=batch.cache_seqlens[:1],
        out_cache_loc=batch.out_cache_loc[:1],
        positions=batch.positions[:1],
        num_tokens=1,
    )
    assert runner.replay(input_ids[:1], one).data_ptr() == out.data_ptr()
    assert static.cache_seqlens.tolist() == [int(batch.cache_seqlens[0]), fill, fill, fill]
    assert static.out_cache_loc.tolist() == [int(batch.out_cache_loc[0]), -1, -1, -1]
    assert static.req_pool_indices.tolist() == [int(batch.req_pool_indices[0]), 0, 0, 0]
    assert static.input_ids.tolist() == [int(input_ids[0]), 0, 0, 0]


def test_a_batch_that_no_graph_serves_says_why():
    engine, input_ids, batch = engine_and_batch()
    runner = runner_of(engine, sizes=[1])
    with pytest.raises(ValueError, match="nothing has been captured"):
        runner.replay(input_ids, batch)
    runner.capture()
    assert not runner.can_replay(batch)
    with pytest.raises(ValueError, match="2 requests, the largest graph 1"):
        runner.replay(input_ids, batch)
    runner = runner_of(engine, sizes=[2])
    runner.capture()
    assert runner.can_replay(batch)
    for change, reason in (
        ({"positions": None}, "no positions"),
        ({"out_cache_loc": None}, "no out_cache_loc"),
        ({"req_to_token": batch.req_to_token.clone()}, "another req_to_token"),
        ({"token_to_kv_pool": None}, "another token_to_kv_pool"),
        ({"forward_mode": ForwardMode.DRAFT_EXTEND}, "the batch is DRAFT_EXTEND with 1"),
    ):
        assert reason in runner.reason_against(dataclasses.replace(batch, **change))
    with pytest.raises(ValueError, match=r"above max_seqlen = 128"):
        runner.replay(input_ids, dataclasses.replace(batch, max_cache_seqlen=129))
    with pytest.raises(ValueError, match=r"input_ids must have shape \(2,\)"):
        runner.replay(input_ids[:1], batch)


def test_a_runner_that_cannot_be_built_says_why():
    engine, *_ = engine_and_batch()
    with pytest.raises(ValueError, match="not for EXTEND"):
        runner_of(engine, forward_mode=ForwardMode.EXTEND)
    with pytest.raises(ValueError, match="max_batch_size = 8"):
        runner_of(engine, sizes=[9])
    with pytest.raises(ValueError, match="there are no graphs on cpu"):
        runner_of(engine, recorder=None)
    with pytest.raises(ValueError, match="must be positive"):
        runner_of(engine, sizes=[])
    backend = engine.backend
    engine.backend = HybridAttnBackend(backend, Uncapturable(backend.spec, LIMITS))
    with pytest.raises(ValueError, match="steps of backend intel_amx cannot be captured"):
        runner_of(engine)
    runner_of(engine, forward_mode=ForwardMode.TARGET_VERIFY, tokens_per_request=3)
    engine.backend = backend
    model, engine.model = engine.model, lambda ids, positions, batch: torch.zeros(1, VOCAB)
    with pytest.raises(ValueError, match="a row per token"):
        runner_of(engine, sizes=[2], layers={}).capture()
    engine.model = model
    assert runner_of(engine).sizes == tuple(default_capture_sizes(LIMITS.max_batch_size))


def test_sizes():
    assert default_capture_sizes(1) == [1]
    assert default_capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert default_capture_sizes(300)[-4:] == [256, 272, 288, 300]
    assert [pad_to_size([1, 4, 8], count) for count in (0, 1, 2, 4, 5, 8, 9)] == [1, 1, 4, 4, 8, 8, None]
    with pytest.raises(ValueError, match="max_size"):
        default_capture_sizes(0)
