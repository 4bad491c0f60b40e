"""New tokens as they came and the prefix in its pages, merged; and prompts without a prefix, which need no page."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops
from attnops.backends import attend, get_backend_class
from attnops.types import AttentionSpec, AttentionType, ForwardMode, MultiItemScoringParams
from checks import MAX_RELATIVE_ERROR, relative_error
from gpu_steps import on_gpu
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
LENGTHS = ([0, 65, 100, 3], [33, 1, 20, 7])
REPLAYED = ([9, 0, 31, 90], [3, 40, 1, 17])
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def gqa(**options) -> AttentionSpec:
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    return AttentionSpec(**{**shape, **options})


MODELS = [
    Model("bf16", gqa()),
    Model("page1_hnd", gqa(page_size=1), layout="HND"),
    Model("fp32_cap", gqa(dtype=FP32, logit_cap=3.0, page_size=3)),
    Model("other_v", gqa(v_head_dim=32)),
]
# What a prompt without a prefix may have beside these, since its keys are all at hand.
WHOLE = [
    *MODELS,
    Model("window_sinks", gqa(sliding_window_size=9, has_sinks=True)),
    Model("window_pool", gqa(sliding_window_size=20), swa_pool=True),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def step_on(device: str, model: Model, *arguments, **options):
    step = make_step(model, *arguments, **options)
    return on_gpu(step) if device == "cuda" else step


def fa3(step, device: str, **options):
    backend = get_backend_class("fa3")(step.model.spec, LIMITS, device, **options)
    backend.init_forward_metadata(step.batch)
    return backend


class Calls:
    """Which attention a step's layers ran, by the ops' names."""

    def __init__(self, monkeypatch) -> None:
        self.names: list[str] = []
        for name in ("fmha_varlen", "fmha_paged", "merge_state"):
            monkeypatch.setattr(ops, name, self._counted(name, getattr(ops, name)))

    def _counted(self, name, call):
        def run(*arguments, **options):
            self.names.append(name)
            return call(*arguments, **options)

        return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("mode", [EXTEND, MIXED])
def test_two_parts_are_the_answer(device, model, mode, monkeypatch):
    step = step_on(device, model, mode, *LENGTHS, seed=3, num_tokens=70)
    backend, calls = fa3(step, device, cascade=True), Calls(monkeypatch)
    out = step.run(backend)
    assert calls.names == ["fmha_varlen", "fmha_paged", "merge_state"]
    assert relative_error(out.cpu(), step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]
    assert torch.equal(out[61:], torch.zeros_like(out[61:])), "padding"
    assert torch.equal(step.run(backend), out), "a layer's second call, and every layer of a step"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", WHOLE, ids=lambda model: model.name)
@pytest.mark.parametrize("cascade", [False, True])
def test_prompts_without_a_prefix_need_no_page(device, model, cascade, monkeypatch):
    if cascade and model not in MODELS:
        pytest.skip("refused: test_models_that_parts_cannot_serve_say_why")
    step = step_on(device, model, EXTEND, [0, 0, 0], [40, 1, 70], num_tokens=120)
    step.batch.max_prefix_tokens = 0
    backend, calls = fa3(step, device, **({"cascade": True} if cascade else {})), Calls(monkeypatch)
    out = step.run(backend)
    assert calls.names == ["fmha_varlen"]
    assert relative_error(out.cpu(), step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]
    # The rows are stored as ever: a later step finds them.
    later = dataclasses.replace(step, k=None, v=None)
    out_of_pages = later.run(backend)
    assert calls.names == ["fmha_varlen", "fmha_paged"]
    assert relative_error(out_of_pages.cpu(), step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


@pytest.mark.parametrize("spec", [gqa(deterministic=True), gqa(kv_dtype=E4M3)], ids=["deterministic", "fp8"])
def test_models_whose_bits_the_cache_decides_read_the_cache(spec, monkeypatch):
    step = make_step(Model("gqa", spec), EXTEND, [0, 0], [40, 70])
    step.batch.max_prefix_tokens = 0
    backend, calls = fa3(step, "cpu"), Calls(monkeypatch)
    step.run(backend)
    assert calls.names == ["fmha_paged"]


@pytest.mark.parametrize("cascade", [False, True])
def test_items_of_a_prompt_without_a_prefix(cascade, monkeypatch):
    """The bounds of hidden keys are the same over tokens as over pages."""
    model = Model("gqa", gqa(dtype=FP32))
    step = make_step(model, EXTEND, [0, 0], [40, 70])
    places = torch.tensor([*range(20), *range(50), *range(30), *range(40)], dtype=torch.int32)
    items = MultiItemScoringParams(
        prefix_len_ptr=torch.tensor([10, 20], dtype=torch.int32),
        token_pos_in_items_ptr=places,
        token_pos_in_items_len=70,
    )
    step.batch.multi_item = items
    backend = fa3(step, "cpu", **({"cascade": True} if cascade else {}))
    by_pages = step.run(backend)
    step.batch.max_prefix_tokens = 0
    backend.init_forward_metadata(step.batch)
    calls = Calls(monkeypatch)
    assert relative_error(step.run(backend), by_pages) <= MAX_RELATIVE_ERROR[FP32]
    assert calls.names == ["fmha_varlen"]


def test_uniform_steps_of_a_cascade_go_by_decode(monkeypatch):
    step = make_step(MODELS[0], ForwardMode.TARGET_VERIFY, [59, 100, 0], [5] * 3, uniform=True)
    backend, calls = fa3(step, "cpu", cascade=True), Calls(monkeypatch)
    assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[BF16]
    assert calls.names == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (AttentionSpec.mla(16), "MLA"),
        (gqa(attn_type=AttentionType.DECODER_BIDIRECTIONAL), "not causal"),
        (gqa(deterministic=True), "deterministic"),
        (gqa(sliding_window_size=9), "sliding_window_size"),
        (gqa(attention_chunk_size=32), "attention_chunk_size"),
        (gqa(has_sinks=True), "has_sinks"),
        (gqa(kv_dtype=E4M3), "kv_dtype"),
    ],
)
def test_models_that_parts_cannot_serve_say_why(spec, words):
    with pytest.raises(NotImplementedError, match=f"cascade=True does not serve this model: .*{words}"):
        get_backend_class("fa3")(spec, LIMITS, cascade=True)


def test_a_captured_cascade_serves_other_lengths():
    model = MODELS[0]
    static, other = (make_step(model, EXTEND, *lengths, seed=i) for i, lengths in enumerate((LENGTHS, REPLAYED)))
    backend = get_backend_class("fa3")(model.spec, LIMITS, cascade=True)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    tape = GraphTape()
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    static.overwrite(other)
    backend.init_forward_metadata_out_graph(static.batch)
    tape.replay()
    assert relative_error(out, other.expected) <= MAX_RELATIVE_ERROR[BF16]


def test_attention_of_new_tokens_is_causal():
    """`attend.fmha_varlen` serves encoders, too, which are not."""
    step = make_step(MODELS[0], EXTEND, [0], [50])
    backend = fa3(step, "cpu")
    views = backend._fmha.step(step.batch, backend._buffers.step(step.batch))
    out = torch.empty(50, 8 * 64, dtype=BF16)
    attend.fmha_varlen(step.q, step.k, step.v, step.layer, views.cu_seqlens_q, views.plans, out, None)
    assert relative_error(out.view(50, 8, 64), step.expected) <= MAX_RELATIVE_ERROR[BF16]
