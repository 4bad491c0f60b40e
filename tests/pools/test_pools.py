"""Request rows, the memory of K, V and latents, and the two pools of a sliding-window model."""

from __future__ import annotations

import copy

import pytest
import torch
from attnops import reference
from attnops.layers import RadixAttention
from attnops.pools import (
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
)

E4M3 = torch.float8_e4m3fn


def layer(layer_id: int = 1) -> RadixAttention:
    return RadixAttention(4, 32, 0.2, 2, layer_id)


def test_request_rows_are_given_once_and_come_back():
    pool = ReqToTokenPool(3, 8)
    rows = pool.alloc(2)
    assert len(set(rows)) == 2 and pool.available_size() == 1
    assert pool.alloc(2) is None
    pool.free(rows)
    assert pool.available_size() == 3
    with pytest.raises(ValueError, match="not in use"):
        pool.free(rows[0])


def test_request_rows_hold_what_was_written():
    pool = ReqToTokenPool(4, 8)
    pool.write(2, 1, torch.tensor([7, 8, 9]))
    pool.write_each([2, 0], [4, 0], torch.tensor([10, 3]))
    assert pool.req_to_token[2, 1:5].tolist() == [7, 8, 9, 10]
    assert pool.slots(0, 0, 1).tolist() == [3] and pool.req_to_token.dtype == torch.int32
    with pytest.raises(ValueError, match="max_context_len 8"):
        pool.write(0, 6, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="max_context_len 8"):
        pool.write_each([0], [8], torch.tensor([1]))


def test_request_rows_and_tokens_that_are_none_are_named():
    """Negative ones would count from the end, and write another request's slots."""
    pool = ReqToTokenPool(4, 8)
    one, two = torch.tensor([1]), torch.tensor([1, 2])
    for row in (-1, 4, 10**6):
        expected = rf"row must be in \[0, 4\) of ReqToTokenPool, got {row}"
        for misuse in (
            lambda row=row: pool.write(row, 0, one),
            lambda row=row: pool.write_each([1, row], [0, 0], two),
            lambda row=row: pool.slots(row, 0, 1),
        ):
            with pytest.raises(ValueError, match=expected):
                misuse()
    for start in (-1, -8):
        for misuse in (
            lambda start=start: pool.write(1, start, one),
            lambda start=start: pool.write_each([1, 2], [0, start], two),
            lambda start=start: pool.slots(1, start, 1),
        ):
            with pytest.raises(ValueError, match=rf"tokens \[{start}, .* are none of a row"):
                misuse()
    with pytest.raises(ValueError, match=r"tokens \[5, 3\) are none"):
        pool.slots(1, 5, 3)
    with pytest.raises(ValueError, match="token 8 is beyond max_context_len 8"):
        pool.slots(1, 5, 9)
    with pytest.raises(ValueError, match="one entry per token, got 2, 1 and 2"):
        pool.write_each([0, 1], [0], two)
    with pytest.raises(ValueError, match="one entry per token, got 1, 1 and 2"):
        pool.write_each([0], [0], two)
    with pytest.raises(ValueError, match="takes slots in host memory"):
        pool.write(0, 0, one.to("meta"))
    with pytest.raises(ValueError, match="need_size must not be negative, got -2"):
        pool.alloc(-2)
    assert not pool.host.any(), "nothing was written"
    pool.write_each([], [], one[:0])
    rows = pool.alloc(3)
    for twice in ([rows[0], rows[0]], [rows[1], 4], [rows[2], -1]):
        with pytest.raises(ValueError, match="is not in use"):
            pool.free(twice)
    assert pool.available_size() == 1, "and nothing was given back"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
def test_rows_are_stored_at_their_slots(layout, dtype):
    pool = MHATokenToKVPool(64, 16, dtype, 2, 32, 2, v_head_dim=64, layout=layout)
    k_pages, v_pages = pool.get_kv_buffer(1)
    assert k_pages.shape == (4, 16, 2, 32) and v_pages.shape == (4, 16, 2, 64)
    assert k_pages.stride(-1) == 1 and (k_pages.stride(1) == 32) == (layout == "HND")
    source = torch.float32 if dtype == torch.float32 else torch.bfloat16
    k, v = torch.randn(3, 2, 32, dtype=source), torch.randn(3, 2, 64, dtype=source)
    scale = torch.tensor([0.5]) if dtype == E4M3 else None
    pool.set_kv_buffer(layer(), torch.tensor([17, -1, 63]), k, v, scale, scale)
    for row, slot in ((0, 17), (2, 63)):
        for rows, pages in ((k, k_pages), (v, v_pages)):
            expected = (rows[row].float() / 0.5).to(dtype) if dtype == E4M3 else rows[row]
            assert torch.equal(pages[slot // 16, slot % 16].float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3, torch.uint8])
def test_latents_are_stored_at_their_slots(dtype):
    pool = MLATokenToKVPool(128, 64, dtype, 2)
    latent = torch.randn(2, 576, dtype=torch.bfloat16)
    scale = torch.tensor([0.25]) if dtype == E4M3 else None
    pool.set_mla_kv_buffer(layer(), torch.tensor([70, 3]), latent[:, :512], latent[:, 512:], scale)
    row = pool.get_latent_buffer(1)[1, 6]
    if dtype == torch.uint8:
        assert torch.equal(row, reference.pack_mla_fp8_rows(latent[:1])[0])
        with pytest.raises(ValueError, match="656-byte"):
            pool.get_kv_buffer(1)
        return
    expected = (latent[0].float() / 0.25).to(E4M3) if dtype == E4M3 else latent[0]
    assert torch.equal(row.float(), expected.float())
    k, v = pool.get_kv_buffer(1)
    assert k.shape == (2, 64, 1, 576) and v.shape == (2, 64, 1, 512) and v.data_ptr() == k.data_ptr()


def test_sizes_are_what_they_say():
    assert MHATokenToKVPool(70, 16, torch.bfloat16, 2, 32, 3).nbytes() == 4 * 16 * 2 * 32 * 2 * 3 * 2
    assert MLATokenToKVPool(64, 64, torch.uint8, 2).nbytes() == 64 * 656 * 2
    with pytest.raises(ValueError, match="NHD or HND"):
        MHATokenToKVPool(64, 16, torch.bfloat16, 2, 32, 1, layout="DNH")


def window_pool(size: int = 64, size_swa: int = 32) -> tuple[SWAKVPool, SWATokenToKVPoolAllocator]:
    pool = SWAKVPool(size, size_swa, 4, torch.float32, 2, 32, [0, 2], [1, 3])
    return pool, SWATokenToKVPoolAllocator(pool)


def test_a_window_pool_translates_every_slot_that_is_in_use():
    pool, allocator = window_pool()
    slots = allocator.alloc(10)
    window = pool.slot_map[slots]
    assert (window >= 0).all() and window.unique().numel() == 10 and int(window.max()) < 32
    assert (window % 4 == slots % 4).all(), "a page stays a page"
    assert (pool.slot_map >= 0).sum() == 12, "whole pages have slots, no others"
    allocator.free(slots)
    assert (pool.slot_map == -1).all() and allocator.available_window_pages == 8


def test_layers_go_to_their_pool():
    pool, _ = window_pool()
    assert [pool.is_windowed(i) for i in range(4)] == [False, True, False, True]
    assert pool.get_key_buffer(2).shape[0] == 16 and pool.get_key_buffer(3).shape[0] == 8
    assert pool.get_key_buffer(1).data_ptr() != pool.get_key_buffer(3).data_ptr()
    with pytest.raises(ValueError, match=r"layers \[1\] are in both pools"):
        SWAKVPool(64, 32, 4, torch.float32, 2, 32, [0, 1], [1])


def test_pages_that_left_the_window_serve_others():
    """A pool for 64 tokens with windows for 32: a request outgrows the window pool by giving back old pages."""
    pool, allocator = window_pool()
    slots = allocator.alloc(32)
    assert allocator.available_size() == 0 and allocator.alloc(1) is None
    assert allocator.free_swa(slots[:16]) == 4
    assert allocator.free_swa(slots[:16]) == 0, "they are gone already"
    assert (pool.slot_map[slots[:16]] == -1).all() and (pool.slot_map[slots[16:]] >= 0).all()
    assert allocator.is_window_resident(slots[16:]) and not allocator.is_window_resident(slots)
    more = allocator.alloc_extend([32], [48], [int(slots[-1])])
    assert more is not None and (pool.slot_map[more] >= 0).all()
    allocator.free(torch.cat([slots, more]))
    assert allocator.available_pages == 16 and allocator.available_window_pages == 8


def test_a_shared_page_keeps_its_window():
    _, allocator = window_pool()
    slots = allocator.alloc(8)
    allocator.share(slots[:4])
    assert allocator.free_swa(slots) == 1
    assert allocator.is_window_resident(slots[:4])
    allocator.free(slots)
    assert allocator.is_window_resident(slots[:4])
    allocator.free(slots[:4])
    assert allocator.available_window_pages == 8


def test_a_layer_that_the_pool_does_not_hold_is_refused():
    """A list would take -1 for its last layer."""
    swa = SWAKVPool(64, 32, 16, torch.float32, 2, 32, [0, 2], [1])
    for pool, held, others in [
        (MHATokenToKVPool(64, 16, torch.float32, 2, 32, 3, start_layer=4), "4 to 6", (3, 7)),
        (MLATokenToKVPool(64, 16, torch.float32, 2, start_layer=1), "1 to 2", (0, 3)),
        (swa, r"\[0, 1, 2\]", (-1, 3)),
    ]:
        for layer_id in others:
            with pytest.raises(ValueError, match=f"layer_id must be .*{held}, the pool's, got {layer_id}"):
                pool.get_kv_buffer(layer_id)


def replace_one(pool):
    name = "kv_buffer" if isinstance(pool, MLATokenToKVPool) else "v_buffer"
    buffers = getattr(pool, name)
    buffers[1] = torch.empty_like(buffers[1])


def replace_all(pool):
    name = "kv_buffer" if isinstance(pool, MLATokenToKVPool) else "k_buffer"
    setattr(pool, name, [torch.empty_like(pages) for pages in getattr(pool, name)])


@pytest.mark.parametrize("replace", [replace_one, replace_all])
@pytest.mark.parametrize("kind", ["mha", "mla", "full", "window"])
def test_replaced_buffers_are_counted(kind, replace):
    if kind == "mla":
        pool = part = MLATokenToKVPool(128, 64, torch.bfloat16, 2)
    elif kind == "mha":
        pool = part = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 32, 2)
    else:
        pool = SWAKVPool(64, 32, 16, torch.bfloat16, 2, 32, [0, 1], [2, 3])
        part = pool.full_kv_pool if kind == "full" else pool.swa_kv_pool
    for _ in range(3):
        before = pool.buffers_version
        assert pool.buffers_version == before
        replace(part)
        assert pool.buffers_version > before
    layer_id = 3 if kind == "window" else 1
    assert pool.get_kv_buffer(layer_id)[0].data_ptr() == part.get_kv_buffer(1)[0].data_ptr()


def test_a_pool_keeps_one_buffer_per_layer():
    pool = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 32, 2)
    pages = pool.k_buffer[0]
    with pytest.raises(TypeError, match="each of its 2 layers"):
        pool.k_buffer.append(pages)
    with pytest.raises(TypeError, match="each of its 2 layers"):
        del pool.k_buffer[0]
    with pytest.raises(TypeError, match="each of its 2 layers"):
        pool.k_buffer[:] = [pages]
    with pytest.raises(ValueError, match="2 layers need as many buffers, got 3"):
        pool.k_buffer = [pages] * 3
    copied = copy.deepcopy(pool)
    assert len(copied.k_buffer) == 2 and copied.k_buffer[0].data_ptr() != pages.data_ptr()
    before = pool.buffers_version
    copied.k_buffer[0] = pages
    assert pool.buffers_version == before < copied.buffers_version


@pytest.mark.parametrize(
    "wrong", [torch.tensor([1.7]), torch.tensor([True]), torch.tensor([2**31]), torch.tensor([-(2**40)])]
)
def test_slots_that_no_int32_holds_are_refused(wrong):
    """They were cut to other slots."""
    pool = ReqToTokenPool(4, 16)
    with pytest.raises(ValueError, match="ReqToTokenPool takes slots"):
        pool.write(0, 0, wrong)
    with pytest.raises(ValueError, match="ReqToTokenPool takes slots"):
        pool.write_each([0], [3], wrong)
    assert not pool.host.any()
    pool.write(0, 0, torch.tensor([2**31 - 1]))
    pool.write(0, 1, torch.empty(0, dtype=torch.int64))


def test_states_are_given_back_all_or_none():
    pool = MambaPool(4, 1, (4, 3), (2, 4, 4))
    one, other = pool.alloc(2)
    pool.share([one])
    for wrong in ([one, 3], [one, other, other], [one, one, one], [one, -1]):
        with pytest.raises(ValueError, match="of MambaPool"):
            pool.free(wrong)
        assert pool.available_size() == 2
    pool.free([one, one, other])
    assert pool.available_size() == 4
