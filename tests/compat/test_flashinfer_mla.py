"""FlashInfer's MLA functions against the reference: CSR tables, one pool of two views, folded scales, lse bases."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention, hidden_keys
from flashinfer_paging import csr
from problems import FP8, mla_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
LENGTHS = [130, 5, 64, 0]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)


def check(out, lse, expected):
    """`lse` in base 2."""
    assert relative_error(out.flatten(0, -3), expected[0]) <= BOUND
    if lse is not None:
        assert_lse_close(lse * math.log(2), expected[1])


def plan_mla(wrapper, problem, q_len, page_size, causal=True, dtype=torch.bfloat16):
    indptr, indices, _ = csr(problem, page_size)
    heads, kv_dtype = problem.q.shape[1], problem.kv_pages.dtype
    lens, qo = problem.cache_seqlens, problem.cu_seqlens_q
    wrapper.plan(qo, indptr, indices, lens, heads, 512, 64, page_size, causal, 0.1, dtype, kv_dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "page_size", "graph"), [(1, 1, False), (3, 64, False), (1, 32, True)])
def test_mla_wrapper(q_len, page_size, graph, causal):
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 5, 200, 4)] if graph else []
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, graph, *buffers)
    for seed in (0, 1):
        problem = mla_problem(LENGTHS, q_len, page_size=page_size, seed=seed)
        plan_mla(wrapper, problem, q_len, page_size, causal)
        q, pages = problem.q, problem.kv_pages
        parts = (q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:])
        out, lse = wrapper.run(*parts, return_lse=True)
        expected = problem.expected(softmax_scale=0.1, causal=causal)
        check(out, lse, expected)
        _, natural = wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)
        assert_lse_close(natural, expected[1])
        given = torch.full_like(lse, math.nan)
        assert torch.equal(wrapper.run(*parts, lse=given), out)
        assert torch.equal(given, lse), "an lse is written also where it is not returned"
        for buffer, length in zip(buffers, (5, 5, None, 4)):  # what plan was given, in the wrapper's buffers
            assert length is None or buffer.any(), "a graph's buffer was not written"


def test_mla_wrapper_names_what_it_does_not_honour():
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    problem = mla_problem([5, 9])
    plan_mla(wrapper, problem, 1, 64)
    q, pages = problem.q, problem.kv_pages
    parts = (q[..., :512], q[..., 512:], pages[..., :512])
    for argument in ("profiler_buffer", "kv_len", "page_table"):
        with pytest.raises(NotImplementedError, match=f"does not honour {argument}=a tensor"):
            wrapper.run(*parts, pages[..., 512:], **{argument: torch.zeros(1)})


@pytest.mark.parametrize("kv_dtype", [None, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("q_len", [1, 3])
def test_trtllm_mla(q_len, kv_dtype):
    problem = mla_problem(LENGTHS, q_len, kv_dtype=kv_dtype, page_size=32)
    scale = 1.0 if kv_dtype is None else problem.kv_scale.item()
    sinks = torch.randn(16)
    pages = problem.kv_pages.unsqueeze(1)
    arguments = (problem.q_by_request, pages, WORKSPACE, 128, 512, 64, problem.page_table, problem.cache_seqlens, 192)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        *arguments, bmm1_scale=0.1 * scale, bmm2_scale=scale, sinks=sinks
    )
    assert out.shape == (4, q_len, 16, 512)
    expected = problem.expected(softmax_scale=0.1, sinks=sinks)
    check(out.flatten(0, 1), None, expected)
    scales = {"bmm1_scale": 0.1 * scale, "bmm2_scale": scale, "sinks": sinks}
    for base, factor in ((None, 1.0), ("base2", 1.0), ("basee", math.log2(math.e))):
        lse = torch.full((4, q_len, 16), math.nan)
        options = {"lse": lse, "return_lse_base": base}
        again = flashinfer.trtllm_batch_decode_with_kv_cache_mla(*arguments, **scales, **options)
        assert torch.equal(again, out), "an lse is written also where it is not returned"
        check(out.flatten(0, 1), lse.flatten(0, 1) * factor, expected)
        _, returned = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            *arguments, **scales, return_lse=True, return_lse_base=base
        )
        assert torch.equal(returned, lse.flatten(0, 1))
    for options in (
        {"sparse_mla_top_k": 64},
        {"sparse_mla_top_k_lens": torch.ones(1)},
        {"bmm1_scale": torch.ones(2)},
        {"an_argument_of_tomorrow": 1},
        {"uses_shared_paged_kv_idx": False},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            flashinfer.trtllm_batch_decode_with_kv_cache_mla(*arguments, **options)


def test_mla_wrapper_names_the_dtype_that_was_not_planned():
    problem = mla_problem([5, 9])
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    plan_mla(wrapper, problem, 1, 64)
    q, pages = problem.q, problem.kv_pages
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    parts = dict(zip(names, (q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:])))
    for name in names:
        with pytest.raises(ValueError, match=rf"{name}\.dtype is torch.float16, planned was torch.bfloat16"):
            wrapper.run(**{**parts, name: parts[name].half()})


def parts_of(problem):
    q, pages = problem.q, problem.kv_pages
    return q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:]


@pytest.mark.parametrize("counts", [2, [2, 1, 3]])
@pytest.mark.parametrize("out_dtype", [FP8, torch.float8_e5m2, torch.float32])
def test_mla_wrapper_writes_into_what_it_is_given(counts, out_dtype):
    """In any dtype, and FP8 also over a scale: real = stored x scale."""
    problem = mla_problem([130, 5, 64], counts)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    plan_mla(wrapper, problem, 0, 64)
    expected = problem.expected(softmax_scale=0.1)
    out = torch.empty(*problem.q.shape[:-1], 512, dtype=out_dtype)
    rounding = {FP8: 0.03, torch.float8_e5m2: 0.06}.get(out_dtype, BOUND)
    for scale in (None, 0.05) if out_dtype.itemsize == 1 else (None,):
        returned, lse = wrapper.run(*parts_of(problem), out=out, o_scale=scale, return_lse=True)
        assert returned is out
        assert relative_error(out.float() * (scale or 1.0), expected[0]) <= rounding
        assert_lse_close(lse * math.log(2), expected[1])
    if out_dtype == FP8:
        wrapper.run(*parts_of(problem), out=out, o_scale=1e-9)
        assert out.float().abs().max() == 448, "what is too large saturates"
        with pytest.raises(ValueError, match="o_scale must be a finite positive value, got -1"):
            wrapper.run(*parts_of(problem), out=out, o_scale=-1.0)
    with pytest.raises(ValueError, match="out must be an FP8 tensor with o_scale, got None"):
        wrapper.run(*parts_of(problem), o_scale=1.0)


@pytest.mark.parametrize("arr", [False, True])
@pytest.mark.parametrize("dims", [(512, 64), (256, 32)])
def test_mla_wrapper_over_e5m2(dims, arr):
    latent, rope = dims
    problem = mla_problem(LENGTHS[:3], kv_dtype=None)
    pages = problem.kv_pages.nan_to_num().to(torch.float8_e5m2)
    q_nope, q_pe = problem.q[..., :latent], problem.q[..., 512 : 512 + rope]
    caches = pages[..., :latent], pages[..., 512 : 512 + rope]
    indptr, indices, _ = csr(problem, 64)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    types = (torch.bfloat16, torch.float8_e5m2)
    lens = problem.cache_seqlens
    wrapper.plan(problem.cu_seqlens_q, indptr, indices, lens, 16, *dims, 64, True, 0.1, *types)
    arr_scale = 0.5 + torch.rand(*pages.shape[:2], latent // 128)
    scales = {"ckv_scale_arr": arr_scale, "kpe_scale": 2.0} if arr else {"ckv_scale": 0.5, "kpe_scale": 2.0}
    for given in (scales, {}):
        ckv = caches[0].float() * (given.get("ckv_scale", 1.0) if not arr or not given else 1.0)
        if "ckv_scale_arr" in given:
            ckv = ckv * arr_scale.repeat_interleave(128, -1)
        kpe = caches[1].float() * given.get("kpe_scale", 1.0)
        out = wrapper.run(q_nope, q_pe, *caches, **given)
        for b, length in enumerate(lens.tolist()):
            token = torch.arange(length)
            cells = problem.page_table[b, token // 64].long(), token % 64
            keys = torch.cat([ckv[cells], kpe[cells]], -1).unsqueeze(1)
            q = torch.cat([q_nope[b : b + 1], q_pe[b : b + 1]], -1)
            hidden = hidden_keys(1, length, True, (-1, -1))
            expected = attention(q, keys, keys[..., :latent], hidden, 0.1)[0]
            assert relative_error(out[b : b + 1], expected) <= 2 * BOUND


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_mla_wrapper_widens_float8_queries(kv_dtype):
    problem = mla_problem([130, 5, 64], 2, kv_dtype=kv_dtype)
    problem = dataclasses.replace(problem, q=problem.q.to(FP8).to(torch.bfloat16))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    plan_mla(wrapper, problem, 2, 64, dtype=FP8)
    q_nope, q_pe, *caches = parts_of(problem)
    scale = {} if kv_dtype is None else dict.fromkeys(("ckv_scale", "kpe_scale"), problem.kv_scale.item())
    out = wrapper.run(q_nope.to(FP8), q_pe.to(FP8), *caches, **scale)
    assert out.dtype == torch.bfloat16
    check(out, None, problem.expected(softmax_scale=0.1))


@pytest.mark.parametrize("buffers", [True, False])
def test_mla_wrapper_is_planned_by_what_engines_write_into_it(buffers):
    """SGLang's `fast_mla_decode_plan` and `fast_mla_prefill_plan`: attributes, buffers, a module's `plan`."""
    given = [torch.zeros(n, dtype=torch.int32) for n in (4, 4, 60, 3)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, True, *given)
    with pytest.raises(RuntimeError, match="plan must run first"):
        wrapper._cached_module.plan(None, None, None, *given[:2], given[3], 16, 512, False)
    first = mla_problem([3, 4, 5], 2, page_size=1)
    plan_mla(wrapper, first, 2, 1)
    problem = mla_problem([20, 3, 31], 2, page_size=1, seed=1)
    indptr, indices, _ = csr(problem, 1)
    qo, lens = problem.cu_seqlens_q, problem.cache_seqlens
    wrapper._causal, wrapper._page_size, wrapper._sm_scale = False, 1, 0.2
    if buffers:
        wrapper._qo_indptr_buf.copy_(qo)
        wrapper._kv_indptr_buf.copy_(indptr)
        wrapper._kv_len_arr_buf.copy_(lens)
    wrapper._kv_indices_buf[: len(indices)].copy_(indices)
    works = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    wrapper._cached_module.plan(*works, qo, indptr, lens, 16, 512, False)
    check(wrapper.run(*parts_of(problem)), None, problem.expected(softmax_scale=0.2, causal=False))
    with pytest.raises(ValueError, match="use_cuda_graph fixes the geometry"):
        wrapper._cached_module.plan(*works, qo, indptr, lens, 32, 512, False)


def test_mla_wrapper_takes_bounds_longer_than_the_batch():
    problem = mla_problem([130, 5])
    indptr, indices, _ = csr(problem, 64)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    longer = torch.cat([indptr, torch.full((7,), 10**6, dtype=torch.int32)])
    lens, bf16 = problem.cache_seqlens, torch.bfloat16
    wrapper.plan(problem.cu_seqlens_q, longer, indices, lens, 16, 512, 64, 64, True, 0.1, bf16, bf16)
    q, pages = problem.q, problem.kv_pages
    out = wrapper.run(q[..., :512], q[..., 512:], pages[..., :512], pages[..., 512:])
    check(out, None, problem.expected(softmax_scale=0.1))
