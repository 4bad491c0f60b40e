"""attnops::xqa_decode on a GPU: batches of many short works, of many rows and of wide heads, over poisoned pages."""

import dataclasses
import random

import pytest
import torch
from attnops import ops, reference
from attnops.info import kernel_counts
from checks import assert_attention_close
from problems import FP8, paged_problem
from xqa_decoding import assert_decodes, check_replays, make_plan

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


def short_lengths(batch: int, longest: int = 128) -> list[int]:
    """Empty, whole and torn tiles, drawn from a fixed seed."""
    rng = random.Random(batch)
    return [
        rng.choice([0, 1, 15, 16, 17, 63, 64, 65, longest - 1, longest, rng.randint(1, longest)]) for _ in range(batch)
    ]


@pytest.mark.parametrize("num_sm_parts", [5, None])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "dtype", "kv_dtype"),
    [
        ((7, 7), 128, 64, BF16, None),
        ((35, 35), 128, 24, FP16, None),
        ((24, 8), 96, 1, BF16, None),
        ((32, 2), 128, 16, BF16, None),
        ((9, 9), 64, 32, FP16, None),
        ((6, 3), 50, 3, BF16, None),
        ((8, 8), 192, 16, BF16, None),
        ((5, 5), 256, 7, FP16, None),
        ((7, 7), 128, 64, BF16, FP8),
        ((24, 8), 112, 5, FP16, FP8),
        ((16, 8), 128, 128, BF16, FP8),
        ((88, 8), 64, 64, BF16, FP8),
        ((32, 2), 128, 16, FP16, FP8),
        ((27, 3), 112, 7, BF16, FP8),
        ((20, 2), 80, 3, BF16, None),
        ((12, 6), 48, 32, FP16, None),
        ((9, 9), 192, 16, BF16, FP8),
        ((12, 4), 256, 33, BF16, FP8),
    ],
)
def test_parts_of_many_short_works(heads, head_dim, page_size, dtype, kv_dtype, num_sm_parts):
    """A warp takes a whole work, now and then a longer one; parts of few works do not."""
    some_longer = [20] * 60 + [700] + [33, 0, 5] * 10 + [300] + [17] * 8
    for lengths in (short_lengths(60), [*short_lengths(40), 700, *short_lengths(19)], some_longer):
        problem = paged_problem(
            lengths,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
        ).to("cuda")
        assert_decodes(problem, num_sm_parts=num_sm_parts)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("options", [{"window_left": 20}, {"logit_cap": 5.0}, {"sinks": True}, {"tree": True}, {}])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
@pytest.mark.parametrize("heads", [6, 12])
def test_rules_of_short_works(options, seqlen_q, kv_dtype, heads):
    lengths = [max(n, seqlen_q) for n in short_lengths(50)]
    problem = paged_problem(
        lengths, seqlen_q, num_q_heads=heads, num_kv_heads=3, head_dim=128, page_size=16, kv_dtype=kv_dtype
    ).to("cuda")
    rules = dict(options)
    if rules.pop("sinks", False):
        rules["sinks"] = torch.randn(heads, device="cuda")
    if rules.pop("tree", False):
        visible = torch.rand(50, seqlen_q, seqlen_q) < 0.5
        rules["tree_mask"] = (
            reference.pack_tree_mask(visible | torch.eye(seqlen_q, dtype=torch.bool)).flatten(0, 1).cuda()
        )
    assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=5, **rules)


@pytest.mark.parametrize("options", [{"window_left": 20}, {"logit_cap": 5.0}, {"tree": True}, {"csr": True}, {}])
@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize(("heads", "head_dim", "page_size"), [((8, 8), 128, 64), ((32, 8), 112, 16), ((6, 6), 96, 256)])
def test_short_works_of_pairs_of_heads(heads, head_dim, page_size, seqlen_q, options):
    """Over FP8 pages a CTA takes two KV heads, and each has the warps that multiply for it."""
    for lengths in (short_lengths(60), [20] * 40 + [700, 0, 300] + [33] * 20, [90, 64] * 30):
        lengths = [max(n, seqlen_q) for n in lengths]
        problem = paged_problem(
            lengths,
            seqlen_q,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            page_size=page_size,
            kv_dtype=FP8,
            scales="head",
        ).to("cuda")
        rules = dict(options)
        if rules.pop("tree", False):
            visible = (torch.rand(len(lengths), seqlen_q, seqlen_q) < 0.5) | torch.eye(seqlen_q, dtype=torch.bool)
            rules["tree_mask"] = reference.pack_tree_mask(visible).flatten(0, 1).cuda()
        before = kernel_counts()
        for groups in (3, 10, 20):
            assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=groups * heads[1], **rules)
        assert {n.split()[-1] for n, count in kernel_counts().items() if count != before.get(n, 0)} >= {
            "sm90_fp8_hd128"
        }


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("heads", [(12, 12), (20, 4)])
def test_one_graph_serves_short_and_long_works(heads, kv_dtype):
    problem = paged_problem(
        [400] * 120, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, page_size=16, kv_dtype=kv_dtype
    ).to("cuda")
    plan = make_plan(problem, num_sm_parts=None)
    short = short_lengths(120)
    mixed = [400 if i % 17 == 0 else n for i, n in enumerate(short)]
    check_replays(problem, plan, [short, [400] * 120, mixed, [0] * 120, [1] * 120, mixed[::-1]])


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("head_dim", [64, 112, 128, 192, 256])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(
    ("heads", "seqlen_q"), [((71, 1), 1), ((40, 2), 1), ((36, 2), 3), ((34, 1), 4), ((65, 1), 3), ((16, 1), 16)]
)
def test_many_rows(heads, seqlen_q, kv_dtype, head_dim, page_size):
    problem = paged_problem(
        [300, seqlen_q, 0, 777, 64],
        seqlen_q,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=kv_dtype,
    ).to("cuda")
    assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=7)
    assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=None, window_left=70)


@pytest.mark.parametrize("num_sm_parts", [2, None])
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(64, None), (128, None), (160, None), (256, None), (64, FP8), (128, FP8), (192, FP8)]
)
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
@pytest.mark.parametrize("heads", [48, 36, 6])
def test_rules_of_many_rows(heads, options, head_dim, kv_dtype, num_sm_parts):
    """Rows of a work are divided among warpgroups and CTAs, each of which merges its own splits."""
    tokens = 9
    lengths = [tokens, 500, 64, 1200, 0, 130]
    problem = paged_problem(
        lengths, tokens, num_q_heads=heads, num_kv_heads=3, head_dim=head_dim, page_size=32, kv_dtype=kv_dtype
    ).to("cuda")
    rules = dict(options)
    if rules.pop("sinks", False):
        rules["sinks"] = torch.randn(heads, device="cuda")
    if rules.pop("tree", False):
        visible = torch.rand(len(lengths), tokens, tokens) < 0.5
        rules["tree_mask"] = (
            reference.pack_tree_mask(visible | torch.eye(tokens, dtype=torch.bool)).flatten(0, 1).cuda()
        )
    assert_decodes(problem, seqlen_q=tokens, num_sm_parts=num_sm_parts, **rules)


@pytest.mark.parametrize("num_sm_parts", [1, 7])
@pytest.mark.parametrize("options", [{"logit_cap": 9.06, "window_left": 1815}, {"softmax_scale": -0.25}, {}])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [(32, 16, 32), (10, 64, 8), (10, 64, 5), (32, 128, 16), (10, 192, 16), (10, 256, 64)],
)
def test_long_works_of_many_fp8_rows(heads, head_dim, page_size, options, num_sm_parts):
    """Tiles go round both rings many times, and warps that widen them wait most where scores take longest."""
    tokens = 17
    problem = paged_problem(
        [2303, 1952], tokens, num_q_heads=heads, num_kv_heads=2, head_dim=head_dim, page_size=page_size, kv_dtype=FP8
    ).to("cuda")
    assert_decodes(problem, seqlen_q=tokens, num_sm_parts=num_sm_parts, **options)


def test_a_soft_cap_where_the_scale_of_some_rows_is_one():
    """Over FP8 pages every row has a scale of its own; a lane has two rows."""
    problem = paged_problem([300, 64, 777], num_q_heads=48, num_kv_heads=1, head_dim=128, kv_dtype=FP8, scales="none")
    few = torch.rand(problem.k_pages.shape, generator=torch.Generator().manual_seed(1)) < 0.02
    tiny = few * torch.where(problem.k_pages.float() < 0, -(2.0**-9), 2.0**-9)
    k_pages = torch.where(problem.k_pages.isnan(), problem.k_pages.float(), tiny).to(FP8)
    q = problem.q.clamp(-3, 3)
    q[..., 0] = 3  # no row has a larger value
    q[:, 8:16] /= 16
    problem = dataclasses.replace(problem, q=q, k_pages=k_pages).to("cuda")
    to_one = 5678.26171875  # 2^13 in units of log2: the scale of rows up to 3 is 2^-13
    assert_decodes(problem, softmax_scale=to_one, logit_cap=30.0)


@pytest.mark.parametrize("fixed_split_tokens", [0, 128, -3])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_blocks_of_rows_without_semaphores_of_their_own(kv_dtype, fixed_split_tokens):
    """A plan that has one semaphore a work: a CTA then takes one block after the other. The answer is the same."""
    problem = paged_problem(
        [900, 5, 333], 5, num_q_heads=120, num_kv_heads=3, head_dim=128, page_size=16, kv_dtype=kv_dtype
    ).to("cuda")
    plan = make_plan(problem, seqlen_q=5, num_sm_parts=11, fixed_split_tokens=fixed_split_tokens, max_seqlen_k=1024)
    few = dataclasses.replace(plan, semaphores=plan.semaphores[:9])
    assert_decodes(problem, seqlen_q=5, plan=plan)
    assert_decodes(problem, seqlen_q=5, plan=few)


def test_one_graph_serves_every_length_of_many_rows():
    problem = paged_problem([704] * 9, num_q_heads=90, num_kv_heads=1, head_dim=128, page_size=16).to("cuda")
    plan = make_plan(problem, num_sm_parts=None)
    check_replays(problem, plan, [[704] * 9, [1] * 9, [0] * 9, [704, 3, 64, 65, 0, 1, 699, 128, 127]])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [80, 96, 112])
@pytest.mark.parametrize("heads", [(8, 4), (16, 2), (6, 6), (40, 40), (120, 30)])
def test_thin_rows_of_fp8_pages(heads, head_dim, page_size):
    """Neighbouring heads share lines of memory: a CTA takes two, or has few tiles on their way. Many works whose rows
    are no whole 32 bytes are gathered."""
    problem = paged_problem(
        [2000, 3, 0, 640, 777],
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=FP8,
    ).to("cuda")
    before = kernel_counts()
    assert_decodes(problem, num_sm_parts=2 * heads[1])
    assert_decodes(problem, num_sm_parts=None)
    used = {name for name, count in kernel_counts().items() if count != before.get(name, 0)}
    gathers = heads[1] >= 30 and head_dim == 80
    assert any("gather_fp8_rows_hd128" in name for name in used) == gathers


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("head_dim", [48, 144, 160, 192, 208, 240])
@pytest.mark.parametrize("heads", [(8, 8), (16, 2), (24, 1)])
def test_wide_rows_of_fp8_pages(heads, head_dim, page_size):
    """Rows that lack the last columns of a tile, and those that are no whole 32 bytes, in tables short and long."""
    for lengths in ([1500, 3, 0, 640, 777], [64, 900, 65]):
        problem = paged_problem(
            lengths,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            page_size=page_size,
            kv_dtype=FP8,
        ).to("cuda")
        assert_decodes(problem, num_sm_parts=2 * heads[1] + 1)
        assert_decodes(problem, num_sm_parts=None, window_left=100)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 3), (128, 20), (128, 40), (112, 90), (256, 12), (256, 33)])
def test_rows_of_q_and_out_that_start_anywhere(head_dim, heads, kv_dtype):
    """Rows that are no vectors: queries do not come ahead, and values go to out one by one."""
    tokens = 3
    problem = paged_problem(
        [65, 3, 300, 128, 40] * 4,
        tokens,
        num_q_heads=2 * heads,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=16,
        kv_dtype=kv_dtype,
    ).to("cuda")
    wide = torch.empty(*problem.q.shape[:2], head_dim + 3, dtype=problem.q.dtype, device="cuda")
    q = wide[:, :, 1 : head_dim + 1]
    q.copy_(problem.q)
    for parts in (2, None):
        assert_decodes(dataclasses.replace(problem, q=q), seqlen_q=tokens, num_sm_parts=parts)
        out = torch.full_like(wide, torch.nan)
        plan = make_plan(problem, seqlen_q=tokens, num_sm_parts=parts)
        tensors = (problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens, plan)
        scales = dict(k_scale=problem.k_scale, v_scale=problem.v_scale)
        ops.xqa_decode(q, *tensors, out=out[:, :, 1 : head_dim + 1], **scales)
        expected, _ = problem.expected()
        assert_attention_close(out[:, :, 1 : head_dim + 1].cpu(), expected, problem.q.dtype)
        assert out[:, :, 0].isnan().all() and out[:, :, head_dim + 1 :].isnan().all()
