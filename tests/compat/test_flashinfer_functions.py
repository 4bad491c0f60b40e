"""FlashInfer's other functions against float64: positions on load, ragged queries, pages, states, cascades, dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import reference
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, mla_problem, paged_problem, ragged_problem, random_tree_mask

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


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_paged_kv_cache(layout):
    whole = paged_problem([34, 64, 7, 1], page_size=4, layout="nhd" if layout == "NHD" else "hnd", seed=1)
    indptr, indices, last = csr(whole, 4)
    counts = torch.tensor([5, 1, 7, 0])
    append = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    lens = flashinfer.get_seq_lens(indptr, last, 4)
    assert torch.equal(lens, whole.cache_seqlens)
    requests, positions = flashinfer.get_batch_indices_positions(append, lens, 16)
    pairs = [(b, lens[b].item() - n + i) for b, n in enumerate(counts.tolist()) for i in range(n)]
    assert list(zip(requests.tolist(), positions.tolist())) == pairs + [(-1, 0)] * 3
    rows = [[], []]
    stale = [whole.k_pages.clone(), whole.v_pages.clone()]
    for b, position in pairs:
        page, offset = whole.page_table[b, position // 4], position % 4
        for pages, into, old in zip((whole.k_pages, whole.v_pages), rows, stale):
            into.append(pages[page, offset].clone())
            old[page, offset] = 7.0
    new = [torch.cat([torch.stack(into), torch.full((3, 2, 64), math.nan, dtype=torch.bfloat16)]) for into in rows]
    cache = tuple(stale) if layout == "NHD" else tuple(pages.transpose(1, 2) for pages in stale)
    flashinfer.append_paged_kv_cache(*new, requests, positions, cache, indices, indptr, last, layout)
    for pages, old in zip((whole.k_pages, whole.v_pages), stale):
        assert torch.equal(pages.nan_to_num(9.0), old.nan_to_num(9.0))


def test_append_paged_mla_kv_cache():
    problem = mla_problem([34, 64, 7], page_size=4)
    indptr, indices, last = csr(problem, 4)
    requests, positions = torch.tensor([0, 2, -1]), torch.tensor([33, 2, 5])
    ckv, kpe = torch.randn(3, 512).bfloat16(), torch.randn(3, 64).bfloat16()
    pools = problem.kv_pages[..., :512].clone(), problem.kv_pages[..., 512:].clone()
    expected = [pool.clone() for pool in pools]
    for row, (b, position) in enumerate([(0, 33), (2, 2)]):
        for pool, new in zip(expected, (ckv, kpe)):
            pool[problem.page_table[b, position // 4], position % 4] = new[row]
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, requests, positions, *pools, indices, indptr, last)
    for pool, other in zip(pools, expected):
        assert torch.equal(pool.nan_to_num(9.0), other.nan_to_num(9.0))


def union(outs, log2s):
    """Float64 merge over dim 0: outs [S, ..., D], base-2 lse [S, ...]."""
    weights = torch.softmax(log2s.double() * math.log(2), 0).nan_to_num(0.0).unsqueeze(-1)
    outs = torch.where(weights > 0, outs.double(), 0.0)
    return (weights * outs).sum(0), torch.logsumexp(log2s.double() * math.log(2), 0) / math.log(2)


def test_merges_of_states():
    v, s = torch.randn(7, 5, 4, 64), torch.randn(7, 5, 4) * 5
    s[2, :3] = -math.inf
    s[3] = -math.inf
    v[3] = math.nan  # what nobody wrote
    expected = union(v.transpose(0, 1), s.transpose(0, 1))
    out, lse = flashinfer.merge_states(v, s)
    assert relative_error(out, expected[0]) <= 1e-5
    assert_lse_close(lse, expected[1])
    counts = [3, 0, 1, 9, 22]
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    flat = (v.flatten(0, 1), s.flatten(0, 1))
    out, lse = flashinfer.variable_length_merge_states(*flat, indptr)
    for token in range(len(counts)):
        rows = slice(indptr[token], indptr[token + 1])
        want = union(flat[0][rows], flat[1][rows])
        torch.testing.assert_close(out[token].double(), want[0], rtol=1e-5, atol=1e-5)
        assert_lse_close(lse[token], want[1])
    a, s_a, b, s_b = v[:, 0].clone(), s[:, 0].clone(), v[:, 1], s[:, 1]
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.uint8)
    flashinfer.merge_state_in_place(a, s_a, b, s_b, mask)
    merged = union(v[:, :2].transpose(0, 1), s[:, :2].transpose(0, 1))
    chosen = mask.bool()
    torch.testing.assert_close(a[chosen].double(), merged[0][chosen], rtol=1e-5, atol=1e-5)
    assert_lse_close(s_a[chosen], merged[1][chosen])
    kept = ~chosen
    assert torch.equal(a[kept].nan_to_num(9.0), v[:, 0][kept].nan_to_num(9.0)) and torch.equal(s_a[kept], s[:, 0][kept])


@pytest.mark.parametrize("causal", [True, False])
def test_cascades_see_a_shared_prefix_and_their_own_keys(causal):
    """Requests of one prefix (2 pages of 16) and own pages; the expectation is attention over the whole."""
    seqlen_q = 4
    problem = paged_problem([32 + 70, 32 + 9, 32 + 20], seqlen_q)
    table = problem.page_table.clone()
    table[:, :2] = table[0, :2]
    cache = (problem.k_pages, problem.v_pages)
    expected = reference.paged_attention(
        problem.q, *cache, table, problem.cache_seqlens, cu_seqlens_q=problem.cu_seqlens_q, causal=causal
    )[0]
    own = problem.cache_seqlens - 32
    pages = -(-own // 16)
    indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    indices = torch.cat([table[b, 2 : 2 + n] for b, n in enumerate(pages.tolist())])
    last = own - (pages - 1) * 16
    shared = (torch.tensor([0, 2]).int(), table[0, :2].clone(), torch.tensor([16]).int())
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    levels = zip(shared, (indptr, indices, last))
    bounds = [torch.tensor([0, 3 * seqlen_q]).int(), problem.cu_seqlens_q]
    wrapper.plan(bounds, *[list(pair) for pair in levels], 8, 2, 64, 16, causal=causal, q_data_type="bfloat16")
    assert relative_error(wrapper.run(problem.q, cache), expected) <= BOUND
    k, v = (pages[table[0, :2].long()].flatten(0, 1) for pages in cache)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    prefill.begin_forward(problem.cu_seqlens_q, indptr, indices, last, 8, 2, 64, 16)
    assert relative_error(prefill.forward(problem.q, k, v, cache, causal=causal), expected) <= BOUND
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    decode.begin_forward(indptr, indices, last, 8, 2, 64, 16, data_type="bfloat16")
    newest = problem.q.view(3, seqlen_q, 8, 64)[:, -1]
    assert relative_error(decode.forward(newest, k, v, cache), expected.view(3, seqlen_q, 8, 64)[:, -1]) <= BOUND
    decode.end_forward()


def test_batch_attention():
    problem = paged_problem([130, 45, 64, 0], [30, 1, 4, 0])
    indptr, indices, _ = csr(problem, 16)
    wrapper = flashinfer.BatchAttention("NHD", device="cpu")
    wrapper.plan(
        problem.cu_seqlens_q, indptr, indices, problem.cache_seqlens, 8, 2, 64, 64, 16, causal=True, sm_scale=0.2
    )
    out, lse = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), k_scale=0.5, v_scale=torch.tensor(2.0))
    expected = problem.expected(softmax_scale=0.1)
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
