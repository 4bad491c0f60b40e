"""attnops::fmha_paged on every device against float64: pages without tokens hold NaN, unused cells huge indices."""

import dataclasses
import math

import pytest
import torch
from checks import MAX_RELATIVE_ERROR_FP8, assert_attention_close
from fmha_calls import assert_right, assert_same_bits, plan_of, run
from problems import FP8, HUGE_INDEX, LAYOUTS, PagedProblem, empty_pools, paged_problem, random_tree_mask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAGE_SIZES = [1, 3, 16, 64, 128]
LENGTHS = {"cache_seqlens": [300, 1, 0, 129, 64], "seqlen_q": [140, 1, 0, 2, 64]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("csr", [False, True])
def test_page_sizes(csr, page_size, dtype, device):
    assert_right(paged_problem(**LENGTHS, page_size=page_size, dtype=dtype).to(device), csr=csr)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_pass_without_a_copy(layout, device):
    assert_right(paged_problem(**LENGTHS, page_size=16, layout=layout, dtype=torch.float16).to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
def test_fp8_pages(scales, dtype, device):
    problem = paged_problem(**LENGTHS, page_size=16, dtype=dtype, kv_dtype=FP8, scales=scales, head_dim=128).to(device)
    assert_right(problem)
    if scales != "none":
        out, _ = run(problem)
        expected = problem.expected_unquantized()[0]
        assert_attention_close(out.cpu(), expected, dtype, MAX_RELATIVE_ERROR_FP8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window_left": 17},
        {"window_left": 100, "logit_cap": 10.0},
        {"causal": False, "window_right": 3},
    ],
    ids=str,
)
def test_options(options, device):
    sinks = torch.linspace(-1, 1, 8, device=device)
    assert_right(paged_problem(**LENGTHS, page_size=3).to(device), sinks=sinks, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_tree_mask_after_a_prefix(device):
    mask = random_tree_mask(LENGTHS["seqlen_q"]).to(device)
    assert_right(paged_problem(**LENGTHS, page_size=16).to(device), tree_mask=mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(5, 1), (7, 7), (6, 2), (128, 8)])
def test_heads(heads, device):
    assert_right(paged_problem([200, 9], [3, 9], num_q_heads=heads[0], num_kv_heads=heads[1], page_size=16).to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_before_the_window_may_be_gone(dtype, page_size, device):
    """A sliding-window pool frees them: their cells and contents are stale, and are not touched."""
    problem = paged_problem([500, 90], [70, 2], page_size=page_size, dtype=dtype).to(device)
    window = 33
    expected = run(problem, window_left=window)
    table, k, v = problem.page_table.clone(), problem.k_pages.clone(), problem.v_pages.clone()
    for request, (length, queries) in enumerate([(500, 70), (90, 2)]):
        for cell in range((length - queries - window) // page_size):
            page = int(table[request, cell])
            k[page], v[page] = math.nan, math.nan
            table[request, cell] = HUGE_INDEX
    problem = dataclasses.replace(problem, page_table=table, k_pages=k, v_pages=v)
    assert_same_bits(run(problem, window_left=window), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_pool_beyond_2_31_elements_and_2_32_bytes(dtype, device):
    """Two far pages of a huge pool. The memory between them is never touched, so that it costs nothing on a CPU."""
    small = paged_problem([40], 40, page_size=32, num_kv_heads=2, kv_dtype=dtype).to(device)
    stride = (2**32 + 4096) // 2 if dtype == FP8 else 2**31 + 4096
    pools = []
    for pages in (small.k_pages, small.v_pages):
        flat = torch.empty(2 * stride + pages[0].numel(), dtype=pages.dtype, device=device)
        pool = flat.as_strided((3, *pages.shape[1:]), (stride, *pages.stride()[1:]))
        for far, near in ((2, small.page_table[0, 0]), (1, small.page_table[0, 1])):
            pool[far].view(torch.uint8).copy_(pages[int(near)].view(torch.uint8))
        pools.append(pool)
    table = torch.tensor([[2, 1, HUGE_INDEX]], dtype=torch.int32, device=device)
    far = dataclasses.replace(small, k_pages=pools[0], v_pages=pools[1], page_table=table)
    assert_same_bits(run(far), run(small))


@pytest.mark.parametrize("device", DEVICES)
def test_checked_mode_reports_and_skips_bad_pages(device):
    problem = paged_problem([50, 40], [9, 3], page_size=16, dtype=torch.float32)
    table = problem.page_table.clone()
    bad = int(table[1, 1])
    table[1, 1] = HUGE_INDEX
    broken = dataclasses.replace(problem, page_table=table).to(device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    out, lse = run(broken, report=report)
    count, op, kind, request, cell, value, limit, _ = report.tolist()
    assert count > 0 and (op, kind, request, cell, value, limit) == (8, 1, 1, 1, HUGE_INDEX, problem.k_pages.shape[0])

    right, _ = run(problem.to(device))
    assert torch.equal(out[:9], right[:9]), "the other request"
    if device == "cuda":  # numbers, of whatever was taken in the place of the page
        assert out.isfinite().all()
        return
    # The same answer as without the 16 tokens of that page.
    kept = [t for t in range(40) if not 16 <= t < 32]
    keys, values = (x.float()[50:][kept] for x in (problem.k_exact, problem.v_exact))
    scores = torch.einsum("qhd,khd->hqk", problem.q[9:], keys.repeat_interleave(4, 1)) / 8
    position = torch.tensor(kept)
    visible = position <= torch.arange(37, 40).unsqueeze(1)
    scores = scores.masked_fill(~visible, -math.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(4, 1))
    assert_attention_close(out[9:].cpu(), expected, torch.float32)
    torch.testing.assert_close(lse[9:].cpu(), scores.logsumexp(-1).t(), rtol=1e-5, atol=1e-5)
    assert bad >= 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("csr", [False, True])
def test_checked_mode_reports_and_cuts_lengths_beyond_the_table(csr, device):
    problem = paged_problem([30, 20], [2, 2], page_size=16, dtype=torch.float32)
    if not csr:
        problem = dataclasses.replace(problem, page_table=problem.page_table[:, :2].contiguous())
    longer = dataclasses.replace(problem, cache_seqlens=torch.tensor([30, 100], dtype=torch.int32)).to(device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    run(longer, csr=csr, report=report)
    cells = 3 if csr else 2
    assert report[1:4].tolist() == [8, 4, 1] and report[5:7].tolist() == [100, cells * 16 + 1]
    good = torch.zeros(8, dtype=torch.int32, device=device)
    run(problem.to(device), csr=csr, report=good)
    assert not good.any()


@pytest.mark.parametrize("device", DEVICES)
def test_schema(device):
    problem = paged_problem([20, 9], [3, 9], page_size=4).to(device)
    plan = plan_of(problem)
    out, lse = torch.empty_like(problem.q), problem.q.new_empty(problem.q.shape[:2], dtype=torch.float32)
    head = (problem.q, problem.k_pages, problem.v_pages)
    tail = (problem.cache_seqlens, problem.cu_seqlens_q, plan.tile_order, plan.tile_q, 0.1)
    op = torch.ops.attnops.fmha_paged.default
    torch.library.opcheck(op, (out, lse, *head, problem.page_table, None, *tail))
    options = {"sinks": torch.zeros(8, device=device), "report": torch.zeros(8, dtype=torch.int32, device=device)}
    scales = {"k_scale": torch.ones(2, device=device), "v_scale": torch.ones(1, device=device)}
    torch.library.opcheck(op, (out, None, *head, problem.kv_indices, problem.kv_indptr, *tail), {**options, **scales})


def test_problem_has_poison():
    """The tests above mean something: the pools hold NaN, the tables huge indices."""
    problem = paged_problem(**LENGTHS, page_size=16)
    assert isinstance(problem, PagedProblem)
    assert problem.k_pages.isnan().any() and (problem.page_table == HUGE_INDEX).any()
    assert empty_pools(1, 2, 1, 8, torch.float32, "nhd")[0].isnan().all()
