"""The demo's scheduler alone, without a model: who runs, in which order, in which pages."""

import sys
from pathlib import Path

import pytest
from attnops.pools import PagedTokenToKVPoolAllocator, ReqToTokenPool
from attnops.types import ForwardMode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from serving import Request, Scheduler

END = 0
PAGE = 4


def make(pages=64, rows=4, chunk=16, use_cache=True, page_size=PAGE):
    return Scheduler(
        PagedTokenToKVPoolAllocator(pages * page_size, page_size), ReqToTokenPool(rows, 256), chunk, use_cache
    )


def run(scheduler, next_token=7):
    """One step in which every request that may sample gets `next_token`: request id to (begin, end), and the mode."""
    step = scheduler.schedule()
    if step is None:
        return None
    check_slots(scheduler, step)
    scheduler.commit(step)
    for share in step.shares:
        if not share.request.pending:
            share.request.append(next_token, END)
            if share.request.finish_reason:
                scheduler.finish(share.request)
    return {share.request.id: (share.begin, share.end) for share in step.shares}, step.forward_mode


def check_slots(scheduler, step):
    """New slots are where the request's row says, and in pages that nobody else holds."""
    for share in step.shares:
        slots = scheduler.rows.slots(share.request.row, share.begin, share.end)
        assert slots.tolist() == share.slots.tolist()
        for page in {slot // scheduler.allocator.page_size for slot in share.slots.tolist()}:
            assert scheduler.allocator.holders(page) == 1
    assert sum(share.num_tokens for share in step.shares) <= scheduler.chunk


def prompt(length, first=1):
    return [first + i for i in range(length)]


def test_a_long_prompt_comes_in_chunks_and_decodes_go_first():
    scheduler = make(chunk=16)
    scheduler.submit(Request(1, prompt(3), 10))
    scheduler.submit(Request(2, prompt(40, 100), 10))
    assert run(scheduler) == ({1: (0, 3), 2: (0, 13)}, ForwardMode.EXTEND)
    assert run(scheduler) == ({1: (3, 4), 2: (13, 28)}, ForwardMode.MIXED)
    assert run(scheduler) == ({1: (4, 5), 2: (28, 40)}, ForwardMode.MIXED)
    assert run(scheduler) == ({1: (5, 6), 2: (40, 41)}, ForwardMode.DECODE)


def test_a_request_that_arrives_later_joins_and_others_leave():
    scheduler = make()
    scheduler.submit(Request(1, prompt(4), 2))
    run(scheduler)
    scheduler.submit(Request(2, prompt(5, 50), 3))
    assert run(scheduler) == ({1: (4, 5), 2: (0, 5)}, ForwardMode.MIXED)  # request 1 is complete now
    assert run(scheduler) == ({2: (5, 6)}, ForwardMode.DECODE)
    assert [request.id for request in scheduler.running] == [2]


def test_the_prefix_of_a_running_request_is_shared_at_once():
    scheduler = make(chunk=64)
    scheduler.submit(Request(1, prompt(18), 20))
    run(scheduler)
    second = Request(2, [*prompt(18)[:15], 99, 98, 97], 20)
    scheduler.submit(second)
    used = scheduler.pages_in_use
    assert run(scheduler)[0][2] == (12, 18)  # three full pages in common
    assert second.reused == 12
    assert scheduler.pages_in_use == used + 2
    first = scheduler.running[0]
    assert scheduler.pages_of(first, 12) == scheduler.pages_of(second, 12)
    assert set(scheduler.pages_of(first, 18)[3:]).isdisjoint(scheduler.pages_of(second, 18)[3:])


def test_the_last_prompt_token_is_always_computed():
    scheduler = make(chunk=64)
    for request_id in (1, 2):
        scheduler.submit(Request(request_id, prompt(16), 1))
        assert run(scheduler)[0] == {request_id: (0 if request_id == 1 else 12, 16)}


def test_two_that_compute_the_same_page_end_with_one():
    scheduler = make(chunk=64)
    first, second = Request(1, prompt(9), 9), Request(2, prompt(9), 9)
    scheduler.submit(first)
    scheduler.submit(second)
    run(scheduler)  # both in one step: neither could share
    assert scheduler.pages_of(first, 8) == scheduler.pages_of(second, 8)
    assert scheduler.pages_in_use == 2 + 2


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_full_pool_evicts_then_preempts_and_loses_nothing(use_cache):
    scheduler = make(pages=12, chunk=16, use_cache=use_cache)
    requests = [Request(i, prompt(10, 10 * i), 26) for i in range(1, 4)]  # 36 tokens each: 9 pages, the pool has 12
    for request in requests:
        scheduler.submit(request)
    steps = 0
    while scheduler.has_work:
        assert run(scheduler) is not None
        steps += 1
        assert steps < 300
    assert scheduler.preemptions > 0
    assert all(request.output == [7] * 26 for request in requests)
    if use_cache:
        assert scheduler.cache.evicted_pages > 0
        assert scheduler.pages_of_requests == 0
        scheduler.cache.evict(12)
    assert scheduler.pages_in_use == 0
    assert scheduler.rows.available_size() == scheduler.rows.size


def test_finished_pages_are_reused_by_a_follow_up():
    scheduler = make(chunk=64)
    first = Request(1, prompt(6), 8)
    scheduler.submit(first)
    while scheduler.has_work:
        run(scheduler)
    follow_up = Request(2, [*first.tokens, 60, 61], 4)
    scheduler.submit(follow_up)
    run(scheduler)
    assert follow_up.reused == 12  # 14 tokens, of which the last has no K and V yet: three full pages


def test_end_of_text_ends_a_request():
    scheduler = make()
    request = Request(1, prompt(3), 10)
    scheduler.submit(request)
    run(scheduler, next_token=END)
    assert (request.finish_reason, request.output) == ("end of text", [])
    assert not scheduler.has_work


def test_what_can_never_run_is_refused():
    scheduler = make(pages=4)
    with pytest.raises(ValueError, match=r"request 5 may grow to 17 tokens: more than the pool \(16\)"):
        scheduler.submit(Request(5, prompt(10), 7))
    with pytest.raises(ValueError, match="chunk of 3 tokens is too small for 4"):
        make(chunk=3)
    with pytest.raises(ValueError, match="needs a prompt"):
        Request(6, [], 7)
