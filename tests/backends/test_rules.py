"""Forced machines: what SGLang's rules choose on each, with and without each optional package, and why."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from attnops.backends import HybridAttnBackend, Machine, get_backend_class, registered_names, select, select_backend
from attnops.backends.machine import PACKAGES
from attnops.backends.registry import NOT_BUILT
from attnops.backends.rules import MODEL_KINDS, order
from attnops.backends.select import candidates, reasons_against
from attnops.types import AttentionSpec, AttentionType, ForwardMode, Limits

GQA = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
MLA = AttentionSpec.mla(16)
ENCODER = AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=64, attn_type=AttentionType.ENCODER_ONLY)
ARCHS = (80, 86, 87, 89, 90, 100, 103, 120, 121)
MACHINES = [
    *(Machine(device="cuda", arch=arch, has_cuda_kernels=True) for arch in ARCHS),
    *(Machine(device=device) for device in ("cpu", "hip", "xpu", "npu")),
]


def known(name: str) -> bool:
    return name in NOT_BUILT or name in registered_names()


def name_of(machine: Machine) -> str:
    return f"sm_{machine.arch}" if machine.arch else machine.device


def first_that_serves(spec: AttentionSpec, machine: Machine, modes, trees=False, **wishes) -> str:
    """The rule, said again: the first name of the order that has no reason against it."""
    return next(
        name
        for name in order(machine, spec.is_mla, ForwardMode.DECODE in modes, trees)
        if known(name)
        and name not in NOT_BUILT
        and not reasons_against(name, spec, machine, modes, by_name=False, **wishes)
    )


@pytest.mark.parametrize("machine", MACHINES, ids=name_of)
@pytest.mark.parametrize("spec", [GQA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("topk", [None, 1, 4])
@pytest.mark.parametrize("package", [None, *PACKAGES])
def test_every_machine_gets_the_first_of_its_order_that_serves(machine, spec, topk, package):
    machine = dataclasses.replace(machine, packages=frozenset({package} if package else ()))
    selection, trees = select(spec, machine, speculative_eagle_topk=topk), topk == 4
    assert selection.decode == first_that_serves(spec, machine, [ForwardMode.DECODE], trees)
    # Whoever stands before a chosen one says why it is not chosen.
    for chosen, decodes in ((selection.decode, True), (selection.prefill, False)):
        names = order(machine, spec.is_mla, decodes, trees)
        for name in names[: names.index(chosen)]:
            assert name in (selection.decode, selection.prefill) or selection.rejected.get(name)


@pytest.mark.parametrize("machine", MACHINES, ids=name_of)
def test_every_name_of_an_order_is_known_and_nothing_of_it_is_asked_twice(machine):
    for is_mla, decodes, trees in itertools.product((False, True), repeat=3):
        names = order(machine, is_mla, decodes, trees)
        assert all(known(name) for name in names) and len(set(names)) == len(names) and names[-1] in ("torch_native",)


def test_what_compiles_at_run_time_comes_behind_what_does_not():
    for machine in MACHINES:
        if machine.arch in (100, 103) or machine.device in ("xpu", "hip"):
            continue  # the table says otherwise, as SGLang does
        for spec in (GQA, MLA):
            everything = dataclasses.replace(machine, packages=frozenset(PACKAGES))
            names = [name for name in candidates(spec, machine) if name in registered_names()]
            names = [n for n in names if not reasons_against(n, spec, everything, [ForwardMode.DECODE])]
            names.remove("torch_native")
            compiled = [get_backend_class(name).capability.compiles_at_run_time for name in names]
            assert compiled == sorted(compiled), (machine, names)


def test_a_tree_needs_a_mask_and_a_long_draft_needs_room():
    capability = dataclasses.replace(
        get_backend_class("trtllm_mha").capability, tree_mask=False, max_tokens_per_request=4
    )
    assert capability.speculative_reasons(1, 3) == [] == capability.speculative_reasons(None, None)
    assert capability.speculative_reasons(4, 3) == ["has no tree mask, which speculative_eagle_topk=4 needs"]
    assert capability.speculative_reasons(1, 4) == ["verifies 4 tokens at most, speculative_num_steps=4 brings 5"]
    h200 = Machine(device="cuda", arch=90, has_cuda_kernels=True)
    assert reasons_against("trtllm_mha", GQA, h200, [ForwardMode.TARGET_VERIFY]) == []


@pytest.mark.parametrize(("option", "value"), [("speculative_eagle_topk", 0), ("speculative_num_steps", -1)])
def test_numbers_below_1_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be 1 or more, got {value}"):
        select(GQA, Machine(device="cpu"), **{option: value})


def test_the_limits_have_room_for_a_draft():
    limits = Limits(max_batch_size=2, max_seqlen=64, max_tokens_per_request=4)
    assert select_backend(GQA, limits, "cpu", speculative_num_steps=3).name == "intel_amx"
    with pytest.raises(ValueError, match="steps=4 brings verify steps of 5 tokens or more, above max_tokens_per_req"):
        select_backend(GQA, limits, "cpu", speculative_num_steps=4)


def test_a_vision_towers_backend_has_its_own_option():
    cpu = Machine(device="cpu")
    assert select(ENCODER, cpu).prefill == "intel_amx"
    assert select(ENCODER, cpu, mm_attention_backend="torch_native").prefill == "torch_native"
    assert select(ENCODER, cpu, prefill_attention_backend="torch_native").prefill == "torch_native"
    both = {"prefill_attention_backend": "intel_amx", "mm_attention_backend": "torch_native"}
    assert select(ENCODER, cpu, **both).prefill == "torch_native"
    assert select(GQA, cpu, **both).prefill == "intel_amx", "a decoder's layers are none of the tower's"
    for spec in (GQA, ENCODER):
        with pytest.raises(ValueError, match="no backend is called fa9"):
            select(spec, cpu, mm_attention_backend="fa9")


def test_one_side_given_leaves_the_other_to_attention_backend():
    cpu = Machine(device="cpu")
    one = select(GQA, cpu, attention_backend="torch_native", decode_attention_backend="intel_amx")
    assert (one.prefill, one.decode) == ("torch_native", "intel_amx")
    one = select(GQA, cpu, attention_backend="torch_native", prefill_attention_backend="intel_amx")
    assert (one.prefill, one.decode) == ("intel_amx", "torch_native")


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_kinds_of_models_that_backends_cannot_serve(kind):
    cpu = Machine(device="cpu")
    for name in ("flashinfer", "intel_amx"):
        rules = MODEL_KINDS[kind]
        expected = [rules[key] for key in (name, "*") if key in rules]
        if name in registered_names():
            assert set(expected) <= set(reasons_against_kind(name, kind, cpu))
    if "*" in MODEL_KINDS[kind]:
        with pytest.raises(NotImplementedError, match="no backend serves"):
            select(GQA, cpu, model_kind=kind)
    else:
        assert select(GQA, cpu, model_kind=kind).decode == "intel_amx"
    with pytest.raises(ValueError, match=r"model_kind must be one of .*, got odd"):
        select(GQA, cpu, model_kind="odd")


def reasons_against_kind(name, kind, machine):
    from attnops.backends.select import Wishes

    return reasons_against(name, GQA, machine, [ForwardMode.DECODE], Wishes(model_kind=kind))


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"a machine's device is one of cpu, cuda, hip, xpu, npu, got tpu"):
        Machine(device="tpu")
    assert Machine(device="hip").torch_device == "cuda" and Machine(device="xpu").torch_device == "xpu"


def test_graphs_hold_prefills_state_only_where_it_serves_speculation():
    small, large = (Limits(max_batch_size=size, max_seqlen=64) for size in (2, 8))
    cls = get_backend_class("torch_native")
    prefill, decode = cls(GQA, small), cls(GQA, large)
    HybridAttnBackend(prefill, decode, "decode").init_cuda_graph_state(8, 8)
    with pytest.raises(ValueError, match="max_batch_size = 2"):
        HybridAttnBackend(prefill, decode, "prefill").init_cuda_graph_state(8, 8)


PLAIN = {"num_q_heads": 8, "num_kv_heads": 2}
MHA_MODELS = {
    "plain": {"head_dim": 128},
    "float32": {"head_dim": 72, "dtype": torch.float32},
    "fp8 cache": {"head_dim": 256, "kv_dtype": torch.float8_e4m3fn},
    "two head dims": {"head_dim": 192, "v_head_dim": 128},
    "everything": {"head_dim": 40, "sliding_window_size": 100, "logit_cap": 30.0, "has_sinks": True, "page_size": 3},
    "deterministic": {"head_dim": 64, "deterministic": True},
    "local chunks": {"head_dim": 128, "attention_chunk_size": 512},
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("model", MHA_MODELS)
@pytest.mark.parametrize("topk", [None, 4])
def test_no_gpu_prefills_in_a_loop(arch, model, topk):
    """Of a build for its architecture, whatever else is installed."""
    machine = Machine(device="cuda", arch=arch, has_cuda_kernels=True, built_archs=frozenset({arch}))
    if topk is not None and model == "local chunks":
        pytest.skip("not beside a tree mask")
    selection = select(AttentionSpec(**PLAIN, **MHA_MODELS[model]), machine, speculative_eagle_topk=topk)
    by_decoder = model not in ("two head dims", "local chunks") and (arch != 90 or topk == 4)
    assert (selection.prefill, selection.decode) == ("fa3", "trtllm_mha" if by_decoder else "fa3")


@pytest.mark.parametrize(("built", "runs"), [({80, 90}, {80, 86, 87, 89, 90}), ({86, 120}, {86, 87, 89, 120, 121})])
def test_kernels_run_where_the_build_has_code_for_them(built, runs):
    for arch in ARCHS:
        machine = Machine(device="cuda", arch=arch, has_cuda_kernels=True, built_archs=frozenset(built))
        reasons = reasons_against("fa3", GQA, machine)
        assert (not reasons) == (arch in runs)
        if reasons:
            assert reasons[0].startswith(f"needs kernels for sm_{arch} (ATTNOPS_ARCHS), this build has those of sm_")
            assert select(GQA, dataclasses.replace(machine, packages=frozenset({"triton"}))).prefill == "triton"


def test_mla_needs_its_own_architecture_and_types():
    machine = Machine(device="cuda", arch=80, has_cuda_kernels=True)
    assert reasons_against("fa3", MLA, machine) == ["needs sm_90 for MLA, this is sm_80"]
    wide = dataclasses.replace(MLA, dtype=torch.float32, kv_dtype=torch.float32)
    hopper = dataclasses.replace(machine, arch=90)
    assert reasons_against("fa3", wide, hopper) == ["takes bf16, fp16, got fp32"]
    assert not reasons_against("fa3", MLA, hopper)
