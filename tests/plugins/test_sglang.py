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


class ReferenceStep:
    """A draft's step in float64, over SGLang's pool; stores as a backend does."""

    def __init__(self, runner, new_tokens: int):
        self.runner, self.new_tokens = runner, new_tokens

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        keys, values = self.runner.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if save_kv_cache:
            keys[forward_batch.out_cache_loc] = k.view(-1, *keys.shape[1:])
            values[forward_batch.out_cache_loc] = v.view(-1, *values.shape[1:])
        rows = []
        for request, length in enumerate((forward_batch.seq_lens + self.new_tokens).tolist()):
            slots = self.runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[request], :length].long()
            group = layer.tp_q_head_num // layer.tp_k_head_num
            k_all, v_all = (x[slots].double().repeat_interleave(group, 1) for x in (keys, values))
            query = q[request].double().view(layer.tp_q_head_num, -1)
            weights = (torch.einsum("hd,khd->hk", query, k_all) * layer.scaling).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v_all).flatten())
        return torch.stack(rows).to(q.dtype)


def test_steps_of_a_draft_chain(device, sglang, monkeypatch):
    """SGLang's own loop of draft steps, over the backends that its factory makes: as in float64."""
    draft = sglang_kit.runner("draft")
    if device == "cpu":
        for name in ("get_rng_state", "set_rng_state"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, **given: None)
    settings = draft.EagleDraftRunnerSettings(
        device=device,
        dtype=DTYPES[device],
        topk=1,
        speculative_num_steps=4,
        speculative_num_draft_tokens=5,
        capture_batch_size=3,
        hidden_size=sglang_kit.DENSE["hidden_size"],
        vocab_size=64,
        max_context_len=64,
        atol=0,
        rtol=0,
    )
    case = sglang_kit.ragged_case(sglang.dense, "dense", "DECODE", 16, 1)
    adapter = draft.EagleDraftCudaGraphRunnerAdapter(
        build_fixture=sglang.dense.build_dense_attention_fixture,
        make_model_forward=draft._make_dense_model_forward,
        make_draft_inputs=draft._make_dense_draft_inputs,
        prepare_replay_state=draft._prepare_dense_draft_replay_state,
        make_forward_batch=draft._make_dense_eagle_draft_forward_batch,
    )
    build = {
        **options(device, "dense"),
        "max_context_len": 64,
        "loc_layout": "contiguous",
    }  # that of the draft's tokens
    fixture, worker, backend = draft._build_eagle_draft_fixture(
        unittest.TestCase(), case, adapter=adapter, build_kwargs=build, settings=settings
    )
    inputs, steps = adapter.make_draft_inputs(case, settings), backend.attn_backends
    assert type(backend).__module__ == "attnops.plugins.sglang.drafts" and len(steps) == 3
    results = []
    for made in (steps, [ReferenceStep(fixture.runner, i + 1) for i in range(3)]):
        backend.attn_backends = steps
        adapter.prepare_replay_state(fixture, case, inputs, settings)
        batch = adapter.make_forward_batch(case, inputs, settings)
        fixture.runner.kv_index_translator.bind_own_plan(batch)
        backend.init_forward_metadata(batch)
        backend.attn_backends = made
        batch.mark_forward_metadata_ready()
        results.append(worker.draft_forward(batch))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    with pytest.raises(NotImplementedError, match="topk 1, got 2"):
        type(backend)(fixture.runner, 2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "mla"])
@pytest.mark.parametrize("name", ["eagle_draft", "eagle_draft_extend_v2"])
def test_graphs_of_sglangs_own_draft_runners(name, kind, sglang):
    mode, part = ("DECODE", "draft") if name == "eagle_draft" else ("DRAFT_EXTEND_V2", "draft_extend")
    case = sglang_kit.ragged_case(getattr(sglang, kind), kind, mode, 16, 1 if mode == "DECODE" else 4)
    run = getattr(sglang_kit.runner(part), f"run_{kind}_{name}_cuda_graph_runner_case")
    run(unittest.TestCase(), case, **options("cuda", kind))


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
    assert "attnops" in choices.DRAFT_ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
