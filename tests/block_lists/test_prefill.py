"""`block_list` of fmha_paged: against float64 over listed keys and new blocks; and what both ops promise."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from attnops.report import first_fault, new_report
from block_problems import (
    SIZES,
    assert_blocks_close,
    blocks_expected,
    decode_blocks,
    draw_lists,
    hide_unlisted,
    prefill_blocks,
    prefill_plan,
)
from op_calls import OpCalls
from problems import FP8, LAYOUTS, paged_problem
from xqa_decoding import captured

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_attends_to_listed_keys_and_new_blocks(sizes, causal, device):
    page_size, block_size, columns = sizes
    layout = LAYOUTS[columns % len(LAYOUTS)]
    problem = paged_problem([300, 64, 0, 40, 129], [70, 64, 0, 1, 33], page_size=page_size, layout=layout).to(device)
    lists = draw_lists(problem, block_size, columns)
    got = prefill_blocks(problem, lists, block_size, causal=causal, csr=layout == "nhd")
    assert_blocks_close(problem, got, blocks_expected(problem, lists, block_size, causal=causal, new_blocks=causal))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_every_dtype_with_sinks_and_scales_by_head(dtype, head_dim, device):
    kinds = {"dtype": BF16, "kv_dtype": FP8, "scales": "head"} if dtype == FP8 else {"dtype": dtype}
    shape = {"num_q_heads": 6, "num_kv_heads": 3, "head_dim": head_dim}
    problem = paged_problem([200, 90], [17, 90], page_size=64, **shape, **kinds).to(device)
    lists = draw_lists(problem, 16, 9)
    options = {"sinks": torch.linspace(-2, 2, 6, device=device), "logit_cap": 30.0}
    got = prefill_blocks(problem, lists, 16, **options)
    assert_blocks_close(problem, got, blocks_expected(problem, lists, 16, new_blocks=True, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_all_blocks_are_dense_attention(device):
    problem = paged_problem([300, 64, 129], page_size=16).to(device)
    lists = torch.arange(19, dtype=torch.int32).expand(3, 2, 19).clone()
    blocks = -(-problem.cache_seqlens.cpu() // 16)
    lists[lists >= blocks.view(3, 1, 1)] = -1
    out, lse = decode_blocks(problem, lists, 16)
    expected = problem.expected()
    assert_blocks_close(problem, (out, lse), expected)
    extend = paged_problem([300, 64, 129], [200, 64, 3], page_size=16).to(device)
    assert_blocks_close(extend, prefill_blocks(extend, lists, 16), extend.expected())


@pytest.mark.parametrize("device", DEVICES)
def test_empty_lists_and_batches(device):
    problem = paged_problem([40, 7], page_size=16).to(device)
    for columns in (0, 3):
        lists = torch.full((2, 2, columns), -1, dtype=torch.int32)
        out, lse = decode_blocks(problem, lists, 16)
        assert not out.any() and (lse == -math.inf).all()
    empty = paged_problem([], page_size=16).to(device)
    out, _ = decode_blocks(empty, torch.zeros(0, 2, 3, dtype=torch.int32), 16)
    assert out.shape[0] == 0
    out, _ = prefill_blocks(empty, torch.zeros(0, 2, 3, dtype=torch.int32), 16)
    assert out.shape[0] == 0


def mixed_problem(device, **options):
    """Requests without tokens, without keys, with new tokens alone, and with a prefix."""
    return paged_problem([300, 64, 0, 40, 129, 20], [70, 0, 0, 1, 33, 20], **options).to(device)


RATIOS = "strides in another ratio"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "given", "launches"),
    [
        ((8, 4), None, 1),
        ((6, 2), "csr", 1),
        ((8, 1), None, 1),
        ((8, 1), "sinks", 1),
        ((8, 4), "sinks", 4),
        ((8, 4), "scales", 4),
        ((8, 4), "small scratch", 4),
        ((8, 4), RATIOS, 4),
    ],
)
def test_all_kv_heads_are_one_launch_where_nothing_is_for_one_alone(heads, given, launches, device):
    kinds = {"kv_dtype": FP8, "scales": "head" if given == "scales" else "tensor"}
    problem = mixed_problem(device, num_q_heads=heads[0], num_kv_heads=heads[1], **kinds)
    if given == RATIOS:
        v_pages = problem.v_pages.transpose(1, 2).contiguous().transpose(1, 2)
        problem = dataclasses.replace(problem, v_pages=v_pages)
    lists = draw_lists(problem, 16, 5)
    plan = prefill_plan(problem, lists, 16, **({"dtype": FP8} if given == "small scratch" else {}))
    rules = {"sinks": torch.linspace(-2, 2, heads[0], device=device)} if given == "sinks" else {}
    with OpCalls() as calls:
        got = prefill_blocks(problem, lists, 16, plan=plan, csr=given == "csr", **rules)
    assert_blocks_close(problem, got, blocks_expected(problem, lists, 16, new_blocks=True, **rules))
    names = ("fmha_paged", "fmha_plan", "build_block_tables")
    assert [calls.count[f"attnops::{name}"] for name in names] == [launches, launches, 1]


def test_one_kv_head_has_no_scratch_and_copies_nothing():
    problem = mixed_problem("cpu", num_kv_heads=1)
    lists = draw_lists(problem, 16, 5)
    plan = prefill_plan(problem, lists, 16)
    assert plan.q_by_head.numel() == plan.out_by_head.numel() == plan.lse_by_head.numel() == 0
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
    with OpCalls() as calls:
        ops.fmha_paged(problem.q, *pages, plan, block_list=lists, return_lse=True)
    assert calls.count["attnops::fmha_paged"] == 1 and calls.count["aten::copy_"] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [16, 1])
@pytest.mark.parametrize("heads", [(8, 2), (5, 5), (4, 1)])
def test_smaller_batches_than_the_plan_is_for_with_padding(heads, block_size, causal, device):
    """Rows of q that nobody owns are NaN, and become zeros. So are keys that no list names."""
    problem = mixed_problem(device, num_q_heads=heads[0], num_kv_heads=heads[1])
    columns, tokens = (5 if block_size > 1 else 60), problem.q.shape[0]
    lists = draw_lists(problem, block_size, columns)
    expected = blocks_expected(problem, lists, block_size, causal=causal, new_blocks=causal)
    problem = hide_unlisted(problem, lists, block_size, new_blocks=causal)
    plan = prefill_plan(problem, lists, block_size, causal=causal, spare=(11, 3))
    padded = torch.cat([problem.q, torch.full_like(problem.q[:9], math.nan)])
    got = prefill_blocks(dataclasses.replace(problem, q=padded), lists, block_size, causal=causal, plan=plan)
    assert_blocks_close(problem, [rows[:tokens] for rows in got], expected)
    assert not got[0][tokens:].any() and (got[1][tokens:] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_front_of_the_first_request_are_not_read(device):
    problem = mixed_problem(device)
    lists = draw_lists(problem, 16, 5)
    front = torch.cat([torch.full_like(problem.q[:3], math.nan), problem.q])
    later = dataclasses.replace(problem, q=front, cu_seqlens_q=problem.cu_seqlens_q + 3)
    out, lse = prefill_blocks(later, lists, 16)
    assert_blocks_close(problem, (out[3:], lse[3:]), blocks_expected(problem, lists, 16, new_blocks=True))


@pytest.mark.parametrize("device", DEVICES)
def test_one_plan_serves_batches_of_other_sizes_in_turn(device):
    largest = mixed_problem(device)
    options = {"split_keys": False}
    plan = prefill_plan(largest, draw_lists(largest, 16, 5), 16, **options)
    batches = [([300, 64, 0, 40, 129, 20], [70, 0, 0, 1, 33, 20]), ([90, 17], [9, 17]), ([], []), ([200], [124])]
    for lengths, new in [*batches, *reversed(batches)]:
        problem = paged_problem(lengths, new, page_size=16).to(device)
        lists = draw_lists(problem, 16, 5)
        got = prefill_blocks(problem, lists, 16, plan=plan)
        alone = prefill_blocks(problem, lists, 16, plan=prefill_plan(largest, lists, 16, **options))
        assert torch.equal(got[0], alone[0]) and torch.equal(got[1], alone[1])
        if lengths:
            assert_blocks_close(problem, got, blocks_expected(problem, lists, 16, new_blocks=True))


def test_fp8_queries_have_results_of_16_bits():
    problem = mixed_problem("cpu", kv_dtype=FP8)
    narrow = dataclasses.replace(problem, q=problem.q.to(FP8))
    lists = draw_lists(problem, 16, 5)
    plan = prefill_plan(narrow, lists, 16)
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    with OpCalls() as calls:
        got = ops.fmha_paged(narrow.q, *pages, plan, block_list=lists, return_lse=True, **scales)
    assert got[0].dtype == BF16 and calls.count["attnops::fmha_paged"] == 1
    assert_blocks_close(problem, got, blocks_expected(narrow, lists, 16, new_blocks=True))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_q_and_out_may_have_gaps(device):
    problem = mixed_problem(device)
    lists = draw_lists(problem, 16, 5)
    tokens, heads, dim = problem.q.shape
    wide_q = torch.full((tokens, heads + 3, dim + 2), math.nan, dtype=BF16, device=device)
    wide_q[:, 2:-1, 1:-1] = problem.q  # rows begin at no word
    wide_out = torch.full((tokens, heads + 2, dim + 8), math.nan, dtype=BF16, device=device)
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
    plan, lists = prefill_plan(problem, lists, 16), lists.to(device)
    expected, _ = ops.fmha_paged(problem.q, *pages, plan, block_list=lists)
    ops.fmha_paged(wide_q[:, 2:-1, 1:-1], *pages, plan, block_list=lists, out=wide_out[:, 1:-1, 8:])
    assert torch.equal(wide_out[:, 1:-1, 8:], expected)
    assert wide_out[:, 0].isnan().all() and wide_out[:, -1].isnan().all() and wide_out[..., :8].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_tree_masks_go_with_lists_of_all_blocks_as_without(device):
    problem = paged_problem([100, 7, 64], [11, 7, 3], page_size=16).to(device)
    seqlens_q = problem.cu_seqlens_q.diff().tolist()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for count in seqlens_q:
        seen = torch.rand(count, 16, generator=generator) < 0.5
        seen[:, :count] |= torch.eye(count, dtype=torch.bool)
        rows.append((seen * (1 << torch.arange(16) % 8)).view(count, 2, 8).sum(2).to(torch.uint8))
    tree_mask = torch.cat(rows).to(device)
    lists = torch.arange(7, dtype=torch.int32).expand(3, 2, 7).clone()
    lists[lists >= -(-problem.cache_seqlens.cpu() // 16).view(3, 1, 1)] = -1
    got = prefill_blocks(problem, lists, 16, tree_mask=tree_mask)
    dense = FmhaPlan.allocate(problem.q.shape[0], 3, num_q_heads=8, num_kv_heads=2, head_dim=64, device=device)
    ops.fmha_plan(dense, problem.cu_seqlens_q, cache_seqlens=problem.cache_seqlens)
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
    expected = ops.fmha_paged(problem.q, *pages, dense, tree_mask=tree_mask, return_lse=True)
    assert_blocks_close(problem, got, (expected[0].cpu().double(), expected[1].cpu().double()))


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_page_is_recorded_and_skipped_for_every_kv_head(device):
    problem = paged_problem([64, 40], [10, 5], page_size=16).to(device)
    lists = torch.arange(4, dtype=torch.int32).expand(2, 2, 4).clone()
    lists[1, :, 3] = -1
    problem.page_table[1, 0] = 2**30
    report = new_report(device)
    out, lse = prefill_blocks(problem, lists, 16, report=report)
    assert (first_fault(report) or "").startswith("attnops::build_block_tables: ")
    problem.page_table[1, 0] = problem.page_table[0, 0]
    lists[1, :, 0] = -1
    expected = blocks_expected(problem, lists, 16, new_blocks=True)
    sure = slice(0, None if device == "cpu" else 10)  # on a GPU a bad page may count as zeros
    assert out.isfinite().all()
    assert_blocks_close(problem, (out[sure], lse[sure]), (expected[0][sure], expected[1][sure]))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 64, 6), (64, 1, 150)])
def test_a_captured_prefill_serves_other_batches(sizes):
    page_size, block_size, columns = sizes
    shape = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 128, "page_size": page_size}
    problem = paged_problem([500, 300, 64, 200], [100, 40, 64, 20], **shape).to("cuda")
    lists = torch.full((4, 4, columns), -1, dtype=torch.int32, device="cuda")
    lengths, bounds = torch.zeros_like(problem.cache_seqlens), torch.zeros_like(problem.cu_seqlens_q)
    plan = prefill_plan(problem, lists, block_size, spare=(0, 2))
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:-1], device="cuda")

    def step():
        pages = (problem.k_pages, problem.v_pages, problem.page_table, lengths, bounds)
        ops.fmha_paged(problem.q, *pages, plan, block_list=lists, out=out, lse=lse)

    graph = captured(step)
    for seed, (now, new) in enumerate([([500, 300, 64, 200], [100, 40, 64, 20]), ([450, 0, 7, 199], [1, 0, 7, 99])]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        bounds.copy_(torch.tensor([0, *new]).cumsum(0).int())
        current = dataclasses.replace(problem, cache_seqlens=lengths, cu_seqlens_q=bounds)
        lists.copy_(draw_lists(current, block_size, columns, seed=seed))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = blocks_expected(current, lists.cpu(), block_size, new_blocks=True)
        assert_blocks_close(current, (out.cpu(), lse.cpu()), expected)
        replayed = out.cpu()
        eager, _ = prefill_blocks(current, lists.cpu(), block_size, plan=plan)
        assert torch.equal(eager, replayed), "a replay has the bits of an eager call"
