"""Plans whose shares are filled one after another (csrc/scheduler/split_kv_fill.h), as the CPU makes them."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_pieces import pieces_of

# Built in a checkout, for these tests and for one Python version: tests/support/.
_scheduler = pytest.importorskip("_scheduler", exc_type=ImportError)

TILE, MERGE, LEAST = 8, 16, 2
FIELDS = ["begin_work", "begin_tile", "end_work", "end_tile"]
LENGTHS = st.one_of(
    st.lists(st.integers(0, 900), min_size=2, max_size=120),
    st.lists(st.sampled_from([-1, 0, 1, 64, 65, 128, 129, 640, 8192]), min_size=2, max_size=120),
    st.tuples(st.integers(3, 120), st.integers(1, 6000)).map(lambda x: [7] * x[0] + [x[1]]),
)
SHAPES = st.fixed_dictionaries(
    {
        "works_per_request": st.sampled_from([1, 2, 5]),
        "num_sm_parts": st.sampled_from([2, 3, 12, 44, 66, 132]),
        "work_overhead": st.sampled_from([4, 16]),
    }
)


def geometry_of(shape):
    return _scheduler.SplitKvGeometry(
        **shape, seqlen_q=1, tile_tokens=64, even_shares=shape["num_sm_parts"], short_tiles=2, more_of_lone=2
    )


def works_of(geometry, lengths):
    """Tiles of every work."""
    tiles = [_scheduler.num_tiles(geometry, length) for length in lengths]
    return [count for count in tiles for _ in range(geometry.works_per_request)]


def words_of(plan):
    return [[getattr(entry, name) for name in FIELDS] for entry in plan]


def cost(pieces, counts, overhead):
    return sum(overhead + TILE * min(end - begin, counts[work]) for work, begin, end in pieces)


def ends_of_walk(tiles, overhead, budget, cuts, position, end):
    """Where shares begin of works from one position (work, tile) to another; None where a work does not fit."""
    begins = []
    while position < end:
        begins.append(position)
        left, begin = budget, position
        while position < end:
            work, tile = position
            last = end[1] if work == end[0] else tiles[work]
            if overhead + TILE * (last - tile) <= left:
                left -= overhead + TILE * (last - tile)
                position = end if work == end[0] else (work + 1, 0)
                continue
            taken = min((left - overhead) // TILE, tiles[work] - tile - LEAST) if cuts else 0
            if taken >= LEAST:
                position = (work, tile + taken)
            break
        if position == begin:
            return None
    return begins


def expected_begins(tiles, overhead, shares):
    """The same by counting budgets down, work by work."""
    costs = [overhead + TILE * count for count in tiles]
    starts = [0, *itertools.accumulate(costs)]
    least = max(-(-starts[-1] // shares), overhead + 3 * TILE)
    least = -(-least // TILE) * TILE
    found = {}
    for cuts in (False, True):
        half = starts[-1] // 2
        work = max(w for w in range(len(tiles)) if starts[w] <= half)
        tile = min(max(half - starts[work] - overhead, 0) // TILE, tiles[work] - LEAST) if cuts else 0
        middle, end = (work, tile if tile >= LEAST else 0), (len(tiles), 0)
        for number in range(16):
            walks = [
                ends_of_walk(tiles, overhead, least + TILE * number, cuts, *span)
                for span in (((0, 0), middle), (middle, end))
            ]
            if None not in walks and len(walks[0]) + len(walks[1]) <= shares:
                found[cuts] = (number, walks[0] + walks[1])
                break
    if not found:
        return None
    if len(found) == 1:
        return next(iter(found.values()))[1]
    return found[found[True][0] * TILE + MERGE < found[False][0] * TILE][1]


@settings(max_examples=500, deadline=None)
@given(LENGTHS, SHAPES)
@example([714, 0, 300, 65] * 60, {"works_per_request": 1, "num_sm_parts": 66, "work_overhead": 16})
@example([279, 0, 130] * 21, {"works_per_request": 5, "num_sm_parts": 66, "work_overhead": 16})
@example([40000] + [30] * 200, {"works_per_request": 1, "num_sm_parts": 132, "work_overhead": 16})
def test_filled_shares(lengths, shape):
    """Every tile once, in order, splits numbered without gaps; and shares begin where a walk over the works says."""
    geometry = geometry_of(shape)
    tiles, shares, overhead = works_of(geometry, lengths), shape["num_sm_parts"], shape["work_overhead"]
    filled, plain = (_scheduler.plan_split_kv(geometry, lengths, fills=fills) for fills in (True, False))
    pieces = [pieces_of(entry, tiles) for entry in filled]
    position, holders = (0, 0), [[] for _ in tiles]
    for part, own in enumerate(pieces):
        for work, begin, end in own:
            assert (work, begin) == position and begin < end
            position = (work, end) if end < tiles[work] else (work + 1, 0)
            holders[work].append(part)
    assert position == (len(tiles), 0)
    for part, (entry, own) in enumerate(zip(filled, pieces, strict=True)):
        if own:
            first, last = holders[own[0][0]], holders[own[-1][0]]
            assert first == list(range(first[0], first[-1] + 1))
            assert (entry.first_part, entry.begin_split) == (first[0], part - first[0])
            assert (entry.begin_num_splits, entry.last_num_splits) == (len(first), len(last))
    total = sum(overhead + TILE * count for count in tiles)
    begins = None
    if len(set(tiles)) > 1 and len(tiles) > shares and total <= 480 * shares:
        begins = expected_begins(tiles, overhead, shares)
    if begins is None:
        assert words_of(filled) == words_of(plain)
    else:
        assert [(own[0][0], own[0][1]) for own in pieces if own] == begins


def test_shares_are_more_even_than_slices_of_the_axis():
    """Requests of 1 to 5 tiles, a quarter of them empty: by the planner's own cost."""
    lengths = [1 + i * i % 320 if i % 4 else 0 for i in range(62)]
    geometry = geometry_of({"works_per_request": 5, "num_sm_parts": 66, "work_overhead": 16})
    tiles = works_of(geometry, lengths)
    longest = {
        fills: max(
            cost(pieces_of(entry, tiles), tiles, 16) for entry in _scheduler.plan_split_kv(geometry, lengths, fills)
        )
        for fills in (False, True)
    }
    even = sum(16 + TILE * count for count in tiles) / 66
    assert longest[True] <= even + 24 < longest[False]


@pytest.mark.parametrize(
    "lengths",
    [[640] * 200, [64, 128] * 33, [64 * 60, 64 * 61] * 70, [64, 128] * 300],
    ids=["even", "no more than the shares", "long shares", "too many requests"],
)
def test_other_batches_are_planned_as_before(lengths):
    geometry = geometry_of({"works_per_request": 1, "num_sm_parts": 66, "work_overhead": 16})
    assert words_of(_scheduler.plan_split_kv(geometry, lengths, fills=True)) == words_of(
        _scheduler.plan_split_kv(geometry, lengths, fills=False)
    )
