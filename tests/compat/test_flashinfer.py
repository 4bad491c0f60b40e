"""FlashInfer's functions against the reference: base-2 lse, CSR lengths, layouts, folded scales, windows, masks."""

from __future__ import annotations

import functools
import math
import unittest.mock

import pytest
import torch
from attnops import reference
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flashinfer_paging import csr
from problems import FP8, paged_problem, random_tree_mask

BOUND = MAX_RELATIVE_ERROR[torch.bfloat16]
LENGTHS = [130, 5, 64, 0]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)


def expected_by_position(problem, window_left, **options):
    """With a window that counts positions, whatever the mask says. The reference's counts steps of a tree."""
    by_steps = reference.visibility

    def visibility(seqlen_q, seqlen_k, *, window_left, **others):
        position = torch.arange(seqlen_q).unsqueeze(1) + (seqlen_k - seqlen_q)
        return by_steps(seqlen_q, seqlen_k, **others) & (torch.arange(seqlen_k) >= position - window_left)

    with unittest.mock.patch.object(reference, "visibility", visibility):
        return problem.expected(window_left=window_left, **options)


def check(out, lse, expected, bound=BOUND):
    assert relative_error(out.flatten(0, -3), expected[0]) <= bound
    if lse is not None:
        assert_lse_close(lse * math.log(2), expected[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_wrapper(q_len, page_size, layout):
    problem = paged_problem(LENGTHS, q_len, page_size=page_size, layout="joint" if layout == "NHD" else "hnd")
    if layout == "NHD":
        cache = torch.stack([problem.k_pages, problem.v_pages], dim=1)
    else:
        cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    sinks = torch.randn(8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    options = {"window_left": 20, "logits_soft_cap": 3.0, "sm_scale": 0.2, "q_data_type": "bfloat16"}
    wrapper.plan(*csr(problem, page_size), 8, 2, 64, page_size, q_len_per_req=q_len, **options)
    lse = torch.empty(4 * q_len, 8)
    out, result = wrapper.run(problem.q, cache, q_scale=0.5, sinks=sinks, return_lse=True, lse=lse)
    assert result is lse
    expected = problem.expected(softmax_scale=0.1, window_left=20, logit_cap=3.0, sinks=sinks)
    check(out, lse, expected)
    assert (lse == -math.inf).any(), "an empty row is -inf"
    given = torch.full_like(lse, math.nan)
    assert torch.equal(wrapper.run(problem.q, cache, q_scale=0.5, sinks=sinks, lse=given), out)
    assert torch.equal(given, lse), "an lse is written also where it is not returned"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("given", "q_dtype", "kv_dtype"),
    [
        ({}, torch.float16, torch.float16),
        ({"q_data_type": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"kv_data_type": FP8}, torch.float16, FP8),
        ({"data_type": FP8, "q_data_type": torch.float16}, torch.float16, FP8),
        ({"data_type": torch.bfloat16, "q_data_type": None}, torch.bfloat16, torch.bfloat16),
        ({"data_type": "bfloat16", "q_data_type": None, "kv_data_type": FP8}, torch.bfloat16, FP8),
    ],
)
def test_data_type_fills_what_is_none(given, q_dtype, kv_dtype, fast):
    problem = paged_problem([5, 20], dtype=q_dtype, kv_dtype=None if kv_dtype == q_dtype else kv_dtype, page_size=16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    plan = functools.partial(flashinfer.fast_decode_plan, wrapper) if fast else wrapper.plan
    plan(*csr(problem, 16), 8, 2, 64, 16, sm_scale=0.2, **given)
    scales = {} if kv_dtype == q_dtype else {"k_scale": problem.k_scale.item(), "v_scale": problem.v_scale.item()}
    out = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), **scales)
    assert relative_error(out, problem.expected(softmax_scale=0.2)[0]) <= MAX_RELATIVE_ERROR[q_dtype]
    other = torch.float16 if q_dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(ValueError, match="q's dtype"):
        wrapper.run(problem.q.to(other), (problem.k_pages, problem.v_pages), **scales)


def test_decode_wrapper_with_graph_buffers_keeps_its_addresses():
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 40, 3)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, True, *buffers)
    seen = set()
    for lengths in ([130, 5, 64], [3, 200, 0]):
        problem = paged_problem(lengths, dtype=torch.float16)
        wrapper.plan(*csr(problem, 16), 8, 2, 64, 16)
        out = wrapper.run(problem.q, (problem.k_pages, problem.v_pages))
        check(out, None, problem.expected(), MAX_RELATIVE_ERROR[torch.float16])
        seen.add(
            (wrapper._plans.lens.data_ptr(), wrapper._indices.data_ptr(), wrapper._plans.planned.num_splits.data_ptr())
        )
    assert len(seen) == 1 and wrapper._indices.data_ptr() == buffers[1].data_ptr()
    with pytest.raises(ValueError, match="indptr has 3 elements, the wrapper's buffer 4"):
        wrapper.plan(*csr(paged_problem([5, 5]), 16), 8, 2, 64, 16)


@pytest.mark.parametrize("tensor", [False, True])
def test_decode_wrapper_with_scales_of_an_fp8_cache(tensor):
    problem = paged_problem(LENGTHS, kv_dtype=FP8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(problem, 16), 8, 2, 64, 16, q_data_type=torch.bfloat16, kv_data_type=FP8)
    k_scale, v_scale = problem.k_scale, problem.v_scale
    if not tensor:
        k_scale, v_scale = k_scale.item(), v_scale.item()
    out = wrapper.run(problem.q, (problem.k_pages, problem.v_pages), k_scale=k_scale, v_scale=v_scale)
    check(out, None, problem.expected())


def test_decode_wrapper_names_what_it_does_not_honour():
    problem = paged_problem([9])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(NotImplementedError, match="jit_args="):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=["x"])
    geometry = (*csr(problem, 16), 8, 2, 64, 16)
    for options in ({"window_right": 3}, {"an_argument_of_tomorrow": 1}):
        with pytest.raises(NotImplementedError, match=rf"plan does not honour {next(iter(options))}="):
            wrapper.plan(*geometry, **options)
    with pytest.raises(KeyError, match="pos_encoding_mode must be one of"):
        wrapper.plan(*geometry, pos_encoding_mode="ROPE")
    cache = (problem.k_pages, problem.v_pages)
    with pytest.raises(RuntimeError, match="plan must run first"):
        wrapper.run(problem.q, cache)
    wrapper.plan(*geometry)
    with pytest.raises(ValueError, match=r"q's dtype is torch.bfloat16, planned was torch.float16"):
        wrapper.run(problem.q, cache)
    wrapper.plan(*geometry, q_data_type="bfloat16")
    with pytest.raises(NotImplementedError, match="run does not honour kv_cache_sf"):
        wrapper.run(problem.q, cache, kv_cache_sf=torch.ones(1))
    with pytest.raises(ValueError, match=r"batch_size \* q_len_per_req = 1 \* 1 rows as planned, got 2"):
        wrapper.run(torch.cat([problem.q, problem.q]), cache)
    with pytest.raises(ValueError, match="window_left is 5, planned was -1"):
        wrapper.run(problem.q, cache, window_left=5)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("q_len", [1, 5])
def test_trtllm_batch_decode(q_len, kv_dtype):
    problem = paged_problem([130, 5, 64], q_len, kv_dtype=kv_dtype, layout="hnd")
    k_scale, v_scale = (1.0, 1.0) if kv_dtype is None else (problem.k_scale.item(), problem.v_scale.item())
    sinks = torch.randn(8)
    tree = random_tree_mask([q_len] * 3)
    words = torch.zeros(3, q_len, -(-q_len // 32) * 4, dtype=torch.uint8)
    words[..., : tree.shape[-1]] = tree.view(3, q_len, -1)
    lse = torch.full((3 * q_len, 8), math.nan)
    out, returned = flashinfer.trtllm_batch_decode_with_kv_cache(
        problem.q,
        (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2)),
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens.view(torch.uint32),
        192,
        0.2 * k_scale,
        v_scale,
        20,
        sinks=[sinks],
        q_len_per_req=q_len,
        mask=words.view(torch.uint16),
        lse=lse,
        return_lse=True,
    )
    assert returned is lse
    check(out, lse, expected_by_position(problem, 20, softmax_scale=0.2, sinks=sinks, tree_mask=tree))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "joint"])
@pytest.mark.parametrize(("window", "page_size"), [(0, 16), (2, 1), (7, 5), (64, 16), (1000, 16)])
def test_windows_beside_masks_count_positions(layout, window, page_size, device):
    q_len, lengths = 9, [130, 9, 64, 40]
    problem = paged_problem(lengths, q_len, page_size=page_size, layout=layout).to(device)
    tree = random_tree_mask([q_len] * 4)
    tree.view(4, q_len, -1)[0] = 0xFF  # every new token sees every other
    words = torch.zeros(4, q_len, 4, dtype=torch.uint8)
    words[..., : tree.shape[-1]] = tree.view(4, q_len, -1)
    out = flashinfer.xqa_batch_decode_with_kv_cache(
        problem.q,
        (problem.k_pages, problem.v_pages),
        WORKSPACE,
        problem.page_table,
        problem.cache_seqlens,
        192,
        0.2,
        window_left=window,
        q_len_per_req=q_len,
        mask=words.view(torch.uint16).to(device),
    )
    check(out.cpu(), None, expected_by_position(problem, window, softmax_scale=0.2, tree_mask=tree))


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(("q_len", "window"), [(1, 0), (1, 7), (3, 0)])
def test_xqa(q_len, window, tensor):
    problem = paged_problem([130, 5, 64], q_len, kv_dtype=FP8, layout="nhd", scales="none")
    kv_scale = torch.tensor([0.03])
    tree = random_tree_mask([q_len] * 3) if q_len > 1 else None
    mask = None
    if tree is not None:
        mask = torch.nn.functional.pad(tree.view(3, q_len, 1), (0, 3)).view(torch.uint16)
    q = problem.q.view(3, 1, 8, 64) if q_len == 1 else problem.q.view(3, 1, q_len, 8, 64)
    output = torch.full_like(q, math.nan)
    sinks = torch.randn(2, 4)
    result = flashinfer.xqa(
        q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        problem.cache_seqlens.view(torch.uint32).unsqueeze(1),
        output,
        WORKSPACE,
        WORKSPACE,
        2,
        16,
        sinks,
        1.5,
        kv_scale if tensor else kv_scale.item(),
        window,
        q_seq_len=q_len,
        mask=mask,
    )
    assert result is None
    expected = reference.paged_attention(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        problem.cache_seqlens,
        cu_seqlens_q=problem.cu_seqlens_q,
        k_scale=kv_scale,
        v_scale=kv_scale,
        softmax_scale=1.5 / 8,
        window_left=window - 1,
        sinks=sinks.flatten(),
        tree_mask=tree,
    )
    check(output.view(-1, 8, 64), None, expected)


def test_functions_name_what_they_do_not_honour():
    problem = paged_problem([9])
    cache = (problem.k_pages.transpose(1, 2), problem.v_pages.transpose(1, 2))
    arguments = (problem.q, cache, WORKSPACE, problem.page_table, problem.cache_seqlens, 16)
    for options in (
        {"o_sf_scale": 1.0},
        {"o_sf_vec_size": 16},
        {"kv_cache_sf": (torch.ones(1), torch.ones(1))},
        {"uses_shared_paged_kv_idx": False},
        {"enable_block_sparse_attention": True},
        {"bmm1_scale": torch.ones(2)},
        {"bmm2_scale": torch.ones(2)},
        {"an_argument_of_tomorrow": 1},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, **options)
    q = problem.q.view(1, 1, 8, 64)
    lens = problem.cache_seqlens.unsqueeze(1)
    rest = (problem.k_pages, problem.v_pages, problem.page_table, lens, q.clone(), WORKSPACE, WORKSPACE)
    for options in (
        {"k_sf_cache": torch.ones(1)},
        {"q_scale": torch.ones(2)},
        {"kv_scale": torch.ones(2)},
    ):
        with pytest.raises(NotImplementedError, match=rf"xqa does not honour {next(iter(options))}"):
            flashinfer.xqa(q, *rest, 2, 16, **options)
    with pytest.raises(NotImplementedError, match="a beam of 2"):
        flashinfer.xqa(q.expand(1, 2, 8, 64), *rest, 2, 16)
    with pytest.raises(ValueError, match="page_size=64, the tensors have 16"):
        flashinfer.xqa(q, *rest, 2, 64)


def test_merge_state_is_in_base_2():
    v_a, v_b = torch.randn(2, 3, 4, 64)
    s_a, s_b = torch.randn(2, 3, 4) * 5
    weight = 1 / (1 + torch.exp2(s_b.double() - s_a.double())).unsqueeze(-1)
    out, s = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    assert relative_error(out, weight * v_a + (1 - weight) * v_b) <= 1e-5
    assert_lse_close(s, torch.log2(torch.exp2(s_a.double()) + torch.exp2(s_b.double())))
