"""Errors of `block_list` and of its plans name op, argument, what it must be and what it is."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.metadata import BlockDecodePlan, BlockPrefillPlan, XqaDecodePlan
from block_problems import decode_plan, draw_lists, prefill_plan
from problems import paged_problem


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
