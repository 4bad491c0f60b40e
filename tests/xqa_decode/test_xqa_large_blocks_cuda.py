"""attnops::xqa_decode on a GPU: 129 to 192 rows of many works, which three warpgroups of a CTA share."""

import random

import pytest
import torch
from attnops import ops, reference
from attnops.metadata import XqaDecodePlan
from attnops.metadata.plan_parts import XQA_LEAST_LARGE_WORKS, XQA_SMALL_BLOCK, xqa_num_sm_parts
from problems import paged_problem
from xqa_decoding import assert_decodes, check_replays, make_plan

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
REQUESTS = -(-XQA_LEAST_LARGE_WORKS // 3)


def lengths_for(tokens: int, longest: int = 700) -> list[int]:
    rng = random.Random(tokens)
    drawn = [rng.choice([tokens, 64, 65, 128, longest, rng.randint(tokens, longest)]) for _ in range(REQUESTS - 3)]
    return [*drawn, 0, longest * 3, tokens]


@pytest.mark.parametrize("num_sm_parts", [5, None])
@pytest.mark.parametrize("page_size", [64, 16, 5])
@pytest.mark.parametrize(
    ("heads", "tokens", "head_dim", "dtype"),
    [
        (48, 12, 128, BF16),  # 192 rows
        (48, 9, 64, BF16),  # the last group has 16 rows
        (129, 3, 112, FP16),  # one row
        (54, 8, 72, BF16),
        (36, 16, 40, FP16),
        (33, 13, 128, BF16),
    ],
)
def test_rows_of_three_groups(heads, tokens, head_dim, dtype, page_size, num_sm_parts):
    problem = paged_problem(
        lengths_for(tokens),
        tokens,
        num_q_heads=heads,
        num_kv_heads=3,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    ).to("cuda")
    assert_decodes(problem, seqlen_q=tokens, num_sm_parts=num_sm_parts)


@pytest.mark.parametrize("page_size", [32, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 20},
        {"window_left": 191},
        {"logit_cap": 5.0},
        {"sinks": True},
        {"tree": True},
        {"softmax_scale": -0.3},
        {"softmax_scale": 2.0},  # maxima grow from tile to tile
    ],
)
def test_rules_of_three_groups(options, head_dim, page_size):
    tokens, heads = 9, 54
    problem = paged_problem(
        lengths_for(tokens), tokens, num_q_heads=heads, num_kv_heads=3, head_dim=head_dim, page_size=page_size
    ).to("cuda")
    rules = dict(options)
    if rules.pop("sinks", False):
        rules["sinks"] = torch.randn(heads, device="cuda")
    if rules.pop("tree", False):
        visible = torch.rand(REQUESTS, tokens, tokens) < 0.5
        rules["tree_mask"] = (
            reference.pack_tree_mask(visible | torch.eye(tokens, dtype=torch.bool)).flatten(0, 1).cuda()
        )
    assert_decodes(problem, seqlen_q=tokens, num_sm_parts=None, **rules)


def test_one_graph_serves_any_lengths():
    tokens = 4
    problem = paged_problem([2112] * REQUESTS, tokens, num_q_heads=120, num_kv_heads=3, head_dim=128, page_size=16).to(
        "cuda"
    )
    plan = make_plan(problem, seqlen_q=tokens, num_sm_parts=None)
    mixed = lengths_for(tokens)
    check_replays(problem, plan, [mixed, [2112] * REQUESTS, [0] * REQUESTS, [tokens] * REQUESTS, mixed[::-1]])


@pytest.mark.parametrize("works", [XQA_LEAST_LARGE_WORKS - 1, XQA_LEAST_LARGE_WORKS])
def test_few_works_have_blocks_of_their_own(works):
    """Plans have a part for each CTA that runs beside others: of large blocks one an SM."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("large blocks are of sm_90")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    parts = xqa_num_sm_parts(device, works, 1, rows=160)
    assert parts == (sms if works >= XQA_LEAST_LARGE_WORKS else 2 * sms // -(-160 // XQA_SMALL_BLOCK))


def test_batch_invariant_plans_compute_the_same_bits_beside_others():
    """A request alone has blocks of 64 rows, and among many, too."""
    tokens = 9
    problem = paged_problem(lengths_for(tokens), tokens, num_q_heads=54, num_kv_heads=3, head_dim=128, page_size=32).to(
        "cuda"
    )
    together = attend(problem, tokens)
    for request in (0, 7, REQUESTS - 2):
        one = slice(request, request + 1)
        alone = attend(problem, tokens, one)
        torch.testing.assert_close(alone[0], together[0][one], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(alone[1], together[1][one], rtol=0, atol=0, equal_nan=True)


def attend(problem, tokens, requests=slice(None)):
    lengths, queries = problem.cache_seqlens[requests], problem.q_by_request[requests]
    plan = XqaDecodePlan.allocate(
        len(lengths),
        num_q_heads=54,
        num_kv_heads=3,
        head_dim=128,
        seqlen_q=tokens,
        fixed_split_tokens=512,
        max_seqlen_k=4096,
        device="cuda",
    )
    ops.xqa_decode_plan(plan, lengths)
    pages = (problem.k_pages, problem.v_pages, problem.page_table[requests])
    return ops.xqa_decode(queries, *pages, lengths, plan, return_lse=True)
