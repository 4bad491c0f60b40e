"""Every CPU kernel, by capping the instruction set; on processors without one, its name runs the next weaker."""

import pytest
import torch
from attnops import ops
from fmha_calls import assert_right, plan_of, run
from problems import FP8, paged_problem, ragged_problem, random_tree_mask

ISAS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CPU_ISA", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 128])
def test_prefill_and_options(isa, dtype, head_dim):
    problem = ragged_problem([70, 3, 1], [70, 140, 0], dtype=dtype, head_dim=head_dim, num_q_heads=6)
    assert_right(problem)
    sinks = torch.linspace(-1, 1, 6)
    assert_right(problem, window_left=20, logit_cap=4.0, sinks=sinks)
    assert_right(problem, causal=False, window_right=9, softmax_scale=-0.05)


@pytest.mark.parametrize("kv_dtype", [*DTYPES, FP8])
def test_extend(isa, kv_dtype):
    lengths = [5, 40]
    dtype = torch.bfloat16 if kv_dtype == FP8 else kv_dtype
    problem = paged_problem([90, 150], lengths, page_size=3, dtype=dtype, kv_dtype=kv_dtype)
    assert_right(problem, csr=True)
    assert_right(problem, tree_mask=random_tree_mask(lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_alone_and_in_a_batch(isa, dtype):
    batch = run(ragged_problem([33, 70], dtype=dtype, padding=0))
    problem = ragged_problem([33, 70], dtype=dtype, padding=0)
    bounds = torch.tensor([0, 70], dtype=torch.int32)
    single = type(problem)(problem.q[33:], problem.k[33:], problem.v[33:], bounds, bounds, None, None)
    assert torch.equal(run(single)[0], batch[0][33:])


def test_unknown_name_is_an_error(monkeypatch):
    monkeypatch.setenv("ATTNOPS_CPU_ISA", "sse9")
    problem = ragged_problem([4], padding=0)
    plan = plan_of(problem)
    with pytest.raises(
        RuntimeError, match="ATTNOPS_CPU_ISA must be scalar, avx2, avx512, avx512_bf16 or amx, got sse9"
    ):
        ops.fmha_varlen(problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan)
