"""FlashInfer's functions of MLA against float64: two pools, FP8, ragged queries, the forms of TensorRT-LLM and XQA."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import reference
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, mla_problem, ragged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
LENGTHS = [130, 5, 64, 0]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention_of_mlas_prompts(causal):
    problem = ragged_problem([33, 1, 64], [40, 5, 64], head_dim=192, head_dim_v=128)
    out, lse = flashinfer.trtllm_ragged_attention_deepseek(
        problem.q,
        problem.k,
        problem.v,
        WORKSPACE,
        problem.cu_seqlens_k.diff(),
        64,
        64,
        0.1,
        2.0,
        1.0,
        3,
        -1,
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        False,
        causal,
        True,
    )
    expected = problem.expected(softmax_scale=0.1, causal=causal)
    assert relative_error(out, 2 * expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", [[2, 1, 4, 0], [3, 3, 3, 3]])
def test_mla_of_two_pools_and_of_ragged_queries(counts, causal):
    problem = mla_problem([130, 5, 64, 9], counts, page_size=32)
    indptr, indices, _ = csr(problem, 32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, backend="fa2")
    lens, bf16 = problem.cache_seqlens, torch.bfloat16
    wrapper.plan(problem.cu_seqlens_q, indptr, indices, lens, 16, 512, 64, 32, causal, 0.1, bf16, bf16)
    pools = problem.kv_pages[..., :512].clone(), problem.kv_pages[..., 512:].clone()
    out, lse = wrapper.run(problem.q[..., :512], problem.q[..., 512:], *pools, return_lse=True)
    expected = problem.expected(softmax_scale=0.1, causal=causal)
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])


@pytest.mark.parametrize("form", ["equal", "two", "rows"])
def test_mla_over_fp8(form):
    generator = torch.Generator().manual_seed(3)
    problem = mla_problem([130, 5, 64], page_size=32)
    indptr, indices, _ = csr(problem, 32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    arguments = (problem.cu_seqlens_q, indptr, indices, problem.cache_seqlens, 16, 512, 64, 32, True, 0.1)
    with pytest.raises(ValueError, match=r"q_data_type=torch\.bfloat16"):
        wrapper.plan(*arguments, torch.float16, FP8)
    wrapper.plan(*arguments, torch.bfloat16, FP8)
    scale_k, scale_r = 0.02, 0.02 if form == "equal" else 0.05
    pages = problem.kv_pages.nan_to_num(0.0).float()
    shape = pages.shape[:2]
    scales = (
        0.01 + 0.02 * torch.rand(*shape, 4, generator=generator) if form == "rows" else torch.full((*shape, 4), scale_k)
    )
    ckv = (pages[..., :512] / scales.repeat_interleave(128, -1)).clamp(-448, 448).to(FP8)
    kpe = (pages[..., 512:] / scale_r).clamp(-448, 448).to(FP8)
    real = torch.cat([ckv.float() * scales.repeat_interleave(128, -1), kpe.float() * scale_r], -1)
    q = problem.q[..., :512], problem.q[..., 512:]
    with pytest.raises(ValueError, match="Exactly one of ckv_scale or ckv_scale_arr"):
        wrapper.run(*q, ckv, kpe)
    with pytest.raises(ValueError, match=r"kpe_scale is needed"):
        wrapper.run(*q, ckv, kpe, ckv_scale=1.0)
    with pytest.raises(ValueError, match="Invalid shape of ckv_scale_arr"):
        wrapper.run(*q, ckv, kpe, ckv_scale_arr=torch.ones(1), kpe_scale=1.0)
    given = {"ckv_scale_arr": scales} if form == "rows" else {"ckv_scale": scale_k}
    out = wrapper.run(*q, ckv, kpe, kpe_scale=scale_r, **given)
    expected = reference.mla_attention(
        problem.q,
        real.double(),
        problem.page_table,
        problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        softmax_scale=0.1,
    )
    assert relative_error(out, expected[0]) <= BOUND


def test_the_older_mla_wrapper():
    problem = mla_problem([130, 5, 64], page_size=32, dtype=torch.float16)
    wrapper = flashinfer.BatchDecodeMlaWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(problem, 32), 16, 512, 32, 0.1, data_type="float16")
    parts = (problem.q[..., :512], problem.q[..., 512:], problem.kv_pages[..., :512], problem.kv_pages[..., 512:])
    out, lse = wrapper.run_return_lse(*parts, q_scale=0.5, k_scale=2.0, v_scale=3.0)
    expected = problem.expected(softmax_scale=0.1)
    assert relative_error(out, 3 * expected[0]) <= 2e-3
    assert_lse_close(lse * math.log(2), expected[1])


@pytest.mark.parametrize("form", ["tensor scales", "float8 query", "ragged", "no lengths", "float8 output"])
def test_forms_of_trtllm_mla(form):
    counts = [2, 1, 3] if form == "ragged" else 2
    lengths = [128, 64, 192] if form == "no lengths" else [130, 5, 64]
    kv_dtype = FP8 if form in ("tensor scales", "float8 query") else None
    problem = mla_problem(lengths, counts, kv_dtype=kv_dtype, page_size=64)
    q = problem.q if form == "ragged" else problem.q_by_request
    scale = 1.0 if kv_dtype is None else problem.kv_scale.item()
    table, lens, options, expected_q = problem.page_table, problem.cache_seqlens, {}, problem.q
    if form == "tensor scales":
        options = {"bmm1_scale": 0.1 * problem.kv_scale, "bmm2_scale": problem.kv_scale}
    else:
        options = {"bmm1_scale": 0.1 * scale, "bmm2_scale": scale}
    if form == "float8 query":
        q, expected_q = q.to(FP8), problem.q.to(FP8).float()
    if form == "ragged":
        options |= {"cum_seq_lens_q": problem.cu_seqlens_q, "max_q_len": 3}
    if form == "no lengths":
        problem = mla_problem([192, 192], 2, page_size=64)
        q, table, lens, expected_q = problem.q_by_request, problem.page_table[:, :3].contiguous(), None, problem.q
    if form == "float8 output":
        options["out"] = torch.empty(*q.shape[:-1], 512, dtype=FP8)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        q,
        problem.kv_pages,
        WORKSPACE,
        128,
        512,
        64,
        table,
        lens,
        192,
        enable_pdl=False,
        backend="trtllm-gen",
        **options,
    )
    expected = reference.mla_attention(
        expected_q,
        problem.kv_pages,
        problem.page_table,
        problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        kv_scale=problem.kv_scale,
        softmax_scale=0.1,
    )
    assert out.shape == (*q.shape[:-1], 512)
    bound = {"float8 output": 0.05, "tensor scales": 2 * BOUND}.get(form, BOUND)  # scales on the device round q again
    assert relative_error(out.float().reshape(-1, 16, 512), expected[0]) <= bound


def test_xqa_mla():
    problem = mla_problem([130, 5, 64], kv_dtype=FP8)
    output = torch.full((3, 1, 16, 512), math.nan, dtype=torch.bfloat16)
    q, scale = problem.q_by_request, problem.kv_scale.item()
    pages, lens = problem.kv_pages.unsqueeze(2), problem.cache_seqlens.view(torch.uint32).unsqueeze(1)
    rest = (pages, pages[..., :512], problem.page_table, lens, output, WORKSPACE, WORKSPACE, 64)
    flashinfer.xqa_mla(q, *rest, q_scale=0.5, kv_scale=scale)
    assert relative_error(output[:, 0], problem.expected(softmax_scale=0.5 * 576**-0.5)[0]) <= BOUND
