"""Pages that hold known tokens, found again by those tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import torch
from attnops.pools import PagedTokenToKVPoolAllocator


class _Node:
    """One page of tokens, reached through the pages before it."""

    __slots__ = ("children", "key", "last_used", "page", "parent")

    def __init__(self, parent: _Node | None, key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], _Node] = {}
        self.last_used = 0


class PrefixCache:
    """A radix tree over token ids, whose edges are whole pages.

    K and V of a token depend on all tokens before it, so a page is known by the path that leads to it. Only full pages
    are in the tree: nobody writes to them any more. The cache is one holder of each of its pages, every request that
    shares one is another; a page leaves the tree when the cache alone holds it, nothing hangs below it, and it is the
    one not used for the longest time.
    """

    def __init__(self, allocator: PagedTokenToKVPoolAllocator) -> None:
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._root = _Node(None, (), -1)
        self._clock = 0
        self.num_pages = 0
        self.evicted_pages = 0

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the longest known prefix of `tokens`; the caller shares them if it wants to keep them."""
        pages = []
        node = self._root
        self._clock += 1
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            child.last_used = self._clock
            pages.append(child.page)
            node = child
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Makes the full pages of `tokens` known.

        Args:
            pages: Where the tokens' K and V are, page by page; those that are new to the tree get one more holder.

        Returns:
            The tree's pages of these tokens. One that differs from the caller's holds the same tokens, computed by
            another request before: the caller may move over to it.
        """
        node = self._root
        known = []
        self._clock += 1
        for key, page in zip(self._keys(tokens), pages):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, page)
                self._allocator.share(self._slots([page]))
                self.num_pages += 1
            child.last_used = self._clock
            known.append(child.page)
            node = child
        return known

    def evict(self, count: int) -> int:
        """Frees up to `count` pages, least recently used first, leaves before what they hang on. How many it freed."""
        leaves = [(node.last_used, id(node), node) for node in self._nodes() if self._is_evictable(node)]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < count:
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            assert parent is not None, "the root is no leaf"
            del parent.children[node.key]
            self._allocator.free(self._slots([node.page]))
            freed += 1
            if parent is not self._root and self._is_evictable(parent):
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        self.num_pages -= freed
        self.evicted_pages += freed
        return freed

    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""
        # Whoever shares a page shares those before it, so below a page that only the cache holds are only such pages.
        return sum(self._allocator.holders(node.page) == 1 for node in self._nodes())

    def _is_evictable(self, node: _Node) -> bool:
        return not node.children and self._allocator.holders(node.page) == 1

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self._page_size
        for begin in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[begin : begin + size])

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _slots(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64) * self._page_size
