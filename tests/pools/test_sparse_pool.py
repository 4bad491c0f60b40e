"""The pool with latents and index keys: what is stored where, what moves, what is counted, and which buffers fit."""

from __future__ import annotations

import copy

import indexer_reference
import pytest
import torch
from attnops import ops, pools, reference
from attnops.layers import RadixAttention
from attnops.pools import DSATokenToKVPool, NSATokenToKVPool, PagedTokenToKVPoolAllocator, reason_against
from attnops.report import first_fault, new_report
from attnops.types import AttentionSpec

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
SHAPES = [(64, 128), (1, 128), (7, 64)]  # page_size, index_head_dim
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(layer_id: int = 1) -> RadixAttention:
    return RadixAttention(4, 576, 0.2, 1, layer_id, v_head_dim=512)


def pool_of(page_size: int, dim: int = 128, dtype: torch.dtype = torch.bfloat16, pages: int = 9, device="cpu"):
    """Every byte is 0xFF."""
    pool = DSATokenToKVPool(pages * page_size, page_size, dtype, 2, device, index_head_dim=dim)
    for buffer in [*pool.kv_buffer, *pool.index_k_with_scale_buffer]:
        buffer.view(torch.uint8).fill_(0xFF)
    return pool


def bytes_at(pool: DSATokenToKVPool, layer_id: int, slot: int) -> torch.Tensor:
    """A token's 132 or 68 bytes, by the format's words alone."""
    page = pool.get_index_k_with_scale_buffer(layer_id)[slot // pool.page_size].cpu().flatten()
    dim, offset = pool.index_head_dim, slot % pool.page_size
    scales = page[pool.page_size * dim :]
    return torch.cat([page[offset * dim : (offset + 1) * dim], scales[offset * 4 : offset * 4 + 4]])


def rubbish(count: int, dim: int, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and scales of any bits, NaN among them."""
    keys = torch.randint(0, 256, (count, dim), dtype=torch.uint8, device=device)
    return keys, torch.randint(0, 256, (count, 4), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rotate", "ue8m0"), [(True, False), (False, True)])
@pytest.mark.parametrize(("page_size", "dim"), SHAPES)
def test_index_keys_are_quantized_at_their_slots(page_size, dim, rotate, ue8m0, device):
    pool = pool_of(page_size, dim, device=device)
    k = torch.randn(4, 1, dim).bfloat16()
    slots = [5, -1, 0, 9 * page_size - 1]
    loc = torch.tensor(slots, device=device)
    pool.set_index_k(layer(), loc, k.to(device), hadamard=rotate, ue8m0=ue8m0)
    keys, scales = indexer_reference.quantize(k.squeeze(1), rotate=rotate, ue8m0=ue8m0)
    for slot in range(pool.size):
        expected = torch.full((dim + 4,), 0xFF, dtype=torch.uint8)
        if slot in slots:
            row = slots.index(slot)
            expected = torch.cat([keys[row].view(torch.uint8), scales[row].view(1).view(torch.uint8)])
        assert torch.equal(bytes_at(pool, 1, slot), expected), slot
    assert (pool.get_index_k_with_scale_buffer(0) == 0xFF).all(), "the other layer's stay"
    assert all((pages.view(torch.uint8) == 0xFF).all() for pages in pool.kv_buffer), "latents stay"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("page_size", "dim"), SHAPES)
def test_quantized_keys_are_stored_bit_for_bit(page_size, dim, index_dtype, device):
    pool, count = pool_of(page_size, dim, device=device), 7
    slots = torch.randperm(pool.size)[:count]
    slots[3] = -1
    keys, scales = rubbish(count, dim, device)
    floats = scales.view(torch.float32)
    loc = slots.to(device, index_dtype)
    pool.set_index_k_scale_buffer(0, loc, keys.view(E4M3), floats)
    stored = set(slots.tolist())
    for slot in range(pool.size):
        expected = torch.full((dim + 4,), 0xFF, dtype=torch.uint8)
        if slot in stored:
            row = slots.tolist().index(slot)
            expected = torch.cat([keys[row], scales[row]]).cpu()
        assert torch.equal(bytes_at(pool, 0, slot), expected), slot
    other = pool_of(page_size, dim, device=device)
    other.set_index_k_scale_buffer(0, loc, keys, floats.flatten())
    assert torch.equal(other.get_index_k_with_scale_buffer(0), pool.get_index_k_with_scale_buffer(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("page_size", "dim"), SHAPES)
def test_keys_of_a_batch_come_out_request_by_request(page_size, dim, device):
    pool = pool_of(page_size, dim, device=device)
    allocator = PagedTokenToKVPoolAllocator(pool.size, page_size)
    lengths = [2 * page_size + 1, 0, page_size] if page_size > 1 else [4, 0, 3]
    slots = [allocator.alloc(length) for length in lengths]
    keys, scales = rubbish(sum(lengths), dim, device)
    order = torch.randperm(sum(lengths))  # tokens are stored in any order
    loc = torch.cat(slots)[order].to(device)
    pool.set_index_k_scale_buffer(1, loc, keys[order.to(device)], scales[order.to(device)].view(torch.float32))
    table = torch.full((3, 9), -1, dtype=torch.int32)
    for request, mine in enumerate(slots):
        pages = mine[::page_size] // page_size
        table[request, : len(pages)] = pages
    table, spare = table.to(device), 2
    for dtype in (torch.int32, torch.int64):
        seqlens = torch.tensor(lengths, dtype=dtype, device=device)
        k, k_scale = pool.get_index_k_scale_buffer(1, seqlens, table, sum(lengths) + spare, max(lengths))
        assert k.shape == (sum(lengths) + spare, dim) and k_scale.shape == (sum(lengths) + spare, 4)
        assert k.dtype == k_scale.dtype == torch.uint8
        assert torch.equal(k[:-spare], keys) and torch.equal(k_scale[:-spare], scales)
    first = lengths[0]
    assert torch.equal(pool.get_index_k_continuous(1, first, table[0]), keys[:first])
    assert torch.equal(pool.get_index_k_scale_continuous(1, first, table[0]), scales[:first])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("page_size", "dim"), SHAPES)
def test_an_accepted_token_brings_its_index_key(page_size, dim, dtype, device):
    pool = pool_of(page_size, dim, dtype, device=device)
    for buffer in [*pool.kv_buffer, *pool.index_k_with_scale_buffer]:
        buffer.view(torch.uint8).random_(0, 256)
    rows = [pages.view(torch.uint8).flatten(0, 1) for pages in pool.kv_buffer]
    before = [x.clone() for x in rows]
    index_before = [[bytes_at(pool, at, slot) for slot in range(pool.size)] for at in (0, 1)]
    accepted = torch.tensor([[0, 2, 3]], device=device)
    ops.move_kv(accepted, torch.tensor([8, 4, 5, 1], device=device), pool.all_buffers()[0])
    source = list(range(pool.size))
    source[4], source[5] = 5, 1
    for old, now in zip(before, rows, strict=True):
        assert torch.equal(now, old[source])
    for at in (0, 1):
        for slot, origin in enumerate(source):
            assert torch.equal(bytes_at(pool, at, slot), index_before[at][origin]), (at, slot)


@pytest.mark.parametrize("device", DEVICES)
def test_a_branch_gets_index_keys_of_the_partial_page(device):
    pool = pool_of(4, device=device, pages=16)
    for buffer in pool.index_k_with_scale_buffer:
        buffer.random_(0, 256)
    kept = [bytes_at(pool, 1, slot) for slot in range(pool.size)]
    req_to_token = torch.arange(64, dtype=torch.int32, device=device).view(1, 64)
    # A prefix of 6 has two tokens in its second page. The second branch's page is cells 8 to 11 then.
    length = torch.tensor([6], dtype=torch.int32, device=device)
    ops.copy_page_tail(req_to_token, torch.tensor([0], device=device), length, pool.all_buffers()[0], 2, 2)
    for slot in range(pool.size):
        origin = {8: 4, 9: 5}.get(slot, slot)
        assert torch.equal(bytes_at(pool, 1, slot), kept[origin]), slot


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_latents_are_stored_as_in_the_plain_pool(dtype):
    pool = pool_of(64, dtype=dtype)
    latent = torch.randn(2, 576, dtype=torch.bfloat16)
    pool.set_mla_kv_buffer(layer(), torch.tensor([70, 3]), latent[:, :512], latent[:, 512:])
    expected = reference.pack_mla_fp8_rows(latent) if dtype == torch.uint8 else latent
    assert torch.equal(pool.get_latent_buffer(1).flatten(0, 1)[[70, 3]], expected)
    assert all((pages == 0xFF).all() for pages in pool.index_k_with_scale_buffer), "index keys stay"


def test_it_has_both_names_and_counts_its_bytes():
    assert NSATokenToKVPool is DSATokenToKVPool and "DSATokenToKVPool" in pools.__all__
    rows = DSATokenToKVPool(130, 64, torch.uint8, 3)
    assert rows.num_pages == 2 and rows.nbytes() == 3 * 128 * (656 + 132)
    assert DSATokenToKVPool(7, 7, torch.bfloat16, 1, index_head_dim=64).nbytes() == 7 * (1152 + 68)
    with pytest.raises(ValueError, match="index_head_dim of a pool must be 64 or 128, got 96"):
        DSATokenToKVPool(64, 64, torch.uint8, 1, index_head_dim=96)


def test_layers_are_those_of_the_pool_and_replaced_buffers_are_counted():
    pool = DSATokenToKVPool(64, 16, torch.bfloat16, 2, start_layer=3)
    pool.set_index_k(layer(4), torch.tensor([0]), torch.randn(1, 128))
    for wrong in (2, 5):
        with pytest.raises(ValueError, match=f"layer_id must be in 3 to 4, the pool's, got {wrong}"):
            pool.get_index_k_with_scale_buffer(wrong)
    before = pool.buffers_version
    pool.index_k_with_scale_buffer[1] = torch.zeros(4, 16, 132, dtype=torch.uint8)
    assert pool.buffers_version == before + 1
    assert not pool.get_index_k_with_scale_buffer(4).any(), "the new pages serve"
    with pytest.raises(ValueError, match="2 layers need as many buffers, got 1"):
        pool.index_k_with_scale_buffer = [torch.zeros(4, 16, 132, dtype=torch.uint8)]
    copied = copy.deepcopy(pool)
    copied.index_k_with_scale_buffer[1].fill_(1)
    assert not pool.get_index_k_with_scale_buffer(4).any()


FITS = AttentionSpec.mla(4, page_size=16, sparse_topk=24)
WRONG = [
    (torch.zeros(4, 16, 132), "dtype must be torch.uint8, got torch.float32"),
    (torch.zeros(4, 16, 132, dtype=torch.uint8, device="meta"), "device must be cpu, got meta"),
    (torch.zeros(4, 32, 132, dtype=torch.uint8), r"shape\[1:\] .* must be \(16, 132\), got \(32, 132\)"),
    (torch.zeros(4, 16, 68, dtype=torch.uint8), r"shape\[1:\] .* must be \(16, 132\), got \(16, 68\)"),
    (torch.zeros(4, 16 * 132, dtype=torch.uint8), r"shape\[1:\] .* must be \(16, 132\), got \(2112,\)"),
    (torch.zeros(4, 16, 136, dtype=torch.uint8)[..., :132], "must have pages without gaps, got strides"),
]


@pytest.mark.parametrize(("pages", "reason"), WRONG, ids=range(len(WRONG)))
def test_index_pages_that_do_not_fit_are_named(pages, reason):
    pool = DSATokenToKVPool(64, 16, torch.bfloat16, 2)
    assert reason_against(pool, FITS, CPU) == ""
    pool.index_k_with_scale_buffer[0] = torch.zeros(4, 17, 132, dtype=torch.uint8)[:, :16]
    assert reason_against(pool, FITS, CPU) == "", "pages may be apart"
    pool.index_k_with_scale_buffer[1] = pages
    with pytest.raises(AssertionError, match=reason):
        assert reason_against(pool, FITS, CPU) == ""


def test_pools_of_pages_apart_store_gather_and_move():
    apart, dense = (pool_of(16, pages=4) for _ in range(2))
    apart.index_k_with_scale_buffer = [torch.zeros(4, 20, 132, dtype=torch.uint8)[:, :16] for _ in range(2)]
    keys, scales = rubbish(20, 128)
    loc, table = torch.randperm(64)[:20], torch.arange(4, dtype=torch.int32)
    for pool in (apart, dense):
        pool.set_index_k_scale_buffer(1, torch.arange(64), **filled(64))
        pool.set_index_k_scale_buffer(1, loc, keys, scales.view(torch.float32))
        ops.move_kv(torch.tensor([[0, 2]]), torch.tensor([40, 9, 33]), pool.all_buffers()[0])
    assert torch.equal(apart.get_index_k_with_scale_buffer(1), dense.get_index_k_with_scale_buffer(1))
    assert torch.equal(apart.get_index_k_continuous(1, 64, table), dense.get_index_k_continuous(1, 64, table))


def filled(count: int) -> dict[str, torch.Tensor]:
    return {"index_k": torch.zeros(count, 128, dtype=torch.uint8), "index_k_scale": torch.ones(count)}


@pytest.mark.parametrize("device", DEVICES)
def test_slots_outside_are_reported_and_arguments_named(device):
    pool = pool_of(4, pages=2, device=device)
    before = pool.get_index_k_with_scale_buffer(1).clone()
    for store in (
        lambda loc, report: pool.set_index_k(layer(), loc, torch.randn(2, 128, device=device), report=report),
        lambda loc, report: pool.set_index_k_scale_buffer(
            1, loc, *(x.to(device) for x in filled(2).values()), report=report
        ),
    ):
        report = new_report(device)
        store(torch.tensor([-1, 8], device=device), report)
        assert "token slot 8" in first_fault(report)
    assert torch.equal(pool.get_index_k_with_scale_buffer(1), before)
    report, table = new_report(device), torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    pool.get_index_k_scale_buffer(1, lengths, table, 5, report=report)
    assert "gather_index_k: page index 2" in first_fault(report)
    loc = torch.tensor([0, 1], device=device)
    good, scales = (x.to(device) for x in filled(2).values())
    for index_k in (good[:1], good[:, :64], good.float(), good.unsqueeze(1)):
        with pytest.raises(ValueError, match=r"index_k must be float8_e4m3fn or uint8 \[2, 128\], got torch\."):
            pool.set_index_k_scale_buffer(1, loc, index_k, scales)
    for index_k_scale in (scales[:1], scales.half(), scales.view(1, 2)):
        with pytest.raises(ValueError, match=r"index_k_scale must be float32 \[2\] or \[2, 1\], got torch\."):
            pool.set_index_k_scale_buffer(1, loc, good, index_k_scale)
