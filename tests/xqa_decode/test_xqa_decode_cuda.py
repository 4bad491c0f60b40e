"""attnops::xqa_decode on a GPU: what its kernels do differently from the CPU's, over poisoned pages."""

import dataclasses

import pytest
import torch
from attnops import ops, reference
from attnops.metadata import XqaDecodePlan
from checks import assert_attention_close
from problems import FP8, paged_problem
from xqa_decoding import assert_decodes, captured, check_replays, decode, make_plan

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = [1, 0, 63, 64, 65, 517, 130, 1000]


def on_gpu(*arguments, **options):
    return paged_problem(*arguments, **options).to("cuda")


def in_mode(mode):
    """The checked mode is the portable kernels' alone; without it Hopper runs its own."""
    return {"report": torch.zeros(8, dtype=torch.int32, device="cuda")} if mode == "checked" else {}


either_mode = pytest.mark.parametrize("mode", ["plain", "checked"])


@either_mode
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_every_kernel(dtype, kv_dtype, head_dim, seqlen_q, mode):
    problem = on_gpu(LENGTHS, seqlen_q, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    assert_decodes(problem, seqlen_q=seqlen_q, **in_mode(mode))
    assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=None, **in_mode(mode))


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("head_dim", [1, 7, 8, 40, 80, 96, 136, 192, 250])
def test_head_dims_between(head_dim, kv_dtype):
    problem = on_gpu([65, 1, 200], 2, head_dim=head_dim, kv_dtype=kv_dtype)
    assert_decodes(problem, seqlen_q=2)


@either_mode
@pytest.mark.parametrize(
    "heads", [(1, 1), (3, 3), (5, 1), (7, 7), (8, 1), (14, 2), (32, 8), (64, 4), (128, 8), (128, 1)]
)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_head_counts(heads, seqlen_q, mode):
    problem = on_gpu([300, 5, 77], seqlen_q, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128)
    assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=7, **in_mode(mode))


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 17, 32, 64, 128, 256])
@pytest.mark.parametrize("csr", [False, True])
def test_page_sizes(page_size, csr, kv_dtype):
    problem = on_gpu(LENGTHS, page_size=page_size, head_dim=128, kv_dtype=kv_dtype)
    assert_decodes(problem, csr=csr, num_sm_parts=5)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "joint", "slice"])
@pytest.mark.parametrize("head_dim", [128, 36])
def test_strides(layout, head_dim):
    assert_decodes(on_gpu([100, 257], layout=layout, head_dim=head_dim))


@either_mode
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 16])
@pytest.mark.parametrize("window_left", [-1, 0, 3, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_masks(seqlen_q, window_left, causal, mode):
    problem = on_gpu([16, 17, 64, 300, 700, 3], seqlen_q, head_dim=128)
    options = dict(window_left=window_left, causal=causal, num_sm_parts=11)
    assert_decodes(problem, seqlen_q=seqlen_q, **options, **in_mode(mode))


@either_mode
@pytest.mark.parametrize("window_left", [-1, 2, 80])
@pytest.mark.parametrize("seqlen_q", [3, 8, 16])
def test_tree_masks(seqlen_q, window_left, mode):
    problem = on_gpu([20, 64, 65, 400], seqlen_q, head_dim=128)
    visible = torch.rand(4, seqlen_q, seqlen_q) < 0.5
    mask = reference.pack_tree_mask(visible | torch.eye(seqlen_q, dtype=torch.bool)).flatten(0, 1).cuda()
    assert_decodes(problem, seqlen_q=seqlen_q, tree_mask=mask, window_left=window_left, **in_mode(mode))


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("heads,seqlen_q", [((1, 1), 1), ((8, 1), 1), ((6, 2), 2), ((16, 1), 1), ((12, 4), 5)])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_masks_by_page_size(kv_dtype, heads, seqlen_q, page_size):
    """Up to 16 rows: over FP8 pages two groups of warps share the tiles, whole ones and those at the edges."""
    problem = on_gpu(
        [64, 1, 0, 517, 1500, 193],
        seqlen_q,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=page_size,
        kv_dtype=kv_dtype,
    )
    for options in ({}, {"window_left": 130}, {"causal": False, "logit_cap": 2.0}):
        assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=7, **options)
    if seqlen_q > 1:
        visible = torch.rand(6, seqlen_q, seqlen_q) < 0.5
        mask = reference.pack_tree_mask(visible | torch.eye(seqlen_q, dtype=torch.bool)).flatten(0, 1).cuda()
        assert_decodes(problem, seqlen_q=seqlen_q, tree_mask=mask, num_sm_parts=7)


@either_mode
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_trees_that_hide_the_first_new_token(kv_dtype, mode):
    """It is the last key of a chunk or tile here, which holds no other new token."""
    problem = on_gpu([31, 63, 79, 143], 16, head_dim=128, kv_dtype=kv_dtype)
    visible = torch.eye(16, dtype=torch.bool).expand(4, 16, 16)
    mask = reference.pack_tree_mask(visible).flatten(0, 1).cuda()
    assert_decodes(problem, seqlen_q=16, tree_mask=mask, **in_mode(mode))


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("num_sm_parts", [1, 9, 264])
def test_sinks_and_soft_cap(kv_dtype, num_sm_parts):
    problem = on_gpu(LENGTHS, 2, num_q_heads=16, head_dim=128, kv_dtype=kv_dtype, scales="head")
    assert_decodes(problem, seqlen_q=2, sinks=torch.randn(16, device="cuda"), num_sm_parts=num_sm_parts)
    assert_decodes(problem, seqlen_q=2, logit_cap=1.5, num_sm_parts=num_sm_parts)


def test_large_and_small_queries_over_fp8_pages():
    problem = on_gpu([300, 40], kv_dtype=FP8, head_dim=128, dtype=BF16)
    scale = torch.tensor([1e-30, 1e-6, 1.0, 1e5, 3e30, 1e-3, 7.0, 1e10], device="cuda").view(8, 1)
    problem = dataclasses.replace(problem, q=(problem.q * scale).to(BF16))
    for row in range(8):
        factor = 1 / scale[row].item()
        out, lse = decode(problem, softmax_scale=0.1 * factor)
        expected, expected_lse = problem.expected(softmax_scale=0.1 * factor)
        torch.testing.assert_close(out[:, row].double(), expected[:, row], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse[:, row].double(), expected_lse[:, row], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [(4, 1, 1), (32, 8, 1), (8, 1, 8), (64, 4, 4), (128, 1, 1)])
@pytest.mark.parametrize("length", [5000, 20000])
def test_long_requests_with_many_splits(rows, length):
    num_q_heads, num_kv_heads, seqlen_q = rows
    problem = on_gpu([length], seqlen_q, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=128, page_size=64)
    for parts in (264, 132, 40):
        assert_decodes(problem, seqlen_q=seqlen_q, num_sm_parts=parts)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_skewed_batch(head_dim):
    problem = on_gpu([9000, 1, 70, 0, 400, 64, 2], num_q_heads=8, num_kv_heads=2, head_dim=head_dim, page_size=16)
    for parts in (264, 132, 17, 2):
        assert_decodes(problem, num_sm_parts=parts)


@either_mode
@pytest.mark.parametrize("parts", [5, 264])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "dtype", "kv_dtype", "requests"),
    [
        (64, 16, FP16, None, 6),
        (64, 3, FP16, None, 6),
        (128, 64, BF16, None, 67),
        (96, 5, BF16, None, 67),
        (160, 5, BF16, None, 6),
        (192, 16, BF16, None, 6),
        (256, 16, BF16, FP8, 6),
    ],
)
def test_24_rows(head_dim, page_size, dtype, kv_dtype, requests, parts, mode):
    """Two groups of warps in the portable kernel; no clusters: of fp16 there are none to head dim 64, or many works."""
    lengths = [700, 2, 0, 64, 65, 130, *[3] * 61][:requests]
    geometry = {"num_q_heads": 24, "num_kv_heads": 2, "head_dim": head_dim, "page_size": page_size}
    problem = on_gpu(lengths, 2, dtype=dtype, kv_dtype=kv_dtype, **geometry)
    assert_decodes(problem, seqlen_q=2, num_sm_parts=parts, **in_mode(mode))
    assert_decodes(problem, seqlen_q=2, num_sm_parts=parts, window_left=70, **in_mode(mode))


@pytest.mark.parametrize("dtype, kv_dtype", [(BF16, None), (FP16, None), (BF16, FP8), (FP16, FP8)])
@pytest.mark.parametrize("heads", [(8, 1), (32, 8), (64, 4), (30, 1)])
@pytest.mark.parametrize("head_dim, page_size", [(128, 16), (64, 16), (80, 5), (192, 16)])
@pytest.mark.parametrize("batch", [1, 2, 5, 9, 17, 40, 66])
def test_clusters_of_every_size(batch, head_dim, page_size, heads, dtype, kv_dtype):
    """Few works have many CTAs each, in one cluster or several; most requests do not fill the page table."""
    lengths = [700, 1, 64, 65, 0, 950, 127] * 10
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
    assert_decodes(on_gpu(lengths[:batch], dtype=dtype, kv_dtype=kv_dtype, **geometry), num_sm_parts=None)


@pytest.mark.parametrize("heads", [(8, 1), (32, 8), (16, 1)])
@pytest.mark.parametrize("page_size", [1, 3, 8, 32, 128])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_one_request_in_clusters(kv_dtype, page_size, heads):
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 112, "page_size": page_size}
    for length in (5000, 12345):
        problem = on_gpu([length], kv_dtype=kv_dtype, **geometry)
        assert_decodes(problem, num_sm_parts=None, sinks=torch.randn(heads[0], device="cuda"))
        assert_decodes(problem, num_sm_parts=None, window_left=3000)
        assert_decodes(problem, num_sm_parts=None, csr=True)
        assert_decodes(problem, num_sm_parts=1)  # room for no meeting of clusters


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (6, 6), (64, 4)])
@pytest.mark.parametrize("groups", [1, 3, 11, 40])
def test_heads_side_by_side(groups, heads, kv_dtype):
    problem = on_gpu(
        [700, 1, 0, 64, 65, 3000, 130], num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, kv_dtype=kv_dtype
    )
    assert_decodes(problem, num_sm_parts=groups * heads[1])


@pytest.mark.parametrize("heads", [(4, 2), (32, 8), (6, 6), (8, 4)])
@pytest.mark.parametrize("page_size", [8, 64, 256])
def test_pairs_of_heads_over_fp8_pages(page_size, heads):
    """Where every part has many short pieces: a CTA then takes those of two KV heads."""
    num_q_heads, num_kv_heads = heads
    problem = on_gpu(
        [700, 1, 0, 64, 65, 1300, 130] * 5,
        2,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        page_size=page_size,
        kv_dtype=FP8,
        scales="head",
    )
    for groups in (1, 6, 16):
        assert_decodes(problem, seqlen_q=2, num_sm_parts=groups * num_kv_heads)
    sinks = torch.randn(num_q_heads, device="cuda")
    assert_decodes(problem, seqlen_q=2, num_sm_parts=5 * num_kv_heads, window_left=100, sinks=sinks)
    assert_decodes(problem, seqlen_q=2, num_sm_parts=5 * num_kv_heads, csr=True, logit_cap=2.0)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("fixed_split_tokens", [64, 256, 4096, -1, -4, -40])
def test_batch_invariant_bits(fixed_split_tokens, kv_dtype):
    lengths = [700, 64, 1, 0, 2000, 333]
    problem = on_gpu(lengths, 2, head_dim=128, kv_dtype=kv_dtype)
    options = dict(seqlen_q=2, fixed_split_tokens=fixed_split_tokens, max_seqlen_k=2048)
    assert_decodes(problem, **options, num_sm_parts=7)
    together, lse_together = decode(problem, **options, num_sm_parts=None)
    for parts in (1, 13):
        again, lse_again = decode(problem, **options, num_sm_parts=parts)
        assert torch.equal(again, together) and torch.equal(lse_again, lse_together)
    for request in range(len(lengths)):
        rows = slice(2 * request, 2 * request + 2)
        alone = dataclasses.replace(
            problem,
            q=problem.q[rows],
            page_table=problem.page_table[request : request + 1],
            cache_seqlens=problem.cache_seqlens[request : request + 1],
        )
        out, lse = decode(alone, **options, num_sm_parts=5)
        assert torch.equal(out, together[rows]) and torch.equal(lse, lse_together[rows])


@pytest.mark.parametrize("cut", [256, -7])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_batch_invariant_bits_in_any_company_and_under_replay(kv_dtype, cut):
    """A request keeps its bits whatever the others' lengths, and wherever it stands, in one captured graph."""
    limit, batch = 2048, 5
    problem = on_gpu([limit] * batch, num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=16, kv_dtype=kv_dtype)
    q, table, lengths = problem.q.clone(), problem.page_table.clone(), problem.cache_seqlens.clone()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device="cuda")
    plan = make_plan(problem, num_sm_parts=None, fixed_split_tokens=cut, max_seqlen_k=limit)
    scales = dict(k_scale=problem.k_scale, v_scale=problem.v_scale)

    def step():
        ops.xqa_decode_plan(plan, lengths)
        ops.xqa_decode(q, problem.k_pages, problem.v_pages, table, lengths, plan, out=out, lse=lse, **scales)

    graph = captured(step)
    own_length = 777
    own = dataclasses.replace(
        problem,
        q=problem.q[:1],
        page_table=problem.page_table[:1],
        cache_seqlens=torch.tensor([own_length], dtype=torch.int32, device="cuda"),
    )
    alone, lse_alone = decode(own, fixed_split_tokens=cut, max_seqlen_k=limit, num_sm_parts=None)
    for place, others in enumerate(([0] * 4, [limit] * 4, [1, 64, 65, 2000], [255, 256, 257, 0], [16, 1, 1999, 640])):
        lengths.copy_(torch.tensor([*others[:place], own_length, *others[place:]], dtype=torch.int32))
        table.copy_(problem.page_table.roll(place, 0))
        q.copy_(problem.q.roll(place, 0))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[place].cpu(), alone[0]) and torch.equal(lse[place].cpu(), lse_alone[0])


def test_scales_are_read_on_the_device_at_every_replay():
    problem = on_gpu([500, 3, 64], num_q_heads=8, num_kv_heads=4, head_dim=128, kv_dtype=FP8, scales="head")
    plan = make_plan(problem, num_sm_parts=None)
    out = torch.empty_like(problem.q)
    pages = problem.k_pages, problem.v_pages, problem.page_table, problem.cache_seqlens
    scales = dict(k_scale=problem.k_scale, v_scale=problem.v_scale)
    graph = captured(lambda: ops.xqa_decode(problem.q, *pages, plan, out=out, **scales))
    for factor in (1.0, 0.25, 3.0):
        problem.k_scale.mul_(factor)
        problem.v_scale.mul_(1.5 * factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_attention_close(out.cpu(), problem.expected()[0], problem.q.dtype)


@pytest.mark.parametrize(
    "lengths,heads,kv_dtype,num_sm_parts",
    [
        ([3000, 20, 700], (32, 8), None, 264),
        ([3000, 20, 700], (32, 8), FP8, 264),
        ([3000, 20, 700], (64, 4), FP8, 264),
        # Many short pieces a part: a CTA takes those of two KV heads.
        ([700, 1, 0, 64, 65, 1300, 130] * 5, (4, 2), FP8, 6),
        ([700, 1, 0, 64, 65, 1300, 130] * 40, (32, 8), FP8, 264),
    ],
)
def test_same_bits_on_every_run(lengths, heads, kv_dtype, num_sm_parts):
    problem = on_gpu(lengths, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, kv_dtype=kv_dtype)
    first = decode(problem, num_sm_parts=num_sm_parts)
    for _ in range(20):
        again = decode(problem, num_sm_parts=num_sm_parts)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("fixed_split_tokens", [0, 256, -9])
def test_one_graph_serves_every_length(fixed_split_tokens):
    problem = on_gpu([1504] * 3, num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=16)  # whole pages
    plan = make_plan(problem, num_sm_parts=264, fixed_split_tokens=fixed_split_tokens, max_seqlen_k=1504)
    batches = [[0, 0, 0], [1, 1504, 0], [64, 63, 65], [1499, 7, 800], [16, 17, 1], [1504, 1503, 1504]]
    check_replays(problem, plan, batches)


@pytest.mark.parametrize("heads", [(8, 4), (32, 4)])
@pytest.mark.parametrize("tokens", [960, 1600])  # a request's: clusters divide the first, the plan the second
def test_one_graph_serves_even_and_skewed_batches(tokens, heads):
    problem = on_gpu([tokens] * 16, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, page_size=64)
    plan = make_plan(problem, num_sm_parts=None)
    skewed = [tokens, *[3] * 14, tokens - 1]
    check_replays(problem, plan, [[tokens] * 16, skewed, [0] * 16, skewed[::-1], list(range(850, 946, 6))])


@pytest.mark.parametrize(
    ("requests", "tokens", "heads", "page_size"),
    [
        (16, 1088, (64, 4), 64),
        (16, 1101, (8, 4), 3),
        (3, 8320, (16, 4), 64),
        (8, 4224, (32, 4), 64),
        (12, 2100, (8, 4), 1),
        (9, 2112, (60, 3), 48),
        (16, 1088, (64, 1), 64),  # blocks of rows
        (11, 1101, (96, 2), 3),
        (32, 1088, (27, 1), 16),
    ],
)
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_lengths_decide_between_teams_and_parts(requests, tokens, heads, page_size, head_dim, kv_dtype):
    """Clusters divide short calls, the plan long ones, in one kernel and one graph, whatever the table holds."""
    geometry = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    problem = on_gpu([tokens] * requests, page_size=page_size, kv_dtype=kv_dtype, **geometry)
    plan = make_plan(problem, num_sm_parts=None)
    one_long = [100] * (requests - 1) + [tokens]
    check_replays(
        problem, plan, [[tokens] * requests, [64] * requests, one_long, [1, *[0] * (requests - 1)], one_long[::-1]]
    )


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([700, 1, 0, 64, 65, 1000], (8, 2)),  # a work, a cluster
        ([1000], (8, 1)),  # one work, many clusters, whose results meet in memory
        ([999, 40], (32, 2)),  # 16 rows
        ([999, 0, 65, 300], (50, 2)),  # 25, over 16-bit pages in blocks of 16
        ([1001, 0, 65, 300, *[9] * 63], (25, 1)),  # the same of more works than blocks take
        ([999, 0, 65, 300], (90, 2)),  # 45, in blocks of 16
        ([70, 1, 200], (201, 1)),  # more than parts of the same kernel take
    ],
)
@pytest.mark.parametrize("page_size", [64, 3])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype"),
    [
        (64, BF16, None),
        (64, BF16, FP8),
        (128, BF16, None),
        (128, FP16, None),
        (128, BF16, FP8),
        (136, BF16, None),
        (192, BF16, None),
    ],
)
def test_short_calls(head_dim, dtype, kv_dtype, page_size, lengths, heads):
    """What clusters serve on Hopper (csrc/xqa_decode/sm90/cluster_wgmma/limits.h), for a sanitizer to look at alone."""
    problem = on_gpu(
        lengths,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    assert_decodes(problem, num_sm_parts=None)


def test_checked_mode_reports_a_bad_page_and_a_long_request():
    problem = on_gpu([200, 300], head_dim=128, page_size=16)
    report = torch.zeros(8, dtype=torch.int32, device="cuda")
    decode(problem, report=report)
    assert report[0] == 0
    table = problem.page_table.clone()
    table[1, 3] = 2**30
    decode(dataclasses.replace(problem, page_table=table), report=report)
    count, op, kind, request, cell, value = report[:6].tolist()
    assert count > 0 and (op, kind, request, cell, value) == (6, 1, 1, 3, 2**30)
    report.zero_()
    longer = problem.cache_seqlens + torch.tensor([0, 400], dtype=torch.int32, device="cuda")
    long = dataclasses.replace(problem, cache_seqlens=longer)
    out, _ = decode(long, report=report)
    count, op, kind, request = report[:4].tolist()
    assert count > 0 and (op, kind, request) == (6, 4, 1)
    assert out[0].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_pool_beyond_two_to_the_31_elements(dtype):
    """More than 2^32 bytes in either type."""
    page_size, heads, dim = 64, 8, 128
    pages = 2**32 // (page_size * heads * dim * dtype.itemsize) + 40
    pages = max(pages, 2**31 // (page_size * heads * dim) + 40)
    pool = torch.empty((pages, page_size, heads, dim), dtype=dtype, device="cuda")
    pool.view(torch.uint8).fill_(0xFF)  # NaN in both types
    table = torch.tensor([[pages - 1, 0, pages - 30]], dtype=torch.int32, device="cuda")
    for page in table[0].tolist():
        pool[page] = torch.randn(page_size, heads, dim, device="cuda").to(dtype)
    q = torch.randn(1, heads, dim, device="cuda", dtype=BF16)
    lengths = torch.tensor([180], dtype=torch.int32, device="cuda")
    plan = XqaDecodePlan.allocate(1, num_q_heads=heads, num_kv_heads=heads, head_dim=dim, device="cuda")
    ops.xqa_decode_plan(plan, lengths)
    out, _ = ops.xqa_decode(q, pool, pool, table, lengths, plan)
    keys = torch.cat([pool[page] for page in table[0].tolist()])[:180].float().cpu()
    expected, _ = reference.attention(q.cpu(), keys, keys)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("options", [{}, {"window_left": 70}, {"logit_cap": 2.0}, {"fixed_split_tokens": 64}])
def test_float32(kv_dtype, options):
    problem = on_gpu(LENGTHS, 3, head_dim=72, dtype=torch.float32, kv_dtype=kv_dtype, page_size=3)
    for parts in (1, 40):
        assert_decodes(problem, seqlen_q=3, num_sm_parts=parts, **options)


def test_what_no_kernel_takes_is_refused_with_every_reason():
    problem = on_gpu([10], dtype=FP16)
    problem = dataclasses.replace(problem, q=problem.q.to(BF16))
    with pytest.raises(RuntimeError, match="k_pages must have dtype"):
        decode(problem)
