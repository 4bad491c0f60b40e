"""A model captured in segments: where it is cut, what it may ask of its batch, and what a step may bring."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.graphs import SegmentRunner, StaticInput, token_buckets
from attnops.layers import forward_context
from attnops.types import AttentionSpec, ForwardMode
from graph_hosts import Segments, engine_and_batch
from graph_tape import GraphTape
from model_zoo import LAYERS, LIMITS, VOCAB, WIDTH, ZOO, Engine, prompt, run_eager
from sparse_lists import check, with_lists
from steps import LIMITS as STEP_LIMITS
from steps import Model, make_step

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND


def runner_of(engine: Engine, sizes=(4,), **options) -> SegmentRunner:
    runner = SegmentRunner(engine.model, engine.backend, sizes=sizes, recorder=GraphTape, **options)
    runner.capture(progress=False)
    return runner


def test_a_model_is_cut_at_each_attention_and_nothing_is_stored_meanwhile():
    tapes, seen, used = [], [], iter(range(1000))

    def record():
        tapes.append(GraphTape())
        return tapes[-1]

    engine = Engine(ZOO[0], "intel_amx")
    runner = SegmentRunner(
        engine.model, engine.backend, sizes=[2, 4], recorder=record, used_bytes=lambda: next(used) ** 2
    )
    report = runner.capture(lambda *args: seen.append(args))
    assert seen == [(1, 2, 4), (2, 2, 2)], "largest first"
    assert len(tapes) == 2 * (LAYERS + 1) and all(len(tape) > 1 for tape in tapes)
    assert not any("attnops" in str(func) for tape in tapes for func, *_ in tape._ops), "no attention, no plan"
    assert all(pages.isnan().all() for pages in engine.pool.k_buffer + engine.pool.v_buffer)
    # The meter reads 0, 1, 4, 9, ...: before and after each of the six pieces.
    assert report.pieces == {4: (1, 5, 9), 2: (13, 17, 21)} and report.unit == "tokens"
    assert report.static == 4 * 2 * 8 + 4 * VOCAB * 4
    assert SegmentRunner(engine.model, engine.backend, recorder=GraphTape).sizes == tuple(
        token_buckets(LIMITS.max_num_tokens)
    )


def test_a_model_that_leaves_its_batch_to_the_context_is_cut_as_well():
    engine, input_ids, batch = engine_and_batch()
    whole = runner_of(engine).replay(input_ids, batch).clone()
    model = engine.model
    engine.model = lambda ids, positions, batch: model(ids, positions)
    runner = SegmentRunner(engine.model, engine.backend, sizes=[4], recorder=GraphTape, layers=engine.layers)
    runner.capture()
    assert torch.equal(runner.replay(input_ids, batch), whole)


def test_one_set_of_graphs_serves_every_mode_and_backend():
    engine, input_ids, batch = engine_and_batch(lengths=(5, 9), counts=(2, 3), mode=EXTEND, ragged=True)
    runner = runner_of(engine, [5])
    other = Engine(ZOO[0], "torch_native", model=engine.model)
    for change in ({}, {"forward_mode": ForwardMode.MIXED}, {"attn_backend": other.backend}):
        changed = dataclasses.replace(batch, **change)
        expected = run_eager(engine if "attn_backend" not in change else other, input_ids, changed)
        torch.testing.assert_close(runner.replay(input_ids, changed), expected, rtol=1e-5, atol=1e-5)
    batch.attn_backend = None
    assert runner.replay(input_ids, batch).shape == (5, VOCAB), "the runner's own"


def test_what_an_earlier_step_left_behind_the_batch_does_not_reach_its_rows():
    """A bucket of 8 after a step of 8 that is NaN throughout: a step of 2 sees none of it, and pads with zeros."""
    engine, input_ids, batch = engine_and_batch()
    seen = []

    def model(ids, positions, batch):
        x = torch.zeros(len(ids), WIDTH) + ids.unsqueeze(1)
        layer = engine.layers[0]
        q = x[:, :1].expand(-1, 4 * 32).contiguous()
        out = layer(q, q[:, :64].contiguous(), q[:, 64:].contiguous(), batch, save_kv_cache=False)
        seen.append(out)
        return out

    runner = SegmentRunner(model, engine.backend, sizes=[8], recorder=GraphTape, layers=engine.layers)
    runner.capture()
    seen[-1].fill_(float("nan"))
    out = runner.replay(input_ids, batch)
    assert not out.isnan().any() and torch.equal(seen[-1][2:], torch.zeros(6, 128))


def test_a_model_may_not_ask_what_its_graphs_would_keep():
    engine, *_ = engine_and_batch()

    def asks(name):
        def model(ids, positions, batch):
            return torch.zeros(len(ids), 1) + getattr(batch, name) if name else torch.zeros(len(ids), batch.num_tokens)

        return SegmentRunner(model, engine.backend, sizes=[4], recorder=GraphTape)

    for name in ("cache_seqlens", "extend_seq_lens", "out_cache_loc", "batch_size", "tree_mask"):
        with pytest.raises(ValueError, match=rf"uses batch.{name} outside its attention .*pass it as a static input"):
            asks(name).capture()
    with pytest.raises(ValueError, match=r"asks for the batch's forward_mode, .* forward_modes="):
        asks("forward_mode").capture()
    with pytest.raises(AttributeError, match="nonsense"):
        asks("nonsense").capture()
    asks("").capture()


def test_a_model_that_computes_modes_apart_gets_a_runner_for_each():
    engine, input_ids, batch = engine_and_batch()
    model = lambda ids, positions, batch: torch.full((len(ids), 1), float(batch.forward_mode))  # noqa: E731
    runner = SegmentRunner(model, engine.backend, sizes=[4], recorder=GraphTape, forward_modes=[DECODE])
    runner.capture()
    assert runner.replay(input_ids, batch).flatten().tolist() == [float(DECODE)] * 2
    prompts = dataclasses.replace(
        batch, forward_mode=EXTEND, tokens_per_request=0, extend_seq_lens=torch.ones(2, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="the runner was built for DECODE, the batch is EXTEND"):
        runner.replay(input_ids, prompts)


def test_named_inputs_are_per_token_or_per_step():
    engine, input_ids, batch = engine_and_batch()
    model = engine.model
    inputs = {"hidden": StaticInput((VOCAB,)), "scale": StaticInput((1,), per="step")}
    engine.model = lambda ids, positions, batch, hidden, scale: model(ids, positions, batch) * scale + hidden
    runner = runner_of(engine, layers=engine.layers, inputs=inputs)
    hidden, scale = torch.randn(2, VOCAB), torch.tensor([2.0])
    engine.model = model
    expected = run_eager(engine, input_ids, batch) * scale + hidden
    torch.testing.assert_close(runner.replay(input_ids, batch, hidden=hidden, scale=scale), expected)
    with pytest.raises(ValueError, match="the step misses hidden, scale"):
        runner.replay(input_ids, batch)
    with pytest.raises(ValueError, match="static input offset is per request, but buckets count tokens"):
        runner_of(engine, inputs={"offset": StaticInput(per="request")})


def test_a_step_that_no_bucket_serves_says_why_and_what_to_do():
    engine, input_ids, batch = engine_and_batch()
    runner = SegmentRunner(engine.model, engine.backend, sizes=[1], recorder=GraphTape)
    with pytest.raises(ValueError, match=r"nothing has been captured yet; call capture\(\)"):
        runner.replay(input_ids, batch)
    runner.capture()
    assert not runner.can_replay(batch)
    with pytest.raises(ValueError, match="the batch has 2 tokens, the largest bucket 1; run it eagerly"):
        runner.replay(input_ids, batch)
    runner = runner_of(engine)
    assert runner.can_replay(batch)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(2,\), got \(1,\)"):
        runner.replay(input_ids[:1], batch)
    with pytest.raises(ValueError, match="no positions"):
        runner.replay(input_ids, dataclasses.replace(batch, positions=None))
    with pytest.raises(ValueError, match="above max_seqlen = 128"):
        runner.replay(input_ids, dataclasses.replace(batch, max_cache_seqlen=129))
    with pytest.raises(ValueError, match="there are no graphs on cpu; run steps eagerly or with PiecewiseRunner"):
        SegmentRunner(engine.model, engine.backend)


def test_a_capture_that_fails_ends_its_recording():
    engine, input_ids, batch = engine_and_batch()
    model = engine.model

    def fails(ids, positions, batch):
        model(ids, positions, batch)
        raise KeyError("in the last segment")

    runner = SegmentRunner(fails, engine.backend, sizes=[4], recorder=GraphTape, layers=engine.layers)
    with pytest.raises(KeyError):
        runner.capture()
    assert bool(torch.ones(1)), "outside of a recording a value may be read"
    assert gc.isenabled()
    assert torch.equal(runner_of(engine).replay(input_ids, batch)[:1].isnan().any(), torch.tensor(False))


def test_an_idle_rank_computes_padding_alone():
    engine = Engine(ZOO[0], "intel_amx", Segments(sizes=[2]))
    engine.add(prompt(2, 0))
    runner, empty = engine.host.runner, torch.empty(0, dtype=torch.int64)
    idle = dataclasses.replace(
        engine_and_batch()[2],
        forward_mode=ForwardMode.IDLE,
        req_pool_indices=empty,
        cache_seqlens=empty.int(),
        out_cache_loc=empty,
        positions=empty,
        num_tokens=0,
        tokens_per_request=0,
    )
    with forward_context(idle, {}):
        assert runner.replay(empty, idle).shape == (0, VOCAB)


def test_lists_of_rows_go_to_the_backend_of_the_step():
    """A sparse layer in a bucket of 4: steps of 2 and 4 tokens with lists of their own, and a backend without any."""
    spec = AttentionSpec.mla(4, page_size=16, sparse_topk=24)
    backend = get_backend_class("nsa")(spec, STEP_LIMITS)
    steps = [
        with_lists(
            make_step(Model("sparse", spec, scale=0.1), DECODE, [63, 9, 30, 5][:count], [1] * count, uniform=True)
        )
        for count in (2, 4)
    ]
    layer = steps[0].layer
    q, k, lists = torch.zeros(4, 4, 576).bfloat16(), torch.zeros(4, 1, 576).bfloat16(), torch.zeros(4, 24).int()
    runner = SegmentRunner(
        lambda ids, positions, batch: layer(q[ids], k[ids], None, batch, topk_indices=lists[ids]),
        backend,
        sizes=[4],
        recorder=GraphTape,
        layers={layer.layer_id: layer},
    )
    runner.capture(progress=False)
    for step in steps:
        count = step.batch.num_tokens
        step.batch.positions = step.batch.cache_seqlens.long() - 1
        q[:count], k[:count], lists[:count] = step.q, step.k, step.lists
        out = runner.replay(torch.arange(count), step.batch)
        check(step, step.lists, out.view(count, 4, 512))
    steps[0].batch.attn_backend = get_backend_class("torch_native")(AttentionSpec.mla(4, page_size=16), STEP_LIMITS)
    with pytest.raises(ValueError, match="backend torch_native attends to every key and takes no topk_indices"):
        runner.replay(torch.arange(2), steps[0].batch)
