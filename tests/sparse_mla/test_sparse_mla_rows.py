"""Every row of the CUDA table of `sparse_mla`: that a call reaches it, and is right."""

import re
from pathlib import Path

import pytest
import torch
from kernel_rows import reaches
from sparse_calls import assert_right, decode, plan_of, prefill, sparse_problem

TABLE = Path(__file__).parents[2] / "csrc/sparse_mla/op_cuda.cpp"
BF16, FP16 = torch.bfloat16, torch.float16
ROWS = {
    "sm90_list_rows_bf16": {"kind": "bytes", "dtype": BF16},
    "sm90_list_rows_fp16": {"kind": "bytes", "dtype": FP16},
    "sm90_list_shared_bf16": {"kind": "shared_bytes", "dtype": BF16},
    "sm90_list_shared_fp16": {"kind": "shared_bytes", "dtype": FP16, "page_size": 64},
    "sm90_list_few_bf16": {"kind": "own", "dtype": BF16},
    "sm90_list_few_fp16": {"kind": "shared", "dtype": FP16},
    "sm90_list_bf16": {"kind": "own", "dtype": BF16, "heads": 70},
    "sm90_list_fp16": {"kind": "shared", "dtype": FP16, "heads": 70},
    "mma_lists_bf16": {"kind": "shared", "dtype": BF16, "extra_topk": 70},
    "mma_lists_fp16": {"kind": "shared_bytes", "dtype": FP16, "page_size": 2},
}


def test_the_rows_are_those_of_the_table():
    assert re.findall(r'^    \{"(\w+)",', TABLE.read_text(), re.MULTILINE) == list(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_every_row(row):
    lists = {"shape": (3, 2), "heads": 20, "topk": 150, "lengths": True, "holes": True}
    problem = sparse_problem(**lists | ROWS[row], device="cuda")
    with reaches("sparse_mla", row):
        assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    assert_right(problem, *prefill(problem))
    with reaches("sparse_mla", row):
        assert_right(problem, *prefill(problem, with_most=False))


# 8 and 16 heads are one block of 16 rows, 20 and 32 one of 32, the others blocks of 64.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 33, 64, 128])
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("holes", [False, True])
def test_max_logits_come_from_the_kernels_of_16_bit_rows(heads, kind, dtype, holes):
    """What `compat.flash_mla.flash_mla_sparse_fwd` calls, for rows of 576 and of 512 values."""
    row = f"sm90_list_{'few_' if heads <= 32 else ''}{'bf16' if dtype == BF16 else 'fp16'}"
    lists = {"shape": (7, 1), "heads": heads, "topk": 330, "lengths": holes, "holes": holes, "sinks": holes}
    problem = sparse_problem(kind, dtype, page_size=1, device="cuda", **lists)
    with reaches("sparse_mla", row):
        out, lse, most = prefill(problem)
    assert_right(problem, out, lse, most)
    without = prefill(problem, with_most=False)
    assert torch.equal(out, without[0]) and torch.equal(lse, without[1])
    out, lse = decode(problem)
    assert_right(problem, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("requests", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("topk", [64, 700, 2048])
@pytest.mark.parametrize("parts", [None, 7])
def test_lists_of_few_heads_in_pieces_of_every_count(heads, requests, topk, parts):
    """Two parts of a pair, a few, or many share a token. Its bits are the same the second time."""
    problem = sparse_problem(
        "own", BF16, (requests, 1), heads, topk, lengths=True, holes=True, sinks=True, device="cuda"
    )
    plan = plan_of(problem, num_sm_parts=parts)
    with reaches("sparse_mla", "sm90_list_few_bf16"):
        out, lse = decode(problem, plan)
    assert_right(problem, out, lse)
    again = decode(problem, plan)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("heads", [8, 20, 64, 130])
@pytest.mark.parametrize("row", [row for row in ROWS if "shared" in row])
def test_every_row_of_two_lists(row, heads, lengths):
    """The window and the entries of DeepSeek-V4, by blocks of 16, 32 and 64 heads."""
    kind = {**ROWS[row], "page_size": 64, "extra_page_size": 4}
    lists = {"topk": 150, "extra_topk": 200, "lengths": lengths, "holes": True, "sinks": True}
    problem = sparse_problem(**kind, **lists, shape=(3, 2), heads=heads, device="cuda")
    with reaches("sparse_mla", row):
        assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    with reaches("sparse_mla", row):
        assert_right(problem, *prefill(problem, with_most=False))


# Few works for the parts of the plan: blocks of 16 heads, whole or in pieces. More: blocks of 32 and 64.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 17, 61, 128])
@pytest.mark.parametrize(
    "shape,topk", [((1, 1), 60), ((1, 1), 1329), ((5, 1), 192), ((1, 6), 512), ((20, 1), 330), ((150, 2), 130)]
)
@pytest.mark.parametrize("lengths", [False, True])
def test_short_calls_over_rows_of_656_bytes(heads, shape, topk, lengths):
    lists = {"lengths": lengths, "holes": lengths, "sinks": lengths, "page_size": 64 if lengths else 7}
    problem = sparse_problem("bytes", BF16 if heads != 61 else FP16, shape, heads, topk, device="cuda", **lists)
    for parts in (None, 6):
        plan = plan_of(problem, num_sm_parts=parts)
        out, lse = decode(problem, plan)
        assert_right(problem, out, lse)
        again = decode(problem, plan)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert_right(problem, *prefill(problem, with_most=False))


# The same of rows of 584 bytes; some calls by CTAs of a cluster, which merge their pieces themselves.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 17, 61, 64, 128])
@pytest.mark.parametrize(
    "shape,topk,extra",
    [
        ((1, 1), 128, 64),
        ((1, 1), 60, 0),
        ((1, 1), 128, 1329),
        ((5, 1), 128, 192),
        ((2, 6), 128, 300),
        ((17, 1), 128, 512),
    ],
)
@pytest.mark.parametrize("lengths", [False, True])
def test_short_calls_over_rows_of_584_bytes(heads, shape, topk, extra, lengths):
    lists = {"lengths": lengths, "holes": lengths, "sinks": lengths, "page_size": 64, "extra_page_size": 4}
    dtype = BF16 if heads != 61 else FP16
    problem = sparse_problem("shared_bytes", dtype, shape, heads, topk, extra_topk=extra, device="cuda", **lists)
    for parts in (None, 40):
        plan = plan_of(problem, num_sm_parts=parts)
        out, lse = decode(problem, plan)
        assert_right(problem, out, lse)
        for _ in range(3):
            again = decode(problem, plan)
            assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [9, 40, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("holes", [False, True])
def test_scores_far_below_zero_behind_tiles_without_keys(heads, dtype, holes):
    """A row's reference is of its first key, whatever tile that is in. Tokens have few, many or no keys."""
    problem = sparse_problem("own", dtype, (300, 1), heads, 700, 64, holes=holes, lengths=True, device="cuda")
    lists = problem.selected
    problem.q[..., 0], lists.kv_pages[..., 0], lists.values[:, 0] = 30, -100, -100
    lists.indices[::3, :, :130] = -1
    lists.indices[1::3, :, 64:] = -1
    for with_most in (False, True):
        assert_right(problem, *prefill(problem, with_most=with_most))
    assert_right(problem, *decode(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("kind", ["own", "shared", "bytes", "shared_bytes"])
def test_a_token_of_prefill_has_the_same_bits_alone(heads, kind):
    problem = sparse_problem(kind, BF16, (30, 1), heads, 150, 64, lengths=True, holes=True, device="cuda")
    whole = prefill(problem)
    fast = prefill(problem, with_most=False)
    problem.q, lists = problem.q[5:6], problem.selected
    lists.indices, lists.lengths = lists.indices[5:6], lists.lengths[5:6]
    for results, with_most in ((whole, True), (fast, False)):
        for of_all, alone in zip(results, prefill(problem, with_most=with_most), strict=True):
            assert of_all is None or torch.equal(of_all[5:6], alone)
