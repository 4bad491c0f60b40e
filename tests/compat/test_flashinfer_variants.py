"""FlashInfer's wrappers where no kernel does it on load: ALiBi of prompts, items, sinks, wide heads, cuDNN offsets."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, paged_problem, ragged_problem

BF16 = torch.bfloat16
BOUND = MAX_RELATIVE_ERROR[BF16]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)
LENGTHS, NEW = [130, 5, 64, 0, 40], [40, 5, 1, 0, 0]


def rows_of(problem, size=16):
    """Each request's K and V, out of its pages."""
    found = []
    for b, length in enumerate(problem.cache_seqlens.tolist()):
        token = torch.arange(length)
        page = problem.page_table[b, token // size].long()
        found.append((problem.k_pages[page, token % size], problem.v_pages[page, token % size]))
    return found


def expected_of(q, bounds, keys, scale, visible=None, slopes=None, sinks=None):
    """Float64, request by request: out and natural lse. `visible(i, p, j)`: of key j to the query at p."""
    outs, lses = [], []
    for i, ((k, v), (a, b)) in enumerate(zip(keys, itertools.pairwise(bounds))):
        group = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        p = torch.arange(k.shape[0] - (b - a), k.shape[0])[:, None]
        j = torch.arange(k.shape[0])
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), k) * scale
        if slopes is not None:
            scores += slopes[:, None, None] * (j - p)
        seen = j <= p if visible is None else visible(i, p, j)
        scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        weights = scores.softmax(-1).nan_to_num(0.0)
        if sinks is not None:
            weights = weights * torch.sigmoid(lse - sinks.double()[:, None]).unsqueeze(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def check(out, lse, expected):
    assert relative_error(out, expected[0]) <= BOUND
    assert_lse_close(lse * math.log(2), expected[1])


@pytest.mark.parametrize("masked", [False, True])
def test_alibi_of_prompts(masked):
    problem, slopes = paged_problem(LENGTHS, NEW), 2.0 ** -torch.arange(1, 9, dtype=torch.float64)
    masks = [torch.rand(q, k, generator=torch.Generator().manual_seed(k)) < 0.4 for q, k in zip(NEW, LENGTHS)]
    mask = {"custom_mask": torch.cat([mask.flatten() for mask in masks])} if masked else {"causal": True}
    options = {"pos_encoding_mode": "ALIBI", "q_data_type": BF16, "sm_scale": 0.2, **mask}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(problem.cu_seqlens_q, *csr(problem, 16), 8, 2, 64, 16, **options)
    before = problem.k_pages.clone()
    scales = {"q_scale": 0.5, "k_scale": torch.tensor([3.0])}
    out, lse = wrapper.run_return_lse(problem.q, (problem.k_pages, problem.v_pages), **scales)
    assert torch.equal(before.view(torch.int16), problem.k_pages.view(torch.int16)), "the cache is the caller's"
    keys, bounds = rows_of(problem), problem.cu_seqlens_q.tolist()
    seen = (lambda i, p, j: masks[i]) if masked else None
    expected = expected_of(problem.q, bounds, keys, 0.2 * 1.5, seen, slopes)
    check(out, lse, expected)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    ragged.plan(problem.cu_seqlens_q, ends, 8, 2, 64, **options)
    k, v = (torch.cat(parts) for parts in zip(*keys))
    check(*ragged.run_return_lse(problem.q, k, v, **scales), expected)


@pytest.mark.parametrize("window", [-1, 9])
def test_items_see_the_prefix_and_themselves(window):
    lengths, new, prefixes = [54, 97, 20], [37, 81, 20], [17, 30, 6]
    places = [[*range(17), *range(19), 0], [*range(66), 0], [*range(3), *range(10), 0]]
    stride = 70
    table = torch.zeros(3 * stride, dtype=torch.uint16)
    for b, mine in enumerate(places):
        assert len(mine) == lengths[b] - prefixes[b]
        table[b * stride : b * stride + len(mine)] = torch.tensor(mine, dtype=torch.uint16)
    problem = paged_problem(lengths, new)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    given = {"prefix_len_ptr": torch.tensor(prefixes, dtype=torch.uint32), "token_pos_in_items_ptr": table}
    options = {"causal": True, "q_data_type": BF16, "window_left": window}
    paging = (problem.cu_seqlens_q, *csr(problem, 16), 8, 2, 64, 16)
    wrapper.plan(*paging, token_pos_in_items_len=stride, **given, **options)

    def seen(b, p, j):
        """By the item of each token: items begin at a delimiter, which sees the prefix alone."""
        item = torch.zeros(lengths[b], dtype=torch.int64)
        item[prefixes[b] :] = torch.tensor([place == 0 for place in places[b]]).cumsum(0)
        delimiter = torch.tensor([*[False] * prefixes[b], *[place == 0 for place in places[b]]])
        own = (item[p] == item[j]) & ~delimiter[j]
        inside = (p >= prefixes[b]) & (j >= prefixes[b])
        near = j >= p - window if window >= 0 else torch.ones_like(own)
        return (j <= p) & (~inside | own) & near

    out, lse = wrapper.run_return_lse(problem.q, (problem.k_pages, problem.v_pages))
    check(out, lse, expected_of(problem.q, problem.cu_seqlens_q.tolist(), rows_of(problem), 64**-0.5, seen))
    with pytest.raises(ValueError, match="prefix_len_ptr and token_pos_in_items_ptr come together"):
        wrapper.plan(*paging, prefix_len_ptr=given["prefix_len_ptr"], **options)
    with pytest.raises(ValueError, match="must hold 37 places of request 0, got 5"):
        wrapper.plan(*paging, **{**given, "token_pos_in_items_ptr": table[:5]}, **options)


def test_sinks_by_position():
    problem, sinks = paged_problem(LENGTHS, NEW), torch.randn(8)
    keys, bounds = rows_of(problem), problem.cu_seqlens_q.tolist()
    expected = expected_of(problem.q, bounds, keys, 0.3, sinks=sinks)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, q_data_type=BF16, head_dim_qk=64)
    wrapper.plan(problem.cu_seqlens_q, *csr(problem, 16), 8, 2, 64, 16, causal=True, q_data_type=BF16)
    cache = (problem.k_pages, problem.v_pages)
    assert relative_error(wrapper.run(problem.q, cache, sinks, 0.3), expected[0]) <= BOUND
    with pytest.raises(NotImplementedError, match="0 more positional arguments: AttentionSink takes sink and sm_scale"):
        wrapper.run(problem.q, cache)
    k, v = (torch.cat(parts) for parts in zip(*keys))
    one = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, q_data_type=BF16, head_dim_qk=64)
    tokens, last = torch.tensor([0, *LENGTHS]).cumsum(0).int(), torch.ones(5, dtype=torch.int32)
    paging = (problem.cu_seqlens_q, tokens, torch.arange(k.shape[0], dtype=torch.int32), last)
    one.plan(*paging, 8, 2, 64, 1, causal=True, q_data_type=BF16)
    assert relative_error(one.run(problem.q, (k, v), sinks, 0.3), expected[0]) <= BOUND, "pages of one token, unwrapped"
    names = (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "its source")
    jit_args = ("uri", BF16, BF16, BF16, torch.int32, 64, 64, *names)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        WORKSPACE, jit_args=jit_args, jit_kwargs={"use_sliding_window": False}
    )
    ragged.plan(problem.cu_seqlens_q, tokens, 8, 2, 64, causal=True, q_data_type=BF16)
    assert relative_error(ragged.run(problem.q, k, v, sinks, 0.3), expected[0]) <= BOUND
    with pytest.raises(NotImplementedError, match="does not honour jit_args"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, jit_args=[*jit_args[:7], [], [], [], [], "Mine", ""])


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize(("dim", "q_len", "kv_dtype"), [(512, 1, None), (512, 3, FP8), (320, 1, torch.float8_e5m2)])
def test_decode_of_wide_heads(dim, q_len, kv_dtype, mode):
    problem = paged_problem([70, 5, 33], q_len, head_dim=dim)
    k, v = (pages if kv_dtype is None else pages.to(kv_dtype) for pages in (problem.k_pages, problem.v_pages))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    options = {"pos_encoding_mode": mode, "q_data_type": BF16, "kv_data_type": kv_dtype, "window_left": 40}
    wrapper.plan(*csr(problem, 16), 8, 2, dim, 16, q_len_per_req=q_len, **options)
    out, lse = wrapper.run(problem.q, (k, v), return_lse=True)
    if mode == "ROPE_LLAMA":  # tests of narrow heads hold the angles; here, that the same ones are used
        forward = wrapper.forward(problem.q, (k, v), mode, window_left=40)
        assert torch.equal(forward, out)
        return
    problem = dataclasses.replace(problem, k_pages=k.to(BF16), v_pages=v.to(BF16))
    slopes = 2.0 ** -torch.arange(1, 9, dtype=torch.float64) if mode == "ALIBI" else None
    bounds = [q_len * b for b in range(4)]
    expected = expected_of(
        problem.q, bounds, rows_of(problem), dim**-0.5, lambda _, p, j: (j <= p) & (j >= p - 40), slopes
    )
    check(out, lse, expected)
    wrapper.plan(*csr(problem, 16), 8, 2, dim, 16, q_len_per_req=q_len, **{**options, "window_left": -1})
    assert not torch.equal(wrapper.run(problem.q, (k, v)), out)


def test_cudnns_offsets_are_in_elements_and_its_pages_have_heads_first():
    problem = paged_problem(LENGTHS, NEW)
    keys, bounds = rows_of(problem), problem.cu_seqlens_q.tolist()
    expected = expected_of(problem.q, bounds, keys, 64**-0.5)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, backend="cudnn")
    options = {"causal": True, "q_data_type": BF16, "max_token_per_sequence": 40, "max_sequence_kv": 130}
    lens = problem.cache_seqlens.view(-1, 1, 1, 1)
    elements = problem.cu_seqlens_q * 8 * 64
    wrapper.plan(elements, *csr(problem, 16), 8, 2, 64, 16, seq_lens=lens, **options)
    cache = tuple(pages.transpose(1, 2) for pages in (problem.k_pages, problem.v_pages))
    check(*wrapper.run_return_lse(problem.q, cache), expected)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, backend="cudnn")
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int() * 2 * 64
    ragged.plan(elements, ends, 8, 2, 64, v_indptr=ends, o_indptr=elements, **options)
    k, v = (torch.cat(parts) for parts in zip(*keys))
    check(*ragged.run_return_lse(problem.q, k, v), expected)


def test_float8_scales_by_position():
    problem = paged_problem(LENGTHS, 1, kv_dtype=FP8)
    q = problem.q.to(FP8)
    scales = (torch.rand(8) + 0.5, torch.rand(2) + 0.5, torch.rand(2) + 0.5)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type=FP8, kv_data_type=FP8, o_data_type=BF16, sm_scale=0.01)
    pages = (problem.k_pages, problem.v_pages)
    out, lse = wrapper.run(q, pages, *scales, return_lse=True)
    keys = [tuple(x.float() * s[:, None] for x, s in zip(pair, scales[1:])) for pair in rows_of(problem)]
    expected = expected_of(q.float() * scales[0][:, None], list(range(6)), keys, 0.01)
    assert relative_error(out, expected[0]) <= 2 * BOUND  # q times its scale is rounded to bfloat16
    assert_lse_close(lse * math.log(2), expected[1], atol=0.05)
    with pytest.raises(NotImplementedError, match="1 more positional arguments"):
        wrapper.run(q, pages, scales[0])


def test_forward_with_lse_and_sizes_of_workspaces():
    problem = ragged_problem([9, 30], [9, 30])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    assert wrapper._plan_info is None
    arguments = (problem.cu_seqlens_q, problem.cu_seqlens_k, 8, 2, 64)
    sizes = wrapper.workspace_size(*arguments)
    wrapper.reset_workspace_buffer(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
    wrapper.plan(*arguments, q_data_type=BF16)
    assert wrapper._plan_info is not None
    check(*wrapper.forward_return_lse(problem.q, problem.k, problem.v, True), problem.expected())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(512, 0), (256, 32), (96, 64)], ids=str)
def test_mla_of_other_dims(dims, causal):
    latent, rope = dims
    lengths, new = [70, 5, 33, 0], [3, 5, 1, 0]
    problem = paged_problem(lengths, new, num_kv_heads=1, head_dim=latent)
    generator = torch.Generator().manual_seed(7)
    q_pe = torch.randn(*problem.q.shape[:2], rope, generator=generator).to(BF16)
    kpe = torch.randn(*problem.k_pages.shape[:2], rope, generator=generator).to(BF16)
    ckv = problem.k_pages.squeeze(2)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    indptr, indices, _ = csr(problem, 16)
    heads = (8, latent, rope, 16, causal, 0.1, BF16)
    wrapper.plan(problem.cu_seqlens_q, indptr, indices, problem.cache_seqlens, *heads, BF16)
    out, lse = wrapper.run(problem.q, q_pe, ckv, kpe, return_lse=True)
    whole = dataclasses.replace(problem, k_pages=torch.cat([ckv, kpe], -1).unsqueeze(2), v_pages=problem.k_pages)
    seen = None if causal else (lambda _, p, j: (j >= 0) & (p >= -1))
    bounds = problem.cu_seqlens_q.tolist()
    expected = expected_of(torch.cat([problem.q, q_pe], -1), bounds, rows_of(whole), 0.1, seen)
    check(out, lse, expected)
    with pytest.raises(
        NotImplementedError, match=r"kv_data_type=torch.float16.*q's dtype, float8_e4m3fn or float8_e5m2"
    ):
        wrapper.plan(problem.cu_seqlens_q, indptr, indices, problem.cache_seqlens, *heads, torch.float16)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("dims", [(512, 0), (256, 32)], ids=str)
def test_fp8_mla_of_other_dims(dims, grouped):
    latent, rope = dims
    problem = paged_problem([70, 5, 33, 0], [3, 5, 1, 0], num_kv_heads=1, head_dim=latent)
    generator = torch.Generator().manual_seed(7)
    q_pe = torch.randn(*problem.q.shape[:2], rope, generator=generator).to(BF16)
    kpe = torch.randn(*problem.k_pages.shape[:2], rope, generator=generator).to(FP8)
    ckv = problem.k_pages.squeeze(2).to(FP8)
    scales = torch.rand(*ckv.shape[:2], latent // 128, generator=generator) + 0.5
    given = {"ckv_scale_arr": scales} if grouped else {"ckv_scale": 2.0}
    factor = scales.repeat_interleave(128, -1) if grouped else 2.0
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    indptr, indices, _ = csr(problem, 16)
    heads = (8, latent, rope, 16, True, 0.1, BF16, FP8)
    wrapper.plan(problem.cu_seqlens_q, indptr, indices, problem.cache_seqlens, *heads)
    out, lse = wrapper.run(problem.q, q_pe, ckv, kpe, return_lse=True, kpe_scale=0.5, **given)
    values, keys = (ckv.float() * factor).to(BF16), (kpe.float() * 0.5).to(BF16)
    pages = torch.cat([values, keys], -1).unsqueeze(2)
    whole = dataclasses.replace(problem, k_pages=pages, v_pages=values.unsqueeze(2))
    bounds = problem.cu_seqlens_q.tolist()
    check(out, lse, expected_of(torch.cat([problem.q, q_pe], -1), bounds, rows_of(whole), 0.1, None))
    with pytest.raises(ValueError, match="Exactly one of ckv_scale or ckv_scale_arr"):
        wrapper.run(problem.q, q_pe, ckv, kpe, kpe_scale=0.5)


def test_workspaces_at_odd_addresses_are_refused_as_in_flashinfer():
    aligned = torch.zeros(64, dtype=torch.uint8)
    odd = aligned[1:]
    wrappers = (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    )
    for wrapper in wrappers:
        with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
            wrapper(odd)
        made = wrapper(aligned)
        made.reset_workspace_buffer(aligned, aligned)
        with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
            made.reset_workspace_buffer(odd, aligned)
        with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
            made.reset_workspace_buffer(aligned, odd)
    levels = flashinfer.MultiLevelCascadeAttentionWrapper(2, aligned)
    with pytest.raises(ValueError, match="int_workspace_buffers must be 16-byte aligned"):
        levels.reset_workspace_buffer(aligned, [aligned, odd])
