"""The Triton ops against float64 attention: on the CPU in Triton's interpreter, on a GPU compiled."""

from __future__ import annotations

import dataclasses

import problems
import pytest
import torch
from attnops import ops, reference
from checks import assert_attention_close, assert_lse_close
from draft_trees import attention_over

calls = pytest.importorskip("triton_calls", reason="needs triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INTERPRETED = not torch.cuda.is_available()
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
device_of = pytest.mark.parametrize("device", DEVICES)

LENGTHS = [0, 1, 33, 150]
SHAPES = {  # heads, KV heads, head dim, page size, dtype, layout
    "gqa": (8, 2, 64, 16, BF16, "nhd"),
    "odd_group_page3": (5, 1, 80, 3, FP16, "hnd"),
    "mha_page1_fp32": (3, 3, 32, 1, FP32, "joint"),
    "group_of_16_page64": (16, 1, 128, 64, BF16, "slice"),
}
OPTIONS = {
    "plain": {},
    "window": {"window_left": 20},
    "window_zero": {"window_left": 0},
    "cap": {"logit_cap": 3.0},
    "all_keys": {"causal": False},
}


def gqa(shape, lengths, seqlen_q=1, **more):
    heads, kv_heads, dim, page_size, dtype, layout = SHAPES[shape]
    return problems.paged_problem(
        lengths, seqlen_q, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=page_size, dtype=dtype,
        layout=layout, **more,
    )  # fmt: skip


def check(result, problem, bound=None, **options):
    out, lse = result
    expected, expected_lse = problem.expected(**options)
    assert_attention_close(out.cpu(), expected, out.dtype, bound)
    assert_lse_close(lse.cpu(), expected_lse, atol=1e-3)


@device_of
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape, option, device):
    options = {"softmax_scale": 0.2, **OPTIONS[option]}
    for lengths, seqlen_q in ((LENGTHS, 1), ([5, 150, 64], 3)):
        problem = gqa(shape, lengths, seqlen_q).to(device)
        check(calls.decode(problem, **options), problem, **options)


@device_of
@pytest.mark.parametrize("max_splits", [1, 2, 8])
def test_splits_change_nothing_but_rounding_and_nobody_reads_more_than_were_planned(max_splits, device):
    problem = gqa("gqa", [0, 7, 300, 31]).to(device)
    check(calls.decode(problem, max_splits=max_splits, split_tile=16, softmax_scale=0.2), problem, softmax_scale=0.2)


@device_of
def test_sinks_take_probability_and_leave_the_lse(device):
    sinks = torch.linspace(-2, 6, 8)
    options = {"softmax_scale": 0.2, "window_left": 20}
    problem = gqa("gqa", LENGTHS).to(device)
    on_device = sinks.to(device)
    check(calls.decode(problem, sinks=on_device, **options), problem, sinks=sinks, **options)
    problem = gqa("gqa", [40, 150, 3], [7, 1, 3]).to(device)
    check(calls.unified(problem, sinks=on_device, **options), problem, sinks=sinks, **options)


@device_of
@pytest.mark.parametrize("seqlen_q", [2, 5, 9])
def test_tree_masks_and_a_draft_token_that_nobody_sees(seqlen_q, device):
    lengths = [seqlen_q, 40, 131]
    problem = gqa("gqa", lengths, seqlen_q)
    tree = problems.random_tree_mask([seqlen_q] * 3).unflatten(0, (3, seqlen_q)).contiguous()
    last = seqlen_q - 1
    tree[..., last // 8] &= ~(1 << (last % 8)) & 0xFF  # nobody sees the last draft token, which holds NaN
    for request, length in enumerate(lengths):
        page = int(problem.page_table[request, (length - 1) // 16])
        for pages in (problem.k_pages, problem.v_pages):
            pages[page, (length - 1) % 16] = float("nan")
    clean = dataclasses.replace(problem, k_pages=problem.k_pages.nan_to_num(), v_pages=problem.v_pages.nan_to_num())
    moved = problem.to(device)
    result = calls.decode(moved, tree_mask=tree.to(device), softmax_scale=0.2)
    check(result, clean, softmax_scale=0.2, tree_mask=tree.flatten(0, 1))


@device_of
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 2, 30])
def test_masks_over_more_keys_than_the_new_tokens(shared, window, device):
    """As of a step of a draft loop, where windows count steps; `shared`: one mask for all requests."""
    lengths, seqlen_q, keys = [11, 40, 131], 3, 11
    problem = gqa("gqa", lengths, seqlen_q)
    seen = torch.rand(3, seqlen_q, keys) < 0.5
    seen[:, :, 0] = True
    given = reference.pack_tree_mask(seen).to(device)
    if shared:
        seen, given = seen[:1].expand(3, -1, -1), given[:1].expand(3, -1, -1)
    options = {"tree_mask": given, "tree_keys": keys, "window_left": window, "softmax_scale": 0.2}
    out, lse = calls.decode(problem.to(device), **options)
    for b, length in enumerate(lengths):
        k, v = (reference.gather_tokens(x, problem.page_table, b, length) for x in (problem.k_pages, problem.v_pages))
        rows = slice(b * seqlen_q, (b + 1) * seqlen_q)
        all_seen = torch.ones(seqlen_q, length, dtype=torch.bool)
        all_seen[:, -keys:] = seen[b]
        behind = seen[b].flip(1).cumsum(1).flip(1) - 1  # of each draft: those behind it that the row sees
        of_prefix = seen[b].sum(1, keepdim=True) - 1 + torch.arange(length - keys, 0, -1)
        if window >= 0:
            all_seen &= torch.cat([of_prefix, behind], 1) <= window
        expected, expected_lse = attention_over(problem.q[rows], k, v, all_seen, scale=0.2)
        assert_attention_close(out[rows].cpu(), expected, out.dtype)
        assert_lse_close(lse[rows].cpu(), expected_lse, atol=1e-3)


@device_of
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
def test_fp8_pages(kv_dtype, scales, device):
    problem = gqa("gqa", [1, 33, 150], kv_dtype=E4M3, scales=scales)
    if kv_dtype == E5M2:

        def recoded(pages):
            return pages.float().to(E5M2)

        problem = dataclasses.replace(problem, k_pages=recoded(problem.k_pages), v_pages=recoded(problem.v_pages))
    moved = problem.to(device)
    if kv_dtype == E5M2:  # the reference knows e4m3; these values are exact in bf16
        exact = {name: getattr(problem, name).float() for name in ("k_pages", "v_pages")}
        exact = {
            name: t * (1 if s is None else s.view(-1, 1))
            for (name, t), s in zip(exact.items(), (problem.k_scale, problem.v_scale))
        }
        problem = dataclasses.replace(problem, **exact, k_scale=None, v_scale=None)
    check(calls.decode(moved, softmax_scale=0.2), problem, softmax_scale=0.2)
    ragged = gqa("gqa", [9, 33, 150], [9, 2, 30], kv_dtype=E4M3, scales=scales).to(device)
    check(calls.unified(ragged, softmax_scale=0.2), ragged, softmax_scale=0.2)


@device_of
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_scales_may_be_negative(kv_dtype, cap, device):
    problem = gqa("gqa", [40, 70, 129], [40, 1, 33], kv_dtype=kv_dtype)
    for sign in (1, -1) if kv_dtype else (1,):
        if sign < 0:
            problem = dataclasses.replace(problem, k_scale=-problem.k_scale)
        for softmax_scale in (0.2, -0.2):
            options = {"softmax_scale": softmax_scale, "logit_cap": cap}
            check(calls.unified(problem.to(device), **options), problem, **options)


@device_of
def test_every_fp8_byte_has_its_value(device):
    every = torch.arange(256, dtype=torch.uint8)
    for kind, dtype in ((1, E4M3), (2, E5M2)):
        out = torch.empty(256, device=device)
        calls.decode_bytes[(1,)](out, every.to(device), kind)
        torch.testing.assert_close(out.cpu(), every.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@device_of
@pytest.mark.parametrize("heads", [1, 16, 20])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_mla(heads, kv_dtype, device):
    problem = problems.mla_problem([2, 33, 100], 2, num_q_heads=heads, page_size=16, kv_dtype=kv_dtype)
    problem = problem.to(device)
    for apart in (False, True):
        check(calls.decode(problem, softmax_scale=0.1, q_pe_apart=apart), problem, softmax_scale=0.1)
    ragged = problems.mla_problem([3, 70], [3, 18], num_q_heads=heads, page_size=16, kv_dtype=kv_dtype).to(device)
    check(calls.unified(ragged, softmax_scale=0.1), ragged, softmax_scale=0.1)


@device_of
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_extend_in_one_stage_and_in_two(shape, option, device):
    options = {"softmax_scale": 0.2, **OPTIONS[option]}
    problem = gqa(shape, [40, 70, 5, 0, 129], [40, 1, 5, 0, 33])
    moved = problem.to(device)
    check(calls.unified(moved, **options), problem, **options)
    expected = problem.expected(**options)
    k_new, v_new = calls.new_rows(moved)  # the pages of the new tokens are NaN from here on
    out, lse = calls.extend(moved, k_new, v_new, **options)
    assert_attention_close(out.cpu(), expected[0], out.dtype)
    assert_lse_close(lse.cpu(), expected[1], atol=1e-3)


@device_of
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (72, 40)])
def test_ragged_prefill(dims, option, device):
    options = {"softmax_scale": 0.2, **OPTIONS[option]}
    head_dim, head_dim_v = dims
    problem = problems.ragged_problem(
        [5, 0, 130, 1],
        [5, 3, 150, 40],
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        padding=0,
    ).to(device)
    check(calls.ragged(problem, **options), problem, **options)


@device_of
def test_a_rows_bits_depend_on_nothing_but_its_request(device):
    """Fixed splits: alone or in a batch. One-stage extend: whatever was cached before."""
    options = {"softmax_scale": 0.2, "split_tile": 32, "fixed": True}
    problem = gqa("gqa", [300, 7, 150]).to(device)
    together, _ = calls.decode(problem, **options)
    for request in range(3):
        parts = {"q": problem.q[request : request + 1], "page_table": problem.page_table[request : request + 1]}
        parts |= {"cache_seqlens": problem.cache_seqlens[request : request + 1]}
        alone, _ = calls.decode(dataclasses.replace(problem, **parts), **options)
        assert torch.equal(alone[0], together[request])
    whole = gqa("gqa", [150], [150]).to(device)
    expected, _ = calls.unified(whole, softmax_scale=0.2)
    for computed in (1, 33, 100):
        bounds = torch.tensor([0, computed], dtype=torch.int32, device=device)
        part = dataclasses.replace(whole, q=whole.q[150 - computed :], cu_seqlens_q=bounds)
        for tile_tokens in (1, 16, 64, 1024):
            got, _ = calls.unified(part, softmax_scale=0.2, tile_tokens=tile_tokens)
            assert torch.equal(got, expected[150 - computed :])


@device_of
def test_merge_equals_the_compiled_op(device):
    out_a, out_b = (torch.randn(7, 3, 72, dtype=BF16) for _ in range(2))
    lse_a, lse_b = torch.randn(7, 3), torch.randn(7, 3)
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = (float("-inf"),) * 4
    out_a[0], out_b[1], out_a[2] = (float("nan"),) * 3
    expected = ops.merge_state(out_a, lse_a, out_b, lse_b)
    sides = [t.to(device) for t in (out_a, lse_a, out_b, lse_b)]
    out, lse = torch.full_like(sides[0], float("nan")), torch.empty_like(sides[1])
    calls.tk.triton_merge_state(out, lse, *sides)
    torch.testing.assert_close(out.cpu(), expected[0], rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(lse.cpu(), expected[1])


@device_of
def test_values_that_no_engine_would_send_end_nothing(device):
    problem = gqa("gqa", [20, 50, 33]).to(device)
    hostile = problem.page_table.clone()
    hostile[0, 0], hostile[1, 1], hostile[2, 2] = -1, 2**31 - 1, 10**6
    lengths = torch.tensor([2**31 - 1, -5, 33], dtype=torch.int32, device=device)
    out, lse = calls.decode(dataclasses.replace(problem, page_table=hostile, cache_seqlens=lengths), softmax_scale=0.2)
    assert torch.equal(out[1].cpu(), torch.zeros(8, 64, dtype=BF16)) and lse[1].isneginf().all()
    bounds = torch.tensor([0, 900, -4, 3], dtype=torch.int32, device=device)
    calls.unified(dataclasses.replace(problem, page_table=hostile, cu_seqlens_q=bounds), softmax_scale=0.2)


@device_of
def test_extents_of_zero(device):
    empty = gqa("gqa", []).to(device)
    assert calls.decode(empty, softmax_scale=0.2)[0].shape == (0, 8, 64)
    assert calls.unified(empty, softmax_scale=0.2)[0].shape == (0, 8, 64)


def test_errors_name_argument_dimension_and_both_values():
    problem = gqa("gqa", [20, 50])
    with pytest.raises(RuntimeError, match=r"cache_seqlens\.shape\[0\] \(batch_size\) must be 2 as in page"):
        calls.decode(dataclasses.replace(problem, cache_seqlens=problem.cache_seqlens[:1].repeat(3)), softmax_scale=0.2)
    with pytest.raises(RuntimeError, match=r"k_pages\.shape\[3\] \(head_dim\) must be 64 as in q, got 32"):
        narrow = {"k_pages": problem.k_pages[..., :32], "v_pages": problem.v_pages[..., :32]}
        calls.unified(dataclasses.replace(problem, **narrow), softmax_scale=0.2)
    with pytest.raises(RuntimeError, match="window_left must be -1"):
        calls.decode(problem, softmax_scale=0.2, window_left=-2)
    with pytest.raises(RuntimeError, match="tree_mask"):
        calls.decode(problem, softmax_scale=0.2, tree_mask=torch.zeros(2, 1, 2, dtype=torch.uint8))
    mask = torch.ones(2, 1, 2, dtype=torch.uint8)
    for keys, options in ((9, {}), (-1, {"tree_mask": mask})):
        with pytest.raises(RuntimeError, match=rf"tree_keys must be 0 or seqlen_q .* beside a tree_mask, got {keys}"):
            calls.decode(problem, softmax_scale=0.2, tree_keys=keys, **options)


@device_of
def test_schemas_and_fakes(device):
    problem = gqa("gqa", [20, 50]).to(device)
    num_splits = torch.ones(2, dtype=torch.int32, device=device)
    out = torch.empty_like(problem.q)
    partial, lse_partial = calls.filled(2, 8, 2, 64, device=device), calls.filled(2, 8, 2, device=device)
    k, v = calls.pools(problem)
    arguments = (
        out, None, partial, lse_partial, problem.q, None, k, v, problem.page_table, problem.cache_seqlens, num_splits,
        1, 0.2, True, -1, 0.0, None, None, None, None, 32,
    )  # fmt: skip
    utils = ("test_schema", "test_faketensor")  # scratch keeps NaN, which the other utilities compare
    torch.library.opcheck(torch.ops.attnops.triton_decode.default, arguments, test_utils=utils)
