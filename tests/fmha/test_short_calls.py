"""Short calls: with plans that may cut keys, Hopper has a shape for them (csrc/fmha/sm90/short.h)."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from checks import assert_attention_close, assert_lse_close
from problems import FP8, PagedProblem, paged_problem, ragged_problem, random_tree_mask

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128), (104, 64), (192, 192), (256, 256)]
FEW, MORE = [0, 1, 1, 1, 2, 3], [0, 1, 5, 17, 40, 64, 130]


def plan_for(problem, spare: int = 0, **options) -> FmhaPlan:
    """A plan that may cut keys, for `spare` more tokens and requests than the call has."""
    keys = problem.k_pages if isinstance(problem, PagedProblem) else problem.k
    return FmhaPlan.allocate(
        problem.q.shape[0] + spare,
        problem.cu_seqlens_q.numel() - 1 + spare,
        num_q_heads=problem.q.shape[1],
        num_kv_heads=keys.shape[-2],
        head_dim=problem.q.shape[2],
        device=problem.q.device,
        **{name: options[name] for name in ("causal", "window_left", "max_seqlen_q") if name in options},
    )


def call(problem, plan: FmhaPlan, **options):
    options = {"k_scale": problem.k_scale, "v_scale": problem.v_scale, "return_lse": True, **options}
    if isinstance(problem, PagedProblem):
        ops.fmha_plan(plan, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
        pools = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
        return ops.fmha_paged(problem.q, *pools, problem.cu_seqlens_q, plan, **options)
    ops.fmha_plan(plan, problem.cu_seqlens_q, problem.cu_seqlens_k)
    bounds = (problem.cu_seqlens_q, problem.cu_seqlens_k)
    return ops.fmha_varlen(problem.q, problem.k, problem.v, *bounds, plan, **options)


def assert_right(problem, plan: FmhaPlan, **options) -> None:
    out, lse = call(problem, plan, **options)
    on_cpu = {name: x.cpu() if torch.is_tensor(x) else x for name, x in options.items()}
    expected_out, expected_lse = problem.expected(**on_cpu)
    assert_attention_close(out.cpu(), expected_out, problem.q.dtype)
    assert_lse_close(lse.cpu(), expected_lse)
    assert not plan.semaphores.any()


@pytest.mark.parametrize("lengths", [FEW, MORE], ids=["few", "more"])
@pytest.mark.parametrize("seed", range(30))
def test_any_batch(seed, lengths):
    """Of a token or two each, and longer ones. NaN lies around all that is read."""
    r = random.Random(seed)
    new = [r.choice(lengths) for _ in range(r.choice([1, 2, 5, 17, 40]))]
    if lengths is FEW and r.random() < 0.4:
        new[r.randrange(len(new))] = r.choice([5, 17, 50])
    keys = [n + r.choice([0, 0, 1, 15, 47, 63, 64, 65, 130, 300]) for n in new]
    kv_heads, group = r.choice([1, 2, 3, 8]), r.choice([1, 2, 4, 5, 6, 8, 16])
    head_dim, head_dim_v = DIMS[seed % len(DIMS)]
    dtype, kv_dtype = r.choice([torch.bfloat16, torch.float16]), r.choice([None, None, FP8])
    causal = r.random() < 0.7
    tree = causal and max(new) > 0 and r.random() < 0.25
    common = {"num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "dtype": dtype, "kv_dtype": kv_dtype}
    if head_dim == head_dim_v and r.random() < 0.5:
        page_size = r.choice([1, 3, 16, 64, 128])
        problem = paged_problem(keys, new, head_dim=head_dim, page_size=page_size, seed=seed, **common)
    else:
        padding = 0 if tree else r.choice([0, 3, 40])
        shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "padding": padding}
        problem = ragged_problem(new, keys, seed=seed, **shape, **common)
    problem = problem.to("cuda")
    options = {
        "causal": causal,
        "window_left": r.choice([-1, -1, 0, 5, 128]),
        "window_right": r.choice([-1, -1, 0, 7]),
        "logit_cap": r.choice([0.0, 0.0, 30.0]),
        "softmax_scale": r.choice([0.1, 0.1, 0.1, -0.1, 0.0]),
    }
    if r.random() < 0.3:
        options["sinks"] = torch.randn(kv_heads * group, device="cuda")
    if tree:
        options["tree_mask"] = random_tree_mask(new, seed=seed).to("cuda")
    assert_right(problem, plan_for(problem, r.choice([0, 0, 300]), **options), **options)


def drawn_problem(r, new, keys, dims, paged, seed, **common):
    """On a GPU, with new tokens and keys of each request; in pages as often as `paged` says, else ragged."""
    head_dim, head_dim_v = dims
    if head_dim == head_dim_v and r.random() < paged:
        page_size = r.choice([1, 16, 24, 64])
        return paged_problem(keys, new, head_dim=head_dim, page_size=page_size, seed=seed, **common).to("cuda")
    shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "padding": r.choice([0, 3])}
    return ragged_problem(new, keys, seed=seed, **shape, **common).to("cuda")


@pytest.mark.parametrize("seed", range(30))
def test_few_rows_of_long_requests(seed):
    """Some requests have more tokens than a chunk, and some keys are cut, or so long that heads are in sections."""
    r = random.Random(seed)
    new = [r.choice(FEW) for _ in range(r.choice([1, 2, 5, 9]))]
    if r.random() < 0.5:
        new[r.randrange(len(new))] = r.choice([9, 17, 33])
    keys = [n + r.choice([0, 40, 700, 1500, 4000, 9000]) for n in new]
    kv_heads, group = r.choice([1, 2, 8]), r.choice([1, 2, 3, 4, 5, 6, 7, 8, 16])
    common = {"num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "kv_dtype": r.choice([None, None, FP8])}
    problem = drawn_problem(r, new, keys, DIMS[seed % 7], paged=0.7, seed=seed, **common)
    options = {"causal": r.random() < 0.7, "window_left": r.choice([-1, -1, 128, 2000])}
    plan = plan_for(problem, r.choice([0, 0, 300]), **options)
    for _ in range(2):  # counters are as they were
        assert_right(problem, plan, **options)


@pytest.mark.parametrize("seed", range(24))
def test_more_works_than_run_at_once(seed):
    """Requests of few rows, and some that have several chunks of a tile."""
    r = random.Random(seed)
    kv_heads, group = r.choice([(5, 1), (16, 1), (2, 6), (8, 4), (4, 7), (8, 8), (8, 5)])
    new = [r.choice(FEW) for _ in range(r.choice([60, 90, 140]))]
    for i in r.sample(range(len(new)), r.choice([0, 4])):
        new[i] = r.choice([40, 65, 130, 300]) // group + 1
    keys = [n + r.choice([0, 0, 1, 30, 63, 64, 65, 200]) for n in new]
    common = {"num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "kv_dtype": r.choice([None, None, FP8])}
    problem = drawn_problem(r, new, keys, DIMS[seed % 8], paged=0.6, seed=seed, **common)
    options = {"causal": r.random() < 0.7, "window_left": r.choice([-1, -1, 0, 40])}
    for most in (None, max(new)):  # tiles of both sizes
        plan = plan_for(problem, max_seqlen_q=most, **options)
        for _ in range(2):  # counters are as they were
            assert_right(problem, plan, **options)


def test_a_plan_for_more_than_the_call_serves_every_length():
    """One graph, whose batch and plan are captured for more tokens and requests."""
    plan = FmhaPlan.allocate(2048, 64, num_q_heads=8, num_kv_heads=2, head_dim=128, device="cuda")
    for seed, new in enumerate([[5, 1, 90], [1] * 60, [0, 0], [200], [1, 0, 33, 2]]):
        problem = ragged_problem(new, head_dim=128, padding=seed, seed=seed).to("cuda")
        assert_right(problem, plan)


def test_hostile_rows_of_a_plan_end_nothing():
    problem = ragged_problem([5, 40, 1], head_dim=128).to("cuda")
    plan = plan_for(problem)
    right, _ = call(problem, plan)
    keep = plan.tile_order.clone()
    bounds = (problem.cu_seqlens_q, problem.cu_seqlens_k)
    for fill in (-1, 3, 7, 2**31 - 1, -(2**31)):
        plan.tile_order.fill_(fill)
        ops.fmha_varlen(problem.q, problem.k, problem.v, *bounds, plan)
        torch.cuda.synchronize()
    plan.tile_order.copy_(keep)
    assert torch.equal(call(problem, plan)[0], right)
