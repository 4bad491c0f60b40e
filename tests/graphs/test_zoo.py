"""Whole models, every backend that serves them, every host: eager, compiled, in pieces, in segments, captured.

All give the tokens of the eager model, while lengths, tables and requests change at every step: prompts, decode, verify
with chains and trees, draft extend with equal and unequal counts.
"""

from __future__ import annotations

import functools

import pytest
import torch
from attnops.backends import get_backend_class, registered_names
from attnops.types import ForwardMode
from graph_hosts import BUCKETS, Captured, Compiled, Piecewise, Segments
from model_zoo import LAYERS, PAGE_SIZE, ZOO, Engine, TinyModel, run_eager, serve, speculate

CONFIGS = {config.name: config for config in ZOO}
# Of backends that do not take what the zoo has by default, float32 in pages of 16.
FORMS = {
    "fa3": (torch.bfloat16, 16),
    "flashmla": (torch.bfloat16, 64),
    "cutlass_mla": (torch.bfloat16, 128),
    "trtllm_mla": (torch.float16, 32),
}
# In Triton's interpreter a step takes a second: sinks and windows, and latents, in the shorter scenario.
INTERPRETED = {"gpt_oss", "deepseek"}


def form(backend: str) -> dict:
    dtype, page_size = FORMS.get(backend, (torch.float32, PAGE_SIZE))
    return {"dtype": dtype, "page_size": page_size}


def served() -> list[tuple[str, str]]:
    """(model, backend) wherever the capability says that decode works, and the CPU runs the backend's ops."""
    found = []
    for backend in registered_names():
        capability = get_backend_class(backend).capability
        for config in ZOO:
            if backend == "triton" and config.name not in INTERPRETED:
                continue
            reasons = capability.reasons_against(config.spec(**form(backend)), [ForwardMode.DECODE])
            if "cpu" in capability.devices and not reasons:
                found.append((config.name, backend))
    return found


def captured(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those whose whole steps can be captured."""
    return [pair for pair in pairs if get_backend_class(pair[1]).capability.cuda_graph]


def half(odd: bool) -> list[tuple[str, str]]:
    """Every other pair of the GQA models, and all of MLA, of which there is one model.

    Hosts have two tests, for steps that fit and for steps that are padded. Each gets one half: every backend and every
    model is in both tests, and every pair in one.
    """
    models = list(CONFIGS)
    backends = sorted(name for name in registered_names() if not get_backend_class(name).capability.compressed)
    return [
        (config, backend)
        for config, backend in served()
        if CONFIGS[config].mla or (models.index(config) + backends.index(backend)) % 2 == odd
    ]


def run(config: str, backend: str, host=run_eager, *, ragged: bool = True, **options):
    """Tokens and logits of both scenarios, one after the other on one engine."""
    engine = Engine(CONFIGS[config], backend, host, **form(backend), **options)
    if backend == "triton":
        return speculate(engine, ragged)
    served, speculated = serve(engine), speculate(engine, ragged)
    return served[0] + speculated[0], served[1] + speculated[1]


def steps(backend: str) -> int:
    """Of both scenarios, the prompts not counted."""
    return 9 if backend == "triton" else 15 + 9


@functools.cache
def eager(config: str, backend: str, ragged: bool = True):
    return run(config, backend, ragged=ragged)


def assert_close(config: str, backend: str, result) -> None:
    """The same tokens. Products of other heights round otherwise, so logits of padded steps are only close."""
    (tokens, logits), (expected_tokens, expected) = result, eager(config, backend)
    assert tokens == expected_tokens
    bound = 1e-4 if form(backend)["dtype"] == torch.float32 else 3e-2
    for a, b in zip(logits, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def assert_equal(result, expected) -> None:
    assert result[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(result[1], expected[1], strict=True))


@pytest.mark.parametrize(("config", "backend"), captured(half(odd=False)))
def test_whole_steps_of_every_size_equal_eager_bit_for_bit(config, backend):
    """Ragged steps are always padded, so they have no part in this."""
    host = Captured()
    assert_equal(run(config, backend, host, ragged=False), eager(config, backend, ragged=False))
    assert host.replays == steps(backend), "all but the prompts"
    kinds = {(mode.name, tree) for mode, _, tree in host.runners}
    assert kinds == {("DECODE", False), ("TARGET_VERIFY", False), ("TARGET_VERIFY", True), ("DRAFT_EXTEND", False)}


@pytest.mark.parametrize(("config", "backend"), captured(half(odd=True)))
def test_whole_steps_padded_to_a_few_sizes_give_the_same_tokens(config, backend):
    host = Captured(sizes=[3, 8])
    assert_close(config, backend, run(config, backend, host))
    assert any(runner.static.is_ragged for runner in host.runners.values())


@pytest.mark.parametrize(("config", "backend"), half(odd=True))
def test_segments_of_every_size_equal_eager_bit_for_bit(config, backend):
    sizes = set()

    def count(engine, input_ids, batch):
        sizes.add(batch.num_tokens)
        return run_eager(engine, input_ids, batch)

    expected = run(config, backend, count)
    host = Segments(sizes)
    assert_equal(run(config, backend, host), expected)
    assert host.replays > steps(backend), "prompts, too"


@pytest.mark.parametrize(("config", "backend"), half(odd=False))
def test_segments_padded_to_buckets_give_the_same_tokens(config, backend):
    assert_close(config, backend, run(config, backend, Segments()))


def compiled_once() -> list:
    """Models, and all backends that serve a form of one: pieces of a model know no backend. Triton runs elsewhere."""
    groups: dict[tuple, list[str]] = {}
    for config, backend in served():
        kind = "triton" if backend == "triton" else str(form(backend)["dtype"]).removeprefix("torch.")
        groups.setdefault((config, kind), []).append(backend)
    return [pytest.param(config, backends, id=f"{config}-{kind}") for (config, kind), backends in groups.items()]


@pytest.mark.parametrize(("config", "backends"), compiled_once())
def test_compiled_pieces_give_the_same_tokens(config, backends, fresh_compiler):
    host = Piecewise()
    model = TinyModel(CONFIGS[config], form(backends[0])["dtype"])
    for backend in backends:
        assert_close(config, backend, run(config, backend, host, model=model))
    splitter = host.runner.splitter
    assert splitter.num_graphs == 1, "no break, no recompilation"
    assert splitter.num_pieces == LAYERS + 1
    assert splitter.num_compiled == (LAYERS + 1) * len(BUCKETS), "all of them before the first step"


@pytest.mark.parametrize("config", ["qwen3", "gpt_oss"])  # the others: test_recompiles.py
def test_a_whole_compiled_model_gives_the_same_tokens(config, fresh_compiler):
    host, model = Compiled(), TinyModel(CONFIGS[config])
    for backend in ("intel_amx", "torch_native"):
        assert_close(config, backend, run(config, backend, host, model=model))
