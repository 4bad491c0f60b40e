"""Which backend a model gets, why not another, and what a user reads when none fits."""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from unittest.mock import ANY

import pytest
import torch
from attnops.backends import (
    AttentionBackend,
    Capability,
    HeadDims,
    HybridAttnBackend,
    Machine,
    get_backend_class,
    register_attention_backend,
    registered_names,
    registry,
    select,
    select_backend,
)
from attnops.backends.decode_backends import DecodeBackend
from attnops.backends.gathered import GatheredBackend
from attnops.backends.registry import NOT_BUILT
from attnops.backends.select import Selection, candidates
from attnops.backends.vendors import VendorBackend
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits

CPU = Machine(device="cpu")
H200 = Machine(device="cuda", arch=90, has_cuda_kernels=True)
GQA = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
MLA_SIZES = {"flashmla": "64", "cutlass_mla": "128", "trtllm_mla": "32, 64"}
MLA_PAGES = {"flashmla": 64, "cutlass_mla": 128, "trtllm_mla": 32}
LIMITS = Limits(max_batch_size=2, max_seqlen=64)


@pytest.fixture
def registered(monkeypatch):
    """Backends that a test registers are gone after it."""
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))


def a_backend(name: str, **capability):
    declared = {
        "devices": frozenset({"cpu", "cuda"}),
        "modes": frozenset({ForwardMode.DECODE}),
        "dtypes": frozenset({torch.bfloat16}),
        "head_dims": HeadDims(64, 128, 64),
        **capability,
    }

    @register_attention_backend(name)
    class Backend(AttentionBackend):
        capability = Capability(**declared)

        def init_forward_metadata_out_graph(self, batch, in_capture=False):
            self.prepared = batch

        def init_forward_metadata_in_graph(self, batch): ...

        def attend(self, call):
            call.out.fill_(1 if call.batch.forward_mode is ForwardMode.DECODE else 2)

    return Backend


def test_every_backend_of_the_package_says_what_it_is():
    for name in registered_names():
        cls = get_backend_class(name)
        assert cls.name == name and cls.capability.modes and cls.capability.dtypes
        assert cls.mro()[1] in (AttentionBackend, DecodeBackend, GatheredBackend, VendorBackend), (
            "no backend inherits from another"
        )


def test_the_first_that_fits_is_taken_and_the_others_say_why_not():
    selection = select(GQA, CPU)
    assert selection.prefill == selection.decode == "intel_amx" and not selection.is_hybrid
    on_gpu = select(GQA, H200)
    assert on_gpu.decode in registered_names()
    for name, reasons in on_gpu.rejected.items():
        assert reasons, name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "takes bf16, got fp32"),
        ({"head_dim": 96}, r"takes head_dim/v_head_dim 64-128 in steps of 64 \(equal\), got 96/96"),
        ({"sliding_window_size": 5}, "has no sliding window"),
        ({"logit_cap": 30.0}, "has no soft cap"),
        ({"has_sinks": True}, "has no attention sinks"),
        ({"deterministic": True}, "is not batch-invariant"),
        ({"kv_dtype": torch.float8_e4m3fn}, "takes a cache of the model's dtype, got e4m3"),
        ({"page_size": 16}, "takes page_size 64, got 16"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "does not serve layers of type ENCODER_ONLY"),
    ],
)
def test_each_thing_that_is_not_served_is_a_reason(registered, change, reason):
    cls = a_backend("picky", page_sizes=frozenset({64}))
    plain = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    assert not cls.capability.reasons_against(AttentionSpec(**plain), [ForwardMode.DECODE])
    spec = AttentionSpec(**{**plain, **change})
    with pytest.raises(NotImplementedError, match=reason):
        cls(spec, LIMITS)
    with pytest.raises(NotImplementedError, match=reason):
        select(spec, CPU, decode_attention_backend="picky")


def test_modes_and_machines_are_reasons(registered):
    cls = a_backend("hopper_decode", devices=frozenset({"cuda"}), archs=frozenset({90}))
    assert cls.capability.reasons_against(GQA, [ForwardMode.EXTEND]) == ["does not serve EXTEND"]
    assert cls.capability.machine_reasons(CPU) == ["runs on cuda, this is cpu"]
    assert cls.capability.machine_reasons(Machine(device="cuda", arch=80)) == ["needs sm_90, this is sm_80"]
    assert "not loaded" in cls.capability.machine_reasons(Machine(device="cuda", arch=90))[0]
    assert cls.capability.machine_reasons(H200) == []
    assert cls.capability.reasons_against(AttentionSpec.mla(16)) == ["does not serve MLA"]


def test_two_backends_become_a_hybrid(registered):
    a_backend("decode_only")
    backend = select_backend(GQA, LIMITS, "cpu", decode_attention_backend="decode_only")
    assert isinstance(backend, HybridAttnBackend)
    assert backend.decode_backend.name == "decode_only" and backend.prefill_backend.name == "intel_amx"
    with pytest.raises(NotImplementedError, match=r"decode_only does not serve this model here: does not serve EXTEND"):
        select(GQA, CPU, attention_backend="decode_only")


@pytest.mark.parametrize(("mode", "kind"), [("prefill", "prefill_backend"), ("decode", "decode_backend")])
def test_speculative_steps_follow_the_option(registered, mode, kind):
    every = frozenset(ForwardMode)
    decode = a_backend("decoder", modes=every)(GQA, LIMITS)
    prefill = a_backend("prefiller", modes=every)(GQA, LIMITS)
    hybrid = HybridAttnBackend(prefill, decode, speculative_attention_mode=mode)
    for speculative in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        assert hybrid.select(speculative) is getattr(hybrid, kind)
    assert hybrid.select(ForwardMode.DECODE) is decode and hybrid.select(ForwardMode.IDLE) is decode
    assert hybrid.select(ForwardMode.EXTEND) is prefill and hybrid.select(ForwardMode.MIXED) is prefill
    assert hybrid.get_cuda_graph_seq_len_fill_value() == 1
    hybrid.init_cuda_graph_state(2, 2)
    with pytest.raises(ValueError, match="max_batch_size = 2"):
        hybrid.init_cuda_graph_state(3, 3)


def test_a_hybrid_of_different_models_is_refused(registered):
    cls = a_backend("one")
    other = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="one model and one device"):
        HybridAttnBackend(cls(GQA, LIMITS), cls(other, LIMITS))
    with pytest.raises(ValueError, match="prefill or decode"):
        HybridAttnBackend(cls(GQA, LIMITS), cls(GQA, LIMITS), "both")


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_a_known_name_that_is_not_built_says_why(name):
    with pytest.raises(NotImplementedError, match=f"backend {name} is not made by its name alone: "):
        get_backend_class(name)
    refused = rf"backend {name} .* not made by its name alone: .*These would: .*torch_native"
    with pytest.raises(NotImplementedError, match=refused):
        select(GQA, CPU, attention_backend=name)


def test_an_unknown_name_lists_those_that_are_known():
    with pytest.raises(ValueError, match=r"no backend is called fa9; there are .*torch_native"):
        select(GQA, CPU, attention_backend="fa9")


def test_when_nothing_fits_every_reason_is_listed():
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=1024)
    with pytest.raises(NotImplementedError) as error:
        select(spec, CPU)
    for name in candidates(spec, CPU):
        reason = r"(takes head_dim/v_head_dim|serves MLA only)"
        assert re.search(rf"^  {name}: .*{reason}", str(error.value), re.MULTILINE)


def test_names_are_taken_once_and_need_a_capability(registered):
    a_backend("mine")
    with pytest.raises(ValueError, match="mine is taken"):

        @register_attention_backend("mine")
        class Other(AttentionBackend):
            capability = get_backend_class("mine").capability

    with pytest.raises(ValueError, match="declares no capability"):

        @register_attention_backend("empty")
        class Empty(AttentionBackend): ...


DECODERS = {"trtllm_mha": GQA, **{name: AttentionSpec.mla(16, page_size=size) for name, size in MLA_PAGES.items()}}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_for_gpus_runs_on_the_cpu_by_name_only(name):
    spec = DECODERS[name]
    assert name not in candidates(spec, CPU)
    assert select(spec, CPU, decode_attention_backend=name).decode == name
    on_gpu = select(spec, H200)
    assert on_gpu.prefill == "fa3"
    assert on_gpu.decode == ("fa3" if name == "trtllm_mha" else name)


def test_fa3_serves_a_whole_model_on_hopper_and_needs_its_kernels(monkeypatch):
    assert select(GQA, H200, speculative=True) == Selection("fa3", "fa3")
    assert select(GQA, CPU, attention_backend="fa3").prefill == "fa3" and "fa3" not in candidates(GQA, CPU)
    assert select(AttentionSpec.mla(16, page_size=1), H200) == Selection(
        "fa3",
        "fa3",
        rejected={name: [f"takes page_size {sizes}, got 1"] for name, sizes in MLA_SIZES.items()},
    )
    lacking = dataclasses.replace(H200, missing_ops=frozenset({"fmha_paged"}))
    monkeypatch.setattr(sys.modules["attnops.backends.select"], "_warned", set())
    with pytest.warns(
        RuntimeWarning, match=r"prefill runs on torch_native(.|\n)*fa3: needs CUDA kernels of fmha_paged"
    ):
        assert select(GQA, lacking) == Selection("torch_native", "trtllm_mha", rejected=ANY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(GQA, lacking)  # said once
        select(GQA, lacking, attention_backend="torch_native")  # asked for
        select(AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8), CPU)


@pytest.mark.parametrize("name", DECODERS)
def test_asked_for_everything_a_decoder_leaves_prefill_to_the_first_that_serves_it(name):
    spec = DECODERS[name]
    backend = select_backend(spec, LIMITS, "cpu", attention_backend=name)
    assert isinstance(backend, HybridAttnBackend)
    assert (backend.prefill_backend.name, backend.decode_backend.name) == ("intel_amx", name)
    with pytest.raises(NotImplementedError, match=f"{name} does not serve this model here: does not serve EXTEND"):
        select(spec, CPU, prefill_attention_backend=name)
    alone = get_backend_class(name)(spec, LIMITS)
    step = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(
        forward_mode=ForwardMode.EXTEND, req_pool_indices=step, cache_seqlens=step, extend_seq_lens=step, num_tokens=1
    )
    with pytest.raises(NotImplementedError, match=f"backend {name} decodes, the batch is EXTEND"):
        alone.init_forward_metadata(batch)


@pytest.mark.parametrize(("name", "page_size"), MLA_PAGES.items())
def test_mla_decoders_say_what_they_do_not_serve(name, page_size):
    capability = get_backend_class(name).capability
    for options, reason in (
        ({"page_size": page_size + 1}, "takes page_size"),
        (
            {"page_size": page_size, "kv_dtype": torch.float8_e5m2},
            "takes a cache of the model's dtype, 656-byte rows, e4",
        ),
        ({"page_size": page_size, "dtype": torch.float32}, "takes bf16, fp16, got fp32"),
    ):
        reasons = capability.reasons_against(AttentionSpec.mla(16, **options))
        assert len(reasons) == 1 and reasons[0].startswith(reason)
    assert capability.machine_reasons(Machine(device="cuda", arch=100)) == ["needs sm_90, this is sm_100"]


def test_the_page_table_of_trtllm_mla_is_whole_blocks_of_128_tokens():
    backend = get_backend_class("trtllm_mla")(AttentionSpec.mla(16, page_size=32), LIMITS)  # 64 tokens: 2 pages
    one = torch.ones(1, dtype=torch.int32)
    batch = AttentionBatch(forward_mode=ForwardMode.DECODE, req_pool_indices=one, cache_seqlens=one, num_tokens=1)
    backend.init_forward_metadata_out_graph(batch)
    assert backend._steps.prepared.views.paged.page_table.shape == (1, 128 // 32)
    batch.max_cache_seqlen = 65
    with pytest.raises(ValueError, match="above max_seqlen = 64"):
        backend.init_forward_metadata_out_graph(batch)


def test_a_users_backend_is_a_candidate_after_our_own(registered):
    a_backend("mine", head_dims=HeadDims(1024, 1024), modes=frozenset(ForwardMode))
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=1024)
    assert select(spec, CPU).decode == "mine"


def test_a_specs_mistakes_are_named():
    with pytest.raises(ValueError, match=r"num_q_heads \(7\) must be a multiple of num_kv_heads \(2\)"):
        AttentionSpec(num_q_heads=7, num_kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="MLA has head_dim 576 and v_head_dim 512, got 192 and 128"):
        AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=192, v_head_dim=128, is_mla=True)
    with pytest.raises(ValueError, match="max_seqlen must be positive"):
        Limits(max_batch_size=1, max_seqlen=0)


def test_options_reach_the_backend_that_has_them():
    class Optioned(registry.get_backend_class("torch_native")):
        name = "optioned"

        def __init__(self, spec, limits, device, *, colour="grey"):
            super().__init__(spec, limits, device)
            self.colour = colour

    registry._classes["optioned"] = Optioned
    try:
        backend = select_backend(GQA, LIMITS, "cpu", prefill_attention_backend="optioned", colour="blue")
        assert backend.prefill_backend.colour == "blue"
        with pytest.raises(TypeError, match=r"got colour, an option of optioned; chosen are intel_amx"):
            select_backend(GQA, LIMITS, "cpu", colour="blue")
        with pytest.raises(TypeError, match=r"got flavour, an option of no backend"):
            select_backend(GQA, LIMITS, "cpu", flavour="sweet")
    finally:
        registry._classes.pop("optioned")
