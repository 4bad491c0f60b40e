"""FlashAttention-3's functions against the reference: masks, windows, lse layouts, appends, scales, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from attnops.compat import flash_attn_interface as fa3
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from problems import FP8, paged_problem, ragged_problem

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
LENGTHS = [130, 5, 64, 0]
MASKS = [  # FA3's arguments, the reference's
    ({"causal": True}, {"causal": True}),
    ({}, {"causal": False}),
    ({"causal": True, "window_size": (20, 0)}, {"causal": True, "window_left": 20}),
    ({"window_size": (20, 0)}, {"causal": True, "window_left": 20}),
    ({"window_size": (20, 3)}, {"causal": False, "window_left": 20, "window_right": 3}),
    ({"window_size": (20, -1)}, {"causal": False, "window_left": 20}),
]


def decode(problem, q=None, **options):
    q = problem.q_by_request if q is None else q
    cache = {"cache_seqlens": problem.cache_seqlens, "page_table": problem.page_table}
    return fa3.flash_attn_with_kvcache(q, problem.k_pages, problem.v_pages, **{**cache, **options})


@pytest.mark.parametrize("seqlen_q", [1, 4, 17])
@pytest.mark.parametrize(("theirs", "ours"), MASKS)
def test_paged_decode_and_extend(theirs, ours, seqlen_q):
    problem = paged_problem(LENGTHS, seqlen_q)
    sinks = torch.randn(8, dtype=torch.bfloat16)
    out, lse = decode(problem, softmax_scale=0.2, softcap=3.0, return_softmax_lse=True, sinks=sinks, **theirs)
    expected, expected_lse = problem.expected(softmax_scale=0.2, logit_cap=3.0, sinks=sinks, **ours)
    assert out.shape == (4, seqlen_q, 8, 64) and lse.shape == (4, 8, seqlen_q) and lse.is_contiguous()
    assert relative_error(out.flatten(0, 1), expected) <= BOUND
    assert_lse_close(lse.transpose(1, 2).flatten(0, 1), expected_lse)
    assert (lse[3] == -math.inf).all(), "an empty row is -inf"


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_head_dims_that_decode_kernels_do_not_take(seqlen_q, kv_dtype):
    """With nothing but a page table: the shortest way through the function."""
    problem = paged_problem([130, 5, 0], seqlen_q, head_dim=512, kv_dtype=kv_dtype, scales="shared")
    given = {"causal": True, "window_size": (20, 0), "softmax_scale": 0.05}
    if kv_dtype is not None:
        given |= {"k_descale": problem.k_scale.expand(3, 2), "v_descale": problem.v_scale.expand(3, 2)}
    out, lse = decode(problem, return_softmax_lse=True, **given)
    expected, expected_lse = problem.expected(softmax_scale=0.05, window_left=20)
    assert relative_error(out.flatten(0, 1), expected) <= BOUND
    assert_lse_close(lse.transpose(1, 2).flatten(0, 1), expected_lse)


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_an_output_of_the_callers_is_written_or_refused(seqlen_q):
    problem = paged_problem([130, 50], seqlen_q)
    q = problem.q_by_request
    out = torch.full_like(q, math.nan)
    returned = decode(problem, causal=True, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert relative_error(out.flatten(0, 1), problem.expected()[0]) <= BOUND
    strided = q.new_full((2, seqlen_q + 1, 8, 64), math.nan)[:, 1:]
    assert decode(problem, causal=True, out=strided) is strided
    assert torch.equal(strided, out)
    wide = torch.empty_like(q, dtype=torch.float32)
    assert decode(problem, causal=True, out=wide) is wide
    assert torch.equal(wide, out.float())


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
def test_ragged_queries(theirs, ours):
    problem = paged_problem([130, 40, 64], [3, 40, 1], page_size=1)
    out, lse = decode(
        problem, problem.q, cu_seqlens_q=problem.cu_seqlens_q, max_seqlen_q=40, return_softmax_lse=True, **theirs
    )
    expected, expected_lse = problem.expected(**ours)
    assert relative_error(out, expected) <= BOUND
    assert lse.shape == (8, 44)
    assert_lse_close(lse.T, expected_lse)


@pytest.mark.parametrize("rows", [None, [5, 0, 3]])
def test_a_cache_without_pages(rows):
    problem = paged_problem([64, 64, 64], page_size=64, spare_pages=3)
    index = torch.arange(3) if rows is None else torch.tensor(rows)
    caches = []
    for pages in (problem.k_pages, problem.v_pages):
        cache = torch.full((6, 64, 2, 64), math.nan, dtype=torch.bfloat16)
        cache[index] = pages[problem.page_table[:, 0].long()]
        caches.append(cache)
    choice = None if rows is None else index.int()
    for lens in (None, 64):
        caches = [cache[:3] for cache in caches] if rows is None else caches
        out = fa3.flash_attn_with_kvcache(problem.q_by_request, *caches, cache_seqlens=lens, cache_batch_idx=choice)
        assert relative_error(out.flatten(0, 1), problem.expected(causal=False)[0]) <= BOUND


def test_new_tokens_are_appended_in_place():
    whole = paged_problem([34, 64, 7], 2, page_size=4)
    before = paged_problem([34, 64, 7], 2, page_size=4)
    new_k, new_v = (torch.empty(3, 2, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    for request, length in enumerate([34, 64, 7]):
        for i, position in enumerate((length - 2, length - 1)):
            page, offset = whole.page_table[request, position // 4], position % 4
            for new, pages, stale in ((new_k, whole.k_pages, before.k_pages), (new_v, whole.v_pages, before.v_pages)):
                new[request, i] = pages[page, offset]
                stale[page, offset] = math.nan
    out = decode(before, k=new_k, v=new_v, cache_seqlens=before.cache_seqlens - 2, causal=True)
    assert relative_error(out.flatten(0, 1), whole.expected()[0]) <= BOUND
    assert torch.equal(before.k_pages.isnan(), whole.k_pages.isnan())


@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_descales_of_an_fp8_cache(scales, seqlen_q):
    problem = paged_problem([130, 50], seqlen_q, kv_dtype=FP8, scales=scales)
    descales = {"k_descale": problem.k_scale.expand(2, 2), "v_descale": problem.v_scale.expand(2, 2)}
    out = decode(problem, causal=True, **descales)
    assert relative_error(out.flatten(0, 1), problem.expected()[0]) <= BOUND
    same = {name: scale.contiguous() for name, scale in descales.items()}  # which the host cannot see
    assert relative_error(decode(problem, causal=True, **same), out) <= BOUND


@pytest.mark.parametrize("num_splits", [1, 2000])  # more than a plan may have
def test_splits_give_a_request_the_bits_that_it_has_alone(num_splits):
    lengths = [1500, 64, 700]
    problem = paged_problem(lengths)
    together = decode(problem, num_splits=num_splits)
    assert relative_error(together.flatten(0, 1), problem.expected()[0]) <= BOUND
    alone = decode(
        problem,
        problem.q_by_request[:1],
        cache_seqlens=problem.cache_seqlens[:1],
        page_table=problem.page_table[:1],
        num_splits=num_splits,
    )
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only_qv": True}, "does not honour only_qv=True"),
        ({"k_descale": torch.ones(1, 2)}, "k_descale with a cache of torch.bfloat16"),
        ({"qv": torch.zeros(1, 1, 8, 256), "q_descale": torch.ones(1, 2)}, "q_descale with a cache of torch.bfloat16"),
        ({"an_argument_of_tomorrow": 1}, "does not honour an_argument_of_tomorrow="),
    ],
)
def test_what_is_not_honoured_is_named(options, message):
    problem = paged_problem([9])
    with pytest.raises(NotImplementedError, match=rf"flash_attn_with_kvcache.*{message}.*: \w+"):
        decode(problem, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": -1}, "num_splits must be at least 0, got -1"),
        ({"window_size": torch.zeros(3)}, r"window_size must be two integers, got torch.float32 \[3\]"),
        ({"rotary_cos": torch.zeros(9, 8)}, "rotary_cos and rotary_sin come together"),
        ({"rotary_cos": torch.zeros(9, 8), "rotary_sin": torch.zeros(9, 8)}, "rotary_cos needs k and v"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=rf"flash_attn_with_kvcache: {message}"):
        decode(paged_problem([9]), **options)


def varlen(problem, **options):
    bounds = (problem.cu_seqlens_q, problem.cu_seqlens_k)
    return fa3.flash_attn_varlen_func(problem.q, problem.k, problem.v, *bounds, 64, 64, **options)


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
def test_varlen(theirs, ours):
    problem = ragged_problem([33, 0, 64], [40, 5, 64], head_dim_v=32)
    out, lse = varlen(problem, softmax_scale=0.2, softcap=3.0, return_attn_probs=True, **theirs)
    expected, expected_lse = problem.expected(softmax_scale=0.2, logit_cap=3.0, **ours)
    assert relative_error(out, expected) <= BOUND
    assert lse.shape == (8, problem.q.shape[0])
    assert_lse_close(lse.T, expected_lse)
    assert torch.equal(varlen(problem, softmax_scale=0.2, softcap=3.0, **theirs), out)


def test_there_is_no_backward_pass():
    problem = ragged_problem([5])
    problem.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward pass"):
        varlen(problem)


def test_rows_of_another_dtype_are_not_appended():
    problem = paged_problem([9, 9], kv_dtype=FP8)
    new = torch.zeros(2, 1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k is torch.bfloat16, cache torch.float8_e4m3fn: append rows of its dtype"):
        decode(problem, k=new, v=new)
    with pytest.raises(ValueError, match="k and v come together"):
        decode(problem, k=new)
