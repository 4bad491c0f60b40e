"""FlashAttention-3's prefill functions: dense batches, tokens in use, chunks, scales per request; each in one graph."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import reference
from attnops.compat import flash_attn_interface as fa3
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from problems import FP8, paged_problem, ragged_problem

BF16 = torch.bfloat16
BOUND = MAX_RELATIVE_ERROR[BF16]
MASKS = [
    ({"causal": True}, {"causal": True}),
    ({}, {"causal": False}),
    ({"causal": True, "window_size": (20, 0)}, {"causal": True, "window_left": 20}),
    ({"window_size": (20, 3)}, {"causal": False, "window_left": 20, "window_right": 3}),
]


def rows(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (7, 90), (50, 3), (1, 30)])
def test_dense_batches(theirs, ours, seqlen_q, seqlen_k):
    q, k, v = rows(3, seqlen_q, 6, 72), rows(3, seqlen_k, 2, 72, seed=1), rows(3, seqlen_k, 2, 40, seed=2)
    sinks = rows(6, seed=3)
    out, lse = fa3.flash_attn_func(q, k, v, 0.2, softcap=3.0, return_attn_probs=True, sinks=sinks, **theirs)
    assert out.shape == (3, seqlen_q, 6, 40) and lse.shape == (3, 6, seqlen_q) and lse.is_contiguous()
    for b in range(3):
        options = {"softmax_scale": 0.2, "logit_cap": 3.0, "sinks": sinks, **ours}
        expected, expected_lse = reference.attention(q[b], k[b], v[b], **options)
        assert relative_error(out[b], expected) <= BOUND
        assert_lse_close(lse[b].T, expected_lse)
    assert torch.equal(fa3.flash_attn_func(q, k, v, 0.2, softcap=3.0, sinks=sinks, **theirs), out)


def chunked(seqlen_q, seqlen_k, chunk):
    """Causal, and within a chunk of the keys' positions."""
    position = torch.arange(seqlen_q).unsqueeze(1) + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    return (key <= position) & (
        torch.div(key, chunk, rounding_mode="floor") == position.div(chunk, rounding_mode="floor")
    )


def masked(q, k, v, visible):
    scores = torch.einsum("qhgd,khd->hgqk", q.double().unflatten(1, (k.shape[1], -1)), k.double()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hgqk,khd->qhgd", weights, v.double()).flatten(1, 2)


def test_attention_in_chunks():
    q, k, v = rows(2, 30, 4, 64), rows(2, 45, 2, 64, seed=1), rows(2, 45, 2, 64, seed=2)
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=16)
    for b in range(2):
        assert relative_error(out[b], masked(q[b], k[b], v[b], chunked(30, 45, 16))) <= BOUND


@pytest.mark.parametrize("form", ["func", "varlen"])
def test_fp8_with_scales_per_request(form):
    q, k, v = (rows(2, 24, h, 64, seed=h).to(FP8) for h in (8, 2, 2))
    scales = [torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
    if form == "func":
        out = fa3.flash_attn_func(q, k, v, causal=True, **named)
    else:
        bounds = torch.tensor([0, 24, 48], dtype=torch.int32)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = fa3.flash_attn_varlen_func(*flat, bounds, bounds, 24, 24, causal=True, **named).unflatten(0, (2, 24))
    assert out.dtype == BF16
    for b in range(2):
        of_q = scales[0][b].repeat_interleave(4).view(-1, 1)
        exact = [
            x[b].double() * s for x, s in zip((q, k, v), (of_q, scales[1][b].view(-1, 1), scales[2][b].view(-1, 1)))
        ]
        assert relative_error(out[b], reference.attention(*exact)[0]) <= BOUND


def test_tokens_in_use():
    problem = ragged_problem([33, 4, 64], [40, 5, 64])
    used_q, used_k = (torch.tensor(n, dtype=torch.int32) for n in ([20, 4, 0], [31, 2, 64]))
    bounds = (problem.cu_seqlens_q, problem.cu_seqlens_k)
    options = {"seqused_q": used_q, "seqused_k": used_k, "causal": True}
    out = fa3.flash_attn_varlen_func(problem.q, problem.k, problem.v, *bounds, 64, 64, **options)
    for b, (new, length) in enumerate(zip(used_q.tolist(), used_k.tolist())):
        q, k = (int(x[b]) for x in bounds)
        expected = reference.attention(problem.q[q : q + new], problem.k[k : k + length], problem.v[k : k + length])[0]
        if new:
            assert relative_error(out[q : q + new], expected) <= BOUND
        assert not out[q + new : int(bounds[0][b + 1])].any()


def test_metadata_is_taken_by_the_call_it_is_for():
    problem = paged_problem([130, 5, 64])
    metadata = fa3.get_scheduler_metadata(3, 1, 130, 8, 2, 64, problem.cache_seqlens, page_size=16, causal=True)
    assert metadata.dtype == torch.int32
    call = (problem.q_by_request, problem.k_pages, problem.v_pages)
    options = {"cache_seqlens": problem.cache_seqlens, "page_table": problem.page_table, "causal": True}
    out = fa3.flash_attn_with_kvcache(*call, scheduler_metadata=metadata, **options)
    assert torch.equal(out, fa3.flash_attn_with_kvcache(*call, **options))
    with pytest.raises(ValueError, match=r"cache_seqlens must be \[4\] \(batch_size\), got \[3\]"):
        fa3.get_scheduler_metadata(4, 1, 130, 8, 2, 64, problem.cache_seqlens)
    with pytest.raises(ValueError, match=r"k must be \[B, S, H, D\], got \[3, 8, 64\]"):
        fa3.flash_attn_func(problem.q_by_request, problem.q, problem.q)


def traced(function, fresh=True):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_every_function_is_one_graph():
    q, k, v = rows(2, 24, 8, 64), rows(2, 30, 2, 64, seed=1), rows(2, 30, 2, 64, seed=2)
    dense = traced(lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True))
    for mine, eager in zip(dense(q, k, v), fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)):
        assert torch.equal(mine, eager)

    problem = ragged_problem([33, 4, 64], padding=0)
    used = torch.tensor([20, 4, 1], dtype=torch.int32)

    def ragged(q, k, v, bounds, used):
        options = {"seqused_k": used, "causal": True, "window_size": (9, 0)}
        return fa3.flash_attn_varlen_func(q, k, v, bounds, bounds, 64, 64, **options)

    call = (problem.q, problem.k, problem.v, problem.cu_seqlens_q, used)
    assert torch.equal(traced(ragged)(*call), ragged(*call))

    for seqlen_q in (1, 20):
        paged = paged_problem([60, 50], seqlen_q)
        new = [rows(2, seqlen_q, 2, 64, seed=i) for i in (4, 5)]
        angles = torch.arange(130).unsqueeze(1) / 100 ** (torch.arange(16) / 16)
        pad = torch.tensor([3, 0], dtype=torch.int32)

        def extend(q, k_pages, v_pages, table, lens, new_k, new_v, pad, cos, sin):
            metadata = fa3.get_scheduler_metadata(2, q.shape[1], 64, 8, 2, 64, lens)
            return fa3.flash_attn_with_kvcache(
                q,
                k_pages,
                v_pages,
                new_k,
                new_v,
                rotary_cos=cos,
                rotary_sin=sin,
                cache_seqlens=lens,
                cache_leftpad=pad,
                page_table=table,
                causal=True,
                scheduler_metadata=metadata,
            )

        pools = [[x.clone() for x in (paged.k_pages, paged.v_pages)] for _ in range(2)]
        rest = (paged.page_table.clamp(max=paged.k_pages.shape[0] - 1), paged.cache_seqlens - seqlen_q, *new, pad)
        rest += (angles.cos(), angles.sin())
        eager = extend(paged.q_by_request, *pools[0], *rest)
        assert torch.equal(traced(extend)(paged.q_by_request, *pools[1], *rest), eager)
        assert eager.isfinite().all()
        for mine, other in zip(*pools):
            assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))
