"""attnops::xqa_decode on a GPU: works that are dealt out in an order, to CTAs and to warps alone."""

import dataclasses
import random

import pytest
import torch
from attnops import ops, reference
from problems import FP8, paged_problem
from xqa_decoding import assert_decodes, captured, check_replays, make_plan

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


def lengths_of(kind: str, batch: int) -> list[int]:
    rng = random.Random(f"{kind} {batch}")
    draw = {
        "mixed": lambda: rng.choice([0, 1, 64, 65, 128, 129, rng.randint(1, 600)]),
        "short": lambda: rng.choice([0, 1, 16, 64, 65, 127, 128]),
        "long": lambda: rng.randint(129, 500),
        "straggler": lambda: 40,
    }[kind]
    return [draw() for _ in range(batch - 1)] + [570 if kind == "straggler" else 100]


def dealt(problem, num_sm_parts: int, **options):
    """A plan that deals its works out."""
    plan = make_plan(problem, num_sm_parts=num_sm_parts, **options)
    assert plan.num_splits[-1] > 0, "the plan deals nothing"
    assert plan.num_splits[:-1].sort().values.tolist() == list(range(problem.batch_size))
    return plan


CASES = [  # heads, head dim, page size, types of q and pages, parts
    ((7, 7), 128, 64, BF16, None, 5),
    ((7, 7), 128, 64, BF16, None, 14),  # two groups of heads side by side
    ((9, 9), 112, 24, FP16, None, 4),
    ((24, 8), 96, 1, BF16, None, 3),
    ((9, 9), 64, 32, FP16, None, 8),
    ((15, 5), 64, 7, BF16, None, 7),
    ((11, 11), 80, 3, BF16, None, 9),
    ((7, 7), 128, 64, BF16, FP8, 5),
    ((24, 8), 112, 5, FP16, FP8, 16),
    ((16, 2), 128, 90, BF16, FP8, 3),
    ((9, 9), 96, 16, BF16, FP8, 4),
    ((8, 8), 64, 64, BF16, FP8, 5),
    ((21, 3), 64, 11, FP16, FP8, 7),
    ((22, 2), 128, 64, BF16, None, 3),  # more than 8 rows
    ((39, 3), 96, 5, FP16, None, 4),
    ((48, 3), 80, 16, BF16, None, 7),
]
IDS = [f"{h[0]}/{h[1]} d{d} page {page} {kv or dtype} {parts}" for h, d, page, dtype, kv, parts in CASES]


def problem_of(case, lengths, seqlen_q: int = 1):
    heads, head_dim, page_size, dtype, kv_dtype, _ = case
    options = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype, "kv_dtype": kv_dtype}
    return paged_problem(lengths, seqlen_q, num_q_heads=heads[0], num_kv_heads=heads[1], **options).to("cuda")


@pytest.mark.parametrize("kind", ["mixed", "short", "long", "straggler"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_works_are_dealt_out(case, kind):
    for batch in (24, 70):
        problem = problem_of(case, lengths_of(kind, batch))
        if batch * case[0][1] >= 4 * case[-1]:
            assert_decodes(problem, plan=dealt(problem, case[-1]))


@pytest.mark.parametrize(
    "options", [{"window_left": 20}, {"window_left": 200}, {"logit_cap": 5.0}, {"sinks": True}, {}]
)
@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7], CASES[8], ((21, 3), 128, 64, BF16, None, 4)], ids=str)
def test_rules_of_dealt_works(case, seqlen_q, options):
    lengths = [max(n, seqlen_q) for n in lengths_of("mixed", 60)]
    problem = problem_of(case, lengths, seqlen_q)
    rules = dict(options)
    if rules.pop("sinks", False):
        rules["sinks"] = torch.randn(case[0][0], device="cuda")
    plan = dealt(problem, case[-1], seqlen_q=seqlen_q, window_left=rules.get("window_left", -1))
    assert_decodes(problem, seqlen_q=seqlen_q, plan=plan, **rules)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[7], CASES[8], ((21, 3), 128, 64, BF16, None, 4)], ids=str)
def test_where_warps_alone_do_not_serve(case, tree):
    """Trees, and tables of one row after the other."""
    lengths = [max(n, 2) for n in lengths_of("mixed", 60)]
    problem = problem_of(case, lengths, 2)
    plan = dealt(problem, case[-1], seqlen_q=2)
    if tree:
        visible = (torch.rand(60, 2, 2) < 0.5) | torch.eye(2, dtype=torch.bool)
        mask = reference.pack_tree_mask(visible).flatten(0, 1).cuda()
        assert_decodes(problem, seqlen_q=2, plan=plan, tree_mask=mask)
    else:
        assert_decodes(problem, seqlen_q=2, plan=plan, csr=True)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_thousand_replays(case):
    """Lengths change from replay to replay; the same works by the plan's rows say what comes out, close to it."""
    batch, heads = 70, case[0][1]
    problem = problem_of(case, [600] * batch)
    plan = make_plan(problem, num_sm_parts=case[-1])
    seqlens = problem.cache_seqlens.clone()
    out, other = torch.empty_like(problem.q), torch.empty_like(problem.q)
    lse, other_lse = (torch.empty(batch, case[0][0], device="cuda") for _ in range(2))
    pools = (problem.q, problem.k_pages, problem.v_pages, problem.page_table, seqlens)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    rows = dataclasses.replace(plan, num_splits=torch.zeros_like(plan.num_splits))

    def step():
        ops.xqa_decode_plan(plan, seqlens)
        for _ in range(2):  # layers
            ops.xqa_decode(*pools, plan, out=out, lse=lse, **scales)

    graph = captured(step)
    rng = random.Random(heads)
    for turn in range(1000):
        kind = rng.choice(["mixed", "short", "long", "straggler"])
        now = lengths_of(kind, batch)
        rng.shuffle(now)
        seqlens.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        if turn % 20:
            continue
        first, first_lse = out.clone(), lse.clone()
        ops.xqa_decode(*pools, rows, out=other, lse=other_lse, **scales)
        torch.testing.assert_close(out, other, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, other_lse, rtol=1e-3, atol=2e-3)
        graph.replay()
        assert torch.equal(out, first) and torch.equal(lse, first_lse), "the same bits each time"
        assert not plan.semaphores.any()
    assert not plan.semaphores.any()


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7], CASES[8]], ids=str)
def test_replays_against_float64(case):
    """One captured graph, plan and decode, replayed with other lengths, tables and queries each time."""
    problem = problem_of(case, [600] * 40)
    plan = make_plan(problem, num_sm_parts=case[-1])
    check_replays(problem, plan, [lengths_of(kind, 40) for kind in ("mixed", "short", "long", "straggler", "mixed")])


def test_orders_that_no_planner_made():
    """Any words in place of the order: works may be left out, but nothing is read or written beside them."""
    for case in (CASES[0], CASES[3], CASES[7], CASES[8]):
        problem = problem_of(case, lengths_of("mixed", 60))
        good = make_plan(problem, num_sm_parts=case[-1])
        for seed in range(20):
            plan = dataclasses.replace(good, num_splits=good.num_splits.clone())
            words = torch.randint(-(2**31), 2**31, plan.num_splits.shape, generator=torch.Generator().manual_seed(seed))
            plan.num_splits.copy_(words.to(torch.int32) if seed % 2 else words % 61)
            pools = (problem.q, problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens)
            ops.xqa_decode(*pools, plan, k_scale=problem.k_scale, v_scale=problem.v_scale)
            assert not plan.semaphores.any(), seed
        assert_decodes(problem, plan=good)
