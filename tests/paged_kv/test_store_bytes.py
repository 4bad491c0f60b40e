"""The bytes of every FP8 store, on every device: x / scale in float32, rounded to the nearest e4m3, ties to even."""

import math

import pytest
import torch
from attnops import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = [torch.float32, torch.float16, torch.bfloat16]
SCALES = [1.0, 0.037, 3.0, 2.0**-6, 1.9999998807907104, 448.0, 1e-30, 1e30, -0.25]
TOKENS, PAGE_SIZE = 200, 16
SMALLEST_NORMAL = 2.0**-126


def hostile_rows(width: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Magnitudes from far below to far above e4m3's, ties, and in every row zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(TOKENS, width, generator=generator)
    rows *= 2.0 ** torch.randint(-26, 12, (TOKENS, width), generator=generator)
    ties = torch.arange(-17, 18).repeat(TOKENS, width // 35 + 1)[:, :width] * 0.53125
    rows = torch.where(torch.rand(TOKENS, width, generator=generator) < 0.2, ties, rows) * abs(scale)
    for column, value in enumerate([0.0, -0.0, math.inf, -math.inf, math.nan, 464 * scale, -464.0001 * scale, 1e-8]):
        rows[:, column::64] = value
    return rows.to(dtype)


def e4m3(quotient: torch.Tensor) -> torch.Tensor:
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn)


def assert_same_bytes(stored: torch.Tensor, expected: torch.Tensor) -> None:
    """A NaN is a NaN, whatever its sign; everything else, zeros with it, is the same byte."""
    stored, expected = stored.cpu(), expected.cpu()
    nan = expected.float().isnan()
    assert torch.equal(stored.float().isnan(), nan)
    differ = (stored.view(torch.uint8) != expected.view(torch.uint8)) & ~nan
    where = tuple(differ.nonzero()[0].tolist()) if differ.any() else ()
    assert not differ.any(), f"{int(differ.sum())} bytes differ, first {where}: {stored[where]}, not {expected[where]}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("heads, dim", [(4, 128), (3, 64), (2, 33)])  # wide vectors, short ones, single elements
def test_store_kv(heads, dim, dtype, scale, device):
    rows = hostile_rows(heads * dim, dtype, scale).view(TOKENS, heads, dim)
    scales = torch.tensor([scale])
    pools = [
        torch.zeros(TOKENS // PAGE_SIZE + 1, PAGE_SIZE, heads, dim, dtype=torch.float8_e4m3fn, device=device)
        for _ in range(2)
    ]
    own = scales.expand(heads) * 2.0 ** torch.arange(heads)  # a scale per head, for V
    ops.store_kv(
        *pools,
        rows.to(device),
        rows.to(device),
        torch.arange(TOKENS, device=device),
        k_scale=scales.to(device),
        v_scale=own.to(device),
    )
    k, v = (pool.flatten(0, 1)[:TOKENS] for pool in pools)
    assert_same_bytes(k, e4m3(rows.float() / scales))
    assert_same_bytes(v, e4m3(rows.float() / own.view(-1, 1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("aligned", [True, False])
def test_store_mla_kv_with_one_scale(aligned, dtype, scale, device):
    wide = hostile_rows(577, dtype, scale).to(device)
    rows = wide[:, :576].contiguous() if aligned else wide[:, 1:]
    pages = torch.zeros(TOKENS // PAGE_SIZE + 1, PAGE_SIZE, 576, dtype=torch.float8_e4m3fn, device=device)
    kv_scale = torch.tensor([scale], device=device)
    ops.store_mla_kv(pages, rows, torch.arange(TOKENS, device=device), kv_scale=kv_scale)
    assert_same_bytes(pages.flatten(0, 1)[:TOKENS], e4m3(rows.cpu().float() / scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("aligned", [True, False])
def test_rows_of_656_bytes(aligned, dtype, device):
    wide = hostile_rows(577, dtype, 1.0)
    wide = torch.where(wide.isfinite(), wide, torch.zeros_like(wide))
    wide[:, 128:256] *= 1e-3
    wide[5, :130] = -0.0  # a group of zeros
    wide = wide.to(device)
    rows = wide[:, :576].contiguous() if aligned else wide[:, 1:]
    pages = torch.zeros(TOKENS // PAGE_SIZE + 1, PAGE_SIZE, 656, dtype=torch.uint8, device=device)
    ops.store_mla_kv(pages, rows, torch.arange(TOKENS, device=device))
    stored, rows = pages.flatten(0, 1)[:TOKENS].cpu(), rows.cpu()
    groups = rows.float()[:, :512].unflatten(1, (4, 128))
    scales = (groups.abs().amax(-1) / 448).clamp(min=SMALLEST_NORMAL)
    assert_same_bytes(stored[:, :512].view(torch.float8_e4m3fn), e4m3(groups / scales.unsqueeze(-1)).flatten(1))
    assert torch.equal(stored[:, 512:528].contiguous().view(torch.float32), scales)
    assert torch.equal(stored[:, 528:].contiguous(), rows[:, 512:].to(torch.bfloat16).view(torch.uint8))
