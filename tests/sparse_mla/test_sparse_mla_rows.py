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
    "sm90_list_bf16": {"kind": "own", "dtype": BF16},
    "sm90_list_fp16": {"kind": "own", "dtype": FP16},
    "mma_lists_bf16": {"kind": "shared", "dtype": BF16},
    "mma_lists_fp16": {"kind": "shared_bytes", "dtype": FP16, "page_size": 2},
}


def test_the_rows_are_those_of_the_table():
    assert re.findall(r'^    \{"(\w+)",', TABLE.read_text(), re.MULTILINE) == list(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_every_row(row):
    problem = sparse_problem(**ROWS[row], shape=(3, 2), heads=20, topk=150, lengths=True, holes=True, device="cuda")
    with reaches("sparse_mla", row):
        assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    assert_right(problem, *prefill(problem))
    with reaches("sparse_mla", row):
        assert_right(problem, *prefill(problem, with_most=False))


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
