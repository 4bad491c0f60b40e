"""Selections and logits of sparse attention by the peers' names, against plain torch."""

from __future__ import annotations

import itertools

import indexer_reference as reference
import pytest
import torch
from attnops.compat import deep_gemm, flashinfer, sgl_kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP8 = torch.float8_e4m3fn


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_selections(wide, dtype, device):
    """`wide`: lengths and rows of int64."""
    score, lengths, starts, k = torch.randn(5, 900).to(dtype), [900, 100, 0, 64, 300], [0, 7, 3, 0, 600], 64
    slots = torch.randint(0, 10**6, (2, 900), dtype=torch.int32)
    owners, offsets = [0, 0, 0, 1, 1], [0, 50, 9, 77, 1000]
    moved = [ints(v, device) for v in (lengths, starts, offsets)]
    ends, begins, adds = [v.long() if wide else v for v in moved]
    options, score = {"row_starts": starts}, score.to(device)
    positions = reference.topk_select(score, lengths, k, **options)[0]
    by_slot = reference.topk_select(score, lengths, k, page_table=slots, row_to_request=owners, **options)[0]
    by_row = reference.topk_select(score, lengths, k, offsets=offsets, **options)[0]
    assert torch.equal(sgl_kernel.fast_topk_v2(score, ends, k, begins).cpu(), positions)
    bounds = ints([0, 3, 5], device)
    got = sgl_kernel.fast_topk_transform_fused(score, ends, slots.to(device), bounds, k, begins)
    assert torch.equal(got.cpu(), by_slot)
    got = sgl_kernel.fast_topk_transform_ragged_fused(score, ends, adds, k, begins)
    assert torch.equal(got.cpu(), by_row)
    got = flashinfer.top_k_ragged_transform(score, adds, ends, k, True, 1, row_starts=begins)
    assert torch.equal(got.cpu(), by_row)
    raw, out = (torch.zeros(5, k, dtype=torch.int32, device=device) for _ in range(2))
    flashinfer.top_k_page_table_transform(
        score,
        slots[:, :15].contiguous().to(device),
        ends,
        k,
        ints(owners, device),
        row_starts=begins,
        page_size=64,
        out=out,
        out_raw_indices=raw,
    )
    by_page = reference.topk_select(
        score, lengths, k, page_table=slots[:, :15], row_to_request=owners, page_size=64, **options
    )[0]
    assert torch.equal(raw.cpu(), positions) and torch.equal(out.cpu(), by_page)


def test_what_is_refused():
    score, lengths, table = torch.randn(2, 9), ints([9, 9], "cpu"), torch.zeros(2, 9, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="top_k_page_table_transform does not honour tie_break=2"):
        flashinfer.top_k_page_table_transform(score, table, lengths, 4, tie_break=2)
    with pytest.raises(NotImplementedError, match="top_k_ragged_transform does not honour tie_break=2"):
        flashinfer.top_k_ragged_transform(score, lengths, lengths, 4, tie_break=2)
    with pytest.raises(NotImplementedError, match="does not honour page_table_row_starts="):
        flashinfer.top_k_page_table_transform(score, table, lengths, 4, page_table_row_starts=lengths)
    with pytest.raises(ValueError, match="tie_break must be 0, 1 or 2, got 3"):
        flashinfer.top_k_ragged_transform(score, lengths, lengths, 4, tie_break=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("columns", [0, 80])
def test_ragged_logits(columns, clean, device):
    q, k, scale, weights = (
        torch.randn(6, 32, 128).to(FP8),
        torch.randn(70, 128).to(FP8),
        torch.rand(70),
        torch.randn(6, 32),
    )
    start, end = [0, 3, 69, 20, 5, 0], [70, 50, 70, 20, 4, 1]
    right = reference.logits(q, k, scale, weights)
    moved = [t.to(device) for t in (q, k, scale, weights)]
    got = deep_gemm.fp8_mqa_logits(
        moved[0], (moved[1], moved[2]), moved[3], ints(start, device), ints(end, device), clean, columns
    )
    assert got.shape == (6, columns or 70) and got.stride(0) * 4 % 1024 == 0
    for row, (first, last) in enumerate(zip(start, end)):
        at = 0 if columns else first
        seen = got[row, at : at + max(last - first, 0)].cpu()
        assert torch.allclose(seen.double(), right[row, first:last], rtol=1e-3, atol=1e-2)
        if clean:
            assert int((got[row] == -torch.inf).sum()) == got.shape[1] - len(seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("per_token", [False, True])
def test_paged_logits(per_token, tokens, device):
    lengths, page_size = [130, 64], 64
    k, scale = torch.randn(194, 128).to(FP8), torch.rand(194)
    slots = torch.cat([torch.arange(130) + 64, torch.arange(64)])  # pages 1, 2, 3 and 0
    pages = reference.make_pages(k, scale, page_size, slots, 4).unsqueeze(2)
    q, weights = torch.randn(2, tokens, 32, 128).to(FP8), torch.randn(2 * tokens, 32)
    each = [[n - tokens + 1 + i for i in range(tokens)] for n in lengths]
    table = ints([[1, 2, 3], [0, -1, -1]], device)
    context = ints(each if per_token else lengths, device)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context, page_size, 8)
    got = deep_gemm.fp8_paged_mqa_logits(
        q.to(device), pages.to(device), weights.to(device), context, table, schedule, 192, True
    ).cpu()
    assert got.shape == (2 * tokens, 192)
    for request, (first, last) in enumerate([(0, 130), (130, 194)]):
        right = reference.logits(q[request], k[first:last], scale[first:last], weights.view(2, tokens, 32)[request])
        for token, length in enumerate(each[request]):
            row = got[request * tokens + token]
            error = (row[:length].double() - right[token, :length]).norm() / right[token, :length].norm()
            assert error < 1e-3  # of a row: a GPU adds the products of e4m3 in fewer bits than float32 has
            assert (row[length:] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_schedule_deals_out_splits_evenly(device):
    lengths = [700, 0, 256, 1, 5000]
    splits = [(query, split) for query, n in enumerate(lengths) for split in range(-(-n // 256))]
    got = deep_gemm.get_paged_mqa_logits_metadata(ints(lengths, device), 64, 7).tolist()
    assert got[0] == [0, 0] and got[-1] == [len(lengths), 0]
    places = [splits.index(tuple(at)) if tuple(at) in splits else len(splits) for at in got]
    counts = [b - a for a, b in itertools.pairwise(places)]
    assert sum(counts) == len(splits) and max(counts) - min(counts) <= 1
