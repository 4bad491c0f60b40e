"""Batch-invariant xqa_decode on Hopper: the same bits by clusters of any size, by the plan, and in any company."""

import dataclasses

import pytest
import torch
from attnops.metadata.plan_checks import cut_rule
from attnops.metadata.plan_parts import xqa_invariant_cuts
from problems import FP8, paged_problem
from xqa_decoding import assert_decodes, decode

pytestmark = pytest.mark.gpu
SHORT = [700, 64, 1, 0, 1024, 333, 65, 63, 1000, 129, 512, 31, 897, 2, 640, 1024, 960, 5, 1023, 256] * 4
LONG = [8192, 100, 7777, 2000, 4097, 64, 8192, 0, 6400]


def of_requests(problem, rows):
    """The same requests in a smaller batch, whose page table is no wider than they need."""
    page_size, longest = problem.k_pages.shape[1], int(problem.cache_seqlens[rows].max())
    return dataclasses.replace(
        problem,
        q=problem.q[rows],
        page_table=problem.page_table[rows, : max(-(-longest // page_size), 1)].contiguous(),
        cache_seqlens=problem.cache_seqlens[rows],
    )


def assert_same_bits(problem, cuts):
    """By few parts and many, and in batches of every size."""
    options = {"fixed_split_tokens": cuts, "max_seqlen_k": 8192}
    lengths = problem.cache_seqlens.tolist()
    together, lse = decode(problem, **options, num_sm_parts=None)
    for parts in (1, 37, 256):
        out, lse_now = decode(problem, **options, num_sm_parts=parts)
        assert torch.equal(out, together) and torch.equal(lse_now, lse), parts
    for size in (1, 2, 4, 9, 33):
        for first in range(0, len(lengths), max(size, len(lengths) // 3)):
            rows = slice(first, min(first + size, len(lengths)))
            out, lse_now = decode(of_requests(problem, rows), **options, num_sm_parts=None)
            assert torch.equal(out, together[rows]) and torch.equal(lse_now, lse[rows]), (size, first)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (64, 4), (4, 4), (32, 32), (14, 2)])
@pytest.mark.parametrize("cuts", [None, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_in_batches_of_every_size(head_dim, heads, lengths, dtype, cuts):
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    problem = paged_problem(lengths, dtype=dtype, **geometry).to("cuda")
    assert_same_bits(problem, cuts or xqa_invariant_cuts(heads[1], num_q_heads=heads[0], head_dim=head_dim))


# Of up to 128 tokens that rows see, by warps alone, in one piece or two; longer ones, by CTAs.
AROUND_LONE = [128, 129, 64, 65, 0, 1, 63, 127, 130, 16, 17, 192, 2000, 80, 128, 100, 31, 66, 513, 5]


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("heads", [(32, 8), (16, 1), (24, 2), (33, 33)])
@pytest.mark.parametrize("seqlen_q, window_left", [(1, -1), (1, 127), (1, 100), (2, 126), (1, 60)])
def test_the_same_bits_of_short_works(seqlen_q, window_left, heads, kv_dtype, page_size):
    """A part of one short work gives its halves to two warps; parts of several, and clusters, have longer ones, too."""
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 96, "page_size": page_size}
    lengths = AROUND_LONE * (1 if heads[1] > 8 else 3)
    problem = paged_problem(lengths, seqlen_q, kv_dtype=kv_dtype, **geometry).to("cuda")
    options = {"fixed_split_tokens": -16, "max_seqlen_k": 2048, "seqlen_q": seqlen_q, "window_left": window_left}
    assert_decodes(problem, **options)
    together, lse = decode(problem, **options, num_sm_parts=None)
    for parts in (1, 5, 33, 132, 264):
        out, lse_now = decode(problem, **options, num_sm_parts=parts)
        assert torch.equal(out, together) and torch.equal(lse_now, lse), parts
    for request in range(0, len(AROUND_LONE)):
        rows = slice(request * seqlen_q, (request + 1) * seqlen_q)
        alone = dataclasses.replace(
            problem,
            q=problem.q[rows],
            page_table=problem.page_table[request : request + 1],
            cache_seqlens=problem.cache_seqlens[request : request + 1],
        )
        for parts in (None, 1):
            out, lse_now = decode(alone, **options, num_sm_parts=parts)
            assert torch.equal(out, together[rows]) and torch.equal(lse_now, lse[rows]), (request, parts)


@pytest.mark.parametrize("work", [1, 63, 64, 65, 128])
def test_keys_of_short_works_behind_the_page_table_or_unread(work):
    """Rows of zeros stand for keys that nobody may read: the rest of their pages holds NaN."""
    problem = paged_problem([work] * 40, num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=16).to("cuda")
    for parts in (3, 264):
        assert_decodes(problem, fixed_split_tokens=-8, max_seqlen_k=128, num_sm_parts=parts)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (64, 4)])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("kv_dtype, head_dim", [(None, 120), (FP8, 128), (FP8, 80), (FP8, 64)])
def test_the_same_bits_over_pages_that_are_gathered(kv_dtype, head_dim, page_size, heads, lengths):
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
    dtype = torch.bfloat16 if page_size == 1 else torch.float16
    problem = paged_problem(lengths, dtype=dtype, kv_dtype=kv_dtype, **geometry).to("cuda")
    cuts = xqa_invariant_cuts(heads[1], num_q_heads=heads[0], kv_dtype=kv_dtype or dtype)
    assert_decodes(problem, fixed_split_tokens=cuts, max_seqlen_k=8192)
    assert_same_bits(problem, cuts)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (64, 4)])
@pytest.mark.parametrize("page_size, head_dim, dtype", [(8, 128, torch.float16), (64, 120, torch.bfloat16)])
def test_the_same_bits_over_fp8_pages(page_size, head_dim, dtype, heads, lengths):
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
    problem = paged_problem(lengths, dtype=dtype, kv_dtype=FP8, scales="head", **geometry).to("cuda")
    cuts = xqa_invariant_cuts(heads[1], num_q_heads=heads[0], kv_dtype=FP8, page_size=page_size)
    assert_decodes(problem, fixed_split_tokens=cuts, max_seqlen_k=8192)
    assert_same_bits(problem, cuts)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (64, 4)])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_the_same_bits_where_leaves_have_a_least_length(kv_dtype, heads, lengths):
    """Clusters and the plan's kernels add the same leaves up."""
    problem = paged_problem(
        lengths, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, page_size=16, kv_dtype=kv_dtype
    ).to("cuda")
    for cuts in (cut_rule(16, 3), cut_rule(28, 8)):
        assert_decodes(problem, fixed_split_tokens=cuts, max_seqlen_k=8192)
        assert_same_bits(problem, cuts)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [
        ((6, 2), 256, 64),
        ((24, 1), 128, 16),
        ((20, 1), 64, 16),
        ((40, 1), 96, 5),
        ((80, 1), 128, 64),
        ((160, 1), 128, 16),
    ],
)
def test_the_same_bits_where_a_cut_writes_a_partial_result(heads, head_dim, page_size, kv_dtype, lengths):
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
    problem = paged_problem(lengths, kv_dtype=kv_dtype, **geometry).to("cuda")
    of_kernel = {"num_q_heads": heads[0], "head_dim": head_dim, "page_size": page_size}
    cuts = xqa_invariant_cuts(heads[1], kv_dtype=kv_dtype or torch.bfloat16, **of_kernel)
    assert cuts < -8 * 1024  # eight tiles at least
    assert_same_bits(problem, cuts)


@pytest.mark.parametrize("seqlen_q", [1, 2, 3])
@pytest.mark.parametrize("window_left", [-1, 0, 700])
def test_windows_sinks_and_several_query_tokens(seqlen_q, window_left):
    problem = paged_problem(SHORT[:20], seqlen_q, num_q_heads=16, num_kv_heads=4, head_dim=96, page_size=16).to("cuda")
    options = {
        "fixed_split_tokens": -32,
        "max_seqlen_k": 1024,
        "seqlen_q": seqlen_q,
        "window_left": window_left,
        "sinks": torch.linspace(-2, 3, 16, device="cuda"),
    }
    assert_decodes(problem, **options)
    together, lse = decode(problem, **options, num_sm_parts=None)
    for request in range(20):
        rows = slice(request * seqlen_q, (request + 1) * seqlen_q)
        alone = dataclasses.replace(
            problem,
            q=problem.q[rows],
            page_table=problem.page_table[request : request + 1],
            cache_seqlens=problem.cache_seqlens[request : request + 1],
        )
        out, lse_now = decode(alone, **options, num_sm_parts=None)
        assert torch.equal(out, together[rows]) and torch.equal(lse_now, lse[rows]), request
