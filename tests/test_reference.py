"""The reference itself, against PyTorch's SDPA and against sums written out by hand."""

import math

import torch
from attnops import reference
from checks import assert_attention_close
from problems import FP8, HUGE_INDEX, mla_problem, paged_problem, ragged_problem, random_tree_mask


def sdpa(q, k, v, visible):
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(0, 1)


def test_equals_sdpa_with_bottom_right_causal_mask_and_window():
    q, k, v = torch.randn(5, 6, 32), torch.randn(9, 2, 32), torch.randn(9, 2, 32)
    visible = torch.ones(5, 9, dtype=torch.bool).tril(4).triu(4 - 3)
    out, lse = reference.attention(q, k, v, window_left=3)
    torch.testing.assert_close(out, sdpa(q, k, v, visible))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double().repeat_interleave(3, 1)) / math.sqrt(32)
    expected = scores.masked_fill(~visible.unsqueeze(1), -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)


def test_sinks_and_cap_by_hand():
    q, k, v = torch.randn(1, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    scores = 3 * torch.tanh((k[:, 0].double() @ q[0, 0].double()) / 3)
    weights = scores.exp() / (scores.exp().sum() + math.exp(0.5))
    options = {"softmax_scale": 1.0, "logit_cap": 3.0, "sinks": torch.tensor([0.5])}
    out, lse = reference.attention(q, k, v, **options)
    torch.testing.assert_close(out[0, 0], weights @ v[:, 0].double())
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(0))
    _, with_sinks = reference.attention(q, k, v, **options, sinks_in_lse=True)
    torch.testing.assert_close(with_sinks[0, 0], (scores.exp().sum() + math.exp(0.5)).log())


def test_rows_without_keys():
    q, k, v = torch.randn(3, 2, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    out, lse = reference.attention(q, k, v, sinks=torch.zeros(2))
    assert torch.equal(out[:2], torch.zeros_like(out[:2])) and torch.isinf(lse[:2]).all() and (lse[2] > -99).all()
    out, lse = reference.attention(q, k[:0], v[:0])
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()


def test_tree_mask_bits():
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    packed = reference.pack_tree_mask(visible)
    assert packed.tolist() == [[1], [3], [5]]
    assert torch.equal(reference.unpack_tree_mask(packed, 3), visible)
    rows = reference.visibility(3, 5, tree_mask=packed)
    assert torch.equal(rows, torch.cat([torch.ones(3, 2, dtype=torch.bool), visible], dim=1))
    mask = random_tree_mask([9, 2])
    assert mask.shape == (11, 2) and reference.unpack_tree_mask(mask, 9)[:9].diagonal().all()


def test_paged_equals_ragged_in_both_page_table_forms():
    for layout in ("nhd", "hnd", "joint", "slice"):
        problem = paged_problem([5, 0, 17, 16], [2, 1, 3, 2], page_size=4, layout=layout)
        assert problem.page_table.max() == HUGE_INDEX
        expected = problem.expected_unquantized()
        torch.testing.assert_close(problem.expected(), expected)
        out, lse = reference.paged_attention(
            problem.q,
            problem.k_pages,
            problem.v_pages,
            problem.kv_indices,
            problem.cache_seqlens,
            cu_seqlens_q=problem.cu_seqlens_q,
            kv_indptr=problem.kv_indptr,
        )
        torch.testing.assert_close((out, lse), expected)


def test_fp8_pools_are_near_the_unquantized_values():
    for scales in ("none", "tensor", "head"):
        problem = paged_problem([40, 7], kv_dtype=FP8, scales=scales)
        assert_attention_close(problem.expected()[0], problem.expected_unquantized()[0], torch.bfloat16, bound=4e-2)


def test_mla_rows():
    for kv_dtype in (torch.bfloat16, FP8, torch.uint8):
        problem = mla_problem([70, 3], 2, kv_dtype=kv_dtype, strided=True)
        options = {"softmax_scale": 0.05}
        out, _ = problem.expected(**options)
        assert_attention_close(out, problem.expected_unquantized(**options)[0], torch.bfloat16, bound=4e-2)


def test_ragged_padding_is_not_read():
    for strided in (False, True):
        out, lse = ragged_problem([3, 0, 8], strided=strided).expected()
        assert out.isfinite().all() and (lse[-3:] == -math.inf).all()
