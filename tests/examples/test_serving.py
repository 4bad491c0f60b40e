"""The demo's engine with models: however requests are batched, cut or cached, each gets plain PyTorch's tokens."""

import functools
import sys
from pathlib import Path

import pytest
import torch
from graph_tape import GraphTape

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import models  # noqa: E402
from serving import CheckFailed, Engine, ModelRunner, Request, check_requests, graphs  # noqa: E402

COMMON = list(range(1, 60))


@pytest.fixture(scope="module", params=["gqa", "mla"])
def model(request):
    """Small, with random weights large enough that its choices are far apart."""
    small = {"d_model": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 64, "max_context": 256}
    torch.manual_seed(0)
    config = models.GqaConfig(num_kv_heads=2, head_dim=32, **small)
    built = models.build_model(config if request.param == "gqa" else models.MlaConfig(**small))
    for parameter in built.parameters():
        if parameter.dim() == 2:
            parameter.data *= 5
    return built.eval().requires_grad_(False)


def make_requests(temperature=0.8, count=6):
    """Of different lengths, some with a long common prefix, arriving over time."""
    requests = []
    for i in range(count):
        opening = COMMON if i % 3 else []
        own = [(17 * i + 3 * j) % 250 + 1 for j in range(5 + 11 * i)]
        requests.append(Request(i, opening + own, 6 + 5 * (i % 4), 2 * i, temperature, 0.9, seed=i))
    return requests


def serve(model, requests, *, page_size=16, chunk=64, pool_tokens=2048, use_cache=True):
    runner = ModelRunner(model, page_size=page_size, pool_tokens=pool_tokens, max_requests=8, chunk=chunk)
    engine = Engine(runner, chunk, use_cache)
    engine.serve(requests)
    return engine


def outputs(requests):
    return [request.output for request in requests]


@pytest.fixture(scope="module")
def alone(model):
    """Every request served by itself: one prompt, one chunk, nothing cached."""
    requests = make_requests()
    for request in requests:
        serve(model, [request], chunk=256, use_cache=False)
    return outputs(requests)


def test_served_alone_equals_plain_generation(model, alone):
    for request, output in zip(make_requests(), alone):
        expected = models.generate(model, request.prompt, request.max_new_tokens, 0.8, 0.9, request.seed)
        assert list(expected) == output


@pytest.mark.parametrize(("chunk", "page_size"), [(8, 16), (33, 3), (64, 1), (256, 64)])
def test_batched_chunked_and_shared_equals_alone(model, alone, chunk, page_size):
    requests = make_requests()
    engine = serve(model, requests, chunk=chunk, page_size=page_size)
    assert outputs(requests) == alone
    assert engine.stats.most_running > 2
    assert engine.stats.mixed_steps > 0
    assert any(request.reused for request in requests) == (page_size < len(COMMON))
    assert check_requests(model, requests).tokens == sum(len(request.choices) for request in requests)


def test_prefix_reuse_saves_prefill_and_changes_no_token(model, alone):
    with_cache, without = make_requests(), make_requests()
    shared, computed = serve(model, with_cache).stats, serve(model, without, use_cache=False).stats
    assert outputs(with_cache) == outputs(without) == alone
    reused = sum(request.reused for request in with_cache)
    assert reused >= 3 * (len(COMMON) // 16) * 16
    assert shared.prefill_tokens + reused == pytest.approx(computed.prefill_tokens, abs=6)
    assert shared.peak_request_pages < computed.peak_request_pages


def test_preempted_requests_start_over_with_the_same_result(model, alone):
    requests = make_requests()
    engine = serve(model, requests, page_size=4, pool_tokens=160)
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.cache.evicted_pages > 0
    assert outputs(requests) == alone
    check_requests(model, requests)


@pytest.mark.parametrize("mode", ["full", "segments", "piecewise"])
def test_a_server_in_graphs_writes_what_it_writes_without(model, alone, mode, monkeypatch):
    """On the tape; prompts in chunks beside decoding requests, in every size of step."""
    torch._dynamo.reset()
    for name in ("GraphRunner", "SegmentRunner"):
        monkeypatch.setattr(graphs, name, functools.partial(getattr(graphs, name), recorder=GraphTape))
    requests = make_requests()
    runner = ModelRunner(model, page_size=16, pool_tokens=2048, max_requests=8, chunk=33, graphs=mode)
    report = runner.capture(progress=False)
    assert len(report.pieces) == (0 if mode == "piecewise" else len(runner.graphs.sizes))
    served = []
    replay = runner.graphs.replay
    monkeypatch.setattr(
        runner.graphs, "replay", lambda ids, batch: served.append(batch.forward_mode) or replay(ids, batch)
    )
    engine = Engine(runner, 33)
    engine.serve(requests)
    assert outputs(requests) == alone
    stats = engine.stats
    assert len(served) == (stats.decode_steps if mode == "full" else stats.steps)
    assert len(stats.decode_model_seconds) == stats.decode_steps and stats.mixed_steps > 0


def test_greedy(model):
    requests = make_requests(temperature=0.0, count=3)
    serve(model, requests)
    for request in requests:
        assert list(models.generate(model, request.prompt, request.max_new_tokens)) == request.output


def test_bfloat16_logits_stay_close(model):
    half = models.build_model(model.config)
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16).eval().requires_grad_(False)
    for block in half.blocks:
        block.attention.rotary.float()
    requests = make_requests(temperature=0.0, count=3)
    serve(half, requests)
    result = check_requests(half, requests)
    assert 0 < result.largest_difference < 1


class TestTheCheckCanFail:
    def served(self, model):
        requests = make_requests(count=2)
        serve(model, requests)
        return requests

    def test_on_a_spoiled_page(self, model):
        request = make_requests()[2]
        runner = ModelRunner(model, page_size=16, pool_tokens=512, max_requests=2, chunk=64)
        engine = Engine(runner, 64)

        def spoil(engine, step):
            if len(request.output) == 3:
                page = engine.scheduler.pages_of(request, 1)[0]
                runner.pool.get_key_buffer(0)[page].neg_()

        engine.serve([request], spoil)
        with pytest.raises(
            CheckFailed, match=r"request 2, output token [3-9] \(position 8\d\): served \d+ .* differ by"
        ):
            check_requests(model, [request])

    def test_on_another_token(self, model):
        requests = self.served(model)
        requests[1].tokens[-1] ^= 1
        with pytest.raises(CheckFailed, match=r"request 1, .*does not even follow from the served logits"):
            check_requests(model, requests)

    def test_on_logits_that_are_nan(self, model):
        requests = self.served(model)
        requests[0].choices[2] = torch.full_like(requests[0].choices[2], float("nan"))
        with pytest.raises(CheckFailed, match=r"request 0, output token 2 .*differ by nan"):
            check_requests(model, requests)

    def test_on_a_missing_token(self, model):
        requests = self.served(model)
        requests[0].choices.pop()
        with pytest.raises(CheckFailed, match=r"request 0: 6 tokens, but 5 sets of logits"):
            check_requests(model, requests)
