"""Sparse attention over pools above 2^32 bytes: what is named lies at both ends, and around 2^31 and 2^32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops, reference
from compress_calls import cache, model
from indexer_problems import queries
from sparse_calls import Lists, SparseProblem, assert_right, decode, plan_of, prefill, shared_bytes

pytestmark = pytest.mark.gpu

PAGE = 64


def pages_of(size):
    """How many pages of `size` bytes: a little more than 2^32 bytes."""
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB")
    return int(1.03 * 2**32) // size


def far_pages(pages, size):
    """int64, of six pages: both ends, and both sides of 2^31 and 2^32 bytes."""
    at = [2**31 // size, 2**32 // size]
    return torch.tensor([0, at[0] - 1, at[0], at[1] - 1, at[1], pages - 1], device="cuda")


def far_rows(rows, size):
    """int64, of some 200 rows at such places."""
    places = [0, 2**31 // size, 2**32 // size, rows - 30]
    return torch.cat([torch.arange(max(at - 30, 0), min(at + 30, rows)) for at in places])


@pytest.mark.parametrize("kind,heads", [("own", 16), ("own", 64), ("shared", 64), ("bytes", 16), ("bytes", 64)])
def test_rows_above_2_to_the_32_bytes(kind, heads):
    """Lists that name rows at both ends of a pool of 4.4 GB, and on both sides of 2^31 and 2^32 bytes."""
    width, dtype = {"own": (576, torch.bfloat16), "shared": (512, torch.bfloat16), "bytes": (656, torch.uint8)}[kind]
    size = width * dtype.itemsize
    pages = pages_of(size * PAGE)
    pool = torch.empty(pages, PAGE, width, dtype=dtype, device="cuda")
    rows, topk = pages * PAGE, 192
    generator = torch.Generator().manual_seed(5)
    named = far_rows(rows, size)
    values = torch.randn(len(named), width if kind != "bytes" else 576, generator=generator)
    flat = pool.view(rows, width)
    if kind == "bytes":
        stored = reference.pack_mla_fp8_rows(values)
        exact = reference.unpack_mla_fp8_rows(stored).double()
    else:
        stored = values.bfloat16()
        exact = stored.double()
    flat[named.cuda()] = stored.cuda()
    shape = (5, 1)
    chosen = torch.randint(len(named), (*shape, topk), generator=generator)
    q = torch.randn(*shape, heads, values.shape[1], generator=generator).bfloat16().cuda()
    # The expectation knows the named rows alone, by their numbers among them.
    known = SparseProblem(q, Lists(stored, exact, chosen.int(), None), None, None)
    expected = known.expected()
    problem = SparseProblem(q, Lists(pool, exact, named[chosen].int().cuda(), None), None, None)
    problem.expected = lambda: expected
    for parts in (None, 3):
        assert_right(problem, *decode(problem, plan_of(problem, num_sm_parts=parts)))
    assert_right(problem, *prefill(problem, with_most=kind != "bytes"))


@pytest.mark.parametrize("heads", [16, 64])
def test_rows_of_584_bytes_above_2_to_the_32_bytes(heads):
    """Both lists of a token name such rows."""
    pages = pages_of(584 * PAGE)
    pool = torch.empty(pages, PAGE * 584, dtype=torch.uint8, device="cuda")
    named, generator = far_rows(pages * PAGE, 584), torch.Generator().manual_seed(5)
    data, scales, exact = shared_bytes(torch.randn(len(named), 512, generator=generator))
    page, offset = (named // PAGE).cuda(), (named % PAGE).cuda()
    pool[:, : PAGE * 576].unflatten(1, (PAGE, 576))[page, offset] = data.cuda()
    pool[:, PAGE * 576 :].unflatten(1, (PAGE, 8))[page, offset] = scales.cuda()
    q = torch.randn(5, 1, heads, 512, generator=generator).bfloat16().cuda()
    chosen = [torch.randint(len(named), (5, 1, topk), generator=generator) for topk in (128, 192)]
    known = SparseProblem(q, *(Lists(data, exact, one.int(), None) for one in chosen), None)
    expected = known.expected()
    rows = pool.view(pages, PAGE, 584)
    problem = SparseProblem(q, *(Lists(rows, exact, named[one].int().cuda(), None) for one in chosen), None)
    problem.expected = lambda: expected
    for parts in (None, 3):
        assert_right(problem, *decode(problem, plan_of(problem, num_sm_parts=parts)))
    assert_right(problem, *prefill(problem, with_most=False))


def test_index_keys_above_2_to_the_32_bytes():
    """Stored, gathered, in logits and selected: as in a pool of the six pages alone."""
    size = PAGE * 132
    pages = pages_of(size)
    pool = torch.empty(pages, PAGE, 132, dtype=torch.uint8, device="cuda")
    far = far_pages(pages, size)
    few = torch.zeros(len(far), PAGE, 132, dtype=torch.uint8, device="cuda")
    keys, slots = torch.randn(len(far) * PAGE, 128, device="cuda"), torch.arange(len(far) * PAGE, device="cuda")
    ops.store_index_k(few, keys, slots)
    ops.store_index_k(pool, keys, far[slots // PAGE] * PAGE + slots % PAGE)
    assert torch.equal(pool[far], few)
    table = torch.tensor([[5, 0, 3], [4, 2, 1]], device="cuda")
    lengths, bounds = torch.tensor([[190], [100]]).int().cuda(), torch.tensor([0, 190, 290]).int().cuda()
    q, weights = (x.cuda() for x in queries(2, 8, 128))
    found = []
    for index_pages, where in ((few, table.int()), (pool, far[table].int())):
        k, k_scale = torch.zeros(290, 128, dtype=torch.uint8, device="cuda"), torch.zeros(290, device="cuda")
        ops.gather_index_k(k, k_scale, index_pages, where, bounds)
        given = (q.unsqueeze(1), index_pages, where, weights, lengths)
        logits = ops.index_logits_paged(*given, logits=torch.zeros(2, 192, device="cuda"))
        found.append((k, k_scale, logits, ops.index_topk(*given, 50).long()))
    for one, other in zip(found[0][:3], found[1][:3]):
        assert torch.equal(one, other)
    chosen = found[0][3]
    assert bool((chosen >= 0).all())
    assert torch.equal(far[chosen // PAGE] * PAGE + chosen % PAGE, found[1][3])


@pytest.mark.parametrize("width", [584, 132])
def test_entries_above_2_to_the_32_bytes(width):
    """Pooled and stored as in a pool of the six pages alone."""
    given = model(512 if width == 584 else 128, 4, True)
    pages = pages_of(PAGE * width)
    pool = torch.empty(pages, PAGE, width, dtype=torch.uint8, device="cuda")
    far = far_pages(pages, PAGE * width)
    few = torch.full((len(far), PAGE, width), 0x7F, dtype=torch.uint8, device="cuda")
    pool[far] = few
    near = cache(given, 2, 600, few, device="cuda")
    there = dataclasses.replace(
        near,
        pages=pool,
        page_table=far[near.page_table.long()].int(),
        state=near.state.clone(),
        tokens=list(near.tokens),
    )
    near.step([600, 410], "cuda")
    there.tokens = near.tokens
    there.call(near.tokens, "cuda")
    assert torch.equal(pool[far], few) and bool((few != 0x7F).any())


def test_logits_above_2_to_the_32_bytes():
    """Rows at the end of logits of 4.4 GB: written by `index_logits`, and selected from."""
    rows, columns = 8400, 131_200
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB")
    logits = torch.zeros(rows, columns, device="cuda")
    k, k_scale = (2 * torch.randn(500, 128)).to(torch.float8_e4m3fn).cuda(), torch.rand(500, device="cuda")
    q, weights = (x.cuda() for x in queries(rows, 8, 128))
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    end = start.clone()
    end[0], end[-3:] = 500, 400
    ops.index_logits(q, k, k_scale, weights, start, end, logits=logits)
    some = torch.tensor([0, rows - 3, rows - 2, rows - 1], device="cuda")
    expected = torch.zeros(4, 500, device="cuda")
    ops.index_logits(q[some], k, k_scale, weights[some], start[some], end[some], logits=expected)
    assert torch.equal(logits[some, :500], expected) and bool(expected.any(1).all())
    assert not logits[1 : rows - 3].any()
    logits[-1].normal_()
    end[-1] = columns
    chosen = ops.topk_select(logits, end, 100)
    again = ops.topk_select(logits[some], end[some], 100)
    assert torch.equal(chosen[some], again) and bool((chosen[1 : rows - 3] == -1).all())
    assert torch.equal(again[-1].sort()[0], logits[-1].topk(100)[1].sort()[0].int())
