"""FlashInfer's other functions against float64: positions on load, ragged queries, pages, states, cascades, dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import reference
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, paged_problem, random_tree_mask

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
LENGTHS = [130, 5, 64, 0]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)


def turned(x, positions, scale, theta):
    """ROPE_LLAMA in float64: pairs (i, i + D / 2) as complex numbers."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] / scale * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([pairs.real, pairs.imag], -1)


def slopes_of(heads):
    """ALiBi's, from the paper's recursion."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return torch.tensor(first + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)], dtype=torch.float64)


def dense(problem, seqlen_q, mode, scale, window=-1, rope=(1.0, 1e4)):
    """Float64 attention with positions, requests one after the other: out and natural lse."""
    outs, lses, begin = [], [], 0
    heads, group = problem.q.shape[1], problem.q.shape[1] // problem.k_exact.shape[1]
    for b, length in enumerate(problem.cache_seqlens.tolist()):
        q = problem.q[b * seqlen_q : (b + 1) * seqlen_q].double()
        k, v = (x[begin : begin + length].double() for x in (problem.k_exact, problem.v_exact))
        begin += length
        at_q, at_k = torch.arange(length - seqlen_q, length), torch.arange(length)
        if mode == "ROPE_LLAMA":
            q, k = turned(q, at_q, *rope), turned(k, at_k, *rope)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
        if mode == "ALIBI":
            scores += slopes_of(heads)[:, None, None] * (at_k - at_q[:, None])
        hidden = at_k > at_q[:, None]
        if window >= 0:
            hidden |= at_k < at_q[:, None] - window
        scores = scores.masked_fill(hidden, -math.inf)
        lses.append(torch.logsumexp(scores, -1).T)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize(("q_len", "page_size", "window", "heads"), [(1, 16, -1, 8), (3, 1, -1, 6), (1, 5, 20, 8)])
def test_positions_on_load(mode, q_len, page_size, window, heads):
    problem = paged_problem(LENGTHS, q_len, page_size=page_size, num_q_heads=heads)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    options = {"pos_encoding_mode": mode, "rope_scale": 2.0, "rope_theta": 5e3, "sm_scale": 0.2, "window_left": window}
    wrapper.plan(
        *csr(problem, page_size), heads, 2, 64, page_size, q_data_type="bfloat16", q_len_per_req=q_len, **options
    )
    before = problem.k_pages.clone()
    out, lse = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), return_lse=True)
    assert torch.equal(before.view(torch.int16), problem.k_pages.view(torch.int16)), "the cache is the caller's"
    expected = dense(problem, q_len, mode, 0.2, window, (2.0, 5e3))
    assert relative_error(out, expected[0]) <= BOUND
    torch.testing.assert_close(lse.double() * math.log(2), expected[1], rtol=1e-3, atol=2e-2)
    assert (lse[-q_len:] == -math.inf).all(), "an empty row is -inf"


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_decode(mode, layout):
    problem = paged_problem([77], page_size=80, dtype=torch.float16)
    page = problem.page_table[0, 0]
    k, v = problem.k_pages[page, :77], problem.v_pages[page, :77]
    if layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = flashinfer.single_decode_with_kv_cache(
        problem.q[0], k, v, layout, mode, q_scale=0.5, k_scale=0.25, v_scale=3.0, sm_scale=1.0, return_lse=True
    )
    expected = dense(problem, 1, mode, 0.125)
    assert relative_error(out, 3 * expected[0][0]) <= 2e-3
    torch.testing.assert_close(lse.double() * math.log(2), expected[1][0], rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("factors", [(0.5, 2.0, 3.0), tuple(torch.tensor([x]) for x in (0.5, 2.0, 3.0))])
def test_scales_of_a_16_bit_cache(factors):
    problem = paged_problem(LENGTHS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa3")
    wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type="bfloat16", sm_scale=0.1)
    q_scale, k_scale, v_scale = factors
    cache = (problem.k_pages, problem.v_pages)
    out = wrapper.run(problem.q, cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, enable_pdl=True)
    assert relative_error(out, 3 * problem.expected(softmax_scale=0.1)[0]) <= BOUND
    table, lens = problem.page_table, problem.cache_seqlens
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        problem.q, cache, WORKSPACE, table, lens, 192, q_scale * 0.1 * k_scale, v_scale, kv_layout="NHD", backend="xqa"
    )
    assert relative_error(out, 3 * problem.expected(softmax_scale=0.1)[0]) <= BOUND
    output = torch.full_like(problem.q, math.nan).unsqueeze(1)
    q = problem.q.unsqueeze(1)
    rest = (problem.k_pages, problem.v_pages, table, lens.unsqueeze(1), output, WORKSPACE, WORKSPACE, 2, 16)
    flashinfer.xqa(q, *rest, q_scale=q_scale, kv_scale=k_scale, rcp_out_scale=0.25, sm_count=8)
    assert relative_error(output[:, 0], 0.5 * problem.expected(softmax_scale=0.125)[0]) <= BOUND


@pytest.mark.parametrize("kv_dtype", [torch.float8_e5m2, torch.float16])
def test_caches_of_other_dtypes(kv_dtype):
    problem = paged_problem(LENGTHS)
    pools = [pages.to(kv_dtype) for pages in (problem.k_pages, problem.v_pages)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type="bfloat16", kv_data_type=kv_dtype)
    out = wrapper.run(problem.q, tuple(pools))
    exact = [pages.float() for pages in pools]
    expected = reference.paged_attention(
        problem.q_by_request.float(), *exact, problem.page_table, problem.cache_seqlens
    )
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected[0].flatten(0, 1)) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, FP8])
def test_outputs_of_other_dtypes(dtype):
    problem = paged_problem(LENGTHS)
    expected = problem.expected()[0]
    cache, table = (problem.k_pages, problem.v_pages), (problem.page_table, problem.cache_seqlens, 192)
    bound = 0.05 if dtype == FP8 else BOUND
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type="bfloat16", o_data_type=dtype)
    given = torch.zeros(4, 8, 64, dtype=dtype)
    results = [
        wrapper.run(problem.q, cache),
        wrapper.run(problem.q, cache, out=given),
        flashinfer.trtllm_batch_decode_with_kv_cache(
            problem.q, cache, WORKSPACE, *table, 0.125, out_dtype=dtype, kv_layout="NHD"
        ),
    ]
    assert results[1] is given
    for out in results:
        assert out.dtype == dtype
        assert relative_error(out.float(), expected) <= bound
    loud = flashinfer.trtllm_batch_decode_with_kv_cache(
        problem.q, cache, WORKSPACE, *table, 0.125, 1e4, out_dtype=FP8, kv_layout="NHD"
    )
    assert loud.float().abs().max() == 448, "what float8_e4m3fn does not hold saturates"


@pytest.mark.parametrize("options", [{"fixed_split_size": 8}, {"disable_split_kv": True}])
def test_batch_invariant_plans(options):
    problem = paged_problem([1500, 64, 700, 3000])
    cache = (problem.k_pages, problem.v_pages)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    assert wrapper.use_tensor_cores and not wrapper.is_cuda_graph_enabled
    wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type="bfloat16", **options)
    together = wrapper.run(problem.q, cache)
    assert relative_error(together, problem.expected()[0]) <= BOUND
    indptr, indices, last = csr(problem, 16)
    for b in range(4):
        one = (indptr[b : b + 2] - indptr[b], indices[indptr[b] : indptr[b + 1]], last[b : b + 1])
        wrapper.plan(*one, 8, 2, 64, 16, q_data_type="bfloat16", **options)
        assert torch.equal(wrapper.run(problem.q[b : b + 1], cache)[0], together[b])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_ragged_queries(kv_dtype, masked):
    counts = [3, 0, 17, 1]
    problem = paged_problem([130, 5, 64, 40], counts, kv_dtype=kv_dtype, layout="hnd", scales="tensor")
    tree = random_tree_mask(counts) if masked else None
    mask = None
    if tree is not None:
        words = torch.zeros(sum(counts), 4, dtype=torch.uint8)
        words[:, : tree.shape[-1]] = tree
        mask = words.view(torch.uint16)
    cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    k_scale, v_scale = (1.0, 1.0) if kv_dtype is None else (problem.k_scale.item(), problem.v_scale.item())
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache(
        problem.q,
        cache,
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens,
        192,
        0.125 * k_scale,
        v_scale,
        q_len_per_req=None,
        max_q_len=17,
        cum_seq_lens_q=problem.cu_seqlens_q,
        mask=mask,
        multi_ctas_kv_counter_buffer=WORKSPACE,
        return_lse=True,
    )
    expected = problem.expected(tree_mask=tree)
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])
    again = flashinfer.xqa_batch_decode_with_kv_cache(
        problem.q,
        (problem.k_pages, problem.v_pages),
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens,
        192,
        0.125 * k_scale,
        v_scale,
        q_len_per_req=17,
        mask=mask,
        q_cu_seq_lens=problem.cu_seqlens_q,
    )
    assert torch.equal(again, out)


def test_rows_of_no_request_are_empty():
    problem = paged_problem([130, 5], [3, 2])
    q = torch.cat([problem.q, torch.full((4, 8, 64), math.nan, dtype=torch.bfloat16)])
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache(
        q,
        (problem.k_pages, problem.v_pages),
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens,
        192,
        0.125,
        kv_layout="NHD",
        q_len_per_req=None,
        max_q_len=3,
        cum_seq_lens_q=problem.cu_seqlens_q,
        return_lse=True,
    )
    assert relative_error(out[:5], problem.expected()[0]) <= BOUND
    assert (out[5:] == 0).all() and (lse[5:] == -math.inf).all()


def test_float8_queries():
    problem = paged_problem(LENGTHS, kv_dtype=FP8)
    q = problem.q.to(FP8)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        q,
        (problem.k_pages, problem.v_pages),
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens,
        192,
        0.125 * problem.k_scale,
        problem.v_scale,
        kv_layout="NHD",
        out_dtype="bfloat16",
    )
    expected = reference.paged_attention(
        q.float(),
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
    )
    assert relative_error(out, expected[0]) <= BOUND


def test_forward_replaces_what_was_planned():
    problem = paged_problem(LENGTHS)
    cache = (problem.k_pages, problem.v_pages)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*csr(problem, 16), 8, 2, 64, 16, data_type=torch.bfloat16, q_data_type=torch.bfloat16)
    for window, cap in ((-1, 0.0), (20, 3.0), (7, None), (20, 3.0)):
        out, lse = wrapper.forward_return_lse(
            problem.q, cache, sm_scale=0.2, logits_soft_cap=cap, window_left=window, k_scale=0.5, v_scale=2.0
        )
        expected = problem.expected(softmax_scale=0.1, window_left=window, logit_cap=cap or 0.0)
        assert relative_error(out, 2 * expected[0]) <= BOUND
        assert_lse_close(lse * math.log(2), expected[1])
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)


def test_windows_of_forward_follow_the_next_plan():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for lengths in ([700, 30, 64], [3, 900, 40]):
        problem = paged_problem(lengths)
        wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type="bfloat16")
        for window in (-1, 50):
            out = wrapper.forward(problem.q, (problem.k_pages, problem.v_pages), window_left=window)
            assert relative_error(out, problem.expected(window_left=window)[0]) <= BOUND


def test_fast_plan_of_a_graphs_wrapper():
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 40, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled and wrapper._paged_kv_indices_buf is buffers[1]
    for lengths in ([130, 5, 64], [3, 200, 0]):
        problem = paged_problem(lengths)
        indptr, indices, last = csr(problem, 16)
        buffers[1][: indices.numel()] = indices  # as engines do: the plan reads its own buffer
        longer = torch.cat([indptr, torch.full((5,), 999, dtype=torch.int32)])
        options = {"data_type": torch.bfloat16, "q_data_type": torch.bfloat16, "global_override_indptr_cpu": indptr}
        flashinfer.fast_decode_plan(wrapper, longer, buffers[1], last, 8, 2, 64, 16, non_blocking=True, **options)
        out = wrapper.run(problem.q, (problem.k_pages, problem.v_pages))
        assert relative_error(out, problem.expected()[0]) <= BOUND


def test_cudnn_decode():
    problem = paged_problem([130, 5, 64], layout="hnd")
    cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    lens = problem.cache_seqlens.view(3, 1, 1, 1)
    out = flashinfer.cudnn_batch_decode_with_kv_cache(
        problem.q, *cache, 0.2, WORKSPACE, max_sequence_kv=192, actual_seq_lens_kv=lens, block_tables=problem.page_table
    )
    assert relative_error(out, problem.expected(softmax_scale=0.2)[0]) <= BOUND
    with pytest.raises(NotImplementedError, match="block_tables=None"):
        flashinfer.cudnn_batch_decode_with_kv_cache(problem.q, *cache, 0.2, WORKSPACE, max_sequence_kv=192)


def by_request(lse, lengths, most):
    """``[T, H]`` as ``[B, most, H]``, -inf behind a request's last."""
    return torch.stack(
        [torch.nn.functional.pad(x, (0, 0, 0, most - len(x)), value=-math.inf) for x in lse.split(lengths)]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("in_tokens", [True, False])
def test_cudnn_prefill(causal, in_tokens):
    lengths = [30, 45, 1]
    problem = paged_problem([130, 45, 64], lengths, layout="hnd")
    cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    common = {"max_token_per_sequence": 45, "max_sequence_kv": 192, "causal": causal, "return_lse": True}
    paged = {"actual_seq_lens_kv": problem.cache_seqlens.view(3, 1, 1, 1), "block_tables": problem.page_table}
    if in_tokens:
        of_q = {"batch_offsets_q": problem.cu_seqlens_q, "batch_offsets_units": "tokens"}
    else:
        of_q = {"actual_seq_lens_q": torch.tensor(lengths), "batch_offsets_q": problem.cu_seqlens_q * 8 * 64}
    out, lse = flashinfer.cudnn_batch_prefill_with_kv_cache(
        problem.q, *cache, 0.2, WORKSPACE, **common, **paged, **of_q
    )
    expected = problem.expected(softmax_scale=0.2, causal=causal)
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse.exp(), by_request(expected[1], lengths, 45).exp())

    given = torch.empty(3, 45, 8)
    bounds_k = torch.tensor([0, 130, 175, 239], dtype=torch.int32)
    of_k = {"batch_offsets_k": bounds_k} if in_tokens else {"actual_seq_lens_kv": bounds_k.diff()}
    k, v = (torch.randn(239, 2, 64).bfloat16() for _ in "kv")
    out, lse = flashinfer.cudnn_batch_prefill_with_kv_cache(
        problem.q, k, v, 0.2, WORKSPACE, **common, **of_q, **of_k, lse=given, q_scale=torch.tensor([2.0])
    )
    assert lse is given
    expected = reference.ragged_attention(
        problem.q, k, v, problem.cu_seqlens_q, bounds_k, softmax_scale=0.4, causal=causal
    )
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse.exp(), by_request(expected[1], lengths, 45).exp())


def test_cudnn_prefill_says_what_it_lacks():
    q, k = torch.zeros(3, 4, 64), torch.zeros(3, 4, 64)
    common = {"max_token_per_sequence": 3, "max_sequence_kv": 3, "causal": True, "return_lse": False}
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    for options, message in (
        ({}, "actual_seq_lens_q may be None only with"),
        ({"batch_offsets_q": bounds, "batch_offsets_units": "bytes"}, "batch_offsets_units must be 'elements'"),
        ({"batch_offsets_q": bounds, "batch_offsets_units": "tokens"}, "actual_seq_lens_kv may be None only with"),
        (
            {"actual_seq_lens_q": torch.tensor([3]), "block_tables": torch.zeros(1, 1, dtype=torch.int32)},
            "actual_seq_lens_kv is needed with block_tables",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            flashinfer.cudnn_batch_prefill_with_kv_cache(q, k, k, 1.0, WORKSPACE, **common, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_context(causal):
    problem = paged_problem([130, 45, 64], [30, 45, 1], layout="hnd")
    cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    sinks = torch.randn(8)
    out, lse = flashinfer.trtllm_batch_context_with_kv_cache(
        problem.q,
        cache,
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens,
        45,
        192,
        torch.tensor([0.2]),
        3.0,
        3,
        problem.cu_seqlens_q,
        problem.cu_seqlens_q,
        window_left=50,
        sinks=[sinks],
        causal=causal,
        return_lse=True,
    )
    expected = problem.expected(softmax_scale=0.2, window_left=50, causal=causal, sinks=sinks)
    assert relative_error(out, 3 * expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])
