"""SGLang's own attention kit, with attnops as the backend that it tests: on the CPU in float32, on a GPU in float16."""

from __future__ import annotations

import unittest

import pytest
import sglang_kit
import torch
from attnops.plugins import unsupported

MISSING = unsupported("sglang")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    # SGLang decides at import whether it runs on a GPU.
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU, SGLang's modules are those of the GPU")
    return request.param


@pytest.fixture
def sglang(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    modules = sglang_kit.kit()
    with torch.no_grad():
        yield modules


def options(device: str, kind: str) -> dict:
    sizes = sglang_kit.DENSE if kind == "dense" else sglang_kit.LATENT
    return {"device": device, "dtype": DTYPES[device], **sizes}


def cases(kind: str) -> list:
    if MISSING:
        return []
    return sglang_kit.dense_cases() if kind == "dense" else sglang_kit.mla_cases()


def decodes(kind: str) -> list:
    return [case for case in cases(kind) if case.forward_mode.is_decode()]


def prompts(kind: str) -> list:
    return [case for case in cases(kind) if not case.forward_mode.is_decode()]


@pytest.mark.parametrize("case", cases("dense"), ids=lambda case: case.name)
def test_every_dense_case_of_the_kit_passes(case, device, sglang):
    sglang.dense.run_dense_attention_case(unittest.TestCase(), case, **options(device, "dense"))


@pytest.mark.parametrize("case", cases("mla"), ids=lambda case: case.name)
def test_every_mla_case_of_the_kit_passes(case, device, sglang):
    sglang.mla.run_mla_attention_case(unittest.TestCase(), case, **options(device, "mla"))


@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_decodes_by_the_graph_adapter(kind, device, sglang):
    """Planned for the padded batch of a graph, run for another of other lengths."""
    run = getattr(sglang_kit.runner("decode"), f"run_{kind}_cuda_graph_decode_case")
    assert decodes(kind)
    for case in decodes(kind):
        run(unittest.TestCase(), case, **options(device, kind))


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_prompts_in_piecewise_and_breakable_graphs(kind, breakable, device, sglang):
    run = getattr(sglang_kit.runner("split_op"), f"run_{kind}_split_op_extend_case")
    windowless = [case for case in prompts(kind) if getattr(case, "sliding_window_size", None) is None]
    assert windowless
    for case in windowless:
        run(unittest.TestCase(), case, breakable=breakable, **options(device, kind))


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_verification_of_chains_and_trees(kind, page_size, topk, device, sglang):
    module, lens = getattr(sglang, kind), (5, 16, 31)
    case = sglang_kit.ragged_case(module, kind, "TARGET_VERIFY", page_size, 5 - topk, lens)
    run = getattr(sglang_kit.runner("verify"), f"run_{kind}_eagle_verify_case")
    run(unittest.TestCase(), case, topk=topk, **options(device, kind))


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_verification_by_the_graph_adapter(kind, topk, device, sglang):
    module = getattr(sglang, kind)
    case = sglang_kit.ragged_case(module, kind, "TARGET_VERIFY", 16, 5 - topk)
    name = "run_dense_spec_verify_cuda_graph_case" if kind == "dense" else "run_mla_eagle_verify_cuda_graph_case"
    getattr(sglang_kit.runner("verify"), name)(unittest.TestCase(), case, topk=topk, **options(device, kind))


@pytest.mark.parametrize("pad_style", ["small_real", "prod_fill"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_draft_extend_by_the_graph_adapter(kind, page_size, pad_style, device, sglang):
    case = sglang_kit.ragged_case(getattr(sglang, kind), kind, "DRAFT_EXTEND_V2", page_size, 4, (5, 16, 31))
    run = getattr(sglang_kit.runner("draft_extend"), f"run_{kind}_draft_extend_v2_cuda_graph_case")
    run(unittest.TestCase(), case, pad_style=pad_style, **options(device, kind))


@pytest.fixture
def deterministic(sglang, monkeypatch):
    """The kit's runners, with `--enable-deterministic-inference`."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    create = ATTENTION_BACKENDS["attnops"]

    class Options:
        enable_deterministic_inference = True

        def __init__(self, given):
            self._given = given

        def __getattr__(self, name):
            return getattr(self._given, name)

    def of(runner):
        runner.server_args = Options(runner.server_args)
        return create(runner)

    monkeypatch.setitem(ATTENTION_BACKENDS, "attnops", of)
    return sglang


@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_deterministic_inference_gives_a_request_its_bits_in_any_batch(kind, device, deterministic, monkeypatch):
    """Every case passes, and a request's rows have the same bits alone and beside others."""
    module = getattr(deterministic, kind)
    run = getattr(module, f"run_{kind}_attention_case")
    for case in cases(kind):
        run(unittest.TestCase(), case, **options(device, kind))
    for mode, tokens in (("DECODE", 1), ("EXTEND", 3)):
        case = sglang_kit.ragged_case(module, kind, mode, 16, tokens, (40, 7, 25))
        fixture = getattr(module, f"build_{kind}_attention_fixture")(unittest.TestCase(), case, **options(device, kind))
        backend, calls = fixture.backend, []
        assert backend._spec.deterministic
        forward = backend.forward

        def record(*args, forward=forward, calls=calls, **given):
            calls.append((args, given, forward(*args, **given)))
            return calls[-1][2]

        monkeypatch.setattr(backend, "forward", record)
        getattr(module, f"run_{kind}_fixture_eager")(fixture)
        ((q, k, v, layer, batch, *rest), given, together), *others = calls
        assert not others
        for request in range(case.batch_size):
            rows = slice(request * tokens, (request + 1) * tokens)
            alone = sglang_kit.only_request(batch, request, tokens)
            backend.init_forward_metadata(alone)
            part = [None if x is None else x[rows] for x in (q, k, v)]
            assert torch.equal(forward(*part, layer, alone, *rest, **given), together[rows])


def test_the_kits_own_head_dim_is_refused_by_name(device, sglang):
    case = sglang.dense.make_dense_cases("attnops")[0]
    with pytest.raises(NotImplementedError, match="head_dim"):
        sglang.dense.run_dense_attention_case(unittest.TestCase(), case, device=device, dtype=DTYPES[device])


def test_the_option_knows_the_name(sglang):
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert "attnops" in ATTENTION_BACKENDS and "attnops" in choices.ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
