"""vLLM's backend, builder and implementation of attnops, driven as its model runner drives them, against float64.

vLLM's Python files are enough, so versions run here whose engine does not.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attnops.plugins import unsupported
from checks import MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR_FP8, assert_lse_close, relative_error
from problems import FP8, mla_problem, paged_problem
from vllm_classes import BATCHES, BLOCK, common_metadata, configuration, made_builder, new_tokens

pytestmark = pytest.mark.skipif(bool(unsupported("vllm")), reason=unsupported("vllm") or "-")
PROGRAM = Path(__file__).parents[1] / "support" / "vllm_context_parallel_ranks.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"logit_cap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_of_gqa(batch, options, kv_dtype, device):
    from attnops.plugins.vllm.backend import AttnopsBackend

    lengths, counts = BATCHES[batch]
    heads, head_dim = (8, 2), 64
    problem = paged_problem(lengths, counts, num_q_heads=8, num_kv_heads=2, page_size=BLOCK, kv_dtype=kv_dtype)
    rows, slots = new_tokens(problem, counts)
    cache = torch.cat([t.view(torch.uint8) for t in (problem.k_pages, problem.v_pages)], -1).view(kv_dtype)
    flat = cache.view(torch.uint8).flatten(0, 1)
    flat[slots] = 0xFF  # nobody has stored these yet
    cache = cache.to(device).transpose(1, 2)
    sinks = torch.randn(8) if options.get("sinks") else None
    window, cap = options.get("window_left", -1), options.get("logit_cap", 0.0)
    name = "auto" if kv_dtype == torch.bfloat16 else "fp8"
    impl = AttnopsBackend.get_impl_cls()(
        8,
        head_dim,
        head_dim**-0.5,
        2,
        None,
        window + 1 if window >= 0 else None,
        name,
        cap,
        sinks=None if sinks is None else sinks.to(device),
    )
    whole = configuration(heads, head_dim, name)
    builder = made_builder(impl, whole, device)
    step = builder.build(0, common_metadata(problem, counts, slots, device))
    uniform = len(set(counts)) == 1 and counts[0] <= 4
    assert bool(step.decode) == (counts[0] <= 4) and bool(step.prompts) != uniform

    one = torch.ones(1)
    scales = {"_k_scale": one, "_v_scale": one}
    if kv_dtype == FP8:
        scales = {"_k_scale": problem.k_scale, "_v_scale": problem.v_scale}
    holder = SimpleNamespace(**{key: value.to(device) for key, value in scales.items()})
    padding = 3  # rows of a graph's batch that no request has
    q, k, v = (
        torch.nn.functional.pad(t.bfloat16(), (0, 0, 0, 0, 0, padding), value=torch.nan).to(device)
        for t in (problem.q, problem.k_exact[rows], problem.v_exact[rows])
    )
    out = torch.full_like(q, 7.0)
    assert AttnopsBackend.forward_includes_kv_cache_update, "the runner stores nothing itself"
    impl.forward(holder, q, k, v, cache, step, out)
    given = {"window_left": window, "logit_cap": cap, "sinks": sinks}
    expected, _ = problem.expected_unquantized(softmax_scale=head_dim**-0.5, causal=True, **given)
    bound = MAX_RELATIVE_ERROR[torch.bfloat16] if kv_dtype == torch.bfloat16 else MAX_RELATIVE_ERROR_FP8
    assert relative_error(out[:-padding].cpu(), expected) <= bound
    assert (out[-padding:] == 7.0).all(), "padding is nobody's"
    with torch.no_grad():
        for _ in range(3):  # a shape that comes again is bound, and then repeated with other addresses
            q, again = q.clone(), torch.full_like(q, 7.0)
            flat[slots] = 0xFF
            if device != "cpu":
                cache.view(torch.uint8).transpose(1, 2).flatten(0, 1)[slots.to(device)] = 0xFF
            impl.forward(holder, q, k, v, cache, step, again)
            assert relative_error(again[:-padding].cpu(), expected) <= bound and (again[-padding:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_causal_flag_per_request(batch, window, device):
    """As of diffusion models, some of whose requests see what is behind them, too. With a window: on both sides."""
    from attnops.plugins.vllm.backend import AttnopsBackend

    lengths, counts = BATCHES[batch]
    problem = paged_problem(lengths, counts, num_q_heads=8, num_kv_heads=2, page_size=BLOCK)
    _, slots = new_tokens(problem, counts)
    cache = torch.cat([problem.k_pages, problem.v_pages], -1).to(device).transpose(1, 2)
    impl = AttnopsBackend.get_impl_cls()(8, 64, 0.125, 2, None, window + 1 if window >= 0 else None, "auto")
    builder = made_builder(impl, configuration((8, 2), 64, "auto"), device)
    flags = torch.tensor([i % 2 for i in range(len(counts))], dtype=torch.int32)
    common = common_metadata(problem, counts, slots, device)
    common.causal = flags.to(device)
    step = builder.build(0, common)
    q = problem.q.to(device)
    out = torch.full_like(q, 7.0)
    impl.forward(SimpleNamespace(), q, None, None, cache, step, out)
    options = {"softmax_scale": 0.125, "window_left": window}
    masked, _ = problem.expected_unquantized(causal=True, **options)
    free, _ = problem.expected_unquantized(causal=False, window_right=window, **options)
    of_token = flags.bool().repeat_interleave(torch.tensor(counts)).view(-1, 1, 1)
    assert relative_error(out.cpu(), torch.where(of_token, masked, free)) <= MAX_RELATIVE_ERROR[torch.bfloat16]
    if max(counts) > 1:
        assert relative_error(out.cpu(), masked) > 0.01 < relative_error(out.cpu(), free)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_decodes_of_mla(tokens, kv_dtype, split, device):
    """`forward_mqa` and the store alone: prompts, and the metadata around, are vLLM's own."""
    from attnops.plugins.vllm.mla import AttnopsMLAImpl
    from attnops.plugins.vllm.plans import DecodePlanner, limits_of
    from attnops.types import AttentionSpec

    lengths, counts = [40, 4, 130], [tokens] * 3
    problem = mla_problem(lengths, counts, num_q_heads=16, page_size=BLOCK, kv_dtype=kv_dtype)
    rows, slots = new_tokens(problem, counts)
    problem.kv_pages.view(torch.uint8).flatten(0, 1)[slots] = 0xFF
    cache, latents = problem.kv_pages.to(device), problem.latent_exact[rows].bfloat16().to(device)
    impl = AttnopsMLAImpl.__new__(AttnopsMLAImpl)
    impl.scale, impl.need_to_return_lse_for_decode, impl._is_fp8 = 0.04, True, kv_dtype == FP8
    scale = (torch.ones(1) if problem.kv_scale is None else problem.kv_scale).to(device)
    impl.do_kv_cache_update(latents[:, :512], latents[:, 512:].unsqueeze(1), cache, slots.to(device), "auto", scale)
    spec = AttentionSpec.mla(16, dtype=torch.bfloat16, kv_dtype=kv_dtype, page_size=BLOCK)
    limits = limits_of(configuration((16, 1), 576, "auto"))
    lens = problem.cache_seqlens.to(device)
    plan = DecodePlanner(spec, {-1}, limits, torch.device(device)).plan(lens, tokens)[-1]
    decode = SimpleNamespace(block_table=problem.page_table.to(device), seq_lens=lens, attnops_plan=plan)
    q = problem.q.to(device)
    given = (q[..., :512], q[..., 512:]) if split else q
    step, layer = SimpleNamespace(decode=decode, causal=True), SimpleNamespace(_k_scale=scale)
    out, lse = impl.forward_mqa(given, cache, step, layer)
    expected, expected_lse = problem.expected_unquantized(softmax_scale=0.04, causal=True)
    bound = MAX_RELATIVE_ERROR[torch.bfloat16] if kv_dtype == torch.bfloat16 else MAX_RELATIVE_ERROR_FP8
    assert relative_error(out.cpu(), expected) <= bound
    assert_lse_close(lse.cpu(), expected_lse, atol=2e-3 if kv_dtype == torch.bfloat16 else 0.2)


@pytest.fixture(params=["CPU_ATTN", "TRITON_ATTN"])
def own_backend(request, monkeypatch, caplog):
    """vLLM's backend for layers that are not ours, on a CPU and elsewhere."""
    from attnops.plugins.vllm import own_kernels

    if request.param == "CPU_ATTN" and not own_kernels.current_platform.is_cpu():
        pytest.skip("this vLLM is not one for the CPU")
    monkeypatch.setattr(own_kernels, "current_platform", SimpleNamespace(is_cpu=lambda: request.param == "CPU_ATTN"))
    own_kernels._say.cache_clear()
    backend = own_kernels.own_backend()
    assert backend.get_name() == request.param
    if request.param == "CPU_ATTN":
        current = configuration((8, 2), 512, "auto")
        monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn.get_current_vllm_config", lambda: current)
    return backend


def test_a_head_size_that_we_have_not_is_vllms_own(own_backend, caplog):
    from attnops.plugins.vllm.backend import AttnopsBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    impl, builder = AttnopsBackend.get_impl_cls(), AttnopsBackend.get_builder_cls()
    own = impl(8, 512, 0.1, 2, None, None, "auto")
    assert isinstance(own, own_backend.get_impl_cls()) and (own.head_size, own.num_kv_heads) == (512, 2)
    whole = configuration((8, 2), 512, "auto")
    assert isinstance(made_builder(own, whole, "cpu"), own_backend.get_builder_cls())
    assert [record.getMessage() for record in caplog.records] == [
        f"attnops does not serve head size 512: vLLM's {own_backend.get_name()} serves those layers"
    ]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=512, dtype=torch.bfloat16)
    support = own_backend.get_builder_cls().get_cudagraph_support(whole, spec)
    assert builder.get_cudagraph_support(whole, spec) == support
    sizes = own_backend.get_supported_kernel_block_sizes(spec)
    assert [size.base for size in AttnopsBackend.get_supported_kernel_block_sizes(spec)] == [s.base for s in sizes]
    assert AttnopsBackend.supports_head_size(512) and not AttnopsBackend.supports_head_size(20)
    ours = impl(8, 64, 0.1, 2, None, None, "auto")
    assert type(ours) is impl and isinstance(made_builder(ours, whole, "cpu"), builder)


@pytest.mark.parametrize("shares", [False, True])
def test_layers_that_are_vllms_own_store_their_rows(shares):
    """vLLM asks the backend who stores, and ours does: so these do, too, unless they read another layer's cache."""
    from attnops.plugins.vllm import own_kernels

    class Impl:
        kv_sharing_target_layer_name = "another" if shares else None

        def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
            kv_cache[slots] = key + value

        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, scale=None):
            return output.copy_(query + kv_cache.sum() + scale)

    impl = own_kernels.storing_impl(Impl)()
    assert own_kernels.storing_impl(Impl) is own_kernels.storing_impl(Impl) and isinstance(impl, Impl)
    key, cache, output = torch.tensor([1.0, 2.0, 64.0]), torch.zeros(8), torch.empty(1)  # the last is padding
    given = (None, torch.ones(1), key, key, cache)
    impl.forward(*given, None, output, scale=0.5)
    assert output.item() == 1.5
    impl.forward(*given, SimpleNamespace(slot_mapping=torch.tensor([5, 3])), output, scale=0.5)
    assert output.item() == (1.5 if shares else 7.5)
    impl.forward(None, torch.ones(1), None, None, cache, SimpleNamespace(slot_mapping=None), output, scale=0.5)


def test_a_layer_that_reads_anothers_cache_stores_nothing():
    """With keys and values that are its own, or none."""
    from attnops.plugins.vllm.backend import AttnopsBackend

    lengths, counts = BATCHES["decode"]
    problem = paged_problem(lengths, counts, num_q_heads=8, num_kv_heads=2, page_size=BLOCK)
    _, slots = new_tokens(problem, counts)
    cache = torch.cat([problem.k_pages, problem.v_pages], -1).transpose(1, 2)
    impl = AttnopsBackend.get_impl_cls()(8, 64, 0.125, 2, None, None, "auto", kv_sharing_target_layer_name="another")
    step = made_builder(impl, configuration((8, 2), 64, "auto"), "cpu").build(
        0, common_metadata(problem, counts, slots, "cpu")
    )
    before, garbage = cache.clone(), torch.full((3, 2, 64), torch.nan).bfloat16()
    expected, _ = problem.expected_unquantized(softmax_scale=0.125, causal=True)
    with torch.no_grad():
        for new in (garbage, None, garbage, None):
            out = torch.empty_like(problem.q)
            impl.forward(SimpleNamespace(), problem.q, new, new, cache, step, out)
            assert relative_error(out, expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


def test_an_encoders_requests_of_one_token_are_prompts(monkeypatch):
    """They have no cache to decode from."""
    from attnops.plugins.vllm import metadata
    from attnops.plugins.vllm.backend import AttnopsBackend

    problem = paged_problem([1, 1], [1, 1], num_q_heads=8, num_kv_heads=2, page_size=BLOCK)
    impl = AttnopsBackend.get_impl_cls()(8, 64, 0.125, 2, None, None, "auto", attn_type="encoder_only")
    monkeypatch.setattr(metadata, "EncoderOnlyAttentionSpec", object)
    builder = made_builder(impl, configuration((8, 2), 64, "auto"), "cpu")
    common = common_metadata(problem, [1, 1], torch.arange(2), "cpu")
    common.causal = False
    step = builder.build(0, common)
    q, v = problem.q, torch.randn(2, 2, 64).bfloat16()
    out = torch.empty_like(q)
    impl.forward(SimpleNamespace(), q, v, v, torch.empty(0), step, out)
    assert torch.equal(out, v.repeat_interleave(4, dim=1)), "a token that sees itself alone has its own value"


def test_what_cannot_be_vllms_own_is_refused_by_name(own_backend, monkeypatch):
    """vLLM derives classes of its own from a backend's, which vLLM's other backend would not have."""
    from attnops.plugins.vllm import backend

    class Derived(backend.AttnopsImpl):
        pass

    class DerivedBuilder(backend.AttnopsMetadataBuilder):
        pass

    given = (8, 512, 0.1, 2, None, None, "auto")
    with pytest.raises(NotImplementedError, match="Derived is not served with head_size 512"):
        Derived(*given)
    with pytest.raises(NotImplementedError, match="DerivedBuilder does not serve head_size 512"):
        DerivedBuilder(SimpleNamespace(head_size=512), [], None, None)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_dcp_world_size_and_rank", lambda *config: (2, 0))
    with pytest.raises(NotImplementedError, match="decode context parallelism is not served with head_size 512"):
        backend.AttnopsImpl(*given)


@pytest.mark.parametrize("name", ["ATTNOPS", "ATTNOPS_MLA"])
def test_a_name_reaches_a_process_that_has_loaded_no_plug_in(name):
    """vLLM's engine is a process of its own. It reads its configuration first, which has the name."""
    from attnops.plugins import vllm as plugin
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert plugin.register()
    member = AttentionBackendEnum[name]
    assert pickle.loads(pickle.dumps(member)) is member
    code = f"import pickle; member = pickle.loads({pickle.dumps(member)!r}); print(member.name, member.get_path())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split()[-2:] == [name, plugin.BACKENDS[name]], done.stderr


def test_what_the_backend_says_of_itself():
    """Names of predicates are vLLM's: one that it no longer asks for would silently refuse nothing."""
    from attnops.plugins.vllm import backend, mla
    from vllm.v1.attention.backend import AttentionBackend

    for ours in (backend.AttnopsBackend, mla.AttnopsMLABackend):
        own = {name for name in vars(ours) if not name.startswith("_")}
        assert own <= set(dir(AttentionBackend)) | {"get_impl_cls", "get_builder_cls"}, own - set(dir(AttentionBackend))
        assert dataclasses.is_dataclass(backend.AttnopsMetadata)


SERVED = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "attn_type": "decoder"}
SERVED |= dict.fromkeys(("has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False)
REFUSED = {
    "prefix-LM": ({"use_mm_prefix": True}, ["partial multimodal token full attention not supported"]),
    "R-SWA": ({"use_rswa": True}, ["R-SWA not supported"]),
    "cross attention": ({"attn_type": "encoder_decoder"}, ["attention type encoder_decoder not supported"]),
    "scales per head": ({"use_per_head_quant_scales": True}, ["per-head quant scales not supported"]),
    "int8 per token and head": ({"kv_cache_dtype": "int8_per_token_head"}, ["kv_cache_dtype not supported"]),
    "fp8 per token and head": ({"kv_cache_dtype": "fp8_per_token_head"}, ["kv_cache_dtype not supported"]),
    "e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype not supported"]),
    "float64": ({"dtype": torch.float64}, ["dtype not supported"]),
}


def asked(name: str, **changes) -> list[str]:
    """Reasons of vLLM's selection, on an H200, where the name is the user's option. Predicates alone give them."""
    from attnops.plugins.vllm import backend, mla
    from vllm.platforms.interface import DeviceCapability

    cls = {"ATTNOPS": backend.AttnopsBackend, "ATTNOPS_MLA": mla.AttnopsMLABackend}[name]
    dims = {"head_size": 576 if name == "ATTNOPS_MLA" else 128, "use_mla": name == "ATTNOPS_MLA"}
    return cls.validate_configuration(device_capability=DeviceCapability(9, 0), **SERVED | dims | changes)


@pytest.mark.parametrize("name", ["ATTNOPS", "ATTNOPS_MLA"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_predicate_refuses_with_its_reason(what, name):
    assert asked(name) == []
    changes, reasons = REFUSED[what]
    if what.endswith("per token and head"):
        cache = changes["kv_cache_dtype"]
        reasons = [*reasons, f"scales per token and head not supported, which kv_cache_dtype {cache} has"]
    assert asked(name, **changes) == reasons


@pytest.mark.parametrize(
    "option, reason",
    [
        ("has_sink", "attention sinks not supported"),
        ("has_sliding_window", "sliding window not supported"),
        ("use_non_causal", "non-causal attention not supported"),
    ],
)
def test_a_predicate_says_what_gqa_has_and_mla_has_not(option, reason):
    assert asked("ATTNOPS", **{option: True}) == []
    assert asked("ATTNOPS_MLA", **{option: True}) == [reason]


@pytest.mark.parametrize("name", ["ATTNOPS", "ATTNOPS_MLA"])
def test_alibi_is_refused_where_vllm_asks(name):
    """A predicate for its square root alone. Plain slopes come to the layer's implementation, and nowhere before."""
    from attnops.plugins.vllm import backend, mla
    from vllm.v1.attention.backend import AttentionBackend

    cls = {"ATTNOPS": backend.AttnopsBackend, "ATTNOPS_MLA": mla.AttnopsMLABackend}[name]
    predicates = [x for x in dir(AttentionBackend) if "alibi" in x]
    assert predicates == ["supports_alibi_sqrt"], "a new predicate of vLLM's must refuse, too"
    assert not cls.supports_alibi_sqrt()
    head_size = 576 if name == "ATTNOPS_MLA" else 64
    given = (8, head_size, 0.1, 1, [0.5] * 8, None, "auto", None, "decoder", None)
    with pytest.raises(NotImplementedError, match=f"the vLLM backend {name} does not serve ALiBi"):
        cls.get_impl_cls()(*given)


def test_a_fused_output_quantization_is_refused_where_vllm_asks():
    """vLLM's fusion asks each layer's implementation, and fuses nothing then. The layer refuses a scale by name."""
    from attnops.plugins.vllm.backend import AttnopsBackend
    from vllm.model_executor.layers.quantization.utils import quant_utils

    impl = AttnopsBackend.get_impl_cls()(8, 64, 0.125, 2)
    keys = [key for key in vars(quant_utils).values() if isinstance(key, quant_utils.QuantKey)]
    assert keys and not any(impl.fused_output_quant_supported(key) for key in keys)
    with pytest.raises(NotImplementedError, match="ATTNOPS does not quantize its output"):
        impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_batch_invariant_prompts_cut_no_tiles(deterministic, monkeypatch):
    """A cut depends on the other requests of a batch."""
    from attnops.metadata.fmha_plan import FmhaPlan
    from attnops.plugins.vllm.plans import PromptPlanner, limits_of
    from attnops.types import AttentionSpec

    given, allocate = [], FmhaPlan.allocate
    monkeypatch.setattr(FmhaPlan, "allocate", lambda *sizes, **how: given.append(how) or allocate(*sizes, **how))
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, deterministic=deterministic)
    planner = PromptPlanner(spec, {-1}, limits_of(configuration((8, 2), 64, "auto")), torch.device("cpu"))
    bounds = torch.tensor([0, 30], dtype=torch.int32)
    planner.plan(bounds, 30, True, torch.tensor([30], dtype=torch.int32))
    assert [how["split_keys"] for how in given] == [not deterministic]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_sequences_give_what_one_gives(world_size, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    given = [str(world_size), str(tmp_path / "rendezvous")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), *given], env=environment, **pipes)
        for rank in range(world_size)
    ]
    texts = [rank.communicate(timeout=400)[0] for rank in ranks]
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.returncode == 0 and "48 cases equal one rank" in text, text
