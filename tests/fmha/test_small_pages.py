"""Pages of 8, 24, 40: Hopper brings whole rows of eight keys in a box (csrc/fmha/sm90/load.cuh)."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from fmha_calls import assert_right, assert_same_bits, run
from problems import PagedProblem, RaggedProblem, paged_problem, random_tree_mask

pytestmark = pytest.mark.gpu

DIMS = [(128, 128), (192, 128), (192, 192), (256, 256), (200, 200)]  # the last one's rows are no whole chunks


def problem_of(r: random.Random, seed: int, new: list[int]) -> PagedProblem:
    """NaN lies behind each request's keys, and in pages that nobody has."""
    head_dim, head_dim_v = DIMS[seed % len(DIMS)]
    kv_heads, group = r.choice([1, 2, 3]), r.choice([1, 2, 4, 5, 8])
    problem = paged_problem(
        [n + r.choice([0, 1, 23, 100, 700, 1500]) for n in new],
        new,
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=r.choice([8, 16, 24, 40, 48]),
        dtype=r.choice([torch.bfloat16, torch.float16]),
        layout=r.choice(["nhd", "hnd"]),
        seed=seed,
    )
    values = {"v_pages": problem.v_pages[..., :head_dim_v], "v_exact": problem.v_exact[..., :head_dim_v]}
    return dataclasses.replace(problem, **values).to("cuda")


@pytest.mark.parametrize("seed", range(40))
def test_any_batch(seed):
    r = random.Random(seed)
    new = [r.choice([0, 1, 17, 64, 130, 300]) for _ in range(r.choice([1, 2, 5]))]
    problem = problem_of(r, seed, new)
    causal = r.random() < 0.7
    options = {"causal": causal, "window_left": r.choice([-1, -1, 5, 128]), "logit_cap": r.choice([0.0, 0.0, 30.0])}
    if causal and max(new) > 0 and r.random() < 0.2:
        options["tree_mask"] = random_tree_mask(new, seed=seed).to(problem.q.device)
    assert_right(problem, tile_q=r.choice([16, 64, 128]), **options)


@pytest.mark.parametrize("seed", range(20))
def test_bits_are_those_of_ragged_keys(seed):
    r = random.Random(seed)
    problem = problem_of(r, seed, [r.choice([1, 64, 200]) for _ in range(3)])
    lengths = torch.nn.functional.pad(problem.cache_seqlens.cumsum(0), (1, 0)).to(torch.int32)
    ragged = RaggedProblem(
        q=problem.q,
        k=problem.k_exact.to(problem.q.dtype),
        v=problem.v_exact.to(problem.q.dtype),
        cu_seqlens_q=problem.cu_seqlens_q,
        cu_seqlens_k=lengths,
        k_scale=None,
        v_scale=None,
    )
    assert_same_bits(run(problem), run(ragged))
