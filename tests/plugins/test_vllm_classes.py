"""vLLM's backend, builder and implementation of attnops, driven as its model runner drives them, against float64.

vLLM's Python files are enough, so versions run here whose engine does not.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from attnops.plugins import unsupported
from checks import MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR_FP8, assert_lse_close, relative_error
from problems import FP8, mla_problem, paged_problem

pytestmark = pytest.mark.skipif(bool(unsupported("vllm")), reason=unsupported("vllm") or "-")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK, CONTEXT, MOST = 16, 512, 8
BATCHES = {  # lengths, and how many of each request's tokens are new
    "decode": ([40, 1, 130], [1, 1, 1]),
    "verification": ([40, 4, 130], [4, 4, 4]),
    "decodes beside prompts": ([40, 130, 37, 90], [1, 1, 37, 20]),
    "prompts": ([20, 70], [20, 33]),
}


def configuration(heads: tuple[int, int], head_dim: int, cache_dtype: str) -> SimpleNamespace:
    """What builders read of vLLM's configuration."""
    from vllm.config import CUDAGraphMode

    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=CONTEXT,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: heads[0],
        get_num_kv_heads=lambda parallel: heads[1],
        get_head_size=lambda: head_dim,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        static_forward_context={},
    )
    return SimpleNamespace(
        model_config=model,
        compilation_config=compilation,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST, max_num_batched_tokens=256),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=BLOCK),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False),
        kv_transfer_config=None,
    )


def new_tokens(problem, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each request's last tokens: the rows among all tokens', and their slots."""
    rows, slots, begin, page_size = [], [], 0, problem.page_size
    for request, (length, new) in enumerate(zip(problem.lens, counts, strict=True)):
        places = torch.arange(length - new, length)
        rows.append(begin + places)
        slots.append(problem.table[request][places // page_size].long() * page_size + places % page_size)
        begin += length
    return torch.cat(rows), torch.cat(slots)


def common_metadata(problem, counts: list[int], slots: torch.Tensor, device: str):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=problem.cache_seqlens.to(device),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=int(problem.cache_seqlens.max()),
        block_table_tensor=problem.page_table.to(device),
        slot_mapping=slots.to(device),
        causal=True,
    )


def described(problem, page_size: int) -> SimpleNamespace:
    lens = problem.cache_seqlens.tolist()
    return SimpleNamespace(lens=lens, table=problem.page_table, page_size=page_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"logit_cap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_of_gqa(batch, options, kv_dtype, device):
    from attnops.plugins.vllm.backend import AttnopsBackend
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    lengths, counts = BATCHES[batch]
    heads, head_dim = (8, 2), 64
    problem = paged_problem(lengths, counts, num_q_heads=8, num_kv_heads=2, page_size=BLOCK, kv_dtype=kv_dtype)
    rows, slots = new_tokens(described(problem, BLOCK), counts)
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
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = impl
    whole.compilation_config.static_forward_context["layer"] = layer
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=head_dim, dtype=torch.bfloat16)
    builder = AttnopsBackend.get_builder_cls()(spec, ["layer"], whole, torch.device(device))
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
    impl.do_kv_cache_update(holder, k, v, cache, step.slot_mapping)
    impl.forward(holder, q, k, v, cache, step, out)
    given = {"window_left": window, "logit_cap": cap, "sinks": sinks}
    expected, _ = problem.expected_unquantized(softmax_scale=head_dim**-0.5, causal=True, **given)
    bound = MAX_RELATIVE_ERROR[torch.bfloat16] if kv_dtype == torch.bfloat16 else MAX_RELATIVE_ERROR_FP8
    assert relative_error(out[:-padding].cpu(), expected) <= bound
    assert (out[-padding:] == 7.0).all(), "padding is nobody's"


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
    rows, slots = new_tokens(described(problem, BLOCK), counts)
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


def test_what_the_backend_says_of_itself():
    """Names of predicates are vLLM's: one that it no longer asks for would silently refuse nothing."""
    from attnops.plugins.vllm import backend, mla
    from vllm.v1.attention.backend import AttentionBackend

    for ours in (backend.AttnopsBackend, mla.AttnopsMLABackend):
        own = {name for name in vars(ours) if not name.startswith("_")}
        assert own <= set(dir(AttentionBackend)) | {"get_impl_cls", "get_builder_cls"}, own - set(dir(AttentionBackend))
        assert dataclasses.is_dataclass(backend.AttnopsMetadata)
