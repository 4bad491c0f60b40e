"""Every row of the CUDA table of `sparse_mla`: that a call reaches it, and is right."""

import re
from pathlib import Path

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from kernel_rows import reaches
from sparse_calls import KINDS, SCALE, SCALES, assert_right, decode, plan_of, prefill, rescale, sparse_problem

TABLE = Path(__file__).parents[2] / "csrc/sparse_mla/op_cuda.cpp"
BF16, FP16 = torch.bfloat16, torch.float16
ROWS = {
    "sm90_list_rows_bf16": {"kind": "bytes", "dtype": BF16},
    "sm90_list_rows_fp16": {"kind": "bytes", "dtype": FP16},
    "sm90_list_shared_bf16": {"kind": "shared_bytes", "dtype": BF16},
    "sm90_list_shared_fp16": {"kind": "shared_bytes", "dtype": FP16, "page_size": 64},
    "sm90_list_few_bf16": {"kind": "own", "dtype": BF16},
    "sm90_list_few_fp16": {"kind": "shared", "dtype": FP16},
    "sm90_list_bf16": {"kind": "own", "dtype": BF16, "heads": 70},
    "sm90_list_fp16": {"kind": "shared", "dtype": FP16, "heads": 70},
    "mma_lists_bf16": {"kind": "shared_bytes", "dtype": BF16, "page_size": 2, "extra_topk": 70},
    "mma_lists_fp16": {"kind": "shared_bytes", "dtype": FP16, "page_size": 2},
}


def row_of(kind, dtype, heads, with_most=False):
    """The row of the table that aligned lists of this kind take on sm_90a."""
    of_values = "few_" if heads <= 32 else ""
    if with_most and "bytes" in kind:
        return f"mma_lists_{'bf16' if dtype == BF16 else 'fp16'}"
    family = {"bytes": "rows_", "shared_bytes": "shared_"}.get(kind, of_values)
    return f"sm90_list_{family}{'bf16' if dtype == BF16 else 'fp16'}"


def test_the_rows_are_those_of_the_table():
    assert re.findall(r'^    \{"(\w+)",', TABLE.read_text(), re.MULTILINE) == list(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_every_row(row):
    lists = {"shape": (3, 2), "heads": 20, "topk": 150, "lengths": True, "holes": True}
    problem = sparse_problem(**lists | ROWS[row], device="cuda")
    with reaches("sparse_mla", row):
        assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    assert_right(problem, *prefill(problem))
    with reaches("sparse_mla", row):
        assert_right(problem, *prefill(problem, with_most=False))


# 8 and 16 heads are one block of 16 rows, 20 and 32 one of 32, the others blocks of 64.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 33, 64, 128])
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("holes", [False, True])
def test_max_logits_come_from_the_kernels_of_16_bit_rows(heads, kind, dtype, holes):
    """What `compat.flash_mla.flash_mla_sparse_fwd` calls, for rows of 576 and of 512 values."""
    row = row_of(kind, dtype, heads)
    lists = {"shape": (7, 1), "heads": heads, "topk": 330, "lengths": holes, "holes": holes, "sinks": holes}
    problem = sparse_problem(kind, dtype, page_size=1, device="cuda", **lists)
    with reaches("sparse_mla", row):
        out, lse, most = prefill(problem)
    assert_right(problem, out, lse, most)
    without = prefill(problem, with_most=False)
    assert torch.equal(out, without[0]) and torch.equal(lse, without[1])
    out, lse = decode(problem)
    assert_right(problem, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_max_logits_under_a_negative_scale(heads, kind):
    problem = sparse_problem(kind, shape=(5, 1), heads=heads, topk=130, holes=True, device="cuda")
    expected = prefill(problem)
    q, lists = -problem.q.flatten(0, 1), problem.selected
    most = torch.full_like(expected[1], torch.nan)
    indices = lists.indices.flatten(0, 1)
    out, lse = ops.sparse_mla_prefill(
        q, lists.kv_pages, indices, softmax_scale=-SCALE, max_logits=most, return_lse=True
    )
    assert_right(problem, out, lse, most)


# Many tokens: a CTA has several, and the largest logits of one must not reach the next.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 20, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_max_logits_of_many_tokens(heads, kind):
    problem = sparse_problem(kind, shape=(400, 1), heads=heads, topk=70, lengths=True, holes=True, device="cuda")
    problem.q[::2] *= 8  # large ones and small ones in turns
    with reaches("sparse_mla", row_of(kind, BF16, heads, with_most=True)):
        _, lse, most = prefill(problem)
    expected = problem.expected()
    # FP8 values times scales are rounded to 16 bits: scores err by that times the queries, which are large or not.
    for first, atol in ((0, 0.2), (1, 0.05)):
        torch.testing.assert_close(most[first::2].double().cpu(), expected[2][first::2], rtol=1e-2, atol=atol)
        torch.testing.assert_close(lse[first::2].double().cpu(), expected[1][first::2], rtol=1e-2, atol=atol)


# A CTA has several tokens, of any number of tiles, none among them. What leaves through the place of a tile must be out
# before the next token's tiles come.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [40, 64, 128])
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("topk", [60, 128, 330])
@pytest.mark.parametrize("holes", [False, True])
def test_prefill_of_many_tokens_of_many_heads(heads, kind, topk, holes):
    lists = {"shape": (400, 1), "heads": heads, "topk": topk, "lengths": True, "holes": holes, "sinks": holes}
    problem = sparse_problem(kind, BF16, **lists, device="cuda")
    with reaches("sparse_mla", "sm90_list_bf16"):
        out, lse, _ = prefill(problem, with_most=False)
    assert_right(problem, out, lse)
    again = prefill(problem)
    assert_right(problem, *again)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("requests", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("topk", [64, 700, 2048])
@pytest.mark.parametrize("parts", [None, 7])
def test_lists_of_few_heads_in_pieces_of_every_count(heads, requests, topk, parts):
    """Two parts of a pair, a few, or many share a token. Its bits are the same the second time."""
    problem = sparse_problem(
        "own", BF16, (requests, 1), heads, topk, lengths=True, holes=True, sinks=True, device="cuda"
    )
    plan = plan_of(problem, num_sm_parts=parts)
    with reaches("sparse_mla", "sm90_list_few_bf16"):
        out, lse = decode(problem, plan)
    assert_right(problem, out, lse)
    again = decode(problem, plan)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bytes", "shared_bytes"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads", [33, 48])
@pytest.mark.parametrize("requests", [7, 150, 300])
@pytest.mark.parametrize("parts", [None, 7])
def test_blocks_of_48_heads_in_pieces_of_every_count(kind, dtype, heads, requests, parts):
    problem = sparse_problem(
        kind, dtype, (requests, 1), heads, 700, 64, lengths=True, holes=True, sinks=True, device="cuda"
    )
    plan = plan_of(problem, num_sm_parts=parts)
    out, lse = decode(problem, plan)
    assert_right(problem, out, lse)
    again = decode(problem, plan)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert_right(problem, *prefill(problem, with_most=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,lengths", [(BF16, False), (FP16, True)])
@pytest.mark.parametrize("heads", [8, 20, 33, 48, 64, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_two_lists(kind, dtype, heads, lengths):
    """As the window and the entries of DeepSeek-V4, by blocks of 16, 32, 48 and 64 heads."""
    pools = {"page_size": 64, "extra_page_size": 4}
    lists = {"topk": 150, "extra_topk": 200, "lengths": lengths, "holes": True, "sinks": True}
    problem = sparse_problem(kind, dtype, **pools, **lists, shape=(3, 2), heads=heads, device="cuda")
    with reaches("sparse_mla", row_of(kind, dtype, heads)):
        assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    for with_most in (True, False):
        with reaches("sparse_mla", row_of(kind, dtype, heads, with_most)):
            assert_right(problem, *prefill(problem, with_most=with_most))


# Whole tiles and ones with missing rows; pools with gaps and without; lists that end with a tile and ones that do not.
@pytest.mark.gpu
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("kind", ["own", "shared", "bytes"])
@pytest.mark.parametrize("topk,extra_topk", [(128, 64), (65, 130), (1, 1), (320, 63)])
@pytest.mark.parametrize("page_size,extra_page_size", [(1, 64), (64, 1), (7, 3)])
def test_pools_of_two_lists(holes, heads, kind, topk, extra_topk, page_size, extra_page_size):
    lists = {"page_size": page_size, "extra_topk": extra_topk, "extra_page_size": extra_page_size, "holes": holes}
    problem = sparse_problem(kind, BF16, (4, 1), heads, topk, **lists, device="cuda")
    for pool in (problem.selected, problem.extra):
        if heads == 32:
            pool.kv_pages = pool.kv_pages.contiguous()  # one run of rows
    row = row_of(kind, BF16, heads)
    with reaches("sparse_mla", row):
        out, lse = decode(problem)
    assert_right(problem, out, lse)
    again = decode(problem)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    with reaches("sparse_mla", row):
        assert_right(problem, *prefill(problem, with_most=False))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_two_lists_may_be_empty(heads, kind):
    lists = {"page_size": 64, "extra_topk": 90, "extra_page_size": 4, "lengths": True, "sinks": True}
    problem = sparse_problem(kind, BF16, (7, 1), heads, 140, **lists, device="cuda")
    problem.selected.lengths[3], problem.extra.lengths[4], problem.selected.lengths[0] = 0, -5, 64
    with reaches("sparse_mla", row_of(kind, BF16, heads)):
        assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    assert_right(problem, *prefill(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 20, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_checked_mode_of_two_lists(heads, kind):
    lists = {"page_size": 64, "extra_topk": 90, "extra_page_size": 4}
    problem = sparse_problem(kind, BF16, (3, 1), heads, 140, **lists, device="cuda")
    rows = len(problem.extra.values)
    problem.extra.indices[1, 0, 70] = rows
    for run in (decode, prefill):
        report = new_report("cuda")
        with reaches("sparse_mla", row_of(kind, BF16, heads, with_most=run is prefill)):
            assert_right(problem, *run(problem, report=report))
        fault = first_fault(report) or ""
        assert f"row index of the second list {rows}" in fault and "position 70" in fault, fault
    problem.extra.indices[1, 0, 70] = -1
    problem.extra.lengths = torch.full((3, 1), 90, dtype=torch.int32, device="cuda")
    problem.extra.lengths[2] = 91
    report = new_report("cuda")
    assert_right(problem, *decode(problem, report=report))
    assert "length of the second list 91" in (first_fault(report) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("requests", [1, 7, 40])
@pytest.mark.parametrize("parts", [None, 7])
def test_two_lists_of_16_bit_rows_in_pieces(kind, heads, requests, parts):
    """A piece may begin in either list."""
    lists = {"page_size": 64, "extra_topk": 300, "extra_page_size": 4, "lengths": True, "holes": True}
    problem = sparse_problem(kind, BF16, (requests, 1), heads, 700, **lists, device="cuda")
    plan = plan_of(problem, num_sm_parts=parts)
    out, lse = decode(problem, plan)
    assert_right(problem, out, lse)
    again = decode(problem, plan)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


# Blocks of 64 heads, whose loaders convert tiles: a CTA has several tokens, of any number of tiles.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [49, 64, 70, 128])
@pytest.mark.parametrize("topk,extra", [(60, 0), (128, 0), (330, 0), (130, 200)])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("page_size", [1, 7])
def test_many_tokens_of_many_heads_over_rows_of_656_bytes(heads, topk, extra, holes, page_size):
    lists = {"lengths": holes, "holes": holes, "sinks": holes, "page_size": page_size, "extra_topk": extra}
    problem = sparse_problem("bytes", BF16, (400, 1), heads, topk, device="cuda", **lists)
    with reaches("sparse_mla", "sm90_list_rows_bf16"):
        out, lse, _ = prefill(problem, with_most=False)
    assert_right(problem, out, lse)
    again = prefill(problem, with_most=False)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    for plan in (plan_of(problem, num_sm_parts=None), plan_of(problem, fixed=64)):
        assert_right(problem, *decode(problem, plan))


# Scales that fp16 does not hold, of some rows or of all, and queries that it does not hold.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("exponents,query", SCALES)
@pytest.mark.parametrize("negative", [False, True])
def test_rows_of_656_bytes_of_any_scale(heads, exponents, query, negative):
    problem = sparse_problem("bytes", BF16, (300, 1), heads, 330, 64, lengths=True, holes=True, device="cuda")
    rescale(problem, exponents, query)
    q = problem.q.flatten(0, 1)
    for lengths in (problem.selected.lengths.flatten(), None):
        if lengths is None:
            problem.selected.lengths = None
        out, lse = ops.sparse_mla_prefill(
            -q if negative else q,
            problem.selected.kv_pages,
            problem.selected.indices.flatten(0, 1),
            softmax_scale=-SCALE if negative else SCALE,
            topk_length=lengths,
            return_lse=True,
        )
        assert_right(problem, out, lse)


# Few works for the parts of the plan: blocks of 16 heads, whole or in pieces. More: blocks of 32 and 64.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 17, 61, 128])
@pytest.mark.parametrize(
    "shape,topk", [((1, 1), 60), ((1, 1), 1329), ((5, 1), 192), ((1, 6), 512), ((20, 1), 330), ((150, 2), 130)]
)
@pytest.mark.parametrize("lengths", [False, True])
def test_short_calls_over_rows_of_656_bytes(heads, shape, topk, lengths):
    lists = {"lengths": lengths, "holes": lengths, "sinks": lengths, "page_size": 64 if lengths else 7}
    problem = sparse_problem("bytes", BF16 if heads != 61 else FP16, shape, heads, topk, device="cuda", **lists)
    for parts in (None, 6):
        plan = plan_of(problem, num_sm_parts=parts)
        out, lse = decode(problem, plan)
        assert_right(problem, out, lse)
        again = decode(problem, plan)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert_right(problem, *prefill(problem, with_most=False))


# The same of two lists.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 17, 61, 128])
@pytest.mark.parametrize(
    "shape,topk,extra", [((1, 1), 60, 1), ((1, 1), 128, 1329), ((5, 1), 128, 192), ((2, 6), 128, 300)]
)
@pytest.mark.parametrize("lengths", [False, True])
def test_short_calls_over_two_lists_of_656_bytes(heads, shape, topk, extra, lengths):
    lists = {"lengths": lengths, "holes": lengths, "sinks": lengths, "page_size": 64, "extra_page_size": 5}
    dtype = BF16 if heads != 61 else FP16
    problem = sparse_problem("bytes", dtype, shape, heads, topk, extra_topk=extra, device="cuda", **lists)
    for parts in (None, 40):
        plan = plan_of(problem, num_sm_parts=parts)
        with reaches("sparse_mla", row_of("bytes", dtype, heads)):
            out, lse = decode(problem, plan)
        assert_right(problem, out, lse)
        again = decode(problem, plan)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


# The same of rows of 584 bytes; some calls by CTAs of a cluster, which merge their pieces themselves.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [3, 17, 61, 64, 128])
@pytest.mark.parametrize(
    "shape,topk,extra",
    [
        ((1, 1), 128, 64),
        ((1, 1), 60, 0),
        ((1, 1), 128, 1329),
        ((5, 1), 128, 192),
        ((2, 6), 128, 300),
        ((17, 1), 128, 512),
    ],
)
@pytest.mark.parametrize("lengths", [False, True])
def test_short_calls_over_rows_of_584_bytes(heads, shape, topk, extra, lengths):
    lists = {"lengths": lengths, "holes": lengths, "sinks": lengths, "page_size": 64, "extra_page_size": 4}
    dtype = BF16 if heads != 61 else FP16
    problem = sparse_problem("shared_bytes", dtype, shape, heads, topk, extra_topk=extra, device="cuda", **lists)
    for parts in (None, 40):
        plan = plan_of(problem, num_sm_parts=parts)
        out, lse = decode(problem, plan)
        assert_right(problem, out, lse)
        for _ in range(3):
            again = decode(problem, plan)
            assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 40, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", [0, 70])
def test_a_token_of_prefill_has_the_same_bits_alone(heads, kind, extra):
    lists = {"extra_topk": extra, "extra_page_size": 4, "lengths": True, "holes": True}
    problem = sparse_problem(kind, BF16, (30, 1), heads, 150, 64, **lists, device="cuda")
    whole = prefill(problem)
    fast = prefill(problem, with_most=False)
    problem.q = problem.q[5:6]
    for lists in (problem.selected, problem.extra) if extra else (problem.selected,):
        lists.indices, lists.lengths = lists.indices[5:6], lists.lengths[5:6]
    for results, with_most in ((whole, True), (fast, False)):
        for of_all, alone in zip(results, prefill(problem, with_most=with_most), strict=True):
            assert of_all is None or torch.equal(of_all[5:6], alone)
