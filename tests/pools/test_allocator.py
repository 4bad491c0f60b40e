"""Pages: who holds them, where tokens go, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from attnops.pools import PagedTokenToKVPoolAllocator, SWAKVPool, SWATokenToKVPoolAllocator


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_of_an_extend_are_page_aligned_and_disjoint(page_size):
    allocator = PagedTokenToKVPoolAllocator(100, page_size)
    slots = allocator.alloc_extend([0, 0, 0], [7, 1, 20], [-1] * 3)
    assert slots.shape == (28,) and slots.dtype == torch.int64
    assert slots.unique().numel() == 28 and int(slots.max()) < allocator.size
    for begin, end in ((0, 7), (7, 8), (8, 28)):
        offsets = slots[begin:end] % page_size
        assert offsets.tolist() == [i % page_size for i in range(end - begin)]


def test_a_request_grows_into_the_tail_of_its_last_page():
    allocator = PagedTokenToKVPoolAllocator(64, 4)
    first = allocator.alloc_extend([0], [6], [-1])
    used = allocator.num_pages - allocator.available_pages
    more = allocator.alloc_extend([6], [8], [int(first[-1])])
    assert more.tolist() == [int(first[-1]) + 1, int(first[-1]) + 2]
    assert allocator.num_pages - allocator.available_pages == used
    over = allocator.alloc_extend([8], [9], [int(more[-1])])
    assert int(over[0]) % 4 == 0 and allocator.num_pages - allocator.available_pages == used + 1


def test_decode_takes_a_page_only_at_a_boundary():
    allocator = PagedTokenToKVPoolAllocator(64, 4)
    slots = allocator.alloc_extend([0, 0], [4, 6], [-1, -1])
    free = allocator.available_pages
    new = allocator.alloc_decode([5, 7], [int(slots[3]), int(slots[9])])
    assert int(new[0]) % 4 == 0 and int(new[1]) == int(slots[9]) + 1
    assert allocator.available_pages == free - 1


def test_all_or_nothing():
    allocator = PagedTokenToKVPoolAllocator(16, 4)
    assert allocator.alloc_extend([0, 0], [12, 8], [-1, -1]) is None
    assert allocator.available_size() == 16
    full = allocator.alloc(16)
    assert allocator.alloc_decode([17], [int(full[-1])]) is None
    allocator.free(full)
    assert allocator.available_size() == 16


def test_a_shared_page_lives_until_its_last_holder_leaves():
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    slots = allocator.alloc(8)
    allocator.share(slots[:4])
    allocator.free(slots)
    assert allocator.available_pages == 7, "the first page has a holder left"
    allocator.free(slots[:4])
    assert allocator.available_pages == 8


def test_nobody_writes_into_a_page_that_others_hold():
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    slots = allocator.alloc(6)
    allocator.share(slots)
    for grow in (
        lambda: allocator.alloc_extend([6], [7], [int(slots[5])]),
        lambda: allocator.alloc_decode([7], [int(slots[5])]),
    ):
        with pytest.raises(ValueError, match="share whole pages only"):
            grow()
    # At a page boundary nothing of the shared page is written.
    assert allocator.alloc_extend([4], [5], [int(slots[3])]) is not None


def test_misuse_is_named():
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    slots = allocator.alloc(4)
    allocator.free(slots)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(slots)
    with pytest.raises(ValueError, match="not in use"):
        allocator.share(slots)
    with pytest.raises(ValueError, match="cannot be the slot of token 5"):
        allocator.alloc_extend([6], [7], [8])
    with pytest.raises(ValueError, match="below prefix_lens"):
        allocator.alloc_extend([6], [5], [8])
    with pytest.raises(ValueError, match=r"size must be in \[4, 2147483647\], got 3"):
        PagedTokenToKVPoolAllocator(3, 4)
    with pytest.raises(ValueError, match=r"PagedTokenToKVPoolAllocator\.alloc: need_size must be in .*, got -1"):
        allocator.alloc(-1)


def test_random_lives_never_leak_nor_share_by_accident():
    """Requests come, share prefixes of others, grow and go: every page has as many holders as hold it."""
    rng = random.Random(0)
    allocator = PagedTokenToKVPoolAllocator(40 * 4, 4)
    live: list[list[int]] = []
    for _ in range(600):
        action = rng.random()
        if action < 0.3:
            slots: list[int] = []
            if live and rng.random() < 0.5:
                parent = rng.choice(live)
                whole = len(parent) // 4 * 4
                slots = parent[: rng.randrange(0, whole + 1, 4)]
                allocator.share(torch.tensor(slots, dtype=torch.int64))
            new = allocator.alloc_extend([len(slots)], [len(slots) + rng.randrange(1, 20)], [(slots or [-1])[-1]])
            if new is None:
                allocator.free(torch.tensor(slots, dtype=torch.int64))
            else:
                live.append(slots + new.tolist())
        elif action < 0.7 and live:
            request = rng.choice(live)
            # A tail that a child shares would be refused; children share whole pages only, so it never is.
            new = allocator.alloc_decode([len(request) + 1], [request[-1]])
            if new is not None:
                request.append(int(new))
        elif live:
            allocator.free(torch.tensor(live.pop(rng.randrange(len(live))), dtype=torch.int64))
        holders = [0] * allocator.num_pages
        for request in live:
            for page in {slot // 4 for slot in request}:
                holders[page] += 1
        assert holders == [allocator.holders(page) for page in range(allocator.num_pages)]
        assert allocator.available_pages == holders.count(0)


@pytest.mark.parametrize("swa", [False, True])
def test_a_page_given_back_in_two_calls_keeps_its_other_holder(swa):
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    if swa:
        allocator = SWATokenToKVPoolAllocator(SWAKVPool(32, 32, 4, torch.bfloat16, 1, 32, [0], [1]))
    slots = allocator.alloc(6)
    allocator.share(slots)  # a prefix cache
    first, rest = slots[:5], slots[5:]
    with pytest.raises(
        ValueError, match=rf"slots must hold the first of page {int(rest[0]) // 4}, {int(slots[4])}, too"
    ):
        allocator.free(rest)
    with pytest.raises(ValueError, match="taken and given back in one call"):
        allocator.share(torch.cat([slots[:4], rest]))
    allocator.free(first)
    with pytest.raises(ValueError, match="slots must hold the first"):
        allocator.free(rest)
    assert [allocator.holders(page) for page in allocator.pages_of(slots)] == [1, 1], "the cache has both pages"
    allocator.free(slots)
    assert allocator.available_pages == 8


def test_lists_of_unequal_length_are_named():
    """They were cut to the shortest: a request got no slots, or another's."""
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    for misuse, expected in (
        (lambda: allocator.alloc_extend([0, 0], [4], [-1, -1]), "seq_lens must have 2 entries as prefix_lens, got 1"),
        (lambda: allocator.alloc_extend([0], [4], []), "last_locs must have 1 entries as prefix_lens, got 0"),
        (lambda: allocator.alloc_extend([0], [4, 5], [-1]), "seq_lens must have 1 entries as prefix_lens, got 2"),
        (lambda: allocator.alloc_decode([1, 1], [-1]), "last_locs must have 2 entries as seq_lens, got 1"),
        (lambda: allocator.alloc_decode([1], [-1, -1]), "last_locs must have 1 entries as seq_lens, got 2"),
        (lambda: allocator.alloc_extend([-4], [4], [-1]), r"prefix_lens\[0\] must not be negative, got -4"),
        (lambda: allocator.alloc_decode([0], [-1]), r"seq_lens\[0\] must count the new token, got 0"),
        (lambda: allocator.alloc_pages(-1), "count must not be negative, got -1"),
    ):
        with pytest.raises(ValueError, match=expected):
            misuse()
    assert allocator.available_pages == 8


def test_two_requests_cannot_grow_into_one_page():
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    last = int(allocator.alloc(6)[-1])
    for grow in (
        lambda: allocator.alloc_extend([6, 6], [7, 7], [last, last]),
        lambda: allocator.alloc_decode([7, 7], [last, last]),
    ):
        with pytest.raises(
            ValueError, match=rf"last_locs\[1\] = {last} lies in page {last // 4}, into which request 0"
        ):
            grow()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float32, torch.float64], ids=str)
def test_slots_are_integers_that_hold_every_slot(dtype):
    """A mask of a batch's tokens counted as slots 0 and 1, and gave back page 0 alone."""
    allocator = PagedTokenToKVPoolAllocator(64, 4)
    slots = allocator.alloc(10)
    for given_back in (allocator.free, allocator.share, allocator.pages_of):
        with pytest.raises(ValueError, match=f"slots of int32 or int64, got {dtype}"):
            given_back(slots.to(dtype))
    assert allocator.available_size() == 52


def test_pages_that_are_none_are_named():
    window = SWATokenToKVPoolAllocator(SWAKVPool(64, 32, 4, torch.bfloat16, 2, 64, [0], [1]))
    for page in (-1, 16, 10**9):
        with pytest.raises(ValueError, match=f"page {page} is none of the allocator's 16"):
            window.holders(page)
    for ask in (window.free_swa, window.is_window_resident):
        with pytest.raises(ValueError, match="page 25000 is none of the allocator's 16"):
            ask(torch.tensor([10**5]))
