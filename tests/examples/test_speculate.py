"""examples/speculate.py: greedy text is that of plain decoding, byte for byte, and drafts are worth their steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from graph_tape import GraphTape

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import models  # noqa: E402
import serving  # noqa: E402
import speculate  # noqa: E402
from models.draft import load_draft  # noqa: E402
from prompts import PROMPTS  # noqa: E402

WEIGHTS = EXAMPLES / "weights"
NEW = 32


@pytest.fixture(scope="module")
def target():
    return models.load_model(WEIGHTS / "gqa.safetensors", torch.float32)


@pytest.fixture(scope="module")
def prompts():
    return [models.encode(PROMPTS[i].text)[-size:] for i, size in ((0, 150), (3, 64), (5, 17), (7, 1))]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return [list(models.generate(target, prompt, NEW)) for prompt in prompts]


def run(target, prompts, topk, page_size, backend, head=None, new=NEW, **options):
    options = {"draft_steps": 4, "num_tokens": 5 if topk == 1 else 12} | options
    one = speculate.Speculator(
        target,
        head or load_draft(WEIGHTS / "gqa_draft.safetensors", target),
        topk=topk,
        page_size=page_size,
        max_requests=len(prompts),
        max_tokens=200,
        backend=backend,
        **options,
    )
    return one.run(prompts, new), one


CASES = [("intel_amx", page, topk) for page in (1, 3, 16, 64) for topk in (1, 4)]
CASES += [("torch_native", page, topk) for page in (1, 3, 16, 64) for topk in (1, 4)]
CASES += [("flex_attention", page, topk) for page in (1, 3, 16, 64) for topk in (1, 4)]
CASES += [("trtllm_mha", page, topk) for page in (1, 3, 16, 64) for topk in (1, 4)]
CASES += [("fa3", page, topk) for page in (1, 3, 16, 64) for topk in (1, 4)]


@pytest.mark.parametrize("backend, page_size, topk", CASES)
def test_the_text_is_that_of_plain_decoding(target, prompts, plain, backend, page_size, topk):
    answers, _ = run(target, prompts, topk, page_size, backend)
    assert answers == plain


@pytest.mark.parametrize("backend, page_size, topk", [("triton", 16, 1), ("triton", 3, 2)])
def test_the_first_bytes_in_tritons_interpreter(target, plain, prompts, backend, page_size, topk):
    few = prompts[2:]
    answers, _ = run(target, few, topk, page_size, backend, new=5, draft_steps=2, num_tokens=3)
    assert answers == [answer[:5] for answer in plain[2:]]


@pytest.mark.parametrize("topk, draft_steps, backend", [(4, 4, "intel_amx"), (3, 1, "fa3")])
def test_a_graph_holds_a_whole_step(target, prompts, plain, topk, draft_steps, backend):
    """Also of fewer requests than its graph is for."""
    options = {"draft_steps": draft_steps, "graphs": True, "recorder": GraphTape}
    answers, one = run(target, prompts, topk, 16, backend, **options)
    assert answers == plain
    assert one.depths.total() > 30


@pytest.mark.parametrize("topk, draft_steps, num_tokens", [(1, 1, 2), (3, 1, 4), (4, 3, 2), (2, 5, 40)])
def test_loops_and_trees_of_other_sizes(target, prompts, plain, topk, draft_steps, num_tokens):
    answers, _ = run(target, prompts, topk, 16, "intel_amx", draft_steps=draft_steps, num_tokens=num_tokens)
    assert answers == plain


def test_a_head_that_knows_nothing_changes_no_byte(target, prompts, plain):
    torch.manual_seed(1)
    answers, one = run(target, prompts, 4, 16, "intel_amx", models.draft.DraftHead(target).eval())
    assert answers == plain
    assert one.mean_accepted() < 1.5


def test_trees_accept_more_than_chains_and_chains_two_bytes(target):
    prompts = [models.encode(prompt.text) for prompt in PROMPTS[:6]]
    accepted = {}
    for topk in (1, 4):
        _, one = run(target, [prompt[-150:] for prompt in prompts], topk, 16, "intel_amx", draft_steps=5)
        accepted[topk] = one.mean_accepted()
        assert sum(one.depths.values()) > 30
    assert accepted[1] >= 2.0
    assert accepted[4] > accepted[1] + 0.2


def test_the_head_is_small():
    assert (WEIGHTS / "gqa_draft.safetensors").stat().st_size < 1_000_000


def serve(kind, page_size, topk, backend="auto", *, pool_tokens=2048, chunk=96, recorder=None):
    """Requests with shared prompts, in chunks beside others that speculate; checked token for token."""
    model = models.load_model(WEIGHTS / f"{kind}.safetensors", torch.float32)
    if kind == "gqa":
        head = load_draft(WEIGHTS / "gqa_draft.safetensors", model)
        drafts = serving.HeadDrafts(head, topk, 4, 5 if topk == 1 else 12, page_size)
    else:
        drafts = serving.LookupDrafts(4)
    sizes = {"page_size": page_size, "pool_tokens": pool_tokens, "max_requests": 4, "chunk": chunk}
    runner = serving.ModelRunner(
        model, **sizes, backend=backend, drafts=drafts.num_tokens, lookahead=drafts.lookahead
    )  # fmt: skip
    if kind == "gqa":
        drafts.attach(runner, None if backend == "auto" else backend)
    engine = serving.SpeculativeEngine(runner, chunk, drafts, graphs=recorder is not None, recorder=recorder)
    engine.capture(progress=False)
    asked = models.encode(PROMPTS[0].text)[-150:]
    requests = [
        serving.Request(id=1, prompt=asked, max_new_tokens=12),
        serving.Request(id=2, prompt=asked[:100] + models.encode(PROMPTS[3].text)[:30], max_new_tokens=20, arrival=2),
        serving.Request(id=3, prompt=models.encode(PROMPTS[5].text)[-40:], max_new_tokens=24, arrival=3),
        serving.Request(id=4, prompt=asked[-1:], max_new_tokens=5, arrival=4),
    ]
    engine.serve(requests)
    result = serving.check_requests(model, requests)
    assert result.ties == ()
    assert [len(request.output) for request in requests] == [12, 20, 24, 5]
    for request in requests:
        assert request.output == list(models.generate(model, request.prompt, request.max_new_tokens))
    assert engine.scheduler.pages_of_requests == 0
    return engine, requests


@pytest.mark.parametrize("page_size, topk", [(1, 4), (3, 1), (16, 4), (64, 4)])
def test_a_server_speculates_beside_chunks_and_shares_prefixes(page_size, topk):
    engine, requests = serve("gqa", page_size, topk)
    assert requests[1].reused >= 100 // page_size * page_size - page_size
    assert engine.stats.mixed_steps > 0, "no prompt ran beside a decoding request: the test tests less than it says"
    assert engine.mean_accepted() > 1.3


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("backend", ["intel_amx", "torch_native"])
def test_mla_verifies_chains(page_size, backend):
    serve("mla", page_size, 1, backend)


@pytest.mark.parametrize("kind, topk", [("gqa", 4), ("mla", 1)])
def test_a_server_replays_whole_steps(kind, topk):
    serve(kind, 16, topk, recorder=GraphTape)


@pytest.mark.parametrize("backend, page_size", [("flashmla", 64), ("trtllm_mla", 32), ("cutlass_mla", 128)])
def test_backends_of_sixteen_bits_refuse_the_text_of_float32(backend, page_size):
    with pytest.raises(NotImplementedError, match=rf"backend {backend} does not serve .*takes bf16, fp16, got fp32"):
        serve("mla", page_size, 1, backend)


def test_a_full_pool_takes_pages_from_those_that_speculate():
    engine, _ = serve("gqa", 4, 1, pool_tokens=216, chunk=48)
    assert engine.scheduler.preemptions > 0


def test_the_demo_speculates(capfd):
    few = ["--device", "cpu", "--requests", "2", "--max-new-tokens", "6", "--models", "gqa", "--no-encoder"]
    assert demo.main([*few, "--speculate"]) == 0
    out, _ = capfd.readouterr()
    assert "bytes per verify step" in out and "0 accepted" in out
    assert "tokens are those of plain PyTorch with contiguous K and V" in out
    with pytest.raises(SystemExit):
        demo.parse_options(["--device", "cpu", "--speculate", "--graphs", "piecewise"])
    assert "captures whole steps, or none: it needs --graphs full or off" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("topk, page_size, graphs", [(4, 64, True), (1, 16, False), (4, 1, True)])
def test_chains_and_trees_on_a_gpu(topk, page_size, graphs):
    """float32: byte for byte what plain decoding on the same GPU gives."""
    model = models.load_model(WEIGHTS / "gqa.safetensors", torch.float32, "cuda")
    prompts = [models.encode(PROMPTS[i].text)[-size:] for i, size in ((0, 150), (5, 17), (7, 1))]
    answers, one = run(model, prompts, topk, page_size, None, new=16, graphs=graphs)
    assert answers == [list(models.generate(model, prompt, 16)) for prompt in prompts]
    assert one.mean_accepted() > 1.2


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "full"])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_the_demo_speculates_on_a_gpu(kind, graphs, capfd):
    few = ["--device", "cuda", "--requests", "2", "--max-new-tokens", "6", "--models", kind, "--no-encoder"]
    assert demo.main([*few, "--max-batch", "2", "--speculate", "--graphs", graphs]) == 0
    out, _ = capfd.readouterr()
    assert "bytes per verify step" in out
    assert "tokens are those of plain PyTorch with contiguous K and V" in out
    assert ("replayed whole" in out) == (graphs == "full")
