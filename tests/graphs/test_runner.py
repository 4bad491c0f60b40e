"""Whole steps captured on the CPU's tape: what a capture takes and stores, what it refuses, what a step may bring."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends.hybrid import HybridAttnBackend
from attnops.backends.intel_amx import IntelAMXAttnBackend
from attnops.graphs import StaticInput, capture_sizes
from attnops.types import ForwardMode
from graph_hosts import Captured, engine_and_batch, runner_of
from graph_tape import GraphTape
from model_zoo import FORK, LIMITS, VOCAB, ZOO, Engine, churn, prompt, run_eager

VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND


class Uncapturable(IntelAMXAttnBackend):
    capability = dataclasses.replace(IntelAMXAttnBackend.capability, cuda_graph=False)


def test_many_replays_of_changing_requests_equal_eager_bit_for_bit():
    host, gemma = Captured(sizes=range(1, 7)), ZOO[2]
    expected, replayed = churn(Engine(gemma, "intel_amx"), 60), churn(Engine(gemma, "intel_amx", host), 60)
    assert host.replays == 60
    assert replayed[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(replayed[1], expected[1], strict=True))


def test_a_tree_of_drafts_is_as_good_as_each_of_its_paths():
    """Logits of a fork's two ends are those of the two chains that lead to them, captured and eager alike."""

    def logits_of(drafts, tree=None, host=run_eager):
        engine = Engine(ZOO[0], "intel_amx", host)
        engine.add(prompt(21, 0))
        return engine.verify([drafts], tree=tree)

    host = Captured()
    fork = logits_of([7, 30], FORK, host)
    assert torch.equal(fork, logits_of([7, 30], FORK))
    torch.testing.assert_close(fork[1], logits_of([7])[1])
    torch.testing.assert_close(fork[2], logits_of([30])[1])
    assert not torch.allclose(fork[2], logits_of([7, 30])[2], atol=1e-3), "in a chain the third sees the second"


def test_a_capture_stores_nothing_and_reports_what_it_took():
    engine, *_ = engine_and_batch()
    before = [pages.clone() for pages in engine.pool.k_buffer + engine.pool.v_buffer]
    used = iter(range(0, 600, 100))
    seen = []
    runner = runner_of(engine, sizes=[4, 1, 2], used_bytes=lambda: next(used) ** 2)
    report = runner.capture(lambda *args: seen.append(args))
    assert seen == [(1, 3, 4), (2, 3, 2), (3, 3, 1)], "largest first"
    assert report.graphs == {4: 100**2, 2: 300**2 - 200**2, 1: 500**2 - 400**2}
    per_row = 5 * 8 - 4  # four int64 and one int32 per request of one token
    assert report.static == 4 * per_row + 4 * VOCAB * 4
    assert report.total == report.static + sum(report.graphs.values())
    assert "4 requests" in str(report) and report.pool is None
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


def test_a_draft_model_takes_hidden_states_offsets_and_a_scale_and_gives_two_results():
    """Named static inputs, per token, per request and per step; and results of several tensors."""
    engine, input_ids, batch = engine_and_batch(mode=VERIFY, counts=(3, 3))
    seen = []

    def draft(ids, positions, batch, hidden, offset, scale):
        seen.append(hidden.shape[0])
        logits = whole(ids, positions + offset.repeat_interleave(3, output_size=len(ids)), batch)
        return {"logits": logits * scale, "hidden": hidden + logits[:, :4]}

    inputs = {
        "hidden": StaticInput((4,), torch.float32),
        "offset": StaticInput((), torch.int64, per="request"),
        "scale": StaticInput((1,), torch.float32, per="step"),
    }
    options = {"forward_mode": VERIFY, "tokens_per_request": 3, "inputs": inputs}
    whole, engine.model = engine.model, draft
    runner = runner_of(engine, sizes=[2, 3], layers=engine.layers, **options)
    runner.capture()
    engine.model = whole
    assert set(seen) == {6, 9}
    more = {"hidden": torch.randn(6, 4), "offset": torch.tensor([0, 2]), "scale": torch.tensor([3.0])}
    got = runner.replay(input_ids, batch, **more)
    moved = dataclasses.replace(batch, positions=batch.positions + torch.tensor([0, 0, 0, 2, 2, 2]))
    logits = run_eager(engine, input_ids, moved)
    assert torch.equal(got["logits"], logits * 3)
    assert torch.equal(got["hidden"], more["hidden"] + logits[:, :4])
    for change, reason in (
        ({"hidden": None}, "the step misses hidden; the static inputs are .*offset, scale"),
        ({"other": torch.zeros(1)}, "has unknown other"),
        ({"hidden": torch.zeros(5, 4)}, r"hidden must have shape \(6, 4\), got \(5, 4\)"),
        ({"hidden": torch.zeros(6, 4).half()}, r"hidden must be torch.float32, got torch.float16"),
        ({"offset": torch.zeros(1, dtype=torch.int32)}, r"offset must have shape \(2,\), got \(1,\)"),
    ):
        wrong = {name: value for name, value in {**more, **change}.items() if value is not None}
        with pytest.raises(ValueError, match=reason):
            runner.replay(input_ids, batch, **wrong)
    runner.replay(input_ids, batch, **{**more, "offset": more["offset"].int()})  # integers of either width


def test_a_ragged_draft_extend_takes_what_each_request_had_accepted():
    engine, input_ids, batch = engine_and_batch(mode=DRAFT, lengths=(5, 20, 9), counts=(3, 1, 2), ragged=True)
    runner = runner_of(engine, sizes=[2, 4], forward_mode=DRAFT, tokens_per_request=3, ragged=True)
    runner.capture()
    before = engine.pool.k_buffer[0].clone()
    out = runner.replay(input_ids, batch)
    torch.testing.assert_close(out, run_eager(engine, input_ids, batch), rtol=1e-4, atol=1e-4)
    stored = (before != engine.pool.k_buffer[0]) & ~before.isnan()
    assert not stored.any(), "the step was computed before: the same rows, and no others"
    assert runner.static.extend_seq_lens.tolist() == [3, 1, 2, 0]
    unbounded = dataclasses.replace(batch, max_seqlen_q=0)
    with pytest.raises(ValueError, match=r"may bring 6 tokens, the graphs hold 3 .*set max_seqlen_q"):
        runner.replay(input_ids, unbounded)
    *_, uniform = engine_and_batch(mode=DRAFT, lengths=(5, 20), counts=(3, 3))
    assert "give it extend_seq_lens" in runner.reason_against(uniform)
    plain = runner_of(engine, sizes=[4], forward_mode=DRAFT, tokens_per_request=3)
    plain.capture()
    assert "3 tokens per request, got a ragged batch" in plain.reason_against(batch)


def test_a_batch_that_no_graph_serves_says_why_and_what_to_do():
    engine, input_ids, batch = engine_and_batch()
    runner = runner_of(engine, sizes=[1])
    with pytest.raises(ValueError, match=r"nothing has been captured yet; call capture\(\)"):
        runner.replay(input_ids, batch)
    runner.capture()
    assert not runner.can_replay(batch)
    with pytest.raises(ValueError, match="2 requests, the largest graph 1; run it eagerly"):
        runner.replay(input_ids, batch)
    runner = runner_of(engine, sizes=[2])
    runner.capture()
    assert runner.can_replay(batch)
    tree = {"forward_mode": VERIFY, "tokens_per_request": 1, "tree_mask": torch.ones(2, 1, 1, dtype=torch.uint8)}
    for change, reason in (
        ({"positions": None}, "no positions"),
        ({"out_cache_loc": None}, "no out_cache_loc"),
        ({"req_to_token": batch.req_to_token.clone()}, "another req_to_token than the graphs read; keep one table"),
        ({"token_to_kv_pool": None}, "another token_to_kv_pool than the graphs read; capture again"),
        ({"forward_mode": DRAFT}, "of DECODE, the batch is DRAFT_EXTEND; a runner serves one mode"),
    ):
        assert reason in runner.reason_against(dataclasses.replace(batch, **change))
    verify = runner_of(engine, sizes=[2], forward_mode=VERIFY)
    verify.capture()
    assert "captured without a tree mask (GraphRunner's tree" in verify.reason_against(
        dataclasses.replace(batch, **tree)
    )
    with pytest.raises(ValueError, match=r"above max_seqlen = 128"):
        runner.replay(input_ids, dataclasses.replace(batch, max_cache_seqlen=129))
    for ids in (input_ids[:1], input_ids[:0], input_ids.unsqueeze(0)):  # what a copy would broadcast, or not
        with pytest.raises(ValueError, match=r"input_ids must have shape \(2,\)"):
            runner.replay(ids, batch)
    with pytest.raises(ValueError, match=r"input_ids must be torch.int64, got torch.float32"):
        runner.replay(input_ids.float(), batch)
    with pytest.raises(ValueError, match=r"positions must have shape \(2,\), got \(3, 2\)"):
        runner.replay(input_ids, dataclasses.replace(batch, positions=batch.positions.expand(3, 2)))


def test_a_runner_that_cannot_be_built_says_why():
    engine, *_ = engine_and_batch()
    with pytest.raises(ValueError, match=r"not for EXTEND; SegmentRunner and PiecewiseRunner serve it"):
        runner_of(engine, forward_mode=ForwardMode.EXTEND)
    with pytest.raises(ValueError, match="max_batch_size = 8"):
        runner_of(engine, sizes=[9])
    with pytest.raises(ValueError, match="there are no graphs on cpu; run steps eagerly or with PiecewiseRunner"):
        runner_of(engine, recorder=None)
    with pytest.raises(ValueError, match="must be positive"):
        runner_of(engine, sizes=[])
    with pytest.raises(ValueError, match="DECODE brings 1 token per request, got tokens_per_request=2"):
        runner_of(engine, tokens_per_request=2)
    with pytest.raises(ValueError, match="tree=True belongs to TARGET_VERIFY, got DECODE"):
        runner_of(engine, tree=True)
    with pytest.raises(ValueError, match="ragged=True belongs to DRAFT_EXTEND, got DECODE"):
        runner_of(engine, ragged=True)
    with pytest.raises(ValueError, match="positions comes with the batch"):
        runner_of(engine, inputs={"positions": StaticInput()})
    with pytest.raises(ValueError, match="per must be one of token, request, step, got 'row'"):
        StaticInput(per="row")
    backend = engine.backend
    engine.backend = HybridAttnBackend(backend, Uncapturable(backend.spec, LIMITS))
    with pytest.raises(ValueError, match="steps of backend intel_amx cannot be captured; use SegmentRunner or"):
        runner_of(engine)
    runner_of(engine, forward_mode=VERIFY, tokens_per_request=3)
    engine.backend = backend
    assert runner_of(engine, sizes=None).sizes == tuple(capture_sizes(LIMITS.max_batch_size))


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda ids: torch.zeros(1, VOCAB), r"shape \(1, 61\) for 2 tokens; .* a row per token\. Leave what picks"),
        (lambda ids: (torch.zeros(2, 3), 7), "gives tensors, got a int among them"),
        (lambda ids: torch.zeros(2, 1) if len(ids) == 2 else {}, "gives .* for 1 tokens and .* for the largest"),
    ],
)
def test_a_model_whose_results_no_graph_can_hold_says_why(gives, message):
    engine, *_ = engine_and_batch()
    engine.model = lambda ids, positions, batch: gives(ids)
    with pytest.raises(ValueError, match=message):
        runner_of(engine, sizes=[1, 2], layers={}).capture()


def test_a_length_that_only_the_device_knows_is_found_in_the_checked_mode(monkeypatch):
    """A replay whose table leads out of the pool: the graph records the fault, and the backend names it."""
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    engine, input_ids, batch = engine_and_batch()
    runner = runner_of(engine, sizes=[2])
    runner.capture()
    runner.replay(input_ids, batch)
    engine.backend.raise_on_fault()
    batch.cache_seqlens[1] = 9999
    runner.replay(input_ids, batch)
    with pytest.raises(RuntimeError, match=r"length 9999 at request 1"):
        engine.backend.raise_on_fault()


def test_the_tape_can_refuse_a_model():
    engine, *_ = engine_and_batch()
    engine.model = lambda ids, positions, batch: torch.zeros(len(ids), int(positions.max()) + 1)
    with pytest.raises(RuntimeError, match="inside a captured region"):
        runner_of(engine, sizes=[2], layers={}, recorder=GraphTape).capture()


def test_graphs_of_replaced_pages_are_refused_until_they_are_captured_again():
    engine, input_ids, batch = engine_and_batch()
    runner = runner_of(engine, sizes=[2])
    runner.capture()
    before = runner.replay(input_ids, batch).clone()
    engine.pool.v_buffer[0] = engine.pool.v_buffer[0].clone()
    with pytest.raises(ValueError, match=r"buffers of the pool were replaced since the capture.*; capture again"):
        runner.replay(input_ids, batch)
    runner.capture()
    assert torch.equal(runner.replay(input_ids, batch), before)
