"""vLLM's backend, builder and implementation of attnops, driven as its model runner drives them, against float64.

vLLM's Python files are enough, so versions run here whose engine does not.
"""

from __future__ import annotations

import dataclasses
import os
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


def test_what_the_backend_says_of_itself():
    """Names of predicates are vLLM's: one that it no longer asks for would silently refuse nothing."""
    from attnops.plugins.vllm import backend, mla
    from vllm.v1.attention.backend import AttentionBackend

    for ours in (backend.AttnopsBackend, mla.AttnopsMLABackend):
        own = {name for name in vars(ours) if not name.startswith("_")}
        assert own <= set(dir(AttentionBackend)) | {"get_impl_cls", "get_builder_cls"}, own - set(dir(AttentionBackend))
        assert dataclasses.is_dataclass(backend.AttnopsMetadata)


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
