"""Options of functions that share their work with others: each reaches it, and changes the answer."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import reference
from attnops.compat import flash_attn, flash_attn_interface, flashinfer, sgl_kernel
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, mla_problem, paged_problem, ragged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)
LENGTHS = [130, 5, 64]
SINKS = torch.linspace(-1, 3, 8)


def differs(out, other) -> bool:
    return relative_error(out.double(), other.double()) > 2 * BOUND


@pytest.mark.parametrize("module", [sgl_kernel.flash_attn, flash_attn_interface])
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"window_size": (9, 0)}, {"window_left": 9}),
        ({"softcap": 0.7}, {"logit_cap": 0.7}),
        ({"sinks": SINKS}, {"sinks": SINKS}),
        ({"softmax_scale": 0.4}, {"softmax_scale": 0.4}),
    ],
)
def test_ragged_queries_of_flash_attention(module, options, ours):
    problem = ragged_problem([33, 4, 64], [40, 5, 64])
    call = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, 64, 64)
    out = module.flash_attn_varlen_func(*call, causal=True, **options)
    tokens = int(problem.cu_seqlens_q[-1])
    assert relative_error(out[:tokens], problem.expected(**ours)[0][:tokens]) <= BOUND
    assert differs(out[:tokens], module.flash_attn_varlen_func(*call, causal=True)[:tokens])


@pytest.mark.parametrize("module", [sgl_kernel.flash_attn, flash_attn_interface])
def test_ragged_descales_and_qv(module):
    problem = ragged_problem([33, 4], [40, 5], kv_dtype=FP8, padding=0)
    bounds = (problem.cu_seqlens_q, problem.cu_seqlens_k, 64, 64)
    scales = {"k_descale": problem.k_scale.expand(2, 2), "v_descale": problem.v_scale.expand(2, 2)}
    q = (problem.q.float() / 0.5).to(FP8)
    out = module.flash_attn_varlen_func(
        q, problem.k, problem.v, *bounds, causal=True, q_descale=torch.full((2, 2), 0.5), **scales
    )
    assert relative_error(out, problem.expected()[0]) <= 0.05
    problem = ragged_problem([33, 4], [40, 5], padding=0)
    qv = torch.randn(problem.q.shape[0], 8, 64).bfloat16()
    out = module.flash_attn_varlen_func(problem.q, problem.k, problem.v, *bounds, causal=True, qv=qv)
    both = torch.cat([problem.q, qv], -1), torch.cat([problem.k, problem.v], -1)
    expected = reference.ragged_attention(*both, problem.v, *bounds[:2], softmax_scale=128**-0.5)[0]
    assert relative_error(out, expected) <= BOUND


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 0.4},
        {"window_size": (9, 0)},
        {"softcap": 0.7},
        {"num_splits": 3},
        {"cache_leftpad": torch.tensor([3, 1, 40]).int()},
        {"new": 64, "rotary": False},
        {"new": 64, "rotary": True, "rotary_interleaved": True},
        {"new": 64, "rotary": True, "rotary_interleaved": False},
        {"cache_batch_idx": torch.tensor([2, 0, 1]).int(), "block_table": None},
    ],
    ids=lambda options: ", ".join(options),
)
def test_caches_of_flash_attention_2_are_those_of_3(options):
    """Only the table's name differs, and the default of `rotary_interleaved`, which is given."""
    results, given = [], dict(options)
    new, rotary = given.pop("new", None), given.pop("rotary", False)
    for module, table in ((flash_attn, "block_table"), (flash_attn_interface, "page_table")):
        problem = paged_problem([120, 5, 64], 1, page_size=16)
        caches, made = (problem.k_pages, problem.v_pages), dict(given)
        if "block_table" in made:
            made.pop("block_table")
            caches = tuple(
                torch.randn(3, 40, 2, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1)
            )
            made["cache_seqlens"] = torch.tensor([40, 5, 17]).int()
        else:
            made |= {table: problem.page_table, "cache_seqlens": problem.cache_seqlens - (1 if new else 0)}
        if new:
            made |= {name: torch.linspace(-1, 1, 3 * 2 * 64).view(3, 1, 2, 64).bfloat16() for name in "kv"}
        if rotary:
            angle = torch.arange(128).unsqueeze(1) * 0.7 ** torch.arange(16)
            made |= {"rotary_cos": angle.cos().bfloat16(), "rotary_sin": angle.sin().bfloat16()}
        results.append(module.flash_attn_with_kvcache(problem.q_by_request, *caches, causal=True, **made))
        if not new and "cache_batch_idx" not in made and "num_splits" not in made:
            plain = {table: problem.page_table, "cache_seqlens": problem.cache_seqlens}
            assert differs(
                results[-1], module.flash_attn_with_kvcache(problem.q_by_request, *caches, causal=True, **plain)
            )
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"window_left": 9}, {"window_left": 9}),
        ({"logits_soft_cap": 0.7}, {"logit_cap": 0.7}),
        ({"sm_scale": 0.4}, {"softmax_scale": 0.4}),
        ({"q_len_per_req": 3, "fixed_split_size": 64}, {}),
        ({"disable_split_kv": True}, {}),
        ({"kv_data_type": torch.bfloat16, "non_blocking": True}, {}),
    ],
)
def test_fast_decode_plan(options, ours):
    count = options.get("q_len_per_req", 1)
    problem = paged_problem(LENGTHS, count)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    flashinfer.fast_decode_plan(wrapper, *csr(problem, 16), 8, 2, 64, 16, q_data_type=torch.bfloat16, **options)
    out = wrapper.run(problem.q, (problem.k_pages, problem.v_pages))
    assert relative_error(out, problem.expected(**ours)[0]) <= BOUND
    if ours:
        assert differs(out, problem.expected()[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_xqa_by_batch(layout):
    problem = paged_problem(LENGTHS, 1, layout=layout.lower())
    cache = (problem.k_pages, problem.v_pages)
    if layout == "HND":
        cache = tuple(pages.transpose(1, 2) for pages in cache)
    out = torch.full_like(problem.q, math.nan)
    call = (problem.q, cache, WORKSPACE, problem.page_table, problem.cache_seqlens, 192)
    given = {"bmm1_scale": 0.2, "bmm2_scale": 1.0, "kv_layout": layout, "enable_pdl": True}
    result = flashinfer.xqa_batch_decode_with_kv_cache(*call, **given, sinks=SINKS, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out, problem.expected(softmax_scale=0.2, sinks=SINKS)[0]) <= BOUND
    plain = flashinfer.xqa_batch_decode_with_kv_cache(*call, **given)
    assert differs(out, plain)
    scaled = flashinfer.xqa_batch_decode_with_kv_cache(*call, **given, o_scale=2.0)
    assert torch.equal(scaled, plain), "bmm2_scale has it in the peer, too: it multiplies values and divides outputs"


def test_xqa_of_mla_by_batch():
    problem = mla_problem(LENGTHS, 1, page_size=32)
    out = torch.full((3, 1, 16, 512), math.nan).bfloat16()
    arguments = (problem.q_by_request, problem.kv_pages.unsqueeze(1), WORKSPACE, 128, 512, 64, problem.page_table)
    result = flashinfer.xqa_batch_decode_with_kv_cache_mla(
        *arguments, problem.cache_seqlens, 192, bmm1_scale=0.2, bmm2_scale=2.0, out=out, enable_pdl=False
    )
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out.flatten(0, 1), 2 * problem.expected(softmax_scale=0.2)[0]) <= BOUND


def test_ragged_attention_of_mlas_prompts_with_sinks():
    problem = ragged_problem([33, 1, 64], [40, 5, 64], head_dim=192, head_dim_v=128, padding=0)
    tokens = problem.q.shape[0]
    out, lse = torch.empty(tokens, 8, 128).bfloat16(), torch.empty(tokens, 8)
    lens = problem.cu_seqlens_k.diff()
    given = (
        WORKSPACE,
        lens,
        64,
        64,
        0.1,
        1.0,
        1.0,
        3,
        -1,
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        False,
        True,
        True,
    )
    result = flashinfer.trtllm_ragged_attention_deepseek(
        problem.q, problem.k, problem.v, *given, attention_sinks=SINKS, out=out, lse=lse
    )
    expected = problem.expected(softmax_scale=0.1, sinks=SINKS)
    assert result[0].data_ptr() == out.data_ptr() and result[1].data_ptr() == lse.data_ptr()
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])


def test_batch_attention_with_a_soft_cap():
    problem = paged_problem([130, 45, 64], [30, 1, 4])
    indptr, indices, _ = csr(problem, 16)
    wrapper = flashinfer.BatchAttention("NHD", device="cpu")
    bounds = (problem.cu_seqlens_q, indptr, indices, problem.cache_seqlens)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(*bounds, 8, 2, 64, 64, 16, causal=True, logits_soft_cap=0.7, **types)
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2])
    result = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), out, lse, logits_soft_cap=0.7)
    expected = problem.expected(logit_cap=0.7)
    assert result[0].data_ptr() == out.data_ptr() and result[1].data_ptr() == lse.data_ptr()
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])


@pytest.mark.parametrize(
    ("options", "ours"),
    [({"window_left": 9}, {"window_left": 9}), ({"logits_soft_cap": 0.7}, {"logit_cap": 0.7})],
)
def test_single_decode(options, ours):
    q, k, v = torch.randn(8, 64).bfloat16(), *torch.randn(2, 90, 2, 64).bfloat16()
    out = flashinfer.single_decode_with_kv_cache(q, k, v, use_tensor_cores=True, **options)
    assert relative_error(out.unsqueeze(0), reference.attention(q.unsqueeze(0), k, v, **ours)[0]) <= BOUND


@pytest.mark.parametrize(
    ("options", "ours"),
    [({"softmax_scale": 0.4}, {"softmax_scale": 0.4}), ({"softcap": 0.7}, {"logit_cap": 0.7})],
)
def test_lists_of_blocks(options, ours):
    """Lists that name every key."""
    q, k, v = torch.randn(1, 64, 2, 64).bfloat16(), *torch.randn(2, 1, 128, 2, 64).bfloat16()
    lists = {
        "block_count": torch.full((1, 2, 1), 2).int(),
        "block_offset": torch.tensor([0, 64]).int().expand(1, 2, 1, 2),
    }
    lists |= {"column_count": torch.zeros(1, 2, 1).int(), "column_index": torch.zeros(1, 2, 1, 1).int()}
    out = torch.empty_like(q)
    result = sgl_kernel.sparse_flash_attn.sparse_attn_func(q, k, v, *lists.values(), out=out, **options)
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out[0], reference.attention(q[0], k[0], v[0], causal=False, **ours)[0]) <= BOUND
