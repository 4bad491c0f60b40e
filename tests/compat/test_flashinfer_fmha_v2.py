"""FlashInfer's `trtllm_fmha_v2_prefill` in its five layouts, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.compat import flashinfer
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from flash_attention_reference import attention, hidden_keys
from problems import FP8, paged_problem, ragged_problem

BF16 = torch.bfloat16
BOUND = MAX_RELATIVE_ERROR[BF16]
WORKSPACE = torch.zeros(1, dtype=torch.uint8)
MASKS = [("CAUSAL", -1), ("padding", -1), ("SLIDING_WINDOW", 9)]


def prefill(problem, qkv, layout, mask="causal", window=-1, **options):
    bounds = problem.cu_seqlens_q
    bounds_k = getattr(problem, "cu_seqlens_k", bounds)
    lens = bounds_k.diff() if not hasattr(problem, "cache_seqlens") else problem.cache_seqlens
    sizes = (
        lens,
        64,
        options.pop("max_kv_len", 64),
        options.pop("bmm1_scale", 0.1),
        options.pop("bmm2_scale", 2.0),
        len(bounds) - 1,
    )
    given = {"mask_mode": mask, "window_left": window, **options}
    return flashinfer.trtllm_fmha_v2_prefill(qkv, layout, WORKSPACE, *sizes, bounds, bounds_k, **given)


def expected(problem, mask="causal", window=-1, **options):
    shown = {"causal": mask.lower() != "padding", "window_left": window if "WINDOW" in mask else -1, **options}
    return problem.expected(softmax_scale=0.1, **shown)


@pytest.mark.parametrize("mask, window", MASKS)
@pytest.mark.parametrize("layout", ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"])
def test_ragged_layouts(layout, mask, window):
    packed = layout == "PACKED_QKV"
    problem = ragged_problem([33, 1, 64], [33, 1, 64] if packed else [40, 5, 64], num_kv_heads=4 if packed else 2)
    q, k, v = problem.q, problem.k, problem.v
    if packed:  # one number of heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    qkv = {"PACKED_QKV": lambda: torch.stack([q, k, v], 1), "CONTIGUOUS_Q_KV": lambda: (q, torch.stack([k, v], 1))}
    out = prefill(problem, qkv.get(layout, lambda: (q, k, v))(), layout, mask, window)
    assert relative_error(out, 2 * expected(problem, mask, window)[0]) <= BOUND


@pytest.mark.parametrize("mask, window", MASKS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("layout", ["Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"])
def test_pages(layout, apart, mask, window):
    problem = paged_problem([130, 5, 64, 0, 40], [40, 5, 1, 0, 0], page_size=16)
    pages = [x.transpose(1, 2) if layout.endswith("HND") else x for x in (problem.k_pages, problem.v_pages)]
    tables, kv = problem.page_table, torch.stack(pages, 1)
    if apart:  # K in front of V in one allocation, and V's pages in another order
        count = pages[0].shape[0]
        place = torch.randperm(count)
        whole = torch.cat([pages[0], pages[1][place.argsort()]]).contiguous()
        kv = whole[:count], whole[count:]
        of_values = place.int()[tables.long().clamp(0, count - 1)] + count
        tables = torch.stack([tables, of_values], 1)
    out = prefill(problem, (problem.q, kv), layout, mask, window, block_tables=tables)
    assert relative_error(out, 2 * expected(problem, mask, window)[0]) <= BOUND


@pytest.mark.parametrize("cap", [None, 5.0])
def test_statistics_give_the_lse_of_hoppers_kernels(cap):
    problem = ragged_problem([33, 1, 64], [40, 5, 64])
    qkv, q_and_k = (problem.q, torch.stack([problem.k, problem.v], 1)), 0.1 * problem.q.shape[2] ** 0.5
    out, stats = prefill(problem, qkv, "CONTIGUOUS_Q_KV", logits_soft_cap_scale=cap, save_softmax_stats=True)
    shown = expected(problem, logit_cap=cap or 0.0)
    assert relative_error(out, 2 * shown[0]) <= BOUND
    # The peer's test: bmm1_scale is q_and_k / sqrt(D).
    factor = problem.q.shape[2] ** 0.5 if cap else q_and_k
    assert_lse_close(stats[..., 0] * factor + stats[..., 1].log(), shown[1])


@pytest.mark.parametrize("chunk", [16, 21, 64, 500])
@pytest.mark.parametrize("paged", [True, False])
def test_chunks(paged, chunk):
    lengths, seqlens_q = [130, 64, 33, 40], [40, 64, 1, 0]
    problem = paged_problem(lengths, seqlens_q, page_size=16) if paged else ragged_problem(seqlens_q, lengths)
    k, v = (problem.k_exact, problem.v_exact) if paged else (problem.k, problem.v)
    options = {"chunked_attention_size": chunk, "skip_softmax_threshold_scale_factor": 0.5}
    if paged:
        qkv = (problem.q, torch.stack([problem.k_pages, problem.v_pages], 1))
        out = prefill(problem, qkv, "Q_PAGED_KV_NHD", "chunked", block_tables=problem.page_table, **options)
    else:
        out = prefill(problem, (problem.q, k, v), "SEPARATE_Q_K_V", "chunked", max_kv_len=130, **options)
    q, keys = 0, 0
    for length, queries in zip(lengths, seqlens_q, strict=True):
        mine = slice(q, q + queries), slice(keys, keys + length)
        q, keys = q + queries, keys + length
        if queries:
            hidden = hidden_keys(queries, length, True, (-1, -1), chunk)
            shown = attention(problem.q[mine[0]], k[mine[1]], v[mine[1]], hidden, 0.1)[0]
            assert relative_error(out[mine[0]], 2 * shown) <= BOUND


def test_fp8_and_sinks():
    problem = ragged_problem([33, 1, 64], [40, 5, 64])
    sinks = torch.linspace(-1, 4, problem.q.shape[1])
    qkv = tuple(x.to(FP8) for x in (problem.q, problem.k, problem.v))
    rounded = dict(zip("qkv", (x.to(BF16) for x in qkv), strict=True))
    out = prefill(problem, qkv, "SEPARATE_Q_K_V", out_dtype=BF16, sinks=sinks, bmm2_scale=1.0)
    assert out.dtype == BF16
    assert relative_error(out, expected(dataclasses.replace(problem, **rounded), sinks=sinks)[0]) <= BOUND


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"mask": "TREE"}, NotImplementedError, "mask_mode=TREE"),
        ({"mask": "CHUNKED"}, ValueError, "chunked_attention_size must be above 0 .* got 0 with CHUNKED"),
        ({"chunked_attention_size": 32}, ValueError, "got 32 with causal"),
        ({"pos_encoding_mode": "ALIBI"}, NotImplementedError, "pos_encoding_mode=ALIBI"),
        ({"save_softmax_stats": True, "bmm1_scale": torch.ones(1)}, NotImplementedError, "as a number"),
        ({"layout": "PACKED_QKV"}, ValueError, "1 parts with PACKED_QKV, got 3"),
        ({"layout": "Q_K_V"}, ValueError, "input_layout must be one of"),
    ],
)
def test_what_is_refused(options, error, words):
    problem = ragged_problem([3], [4])
    layout = options.pop("layout", "SEPARATE_Q_K_V")
    with pytest.raises(error, match=words):
        prefill(problem, (problem.q, problem.k, problem.v), layout, **options)
