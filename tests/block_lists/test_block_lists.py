"""`block_list` of xqa_decode and fmha_paged: against float64 over the listed keys alone."""

from __future__ import annotations

import collections
import dataclasses
import math

import pytest
import torch
from attnops import ops
from attnops.metadata import BlockDecodePlan, BlockPrefillPlan, FmhaPlan, XqaDecodePlan
from attnops.report import first_fault, new_report
from block_problems import (
    blocks_expected,
    decode_blocks,
    decode_plan,
    draw_lists,
    hide_unlisted,
    prefill_blocks,
    prefill_plan,
)
from checks import assert_attention_close, assert_lse_close
from problems import FP8, LAYOUTS, paged_problem
from torch.utils._python_dispatch import TorchDispatchMode
from xqa_decoding import captured

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [300, 64, 0, 1, 129, 63]
# (page_size, block_size, columns): a block is a page, some of it, several pages, and neither
SIZES = [
    (16, 16, 9),
    (64, 64, 4),
    (64, 16, 12),
    (16, 64, 4),
    (64, 1, 150),
    (1, 1, 40),
    (16, 128, 3),
    (24, 16, 7),
    (5, 3, 30),
]


def assert_close(problem, got, expected):
    assert_attention_close(got[0], expected[0], problem.q.dtype)
    assert_lse_close(got[1], expected[1], atol=2e-4 if problem.k_pages.dtype == FP8 else 1e-4)
    assert not got[0][expected[1] == -math.inf].any(), "a row without keys must be zero"


def check_decode(problem, block_size, columns, *, seqlen_q=1, seed=1, **options):
    lists = draw_lists(problem, block_size, columns, seed=seed)
    got = decode_blocks(problem, lists, block_size, seqlen_q=seqlen_q, **options)
    for name in ("csr", "num_sm_parts", "fixed_split_tokens", "seqlen_q"):
        options.pop(name, None)
    assert_close(problem, got, blocks_expected(problem, lists, block_size, **options))


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
    assert_close(problem, got, (expected[0].cpu().double(), expected[1].cpu().double()))


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
    assert_close(problem, got, blocks_expected(problem, lists, 16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_attends_to_listed_keys_and_new_blocks(sizes, causal, device):
    page_size, block_size, columns = sizes
    layout = LAYOUTS[columns % len(LAYOUTS)]
    problem = paged_problem([300, 64, 0, 40, 129], [70, 64, 0, 1, 33], page_size=page_size, layout=layout).to(device)
    lists = draw_lists(problem, block_size, columns)
    got = prefill_blocks(problem, lists, block_size, causal=causal, csr=layout == "nhd")
    assert_close(problem, got, blocks_expected(problem, lists, block_size, causal=causal, new_blocks=causal))


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
    assert_close(problem, got, blocks_expected(problem, lists, 16, new_blocks=True, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_all_blocks_are_dense_attention(device):
    problem = paged_problem([300, 64, 129], page_size=16).to(device)
    lists = torch.arange(19, dtype=torch.int32).expand(3, 2, 19).clone()
    blocks = -(-problem.cache_seqlens.cpu() // 16)
    lists[lists >= blocks.view(3, 1, 1)] = -1
    out, lse = decode_blocks(problem, lists, 16)
    expected = problem.expected()
    assert_close(problem, (out, lse), expected)
    extend = paged_problem([300, 64, 129], [200, 64, 3], page_size=16).to(device)
    assert_close(extend, prefill_blocks(extend, lists, 16), extend.expected())


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


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


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
    with Calls() as calls:
        got = prefill_blocks(problem, lists, 16, plan=plan, csr=given == "csr", **rules)
    assert_close(problem, got, blocks_expected(problem, lists, 16, new_blocks=True, **rules))
    names = ("fmha_paged", "fmha_plan", "build_block_tables")
    assert [calls.count[f"attnops::{name}"] for name in names] == [launches, launches, 1]


def test_one_kv_head_has_no_scratch_and_copies_nothing():
    problem = mixed_problem("cpu", num_kv_heads=1)
    lists = draw_lists(problem, 16, 5)
    plan = prefill_plan(problem, lists, 16)
    assert plan.q_by_head.numel() == plan.out_by_head.numel() == plan.lse_by_head.numel() == 0
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
    with Calls() as calls:
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
    assert_close(problem, [rows[:tokens] for rows in got], expected)
    assert not got[0][tokens:].any() and (got[1][tokens:] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_front_of_the_first_request_are_not_read(device):
    problem = mixed_problem(device)
    lists = draw_lists(problem, 16, 5)
    front = torch.cat([torch.full_like(problem.q[:3], math.nan), problem.q])
    later = dataclasses.replace(problem, q=front, cu_seqlens_q=problem.cu_seqlens_q + 3)
    out, lse = prefill_blocks(later, lists, 16)
    assert_close(problem, (out[3:], lse[3:]), blocks_expected(problem, lists, 16, new_blocks=True))


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
            assert_close(problem, got, blocks_expected(problem, lists, 16, new_blocks=True))


def test_fp8_queries_have_results_of_16_bits():
    problem = mixed_problem("cpu", kv_dtype=FP8)
    narrow = dataclasses.replace(problem, q=problem.q.to(FP8))
    lists = draw_lists(problem, 16, 5)
    plan = prefill_plan(narrow, lists, 16)
    pages = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, problem.cu_seqlens_q)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    with Calls() as calls:
        got = ops.fmha_paged(narrow.q, *pages, plan, block_list=lists, return_lse=True, **scales)
    assert got[0].dtype == BF16 and calls.count["attnops::fmha_paged"] == 1
    assert_close(problem, got, blocks_expected(narrow, lists, 16, new_blocks=True))


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
    assert_close(problem, got, (expected[0].cpu().double(), expected[1].cpu().double()))


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
    assert_close(problem, (out[sure], lse[sure]), (expected[0][sure], expected[1][sure]))


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
        assert_close(current, (out.cpu(), lse.cpu()), expected)
        replayed = out.cpu()
        eager, _ = prefill_blocks(current, lists.cpu(), block_size, plan=plan)
        assert torch.equal(eager, replayed), "a replay has the bits of an eager call"


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
        assert_close(current, (out.cpu(), lse.cpu()), blocks_expected(current, lists.cpu(), block_size, **rules))
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
    assert_close(small, decode_blocks(moved, lists, 16), expected)


def right_decode():
    problem = paged_problem([40, 20], page_size=16)
    lists = draw_lists(problem, 16, 3)
    pages = {"k_pages": problem.k_pages, "v_pages": problem.v_pages, "page_table": problem.page_table}
    rest = {"cache_seqlens": problem.cache_seqlens, "plan": decode_plan(problem, lists, 16), "block_list": lists}
    return {"q": problem.q, **pages, **rest}


PLAIN_PLAN = XqaDecodePlan.allocate(2, num_q_heads=8, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": PLAIN_PLAN}, "plan must be a BlockDecodePlan"),
        ({"block_list": None}, "block_list must be given"),
        ({"window_left": 8}, "window_left -1, the call has 8"),
        ({"sinks": torch.zeros(7)}, r"sinks must be torch.float32 \[8\] on cpu, got torch.float32 \[7\] on cpu"),
        ({"sinks": torch.zeros(8).bfloat16()}, "sinks must be torch.float32 .* got torch.bfloat16"),
        ({"tree_mask": torch.ones(2, 1, 1, dtype=torch.uint8)}, "tree_mask must be None with block_list"),
        ({"tree_keys": 4}, "tree_keys must be 0 with block_list, got 4"),
        ({"k_scale": torch.ones(2)}, r"k_scale.shape\[0\] must be 1 with block_list, got 2"),
        ({"block_list": torch.zeros(2, 2, 4, dtype=torch.int32)}, "num_blocks 3, the call has 4"),
        ({"q": torch.zeros(2, 6, 64).bfloat16()}, "num_q_heads 8, the call has 6"),
        ({"q": torch.zeros(2, 9, 64).bfloat16()[:, :8]}, r"q must have its tokens and heads at one distance"),
    ],
)
def test_decode_errors_name_the_argument(change, words):
    with pytest.raises(ValueError, match=f"attnops::xqa_decode: .*{words}"):
        ops.xqa_decode(**{**right_decode(), **change})


def test_pools_whose_strides_have_other_ratios_are_refused():
    given = right_decode()
    given["v_pages"] = given["v_pages"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="k_pages and v_pages must have strides in one ratio"):
        ops.xqa_decode(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_list": None}, "block_list must be given"),
        ({"window_left": 8}, "window_left must be -1 with block_list, got 8"),
        ({"window_right": 8}, "window_right must be -1 with block_list, got 8"),
        ({"hidden_keys": torch.zeros(5, 2, dtype=torch.int32)}, "hidden_keys must be None with block_list"),
        ({"causal": False}, "causal True, the call has False"),
        ({"q": torch.zeros(9, 8, 64).bfloat16()}, "make one for 9 tokens, this one is for at most 5"),
        ({"q": torch.zeros(5, 8, 32).bfloat16()}, r"q must be torch.bfloat16 .5, 8, 64. on cpu .* got .* .5, 8, 32."),
        ({"out": torch.zeros(5, 8, 64)}, r"out must be torch.bfloat16 .5, 8, 64. on cpu .* got torch.float32"),
        ({"lse": torch.zeros(5, 2, 4)}, r"lse must be torch.float32 .5, 8. on cpu .* got .* .5, 2, 4."),
        ({"cu_seqlens_q": torch.tensor([0, 3, 5])}, r"cu_seqlens_q must be torch.int32 .3. .* got torch.int64"),
    ],
)
def test_prefill_errors_name_the_argument(change, words):
    problem = paged_problem([40, 20], [3, 2], page_size=16)
    lists = draw_lists(problem, 16, 3)
    given = {"q": problem.q, "k_pages": problem.k_pages, "v_pages": problem.v_pages, "page_table": problem.page_table}
    given |= {"cache_seqlens": problem.cache_seqlens, "cu_seqlens_q": problem.cu_seqlens_q}
    given |= {"plan": prefill_plan(problem, lists, 16), "block_list": lists}
    ops.fmha_paged(**given)
    with pytest.raises(ValueError, match=f"attnops::fmha_paged: .*{words}"):
        ops.fmha_paged(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_q_heads": 7}, "num_q_heads must be a positive multiple of num_kv_heads"),
        ({"num_blocks": -1}, "num_blocks must be in"),
        ({"block_size": 0}, "block_size must be in"),
        ({"page_size": 0}, "page_size must be in"),
        ({"num_blocks": 1 << 25, "block_size": 64}, "num_blocks [*] block_size must be at most"),
    ],
)
def test_plans_name_what_is_out_of_range(change, words):
    given = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "num_blocks": 4, "block_size": 16, "page_size": 16}
    with pytest.raises(ValueError, match=f"BlockDecodePlan.allocate: {words}"):
        BlockDecodePlan.allocate(2, **{**given, **change})
    with pytest.raises(ValueError, match=r"BlockDecodePlan\.allocate: window_left must be in"):
        BlockDecodePlan.allocate(2, **given, window_left=-2)
    with pytest.raises(ValueError, match=f"BlockPrefillPlan.allocate: {words}"):
        BlockPrefillPlan.allocate(9, 2, **{**given, **change})


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((-1, 2), "max_num_tokens must be in"),
        ((9, -1), "max_batch_size must be in"),
        ((1 << 30, 2), "num_kv_heads [*] max_num_tokens must be in"),
    ],
)
def test_limits_of_a_prefill_plan_are_checked_before_memory_is_asked_for(limits, words):
    given = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "num_blocks": 4, "block_size": 16, "page_size": 16}
    with pytest.raises(ValueError, match=f"BlockPrefillPlan.allocate: {words}"):
        BlockPrefillPlan.allocate(*limits, **given)
