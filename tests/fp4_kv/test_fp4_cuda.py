"""store_kv_fp4 and fp4_decode on a GPU, against those of the CPU."""

from __future__ import annotations

import fp4_problems
import pytest
import torch
from attnops import ops
from checks import MAX_RELATIVE_ERROR, relative_error
from fp4_problems import E4M3, pools, problem

pytestmark = pytest.mark.gpu


def on_gpu(pool):
    return pool[0].view(torch.uint8).cuda(), pool[1].view(torch.uint8).cuda().view(E4M3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_stored_bit_for_bit(dtype):
    rows = (torch.randn(100, 3, 64) * torch.logspace(-4, 3, 100).view(-1, 1, 1)).to(dtype)
    rows[5, 1, 3], scale = float("nan"), torch.tensor([0.7])
    slots = torch.randperm(128)[:100]
    slots[9] = -1
    mine, theirs = pools(8, 16, 3, 64), on_gpu(pools(8, 16, 3, 64))
    ops.store_kv_fp4(mine[0], None, mine[1], None, rows, None, slots, k_scale=scale)
    ops.store_kv_fp4(theirs[0], None, theirs[1], None, rows.cuda(), None, slots.cuda(), k_scale=scale.cuda())
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8).cpu())


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (8, 1, 64), (16, 1, 128), (5, 5, 64)])
@pytest.mark.parametrize("seqlen_q, window", [(1, -1), (1, 9), (1, 100), (2, -1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_is_that_of_the_cpu(page_size, heads, kv_heads, dim, seqlen_q, window, dtype):
    if seqlen_q * heads // kv_heads > 16:
        pytest.skip("more rows than a kernel takes")
    q, k, v, table, lengths, scales, _ = problem(page_size, heads, kv_heads, dim, seqlen_q, dtype, seed=page_size)
    cap, sinks = 4.0 if window == 9 else 0.0, torch.linspace(-2, 2, heads)
    options = {"softmax_scale": 0.2, "window_left": window, "logit_cap": cap, "return_lse": True}
    expected, lse = ops.fp4_decode(
        q.float(), k[0], v[0], k[1], v[1], table, lengths, sinks=sinks, k_scale=scales[0], v_scale=scales[1], **options
    )
    (k_pages, k_scales), (v_pages, v_scales) = on_gpu(k), on_gpu(v)
    on_device = {"sinks": sinks.cuda(), "k_scale": scales[0].cuda(), "v_scale": scales[1].cuda()}
    out, got = ops.fp4_decode(
        q.cuda(), k_pages, v_pages, k_scales, v_scales, table.cuda(), lengths.cuda(), **on_device, **options
    )
    assert relative_error(out.cpu(), expected.double()) <= MAX_RELATIVE_ERROR[dtype]
    torch.testing.assert_close(got.cpu(), lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads, seqlen_q, window", [(16, 1, -1), (3, 2, 40), (16, 3, -1), (128, 1, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_are_those_of_the_cpu(page_size, heads, seqlen_q, window, dtype):
    q, k, _, table, lengths, scales, _ = problem(page_size, heads, 1, 576, seqlen_q, dtype, seed=page_size)
    cap, sinks = 4.0 if window == 9 else 0.0, torch.linspace(-2, 2, heads)
    options = {"softmax_scale": 0.05, "window_left": window, "logit_cap": cap, "return_lse": True}
    expected, lse = ops.fp4_decode(
        q.float(), k[0], None, k[1], None, table, lengths, sinks=sinks, k_scale=scales[0], **options
    )
    pages, of_blocks = on_gpu(k)
    on_device = {"sinks": sinks.cuda(), "k_scale": scales[0].cuda()}
    out, got = ops.fp4_decode(
        q.cuda(), pages, None, of_blocks, None, table.cuda(), lengths.cuda(), **on_device, **options
    )
    assert relative_error(out.cpu(), expected.double()) <= MAX_RELATIVE_ERROR[dtype]
    torch.testing.assert_close(got.cpu(), lse, rtol=1e-4, atol=1e-3)


def _apart(rows, gap, begin):
    """`rows`, with `gap` bytes between one and the next, of which `begin` come first."""
    n = rows.shape[-1]
    whole = torch.full((*rows.shape[:-1], n + gap), 0x7F, dtype=torch.uint8, device=rows.device)
    whole[..., begin : begin + n] = rows.view(torch.uint8)
    return whole[..., begin : begin + n].view(rows.dtype)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (16, 1, 128), (8, 2, 64), (16, 1, 576)])
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0])
@pytest.mark.parametrize("odd", [False, True])
def test_shares_of_many_tiles(page_size, heads, kv_heads, dim, scale, odd, monkeypatch):
    """A share has so many tiles that stages come round, and rows need not stand on boundaries of their size."""
    monkeypatch.setattr(fp4_problems, "LENGTHS", [0, 70, 700, 1001])
    mla, dtype = dim == 576, torch.bfloat16
    q, k, v, table, lengths, scales, _ = problem(page_size, heads, kv_heads, dim, 1, dtype, mla=mla)
    of_v = (None, None) if mla else (v[0], v[1])
    expected = ops.fp4_decode(
        q.float(), k[0], of_v[0], k[1], of_v[1], table, lengths, softmax_scale=scale, k_scale=scales[0]
    )

    def one_share(q, k_pages, v_pages, out):
        return torch.empty(1, *out.shape, device="cuda"), torch.empty(1, *out.shape[:-1], device="cuda")

    monkeypatch.setattr("attnops.ops.fp4_kv._scratch", one_share)
    sides = [on_gpu(side) for side in (k, v) if side is not None]
    if odd:  # codes on 16 bytes, of latents on 8; scales on 4, of latents on any
        sides = [(_apart(c, 8 if mla else 16, 8 if mla else 0), _apart(s, 1 if mla else 4, 0)) for c, s in sides]
    (k_pages, k_scales), (v_pages, v_scales) = sides if len(sides) == 2 else (sides[0], (None, None))
    out = ops.fp4_decode(
        q.cuda(), k_pages, v_pages, k_scales, v_scales, table.cuda(), lengths.cuda(), softmax_scale=scale,
        k_scale=scales[0].cuda(),
    )  # fmt: skip
    assert relative_error(out.cpu(), expected.double()) <= MAX_RELATIVE_ERROR[dtype]
