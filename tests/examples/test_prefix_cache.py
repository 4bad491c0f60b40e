"""The demo's prefix cache: what it finds again, who holds its pages, what it gives up first."""

import random
import sys
from pathlib import Path

import pytest
import torch
from attnops.pools import PagedTokenToKVPoolAllocator

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from serving import PrefixCache

PAGE = 4


@pytest.fixture
def allocator():
    return PagedTokenToKVPoolAllocator(16 * PAGE, PAGE)


@pytest.fixture
def cache(allocator):
    return PrefixCache(allocator)


def compute(allocator, count):
    """Pages of a request that has just computed `count` pages of tokens."""
    pages = allocator.alloc_pages(count)
    assert pages is not None
    return pages


def hold(allocator, pages):
    allocator.share(torch.tensor(pages) * PAGE)


def let_go(allocator, pages):
    allocator.free(torch.tensor(pages) * PAGE)


def test_finds_the_longest_known_prefix_in_whole_pages(allocator, cache):
    tokens = list(range(12))
    pages = compute(allocator, 3)
    assert cache.insert(tokens, pages) == pages
    assert cache.match(tokens) == pages
    assert cache.match([*tokens, 99]) == pages
    assert cache.match(tokens[:11]) == pages[:2]  # the third page is not full of these tokens
    assert cache.match([*tokens[:8], 99, 9, 10, 11]) == pages[:2]
    assert cache.match([99, *tokens[1:]]) == []
    assert cache.match(tokens[4:]) == []  # the same tokens at other places have other K and V
    assert cache.match(tokens[:3]) == []


def test_a_tail_that_fills_no_page_is_not_kept(allocator, cache):
    pages = compute(allocator, 2)
    assert cache.insert(list(range(7)), pages) == pages[:1]
    assert cache.num_pages == 1
    assert [allocator.holders(page) for page in pages] == [2, 1]


def test_branches_share_what_they_have_in_common(allocator, cache):
    left, right = compute(allocator, 2), compute(allocator, 2)
    assert cache.insert([0, 1, 2, 3, 4, 5, 6, 7], left) == left
    # The second request computed the common page, too; the tree keeps the one that it knows.
    assert cache.insert([0, 1, 2, 3, 9, 9, 9, 9], right) == [left[0], right[1]]
    assert cache.num_pages == 3
    assert allocator.holders(right[0]) == 1
    assert cache.match([0, 1, 2, 3, 9, 9, 9, 9]) == [left[0], right[1]]


def test_a_page_outlives_its_request_and_is_freed_by_eviction(allocator, cache):
    pages = compute(allocator, 2)
    cache.insert(list(range(8)), pages)
    let_go(allocator, pages)
    assert [allocator.holders(page) for page in pages] == [1, 1]
    assert allocator.available_pages == 14
    assert cache.evictable_pages() == 2
    assert cache.evict(99) == 2
    assert allocator.available_pages == 16
    assert cache.match(list(range(8))) == []
    assert (cache.num_pages, cache.evicted_pages) == (0, 2)


def test_pages_in_use_are_never_evicted(allocator, cache):
    pages = compute(allocator, 3)
    cache.insert(list(range(12)), pages)
    let_go(allocator, pages)
    hold(allocator, pages[:2])  # a request that reuses two of the three
    assert cache.evictable_pages() == 1
    assert cache.evict(3) == 1
    assert cache.match(list(range(12))) == pages[:2]
    let_go(allocator, pages[:2])
    assert cache.evict(3) == 2


def test_evicts_the_least_recently_used_leaf_first(allocator, cache):
    common, left, right = compute(allocator, 3)
    cache.insert([0, 0, 0, 0, 1, 1, 1, 1], [common, left])
    cache.insert([0, 0, 0, 0, 2, 2, 2, 2], [common, right])
    let_go(allocator, [common, left, right])
    cache.match([0, 0, 0, 0, 1, 1, 1, 1])
    assert cache.evict(1) == 1
    assert cache.match([0, 0, 0, 0, 2, 2, 2, 2]) == [common]
    assert cache.match([0, 0, 0, 0, 1, 1, 1, 1]) == [common, left]
    assert cache.evict(2) == 2  # the leaf, and then the page that it hung on
    assert allocator.available_pages == 16


@pytest.mark.parametrize("seed", range(5))
def test_holders_always_add_up(allocator, cache, seed):
    """Requests of few different tokens come, share, compute, publish and leave, in a small pool: much is evicted."""
    rng = random.Random(seed)
    running = []
    for _ in range(300):
        if running and (len(running) == 3 or rng.random() < 0.4):
            let_go(allocator, running.pop(rng.randrange(len(running))))
        else:
            tokens = [token for _ in range(rng.randrange(1, 5)) for token in [rng.randrange(3)] * PAGE]
            pages = cache.match(tokens)
            if pages:
                hold(allocator, pages)
            missing = len(tokens) // PAGE - len(pages)
            short = missing - allocator.available_pages
            if short > 0:
                assert cache.evict(short) == short, "3 requests of 4 pages always leave room"
            pages = pages + compute(allocator, missing)
            assert cache.insert(tokens, pages) == pages
            running.append(pages)
        known = {node.page for node in cache._nodes()}
        for page in range(allocator.num_pages):
            assert allocator.holders(page) == (page in known) + sum(page in pages for pages in running)
        assert cache.num_pages == len(known)
        unused = known - {page for pages in running for page in pages}
        assert cache.evictable_pages() == len(unused)
    for pages in running:
        let_go(allocator, pages)
    cache.evict(allocator.num_pages)
    assert allocator.available_pages == allocator.num_pages
