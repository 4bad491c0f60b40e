"""Backend flashinfer over a stand-in for the package: `attnops.compat.flashinfer`, which has its names and keywords.

So the whole adapter runs on the CPU and is held to float64; what FlashInfer's own kernels do is not tested here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from attnops.backends import Machine, get_backend_class, select
from attnops.compat import flashinfer as stand_in
from attnops.types import AttentionSpec, AttentionType, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, make_step

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
WORKSPACE = 1 << 20


def gqa(**options) -> AttentionSpec:
    return AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, **options})


MODELS = [
    Model("gqa", gqa()),
    Model("page1_fp16", gqa(page_size=1, dtype=FP16)),
    Model("page3_mqa", gqa(page_size=3, num_q_heads=5, num_kv_heads=1)),
    Model("window_cap", gqa(sliding_window_size=20, logit_cap=3.0)),
    Model("window_pool", gqa(sliding_window_size=20), swa_pool=True, options={"drop_window": True}),
    Model("fp8", gqa(kv_dtype=E4M3, head_dim=128)),
    Model("mla", AttentionSpec.mla(16, page_size=64), scale=0.1),
    Model("encoder", gqa(num_kv_heads=8, attn_type=AttentionType.ENCODER_ONLY)),
]
STEPS = {
    "decode": (ForwardMode.DECODE, [63, 64, 150, 17], [1] * 4, {"uniform": True}),
    "extend": (ForwardMode.EXTEND, [0, 65, 100], [33, 1, 20], {}),
    "verify": (ForwardMode.TARGET_VERIFY, [59, 100, 0], [5] * 3, {"uniform": True}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, [62, 7, 130], [3, 2, 1], {}),
}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    stand_in.mla = importlib.import_module("attnops.compat.flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", stand_in)


def step_of(model: Model, shape: str):
    mode, prefix, new, options = STEPS[shape]
    if model.spec.attn_type is AttentionType.ENCODER_ONLY:
        prefix = [0] * len(new)
    step = make_step(model, mode, prefix, new, **options)
    step.batch.cache_seqlens_cpu = step.batch.cache_seqlens.clone()
    if step.batch.extend_seq_lens is not None:
        step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.clone()
    return step


def build(spec: AttentionSpec, **options):
    return get_backend_class("flashinfer")(spec, LIMITS, "cpu", workspace_size=WORKSPACE, **options)


@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_equals_the_reference(model, shape):
    if model.spec.attn_type is AttentionType.ENCODER_ONLY and shape != "extend":
        pytest.skip("an encoder's steps are EXTEND")
    backend = build(model.spec)
    for _ in range(2):  # the second step plans the first one's wrappers anew
        step = step_of(model, shape)
        backend.init_forward_metadata(step.batch)
        out = step.run(backend)
        assert relative_error(out, step.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


def test_lengths_that_the_host_lacks_are_named_and_never_copied():
    backend = build(gqa())
    step = step_of(MODELS[0], "extend")
    step.batch.extend_seq_lens_cpu = None
    with pytest.raises(ValueError, match=r"needs extend_seq_lens_cpu in the batch"):
        backend.init_forward_metadata(step.batch)
    step.batch.cache_seqlens_cpu = None
    with pytest.raises(ValueError, match=r"needs cache_seqlens_cpu and extend_seq_lens_cpu in the batch"):
        backend.init_forward_metadata(step.batch)
    with pytest.raises(NotImplementedError, match="not captured whole"):
        backend.init_forward_metadata_out_graph(step.batch, in_capture=True)


def test_the_environment_and_the_option_set_the_workspace(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", "4096")
    cls = get_backend_class("flashinfer")
    assert cls(gqa(), LIMITS, "cpu")._workspace.numel() == 4096
    monkeypatch.setenv("SGLANG_FLASHINFER_WORKSPACE_SIZE", "8192")
    assert cls(gqa(), LIMITS, "cpu")._workspace.numel() == 8192
    assert build(gqa())._workspace.numel() == WORKSPACE


def test_tensor_cores_by_rule_and_by_the_environment(monkeypatch):
    def chosen(**options):
        return build(gqa(**options))._use_tensor_cores

    assert chosen() and not chosen(num_kv_heads=4) and chosen(num_kv_heads=4, kv_dtype=E4M3)
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_TENSOR_CORE", "0")
    assert not chosen()
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_TENSOR_CORE", "1")
    assert chosen(num_kv_heads=4)


def test_what_it_does_not_serve_is_refused():
    with pytest.raises(NotImplementedError, match="serves MLA without windows"):
        build(AttentionSpec.mla(16, sliding_window_size=9))
    with pytest.raises(NotImplementedError, match="has no attention sinks"):
        build(gqa(has_sinks=True))


def test_it_is_taken_by_name_only_and_says_why():
    machine = Machine(device="cuda", arch=80, has_cuda_kernels=True, packages=frozenset({"flashinfer", "triton"}))
    assert select(AttentionSpec.mla(16), machine).decode == "triton"
    for name in ("flashinfer", "flashinfer_mla"):
        assert select(AttentionSpec.mla(16), machine, attention_backend=name).decode == name
        assert get_backend_class(name) is get_backend_class("flashinfer")
    blackwell = Machine(device="cuda", arch=100, packages=frozenset({"flashinfer", "triton"}))
    reasons = select(gqa(), blackwell).rejected["flashinfer"]
    assert any(reason.startswith("untested_on_hardware") for reason in reasons)


def test_an_absent_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match=r"pip install attnops\[flashinfer\]"):
        build(gqa())
    without = Machine(device="cuda", arch=90, has_cuda_kernels=True)
    with pytest.raises(NotImplementedError, match=r"needs the package flashinfer-python, .* These would: .*fa3"):
        select(gqa(), without, attention_backend="flashinfer")


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize(("prefix", "calls"), [([0, 0, 0], ["ragged"]), ([0, 65, 100], ["ragged", "prefix"])])
def test_new_tokens_are_attended_to_apart_by_sglangs_rule(prefix, calls, kv_dtype, cap, monkeypatch):
    from attnops.backends import flashinfer as module

    model = Model("gqa", gqa(logit_cap=cap, kv_dtype=kv_dtype, head_dim=128))
    backend = build(model.spec)
    for least in (10_000, 40):
        monkeypatch.setattr(module, "MERGED_FROM_TOKENS", least)
        step = make_step(model, ForwardMode.EXTEND, prefix, [33, 1, 20])
        step.batch.cache_seqlens_cpu = step.batch.cache_seqlens.clone()
        step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.clone()
        backend.init_forward_metadata(step.batch)
        out = step.run(backend)
        assert relative_error(out, step.expected) <= MAX_RELATIVE_ERROR[BF16]
        planned = {key[0] for key in backend._prepared.of(step.batch).planned}
        apart = kv_dtype is None and (least == 40 or not any(prefix))
        assert planned == (set(calls) if apart else {"extend"})
