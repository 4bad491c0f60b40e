"""Every row of every CUDA table: that a test reaches it, and what no value in a tensor may do to it."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from attnops import ops
from attnops.metadata import XqaDecodePlan
from attnops.metadata.plan import MlaDecodePlan
from checks import assert_attention_close, assert_lse_close, relative_error
from kernel_rows import MLA_ROWS, ROWS, XQA_ROWS, between_nans, blind_tree, case_of, finite
from mla_calls import decode as decode_mla
from problems import FP8, paged_problem
from xqa_decoding import decode as decode_xqa

CSRC = Path(__file__).parent.parent / "csrc"
gpu = pytest.mark.gpu
each_row = pytest.mark.parametrize("op,row", ROWS.values(), ids=ROWS)
BALANCED_ROWS = r"sm90_(cluster_(.*_hd(64|192)|gather_fp8|blocks)|ragged)"  # of balanced plans alone
RING_CUT, CUT = 1024, 960  # tokens: cuts of mla_decode that are long enough for the ring, and not
BAD_PAGES = {0: -1, 2: None, 3: 2**31 - 1, 4: -(2**31)}  # by request; None: the first behind the pool


@pytest.mark.parametrize("op,rows", [("xqa_decode", XQA_ROWS), ("mla_decode", MLA_ROWS)])
def test_the_rows_are_those_of_the_table(op, rows):
    names = re.findall(r'^    \{"(\w+)",', (CSRC / op / "impls.cpp").read_text(), re.MULTILINE)
    assert set(names) == {row.split()[0] for row in rows}


@gpu
@each_row
def test_every_row(op, row):
    case = case_of(op, row)
    out, lse = case.decode()
    expected_out, expected_lse = case.expected()
    assert_attention_close(out, expected_out, case.problem.q.dtype, case.bound())
    assert_lse_close(lse, expected_lse, atol=case.lse_bound())


@gpu
@each_row
@pytest.mark.parametrize("window_left", [-1, 1], ids=["no window", "window"])
def test_what_no_row_sees_may_hold_nan(op, row, window_left):
    """Drafts outside every row of their request's tree, or outside its window, too."""
    if "ragged" in row:
        pytest.skip("without trees and windows")
    tokens = 4
    case = case_of(op, row, seqlen_q=tokens)
    mask, hidden = blind_tree(case.problem.batch_size, tokens)
    if window_left >= 0:  # the first draft is in the last row alone, whose window holds the two that it sees behind it
        bits = mask.view(-1, tokens)
        bits &= 0xFE
        bits[:, -1] = 0b1101
        hidden[:, 0], hidden[:, 2:] = True, False
        hidden[:, 1] = (bits & 0b10 == 0).all(1)
        if "ring" in row:
            pytest.skip("the ring serves no window")
    options = {"tree_mask": mask.view(-1, tokens, 1) if op == "mla_decode" else mask}
    options |= {"window_left": window_left} if window_left >= 0 else {}
    expected_out, expected_lse = case.expected(**{**options, "tree_mask": mask})
    for request, length in enumerate(case.problem.cache_seqlens.tolist()):
        case.poison(request, [length - tokens + draft for draft in hidden[request].nonzero().flatten().tolist()])
    # Rows of four tokens are more than FP8 blocks take, so another kernel serves their trees.
    any_row = window_left >= 0 or re.match("sm90_cluster_blocks.*fp8", row) is not None
    out, lse = case.decode(any_row=any_row, **{**options, "tree_mask": options["tree_mask"].cuda()})
    assert_attention_close(out, expected_out, case.problem.q.dtype, case.bound())
    assert_lse_close(lse, expected_lse, atol=case.lse_bound())


@gpu
@each_row
@pytest.mark.parametrize("form", ["matrix", "csr"])
def test_bad_pages_are_not_read(op, row, form):
    """NaN lies on both sides of the pool, and none within: whatever is read, numbers come out. Other requests differ
    in no bit."""
    case = case_of(op, row).with_pools(lambda pool: between_nans(finite(pool)))
    name = "page_table" if form == "matrix" else "kv_indices"
    if form == "csr" and "ring" in row:
        pytest.skip("a matrix alone chooses this row")
    options = {"csr": True} if form == "csr" else {}
    good_out, _ = case.decode(**options)
    cells = getattr(case.problem, name).clone()
    pages = case.pools[0].shape[0]
    for request, page in BAD_PAGES.items():
        where = cells[request] if form == "matrix" else cells[case.problem.kv_indptr[request] :]
        where[0] = pages if page is None else page
    out, _ = case.having(**{name: cells}).decode(**options)
    assert out.isfinite().all()
    assert torch.equal(out[1], good_out[1])


@gpu
@each_row
@pytest.mark.parametrize("fixed", [0, 1], ids=["balanced", "batch-invariant"])
@pytest.mark.parametrize("more", [1, 700, 1 << 29, 2**31 - 1])
def test_a_length_beyond_the_page_table_is_clamped_there(op, row, fixed, more):
    case = case_of(op, row).with_pools(finite)
    if fixed:
        if re.match(BALANCED_ROWS, row) or (op == "mla_decode" and "few" not in row and more > 700):
            pytest.skip("takes balanced plans, or has no room for so many cuts")
        options = {"fixed_split_tokens": -16} if op == "xqa_decode" else {"fixed": RING_CUT if "ring" in row else CUT}
    else:
        options = {}
    table, pages = case.problem.page_table, case.pools[0].shape[0]
    table = torch.where(table >= pages, torch.arange(table.shape[1], device="cuda") % pages, table).int()
    room = table.shape[1] * case.page_size
    lengths = case.problem.cache_seqlens.clone()
    lengths[2] = room
    good_out, good_lse = case.having(page_table=table, cache_seqlens=lengths.clone()).decode(**options)
    lengths[2] = min(room + more, 2**31 - 1)
    out, lse = case.having(page_table=table, cache_seqlens=lengths).decode(**options)
    if fixed and op == "mla_decode" and out[2].isnan().all():
        return  # more cuts than there is room for, which must not pass for an answer
    assert relative_error(out, good_out) <= case.bound()
    assert_lse_close(lse, good_lse, atol=case.lse_bound())


@gpu
@each_row
def test_parts_inside_a_cut_are_idle(op, row):
    """More parts than cuts, each with less than a cut: in a batch-invariant plan some begin and end inside a work."""
    if re.match(BALANCED_ROWS, row):
        pytest.skip("takes balanced plans")
    case = case_of(op, row, [3000, 64, 5, 517, 66])
    options = {"fixed_split_tokens": 1024} if op == "xqa_decode" else {"fixed": RING_CUT if "ring" in row else CUT}
    out, lse = case.decode(any_row="cluster" in row, num_sm_parts=60, **options)
    expected_out, expected_lse = case.expected()
    assert_attention_close(out, expected_out, case.problem.q.dtype, case.bound())
    assert_lse_close(lse, expected_lse, atol=case.lse_bound())


@gpu
@each_row
def test_lengths_below_zero_are_none(op, row):
    case = case_of(op, row)
    lengths = case.problem.cache_seqlens.clone()
    lengths[0], lengths[3] = -1, -(2**31)
    out, lse = case.having(cache_seqlens=lengths).decode()
    assert not out[[0, 3]].any() and (lse[[0, 3]] == -torch.inf).all() and lse[[1, 2, 4]].isfinite().all()


@gpu
@each_row
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_sees_no_key_may_hold_anything(op, row, value):
    """It is not multiplied into the zeros of its row. Where it sees keys, it shows, and in no other row."""
    case = case_of(op, row, [130, 0, 5, 517, 66])
    good_out, _ = case.decode()
    q = case.problem.q.clone()
    q[[1, 3]] = value
    out, lse = case.having(q=q).decode()
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out[3].isnan().all()
    assert torch.equal(out[[0, 2, 4]], good_out[[0, 2, 4]])


@gpu
@each_row
def test_kv_indptr_may_hold_anything(op, row):
    if "ring" in row:
        pytest.skip("a matrix alone chooses this row")
    case = case_of(op, row).with_pools(lambda pool: between_nans(finite(pool)))
    for hostile in ([1 << 30] * 6, [-5] * 6, [-(2**31), 2**31 - 1] * 3, [9, 8, 7, 6, 5, 4], [0, 1, 2, 10**6, 3, 4]):
        indptr = torch.tensor(hostile, dtype=torch.int32, device="cuda")
        out, _ = case.having(kv_indptr=indptr).decode(csr=True)
        assert out.isfinite().all()


@gpu
@each_row
@pytest.mark.parametrize("without", ["requests", "columns", "pages", "tokens"])
def test_extents_of_zero(op, row, without):
    """No request, no column of the page table, no page, no token: legal, and a row without keys is zero."""
    case = case_of(op, row, [] if without == "requests" else [130, 1, 0])
    problem = case.problem
    if without == "columns":
        problem = dataclasses.replace(problem, page_table=problem.page_table[:, :0])
    if without == "pages":
        names = ["k_pages", "v_pages"] if op == "xqa_decode" else ["kv_pages"]
        problem = dataclasses.replace(problem, **{name: getattr(problem, name)[:0] for name in names})
    if without == "tokens":
        problem = dataclasses.replace(problem, cache_seqlens=torch.zeros_like(problem.cache_seqlens))
    call = {name: value for name, value in case.call.items() if name not in ("checked", "ragged")}
    if case.call.get("ragged"):
        call["cu_seqlens_q"] = problem.cu_seqlens_q
    if case.call.get("checked"):
        call["report"] = torch.zeros(8, dtype=torch.int32, device="cuda")
    out, lse = (decode_xqa if op == "xqa_decode" else decode_mla)(problem, **call)
    assert not out.any() and (lse == -torch.inf).all()


@gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fixed", [0, -16, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_empty_batch_chooses_some_kernel(dtype, kv_dtype, fixed, head_dim):
    problem = paged_problem([], head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype).to("cuda")
    plan = XqaDecodePlan.allocate(
        0,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        fixed_split_tokens=fixed,
        max_seqlen_k=4096,
        device="cuda",
    )
    ops.xqa_decode_plan(plan, problem.cache_seqlens)
    out, _ = ops.xqa_decode(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        problem.cache_seqlens,
        plan,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
    )
    torch.cuda.synchronize()
    assert out.numel() == 0


@gpu
@pytest.mark.parametrize("lengths", [[2**31 - 1] * 5, [2**31 - 1, 5, -(2**31), 0, 2**30], [2**31 - 1] * 200])
@pytest.mark.parametrize("fixed", [0, 64])
def test_plans_of_any_lengths_are_those_of_the_cpu(lengths, fixed):
    plans = {}
    for device in ("cpu", "cuda"):
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        mla = MlaDecodePlan.allocate(
            len(lengths), num_q_heads=16, num_sm_parts=7, fixed_split_tokens=fixed, max_seqlen_k=64, device=device
        )
        ops.mla_decode_plan(mla, seqlens)
        plans[device] = (mla.tile_scheduler_metadata.cpu(), mla.num_splits.cpu())
    assert all(torch.equal(a, b) for a, b in zip(plans["cpu"], plans["cuda"], strict=True))
    assert (plans["cpu"][1] >= 0).all()


@gpu
def test_a_second_device_is_served_as_the_first():
    """Function attributes, tensor maps and counts of multiprocessors belong to a device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for op, row in ROWS.values():
        case = case_of(op, row)
        moved = dataclasses.replace(case, problem=case.problem.to("cuda:1"))
        if not case.call.get("checked"):
            assert all(torch.equal(a, b) for a, b in zip(case.decode(), moved.decode(), strict=True)), row
