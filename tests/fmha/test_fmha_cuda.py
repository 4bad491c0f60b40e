"""fmha_varlen and fmha_paged on a GPU: every row of the table against float64, over memory full of NaN."""

import math
import random
import re
from pathlib import Path

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from fmha_calls import assert_right, assert_same_bits, plan_of, run
from problems import FP8, paged_problem, ragged_problem, random_tree_mask

pytestmark = pytest.mark.gpu

TABLE = (Path(__file__).parents[2] / "csrc/fmha/impls.cpp").read_text()
ROWS = re.findall(r'^    \{"(\w+)",', TABLE, re.MULTILINE)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = [(64, 64), (40, 40), (72, 72), (96, 80), (128, 128), (192, 128), (104, 64), (192, 192), (256, 256)]
DIMS += [(320, 256), (576, 512)]  # of the rows that take any dims


def counts() -> dict[str, int]:
    lines = (line.split() for line in torch.ops.attnops.impl_counts_cuda().splitlines())
    return {row: int(count) for op, row, count in lines if op.startswith("fmha")}


def test_dims_reach_every_row():
    before = counts()
    for dtype in DTYPES.values():
        for head_dim, head_dim_v in DIMS:
            problem = ragged_problem([70, 3], head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype).to("cuda")
            assert_right(problem)
    after = counts()
    assert {row for row in ROWS if after.get(row, 0) > before.get(row, 0)} == set(ROWS)


@pytest.mark.parametrize("seed", range(60))
def test_any_ragged_batch(seed):
    r = random.Random(seed)
    lengths = [r.choice([0, 1, 3, 17, 64, 100, 129, 300, 513]) for _ in range(r.choice([1, 2, 3, 6]))]
    keys = [r.choice([n, n + 5, n + 700, 0, 50]) for n in lengths]
    kv_heads, (head_dim, head_dim_v) = r.choice([1, 2, 3, 5, 8]), r.choice(DIMS)
    causal = r.random() < 0.7
    tree = causal and max(lengths) > 0 and r.random() < 0.3
    if tree:
        keys = [max(pair) for pair in zip(keys, lengths, strict=True)]
    problem = ragged_problem(
        lengths,
        keys,
        num_q_heads=kv_heads * r.choice([1, 2, 3, 4, 7, 16, 71]),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=r.choice(list(DTYPES.values())),
        padding=0 if tree else 3,
        seed=seed,
    ).to("cuda")
    options = {
        "causal": causal,
        "window_left": r.choice([-1, -1, 0, 5, 128]),
        "window_right": r.choice([-1, -1, 0, 7]),
        "logit_cap": r.choice([0.0, 0.0, 30.0]),
        "softmax_scale": r.choice([1, 1, -1, 0]) / math.sqrt(head_dim),
    }
    if r.random() < 0.3:
        options["sinks"] = torch.randn(problem.q.shape[1], device="cuda")
    if tree:
        options["tree_mask"] = random_tree_mask(lengths, seed=seed).cuda()
    assert_right(problem, tile_q=r.choice([1, 16, 32, 50, 64, 128, 300]), **options)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24, 48, 64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["as q", "e4m3"])
@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
def test_pages_of_any_size(page_size, kv_dtype, csr):
    for seed, window_left in enumerate([-1, 100]):
        problem = paged_problem(
            [700, 130, 0, 64, 1], [200, 130, 0, 1, 1], head_dim=128, page_size=page_size, kv_dtype=kv_dtype, seed=seed
        ).to("cuda")
        assert_right(problem, csr=csr, window_left=window_left, tile_q=32)


def test_bits_do_not_depend_on_the_batch_or_the_plan():
    alone = paged_problem([900], [300], head_dim=128, page_size=64).to("cuda")
    assert_same_bits(run(alone, tile_q=32), run(alone, tile_q=32))
    whole = run(alone, tile_q=32)
    plan = plan_of(alone, tile_q=32, spare=4000)
    assert not plan.semaphores.any()
    for _ in range(20):
        assert_same_bits(whole, run(alone, tile_q=32, spare=4000))


def test_counters_are_left_at_zero_and_a_plan_serves_again():
    plan = FmhaPlan.allocate(4096, 16, num_q_heads=8, num_kv_heads=2, device="cuda")
    for seed, lengths in enumerate([[4000], [5, 1, 900], [0, 0], [], [300] * 13]):
        problem = ragged_problem(lengths, head_dim=64, padding=0, seed=seed).to("cuda")
        ops.fmha_plan(plan, problem.cu_seqlens_q, problem.cu_seqlens_k)
        out, _ = ops.fmha_varlen(problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan)
        assert torch.isfinite(out).all()
        assert not plan.semaphores.any()


def test_a_page_outside_the_pool_is_not_read():
    problem = paged_problem([300, 200], [50, 200], head_dim=128, page_size=64).to("cuda")
    for page in (-1, -(2**31), 2**31 - 1, problem.k_pages.shape[0]):
        problem.page_table[0, 1] = page
        out, _ = run(problem, tile_q=32)
        torch.cuda.synchronize()
        assert torch.isfinite(out[50:250]).all()
