"""Pages of 8, 24, 40: Hopper brings whole rows of eight keys in a box (csrc/fmha/sm90/load.cuh)."""

from __future__ import annotations

import random

import pytest
from fmha_calls import assert_right, assert_same_bits, drawn_pages, ragged_twin, run
from problems import random_tree_mask

pytestmark = pytest.mark.gpu

DIMS = [(128, 128), (192, 128), (192, 192), (256, 256), (200, 200)]  # the last one's rows are no whole chunks
PAGE_SIZES = [8, 16, 24, 40, 48]


@pytest.mark.parametrize("seed", range(40))
def test_any_batch(seed):
    r = random.Random(seed)
    new = [r.choice([0, 1, 17, 64, 130, 300]) for _ in range(r.choice([1, 2, 5]))]
    problem = drawn_pages(r, DIMS, PAGE_SIZES, new, seed).to("cuda")
    causal = r.random() < 0.7
    options = {"causal": causal, "window_left": r.choice([-1, -1, 5, 128]), "logit_cap": r.choice([0.0, 0.0, 30.0])}
    if causal and max(new) > 0 and r.random() < 0.2:
        options["tree_mask"] = random_tree_mask(new, seed=seed).to(problem.q.device)
    assert_right(problem, tile_q=r.choice([16, 64, 128]), **options)


@pytest.mark.parametrize("seed", range(20))
def test_bits_are_those_of_ragged_keys(seed):
    r = random.Random(seed)
    problem = drawn_pages(r, DIMS, PAGE_SIZES, [r.choice([1, 64, 200]) for _ in range(3)], seed).to("cuda")
    ragged = ragged_twin(problem)
    assert_same_bits(run(problem), run(ragged))
