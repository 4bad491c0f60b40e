"""Who computes how many tokens in the next step, and in which pages."""

from __future__ import annotations

import dataclasses
from collections import deque

import torch
from attnops.pools import PagedTokenToKVPoolAllocator, ReqToTokenPool
from attnops.types import ForwardMode
from torch import Tensor

from .prefix_cache import PrefixCache
from .request import Request


@dataclasses.dataclass(frozen=True)
class Share:
    """One request's part of a step.

    Attributes:
        begin, end: Its tokens that are computed.
        slots: int64 ``[end - begin]``, host: where their K and V go.
    """

    request: Request
    begin: int
    end: int
    slots: Tensor

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Step:
    shares: list[Share]

    @property
    def forward_mode(self) -> ForwardMode:
        lengths = [share.num_tokens for share in self.shares]
        if max(lengths) == 1:
            return ForwardMode.DECODE
        return ForwardMode.MIXED if min(lengths) == 1 else ForwardMode.EXTEND

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.shares)


class Scheduler:
    """Continuous batching with chunked prefill.

    Every step first takes the one new token of each decoding request, then fills up to `chunk` tokens with prompts, in
    the order of their arrival. A new request shares the pages of the longest prefix that the cache knows. When the pool
    is full, the cache gives up what nobody uses; when that does not suffice, the youngest request gives up its pages
    and waits again.

    Args:
        chunk: Most tokens per step.
        use_cache: Share prefixes; without, the cache stays empty.
        lookahead: Cells behind the text of a decoding request that get slots, too: for drafts.
    """

    def __init__(
        self,
        allocator: PagedTokenToKVPoolAllocator,
        rows: ReqToTokenPool,
        chunk: int,
        use_cache: bool = True,
        lookahead: int = 0,
    ) -> None:
        if chunk < rows.size:
            raise ValueError(f"a chunk of {chunk} tokens is too small for {rows.size} decoding requests")
        self.allocator = allocator
        self.rows = rows
        self.chunk = chunk
        self.use_cache, self.lookahead = use_cache, lookahead
        self.cache = PrefixCache(allocator)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._slots_given: dict[Request, int] = {}  # tokens of a running request that have slots

    def submit(self, request: Request) -> None:
        """Queues a request that has arrived.

        Raises:
            ValueError: it could never run, even alone.
        """
        most = request.max_len + self.lookahead
        if self._pages_for(most) > self.allocator.num_pages or most > self.rows.max_context_len:
            raise ValueError(
                f"request {request.id} may grow to {most} tokens: more than the pool "
                f"({self.allocator.size}) or a request ({self.rows.max_context_len}) can hold"
            )
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def pages_in_use(self) -> int:
        return self.allocator.num_pages - self.allocator.available_pages

    @property
    def pages_of_requests(self) -> int:
        """Pages that running requests hold; the others in use are only kept for reuse."""
        return self.pages_in_use - self.cache.evictable_pages()

    def schedule(self) -> Step | None:
        """The next step, its slots allocated; None: nothing can run."""
        shares: dict[Request, Share] = {}
        budget = self.chunk
        for request in sorted(self.running, key=lambda r: r.pending > 1):  # stable: decodes first, by arrival
            if budget and request.row >= 0 and self._take(request, min(request.pending, budget), shares):
                budget -= shares[request].num_tokens
        while budget and self.waiting and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            if not self._take(request, min(request.pending, budget), shares):
                break
            budget -= shares[request].num_tokens
        return Step(list(shares.values())) if shares else None

    def commit(self, step: Step) -> None:
        """After a step has run: its tokens are computed, and their full pages may be shared."""
        for share in step.shares:
            request = share.request
            request.computed = share.end
            if share.num_tokens > 1:
                self._publish(request)

    def finish(self, request: Request) -> None:
        """Takes a request out; its full pages stay in the cache until they are needed."""
        self._publish(request)
        self._release(request)

    def cancel(self, request: Request) -> None:
        """Takes a request out between steps, wherever it is: a client has gone."""
        request.finish_reason = "cancelled"
        if request in self.running:
            self.finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def pages_of(self, request: Request, tokens: int) -> list[int]:
        """Pages of the first `tokens` tokens of a running request."""
        size = self.allocator.page_size
        return (self.rows.slots(request.row, 0, tokens)[::size] // size).tolist()

    def _take(self, request: Request, count: int, shares: dict[Request, Share]) -> bool:
        """Gives a running request slots for `count` more tokens; False: it had to give up its place."""
        begin, end = request.computed, request.computed + count
        given = self._slots_given[request]
        wanted = max(end + (self.lookahead if request.pending == 1 else 0), given)
        last = int(self.rows.slots(request.row, given - 1, given)) if given else -1
        needed = self._pages_for(wanted) - self._pages_for(given)
        while not self._make_room(needed):
            victim = self.running[-1]
            shares.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        slots = self.allocator.alloc_extend([given], [wanted], [last])
        assert slots is not None, "there is room"
        self.rows.write(request.row, given, slots)
        self._slots_given[request] = wanted
        shares[request] = Share(request, begin, end, self.rows.slots(request.row, begin, end))
        return True

    def _admit(self, request: Request) -> bool:
        """Starts a waiting request when there is a row, and room for its prompt."""
        if not self.rows.available_size():
            return False
        # The last token is computed in any case: its logits are what the request waits for.
        pages = self.cache.match(request.tokens[:-1]) if self.use_cache else []
        shared = torch.tensor(pages, dtype=torch.int64) * self.allocator.page_size
        self.allocator.share(shared)
        needed = self._pages_for(len(request.tokens)) - len(pages)
        if not self._make_room(needed):
            self.allocator.free(shared)
            return False
        [row] = self.rows.alloc() or []
        reused = len(pages) * self.allocator.page_size
        request.admit(row, reused)
        self.rows.write(request.row, 0, self._token_slots(pages))
        self._slots_given[request] = reused
        self.running.append(request)
        return True

    def _publish(self, request: Request) -> None:
        """Makes the request's full pages known, and moves it over to those that were known already."""
        if not self.use_cache:
            return
        size = self.allocator.page_size
        full = request.computed - request.computed % size
        own = self.pages_of(request, full)
        known = self.cache.insert(request.tokens[:full], own)
        for index, (mine, theirs) in enumerate(zip(own, known)):
            if mine != theirs:
                self.allocator.share(self._token_slots([theirs]))
                self.allocator.free(self._token_slots([mine]))
                self.rows.write(request.row, index * size, self._token_slots([theirs]))

    def _preempt(self, request: Request) -> None:
        self._publish(request)
        self._release(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.allocator.free(self.rows.slots(request.row, 0, self._slots_given.pop(request)))
        self.rows.free(request.row)
        self.running.remove(request)
        request.row = -1

    def _make_room(self, pages: int) -> bool:
        missing = pages - self.allocator.available_pages
        return missing <= 0 or self.cache.evict(missing) >= missing

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.allocator.page_size)

    def _token_slots(self, pages: list[int]) -> Tensor:
        first = torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * self.allocator.page_size
        return (first + torch.arange(self.allocator.page_size)).flatten()
