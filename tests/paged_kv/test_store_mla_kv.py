"""attnops::store_mla_kv on every device: the three row formats against plain indexing, bit for bit."""

import math

import pytest
import torch
from attnops import ops
from checks import free_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = [torch.float32, torch.float16, torch.bfloat16]
CASES = [(0, 16), (1, 1), (7, 3), (33, 16), (130, 64)]  # num_tokens, page_size
GUARD = 77  # bytes that nobody may write
SMALLEST_NORMAL = 2.0**-126


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def pool(num_pages, page_size, dim, dtype, device):
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((num_pages, page_size, dim * size), GUARD, dtype=torch.uint8, device=device).view(dtype)


def problem(num_tokens, page_size, dtype, device, slot_dtype=torch.int64):
    """Rows, pages needed, and distinct slots of which some are padding."""
    num_pages = 2 * num_tokens // page_size + 2
    rows = (3 * torch.randn(num_tokens, 576)).to(device, dtype)
    slots = torch.randperm(num_pages * page_size)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.2] = -1
    return rows, num_pages, slots.to(device, slot_dtype)


def expected_pages(pages, rows, slots):
    page_size = pages.shape[1]
    out, rows = bits(pages).clone(), bits(rows)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[slot // page_size, slot % page_size] = rows[token]
    return out


def saturate(x, dtype=torch.float8_e4m3fn):
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def fp8_rows(rows):
    """The 656-byte rows, by torch on the CPU: on a GPU it divides by a number through its rounded inverse."""
    rows = rows.cpu()
    groups = rows.float()[:, :512].unflatten(1, (4, 128))
    scales = (groups.abs().amax(-1) / 448).clamp(min=SMALLEST_NORMAL)
    latent = saturate(groups / scales.unsqueeze(-1)).flatten(1)
    return torch.cat([bits(latent), bits(scales), bits(rows[:, 512:].to(torch.bfloat16))], dim=1)


def both_forms(rows):
    """The row in one tensor, and cut in two that are parts of wider ones."""
    yield rows, None
    wide = torch.full((rows.shape[0], 1300), math.nan, dtype=rows.dtype, device=rows.device)
    wide[:, 3:515], wide[:, 700:764] = rows[:, :512], rows[:, 512:]
    yield wide[:, 3:515], wide[:, 700:764]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("case", CASES)
def test_copy_equals_plain_indexing(case, dtype, slot_dtype, device):
    num_tokens, page_size = case
    rows, num_pages, slots = problem(num_tokens, page_size, dtype, device, slot_dtype)
    for latent, k_pe in both_forms(rows):
        pages = pool(num_pages, page_size, 576, dtype, device)
        expected = expected_pages(pages, rows, slots)
        ops.store_mla_kv(pages, latent, slots, k_pe=k_pe)
        assert torch.equal(bits(pages), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [None, 0.037, 1e-5])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("case", CASES)
def test_fp8_pages_hold_the_saturated_quotient(case, dtype, scale, fp8, device):
    num_tokens, page_size = case
    rows, num_pages, slots = problem(num_tokens, page_size, dtype, device)
    kv_scale = None if scale is None else torch.tensor([scale], device=device)
    quotient = saturate(rows.float() if scale is None else rows.float() / kv_scale, fp8)
    for latent, k_pe in both_forms(rows):
        pages = pool(num_pages, page_size, 576, fp8, device)
        expected = expected_pages(pages, quotient, slots)
        ops.store_mla_kv(pages, latent, slots, k_pe=k_pe, kv_scale=kv_scale)
        assert torch.equal(bits(pages), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("case", CASES)
def test_fp8_rows_of_656_bytes(case, dtype, device):
    num_tokens, page_size = case
    rows, num_pages, slots = problem(num_tokens, page_size, dtype, device)
    rows[:, 128:256] *= 1e-3
    for latent, k_pe in both_forms(rows):
        pages = pool(num_pages, page_size, 656, torch.uint8, device)
        expected = expected_pages(pages, fp8_rows(rows), slots)
        ops.store_mla_kv(pages, latent, slots, k_pe=k_pe)
        assert torch.equal(bits(pages), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_rows_come_back_within_the_rounding_of_e4m3(device):
    """Read as a decode kernel would read them: latent x scale, and the rope as it was."""
    rows, num_pages, slots = problem(40, 16, torch.bfloat16, device)
    slots = torch.arange(40, device=device)
    rows[3, :128] = 0  # a group of zeros
    pages = pool(num_pages, 16, 656, torch.uint8, device)
    ops.store_mla_kv(pages, rows, slots)
    stored = pages.flatten(0, 1)[:40].contiguous()
    latent = stored[:, :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (4, 128))
    scales = stored[:, 512:528].contiguous().view(torch.float32)
    rope = stored[:, 528:].contiguous().view(torch.bfloat16)
    assert scales[3, 0] == SMALLEST_NORMAL and not latent[3, 0].any()
    error = (latent * scales.unsqueeze(-1)).flatten(1) - rows[:, :512].float()
    # half of the last of 3 mantissa bits; below the normals, of 2^-9 x scale
    bound = torch.maximum(rows[:, :512].float().abs() / 16, scales.repeat_interleave(128, 1) * 2**-10)
    assert (error.abs() <= bound * 1.0001).all()
    assert torch.equal(rope, rows[:, 512:])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_one_group_stays_in_that_element(device):
    rows, num_pages, _ = problem(2, 16, torch.bfloat16, device)
    rows[0, 130] = math.nan
    pages = pool(num_pages, 16, 656, torch.uint8, device)
    ops.store_mla_kv(pages, rows, torch.arange(2, device=device))
    latent = pages[0, 0, :512].view(torch.float8_e4m3fn).float()
    assert latent[130].isnan() and latent.isnan().sum() == 1
    assert pages[0, 0, 512:528].view(torch.float32).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_dtype", [torch.float16, torch.float8_e4m3fn, torch.uint8])
def test_strided_pools(page_dtype, device):
    """One layer of a stack, and a pool whose rows start at odd bytes."""
    rows, num_pages, slots = problem(21, 4, torch.float16, device)
    dim = 656 if page_dtype == torch.uint8 else 576
    stack = pool(num_pages, 3 * 4, dim, page_dtype, device).unflatten(1, (3, 4))
    odd = pool(num_pages, 4, dim + 5, page_dtype, device)
    values = {torch.float16: rows, torch.float8_e4m3fn: saturate(rows.float())}
    values = fp8_rows(rows) if page_dtype == torch.uint8 else values[page_dtype]
    for pages in (stack[:, 1], odd[..., 5:]):
        expected = expected_pages(pages, values, slots)
        ops.store_mla_kv(pages, rows, slots)
        assert torch.equal(bits(pages), expected)
    for untouched in (stack[:, 0], stack[:, 2], odd[..., :5]):
        assert (bits(untouched) == GUARD).all(), "wrote outside its rows"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_slots_outside_the_pool_are_not_stored_and_are_reported(page_dtype, device):
    rows = torch.randn(3, 576, device=device).bfloat16()
    dim = 656 if page_dtype == torch.uint8 else 576
    whole = pool(4, 4, dim, page_dtype, device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    ops.store_mla_kv(whole[:2], rows, torch.tensor([1, 8, -1], device=device), report=report)
    assert report.tolist() == [1, 4, 2, 1, 1, 8, 8, 0]
    assert (bits(whole)[2:] == GUARD).all() and not (bits(whole)[0, 1] == GUARD).all()
    ops.store_mla_kv(whole[:2], rows, torch.tensor([1, 8, -1], device=device))
    assert (bits(whole)[2:] == GUARD).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_pool_above_two_to_the_31_elements(page_dtype, device):
    dim, page_size = (656, 64) if page_dtype == torch.uint8 else (576, 64)
    num_pages = 2**31 // (page_size * dim) + 2
    if (free := free_bytes(device)) < (needed := num_pages * page_size * dim + 2**30):
        pytest.skip(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    pages = torch.empty(num_pages, page_size, dim, dtype=page_dtype, device=device)
    rows = torch.randn(3, 576).to(device, torch.bfloat16)
    slots = torch.tensor([num_pages * page_size - 1, 0, (num_pages - 1) * page_size - 1], device=device)
    ops.store_mla_kv(pages, rows, slots)
    expected = fp8_rows(rows) if page_dtype == torch.uint8 else saturate(rows.float())
    stored = torch.stack([pages[slot // page_size, slot % page_size] for slot in slots.tolist()])
    assert torch.equal(bits(stored), bits(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_aliasing(device):
    rows = torch.randn(3, 576, device=device).bfloat16()
    slots = torch.tensor([1, -1, 3], device=device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    op = torch.ops.attnops.store_mla_kv.default
    for pages in (torch.zeros(2, 4, 576, device=device).bfloat16(), torch.zeros(2, 4, 656, device=device).byte()):
        torch.library.opcheck(op, (pages, rows, None, slots))
        torch.library.opcheck(op, (pages, rows[:, :512], rows[:, 512:].clone(), slots, None, report))
    # torch cannot compare e4m3 tensors, which opcheck's schema test does; the others can do without.
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    fp8 = torch.zeros(2, 4, 576, device=device).to(torch.float8_e4m3fn)
    args = (fp8, rows, None, slots, torch.ones(1, device=device), report)
    torch.library.opcheck(op, args, test_utils=rest)
