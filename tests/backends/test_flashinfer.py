"""Backend flashinfer over a stand-in for the package: `attnops.compat.flashinfer`, which has its names and keywords.

So the whole adapter runs on the CPU and is held to float64; what FlashInfer's own kernels do is not tested here.
"""

from __future__ import annotations

import sys

import pytest
import torch
from attnops.backends import Machine, get_backend_class, select
from attnops.backends.flashinfer_plans import workspace_bytes
from attnops.compat import flashinfer as stand_in
from attnops.types import AttentionSpec, AttentionType, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_loops import REQUESTS, Loop, check_replays, run_eagerly
from graph_tape import GraphTape
from signatures import signature
from steps import LIMITS, Model, make_step

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
WORKSPACE = 1 << 20
pytestmark = pytest.mark.usefixtures("flashinfer_stand_in")


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


CAPTURED = {
    "decode": (ForwardMode.DECODE, [0, 1, 0, 2], [63, 64, 150, 17], [1] * 4, {"uniform": True}),
    "verify": (ForwardMode.TARGET_VERIFY, [0, 1, 2], [59, 100, 0], [5] * 3, {"uniform": True}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, [2, 3, 0], [62, 7, 130], [3] * 3, {"uniform": True}),
}


@pytest.mark.parametrize("shape", CAPTURED)
@pytest.mark.parametrize("model", [model for model in MODELS if model.name != "encoder"], ids=lambda model: model.name)
def test_a_captured_step_is_planned_again_before_each_replay(model, shape):
    """On a tape: replays see other lengths, and only `out_graph` and the recorded ops run between them."""
    mode, first, second, new, options = CAPTURED[shape]
    static, other = (make_step(model, mode, prefix, new, seed=i, **options) for i, prefix in enumerate((first, second)))
    backend = build(model.spec)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(static.batch)
    static.run(backend)  # the warm-up, in which each kind of layer is planned first
    buffers = next(iter(backend.wrappers._graphs.values()))
    addresses = {name: getattr(buffers, name).data_ptr() for name in ("bounds_q", "bounds_k", "last_page_len")}
    for _ in range(3):
        seqlens = other.batch.cache_seqlens.clone()
        static.overwrite(other)
        static.batch.cache_seqlens_cpu = seqlens
        backend.init_forward_metadata_out_graph(static.batch)
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
        assert relative_error(out, other.expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]
    assert addresses == {name: getattr(buffers, name).data_ptr() for name in addresses}
    assert len(buffers.wrappers) == len(buffers.plans) == 1 and not backend.wrappers._eager


@pytest.mark.parametrize(
    ("shape", "wrapper", "side", "usual"),
    [
        ("decode", stand_in.BatchDecodeWithPagedKVCacheWrapper, "DECODE", 2048),
        ("verify", stand_in.BatchPrefillWithPagedKVCacheWrapper, "PREFILL", 4096),
    ],
)
def test_fixed_splits_of_the_deterministic_mode(monkeypatch, shape, wrapper, side, usual):
    seen = []
    plan = wrapper.plan

    def spy(self, *args, **options):
        seen.append(options)
        return plan(self, *args, **options)

    monkeypatch.setattr(wrapper, "plan", spy)
    model = Model("gqa", gqa(deterministic=True, num_kv_heads=8))
    for variable, pages in ((None, usual // 16), ("160", 10)):
        if variable:
            monkeypatch.setenv(f"SGLANG_FLASHINFER_{side}_SPLIT_TILE_SIZE", variable)
        backend = build(model.spec)
        assert backend.wrappers.use_tensor_cores  # fixed splits are theirs
        step = step_of(model, shape)
        backend.init_forward_metadata(step.batch)
        step.run(backend)
        assert seen[-1]["fixed_split_size"] == pages
    monkeypatch.setenv("SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE", "many")
    with pytest.raises(ValueError, match="SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE must be a positive integer"):
        build(model.spec)


def test_pages_are_served_by_the_kernels_that_split_keys(monkeypatch):
    """As in SGLang; new tokens apart are left to FlashInfer's choice."""
    made = {}
    for kind in ("DecodeWithPaged", "PrefillWithPaged", "PrefillWithRagged"):
        name = f"Batch{kind}KVCacheWrapper"
        cls = getattr(stand_in, name)

        def spy(self, *args, name=name, init=cls.__init__, **options):
            made[name] = options.get("backend")
            init(self, *args, **options)

        monkeypatch.setattr(cls, "__init__", spy)
    for shape in ("decode", "verify", "extend"):
        test_equals_the_reference(MODELS[0], shape)
    step = make_step(MODELS[0], ForwardMode.EXTEND, [0, 0], [33, 1])
    step.batch.cache_seqlens_cpu, step.batch.extend_seq_lens_cpu = step.batch.cache_seqlens, step.batch.extend_seq_lens
    backend = build(gqa())
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    assert made == {
        "BatchDecodeWithPagedKVCacheWrapper": "fa2",
        "BatchPrefillWithPagedKVCacheWrapper": "fa2",
        "BatchPrefillWithRaggedKVCacheWrapper": None,
    }


def test_padding_rows_of_a_graph_hold_one_token_where_steps_bring_one():
    decoder = Limits(max_batch_size=2, max_seqlen=64)
    backend = get_backend_class("flashinfer")(gqa(), decoder, "cpu", workspace_size=WORKSPACE)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    assert build(gqa()).get_cuda_graph_seq_len_fill_value() == LIMITS.max_tokens_per_request  # verify steps': their own


def test_a_window_model_has_two_wrappers_and_its_layers_share_them():
    model = Model("window", gqa(sliding_window_size=20))
    backend = build(model.spec)
    step = step_of(model, "decode")
    backend.init_forward_metadata(step.batch)
    full = Model("full", gqa(sliding_window_size=20)).layer()
    full.sliding_window_size = -1
    for layer in (step.layer, full, step.layer, full):
        backend.forward(step.q, None, None, layer, step.batch, save_kv_cache=False)
    assert len(backend.wrappers._eager) == 2


def test_the_environment_and_the_option_set_the_workspace(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", "4096")
    cls = get_backend_class("flashinfer")
    assert cls(gqa(), LIMITS, "cpu").wrappers.workspace.numel() == 4096
    monkeypatch.setenv("SGLANG_FLASHINFER_WORKSPACE_SIZE", "8192")
    assert cls(gqa(), LIMITS, "cpu").wrappers.workspace.numel() == 8192
    for name in ("SGLANG_FLASHINFER_WORKSPACE_SIZE", "FLASHINFER_WORKSPACE_SIZE"):
        monkeypatch.delenv(name)
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"):
        assert workspace_bytes(gqa(), ["Other", name]) == 512 * 2**20
    assert workspace_bytes(gqa(), ["LlamaForCausalLM"]) == 384 * 2**20
    assert workspace_bytes(gqa(deterministic=True), ["Qwen2ForCausalLM"]) == 2048 * 2**20
    assert build(gqa()).wrappers.workspace.numel() == WORKSPACE
    with pytest.raises(ValueError, match="workspace_size must be 1 or more, got 0"):
        cls(gqa(), LIMITS, "cpu", workspace_size=0)


def test_tensor_cores_by_rule_and_by_the_environment(monkeypatch):
    def chosen(**options):
        return build(gqa(**options)).wrappers.use_tensor_cores

    assert chosen() and not chosen(num_kv_heads=4) and chosen(num_kv_heads=4, kv_dtype=E4M3)
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_TENSOR_CORE", "0")
    assert not chosen()
    with pytest.raises(ValueError, match="SGLANG_FLASHINFER_USE_TENSOR_CORE must not be 0 beside deterministic=True"):
        build(gqa(deterministic=True))
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_TENSOR_CORE", "1")
    assert chosen(num_kv_heads=4, deterministic=True)
    assert chosen(num_kv_heads=4)


def test_what_it_does_not_serve_is_refused():
    with pytest.raises(NotImplementedError, match="has no sliding window"):
        build(AttentionSpec.mla(16, sliding_window_size=9))
    with pytest.raises(NotImplementedError, match="has no attention sinks"):
        build(gqa(has_sinks=True))


def test_ragged_steps_are_not_batch_invariant_and_are_refused():
    """FlashInfer's planner takes tiles by the mean of a batch's new tokens, and a row's bits depend on its tile."""
    machine = Machine(device="cuda", arch=90, has_cuda_kernels=True, packages=frozenset({"flashinfer"}))
    spec = gqa(deterministic=True)
    with pytest.raises(NotImplementedError, match=r"flashinfer does not .*: is not batch-invariant in EXTEND, MIXED"):
        select(spec, machine, prefill_attention_backend="flashinfer")
    assert select(spec, machine, decode_attention_backend="flashinfer").prefill == "fa3"
    with pytest.raises(NotImplementedError, match="is not batch-invariant in ragged steps"):
        build(spec).init_forward_metadata(step_of(Model("fixed", spec), "extend").batch)


def test_it_is_chosen_where_its_row_says_and_batches_bring_their_lengths():
    machine = Machine(device="cuda", arch=80, has_cuda_kernels=True, packages=frozenset({"flashinfer", "triton"}))
    assert select(AttentionSpec.mla(16), machine, cpu_seq_lens=True).decode == "triton"
    for name in ("flashinfer", "flashinfer_mla"):
        assert select(AttentionSpec.mla(16), machine, attention_backend=name).decode == name
        assert get_backend_class(name) is get_backend_class("flashinfer")
    blackwell = Machine(device="cuda", arch=100, packages=frozenset({"flashinfer", "triton"}))
    assert select(gqa(), blackwell, cpu_seq_lens=True).decode == "flashinfer"
    (reason,) = select(gqa(), blackwell).rejected["flashinfer"]
    assert reason.startswith("plans on the host: it needs batches that bring their lengths there")


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


@pytest.fixture
def runs(monkeypatch, flashinfer_stand_in):
    """Calls of `run`, of a stand-in that goes through a module as the package does."""
    monkeypatch.setattr(stand_in, "__version__", "0.7.2.post1", raising=False)
    seen = []
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        cls = getattr(stand_in, name)

        class Module:
            def __init__(self, wrapper, run) -> None:
                self.wrapper, self.original = wrapper, run

            def paged_run(self, plan, q, k, v, out, options) -> None:
                self.original(self.wrapper, q, (k, v), out=out, **options)

        def plan(self, *args, original=cls.plan, run=cls.run, module=Module, **options):
            original(self, *args, **options)
            self._cached_module = module(self, run)

        def run(self, q, pages, out=None, **options):
            seen.append(q)
            self._cached_module.paged_run("plan", q, *pages, out, options)

        monkeypatch.setattr(cls, "plan", plan)
        monkeypatch.setattr(cls, "run", run)
    return seen


@pytest.mark.parametrize("shape", ["decode", "verify"])
def test_only_the_first_layer_of_a_step_goes_through_run(shape, runs):
    backend = build(gqa())
    for turn in range(2):  # another step is another plan
        step = step_of(MODELS[0], shape)
        backend.init_forward_metadata(step.batch)
        outs = [step.run(backend) for _ in range(3)]
        assert len(runs) == turn + 1
        for out in outs:
            assert relative_error(out, step.expected) <= MAX_RELATIVE_ERROR[BF16]
    other = torch.randn_like(step.q)  # the call has the layer's own q, and not the first one's
    out = backend.forward(other, None, None, step.layer, step.batch, save_kv_cache=False)
    assert len(runs) == 2 and not torch.equal(out, outs[0])
    again, storing = step_of(MODELS[0], shape), build(gqa())
    storing.init_forward_metadata(again.batch)
    again.run(storing)
    backend.init_forward_metadata(again.batch)
    assert torch.equal(backend.forward(other, None, None, again.layer, again.batch, save_kv_cache=False), out)


def test_a_layer_with_scales_goes_through_run(runs):
    model = Model("fp8", gqa(kv_dtype=E4M3, head_dim=128))
    backend, step = build(model.spec), step_of(model, "decode")
    step.layer.register_buffer("k_scale", torch.tensor([1.0]))
    backend.init_forward_metadata(step.batch)
    for _ in range(3):
        step.run(backend)
    assert len(runs) == 3


# Parameters of flashinfer-python 0.7.2, as published. A keyword that it does not have would be a TypeError there.
_GRAPH = "qo_indptr_buf=0 paged_kv_indptr_buf=0 paged_kv_indices_buf=0 paged_kv_last_page_len_buf=0"
_PLANNED = """pos_encoding_mode=0 window_left=0 logits_soft_cap=0 sm_scale=0 rope_scale=0 rope_theta=0 q_data_type=0
    kv_data_type=0 o_data_type=0 non_blocking=0 seq_lens=0 fixed_split_size=0 disable_split_kv=0"""
PUBLISHED = {
    ("BatchDecodeWithPagedKVCacheWrapper", "__init__"): """float_workspace_buffer kv_layout=0 use_cuda_graph=0
        use_tensor_cores=0 paged_kv_indptr_buffer=0 paged_kv_indices_buffer=0 paged_kv_last_page_len_buffer=0 backend=0
        jit_args=0""",
    ("BatchDecodeWithPagedKVCacheWrapper", "plan"): f"""indptr indices last_page_len num_qo_heads num_kv_heads head_dim
        page_size * {_PLANNED} window_right=0 data_type=0 block_tables=0 q_len_per_req=0 is_causal=0""",
    ("BatchDecodeWithPagedKVCacheWrapper", "run"): """q paged_kv_cache * q_scale=0 k_scale=0 v_scale=0 out=0 lse=0
        return_lse=0 enable_pdl=0 window_left=0 sinks=0 q_len_per_req=0 skip_softmax_threshold_scale_factor=0
        kv_cache_sf=0""",
    (
        "BatchPrefillWithPagedKVCacheWrapper",
        "__init__",
    ): f"""float_workspace_buffer kv_layout=0 use_cuda_graph=0
        {_GRAPH} custom_mask_buf=0 mask_indptr_buf=0 backend=0 jit_args=0 jit_kwargs=0 variant_owns_mask=0""",
    (
        "BatchPrefillWithPagedKVCacheWrapper",
        "plan",
    ): f"""qo_indptr paged_kv_indptr paged_kv_indices
        paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size
        head_dim_vo=0 custom_mask=0 packed_custom_mask=0 causal=0
        {_PLANNED} use_fp16_qk_reduction=0 prefix_len_ptr=0 token_pos_in_items_ptr=0 token_pos_in_items_len=0
        max_item_len_ptr=0 seq_lens_q=0 block_tables=0 max_token_per_sequence=0 max_sequence_kv=0 uniform_q_len=0""",
    ("BatchPrefillWithPagedKVCacheWrapper", "run"): """q paged_kv_cache * q_scale=0 k_scale=0 v_scale=0 out=0 lse=0
        return_lse=0 lse_base=0 lse_layout=0 enable_pdl=0 window_left=0 sinks=0 kv_cache_sf=0""",
    ("BatchPrefillWithRaggedKVCacheWrapper", "__init__"): """float_workspace_buffer kv_layout=0 use_cuda_graph=0
        qo_indptr_buf=0 kv_indptr_buf=0 custom_mask_buf=0 mask_indptr_buf=0 backend=0 jit_args=0 jit_kwargs=0""",
    ("BatchPrefillWithRaggedKVCacheWrapper", "plan"): f"""qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk
        head_dim_vo=0 custom_mask=0 packed_custom_mask=0 causal=0 {_PLANNED} use_fp16_qk_reduction=0 prefix_len_ptr=0
        token_pos_in_items_ptr=0 token_pos_in_items_len=0 max_item_len_ptr=0 seq_lens_q=0 max_token_per_sequence=0
        max_sequence_kv=0 v_indptr=0 o_indptr=0 uniform_q_len=0""",
    ("BatchPrefillWithRaggedKVCacheWrapper", "run"): """q k v * q_scale=0 k_scale=0 v_scale=0 o_scale=0 out=0 lse=0
        return_lse=0 lse_base=0 lse_layout=0 enable_pdl=0 kv_cache_sf=0""",
    ("BatchMLAPagedAttentionWrapper", "__init__"): """float_workspace_buffer use_cuda_graph=0 qo_indptr=0 kv_indptr=0
        kv_indices=0 kv_len_arr=0 backend=0""",
    ("BatchMLAPagedAttentionWrapper", "plan"): """* qo_indptr=0 kv_indptr=0 kv_indices=0 kv_len_arr=0 num_heads=0
        head_dim_ckv=0 head_dim_kpe=0 page_size=0 causal=0 sm_scale=0 q_data_type=0 kv_data_type=0 use_profiler=0""",
    ("BatchMLAPagedAttentionWrapper", "run"): """q_nope=0 q_pe=0 ckv_cache=0 kpe_cache=0 out=0 lse=0 return_lse=0
        profiler_buffer=0 kv_len=0 page_table=0 return_lse_base_on_e=0 o_scale=0""",
}
_FAST = _PLANNED.replace("o_data_type=0", "data_type=0").replace("seq_lens=0", "")
FAST_PLAN = f"""wrapper indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size {_FAST}
    q_len_per_req=0 global_override_indptr_cpu=0"""


@pytest.fixture
def seen(monkeypatch):
    """Names of the package's functions that were called, each with arguments that its published signature takes."""
    called = set()

    def checked(name, function, parameters, skip):
        def call(*args, **options):
            parameters.bind(*args[skip:], **options)
            called.add(name)
            return function(*args, **options)

        return call

    for (cls, method), text in PUBLISHED.items():
        original = getattr(getattr(stand_in, cls), method)
        monkeypatch.setattr(getattr(stand_in, cls), method, checked(f"{cls}.{method}", original, signature(text), 1))
    fast = checked("fast_decode_plan", stand_in.fast_decode_plan, signature(FAST_PLAN), 0)
    monkeypatch.setattr(stand_in, "fast_decode_plan", fast)
    return called


def test_every_call_is_one_that_the_published_signatures_take(seen, monkeypatch):
    from attnops.backends import flashinfer as module

    monkeypatch.setattr(module, "MERGED_FROM_TOKENS", 40)
    for model in MODELS:
        for shape in STEPS if model.name != "encoder" else ["extend"]:
            test_equals_the_reference(model, shape)
        if model.name != "encoder":
            for shape in CAPTURED:
                test_a_captured_step_is_planned_again_before_each_replay(model, shape)
    test_equals_the_reference(Model("fixed", gqa(deterministic=True)), "decode")
    test_equals_the_reference(Model("fixed", gqa(deterministic=True)), "verify")
    assert seen == {f"{cls}.{method}" for cls, method in PUBLISHED} | {"fast_decode_plan"}


def test_so_is_every_call_of_a_draft_loop(seen, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", str(WORKSPACE))
    for kind in ("mha", "window", "mla"):
        loop = Loop("flashinfer", 16, 3, 4, kind, dtype=BF16)
        loop.fill([0, 40], [1, 2])
        run_eagerly(loop, loop.batch([0, 40], [1, 2]), *loop.inputs(2))
        check_replays("flashinfer", 16, 3, kind=kind, dtype=BF16, turns=1, recorder=GraphTape, sizes=[REQUESTS])
    kinds = ("BatchPrefillWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper")
    assert seen == {f"{cls}.{method}" for cls, method in PUBLISHED if cls in kinds}
