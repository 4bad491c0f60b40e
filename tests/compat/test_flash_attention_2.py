"""FlashAttention-2's functions against float64: pages, windows, ALiBi."""

from __future__ import annotations

import math

import pytest
import torch
from attnops.compat import flash_attn
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention, hidden_keys
from problems import paged_problem, ragged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]


def test_flash_attention_2():
    """By its names: `block_table`, `alibi_slopes`, three results, +inf for a row without a key."""
    problem = paged_problem([130, 5, 64, 0], 3, page_size=256)
    cache = (problem.q_by_request, problem.k_pages, problem.v_pages)
    lens = {"cache_seqlens": problem.cache_seqlens, "block_table": problem.page_table}
    out, lse = flash_attn.flash_attn_with_kvcache(*cache, **lens, causal=True, return_softmax_lse=True)
    expected = problem.expected()
    assert relative_error(out.flatten(0, 1), expected[0]) <= BOUND
    assert (lse[3] == math.inf).all() and lse.shape == (4, 8, 3)
    bounds_k = torch.nn.functional.pad(problem.cache_seqlens.cumsum(0), (1, 0)).int()
    flat, lse, probs = flash_attn.flash_attn_varlen_func(
        problem.q,
        *cache[1:],
        problem.cu_seqlens_q,
        bounds_k,
        3,
        130,
        causal=True,
        block_table=problem.page_table,
        return_attn_probs=True,
    )
    assert probs is None and lse.shape == (8, 12)
    assert relative_error(flat, expected[0]) <= BOUND
    with pytest.raises(NotImplementedError, match=r"dropout_p=0.1"):
        flash_attn.flash_attn_func(*cache, dropout_p=0.1)


@pytest.mark.parametrize("window", [(-1, -1), (20, 0), (20, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_2_without_a_cache(causal, window):
    problem = ragged_problem([33, 1, 64], [40, 5, 64], head_dim_v=32)
    bounds = (problem.cu_seqlens_q, problem.cu_seqlens_k, 64, 64)
    out = flash_attn.flash_attn_varlen_func(
        problem.q, problem.k, problem.v, *bounds, causal=causal, window_size=window, softcap=5.0, deterministic=True
    )
    seen = {"causal": causal or window[1] == 0, "window_left": window[0]}
    seen["window_right"] = -1 if seen["causal"] else window[1]
    assert relative_error(out, problem.expected(logit_cap=5.0, **seen)[0]) <= BOUND
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((7, 4), (19, 2), (19, 2)))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, causal, window, return_attn_probs=True)
    hidden = hidden_keys(7, 19, causal, window)
    for b in range(2):
        expected = attention(q[b], k[b], v[b], hidden, 0.3)
        assert relative_error(out[b], expected[0]) <= BOUND
        assert_lse_close(lse[b].T, expected[1])


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (False, (9, 2)), (False, (-1, 3)), (False, (4, -1))]
)
@pytest.mark.parametrize("per_request", [False, True])
@pytest.mark.parametrize("form", ["cache", "func", "varlen", "paged varlen"])
def test_alibi_of_flash_attention_2(form, per_request, causal, window):
    """Also of more queries than keys."""
    lengths, counts = [61, 61] if form == "func" else [61, 3], [5, 5] if form == "func" else [5, 2]
    problem = paged_problem(lengths, 5 if form == "cache" else counts, page_size=64)
    slopes = torch.rand(2, 8) if per_request else torch.rand(8)
    k, v = (
        torch.cat([pages[problem.page_table[b, 0], :n] for b, n in enumerate(lengths)])
        for pages in (problem.k_pages, problem.v_pages)
    )
    bounds = problem.cu_seqlens_q, torch.tensor([0, *lengths]).cumsum(0).int(), 5, 61
    shared = {"causal": causal, "window_size": window, "alibi_slopes": slopes}
    if form == "cache":
        counts = [5, 5]
        table = {"cache_seqlens": problem.cache_seqlens, "block_table": problem.page_table}
        out = flash_attn.flash_attn_with_kvcache(
            problem.q_by_request, problem.k_pages, problem.v_pages, **table, **shared
        )
    elif form == "func":
        out = flash_attn.flash_attn_func(problem.q_by_request, k.view(2, 61, 2, 64), v.view(2, 61, 2, 64), **shared)
    elif form == "varlen":
        out = flash_attn.flash_attn_varlen_func(problem.q, k, v, *bounds, **shared)
    else:
        pools = (problem.k_pages, problem.v_pages)
        out = flash_attn.flash_attn_varlen_func(problem.q, *pools, *bounds, block_table=problem.page_table, **shared)
    out, begin = out.reshape(-1, 8, 64), 0
    for b, (count, length) in enumerate(zip(counts, lengths)):
        rows = slice(sum(counts[:b]), sum(counts[: b + 1]))
        at = torch.arange(length - count, length)[:, None]
        slope = slopes[b] if per_request else slopes
        bias = -slope.double()[:, None, None] * (at - torch.arange(length)).abs()
        hidden = hidden_keys(count, length, causal, window)
        expected = attention(problem.q[rows], k[begin : begin + length], v[begin : begin + length], hidden, 0.125, bias)
        begin += length
        assert relative_error(out[rows], expected[0]) <= BOUND


def test_alibi_gives_the_lse_of_the_scores_with_their_bias():
    q, k, v = (torch.randn(1, n, h, 64).bfloat16() for n, h in ((7, 4), (19, 2), (19, 2)))
    slopes = torch.rand(4)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)
    bias = -slopes.double()[:, None, None] * (torch.arange(12, 19)[:, None] - torch.arange(19)).abs()
    expected = attention(q[0], k[0], v[0], hidden_keys(7, 19, False, (-1, -1)), 0.125, bias)
    assert relative_error(out[0], expected[0]) <= BOUND
    assert_lse_close(lse[0].T, expected[1])
    none = flash_attn.flash_attn_func(q[:, :0], k, v, alibi_slopes=slopes)
    assert none.shape == (1, 0, 4, 64)
    with pytest.raises(NotImplementedError, match="alibi_slopes with softcap"):  # the peer's cap is before its bias
        flash_attn.flash_attn_func(q, k, v, causal=True, softcap=5.0, alibi_slopes=slopes)
