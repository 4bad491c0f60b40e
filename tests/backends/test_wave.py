"""Backend wave over stand-ins that have the published signatures of wave-lang 3.9, and compute with attnops' functions.

What Wave's compiler and kernels do is not tested: nobody ran them here, and the adapter says so.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from attnops.backends import Machine, get_backend_class, select
from attnops.compat import flashinfer
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, make_step

PACKAGE = "wave_lang.kernel.wave"
Decode = namedtuple(
    "paged_decode_attention_shape", "num_query_heads num_kv_heads head_size head_size_kv block_size num_seqs"
)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    head_size_kv: int
    batch_size: int | None = None
    num_seqs: int | None = None
    max_seq_len: int | None = None
    total_seq_len: int | None = None
    context_len: int | None = None
    fixed_seq_len_prefix: int | None = None
    fixed_seq_len_extend: int | None = None
    query_seq_len: int | None = None
    kv_seq_len: int | None = None
    block_size: int | None = None


@dataclasses.dataclass
class WaveCompileOptions:
    subs: dict
    canonicalize: bool = True
    run_bench: bool = False
    dynamic_symbols: list = dataclasses.field(default_factory=list)
    schedule: object = None
    use_scheduling_barriers: bool = False
    use_buffer_ops: bool = False
    waves_per_eu: int = 0
    denorm_fp_math_f32: str = ""
    wave_runtime: bool = False


def paged_prefill(q, k, v, bounds_q, indptr, indices, causal, scale, cap):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1))
    heads = (q.shape[1], k.shape[1], q.shape[2])
    options = {"q_data_type": q.dtype, "causal": causal, "sm_scale": scale, "logits_soft_cap": cap}
    last = torch.ones(indptr.shape[0] - 1, dtype=torch.int32)
    wrapper.plan(bounds_q, indptr, indices, last, *heads, 1, **options)
    return wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)), return_lse=True)


def get_paged_decode_attention_kernels(
    shape, mfma_variant, num_kv_splits, input_dtype=torch.float16, output_dtype=torch.float16, layer_scaling=None,
    logit_cap=0.0,
):  # fmt: skip
    assert len(mfma_variant) == 2 and input_dtype == output_dtype

    def first(q, k, v, request_indices, kv_indices, output, output_max):
        assert output.shape == (num_kv_splits, shape.num_seqs, shape.num_query_heads, shape.head_size_kv)
        assert output_max.shape == output.shape[:3] and q.dtype == input_dtype
        bounds = torch.arange(shape.num_seqs + 1, dtype=torch.int32)
        out, _ = paged_prefill(q, k, v, bounds, request_indices, kv_indices, False, layer_scaling, logit_cap)
        output.fill_(float("nan"))[0] = out.float()

    def second(logits, logits_max, request_indices, output):
        output.copy_(logits[0])

    return first, second, {"phase": 0}, {"phase": 1}, ["K2"], ["S"]


def get_paged_decode_intermediate_arrays_shapes(shape, num_kv_splits):
    highest = (num_kv_splits, shape.num_seqs, shape.num_query_heads)
    return (*highest, shape.head_size_kv), highest


def get_extend_attention_kernel(
    shape, mfma_variant, q_shape, k_shape, v_shape, k_cache_shape, v_cache_shape, o_shape, input_dtype=torch.float16,
    output_dtype=torch.float32, size_dtype=torch.int32, is_causal=False, logit_cap=0.0, layer_scaling=None, num_waves=4,
    use_custom_mask=False,
):  # fmt: skip
    def kernel(q, k, v, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, MAX_EXTEND_SEQ_LEN, c):
        given = [tuple(tensor.shape) for tensor in (q, k, v, k_cache, v_cache, c)]
        assert given == [q_shape, k_shape, v_shape, k_cache_shape, v_cache_shape, o_shape]
        assert c.dtype == output_dtype and max(qo_indptr.diff()) <= MAX_EXTEND_SEQ_LEN == shape.max_seq_len
        bounds = (qo_indptr, kv_indptr, kv_indices)
        prefix = paged_prefill(q, k_cache, v_cache, *bounds, False, layer_scaling, logit_cap)
        own = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1))
        options = {"causal": is_causal, "sm_scale": layer_scaling, "logits_soft_cap": logit_cap, "q_data_type": q.dtype}
        own.plan(qo_indptr, qo_indptr, q.shape[1], k.shape[1], q.shape[2], **options)
        c.copy_(flashinfer.merge_state(*own.run(q, k, v, return_lse=True), *prefix)[0])

    return kernel, {"kernel": "extend"}, ["N_Q", "N_KV", "S"]


@pytest.fixture
def compiled(monkeypatch):
    """The package's modules; gives the list of what was compiled."""
    seen = []

    def wave_compile(options, kernel, schedule=None):
        assert options.subs["scheduling"] and options.wave_runtime
        seen.append(kernel)
        return kernel

    modules = {
        "templates.attention_common": {"AttentionShape": AttentionShape},
        "templates.paged_decode_attention": {
            "paged_decode_attention_shape": Decode,
            "get_paged_decode_attention_kernels": get_paged_decode_attention_kernels,
            "get_paged_decode_intermediate_arrays_shapes": get_paged_decode_intermediate_arrays_shapes,
        },
        "templates.extend_attention": {"get_extend_attention_kernel": get_extend_attention_kernel},
        "constraints": {
            "MMAType": SimpleNamespace(F32_16x16x16_F16=1, F32_16x16x32_K8_F16=2),
            "MMAOperand": SimpleNamespace(M="M"),
            "GenericDot": lambda out_vec_size=1, k_vec_size=4, k_mult=1, along_dim="N": (along_dim, k_vec_size, k_mult),
        },
        "compile": {"WaveCompileOptions": WaveCompileOptions, "wave_compile": wave_compile},
        "utils.general_utils": {"get_default_scheduling_params": lambda: {"scheduling": True}},
        "utils.run_utils": {"set_default_run_config": lambda options: options},
    }
    for name, contents in modules.items():
        path = f"{PACKAGE}.{name}"
        parts = path.split(".")
        for i in range(1, len(parts)):
            above = ".".join(parts[:i])
            if above not in sys.modules:
                monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
        module = types.ModuleType(path)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, path, module)
    return seen


def spec_of(**options) -> AttentionSpec:
    return AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, **options})


def build(spec):
    with pytest.warns(UserWarning, match="nobody has run backend wave on its hardware"):
        return get_backend_class("wave")(spec, LIMITS, "cpu")


STEPS = {
    "decode": (ForwardMode.DECODE, [63, 64, 150, 17], [1] * 4, {"uniform": True}),
    "extend": (ForwardMode.EXTEND, [0, 65, 100], [33, 1, 20], {}),
    "verify": (ForwardMode.TARGET_VERIFY, [59, 100, 0], [5] * 3, {"uniform": True}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, [62, 7, 130], [3, 2, 1], {}),
}


@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 8}, {"logit_cap": 3.0, "page_size": 1}], ids=str)
def test_equals_the_reference_and_compiles_once(compiled, options, shape):
    mode, prefix, new, more = STEPS[shape]
    model = Model("gqa", spec_of(**options))
    backend = build(model.spec)
    for _ in range(2):
        step = make_step(model, mode, prefix, new, **more)
        backend.init_forward_metadata(step.batch)
        assert relative_error(step.run(backend), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
    assert len(compiled) == (2 if shape == "decode" else 1)


def test_what_it_lacks_is_refused(compiled):
    for options, reason in (
        ({"sliding_window_size": 9}, "no sliding window"),
        ({"has_sinks": True}, "no attention sinks"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            get_backend_class("wave")(spec_of(**options), LIMITS, "cpu")
    backend = build(spec_of())
    step = make_step(Model("gqa", spec_of()), ForwardMode.EXTEND, [0, 9], [3, 1])
    backend.init_forward_metadata(step.batch)
    with pytest.raises(ValueError, match="reads a step's own tokens from k and v"):
        backend.forward(step.q, None, None, step.layer, step.batch, save_kv_cache=False)


def test_taken_by_name_only_and_its_package_is_named():
    with pytest.raises(ImportError, match="backend wave needs the package wave-lang"):
        get_backend_class("wave")(spec_of(), LIMITS, "cpu")
    machine = Machine(device="hip", packages=frozenset({"wave_lang", "triton"}))
    chosen = select(spec_of(), machine)
    assert chosen.decode == "triton"
    assert select(spec_of(), machine, attention_backend="wave").decode == "wave"
    reasons = get_backend_class("wave").capability.machine_reasons(Machine(device="hip"))
    assert reasons == ["needs the package wave-lang, which is not installed"]
