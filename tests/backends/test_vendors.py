"""Adapters of other vendors' packages: every keyword is in the vendor's signature, and what it says is what is meant.

Stand-ins have the published signatures, and compute with attnops' own functions. What the vendors' kernels do is not
tested here: nobody ran them, but for `fa4` on Hopper (`test_conformance_on_gpu.py`), and the adapters say so.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import pytest
import torch
from attnops.backends import Machine, get_backend_class, select, vendors
from attnops.backends.registry import NOT_BUILT
from attnops.compat import flash_attn_interface, flashinfer
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from signatures import signature
from steps import LIMITS, Model, make_step

# Parameters as published: flash-attn-4 (flash_attn/cute/interface.py, 2026-11), amd-aiter (aiter/ops/mha.py),
# sglang-kernel's flash_attn.py of its XPU build, torch-npu 7.0's npu_fused_infer_attention_score.
SIGNATURES = {
    "fa4": """q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None
        seqused_q=None seqused_k=None gather_kv_indices=None page_table=None softmax_scale=None causal=False
        window_size=(None,None) learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False
        score_mod=None score_mod_bwd=None mask_mod=None block_sparse_tensors=None aux_tensors=None aux_scalars=None
        return_lse=False scheduler_metadata=None seqlen_k_per_split=None disable_scheduler_metadata=False
        gather_bwd_recompute_p=False gather_bwd_token_chunk=None""",
    "aiter": """q k v cu_seqlens_q kv_indptr kv_page_indices max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None
        logits_soft_cap=0.0 causal=False window_size=None alibi_slopes=None deterministic=False return_lse=False
        return_attn_probs=False out=None""",
    "intel_xpu": """q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None
        cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None
        max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None
        causal=False window_size=None attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None
        num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False sinks=None ver=3""",
    "ascend": """query key value * pse_shift=None atten_mask=None actual_seq_lengths=None actual_seq_lengths_kv=None
        dequant_scale1=None quant_scale1=None dequant_scale2=None quant_scale2=None quant_offset2=None
        antiquant_scale=None antiquant_offset=None key_antiquant_scale=None key_antiquant_offset=None
        value_antiquant_scale=None value_antiquant_offset=None block_table=None query_padding_size=None
        kv_padding_size=None key_shared_prefix=None value_shared_prefix=None actual_shared_prefix_len=None
        query_rope=None key_rope=None key_rope_antiquant_scale=None num_heads=1 scale=1.0 pre_tokens=2147483647
        next_tokens=2147483647 input_layout=BSH num_key_value_heads=0 sparse_mode=0 inner_precise=0 block_size=0
        antiquant_mode=0 softmax_lse_flag=False key_antiquant_mode=0 value_antiquant_mode=0""",
}
DEVICES = {"fa4": "cuda", "aiter": "hip", "intel_xpu": "xpu", "ascend": "npu"}
PAGES = {"fa4": 128, "aiter": 16, "intel_xpu": 64, "ascend": 128}


def paged(q, k, v, table, lens, bounds, max_q, scale, causal, window, cap, sinks=None):
    if window is None or window == (None, None):
        window = (-1, -1)
    options = {"softmax_scale": scale, "causal": causal, "window_size": window, "softcap": cap or 0.0, "sinks": sinks}
    queries = {"cu_seqlens_q": bounds, "max_seqlen_q": max_q}
    return flash_attn_interface.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lens, page_table=table, **queries, **options
    )


def fa4(a):
    sinks = a["learnable_sink"]
    assert sinks is None or sinks.dtype == torch.bfloat16, "FlashAttention-4 takes bfloat16 sinks"
    size = a["v"].shape[1]
    assert size == (128 if a["qv"] is None else 1), "pages that FlashAttention-4 knows"
    for row, length in enumerate(a["seqused_k"].tolist()):
        behind = a["v"][int(a["page_table"][row, max(length - 1, 0) // size]), (length - 1) % size + 1 :]
        assert not length or behind.isfinite().all(), "FlashAttention-4 multiplies what it masks"
    rest = (a["softmax_scale"], a["causal"], a["window_size"], a["softcap"], sinks)
    if a["qv"] is not None:
        a["q"], a["k"] = torch.cat([a["qv"], a["q"]], -1), torch.cat([a["v"], a["k"]], -1)
    return paged(
        a["q"], a["k"], a["v"], a["page_table"], a["seqused_k"], a["cu_seqlens_q"], a["max_seqlen_q"], *rest
    ), None


def aiter(a):
    assert a["k"].dim() == 3, "tokens, not pages"
    indptr = a["kv_indptr"]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1))
    heads = (a["q"].shape[1], a["k"].shape[1], a["q"].shape[2])
    options = {"q_data_type": a["q"].dtype, "causal": a["causal"], "window_left": a["window_size"][0]}
    options |= {"sm_scale": a["softmax_scale"], "logits_soft_cap": a["logits_soft_cap"]}
    last = torch.ones(indptr.shape[0] - 1, dtype=torch.int32)
    wrapper.plan(a["cu_seqlens_q"], indptr, a["kv_page_indices"], last, *heads, 1, **options)
    assert a["max_seqlen_k"] >= int(indptr.diff().max())
    return wrapper.run(a["q"], (a["k"].unsqueeze(1), a["v"].unsqueeze(1)))


def intel_xpu(a):
    rest = (a["softmax_scale"], a["causal"], a["window_size"], a["softcap"], a["sinks"])
    where = (a["page_table"], a["cache_seqlens"], a["cu_seqlens_q"], a["max_seqlen_q"])
    return paged(a["q"], a["k_cache"], a["v_cache"], *where, *rest)


def ascend(a):
    assert a["input_layout"] == "TND" and a["sparse_mode"] == 3 and a["atten_mask"].shape == (2048, 2048)
    assert isinstance(a["actual_seq_lengths"], list) and isinstance(a["actual_seq_lengths_kv"], list)
    assert a["key"].shape[1] == a["block_size"] == 128
    k, v = (a[name].unflatten(2, (a["num_key_value_heads"], -1)) for name in ("key", "value"))
    assert a["query"].shape[1] == a["num_heads"]
    ends = a["actual_seq_lengths"]
    bounds = torch.tensor([0, *ends], dtype=torch.int32)
    lens = torch.tensor(a["actual_seq_lengths_kv"], dtype=torch.int32)
    most = int(bounds.diff().max())
    out = paged(a["query"], k, v, a["block_table"], lens, bounds, most, a["scale"], True, None, 0.0)
    return out, torch.empty(1)


COMPUTE = {"fa4": fa4, "aiter": aiter, "intel_xpu": intel_xpu, "ascend": ascend}


@pytest.fixture(params=SIGNATURES)
def vendor(request, monkeypatch):
    """The name of a backend whose package is a stand-in with the published signature."""
    name = request.param
    published, cls = signature(SIGNATURES[name]), get_backend_class(name)

    def function(*args, **given):
        bound = published.bind(*args, **given)  # a keyword that the vendor does not have is a TypeError
        bound.apply_defaults()
        return COMPUTE[name](bound.arguments)

    parts = cls.module.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), types.ModuleType(parts[i]))
    setattr(sys.modules[cls.module], cls.function, function)
    return name


def build(name: str, spec: AttentionSpec):
    with pytest.warns(UserWarning, match=f"nobody has run backend {name} on its hardware"):
        return get_backend_class(name)(spec, LIMITS, "cpu")


def gqa(name: str, **options) -> AttentionSpec:
    return AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=PAGES[name], **options)


def test_the_first_call_says_that_nobody_has_run_it(vendor):
    spec = gqa(vendor)
    backend = build(vendor, spec)
    for call in range(2):
        step = make_step(Model("gqa", spec), ForwardMode.EXTEND, [0], [3])
        step.batch.cache_seqlens_cpu = step.batch.cache_seqlens.clone()
        step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.clone()
        backend.init_forward_metadata(step.batch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step.run(backend)
        texts = [str(one.message) for one in said if f"nobody has run backend {vendor}" in str(one.message)]
        assert len(texts) == (call == 0)


STEPS = {
    "decode": (ForwardMode.DECODE, [63, 64, 150, 17], [1] * 4, {"uniform": True}),
    "extend": (ForwardMode.EXTEND, [0, 65, 100], [33, 1, 20], {}),
    "verify": (ForwardMode.TARGET_VERIFY, [59, 100, 0], [5] * 3, {"uniform": True}),
}


@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("options", [{}, {"sliding_window_size": 20, "logit_cap": 3.0}, {"pool": True}], ids=str)
def test_equals_the_reference(vendor, options, shape):
    cls, mode = get_backend_class(vendor), STEPS[shape][0]
    if mode not in cls.capability.modes:
        pytest.skip("prefill only")
    swa = options == {"pool": True}
    spec = gqa(vendor, **({"sliding_window_size": 20} if swa else options))
    if spec.sliding_window_size >= 0 and not cls.capability.sliding_window:
        with pytest.raises(NotImplementedError, match="has no sliding window"):
            get_backend_class(vendor)(spec, LIMITS, "cpu")
        return
    model = Model("gqa", spec, swa_pool=swa, options={"drop_window": True} if swa else {})
    backend = build(vendor, spec)
    for _ in range(2):
        _, prefix, new, more = STEPS[shape]
        step = make_step(model, mode, prefix, new, **more)
        step.batch.cache_seqlens_cpu = step.batch.cache_seqlens.clone()
        if step.batch.extend_seq_lens is not None:
            step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.clone()
        backend.init_forward_metadata(step.batch)
        assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("vendor", ["fa4"], indirect=True)
def test_latents_in_two_parts_over_tables_of_tokens(vendor, page_size):
    """The kernels know pages of one token: tables of any page size are widened."""
    model = Model("mla", AttentionSpec.mla(16, page_size=page_size), scale=0.1)
    backend = build(vendor, model.spec)
    for prefix in ([0, 65, 30], [70, 0, 3]):
        step = make_step(model, ForwardMode.EXTEND, prefix, [33, 1, 20])
        backend.init_forward_metadata(step.batch)
        assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize(("arch", "served"), [(90, False), (100, True)])
def test_latents_in_two_parts_need_blackwell(arch, served):
    machine = Machine(device="cuda", arch=arch, packages=frozenset({"flash_attn.cute"}))
    reasons = get_backend_class("fa4").capability.machine_reasons(machine, AttentionSpec.mla(16, page_size=1))
    assert any("for MLA" in reason for reason in reasons) != served


@pytest.mark.parametrize("name", ["fa4", "intel_xpu"])
def test_sinks_reach_the_vendor(name, request, monkeypatch):
    seen = {}
    cls = get_backend_class(name)
    parts = cls.module.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), types.ModuleType(parts[i]))

    def function(*args, **given):
        seen.update(given)
        return torch.zeros_like(given.get("q", args[0] if args else None))

    setattr(sys.modules[cls.module], cls.function, function)
    spec = gqa(name, has_sinks=True)
    step = make_step(Model("sinks", spec), ForwardMode.EXTEND, [0, 65], [33, 1])
    backend = build(name, spec)
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    assert (seen["learnable_sink"] if name == "fa4" else seen["sinks"]) is not None


def test_lengths_that_the_host_lacks_are_named(monkeypatch):
    module = types.ModuleType("torch_npu")
    module.npu_fused_infer_attention_score = None
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    spec = gqa("ascend")
    backend = build("ascend", spec)
    step = make_step(Model("gqa", spec), ForwardMode.EXTEND, [0], [3])
    with pytest.raises(ValueError, match="plans on the host and needs cache_seqlens_cpu"):
        backend.init_forward_metadata(step.batch)
    with pytest.raises(NotImplementedError, match="are not captured"):
        backend.init_forward_metadata_out_graph(step.batch, in_capture=True)


@pytest.mark.parametrize("name", SIGNATURES)
def test_taken_by_name_only_and_a_missing_package_is_named(name):
    cls = get_backend_class(name)
    assert cls.capability.untested_on_hardware != (name == "fa4")
    assert name != "fa4" or cls.capability.chosen_on == frozenset()
    if importlib.util.find_spec(cls.module.split(".")[0]) is None:
        with pytest.raises(ImportError, match=f"backend {name} needs the package"):
            cls(gqa(name), LIMITS, "cpu")
    device = DEVICES[name]
    machine = Machine(
        device=device, arch=90 if device == "cuda" else 0, has_cuda_kernels=device == "cuda", packages=frozenset()
    )
    modes = {ForwardMode.EXTEND}
    assert any("not installed" in reason for reason in cls.capability.machine_reasons(machine))
    assert cls.capability.reasons_against(gqa(name), modes) == []


def test_every_name_of_sglang_is_registered_or_has_a_reason():
    names = """flashinfer flashinfer_mla fa3 fa4 triton flashmla cutlass_mla trtllm_mla trtllm_mha torch_native
        flex_attention intel_amx aiter wave ascend intel_xpu nsa dsa hybrid_linear tbo dual_chunk_flash_attn"""
    for name in names.split():
        try:
            get_backend_class(name)
        except NotImplementedError as error:
            assert NOT_BUILT[name] in str(error)


def test_selection_lists_them_first_with_the_reason():
    machine = Machine(device="hip", packages=frozenset({"aiter", "triton"}))
    chosen = select(gqa("aiter"), machine)
    assert chosen.prefill == chosen.decode == "triton"
    assert any("untested_on_hardware" in reason for reason in chosen.rejected["aiter"])
    assert select(gqa("aiter"), machine, attention_backend="aiter").decode == "aiter"
    hopper = Machine(device="cuda", arch=90, has_cuda_kernels=True, packages=frozenset({"flash_attn.cute"}))
    chosen = select(gqa("fa4"), hopper, prefill_attention_backend="fa4")
    assert (chosen.prefill, chosen.decode) == ("fa4", "fa3")
    assert select(gqa("fa4"), hopper).prefill == "fa3"


@pytest.mark.parametrize(("arch", "said"), [(90, False), (100, True)])
def test_fa4_says_so_but_on_hopper(arch, said, monkeypatch):
    backend = object.__new__(get_backend_class("fa4"))
    backend.device = torch.device("cuda")
    monkeypatch.setattr(vendors, "detect_machine", lambda device: Machine(device="cuda", arch=arch))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        backend._say_untested()
    assert bool(warned) == said
