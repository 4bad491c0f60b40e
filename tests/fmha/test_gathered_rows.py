"""Pages that are no boxes: Hopper gathers rows of keys, those of plain calls by other kernels (sm90/load_rows.cuh)."""

from __future__ import annotations

import random

import pytest
import torch
from checks import assert_attention_close, assert_lse_close
from fmha_calls import assert_same_bits, drawn_pages, filled, ragged_twin, run, split_plan
from problems import random_tree_mask

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (64, 40), (96, 80), (128, 128), (104, 128), (192, 128), (256, 256)]
PAGE_SIZES = [1, 1, 3, 5, 20]


@pytest.mark.parametrize("seed", range(70))
def test_any_batch(seed):
    r = random.Random(seed)
    new = [r.choice([0, 1, 17, 64, 130, 300]) for _ in range(r.choice([1, 2, 5]))]
    problem = drawn_pages(r, DIMS, PAGE_SIZES, new, seed)
    options = {"causal": r.random() < 0.7, "window_left": r.choice([-1, -1, 5, 128])}
    more = {"logit_cap": r.choice([0.0, 0.0, 0.0, 30.0])}
    if options["causal"] and max(new) > 0 and r.random() < 0.2:
        more["tree_mask"] = random_tree_mask(new, seed=seed)
    expected_out, expected_lse = problem.expected(**options, **more)
    problem = problem.to("cuda")
    more = {name: value.to("cuda") if torch.is_tensor(value) else value for name, value in more.items()}
    for split_keys in (False, True):
        plan = filled(split_plan(problem, split_keys=split_keys, **options), problem)
        out, lse = run(problem, plan=plan, **options, **more)
        assert_attention_close(out.cpu(), expected_out, problem.q.dtype)
        assert_lse_close(lse.cpu(), expected_lse)


@pytest.mark.parametrize("seed", range(28))
def test_bits_are_those_of_ragged_keys_and_of_other_kernels(seed):
    """A scale of keys, which only the device knows, takes the kernels that have every option."""
    r = random.Random(seed)
    problem = drawn_pages(r, DIMS, PAGE_SIZES, [r.choice([1, 64, 200, 330]) for _ in range(3)], seed).to("cuda")
    ragged = ragged_twin(problem)
    expected, ones = run(ragged), torch.ones(problem.k_pages.shape[-2], device="cuda")
    assert_same_bits(run(problem), expected)
    assert_same_bits(run(problem, k_scale=ones), expected)
    assert_same_bits(run(ragged, k_scale=ones), expected)
