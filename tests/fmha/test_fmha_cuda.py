"""fmha_varlen and fmha_paged on a GPU: every row of the table against float64, over memory full of NaN.

Every test runs on the device's own kernels, and on those that every architecture from sm_80 on has.
"""

import dataclasses
import math
import random
import re
from pathlib import Path

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from checks import MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR_FP8
from fmha_calls import assert_right, assert_same_bits, filled, plan_of, run, split_plan
from problems import E5M2, FP8, paged_problem, poisoned, ragged_problem, random_tree_mask

pytestmark = pytest.mark.gpu

TABLE = (Path(__file__).parents[2] / "csrc/fmha/impls.cpp").read_text()
ROWS = re.findall(r'^    \{"(\w+)",', TABLE, re.MULTILINE)
PORTABLE = "80"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = [(64, 64), (40, 40), (72, 72), (96, 80), (128, 128), (192, 128), (104, 64), (192, 192), (256, 256)]
DIMS += [(320, 256), (576, 512)]  # of the rows that take any dims


@pytest.fixture(params=["", PORTABLE], ids=["own", "sm80"], autouse=True)
def kernels(request, monkeypatch) -> str:
    monkeypatch.setenv("ATTNOPS_CUDA_ARCH", request.param)
    return request.param


def counts() -> dict[str, int]:
    lines = (line.split() for line in torch.ops.attnops.impl_counts_cuda().splitlines())
    found: dict[str, int] = {}
    for op, row, count in lines:
        if op.startswith("fmha"):
            found[row] = found.get(row, 0) + int(count)
    return found


def rows_asked_since(before: dict[str, int]) -> set[str]:
    return {row for row, count in counts().items() if count > before.get(row, 0)}


def test_dims_reach_every_row(kernels):
    before = counts()
    for dtype in DTYPES.values():
        for head_dim, head_dim_v in DIMS:
            problem = ragged_problem([70, 3], head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype).to("cuda")
            assert_right(problem, logit_cap=30.0)  # plain calls have rows of their own
    hopper = kernels != PORTABLE and torch.cuda.get_device_capability() == (9, 0)
    if hopper:
        for head_dim in (128, 192, 256):
            problem = ragged_problem([70, 3], head_dim=head_dim, dtype=FP8).to("cuda")
            assert_right(problem, bound=MAX_RELATIVE_ERROR_FP8, lse_atol=1e-2, logit_cap=30.0)
    mine = r"sm90_[^_]+_hd|fp32|any" if hopper else "(?!sm90)"  # of Hopper's kernels those of other forms: below
    assert rows_asked_since(before) == {row for row in ROWS if re.match(mine, row)}


def problem_of(form: str, dtype: torch.dtype, head_dim: int, head_dim_v: int):
    """A call that a form of Hopper's kernels is for, and its plan, or None: one that cuts nothing; and its options."""
    options = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": head_dim, "dtype": dtype}
    if "fp8_keys" in form:
        options["kv_dtype"] = FP8
    if "gather" in form:  # few rows share a tile as they do in the long shape, so short calls may gather
        problem = paged_problem([130, 90], [3, 2], page_size=3, **options)
    elif form == "whole_rows":  # a tile is more boxes of a chunk than of eight keys with all columns
        problem = paged_problem([300, 200], [130, 90], page_size=8, **options)
    else:
        wide = head_dim_v > 128
        mean = {"short": 90, "short_one_tile": 30 if wide else 45, "one_tile": 30 if wide else 100}.get(form, 200)
        mean = 1100 if form == "plain" else mean  # not short
        lengths = [mean - 5, mean + 5] * (48 if form == "one_tile" else 1)
        problem = ragged_problem(lengths, head_dim_v=head_dim_v, padding=0, **options)
    if "gather" in form or form == "whole_rows":
        values = {name: getattr(problem, name)[..., :head_dim_v] for name in ("v_pages", "v_exact")}
        problem = dataclasses.replace(problem, **values)
    problem = problem.to("cuda")
    may_cut = form.startswith(("short", "one_tile")) or form in ("plain", "plain_fp8_keys")
    plain = form not in ("", "gather", "fp8_keys")
    return problem, filled(split_plan(problem), problem) if may_cut else None, {} if plain else {"logit_cap": 30.0}


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("sm90")])
def test_every_form_of_hoppers_kernels_is_a_row(row, kernels):
    if kernels == PORTABLE or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's own kernels")
    form, name, head_dim, head_dim_v = re.fullmatch(r"sm90_(?:(.*)_)?([^_]+)_hd(\d+)(?:x(\d+))?", row).groups()
    dtype = {**DTYPES, "e4m3": FP8}[name]
    problem, plan, options = problem_of(form or "", dtype, int(head_dim), int(head_dim_v or head_dim))
    before = counts()
    bounds = {"bound": MAX_RELATIVE_ERROR_FP8, "lse_atol": 1e-2} if dtype == FP8 else {}
    assert_right(problem, plan=plan, **bounds, **options)
    assert rows_asked_since(before) == {row}


@pytest.mark.parametrize("dims", [(64, 64), (40, 40), (128, 128), (192, 128), (256, 256), (320, 256)])
def test_e4m3_queries(dims, kernels):
    """Hopper multiplies them as they are. Others get them in bfloat16, which holds every value, and err less."""
    hopper = kernels != PORTABLE and torch.cuda.get_device_capability() == (9, 0)
    if hopper and (dims[0] % 16 or dims[0] > 256):
        pytest.skip("no kernel of Hopper's, which says so")
    lengths = [1, 130, 300], [40, 130, 777]
    problems = [ragged_problem(*lengths, dtype=FP8, head_dim=dims[0], head_dim_v=dims[1])]
    if dims[0] == dims[1]:
        problems.append(paged_problem(lengths[1], lengths[0], head_dim=dims[0], dtype=FP8))
    for problem in problems:
        problem = problem.to("cuda")
        bound = MAX_RELATIVE_ERROR_FP8 if hopper else MAX_RELATIVE_ERROR[torch.bfloat16]
        assert_right(problem, bound=bound, lse_atol=1e-2)
        assert run(problem)[0].dtype == torch.bfloat16
        if not hopper:
            assert_same_bits(run(problem), run(dataclasses.replace(problem, q=problem.q.bfloat16())))


@pytest.mark.parametrize("seed", range(60))
def test_any_ragged_batch(seed):
    r = random.Random(seed)
    lengths = [r.choice([0, 1, 3, 17, 64, 100, 129, 300, 513]) for _ in range(r.choice([1, 2, 3, 6]))]
    keys = [r.choice([n, n + 5, n + 700, 0, 50]) for n in lengths]
    kv_heads, (head_dim, head_dim_v) = r.choice([1, 2, 3, 5, 8]), r.choice(DIMS)
    causal = r.random() < 0.7
    tree = causal and max(lengths) > 0 and r.random() < 0.3
    if tree:
        keys = [max(pair) for pair in zip(keys, lengths, strict=True)]
    problem = ragged_problem(
        lengths,
        keys,
        num_q_heads=kv_heads * r.choice([1, 2, 3, 4, 7, 16, 71]),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=r.choice(list(DTYPES.values())),
        kv_dtype=r.choice([None, None, FP8, E5M2]),
        padding=0 if tree else 3,
        seed=seed,
    ).to("cuda")
    options = {
        "causal": causal,
        "window_left": r.choice([-1, -1, 0, 5, 128]),
        "window_right": r.choice([-1, -1, 0, 7]),
        "logit_cap": r.choice([0.0, 0.0, 30.0]),
        "softmax_scale": r.choice([1, 1, -1, 0]) / math.sqrt(head_dim),
    }
    if r.random() < 0.3:
        options["sinks"] = torch.randn(problem.q.shape[1], device="cuda")
    if tree:
        options["tree_mask"] = random_tree_mask(lengths, seed=seed).cuda()
    assert_right(problem, tile_q=r.choice([1, 16, 32, 50, 64, 128, 300]), **options)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24, 48, 64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, FP8, E5M2], ids=["as q", "e4m3", "e5m2"])
@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
def test_pages_of_any_size(page_size, kv_dtype, csr):
    for seed, window_left in enumerate([-1, 100]):
        problem = paged_problem(
            [700, 130, 0, 64, 1], [200, 130, 0, 1, 1], head_dim=128, page_size=page_size, kv_dtype=kv_dtype, seed=seed
        ).to("cuda")
        assert_right(problem, csr=csr, window_left=window_left, tile_q=32)


@pytest.mark.parametrize("page_size", [3, 64])
def test_queries_of_any_size_over_e4m3_keys(page_size):
    """Products may be fp16. A power of two in bfloat16 queries that the scale takes back changes no bit."""
    problem = paged_problem([300, 70], [90, 70], head_dim=128, page_size=page_size, kv_dtype=FP8).to("cuda")
    problem.q[::3, :, ::5] *= 2.0**-12
    assert_right(problem)
    expected = run(problem, softmax_scale=0.1)
    for power in (-60, -20, 20, 60):
        moved = dataclasses.replace(problem, q=problem.q * 2.0**power)
        assert_same_bits(expected, run(moved, softmax_scale=math.ldexp(0.1, -power)))


def test_bits_do_not_depend_on_the_batch_or_the_plan():
    alone = paged_problem([900], [300], head_dim=128, page_size=64).to("cuda")
    assert_same_bits(run(alone, tile_q=32), run(alone, tile_q=32))
    whole = run(alone, tile_q=32)
    plan = plan_of(alone, tile_q=32, spare=4000)
    assert not plan.semaphores.any()
    for _ in range(20):
        assert_same_bits(whole, run(alone, tile_q=32, spare=4000))


def test_counters_are_left_at_zero_and_a_plan_serves_again():
    plan = FmhaPlan.allocate(4096, 16, num_q_heads=8, num_kv_heads=2, device="cuda")
    for seed, lengths in enumerate([[4000], [5, 1, 900], [0, 0], [], [300] * 13]):
        problem = ragged_problem(lengths, head_dim=64, padding=0, seed=seed).to("cuda")
        ops.fmha_plan(plan, problem.cu_seqlens_q, problem.cu_seqlens_k)
        out, _ = ops.fmha_varlen(problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, plan)
        assert torch.isfinite(out).all()
        assert not plan.semaphores.any()


def test_a_page_outside_the_pool_is_not_read():
    problem = paged_problem([300, 200], [50, 200], head_dim=128, page_size=64).to("cuda")
    for page in (-1, -(2**31), 2**31 - 1, problem.k_pages.shape[0]):
        problem.page_table[0, 1] = page
        out, _ = run(problem, tile_q=32)
        torch.cuda.synchronize()
        assert torch.isfinite(out[50:250]).all()


@pytest.mark.parametrize("kv_dtype", [None, FP8, E5M2], ids=["as q", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("more", [1, 4, 12])
def test_rows_that_start_anywhere(dtype, kv_dtype, more):
    """Rows of q, out, K and V that are `more` elements apart from a multiple of what one instruction moves."""
    problem = paged_problem([300, 70], [90, 70], head_dim=72, page_size=16, dtype=dtype, kv_dtype=kv_dtype).to("cuda")
    wide = {name: widened(getattr(problem, name), more) for name in ("q", "k_pages", "v_pages")}
    out = widened(torch.zeros_like(problem.q), more)
    assert_right(dataclasses.replace(problem, **wide), tile_q=32, out=out)


def widened(x: torch.Tensor, more: int) -> torch.Tensor:
    """The same values in rows with `more` elements of NaN behind each."""
    rows = poisoned((*x.shape[:-1], x.shape[-1] + more), x.dtype).to(x.device)[..., : x.shape[-1]]
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    rows.view(raw).copy_(x.view(raw))
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checked_mode_names_the_page_and_the_length(dtype):
    problem = paged_problem([300, 200, 90], [50, 200, 9], head_dim=128, page_size=64, dtype=dtype).to("cuda")
    report = torch.zeros(8, dtype=torch.int32, device="cuda")
    run(problem, report=report)
    assert not report.any()
    problem.page_table[1, 2] = 5000
    run(problem, report=report)
    pages = problem.k_pages.shape[0]
    assert report.tolist()[1:7] == [8, 1, 1, 2, 5000, pages] and report[0] > 0
    report.zero_()
    problem = paged_problem([300, 200, 90], [50, 200, 9], head_dim=128, page_size=64, dtype=dtype).to("cuda")
    problem.page_table.clamp_(max=pages - 1)
    room = problem.page_table.shape[1] * 64
    problem.cache_seqlens[2] = room + 7
    run(problem, report=report)
    assert report.tolist()[1:7] == [8, 4, 2, 0, room + 7, room + 1] and report[0] > 0


@pytest.mark.parametrize("kv_dtype", [None, FP8, E5M2], ids=["as q", "e4m3", "e5m2"])
def test_pools_above_two_to_the_31(kv_dtype, kernels):
    """Pages at the end of a pool of more than 2^31 elements and 2^32 bytes."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB")
    small = paged_problem([300, 200], [50, 200], head_dim=128, page_size=64, kv_dtype=kv_dtype).to("cuda")
    pages, shape = small.k_pages.shape[0], small.k_pages.shape[1:]
    most = (1 << 32) // shape.numel() + 5
    pools = {}
    for name in ("k_pages", "v_pages"):
        pool = torch.empty((most, *shape), dtype=small.k_pages.dtype, device="cuda")
        pool[most - pages :].view(torch.uint8).copy_(getattr(small, name).view(torch.uint8))
        pools[name] = pool
    table = torch.where(small.page_table < pages, small.page_table + (most - pages), small.page_table)
    moved = dataclasses.replace(small, page_table=table, **pools)
    assert_same_bits(run(moved), run(small))
