"""A request's bits depend on nothing but the request: not on the run, its batch, its place, its tiles' size, how its
keys are stored, or how much of it was computed before."""

import dataclasses

import pytest
import torch
from fmha_calls import assert_right, assert_same_bits, run
from problems import FP8, RaggedProblem, paged_problem, ragged_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = [{}, {"window_left": 60, "logit_cap": 8.0}, {"causal": False}, {"logit_cap": 2.0}]


def alone(problem: RaggedProblem, request: int) -> tuple[RaggedProblem, slice]:
    """One request of a ragged problem as a batch of its own, and its rows."""
    q, k = (bounds[request : request + 2].tolist() for bounds in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    device = problem.q.device
    single = dataclasses.replace(
        problem,
        q=problem.q[slice(*q)],
        k=problem.k[slice(*k)],
        v=problem.v[slice(*k)],
        cu_seqlens_q=torch.tensor([0, q[1] - q[0]], dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor([0, k[1] - k[0]], dtype=torch.int32, device=device),
    )
    return single, slice(*q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batch_composition_and_repeats(options, dtype, device):
    problem = ragged_problem([150, 1, 77, 300], [150, 200, 90, 300], dtype=dtype).to(device)
    batch = run(problem, **options)
    for _ in range(3):
        assert_same_bits(run(problem, **options), batch)
    for request in range(4):
        single, rows = alone(problem, request)
        assert_same_bits(run(single, **options), (batch[0][rows], batch[1][rows]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tile_size_and_threads(options, dtype, device):
    problem = ragged_problem([190, 70], [310, 70], dtype=dtype).to(device)
    expected = run(problem, **options)
    for tile_q in (1, 7, 128):
        assert_same_bits(run(problem, tile_q=tile_q, **options), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_same_bits(run(problem, **options), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_prefix_from_cache_or_just_computed(kv_dtype, options, device):
    """The last queries of a request, alone over its cached keys, as in chunked prefill or with a shared prefix."""
    dtype = torch.bfloat16 if kv_dtype == FP8 else kv_dtype
    problem = paged_problem([260], 260, page_size=16, dtype=dtype, kv_dtype=kv_dtype).to(device)
    whole = run(problem, **options)
    for new in (1, 37, 200):
        bounds = torch.tensor([0, new], dtype=torch.int32, device=device)
        chunk = dataclasses.replace(problem, q=problem.q[-new:], cu_seqlens_q=bounds)
        assert_same_bits(run(chunk, **options), (whole[0][-new:], whole[1][-new:]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_paging_does_not_matter(page_size, dtype, device):
    """Matrix and CSR tables, any page size, and ragged keys: the same keys give the same bits."""
    problem = paged_problem([140, 33, 7], [20, 33, 1], page_size=page_size, dtype=dtype).to(device)
    ragged = RaggedProblem(
        q=problem.q,
        k=problem.k_exact.to(dtype),
        v=problem.v_exact.to(dtype),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=torch.tensor([0, 140, 173, 180], dtype=torch.int32, device=device),
        k_scale=None,
        v_scale=None,
    )
    expected = run(ragged)
    assert_same_bits(run(problem), expected)
    assert_same_bits(run(problem, csr=True), expected)


LONG = [{}, {"window_left": 2500}, {"causal": False, "window_right": 300}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", LONG, ids=str)
def test_threads_that_share_keys(options, dtype):
    """Few works: threads share their keys. Many: each thread has all keys of its own. The bits are the same."""
    few = {"num_q_heads": 4, "num_kv_heads": 1}
    problem = ragged_problem([40, 3], [6000, 4100], dtype=dtype, padding=0, **few)
    expected = run(problem, **options)
    assert_right(problem, **options)
    for request in range(2):
        single, rows = alone(problem, request)
        assert_same_bits(run(single, **options), (expected[0][rows], expected[1][rows]))
    for tile_q in (1, 7, 128):  # 43 works, and fewer
        assert_same_bits(run(problem, tile_q=tile_q, **options), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 20):
            torch.set_num_threads(count)
            assert_same_bits(run(problem, **options), expected)
    finally:
        torch.set_num_threads(threads)


def test_prefix_beyond_a_cut():
    problem = paged_problem([4300], 4300, page_size=16, num_q_heads=2, num_kv_heads=1, dtype=torch.bfloat16)
    whole = run(problem)
    for new in (1, 300, 2252, 4299):
        bounds = torch.tensor([0, new], dtype=torch.int32)
        chunk = dataclasses.replace(problem, q=problem.q[-new:], cu_seqlens_q=bounds)
        assert_same_bits(run(chunk), (whole[0][-new:], whole[1][-new:]))


def test_shared_keys_show_what_is_not_a_number():
    """A NaN in a cut reaches the rows that see it."""
    problem = ragged_problem([4], [5000], num_q_heads=1, num_kv_heads=1, padding=0)
    problem.v[4999] = torch.nan
    assert run(problem)[0][3].isnan().all()
    problem.v[4999] = 0
    assert run(problem)[0].isfinite().all()
    problem.k[2100] = torch.nan
    assert run(problem)[0].isnan().all()


def test_a_page_outside_the_pool_among_shared_keys_is_an_error():
    problem = paged_problem([6000], 4, page_size=16, num_q_heads=2, num_kv_heads=1)
    problem.page_table[0, 200] = 10**6
    with pytest.raises(RuntimeError, match="1000000"):
        run(problem)
