"""attnops::xqa_decode on every device: against float64 attention over poisoned pages."""

import pytest
import torch
from problems import FP8, paged_problem
from xqa_decoding import assert_decodes, isas_here

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]
HEADS = [(1, 1), (3, 3), (5, 1), (7, 7), (8, 2), (14, 2), (16, 1), (128, 8), (128, 1)]  # (query, KV)
PAGE_SIZES = [1, 3, 16, 64, 128]


@pytest.fixture(params=isas_here())
def isa(request, monkeypatch):
    """Run the test with every instruction set of this machine."""
    monkeypatch.setenv("ATTNOPS_CPU_ISA", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", ["same", "fp8"])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 8, 40, 248])
def test_every_instruction_set(isa, dtype, kv, head_dim):
    kv_dtype = FP8 if kv == "fp8" else dtype
    problem = paged_problem(
        [130, 1, 0, 77], 2, num_q_heads=14, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype
    )
    assert_decodes(problem, seqlen_q=2)


@pytest.mark.parametrize("heads", HEADS)
def test_every_instruction_set_with_head_counts(isa, heads):
    problem = paged_problem([100, 64, 3], num_q_heads=heads[0], num_kv_heads=heads[1])
    assert_decodes(problem)
