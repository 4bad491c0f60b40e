"""attnops::store_kv on every device: against plain indexing, bit for bit."""

import math

import pytest
import torch
from attnops import ops
from checks import free_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WIDE = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [  # num_tokens, num_heads, head_dim_k, head_dim_v, page_size
    (7, 3, 64, 64, 16),
    (5, 1, 33, 33, 1),
    (9, 5, 80, 80, 3),
    (33, 8, 128, 128, 64),
    (4, 2, 192, 128, 16),
    (3, 1, 576, 512, 64),
    (300, 7, 6, 10, 16),
]
NUM_PAGES = 9
GUARD = 77  # bytes that nobody may write


def bits(tensor):
    """The tensor's bytes: NaN equals NaN, and -0 is not 0."""
    return tensor.cpu().contiguous().view(torch.uint8)


def random_rows(shape, dtype, device):
    rows = torch.randn(shape, device=device)
    return rows.to(dtype)


def pool(num_pages, page_size, num_heads, head_dim, dtype, device):
    """A pool whose every byte is a guard."""
    size = torch.empty((), dtype=dtype).element_size()
    whole = torch.full((num_pages, page_size, num_heads, head_dim * size), GUARD, dtype=torch.uint8, device=device)
    return whole.view(dtype)


def random_slots(num_tokens, num_slots, dtype, device):
    """Distinct slots, about one in five of them padding."""
    slots = torch.randperm(max(num_slots, num_tokens))[:num_tokens]
    slots[slots >= num_slots] = -1
    slots[torch.rand(num_tokens) < 0.2] = -1
    return slots.to(device, dtype)


def quantized(x, scale, dtype=torch.float8_e4m3fn):
    """What FP8 pages hold. torch's own conversion does not saturate, so clamp first; scale has an extent per head."""
    most = torch.finfo(dtype).max
    return (x.float() / scale.view(-1, 1)).clamp(-most, most).to(dtype)


def expected_pages(pages, rows, slots):
    """Plain indexing on the bytes, on the CPU."""
    page_size = pages.shape[1]
    out, rows = bits(pages).clone(), bits(rows)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[slot // page_size, slot % page_size] = rows[token]
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_copy_equals_plain_indexing(shape, dtype, slot_dtype, device):
    num_tokens, num_heads, head_dim_k, head_dim_v, page_size = shape
    num_pages = max(NUM_PAGES, 2 * num_tokens // page_size)
    k = random_rows((num_tokens, num_heads, head_dim_k), dtype, device)
    v = random_rows((num_tokens, num_heads, head_dim_v), dtype, device)
    k_pages = pool(num_pages, page_size, num_heads, head_dim_k, dtype, device)
    v_pages = pool(num_pages, page_size, num_heads, head_dim_v, dtype, device)
    slots = random_slots(num_tokens, num_pages * page_size, slot_dtype, device)
    expected = expected_pages(k_pages, k, slots), expected_pages(v_pages, v, slots)
    ops.store_kv(k_pages, v_pages, k, v, slots)
    assert torch.equal(bits(k_pages), expected[0])
    assert torch.equal(bits(v_pages), expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("per_head", [None, False, True])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_pages_hold_the_saturated_quotient(shape, dtype, per_head, fp8, device):
    num_tokens, num_heads, head_dim_k, head_dim_v, page_size = shape
    num_pages = max(NUM_PAGES, 2 * num_tokens // page_size)
    k = 100 * random_rows((num_tokens, num_heads, head_dim_k), dtype, device)
    v = 1e-3 * random_rows((num_tokens, num_heads, head_dim_v), dtype, device)
    k_pages = pool(num_pages, page_size, num_heads, head_dim_k, fp8, device)
    v_pages = pool(num_pages, page_size, num_heads, head_dim_v, fp8, device)
    slots = random_slots(num_tokens, num_pages * page_size, torch.int64, device)
    scales = [None, None]
    if per_head is not None:
        scales = [torch.rand(num_heads if per_head else 1, device=device) * s + s for s in (0.13, 1e-3)]
    one = torch.ones(1, device=device)
    k_expected = expected_pages(k_pages, quantized(k, one if scales[0] is None else scales[0], fp8), slots)
    v_expected = expected_pages(v_pages, quantized(v, one if scales[1] is None else scales[1], fp8), slots)
    ops.store_kv(k_pages, v_pages, k, v, slots, k_scale=scales[0], v_scale=scales[1])
    assert torch.equal(bits(k_pages), k_expected)
    assert torch.equal(bits(v_pages), v_expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", WIDE)
def test_every_value_is_quantized_to_the_nearest(dtype, fp8, device):
    """All FP8 values, the midpoints between neighbours and their surroundings, infinities and NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(fp8).double()
    finite = values[values.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    points = torch.cat([finite, middles, middles * (1 + 2**-7), middles * (1 - 2**-7)])
    beyond = [449.0, 464, 465, 480, 1e4, -1e4, 58e3, 61440, 62e3, 1e30, -1e30, math.inf, -math.inf, math.nan, 0.0]
    points = torch.cat([points, torch.tensor(beyond)])
    rows = torch.nn.functional.pad(points, (0, -len(points) % 8)).to(dtype)
    k = rows.view(1, 1, -1).to(device)
    pages = pool(1, 1, 1, k.shape[2], fp8, device)
    ops.store_kv(pages, pages.clone(), k, k, torch.zeros(1, dtype=torch.int32, device=device))
    stored, expected = pages.flatten().float().cpu(), quantized(rows.float(), torch.ones(1), fp8).flatten().float()
    assert stored.isnan().sum() == expected.isnan().sum() == 1
    assert torch.equal(stored.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_any_strides(page_dtype, device):
    """HND pools, one joint pool, a slice of a layer stack, rows cut out of a joint projection, odd offsets."""
    num_tokens, num_heads, head_dim, page_size = 11, 3, 32, 4
    qkv = random_rows((num_tokens, 4 * num_heads * head_dim + 1), torch.bfloat16, device)
    slots = random_slots(num_tokens, 6 * page_size, torch.int64, device)
    wide_slots = torch.stack([slots, slots + 1], 1)
    for offset in (0, 1):
        k, v = qkv[:, offset : offset + 2 * num_heads * head_dim].unflatten(1, (2, num_heads, head_dim)).unbind(1)
        hnd = pool(6, num_heads, page_size, head_dim, page_dtype, device).transpose(1, 2)
        layers = pool(6, page_size, 5 * num_heads, head_dim, page_dtype, device).unflatten(2, (5, num_heads))
        joint = pool(6, 2 * page_size, num_heads, head_dim, page_dtype, device).unflatten(1, (2, page_size))
        odd = pool(6, page_size, num_heads, head_dim + 1, page_dtype, device)[..., 1:]
        for k_pages, v_pages in (
            (hnd, hnd.clone()),
            (layers[:, :, 1], layers[:, :, 3]),
            (joint[:, 0], joint[:, 1]),
            (odd, odd.clone()),
        ):
            rows = (k, v)
            if page_dtype == torch.float8_e4m3fn:
                rows = [quantized(x, torch.ones(1, device=device)) for x in rows]
            expected = expected_pages(k_pages, rows[0], slots), expected_pages(v_pages, rows[1], slots)
            ops.store_kv(k_pages, v_pages, k, v, wide_slots[:, 0])
            assert torch.equal(bits(k_pages), expected[0])
            assert torch.equal(bits(v_pages), expected[1])
        for untouched in (layers[:, :, 0], layers[:, :, 2], layers[:, :, 4]):
            assert (bits(untouched) == GUARD).all(), "wrote into another layer's rows"


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_store(device):
    pages = pool(2, 4, 3, 16, torch.float16, device)
    rows = random_rows((5, 3, 16), torch.float16, device)
    ops.store_kv(pages, pages.clone(), rows[:0], rows[:0], torch.zeros(0, dtype=torch.int32, device=device))
    ops.store_kv(pages, pages.clone(), rows, rows, torch.full((5,), -1, device=device))
    empty = rows[:, :0]
    slots = torch.arange(5, device=device)
    ops.store_kv(pages[:, :, :0], pages[:, :, :0], empty, empty, slots)
    ops.store_kv(pages[:0], pages[:0], rows, rows, slots)  # a pool without pages stores nothing
    assert (bits(pages) == GUARD).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_dtype", [torch.float16, torch.float8_e4m3fn])
def test_slots_outside_the_pool_are_not_stored_and_are_reported(page_dtype, device):
    whole = pool(4, 4, 2, 16, page_dtype, device)
    rows = random_rows((4, 2, 16), torch.float16, device)
    slots = torch.tensor([3, 8, -5, 2**31 - 1], device=device)
    for report in (None, torch.zeros(8, dtype=torch.int32, device=device)):
        pages = whole.clone()
        ops.store_kv(pages[:2], pages.clone()[:2], rows, rows, slots, report=report)
        assert (bits(pages)[2:] == GUARD).all() and not (bits(pages)[0, 3] == GUARD).all()
    # count, op, kind, then the first fault met: on a GPU either token may come first
    assert report[:3].tolist() == [2, 3, 2] and report[6] == 8
    assert report[3:6].tolist() in ([1, 1, 8], [3, 3, 2**31 - 1])
    good = torch.zeros(8, dtype=torch.int32, device=device)
    ops.store_kv(whole, whole.clone(), rows, rows, torch.tensor([0, -1, 5, 15], device=device), report=good)
    assert good.tolist() == [0] * 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_pool_above_two_to_the_31_elements(page_dtype, device):
    """Offsets are 64 bit: the last pages of a pool of 2^31 + 2^17 elements, and its first, hold what was stored."""
    page_size, num_heads, head_dim = 64, 8, 128
    num_pages = 2**31 // (page_size * num_heads * head_dim) + 2
    needed = num_pages * page_size * num_heads * head_dim * page_dtype.itemsize + 2**30
    if (free := free_bytes(device)) < needed:
        pytest.skip(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    pages = torch.empty(num_pages, page_size, num_heads, head_dim, dtype=page_dtype, device=device)
    slots = torch.tensor([0, num_pages * page_size - 1, num_pages * page_size - page_size - 1, 1], device=device)
    k = random_rows((4, num_heads, head_dim), torch.bfloat16, device)
    ops.store_kv(pages, pages, k, k, slots)  # V is K, and so are its pages: two such pools would be too much
    stored = pages.view(-1, num_heads, head_dim)[slots.tolist()]
    expected = k if page_dtype == torch.bfloat16 else quantized(k, torch.ones(1, device=device))
    assert torch.equal(bits(stored), bits(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_aliasing(device):
    rows = random_rows((3, 2, 16), torch.bfloat16, device)
    slots = torch.tensor([1, -1, 3], device=device)
    scale = torch.ones(2, device=device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    pages = torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16, device=device)
    args = (pages, pages.clone(), rows, rows.clone(), slots, None, None, report)
    torch.library.opcheck(torch.ops.attnops.store_kv.default, args)
    # torch cannot compare e4m3 tensors, which opcheck's schema test does; the others can do without.
    fp8 = pages.to(torch.float8_e4m3fn)
    args = (fp8, fp8.clone(), rows, rows.clone(), slots, scale, scale[:1], report)
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.attnops.store_kv.default, args, test_utils=rest)
