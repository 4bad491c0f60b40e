"""Pages and who holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnops.types import check_range


def whole_pages(owner: str, size: int, page_size: int) -> int:
    """How many pages `size` tokens fill."""
    check_range(owner, "page_size", page_size, 1)
    check_range(owner, "size", size, page_size)
    return size // page_size


class PagedTokenToKVPoolAllocator:
    """Gives out token slots in whole pages and counts the holders of each page.

    A page given out has one holder. A prefix cache and every request that reuses a prefix `share` its pages: they are
    further holders. Each gives its hold back with `free`, and the last one returns the page. Only a page with one
    holder is written. So a request may grow into its last page only while it is the only holder.

    A hold is of a whole page. Slots stand for their pages: `share` and `free` take the slots of a page together, its
    first one among them. So a page given back in two calls is an error, and no other holder loses it.

    All of it is host memory. Slots come as host tensors: ``slots.to(device, non_blocking=True)``.

    Args:
        size: Token slots of the pool, rounded down to whole pages.
        page_size: Tokens per page.
    """

    def __init__(self, size: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = whole_pages(f"attnops: {type(self).__name__}", size, page_size)
        self.size = self.num_pages * page_size
        self.clear()

    def clear(self) -> None:
        """Every page is free again, whoever held it."""
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack: the page freed last is warm in some cache
        self._holders = [0] * self.num_pages

    def available_size(self) -> int:
        """Free tokens, counted in whole pages."""
        return len(self._free) * self.page_size

    @property
    def available_pages(self) -> int:
        """Free pages."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many requests and caches hold a page; 0: it is free.

        Raises:
            ValueError: the pool has no such page.
        """
        self._check_pages([page])
        return self._holders[page]

    def alloc_pages(self, count: int) -> list[int] | None:
        """`count` pages with one holder each, or None when there are not as many."""
        if count < 0:
            raise ValueError(f"attnops: count must not be negative, got {count}")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def alloc(self, need_size: int) -> Tensor | None:
        """Slots of `need_size` tokens in pages of their own: int64 ``[need_size]``, or None.

        Raises:
            ValueError: `need_size` is negative.
        """
        check_range(f"attnops: {type(self).__name__}.alloc", "need_size", need_size, 0)
        return self.alloc_extend([0], [need_size], [-1])

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> Tensor | None:
        """Slots for tokens ``[prefix_lens[i], seq_lens[i])`` of each request.

        Args:
            prefix_lens: Tokens that have slots already.
            seq_lens: Tokens after this step.
            last_locs: Slot of the last token that has one; read only where a prefix ends inside a page.

        Returns:
            int64 ``[sum(seq_lens - prefix_lens)]``, request after request; or None, and nothing taken, when the pages
            do not suffice.

        Raises:
            ValueError: a request would write into the tail of a page that others hold, too; or lists of unequal length.
        """
        _check_lengths(prefix_lens=prefix_lens, seq_lens=seq_lens, last_locs=last_locs)
        needed = [self._pages_for(seq) - self._pages_for(prefix) for prefix, seq in zip(prefix_lens, seq_lens)]
        tails: dict[int, int] = {}
        for request, (prefix, seq, last) in enumerate(zip(prefix_lens, seq_lens, last_locs)):
            if prefix < 0:
                raise ValueError(f"attnops: prefix_lens[{request}] must not be negative, got {prefix}")
            if seq < prefix:
                raise ValueError(f"attnops: seq_lens[{request}] = {seq} is below prefix_lens[{request}] = {prefix}")
            if seq > prefix and prefix % self.page_size:
                self._check_tail(request, prefix, last, tails)
        pages = self.alloc_pages(sum(needed))
        if pages is None:
            return None
        self._on_alloc(pages)
        out: list[Tensor] = []
        offset = torch.arange(self.page_size)
        taken = 0
        for prefix, seq, last, count in zip(prefix_lens, seq_lens, last_locs, needed):
            tail = min(-prefix % self.page_size, seq - prefix)
            if tail:
                out.append(torch.arange(last + 1, last + 1 + tail))
            new = torch.tensor(pages[taken : taken + count], dtype=torch.int64)
            taken += count
            out.append((new.unsqueeze(1) * self.page_size + offset).flatten()[: seq - prefix - tail])
        return torch.cat(out) if out else torch.empty(0, dtype=torch.int64)

    def alloc_decode(self, seq_lens: Sequence[int], last_locs: Sequence[int]) -> Tensor | None:
        """Slot of one more token per request; `seq_lens` count it. int64 ``[B]``, or None, as `alloc_extend`."""
        _check_lengths(seq_lens=seq_lens, last_locs=last_locs)
        for request, seq in enumerate(seq_lens):
            if seq < 1:
                raise ValueError(f"attnops: seq_lens[{request}] must count the new token, got {seq}")
        tails: dict[int, int] = {}
        fresh = [(seq - 1) % self.page_size == 0 for seq in seq_lens]
        for request, (seq, last) in enumerate(zip(seq_lens, last_locs)):
            if not fresh[request]:
                self._check_tail(request, seq - 1, last, tails)
        pages = self.alloc_pages(sum(fresh))
        if pages is None:
            return None
        self._on_alloc(pages)
        new = iter(pages)
        slots = [next(new) * self.page_size if is_new else last + 1 for is_new, last in zip(fresh, last_locs)]
        return torch.tensor(slots, dtype=torch.int64)

    def share(self, slots: Tensor) -> None:
        """One more holder for each page that `slots` (host) lie in.

        Raises:
            ValueError: a page is free, or its first slot is not among `slots`.
        """
        pages = self._whole_pages_of(slots)
        self._check_held(pages)
        for page in pages:
            self._holders[page] += 1

    def free(self, slots: Tensor) -> None:
        """One holder less for each page that `slots` (host) lie in; without holders a page is free again.

        Raises:
            ValueError: a page is free already, or its first slot is not among `slots`: the rest of a page that an
                earlier call gave back.
        """
        pages = self._whole_pages_of(slots)
        self._check_held(pages)
        freed = []
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                freed.append(page)
        self._on_free(freed)
        self._free.extend(freed)

    def pages_of(self, slots: Tensor) -> list[int]:
        """The distinct pages of `slots`, ascending. Negative slots are padding and have none."""
        return torch.unique(self._real(slots) // self.page_size).tolist()

    def _real(self, slots: Tensor) -> Tensor:
        if slots.device.type != "cpu":
            raise ValueError("attnops: the allocator takes slots in host memory (ReqToTokenPool.slots): it never syncs")
        if slots.dtype not in (torch.int32, torch.int64):  # a mask or a fraction would name other pages
            raise ValueError(f"attnops: the allocator takes slots of int32 or int64, got {slots.dtype}")
        return slots[slots >= 0]

    def _whole_pages_of(self, slots: Tensor) -> list[int]:
        """The distinct pages of `slots`, each with its first slot."""
        pages, first = self.pages_of(slots), self._real(slots)
        begun = set((first[first % self.page_size == 0] // self.page_size).tolist())
        for page in pages:
            if page not in begun:
                raise ValueError(
                    f"attnops: slots must hold the first of page {page}, {page * self.page_size}, too: a hold is of a "
                    "whole page, taken and given back in one call"
                )
        return pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_tail(self, request: int, prefix: int, last: int, tails: dict[int, int]) -> None:
        """`tails`: pages that requests of this call grow into, and which."""
        page = last // self.page_size
        if last % self.page_size != (prefix - 1) % self.page_size or not 0 <= page < self.num_pages:
            raise ValueError(f"attnops: last_locs[{request}] = {last} cannot be the slot of token {prefix - 1}")
        if self._holders[page] != 1:
            raise ValueError(
                f"attnops: request {request} would write into page {page}, which {self._holders[page]} hold: "
                f"share whole pages only (prefix length {prefix}, page_size {self.page_size})"
            )
        if page in tails:
            raise ValueError(
                f"attnops: last_locs[{request}] = {last} lies in page {page}, into which request {tails[page]} grows"
            )
        tails[page] = request

    def _check_pages(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"attnops: page {page} is none of the allocator's {self.num_pages}")

    def _check_held(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages or self._holders[page] == 0:
                raise ValueError(f"attnops: page {page} of the allocator is not in use")

    def _on_alloc(self, pages: list[int]) -> None:
        """What else happens to pages that were just taken."""

    def _on_free(self, pages: list[int]) -> None:
        """What else happens to pages whose last holder left."""


def _check_lengths(**lists: Sequence[int]) -> None:
    """One entry per request in each."""
    (first, reference), *rest = lists.items()
    for name, values in rest:
        if len(values) != len(reference):
            raise ValueError(f"attnops: {name} must have {len(reference)} entries as {first}, got {len(values)}")
