"""Windows of every width on Hopper: where a plan may cut keys, a work's tiles begin with its window (work.cuh)."""

from __future__ import annotations

import random

import pytest
import torch
from fmha_calls import assert_right, filled, split_plan
from problems import FP8, paged_problem, ragged_problem

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (192, 192), (80, 80)]


@pytest.mark.parametrize("seed", range(42))
def test_any_window(seed):
    """Pages are poisoned, and NaN lies around ragged keys."""
    r = random.Random(seed)
    new = [r.choice([0, 1, 3, 20, 65, 130, 300, 700]) for _ in range(r.choice([1, 2, 4, 9]))]
    keys = [n + r.choice([0, 0, 1, 63, 64, 300, 1111, 2500]) for n in new]
    kv_heads, group = r.choice([1, 2, 3]), r.choice([1, 2, 4, 5, 7, 8])
    head_dim, head_dim_v = DIMS[seed % len(DIMS)]
    common = {
        "num_q_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "dtype": r.choice([torch.bfloat16, torch.float16]),
    }
    common["kv_dtype"] = r.choice([None, None, FP8])
    if head_dim == head_dim_v and r.random() < 0.6:
        page_size = r.choice([1, 3, 8, 16, 24, 64, 128])
        problem = paged_problem(keys, new, head_dim=head_dim, page_size=page_size, seed=seed, **common)
    else:
        problem = ragged_problem(new, keys, head_dim=head_dim, head_dim_v=head_dim_v, seed=seed, **common)
    problem = problem.to("cuda")
    causal = r.random() < 0.7
    options = {"causal": causal, "window_left": r.choice([0, 1, 17, 63, 64, 100, 127, 200, 400, 1500])}
    options["window_right"] = -1 if causal else r.choice([-1, 0, 5, 90])
    if r.random() < 0.3:
        options["sinks"] = torch.randn(kv_heads * group, device="cuda")
    plan = filled(split_plan(problem, causal=causal, window_left=options["window_left"]), problem)
    assert_right(problem, plan=plan, **options)
