"""SGLang's own attention kit, with attnops as the backend that it tests: on the CPU in float32, on a GPU in float16."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
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


def window_cases() -> list:
    """The kit's, and a decode of each page size."""
    if MISSING:
        return []
    dense, made = sglang_kit.kit().dense, [case for case in cases("dense") if case.sliding_window_size is not None]
    for page_size in (1, 16):
        case = sglang_kit.ragged_case(dense, "dense", "DECODE", page_size, 1, (5, 40, 60))
        made.append(dataclasses.replace(case, name=f"swa_decode_page_{page_size}", sliding_window_size=11))
    return made


@pytest.fixture
def window_pools(sglang, monkeypatch):
    def use(windowed: bool) -> None:
        monkeypatch.setattr(sglang.dense, "MHATokenToKVPool", functools.partial(sglang_kit.window_pool, windowed))

    return use


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("case", window_cases(), ids=lambda case: case.name)
def test_windows_over_a_pool_of_their_own(case, windowed, forgets, device, sglang, window_pools):
    """SGLang's `SWAKVPool`, whose windowed layers have slots by its mapping; other layers have those of requests."""
    dense = sglang.dense
    window_pools(windowed)
    fixture = dense.build_dense_attention_fixture(unittest.TestCase(), case, **options(device, "dense"))
    pool, table = fixture.runner.token_to_kv_pool, fixture.runner.req_to_token_pool.req_to_token
    if forgets:
        tokens = max(case.input_lens)
        sglang_kit.forget_what_left_windows(pool, table, case.seq_lens, tokens, case.sliding_window_size)
    out = dense.run_dense_fixture_eager(fixture)
    torch.testing.assert_close(out, dense.expected_dense_fixture_output(fixture), atol=2e-2, rtol=2e-2)
    full, window = (part.k_buffer[0] for part in (pool.full_kv_pool, pool.swa_kv_pool))
    used, other = (window, full) if windowed else (full, window)
    assert other.isnan().all() and not used.isnan().all()


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_graph_adapters_over_a_windows_pool(mode, device, sglang, window_pools):
    window_pools(True)
    case = sglang_kit.ragged_case(sglang.dense, "dense", mode, 16, 1 if mode == "DECODE" else 4)
    case, test = dataclasses.replace(case, sliding_window_size=7), unittest.TestCase()
    if mode == "DECODE":
        run = sglang_kit.runner("decode").run_dense_cuda_graph_decode_case
        run(test, case, **options(device, "dense"))
    elif mode == "TARGET_VERIFY":
        run = sglang_kit.runner("verify").run_dense_spec_verify_cuda_graph_case
        run(test, case, topk=1, **options(device, "dense"))
    else:
        run = sglang_kit.runner("draft_extend").run_dense_draft_extend_v2_cuda_graph_case
        run(test, case, pad_style="prod_fill", **options(device, "dense"))


class ReferenceStep:
    """A draft's step in float64, over SGLang's pool; stores as a backend does. A branch sees the prefix of its request,
    and where the steps before put its own tokens: `slots`."""

    def __init__(self, runner, topk: int, slots: list):
        self.runner, self.topk, self.slots = runner, topk, slots
        self.token_to_kv_pool = runner.token_to_kv_pool

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        pool = self.runner.token_to_kv_pool
        if self.runner.use_mla_backend:  # latents, which the model has stored
            assert forward_batch.out_cache_loc.is_contiguous(), "SGLang's CUDA store of latents ignores strides"
            keys = pool.get_key_buffer(layer.layer_id)
            values = keys[..., : layer.v_head_dim]
        else:
            keys, values = pool.get_kv_buffer(layer.layer_id)
            keys[forward_batch.out_cache_loc] = k.view(-1, *keys.shape[1:])
            values[forward_batch.out_cache_loc] = v.view(-1, *values.shape[1:])
        self.slots.append(forward_batch.out_cache_loc.clone())
        group, rows = layer.tp_q_head_num // layer.tp_k_head_num, []
        for row in range(q.shape[0]):
            request = row // self.topk
            tokens = self.runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[request]].long()
            prefix, own = tokens[: forward_batch.seq_lens[request]], torch.stack([step[row] for step in self.slots])
            k_all, v_all = (x[torch.cat([prefix, own])].double().repeat_interleave(group, 1) for x in (keys, values))
            query = q[row].double().view(layer.tp_q_head_num, -1)
            weights = (torch.einsum("hd,khd->hk", query, k_all) * layer.scaling).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v_all).flatten())
        return torch.stack(rows).to(q.dtype)


@pytest.fixture
def draft_loop(device, sglang, monkeypatch):
    """Makes SGLang's own loop of draft steps: what plans it, and a function that runs it over backends."""
    draft = sglang_kit.runner("draft")
    if device == "cpu":
        for name in ("get_rng_state", "set_rng_state"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, **given: None)

    def make(kind: str, topk: int, page_size: int):
        hidden = sglang_kit.DENSE["hidden_size"]
        settings = draft.EagleDraftRunnerSettings(
            device=device,
            dtype=DTYPES[device],
            topk=topk,
            speculative_num_steps=4,
            speculative_num_draft_tokens=5,
            capture_batch_size=3,
            hidden_size=hidden,
            vocab_size=64,
            max_context_len=192,
            atol=0,
            rtol=0,
        )
        module = getattr(sglang, kind)
        case = sglang_kit.ragged_case(module, kind, "DECODE", page_size, 1)
        adapter = draft.EagleDraftCudaGraphRunnerAdapter(
            build_fixture=getattr(module, f"build_{kind}_attention_fixture"),
            make_model_forward=getattr(draft, f"_make_{kind}_model_forward"),
            make_draft_inputs=getattr(draft, f"_make_{kind}_draft_inputs"),
            prepare_replay_state=getattr(draft, f"_prepare_{kind}_draft_replay_state"),
            make_forward_batch=getattr(draft, f"_make_{kind}_eagle_draft_forward_batch"),
        )
        layout = {"max_context_len": 192, "loc_layout": "contiguous"}  # that of the draft's tokens
        fixture, worker, backend = draft._build_eagle_draft_fixture(
            unittest.TestCase(),
            case,
            adapter=adapter,
            build_kwargs={**options(device, kind), "hidden_size": hidden, **layout},
            settings=settings,
        )
        inputs, steps = adapter.make_draft_inputs(case, settings), backend.attn_backends

        def run(made):
            backend.attn_backends = steps
            adapter.prepare_replay_state(fixture, case, inputs, settings)
            batch = adapter.make_forward_batch(case, inputs, settings)
            if page_size > 1 and topk > 1:  # the kit has no such layout
                sglang_kit.give_branches_pages(fixture.runner, batch, topk, 4)
            fixture.runner.kv_index_translator.bind_own_plan(batch)
            backend.init_forward_metadata(batch)
            backend.attn_backends = made
            batch.mark_forward_metadata_ready()
            return worker.draft_forward(batch)

        return fixture.runner, backend, run

    return make


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_steps_of_draft_chains_and_trees(kind, topk, page_size, device, sglang, draft_loop):
    """SGLang's own loop of draft steps, over the backends that its factory makes: as in float64."""
    runner, backend, run = draft_loop(kind, topk, page_size)
    steps, slots = backend.attn_backends, []
    assert type(backend).__module__ == "attnops.plugins.sglang.drafts" and len(steps) == 3
    if topk > 1:
        assert steps[0].loop.has_trees == (page_size == 1)
    results = [run(steps), run([ReferenceStep(runner, topk, slots) for _ in range(3)])]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2, msg=lambda said: f"{said}\n{results}")


def test_a_draft_model_with_a_windows_pool_is_refused_by_name(device, sglang, draft_loop):
    runner, backend, _ = draft_loop("dense", 1, 16)
    runner.token_to_kv_pool = type("SWAKVPool", (), {})()
    with pytest.raises(NotImplementedError, match="one pool, got an SWAKVPool"):
        type(backend)(runner, 2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "mla"])
@pytest.mark.parametrize("topk", [1, 2])
def test_graphs_of_sglangs_own_draft_runner(topk, kind, sglang):
    case = sglang_kit.ragged_case(getattr(sglang, kind), kind, "DECODE", 1 if topk > 1 else 16, 1)
    run = getattr(sglang_kit.runner("draft"), f"run_{kind}_eagle_draft_cuda_graph_runner_case")
    run(unittest.TestCase(), case, topk=topk, **options("cuda", kind))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_graphs_of_sglangs_own_draft_extend_runner(kind, sglang):
    case = sglang_kit.ragged_case(getattr(sglang, kind), kind, "DRAFT_EXTEND_V2", 16, 4)
    run = getattr(sglang_kit.runner("draft_extend"), f"run_{kind}_eagle_draft_extend_v2_cuda_graph_runner_case")
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


def test_the_kits_own_head_dim_is_refused_by_name_where_no_kernel_serves_it(device, sglang):
    """16: on a GPU attnops' Triton kernels serve it."""
    case, settings = sglang.dense.make_dense_cases("attnops")[0], {"device": device, "dtype": DTYPES[device]}
    if device == "cuda" and importlib.util.find_spec("triton"):
        sglang.dense.run_dense_attention_case(unittest.TestCase(), case, **settings)
        return
    with pytest.raises(NotImplementedError, match="head_dim"):
        sglang.dense.run_dense_attention_case(unittest.TestCase(), case, **settings)


def test_the_option_knows_the_name(sglang):
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert "attnops" in ATTENTION_BACKENDS and "attnops" in choices.ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.DRAFT_ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "attnops" in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
