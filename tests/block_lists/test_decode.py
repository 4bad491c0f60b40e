"""`block_list` of xqa_decode: against float64 over the listed keys alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attnops import ops
from attnops.metadata import BlockDecodePlan, XqaDecodePlan
from block_problems import SIZES, assert_blocks_close, blocks_expected, decode_blocks, decode_plan, draw_lists
from problems import FP8, LAYOUTS, paged_problem
from xqa_decoding import captured

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [300, 64, 0, 1, 129, 63]


def check_decode(problem, block_size, columns, *, seqlen_q=1, seed=1, **options):
    lists = draw_lists(problem, block_size, columns, seed=seed)
    got = decode_blocks(problem, lists, block_size, seqlen_q=seqlen_q, **options)
    for name in ("csr", "num_sm_parts", "fixed_split_tokens", "seqlen_q"):
        options.pop(name, None)
    assert_blocks_close(problem, got, blocks_expected(problem, lists, block_size, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_attends_to_the_listed_keys_alone(sizes, layout, device):
    page_size, block_size, columns = sizes
    problem = paged_problem(LENGTHS, page_size=page_size, layout=layout).to(device)
    check_decode(problem, block_size, columns, csr=layout == "hnd")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP8])
@pytest.mark.parametrize("heads", [(8, 1, 128), (6, 3, 64), (16, 1, 256), (5, 5, 72)])
@pytest.mark.parametrize("block_size", [64, 1])
def test_decode_of_every_dtype_and_head_dim(dtype, heads, block_size, device):
    num_q_heads, num_kv_heads, head_dim = heads
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    kinds = {"dtype": BF16, "kv_dtype": FP8} if dtype == FP8 else {"dtype": dtype}
    problem = paged_problem(LENGTHS, page_size=64, **shape, **kinds).to(device)
    check_decode(problem, block_size, 150 if block_size == 1 else 4, num_sm_parts=None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(16, 16, 9), (64, 4, 60)])
def test_decode_of_several_tokens(sizes, causal, device):
    page_size, block_size, columns = sizes
    problem = paged_problem([300, 64, 3, 129], 3, page_size=page_size).to(device)
    check_decode(problem, block_size, columns, seqlen_q=3, causal=causal, logit_cap=20.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP8])
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (6, 6)])
def test_decode_with_sinks(heads, dtype, device):
    """Of one KV head in the kernels, of several behind them. The lse is without them unless asked for."""
    kinds = {"dtype": BF16, "kv_dtype": FP8} if dtype == FP8 else {"dtype": dtype}
    problem = paged_problem(LENGTHS, page_size=16, num_q_heads=heads[0], num_kv_heads=heads[1], **kinds).to(device)
    sinks = torch.linspace(-3, 6, heads[0], device=device)
    check_decode(problem, 16, 9, sinks=sinks)
    lists = draw_lists(problem, 16, 9)
    plain, joined = (decode_blocks(problem, lists, 16, sinks=sinks, sinks_in_lse=both) for both in (False, True))
    assert torch.equal(plain[0], joined[0])
    expected = torch.where(plain[1] == -math.inf, plain[1], torch.logaddexp(plain[1], sinks.cpu()))
    torch.testing.assert_close(joined[1], expected, rtol=1e-6, atol=1e-6)
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    plan = decode_plan(problem, lists, 16, num_sm_parts=3)
    bare, lse = ops.xqa_decode(problem.q, *pages, plan, block_list=lists.to(device), sinks=sinks, **scales)
    assert lse is None and torch.equal(bare.cpu(), plain[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_sinks_that_are_parameters_leave_no_gradients_behind(num_kv_heads, device):
    problem = paged_problem([40, 20], page_size=16, num_kv_heads=num_kv_heads).to(device)
    lists = draw_lists(problem, 16, 3)
    plan, sinks = decode_plan(problem, lists, 16), torch.nn.Parameter(torch.linspace(-2, 2, 8, device=device))
    given = {"sinks_in_lse": True}
    got = decode_blocks(problem, lists, 16, plan=plan, sinks=sinks, **given)
    expected = decode_blocks(problem, lists, 16, plan=plan, sinks=sinks.detach(), **given)
    assert not plan.sink_lse.requires_grad
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 40, 70, 1000])
@pytest.mark.parametrize("sizes", [(16, 16, 9), (64, 4, 60), (16, 64, 4), (24, 16, 7), (64, 1, 150)])
def test_decode_with_windows(sizes, window_left, device):
    """A window begins within a block and within a page, of one token and of several, with sinks."""
    page_size, block_size, columns = sizes
    problem = paged_problem(LENGTHS, page_size=page_size).to(device)
    check_decode(problem, block_size, columns, window_left=window_left, csr=window_left == 16)
    several = paged_problem([300, 64, 3, 129], 3, page_size=page_size, layout="hnd").to(device)
    sinks = torch.linspace(-2, 2, 8, device=device)
    rules = {"window_left": window_left, "seqlen_q": 3, "sinks": sinks, "num_sm_parts": None}
    for causal in (True, False):
        check_decode(several, block_size, columns, causal=causal, **rules)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_and_lists_of_all_blocks_are_a_dense_window(device):
    problem = paged_problem([300, 64, 129], page_size=16).to(device)
    lists = torch.arange(19, dtype=torch.int32).expand(3, 2, 19).clone()
    lists[lists >= -(-problem.cache_seqlens.cpu() // 16).view(3, 1, 1)] = -1
    got = decode_blocks(problem, lists, 16, window_left=45)
    dense = XqaDecodePlan.allocate(3, num_q_heads=8, num_kv_heads=2, head_dim=64, window_left=45, device=device)
    ops.xqa_decode_plan(dense, problem.cache_seqlens)
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
    expected = ops.xqa_decode(problem.q, *pages, dense, window_left=45, return_lse=True)
    assert_blocks_close(problem, got, (expected[0].cpu().double(), expected[1].cpu().double()))


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_has_the_same_bits_alone(device):
    problem = paged_problem([300, 200], page_size=16).to(device)
    lists = draw_lists(problem, 16, 12)
    both, _ = decode_blocks(problem, lists, 16, fixed_split_tokens=64)
    tables, lengths = problem.page_table[1:].contiguous(), problem.cache_seqlens[1:].contiguous()
    plan = BlockDecodePlan.allocate(
        1,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        num_blocks=12,
        block_size=16,
        page_size=16,
        num_sm_parts=2,
        fixed_split_tokens=64,
        device=device,
    )
    own = lists[1:].to(device)
    pages = (problem.k_pages, problem.v_pages, tables, lengths)
    alone, _ = ops.xqa_decode(problem.q[1:].contiguous(), *pages, plan, block_list=own)
    assert torch.equal(alone.cpu(), both[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_is_listed_twice_counts_twice_unless_the_length_cuts_it(device):
    problem = paged_problem([40], page_size=16).to(device)
    lists = torch.tensor([[[0, 0, 2, 2], [1, -1, 1, 0]]], dtype=torch.int32)
    got = decode_blocks(problem, lists, 16)
    assert_blocks_close(problem, got, blocks_expected(problem, lists, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("rules", ["plain", "sinks", "window"])
@pytest.mark.parametrize("sizes", [(64, 64, 6), (64, 16, 12), (64, 1, 150)])
def test_a_captured_call_serves_other_lists_lengths_and_tables(sizes, rules):
    rules = {"sinks": {"sinks": torch.linspace(-2, 2, 16, device="cuda")}, "window": {"window_left": 75}}.get(rules, {})
    page_size, block_size, columns = sizes
    shape = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 128, "page_size": page_size}
    problem = paged_problem([500, 300, 64, 200], **shape).to("cuda")
    lists = torch.full((4, 4, columns), -1, dtype=torch.int32, device="cuda")
    lengths, table = torch.zeros_like(problem.cache_seqlens), torch.full_like(problem.page_table, 2**30)
    plan = decode_plan(problem, lists, block_size, window_left=rules.get("window_left", -1))
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:-1], device="cuda")

    def step():
        pages = (problem.k_pages, problem.v_pages, table, lengths)
        ops.xqa_decode(problem.q, *pages, plan, block_list=lists, out=out, lse=lse, **rules)

    graph = captured(step)
    for seed, now in enumerate([[500, 300, 64, 200], [1, 0, 33, 199], [450, 300, 1, 64]]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        table.fill_(2**30)
        for b, length in enumerate(now):
            pages, whole = -(-length // page_size), length // page_size
            table[b, :pages] = problem.page_table[b, :pages]
            table[b, :whole] = problem.page_table[b, :whole].flip(0)
        current = dataclasses.replace(problem, cache_seqlens=lengths, page_table=table)
        lists.copy_(draw_lists(current, block_size, columns, seed=seed))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_blocks_close(current, (out.cpu(), lse.cpu()), blocks_expected(current, lists.cpu(), block_size, **rules))
        eager, _ = decode_blocks(current, lists.cpu(), block_size, plan=plan, **rules)
        assert torch.equal(eager, out.cpu()), "a replay has the bits of an eager call"


@pytest.mark.gpu
def test_a_pool_above_4_gb():
    """Pages of the views are int32, their addresses are not."""
    pages, page_size, heads, dim = 40_000, 64, 8, 128
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    pool = torch.full((2, pages, page_size, heads, dim), math.nan, dtype=BF16, device="cuda")
    small = paged_problem([300, 129], page_size=page_size, num_q_heads=16, num_kv_heads=heads, head_dim=dim).to("cuda")
    count = small.k_pages.shape[0]
    pool[0, -count:], pool[1, -count:] = small.k_pages, small.v_pages
    lists = draw_lists(small, 16, 12)
    expected = blocks_expected(small, lists, 16)
    moved = dataclasses.replace(
        small, k_pages=pool[0], v_pages=pool[1], page_table=(small.page_table + (pages - count)).int()
    )
    assert_blocks_close(small, decode_blocks(moved, lists, 16), expected)
