"""store_index_k, quantize_index_q and gather_index_k: the same bits as plain torch on every device."""

from __future__ import annotations

import math

import indexer_reference as reference
import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [(False, False), (True, False), (False, True), (True, True)]


def rows_of(count, dim, dtype):
    """Normal rows, large ones, tiny ones, zeros, one value alone; with infinity or NaN where the dtype has them."""
    x = torch.randn(count, dim)
    scales = torch.tensor([1.0, 1000.0, 1e-6, 0.0, 3e4, 1e-3]).repeat(-(-count // 6))[:count]
    x *= scales.unsqueeze(1)
    x[0] = 0
    x[0, dim // 3] = -7.25
    if count > 8:
        x[7, 5], x[8, 0] = math.nan, math.inf
    return x.to(dtype)


def same(got, expected):
    """Equal bits, but for those of NaN."""
    got, expected = got.cpu().float(), expected.float()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def pages_of(num_pages, page_size, dim, device, spare=0):
    """Rubbish, in a pool whose pages may be apart."""
    whole = torch.randint(0, 256, (num_pages, page_size + spare, dim + 4), dtype=torch.uint8)
    return whole.to(device)[:, :page_size]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rotate", "ue8m0"), OPTIONS)
@pytest.mark.parametrize(("dim", "page_size", "spare"), [(128, 64, 0), (64, 64, 1), (128, 1, 0), (128, 7, 2)])
def test_keys_are_stored_bit_for_bit(dim, page_size, spare, rotate, ue8m0, dtype, device):
    num_pages = 40 // page_size + 3
    pages = pages_of(num_pages, page_size, dim, device, spare)
    before, x = pages.clone().cpu(), rows_of(33, dim, dtype)
    slots = torch.randperm(num_pages * page_size)[:33]
    slots[4] = -1
    wide = torch.full((33, dim + 3), math.nan, dtype=dtype)
    wide[:, 3:] = x
    ops.store_index_k(pages, wide.to(device)[:, 3:], slots.to(device), hadamard=rotate, ue8m0=ue8m0)
    keys, scales = reference.quantize(x, rotate=rotate, ue8m0=ue8m0)
    pages, touched = pages.cpu(), set()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        touched.add(slot)
        key, scale = reference.read_key(pages, slot // page_size, slot % page_size)
        same(key, keys[row])
        same(scale, scales[row])
    for slot in set(range(num_pages * page_size)) - touched:
        place = slot // page_size, slot % page_size
        now, old = (
            torch.cat([p.view(torch.uint8).flatten() for p in (k, s.view(1))])
            for k, s in [reference.read_key(pages, *place), reference.read_key(before, *place)]
        )
        assert torch.equal(now, old), "a key of another slot has changed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rotate", "ue8m0"), OPTIONS)
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (5, 64), (1, 128)])
def test_queries_fold_their_scales_into_weights(heads, dim, rotate, ue8m0, dtype, device):
    q = rows_of(9 * heads, dim, dtype).view(9, heads, dim)
    weights = torch.randn(9, heads).to(dtype)
    factor = heads**-0.5 * dim**-0.5
    got, got_weights = ops.quantize_index_q(
        q.to(device), weights.to(device), scale=factor, hadamard=rotate, ue8m0=ue8m0
    )
    keys, scales = reference.quantize(q, rotate=rotate, ue8m0=ue8m0)
    same(got, keys)
    same(got_weights, weights.float() * torch.tensor(factor, dtype=torch.float32) * scales)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512_bf16", "amx"])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_instruction_set_has_these_bits(dim, isa, monkeypatch):
    """Also values halfway between two of e4m3, its subnormals, and numbers of every size."""
    monkeypatch.setenv("ATTNOPS_CPU_ISA", isa)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, -codes])[: dim * 5 // 2].repeat(4)
    halfway = halfway[: halfway.numel() // dim * dim].view(-1, dim).clone()
    halfway[:, 0] = 448  # the scale is then 1
    any_size = torch.randint(-(2**31), 2**31, (40, dim), dtype=torch.int64).int().view(torch.float32)
    any_size = torch.where(any_size.isnan(), math.nan, any_size)
    for dtype in DTYPES:
        for rotate, ue8m0 in OPTIONS:
            given = [rows_of(33, dim, dtype), halfway.to(dtype)]
            given += [any_size] if dtype == torch.float32 and not rotate else []
            x = torch.cat(given)
            got, weights = ops.quantize_index_q(x[:, None], torch.ones(len(x), 1), hadamard=rotate, ue8m0=ue8m0)
            keys, scales = reference.quantize(x, rotate=rotate, ue8m0=ue8m0)
            same(got[:, 0], keys)
            same(weights[:, 0], scales)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_go_into_slices(device):
    q, weights = torch.randn(4, 3, 128).to(device), torch.randn(4, 3).to(device)
    wide = torch.zeros(4, 3, 129, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[..., 1:]
    out = torch.zeros(4, 8, device=device)
    ops.quantize_index_q(q, weights, q_fp8=wide, weights_out=out[:, 2:5])
    right, right_weights = ops.quantize_index_q(q, weights)
    assert torch.equal(wide.float(), right.float()) and torch.equal(out[:, 2:5], right_weights)
    assert not out[:, :2].any() and not out[:, 5:].any()


def test_rotated_products_are_products():
    """The Hadamard matrix is orthogonal: with it or without, logits are the same up to rounding."""
    a, b = torch.randn(50, 128), torch.randn(60, 128)
    rotated = reference.hadamard(a).double() @ reference.hadamard(b).double().T
    assert torch.allclose(rotated, a.double() @ b.double().T, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "page_size", "gap"), [(128, 64, 0), (64, 5, 0), (128, 1, 0), (128, 64, 16)])
def test_keys_are_gathered_by_request(dim, page_size, gap, device):
    lengths, spare = [0, 130, 1, 0, 64, 63], 5
    counts = [-(-n // page_size) for n in lengths]
    pages = pages_of(sum(counts) + 2, page_size, dim, device)
    order, table = torch.randperm(sum(counts)).tolist(), torch.full((6, max(counts) + 1), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    wide = torch.full((sum(lengths) + spare, dim + gap), 9, dtype=torch.uint8, device=device)
    k, scales = wide[:, :dim], torch.full((sum(lengths) + spare,), -5.0, device=device)
    ops.gather_index_k(k, scales, pages, table.to(device), bounds.to(device))
    row = 0
    for request, length in enumerate(lengths):
        for position in range(length):
            page = int(table[request, position // page_size])
            key, scale = reference.read_key(pages.cpu(), page, position % page_size)
            assert torch.equal(k[row].cpu(), key.view(torch.uint8))
            assert torch.equal(scales[row].cpu().view(torch.int32), scale.view(torch.int32))
            row += 1
    assert (k[row:] == 9).all() and (wide[:, dim:] == 9).all() and (scales[row:] == -5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_slots_outside_the_pool_are_reported_and_stored_nowhere(device):
    pages = pages_of(2, 4, 128, device)
    before, report = pages.clone(), new_report(device)
    slots = torch.tensor([-(2**40), 8, -1], device=device)
    ops.store_index_k(pages, torch.randn(3, 128).to(device), slots, report=report)
    assert torch.equal(pages, before)
    assert "store_index_k: token slot 8 at request 1, position 1, must be in [0, 8)" in first_fault(report)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="attnops::store_index_k: out_cache_loc"):
            ops.store_index_k(pages, torch.randn(3, 128), slots)


GATHER_FAULTS = {
    "page index 2 at request 1, position 0, must be in [0, 2)": {"table": [[0, 1], [2, 0]]},
    "page index -1 at request 0, position 1": {"table": [[0, -1], [1, 0]]},
    "page of a key 2 at request 0, position 8, must be in [0, 2)": {"bounds": [0, 9, 10]},
    "end of tokens": {"bounds": [0, 5, 11]},
    "end of tokens 3 at request 1": {"bounds": [0, 5, 3]},
    "end of tokens 5 at request 0": {"bounds": [2, 5, 6]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("told", GATHER_FAULTS)
def test_pages_and_bounds_out_of_range(told, device):
    given = {"table": [[0, 1], [1, 0]], "bounds": [0, 6, 10]} | GATHER_FAULTS[told]
    table, bounds = (torch.tensor(given[name], dtype=torch.int32, device=device) for name in ("table", "bounds"))
    pages, report = pages_of(2, 4, 128, device), new_report(device)
    k, scales = torch.zeros(10, 128, dtype=torch.uint8, device=device), torch.zeros(10, device=device)
    ops.gather_index_k(k, scales, pages, table, bounds, report=report)
    assert told in first_fault(report)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="attnops::gather_index_k: "):
            ops.gather_index_k(k, scales, pages, table, bounds)


@pytest.mark.parametrize(
    ("op", "spoiled", "told"),
    [
        (
            "store_index_k",
            {"index_pages": torch.zeros(2, 4, 131, dtype=torch.uint8)},
            r"index_pages.shape\[2\] must be 132",
        ),
        (
            "store_index_k",
            {"index_pages": torch.zeros(2, 8, 132, dtype=torch.uint8)[:, ::2]},
            "index_pages must have pages",
        ),
        ("store_index_k", {"k": torch.zeros(3, 64)}, r"k.shape\[1\] \(dim\) must be 128"),
        ("store_index_k", {"k": torch.zeros(3, 128, dtype=torch.float64)}, "k must have dtype float32"),
        ("quantize_index_q", {"q": torch.zeros(3, 2, 96)}, r"q.shape\[2\] \(dim\) must be 64 or 128, got 96"),
        ("quantize_index_q", {"scale": math.nan}, "scale must be"),
        ("gather_index_k", {"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, r"cu_seqlens_k.shape\[0\]"),
        ("gather_index_k", {"k": torch.zeros(7, 128, dtype=torch.int8)}, "k must have dtype float8_e4m3fn or uint8"),
    ],
)
def test_errors_name_the_argument(op, spoiled, told):
    from indexer_calls import indexer_arguments

    with pytest.raises(RuntimeError, match=f"attnops::{op}: {told}"):
        getattr(ops, op)(**indexer_arguments()[op] | spoiled)


@pytest.mark.parametrize("device", DEVICES)
def test_schemas_fakes_and_aliasing(device):
    from indexer_calls import indexer_arguments

    given = {
        op: [v.to(device) if isinstance(v, torch.Tensor) else v for v in arguments.values()]
        for op, arguments in indexer_arguments().items()
    }
    torch.library.opcheck(torch.ops.attnops.store_index_k.default, (*given["store_index_k"], True, False))
    torch.library.opcheck(torch.ops.attnops.gather_index_k.default, tuple(given["gather_index_k"]))
    q, weights, scale = given["quantize_index_q"]
    out = torch.zeros(q.shape, dtype=torch.float8_e4m3fn, device=device), torch.zeros_like(weights)
    # torch's schema test multiplies outputs, which it cannot for FP8.
    tests = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.attnops.quantize_index_q.default, (*out, q, weights, scale), test_utils=tests)
