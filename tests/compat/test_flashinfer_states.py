"""FlashInfer's pages, merges of states and cascades against float64."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import reference
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import mla_problem, paged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
LENGTHS = [130, 5, 64, 0]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)


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


@pytest.mark.parametrize("levels", [0, -1, 1 << 31])
def test_a_cascade_has_levels_and_not_too_many(levels):
    with pytest.raises(ValueError, match=rf"num_levels must be in \[1, 1024\], got {levels}"):
        flashinfer.MultiLevelCascadeAttentionWrapper(levels, WORKSPACE)
