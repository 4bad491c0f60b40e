"""attnops::xqa_decode on a GPU: what a kernel reads ahead of its turn, while the one before it may still write it."""

import dataclasses
import math

import pytest
import torch
from attnops import ops
from problems import paged_problem
from xqa_decoding import make_plan

pytestmark = pytest.mark.gpu

# Clusters over boxes, and the plan's kernels over boxes and over rows that are gathered.
GUESSES = pytest.mark.parametrize(("heads", "page_size"), [((32, 8), 64), ((64, 1), 64), ((64, 1), 24), ((32, 8), 24)])


def problem_of(length, heads, page_size):
    """One request."""
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128, "page_size": page_size}
    return paged_problem([length], **geometry).to("cuda")


@GUESSES
def test_lengths_written_by_the_kernel_before(heads, page_size):
    """A length that was guessed must not reach the result."""
    lengths = [1000, 3, 640, 1, 999, 64, 1000, 1024]
    problem = problem_of(1024, heads, page_size)
    now = [dataclasses.replace(problem, cache_seqlens=torch.tensor([n], dtype=torch.int32).cuda()) for n in lengths]
    plans = [make_plan(one, num_sm_parts=None) for one in now]
    outs = [torch.full_like(problem.q, math.nan) for _ in lengths]
    # A plan that cuts every 64 tokens counts the cuts, and lets the kernel after it start at once.
    bounds, row = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros(1, 8, dtype=torch.int32, device="cuda")
    longer = [one.cache_seqlens * 64 for one in now]
    torch.cuda.synchronize()
    for tokens, plan, out in zip(longer, plans, outs, strict=True):
        torch.ops.attnops.xqa_decode_plan(row, bounds, tokens, 1, 1, -1, 64)
        ops.xqa_decode(problem.q, problem.k_pages, problem.v_pages, problem.page_table, bounds[1:], plan, out=out)
    for one, out in zip(now, outs, strict=True):
        expected, _ = one.expected()
        torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=4e-3)


@GUESSES
def test_pages_written_by_the_kernel_before(heads, page_size):
    """As above, of a page table: tiles copied from guessed pages must not reach the result."""
    pages = [3, 1, 2, 2, 5, 1, 4]
    problem = problem_of(6 * page_size, heads, page_size)
    problem.k_pages.nan_to_num_(0.5), problem.v_pages.nan_to_num_(0.5)
    one_page = torch.tensor([page_size], dtype=torch.int32, device="cuda")
    bounds, row = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros(1, 8, dtype=torch.int32, device="cuda")
    tables = [torch.tensor([[page]], dtype=torch.int32, device="cuda") for page in pages]
    now = [dataclasses.replace(problem, cache_seqlens=one_page, page_table=table) for table in tables]
    plans = [make_plan(one, num_sm_parts=None) for one in now]
    outs = [torch.full_like(problem.q, math.nan) for _ in pages]
    tokens = [table.view(1) * 64 for table in tables]  # a plan that cuts every 64 tokens counts to the page's number
    torch.cuda.synchronize()
    for written, plan, out in zip(tokens, plans, outs, strict=True):
        torch.ops.attnops.xqa_decode_plan(row, bounds, written, 1, 1, -1, 64)
        ops.xqa_decode(problem.q, problem.k_pages, problem.v_pages, bounds[1:].view(1, 1), one_page, plan, out=out)
    for one, out in zip(now, outs, strict=True):
        expected, _ = one.expected()
        torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=4e-3)
