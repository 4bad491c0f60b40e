"""attnops::mla_decode on every device, against float64 attention over the stored values, in poisoned memory."""

import dataclasses
import math

import pytest
import torch
from attnops import ops, reference
from attnops.ops.mla_decode import widened
from checks import MAX_RELATIVE_ERROR_FP8, assert_attention_close, assert_lse_close
from mla_calls import SCALE, assert_equals_reference, decode, lse_tolerance, plan_for, repaged
from problems import E5M2, FP8, FP8_NAN, hide_unseen, mla_problem, random_tree_mask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KV_DTYPES = [None, FP8, torch.uint8]  # None: q's dtype
RAGGED = [1, 63, 64, 65, 200, 2, 517]  # lengths around the tile of 64 keys, and one of several tiles
ISAS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """Every instruction set of this processor, one after the other."""
    monkeypatch.setenv("ATTNOPS_CPU_ISA", request.param)
    if torch.ops.attnops.cpu_isa() != request.param:
        pytest.skip(f"this processor has no {request.param}")
    return request.param


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_equals_float64_attention(isa, dtype, kv_dtype):
    problem = mla_problem([70, 3, 0, 257], 3, num_q_heads=11, page_size=16, dtype=dtype, kv_dtype=kv_dtype)
    tree_mask = random_tree_mask([3] * 4)
    sinks = torch.linspace(-2, 4, 11)
    masks = [{}, {"causal": False, "window_left": 66}, {"tree_mask": tree_mask, "sinks": sinks, "logit_cap": 2.5}]
    for options in masks:
        tree = options.get("tree_mask")
        call = {**options, "tree_mask": tree.view(4, 3, -1)} if tree is not None else options
        assert_equals_reference(problem, *decode(problem, **call), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_float64_attention(dtype, kv_dtype, device):
    problem = mla_problem(RAGGED, dtype=dtype, kv_dtype=kv_dtype).to(device)
    assert_equals_reference(problem, *decode(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pages_of_e5m2(dtype, page_size, csr, device):
    """On a GPU a copy of the pages in use is in q's dtype, scaled: what lies behind a table's end is not read."""
    problem = mla_problem(RAGGED, 2, page_size=page_size, num_q_heads=5, dtype=dtype, kv_dtype=E5M2, strided=True)
    for changed in (problem, dataclasses.replace(problem, kv_scale=None)):
        stored = changed
        if device == "cuda" and changed.kv_scale is not None:  # the product is rounded once
            copied = (changed.kv_pages.float() * changed.kv_scale).to(dtype)
            stored = dataclasses.replace(changed, kv_pages=copied, kv_scale=None)
        result = decode(changed.to(device), csr=csr, window_left=130)
        assert_equals_reference(stored, *result, window_left=130)


@pytest.mark.parametrize("csr", [False, True])
def test_the_copy_that_a_gpu_reads_of_pages_of_e5m2(csr):
    problem = mla_problem(RAGGED, 2, page_size=16, num_q_heads=5, kv_dtype=E5M2)
    table = problem.kv_indices if csr else problem.page_table
    pages, cells, scale = widened(problem.kv_pages, table, problem.q.dtype, problem.kv_scale)
    assert scale is None and pages.dtype == problem.q.dtype and cells.shape == table.shape
    copied = dataclasses.replace(
        problem, kv_pages=pages, kv_scale=None, **{"kv_indices" if csr else "page_table": cells}
    )
    out, lse = decode(copied, csr=csr)
    expected, expected_lse = problem.expected(softmax_scale=SCALE)
    assert_attention_close(out, expected, problem.q.dtype)
    assert_lse_close(lse, expected_lse, atol=1e-2)
    nothing = widened(problem.kv_pages[:0], table, problem.q.dtype, None)[0]
    assert nothing.shape == (table.numel(), 16, 576)


def test_pages_of_e5m2_under_float32_queries():
    problem = mla_problem(RAGGED, 3, num_q_heads=5, dtype=torch.float32, kv_dtype=E5M2)
    tree_mask, sinks = random_tree_mask([3] * len(RAGGED)), torch.linspace(-2, 4, 5)
    result = decode(problem, tree_mask=tree_mask.view(len(RAGGED), 3, -1), sinks=sinks, logit_cap=2.5)
    assert_equals_reference(problem, *result, tree_mask=tree_mask, sinks=sinks, logit_cap=2.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [FP8, torch.uint8])
def test_quantized_latents_stay_near_the_exact_ones(kv_dtype, device):
    problem = mla_problem(RAGGED, dtype=torch.bfloat16, kv_dtype=kv_dtype).to(device)
    out, _ = decode(problem)
    expected, _ = problem.expected_unquantized(softmax_scale=SCALE)
    assert_attention_close(out.cpu(), expected, torch.bfloat16, MAX_RELATIVE_ERROR_FP8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [3, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_products_stay_near_the_stored_values(dtype, page_size, device):
    problem = mla_problem([1000, 64, 0, 130], 2, num_q_heads=40, page_size=page_size, dtype=dtype, kv_dtype=FP8)
    problem = problem.to(device)
    sinks = torch.linspace(-2, 4, 40)
    out, lse = decode(problem, fp8_products=True, sinks=sinks.to(device), window_left=700)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE, sinks=sinks, window_left=700)
    # q and probabilities rounded to e4m3: 2.6 % each on average, of a score near 1.7 in the first case.
    assert_attention_close(out.cpu(), expected_out, dtype, 6e-2)
    assert_lse_close(lse.cpu(), expected_lse, atol=0.3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [0, 128])
@pytest.mark.parametrize("num_sm_parts", [2, 7, 34])
def test_fp8_products_over_odd_and_even_tiles(num_sm_parts, fixed, device):
    """Tiles go in pairs, and several pieces through one ring."""
    lengths = [1, 64, 65, 128, 129, 700, 0, 320, 30, 200]
    problem = mla_problem(lengths, num_q_heads=128, dtype=torch.bfloat16, kv_dtype=FP8).to(device)
    out, lse = decode(problem, fp8_products=True, fixed=fixed, num_sm_parts=num_sm_parts)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE)
    assert_attention_close(out.cpu(), expected_out, torch.bfloat16, 6e-2)
    assert_lse_close(lse.cpu(), expected_lse, atol=0.3)


def cut_scores(q, keys, bits=13):
    """float64 q k^T as the e4m3 units add it up: 32 columns at a time, each addend cut so far below the largest one."""
    total = torch.zeros(len(q), len(keys), dtype=torch.float64)
    for i in range(0, q.shape[1], 32):
        addends = torch.cat([total[..., None], q[:, None, i : i + 32] * keys[None, :, i : i + 32]], -1)
        unit = addends.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor().sub(bits).exp2()
        total = ((addends / unit).trunc() * unit).sum(-1)
    return total


@pytest.mark.gpu
def test_rounded_products_of_parallel_vectors_lose_what_the_units_cut():
    """All addends of such a score are positive, so that cutting them makes it smaller."""
    problem = mla_problem([200], num_q_heads=40, dtype=torch.bfloat16, kv_dtype=FP8)
    stored = reference.gather_tokens(problem.kv_pages, problem.page_table, 0, 200).float().double()
    scale = SCALE * float(problem.kv_scale)
    q = (stored[60:100] * float(problem.kv_scale)).to(torch.bfloat16)
    _, lse = decode(dataclasses.replace(problem, q=q.unsqueeze(0)).to("cuda"), fp8_products=True)
    factor = (7 - q.double().abs().amax(-1, keepdim=True).log2().floor()).exp2()  # the largest value to [128, 256)
    rounded = (q.double() * factor).to(FP8).double()
    expected = (cut_scores(rounded, stored) / factor * scale).logsumexp(-1)
    exact = (q.double() @ stored.T * scale).logsumexp(-1)
    assert_lse_close(lse.cpu(), expected.float().view_as(lse), atol=0.05)
    assert (exact - expected).abs().max() < exact.abs().max() / 64


@pytest.mark.parametrize("device", DEVICES)
def test_error_is_at_most_one_and_a_half_times_that_of_sdpa(device):
    problem = mla_problem([700], 4, num_q_heads=16, dtype=torch.bfloat16).to(device)
    out, _ = decode(problem, causal=False)
    expected, _ = problem.expected(softmax_scale=SCALE, causal=False)
    latent = problem.latent_exact.to(torch.bfloat16)
    q = problem.q.transpose(0, 1).unsqueeze(0)
    k = latent.expand(1, 16, *latent.shape)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, k[..., :512], scale=SCALE)[0].transpose(0, 1)
    error = (out.double().cpu() - expected).norm()
    assert error <= 1.5 * (sdpa.double().cpu() - expected).norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("num_q_heads", [1, 3, 5, 7, 16, 64, 128])
def test_every_head_count_and_query_length(num_q_heads, seqlen_q, device):
    problem = mla_problem([70, 8, 131], seqlen_q, num_q_heads=num_q_heads).to(device)
    assert_equals_reference(problem, *decode(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [FP8, torch.uint8])
@pytest.mark.parametrize("num_q_heads, seqlen_q", [(1, 1), (3, 2), (7, 5), (16, 5), (64, 1), (128, 1), (128, 3)])
def test_head_counts_and_query_lengths_over_fp8(num_q_heads, seqlen_q, kv_dtype, device):
    problem = mla_problem([70, 8, 131], seqlen_q, num_q_heads=num_q_heads, kv_dtype=kv_dtype).to(device)
    assert_equals_reference(problem, *decode(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 128])
def test_every_page_size(page_size, kv_dtype, csr, device):
    problem = mla_problem(RAGGED, page_size=page_size, num_q_heads=5, kv_dtype=kv_dtype).to(device)
    assert_equals_reference(problem, *decode(problem, csr=csr))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 5, 8, 16, 32, 64, 192])
def test_every_page_size_with_many_rows(page_size, dtype, strided, device):
    """Whole tiles and tails of them, in an even and an odd number, of requests with more rows than one block."""
    lengths = [700, 64, 1, 0, 389]
    problem = mla_problem(lengths, 2, num_q_heads=35, page_size=page_size, dtype=dtype, strided=strided).to(device)
    assert_equals_reference(problem, *decode(problem, num_sm_parts=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pool_is_a_slice_of_a_larger_one(kv_dtype, device):
    problem = mla_problem(RAGGED, page_size=16, kv_dtype=kv_dtype, strided=True).to(device)
    assert_equals_reference(problem, *decode(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("fixed", [0, 128])
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window_left": 0},
        {"window_left": 5},
        {"window_left": 150, "causal": False},
        {"logit_cap": 1.5},
        {"sinks": True},
        {"sinks": True, "window_left": 100, "logit_cap": 3.0},
    ],
    ids=str,
)
def test_masks_caps_and_sinks(options, seqlen_q, fixed, kv_dtype, device):
    lengths = [3, 500, 64, 0, 129]
    problem = mla_problem(lengths, seqlen_q, num_q_heads=20, page_size=16, kv_dtype=kv_dtype).to(device)
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-3, 6, 20, device=device)}
    out, lse = decode(problem, fixed=fixed, **options)
    options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    assert_equals_reference(problem, out, lse, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window_left", [-1, 70])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("seqlen_q", [3, 8, 17, 70])
def test_tree_mask(seqlen_q, kv_dtype, window_left, device):
    """70 query tokens: the drafts span two tiles and a row's mask more than one word."""
    lengths = [seqlen_q, 300, seqlen_q + 60]
    problem = mla_problem(lengths, seqlen_q, num_q_heads=5, kv_dtype=kv_dtype).to(device)
    tree_mask = random_tree_mask([seqlen_q] * 3)
    out, lse = decode(problem, tree_mask=tree_mask.view(3, seqlen_q, -1).to(device), window_left=window_left)
    assert_equals_reference(problem, out, lse, tree_mask=tree_mask, window_left=window_left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [0, 64])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("num_q_heads", [5, 16, 30])
@pytest.mark.parametrize("seqlen_q, tree_keys", [(1, 3), (4, 20), (3, 64), (8, 130)])
def test_trees_over_more_keys(seqlen_q, tree_keys, num_q_heads, kv_dtype, fixed, device):
    """Branches of a draft loop: rows of one request. Keys that nobody sees hold NaN."""
    lengths = [300, tree_keys, tree_keys // 2 + 1, 64 + tree_keys]
    problem = mla_problem(lengths, seqlen_q, num_q_heads=num_q_heads, page_size=16, kv_dtype=kv_dtype)
    visible = torch.rand(4, seqlen_q, tree_keys, generator=torch.Generator().manual_seed(tree_keys)) < 0.3
    mask = reference.pack_tree_mask(visible)
    rules = {"tree_mask": mask.flatten(0, 1), "tree_keys": tree_keys, "softmax_scale": SCALE}
    expected, expected_lse = problem.expected(**rules)
    hide_unseen(problem, visible.any(1))
    problem = problem.to(device)
    out, lse = decode(problem, tree_mask=mask.to(device), tree_keys=tree_keys, fixed=fixed)
    assert_attention_close(out.cpu(), expected, problem.q.dtype)
    assert_lse_close(lse.cpu(), expected_lse, atol=lse_tolerance(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [0, 64, 192, 1024])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("num_sm_parts", [1, 2, 7, 34])
def test_every_split_gives_the_same_answer(num_sm_parts, kv_dtype, fixed, device):
    problem = mla_problem([1500, 1, 0, 300, 64], 2, num_q_heads=40, kv_dtype=kv_dtype).to(device)
    assert_equals_reference(problem, *decode(problem, fixed=fixed, num_sm_parts=num_sm_parts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"window_left": 70}, {"logit_cap": 2.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("lengths", [[256, 256, 256], [512, 480, 449], [300, 256, 640], [512, 0, 256]], ids=str)
@pytest.mark.parametrize("num_q_heads, seqlen_q", [(64, 1), (50, 1), (60, 3)])
def test_twice_as_many_parts_as_works(num_q_heads, seqlen_q, lengths, options, device):
    """Works cut in two, all, some or none of them, also into uneven parts."""
    problem = mla_problem(lengths, seqlen_q, num_q_heads=num_q_heads).to(device)
    works = len(lengths) * -(-num_q_heads * seqlen_q // 64)
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-2, 4, num_q_heads)}
    call = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    first_out, first_lse = decode(problem, num_sm_parts=2 * works, **call)
    assert_equals_reference(problem, first_out, first_lse, **options)
    for _ in range(3):
        out, lse = decode(problem, num_sm_parts=2 * works, **call)
        assert torch.equal(out, first_out) and torch.equal(lse, first_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_empty_rows_give_zero_and_minus_inf(kv_dtype, device):
    problem = mla_problem([0, 2, 0, 9], 5, num_q_heads=7, kv_dtype=kv_dtype).to(device)
    out, lse = decode(problem, sinks=torch.zeros(7, device=device))
    out, lse = out.unflatten(0, (4, 5)), lse.unflatten(0, (4, 5))
    for request, empty in [(0, 5), (1, 3), (2, 5)]:  # request 1 has two tokens: three of its five rows see nothing
        assert torch.equal(out[request, :empty], torch.zeros_like(out[request, :empty]))
        assert torch.equal(lse[request, :empty], torch.full_like(lse[request, :empty], -math.inf))
    assert torch.isfinite(lse[1, 3:]).all() and torch.isfinite(lse[3]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_negative_lengths_count_as_zero(device):
    problem = mla_problem([0, 5], num_q_heads=3).to(device)
    problem.cache_seqlens[0] = -7
    out, lse = decode(problem)
    assert not out[0].any() and torch.isinf(lse[0]).all() and torch.isfinite(lse[1]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [0, 64])
def test_zero_requests(fixed, device):
    problem = mla_problem([], num_q_heads=16).to(device)
    out, lse = decode(problem, fixed=fixed)
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, -0.05, 40.0])
def test_any_finite_scale(scale, device):
    """Zero is a mean, a negative scale turns the order, a large one makes scores of a thousand."""
    problem = mla_problem([200, 1], 2, num_q_heads=9, dtype=torch.float32).to(device)
    out, lse = decode(problem, softmax_scale=scale)
    expected_out, expected_lse = problem.expected(softmax_scale=scale)
    assert_attention_close(out.cpu(), expected_out, torch.float32, 1e-4 if scale > 1 else None)
    assert_lse_close(lse.cpu(), expected_lse, atol=1e-2 if scale > 1 else 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_nan_in_a_visible_token_shows(kv_dtype, device):
    problem = mla_problem([100, 100], num_q_heads=3, kv_dtype=kv_dtype).to(device)
    page, offset = problem.page_table[1, 1], 20
    if kv_dtype is None:
        problem.kv_pages[page, offset, 3] = math.nan
    else:
        problem.kv_pages.view(torch.uint8)[page, offset, 3] = FP8_NAN
    out, lse = decode(problem)
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()
    assert out[1].isnan().all() and lse[1].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_apart_is_the_joint_query_bit_for_bit(dtype, kv_dtype, device):
    problem = mla_problem(RAGGED, 2, num_q_heads=7, dtype=dtype, kv_dtype=kv_dtype).to(device)
    for joint, apart in zip(decode(problem), decode(problem, apart=True), strict=True):
        assert torch.equal(joint, apart)


@pytest.mark.parametrize("device", DEVICES)
def test_csr_is_the_matrix_bit_for_bit(device):
    problem = mla_problem(RAGGED, 2, num_q_heads=7, page_size=3).to(device)
    for matrix, csr in zip(decode(problem), decode(problem, csr=True), strict=True):
        assert torch.equal(matrix, csr)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_pages(isa, dtype, kv_dtype):
    """Pages of 64 rows are multiplied where they lie, pages of 3 are gathered first."""
    problem = mla_problem([300, 64], 2, num_q_heads=21, dtype=dtype, kv_dtype=kv_dtype)
    out, lse = decode(problem)
    for page_size in (3, 32, 96):
        moved_out, moved_lse = decode(repaged(problem, page_size))
        assert torch.equal(moved_out, out) and torch.equal(moved_lse, lse)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_outputs_and_tables_may_be_strided(device):
    problem = mla_problem([90, 5, 140], 3, num_q_heads=6).to(device)
    expected, _ = decode(problem)
    q = problem.q_by_request
    head_major = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)  # strides of [H, B, S_q, 576]
    wide_out = q.new_full((3, 3, 9, 530), math.nan)
    wide_table = torch.cat([problem.page_table, problem.page_table], dim=1)
    ops.mla_decode(
        head_major,
        problem.kv_pages,
        wide_table[:, : problem.page_table.shape[1]],
        problem.cache_seqlens,
        plan_for(problem),
        softmax_scale=SCALE,
        out=wide_out[:, :, 1:7, :512],
    )
    assert torch.equal(wide_out[:, :, 1:7, :512].flatten(0, 1), expected)
    assert wide_out[:, :, 0].isnan().all() and wide_out[:, :, 7:].isnan().all() and wide_out[..., 512:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_flat_queries_and_allocated_results(device):
    problem = mla_problem([90, 5], 3, num_q_heads=6).to(device)
    expected_out, expected_lse = decode(problem)
    call = (problem.kv_pages, problem.page_table, problem.cache_seqlens, plan_for(problem))
    out, lse = ops.mla_decode(problem.q, *call, softmax_scale=SCALE)
    assert lse is None and torch.equal(out, expected_out)
    apart = {"q_pe": problem.q[..., 512:], "softmax_scale": SCALE}
    out, lse = ops.mla_decode(problem.q[..., :512], *call, return_lse=True, **apart)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_sinks_in_lse(device):
    problem = mla_problem([90, 0], num_q_heads=6).to(device)
    sinks = torch.linspace(-1, 2, 6, device=device)
    out, lse = decode(problem, sinks=sinks, sinks_in_lse=True)
    expected_out, expected_lse = problem.expected(softmax_scale=SCALE, sinks=sinks.cpu(), sinks_in_lse=True)
    assert_attention_close(out.cpu(), expected_out, torch.bfloat16)
    assert_lse_close(lse.cpu(), expected_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("fixed", [0, 128])
def test_repeats_give_the_same_bits(fixed, kv_dtype, device):
    problem = mla_problem([700, 64, 90], 2, num_q_heads=40, kv_dtype=kv_dtype).to(device)
    first_out, first_lse = decode(problem, fixed=fixed)
    for _ in range(3):
        out, lse = decode(problem, fixed=fixed)
        assert torch.equal(out, first_out) and torch.equal(lse, first_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window_left", [-1, 200])
def test_batch_invariant_mode_gives_a_request_the_same_bits_in_any_batch(window_left, kv_dtype, dtype, device):
    problem = mla_problem([700, 64, 0, 333, 90, 1], 3, num_q_heads=40, dtype=dtype, kv_dtype=kv_dtype).to(device)
    out, lse = decode(problem, fixed=128, window_left=window_left)
    out, lse = out.unflatten(0, (6, 3)), lse.unflatten(0, (6, 3))

    for chosen in ([0], [3], [4, 0], [5, 1, 3], [3] * 7):
        rows = torch.tensor(chosen, device=device)
        part = type(problem)(
            **{
                **vars(problem),
                "q": problem.q.unflatten(0, (6, 3))[rows].flatten(0, 1),
                "page_table": problem.page_table[rows],
                "cache_seqlens": problem.cache_seqlens[rows],
            }
        )
        for num_sm_parts in (1, 9, 10):
            part_out, part_lse = decode(part, fixed=128, window_left=window_left, num_sm_parts=num_sm_parts)
            assert torch.equal(part_out.unflatten(0, (-1, 3)), out[rows])
            assert torch.equal(part_lse.unflatten(0, (-1, 3)), lse[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype, kv_dtype", [(torch.bfloat16, None), (torch.bfloat16, FP8), (torch.bfloat16, torch.uint8)]
)
@pytest.mark.parametrize("heads, page_size", [(5, 64), (128, 64), (128, 3)])
def test_pool_of_more_than_two_to_the_31_elements(heads, page_size, dtype, kv_dtype, device):
    """The memory between the tokens is never touched, so it costs address space only."""
    problem = mla_problem([200, 70], num_q_heads=heads, page_size=page_size, kv_dtype=kv_dtype).to(device)
    pages = problem.kv_pages
    far = 2**31 // (page_size * pages.shape[-1]) + 1
    pool = torch.empty(far + pages.shape[0], *pages.shape[1:], dtype=pages.dtype, device=device)
    assert pool[far].storage_offset() > 2**31
    pool[far:].view(torch.uint8).copy_(pages.view(torch.uint8))
    table = torch.where(problem.page_table < 2**30, problem.page_table + far, problem.page_table)
    moved = type(problem)(**{**vars(problem), "kv_pages": pool, "page_table": table})
    for actual, expected in zip(decode(moved), decode(problem), strict=True):
        assert torch.equal(actual, expected)
