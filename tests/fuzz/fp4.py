"""Right calls of `store_kv_fp4` and `fp4_decode`: pages of four bits, with a scale for 16 values."""

from __future__ import annotations

import math

import torch
from attnops import ops
from torch import Tensor

from .draw import Draw, Failure
from .judge import check_attention, check_no_fault
from .memory import FP8, FP8_NAN, Guarded, Paging, fill_pages, poisoned, strided
from .options import draw_window, new_report
from .oracle import Rules, attend, used_keys

LATENT, LATENT_V = 576, 512
DIMS, DIMS_ON_GPU = [16, 32, 48, 64, 64, 96, 128, 128, 256], [64, 128]
POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], dtype=torch.float64)  # by code


def real(codes: Tensor, scales: Tensor, scale: Tensor | None) -> Tensor:
    """float64 ``[..., D]`` of bytes ``[..., D / 2]`` and their scales ``[..., D / 16]``."""
    halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1[halves] * scales.float().double().repeat_interleave(16, -1)
    return values if scale is None else values * scale.double()


def _draw_rows(draw: Draw, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of tokens, any codes."""
    codes = (draw.normal(tokens, heads, dim // 2) * 1e4).long().remainder(256).to(torch.uint8)
    return codes, (0.02 + 0.3 * draw.normal(tokens, heads, dim // 16).abs()).to(FP8)


def _draw_scale(draw: Draw) -> Tensor | None:
    return None if draw.chance(0.4) else torch.tensor([draw.random.uniform(0.3, 1.5)])


def right_decode(draw: Draw) -> None:
    """`fp4_decode`: pages of any size, windows, caps, sinks; MLA's latents, too."""
    draw.saw("op fp4_decode")
    on_gpu = draw.device != "cpu"
    is_mla = draw.chance(0.25)
    kv_heads = 1 if is_mla else draw.pick([1, 1, 2, 3, 4])
    dims = DIMS_ON_GPU if on_gpu and draw.chance(0.95) else DIMS
    heads, dim = kv_heads * draw.pick([1, 1, 2, 3, 7, 8]), LATENT if is_mla else draw.pick(dims)
    batch, seqlen = draw.pick([0, 1, 1, 2, 3, 5]), draw.pick([1, 1, 1, 2, 5])
    dtype = draw.pick([torch.float32, torch.bfloat16, torch.float16])
    lengths, page_size = draw.lengths(batch, 3000 if on_gpu else 300), draw.pick([1, 2, 3, 16, 64, 64])
    odd = not on_gpu or draw.chance(0.05)  # CUDA's kernels take rows on 16-byte boundaries
    draw.note(B=batch, S=seqlen, heads=(heads, kv_heads), dim=dim, page=page_size, dtype=dtype, lengths=lengths)
    cap = 0.0 if draw.chance(0.75) else draw.random.uniform(0.5, 30.0)
    sinks = 2 * draw.normal(heads) if draw.chance(0.3) else None
    rules = Rules(dim**-0.5, window_left=draw_window(draw, max(lengths, default=0)), cap=cap, sinks=sinks)
    draw.note(window=rules.window_left, cap=round(cap, 2), sinks=sinks is not None)
    paging, used = Paging(draw, lengths, page_size), used_keys([seqlen] * batch, lengths, rules)

    def side() -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(pages, their scales, the tensor's scale, what tokens hold)."""
        codes, of_blocks = _draw_rows(draw, sum(lengths), kv_heads, dim)
        pools = []
        for rows in (codes, of_blocks):
            pool = poisoned((paging.num_pages, page_size, *rows.shape[1:]), rows.dtype, "cpu")
            pool = strided(draw, pool, odd)
            fill_pages(pool, paging.slots[used], rows[used])
            pools.append(pool)
        scale = _draw_scale(draw)
        return pools[0], pools[1], scale, real(codes, of_blocks, scale)

    k_pages, k_scales, k_scale, keys = side()
    v_pages, v_scales, v_scale, values = (None, None, None, keys[..., :LATENT_V]) if is_mla else side()
    q = draw.normal(batch, seqlen, heads, dim).to(dtype)
    answer = attend(q.double().flatten(0, 1), keys, values, [seqlen] * batch, lengths, rules)
    csr, report = draw.chance(0.4), new_report(draw)
    out = Guarded(draw, (batch, seqlen, heads, values.shape[-1]), dtype)
    lse = Guarded(draw, (batch, seqlen, heads), torch.float32, dense=True)
    ops.fp4_decode(
        strided(draw, q),
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        paging.indices if csr else paging.table,
        torch.tensor(lengths, dtype=torch.int32).to(draw.device, non_blocking=True),
        kv_indptr=paging.indptr if csr else None,
        window_left=rules.window_left,
        logit_cap=cap,
        sinks=None if sinks is None else sinks.to(draw.device, non_blocking=True),
        k_scale=None if k_scale is None else k_scale.to(draw.device, non_blocking=True),
        v_scale=None if v_scale is None else v_scale.to(draw.device, non_blocking=True),
        out=out.view,
        lse=lse.view,
        report=report,
    )
    check_attention(draw, out.view.flatten(0, 1), lse.view.flatten(0, 1), answer)
    check_no_fault(report)
    out.check("out")
    lse.check("lse")


def right_store(draw: Draw) -> None:
    """`store_kv_fp4`: the nearest codes under the scale of each block, and nothing beside the rows."""
    draw.saw("op store_kv_fp4")
    tokens, heads, dim = draw.pick([0, 1, 2, 7, 40]), draw.pick([1, 2, 3]), draw.pick(DIMS)
    page_size, dtype = draw.pick([1, 2, 3, 16, 64]), draw.pick([torch.float32, torch.bfloat16, torch.float16])
    pages = -(-tokens // page_size) + draw.number(1, 3)
    slots = draw.permutation(pages * page_size)[:tokens]
    slots = torch.where(draw.normal(tokens) > 1.2, -draw.number(1, 1 << 31), slots)
    draw.note(T=tokens, heads=heads, dim=dim, page=page_size, dtype=dtype)
    has_v, stored = draw.chance(0.7), slots >= 0
    sides = []
    for _ in range(2 if has_v else 1):
        rows = draw.normal(tokens, heads, dim) * 10.0 ** draw.random.uniform(-2, 1)
        codes = Guarded(draw, (pages, page_size, heads, dim // 2), torch.uint8)
        of_blocks = Guarded(draw, (pages, page_size, heads, dim // 16), FP8)
        of_blocks.view.view(torch.uint8).fill_(FP8_NAN)
        sides.append((rows.to(dtype), codes, of_blocks, _draw_scale(draw)))
    k, v = sides[0], sides[1] if has_v else (None, None, None, None)
    ops.store_kv_fp4(
        k[1].view,
        v[1].view if v[1] else None,
        k[2].view,
        v[2].view if v[2] else None,
        strided(draw, k[0]),
        strided(draw, v[0]) if has_v else None,
        slots.to(draw.device, draw.pick([torch.int32, torch.int64])),
        k_scale=None if k[3] is None else k[3].to(draw.device, non_blocking=True),
        v_scale=None if v[3] is None else v[3].to(draw.device, non_blocking=True),
    )
    where = slots[stored]
    for rows, codes, of_blocks, scale in sides:
        bytes_of_scales = of_blocks.view.view(torch.uint8).cpu()
        got_codes = codes.view.cpu()[where // page_size, where % page_size]
        got_scales = bytes_of_scales[where // page_size, where % page_size].view(FP8)
        _check_stored(rows[stored].double(), got_codes, got_scales, scale)
        rest = torch.ones(pages * page_size, dtype=torch.bool).index_fill(0, where, False).view(pages, page_size)
        if bool((bytes_of_scales[rest] != FP8_NAN).any()):
            raise Failure("scales of a row that is not stored were written")
        codes.check("pages")
        of_blocks.check("block scales")


def _check_stored(rows: Tensor, codes: Tensor, of_blocks: Tensor, scale: Tensor | None) -> None:
    blocks, of_tensor = rows.unflatten(-1, (-1, 16)), 1.0 if scale is None else float(scale)
    asked, got = (blocks.abs().amax(-1) / of_tensor / 6).clamp(max=448), of_blocks.float().double()
    if bool(((got - asked).abs() > asked / 15 + 2**-10).any()):
        raise Failure("a scale of a block is not its largest value over 6")
    grid = E2M1 * got.unsqueeze(-1).unsqueeze(-1) * of_tensor
    nearest = (blocks.unsqueeze(-1) - grid).abs().amin(-1)
    error = (blocks - real(codes, of_blocks, scale).unflatten(-1, (-1, 16))).abs()
    largest = grid.abs().amax(-1)
    if not bool((error <= nearest + 1e-6 * largest + 1e-12).all()):
        raise Failure(f"a code is not the nearest: {float((error - nearest).max()):.3g}")
    assert math.isfinite(float(error.sum()))
