"""Split-KV plans: the invariants of csrc/scheduler/split_kv.h, and the planning ops against the scheduler itself."""

import itertools
import types

import pytest
import torch
from attnops import ops
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from attnops.metadata.plan_checks import cut_rule
from attnops.metadata.plan_parts import xqa_num_sm_parts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_pieces import pieces_of

# Built in a checkout, for these tests and for one Python version: tests/support/.
_scheduler = pytest.importorskip("_scheduler", exc_type=ImportError)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TILE_COST, TILE_TOKENS = 8, 64
FIELDS = [
    "begin_work",
    "begin_tile",
    "end_work",
    "end_tile",
    "begin_split",
    "begin_num_splits",
    "last_num_splits",
    "first_part",
]

LENGTHS = st.one_of(
    st.lists(st.integers(0, 5000), max_size=40),
    st.lists(st.sampled_from([-1, 0, 1, 63, 64, 65, 127, 128, 129, 8192]), max_size=40),
    st.tuples(st.integers(0, 60), st.integers(1, 200_000)).map(lambda x: [7] * x[0] + [x[1]]),  # one long request
    st.tuples(st.integers(1, 200_000), st.integers(0, 60)).map(lambda x: [x[0]] + [0] * x[1]),
)
GEOMETRIES = st.fixed_dictionaries(
    {
        "works_per_request": st.sampled_from([1, 2, 3, 8, 32]),
        "seqlen_q": st.sampled_from([1, 2, 7, 16]),
        "window_left": st.sampled_from([-1, 0, 63, 64, 1000]),
        "num_sm_parts": st.sampled_from([1, 2, 3, 16, 132, 264]),
        "work_overhead": st.sampled_from([0, 1, 4, 16]),
        "even_shares": st.sampled_from([0, 0, 1, 3, 120]),
        "short_tiles": st.sampled_from([0, 2, 8]),
        "more_of_lone": st.sampled_from([0, 4]),
        "whole_overhead": st.sampled_from([0, 4]),
    }
)


def works_of(geometry, lengths) -> list[int]:
    """Tiles of every work, in the order of the works."""
    tiles = [_scheduler.num_tiles(geometry, length) for length in lengths]
    return [count for count in tiles for _ in range(geometry.works_per_request)]


def tiles_per_cut(fixed_split_tiles: int, tiles: int) -> int:
    """Below zero: at most so many cuts, of an even number of tiles where they are few, and of a least number."""
    if fixed_split_tiles > 0:
        return fixed_split_tiles
    least, most = divmod(-fixed_split_tiles - 1, 1024)
    even = -(-tiles // (most + 1))
    return max(even + even % 2 if most < 16 else even, least)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, GEOMETRIES)
@example([], {"works_per_request": 1, "seqlen_q": 1, "window_left": -1, "num_sm_parts": 4, "work_overhead": 4})
@example(
    [64] * 132, {"works_per_request": 1, "seqlen_q": 1, "window_left": -1, "num_sm_parts": 132, "work_overhead": 4}
)
@example(
    [4096] * 64,
    {"works_per_request": 1, "seqlen_q": 1, "num_sm_parts": 66, "work_overhead": 16, "even_shares": 64},
)
def test_balanced_plan(lengths, shape):
    geometry = _scheduler.SplitKvGeometry(**shape, tile_tokens=TILE_TOKENS)
    tiles = works_of(geometry, lengths)
    entries = _scheduler.plan_split_kv(geometry, lengths)
    assert len(entries) == geometry.num_sm_parts
    pieces = [pieces_of(entry, tiles) for entry in entries]

    # 1. A partition: the pieces, in order, walk through every tile of every work exactly once.
    walk = [(work, begin, end) for part in pieces for work, begin, end in part]
    position = (0, 0)
    for work, begin, end in walk:
        assert (work, begin) == position and end <= tiles[work]
        position = (work, end) if end < tiles[work] else (work + 1, 0)
    assert position == (len(tiles), 0)

    # 2. Budget: no part holds more than its even share of the cost, rounded to tiles. Where the planner looks for even
    # batches, those have fewer shares, and all others pay the overhead.
    even_shares = min(shape.get("even_shares", 0), geometry.num_sm_parts)
    uneven = even_shares > 0 and len(set(tiles)) > 1
    overhead = shape["work_overhead"] if uneven or len(tiles) > geometry.num_sm_parts else 0
    total = sum(overhead + TILE_COST * count for count in tiles)
    shares = even_shares if even_shares and not uneven else geometry.num_sm_parts
    budget = max(-(-total // shares), TILE_COST)
    budget = -(-budget // TILE_COST) * TILE_COST if overhead == 0 else budget
    looks = shape.get("short_tiles", 0) > 0  # whether cuts are worth their merge
    whole = looks and all((begin, end) == (0, tiles[work]) for part in pieces for work, begin, end in part)
    least = 2 if budget >= 4 * TILE_COST else 1  # of a piece that a cut makes
    more = max(tiles, default=0) if whole else 2 if looks else 2 * (least - 1)
    more = max(more, shape.get("more_of_lone", 0))
    for part in pieces:
        assert sum(end - begin for _, begin, end in part) <= -(-budget // TILE_COST) + more
        for work, begin, end in part:
            assert whole or end - begin >= min(least, tiles[work])

    # 3. Splits are numbered without gaps, and their rows of out_partial are unique.
    holders: dict[int, list[int]] = {}
    for index, part in enumerate(pieces):
        for work, _, _ in part:
            holders.setdefault(work, []).append(index)
    slots = set()
    for work, parts in holders.items():
        assert parts == list(range(parts[0], parts[0] + len(parts)))
        for split, index in enumerate(parts):
            entry = entries[index]
            is_begin = work == entry.begin_work
            if is_begin:
                assert (entry.begin_split, entry.begin_num_splits) == (split, len(parts))
                assert entry.first_part == parts[0]
            else:
                assert split == 0
            if work == pieces[index][-1][0]:
                assert entry.last_num_splits == len(parts)
            if len(parts) > 1:
                slot = 2 * index + (0 if is_begin else 1)
                assert slot not in slots
                slots.add(slot)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, GEOMETRIES, st.integers(0, 6), st.sampled_from([0, 2]))
def test_every_share_has_one_piece_where_that_costs_little(lengths, shape, more, short_tiles):
    """Works that are no more than the shares are cut into equal pieces, as few as have no more tiles than may be."""
    shape = shape | {"even_shares": 0, "short_tiles": short_tiles, "more_of_lone": more}
    geometry = _scheduler.SplitKvGeometry(**shape, tile_tokens=TILE_TOKENS)
    tiles = works_of(geometry, lengths)
    pieces = [pieces_of(entry, tiles) for entry in _scheduler.plan_split_kv(geometry, lengths)]
    least = -(-sum(tiles) // geometry.num_sm_parts)
    most = least + min(more, least // 2)
    fitting = [n for n in range(least, most + 1) if sum(-(-t // n) for t in tiles) <= len(pieces)]
    if more == 0 or len(tiles) > len(pieces) or sum(tiles) <= len(pieces) or not fitting:
        return
    assert all(len(part) <= 1 for part in pieces)
    cuts = [sum(work == w for part in pieces for w, _, _ in part) for work in range(len(tiles))]
    if max(cuts) > 1:
        assert cuts == [-(-t // fitting[0]) for t in tiles]
        for work, begin, end in itertools.chain.from_iterable(pieces):
            assert end - begin in (tiles[work] // cuts[work], -(-tiles[work] // cuts[work]))


@settings(max_examples=300, deadline=None)
@given(LENGTHS, GEOMETRIES, st.sampled_from([1, 4]))
def test_order_in_which_works_are_dealt_out(lengths, shape, dealt_works):
    """Requests by falling length, near ones as they come: where works are many, and none is longer than a part."""
    geometry = _scheduler.SplitKvGeometry(**shape, tile_tokens=TILE_TOKENS, dealt_works=dealt_works)
    tiles = [_scheduler.num_tiles(geometry, length) for length in lengths]
    *order, last = _scheduler.num_splits(geometry, lengths)
    many = len(tiles) * geometry.works_per_request >= dealt_works * geometry.num_sm_parts
    if last == 0:
        even_share = sum(tiles) * geometry.works_per_request / geometry.num_sm_parts
        assert not any(order) and (not many or not tiles or max(tiles) > even_share)
        return
    assert many and sorted(order) == list(range(len(tiles)))
    assert abs(last) == 1 + sum(count > 2 for count in tiles) and (last < 0) == (len(set(tiles)) == 1)
    for before, after in itertools.pairwise(order):
        assert tiles[before] * 5 > tiles[after] * 4 or min(tiles[before], tiles[after]) >= 448
        assert before < after or tiles[before] > tiles[after] or tiles[before] >= 8


@settings(max_examples=200, deadline=None)
@given(LENGTHS, GEOMETRIES, st.sampled_from([1, 2, 4, 16, -1, -3, -16, -17, -32, -1024, -(16 + 8 * 1024), -65 * 1024]))
def test_batch_invariant_plan(lengths, shape, fixed_split_tiles):
    geometry = _scheduler.SplitKvGeometry(**shape, tile_tokens=TILE_TOKENS, fixed_split_tiles=fixed_split_tiles)
    tiles = works_of(geometry, lengths)
    position = (0, 0)
    for entry in _scheduler.plan_split_kv(geometry, lengths):
        for work, begin, end in pieces_of(entry, tiles):
            assert (work, begin) == position
            every = tiles_per_cut(fixed_split_tiles, tiles[work])
            assert begin % every == 0, "a part starts at a cut of the work, whatever else is in the batch"
            assert end % every == 0 or end == tiles[work]
            if begin > 0 and work == entry.begin_work:
                assert entry.begin_split == begin // every
            position = (work, end) if end < tiles[work] else (work + 1, 0)
    assert position == (len(tiles), 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed_split_tokens", [0, 128, -6, cut_rule(6, 3)])
@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("lengths", [[], [0], [64] * 16, [5000, 1, 0, 700], [900, 300], [3] * 300 + [40_000]])
def test_op_writes_the_rows_of_the_scheduler(device, fixed_split_tokens, window_left, lengths):
    plan = XqaDecodePlan.allocate(
        len(lengths),
        seqlen_q=2,
        num_q_heads=16,
        num_kv_heads=4,
        head_dim=64,
        window_left=window_left,
        fixed_split_tokens=fixed_split_tokens,
        max_seqlen_k=40_000,
        num_sm_parts=13,
        device=device,
    )
    ops.xqa_decode_plan(plan, torch.tensor(lengths, dtype=torch.int32, device=device))
    geometry = _scheduler.SplitKvGeometry(
        works_per_request=4,
        seqlen_q=2,
        tile_tokens=TILE_TOKENS,
        window_left=window_left,
        num_sm_parts=13,
        work_overhead=4,  # csrc/xqa_decode/plan.h
        short_tiles=2 if device == "cuda" else 0,
        more_of_lone=4 if device == "cuda" else 0,
        fixed_split_tiles=2 if fixed_split_tokens == 128 else fixed_split_tokens,
    )
    rows = [[getattr(entry, name) for name in FIELDS] for entry in _scheduler.plan_split_kv(geometry, lengths)]
    assert plan.tile_scheduler_metadata.tolist() == rows
    tiles = [_scheduler.num_tiles(geometry, length) for length in lengths]
    fixed = geometry.fixed_split_tiles
    cuts = [-(-n // tiles_per_cut(fixed, n)) if fixed else 0 for n in tiles]
    assert all(n <= 6 for n in cuts) or fixed_split_tokens == 128
    assert plan.num_splits.tolist() == [sum(cuts[:i]) for i in range(len(lengths) + 1)]
    assert plan.out_partial.shape[0] >= max(plan.num_splits[-1].item() * 4, 2 * 13 if not fixed_split_tokens else 0)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, GEOMETRIES, st.sampled_from([0, 4, -7]))
def test_parts_of_a_group_have_the_share_of_the_group(lengths, shape, fixed_split_tiles):
    options = {"tile_tokens": TILE_TOKENS, "fixed_split_tiles": fixed_split_tiles}
    grouped = shape | {"num_sm_parts": 2 * shape["num_sm_parts"]}
    shares = _scheduler.plan_split_kv(_scheduler.SplitKvGeometry(**shape, **options), lengths)
    parts = _scheduler.plan_split_kv(_scheduler.SplitKvGeometry(**grouped, parts_per_group=2, **options), lengths)
    rows, expected = ([[getattr(entry, name) for name in FIELDS] for entry in plan] for plan in (parts, shares))
    assert rows == [row for row in expected for _ in range(2)]


@pytest.mark.parametrize("plan_op", [torch.ops.attnops.xqa_decode_plan, torch.ops.attnops.mla_decode_plan])
def test_more_parts_than_a_semaphore_counts_are_refused(plan_op):
    rows, num_splits = torch.zeros(1 << 16, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"num_sm_parts must be in \[1, 65535\], got 65536"):
        plan_op(rows, num_splits, torch.ones(1, dtype=torch.int32), 1, 8)


def test_shares_of_even_works_leave_them_whole_where_a_few_parts_less_do():
    shares = _scheduler.shares_of_even_works
    assert [shares(works, 66) for works in (0, 1, 16, 50, 64, 66, 100, 128)] == [66, 66, 64, 66, 64, 66, 66, 64]
    lengths, parts = [4096] * 64, 66
    shape = {"works_per_request": 1, "seqlen_q": 1, "num_sm_parts": parts, "work_overhead": 16, "tile_tokens": 64}
    geometry = _scheduler.SplitKvGeometry(**shape, even_shares=shares(64, parts))
    even = [(entry.begin_work, entry.begin_tile) for entry in _scheduler.plan_split_kv(geometry, lengths)]
    assert even == [(part, 0) for part in range(64)] + [(64, 0)] * 2
    uneven = _scheduler.plan_split_kv(geometry, [*lengths[1:], 8192])
    assert uneven[-1].end_work == 64 and uneven[-1].begin_work < 64, "every part has work"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "heads, blocks, group",
    [(128, 2, 2), (64, 1, 1), (33, 1, 1), (32, 1, 1), (5, 1, 1), (180, 3, 3), (400, 7, 7), (960, 15, 3), (700, 11, 1)],
)
@pytest.mark.parametrize(
    "lengths", [[640] * 20, [640] * 19 + [704], [700] * 40, [5] * 39 + [900], [2000, 900, 60], []], ids=str
)
def test_mla_plans_look_for_even_batches(lengths, heads, blocks, group, device):
    """Parts come in groups: for the smallest number that divides a request's blocks of rows and the parts."""
    plan = MlaDecodePlan.allocate(len(lengths), num_q_heads=heads, num_sm_parts=42, device=device)
    ops.mla_decode_plan(plan, torch.tensor(lengths, dtype=torch.int32, device=device))
    geometry = _scheduler.SplitKvGeometry(
        works_per_request=blocks // group,
        seqlen_q=1,
        tile_tokens=TILE_TOKENS,
        num_sm_parts=42,
        work_overhead=16,  # csrc/mla_decode/plan.h
        parts_per_group=group,
        even_shares=_scheduler.shares_of_even_works(len(lengths) * blocks // group, 42 // group),
        short_tiles=2 if heads > 32 else 0,
        more_of_lone=2,
    )
    plan_rows = _scheduler.plan_split_kv(geometry, lengths, fills=True)
    rows = [[getattr(entry, name) for name in FIELDS] for entry in plan_rows]
    assert plan.tile_scheduler_metadata.tolist() == rows


def words_of(entry) -> list[int]:
    return [getattr(entry, field) for field in FIELDS]


@settings(max_examples=300, deadline=None)
@given(LENGTHS, GEOMETRIES, st.sampled_from([0, 1, 4, -1, -16]), st.sampled_from([1, 2, 3]))
def test_bounds_leave_what_the_planner_made(lengths, shape, fixed, per_group):
    """All that is read of a part that has tiles: its splits in balanced plans alone."""
    shape = {**shape, "num_sm_parts": shape["num_sm_parts"] * per_group, "parts_per_group": per_group}
    geometry = _scheduler.SplitKvGeometry(**shape, tile_tokens=TILE_TOKENS, fixed_split_tiles=fixed)
    tiles = works_of(geometry, lengths)
    groups = geometry.num_sm_parts // per_group
    for part, entry in enumerate(_scheduler.plan_split_kv(geometry, lengths)):
        given_words = words_of(entry)
        got = words_of(_scheduler.bounded(given_words, len(tiles), groups, fixed == 0, part // per_group))
        assert got[:4] == given_words[:4]
        pieces = pieces_of(entry, tiles)
        if not pieces or fixed:
            assert not pieces or got[4] == given_words[4]
            continue
        first_has_all = pieces[0][0] == pieces[-1][0]  # its splits are then those of the last, which nobody asks again
        assert got[4:6] == given_words[4:6] and got[7] == given_words[7]
        assert first_has_all or got[6] == given_words[6]


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 12)), min_size=8, max_size=8),
    st.integers(1, 12),
    st.sampled_from([1, 2, 7, 132]),
    st.booleans(),
    st.data(),
)
def test_bounds_of_any_words(words, works, groups, balanced, data):
    group = data.draw(st.integers(0, groups - 1))
    row = _scheduler.bounded(words, works, groups, balanced, group)
    assert 0 <= row.begin_work <= row.end_work <= works
    assert 0 <= row.begin_tile <= 1 << 22 and 0 <= row.end_tile <= 1 << 22
    assert row.begin_work < row.end_work or row.begin_tile <= row.end_tile
    if row.end_work == works:
        assert row.end_tile == 0 or (row.begin_work == works and row.begin_tile == row.end_tile)
    assert 0 <= row.first_part <= group
    assert row.first_part + row.begin_num_splits <= groups and row.begin_num_splits >= 1
    assert group + row.last_num_splits <= groups and row.last_num_splits >= 1
    if balanced:
        assert row.first_part + row.begin_split == group and row.begin_split < row.begin_num_splits


@settings(max_examples=300, deadline=None)
@given(LENGTHS, GEOMETRIES, st.sampled_from([0, 1, 4, -1, -16]), st.sampled_from([1, 2, 3]))
def test_clamps_leave_what_the_planner_made(lengths, shape, fixed, per_group):
    """A part has work where it has tiles, and all that is then read of its row stays."""
    shape = {**shape, "num_sm_parts": shape["num_sm_parts"] * per_group, "parts_per_group": per_group}
    geometry = _scheduler.SplitKvGeometry(**shape, tile_tokens=TILE_TOKENS, fixed_split_tiles=fixed)
    tiles = works_of(geometry, lengths)
    groups = geometry.num_sm_parts // per_group
    for part, entry in enumerate(_scheduler.plan_split_kv(geometry, lengths)):
        given_words = words_of(entry)
        row = _scheduler.clamped(given_words, len(tiles), groups, fixed == 0, part // per_group)
        pieces = pieces_of(entry, tiles)
        assert (row is not None) == bool(pieces)
        if row is None:
            continue
        got = words_of(row)
        assert got[:5] == given_words[:5]
        if fixed:
            continue  # its splits are cuts, which the walk finds by itself
        first_has_all = pieces[0][0] == pieces[-1][0]  # its splits are then those of the last, which nobody asks again
        assert got[5] == given_words[5] and got[7] == given_words[7]
        assert first_has_all or got[6] == given_words[6]


@settings(max_examples=3000, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 12)), min_size=8, max_size=8),
    st.integers(1, 12),
    st.sampled_from([1, 2, 7, 132]),
    st.booleans(),
    st.data(),
)
def test_clamps_of_any_words(words, works, groups, balanced, data):
    group = data.draw(st.integers(0, groups - 1))
    if data.draw(st.booleans()):  # near to what a planner writes, so that many have work
        words = [data.draw(st.integers(0, works - 1)), *words[1:7], data.draw(st.integers(0, groups - 1))]
    row = _scheduler.clamped(words, works, groups, balanced, group)
    if row is None:
        return
    assert 0 <= row.begin_work <= row.end_work <= works and row.begin_work < works
    assert 0 <= row.begin_tile <= 1 << 22 and 0 <= row.end_tile <= 1 << 22
    assert row.end_work < works or row.end_tile == 0
    assert 0 <= row.first_part <= group
    assert row.first_part + row.begin_num_splits <= groups and group + row.last_num_splits <= groups
    if balanced:
        assert row.first_part + row.begin_split == group


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "parts"),
    [(80, torch.bfloat16, 228), (64, torch.float8_e4m3fn, 228), (128, torch.bfloat16, 264), (64, torch.bfloat16, 264)],
)
def test_heads_that_share_lines_walk_side_by_side(monkeypatch, head_dim, kv_dtype, parts):
    h200 = types.SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    assert xqa_num_sm_parts(torch.device("cuda"), 11, 38, head_dim=head_dim, kv_dtype=kv_dtype) == parts


@pytest.mark.parametrize("lengths", [[128] * 5, [1, 128, 0, 64, 128, 65], [64] * 40, [100] * 200, [0, 65], [128]])
@pytest.mark.parametrize("overhead", [0, 16])
@pytest.mark.parametrize("works", [1, 3])
def test_works_of_two_tiles_stay_whole_where_none_is_longer(lengths, overhead, works):
    shape = dict(seqlen_q=1, tile_tokens=64, num_sm_parts=132, work_overhead=overhead, even_shares=132, short_tiles=2)
    geometry = _scheduler.SplitKvGeometry(works_per_request=works, **shape)
    at = 0
    for entry in _scheduler.plan_split_kv(geometry, lengths):
        assert (entry.begin_work, entry.begin_tile, entry.end_tile) == (at, 0, 0)
        at = entry.end_work
    assert at == len(lengths) * works
    longer = _scheduler.plan_split_kv(geometry, [*lengths, 132 * 64])
    assert any(entry.end_tile for entry in longer), "the long one is cut"


def tiles_of_parts(lengths: list[int], parts: int) -> list[list[tuple[int, int]]]:
    """(work, tiles) of each part that has any, by the rule of MLA's plans."""
    geometry = _scheduler.SplitKvGeometry(
        works_per_request=1,
        seqlen_q=1,
        tile_tokens=64,
        num_sm_parts=parts,
        work_overhead=16,
        even_shares=_scheduler.shares_of_even_works(len(lengths), parts),
        short_tiles=2,
        more_of_lone=2,
    )
    tiles = works_of(geometry, lengths)
    shares = [pieces_of(entry, tiles) for entry in _scheduler.plan_split_kv(geometry, lengths)]
    return [[(work, end - begin) for work, begin, end in part] for part in shares if part]


def test_cuts_must_be_worth_their_merge():
    assert tiles_of_parts([227] * 79, 132) == [[(work, 4)] for work in range(79)]
    assert tiles_of_parts([640] * 100, 132) == [[(work, 10)] for work in range(100)]
    assert tiles_of_parts([227, 1, 0, 200, 130] * 16, 132) == [[(i, n)] for i, n in enumerate([4, 1, 1, 4, 3] * 16)]
    longer = tiles_of_parts([64 * 64] * 90, 132)
    assert len(longer) >= 131 and any(len(part) > 1 for part in longer)


def test_even_works_that_shares_hold_twice_are_cut_into_equal_pieces():
    assert tiles_of_parts([394] * 24, 66) == [[(work, n)] for work in range(24) for n in (3, 4)]
    assert tiles_of_parts([300] * 33, 66) == [[(work, n)] for work in range(33) for n in (2, 3)]
    assert tiles_of_parts([190] * 2, 44) == [[(work, 1)] for work in range(2) for _ in range(3)]


def test_second_pieces_must_be_worth_two_tiles():
    assert tiles_of_parts([64 * 20, 64 * 9, 64 * 4], 7) == [[(0, 5)]] * 4 + [[(1, 5)], [(1, 4)], [(2, 4)]]
    assert any(len(part) > 1 for part in tiles_of_parts([64 * 20, 64 * 9, 64 * 4], 3)), "a share has 11"


def test_works_that_nearly_fill_the_parts_stay_whole():
    parts = tiles_of_parts([500] * 592, 66)
    assert {len(part) for part in parts} == {8, 9} and all(n == 8 for part in parts for _, n in part)
    assert any(n < 6 for part in tiles_of_parts([344] * 84, 66) for _, n in part), "two works each are too many"


@pytest.mark.parametrize(
    ("head_dim", "rows", "page_size", "parts"),
    [
        (192, 24, 64, 264),
        (192, 24, None, 264),
        (192, 24, 5, 132),
        (192, 16, 5, 264),
        (192, 40, 64, 132),
        (200, 24, 64, 132),
    ],
)
def test_wide_heads_fill_an_sm_with_fewer_rows(monkeypatch, head_dim, rows, page_size, parts):
    h200 = types.SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    cuda = torch.device("cuda")
    assert xqa_num_sm_parts(cuda, 50, 1, rows=rows, head_dim=head_dim, page_size=page_size) == parts


@pytest.mark.parametrize(
    ("head_dim", "rows", "page_size", "parts"),
    [(128, 16, 64, 396), (80, 8, None, 396), (128, 8, 5, 264), (64, 8, 64, 264), (192, 8, 64, 264), (128, 17, 64, 264)],
)
def test_batch_invariant_shares_are_more_where_fp8_cuts_are_folded(monkeypatch, head_dim, rows, page_size, parts):
    h200 = types.SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    options = {"rows": rows, "head_dim": head_dim, "page_size": page_size, "fixed_split_tokens": -8}
    assert xqa_num_sm_parts(torch.device("cuda"), 50, 1, kv_dtype=torch.float8_e4m3fn, **options) == parts
