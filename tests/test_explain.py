"""What `python -m attnops.explain` draws: the division of a batch that the plan ops write, in text and as SVG."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from attnops import explain
from attnops.explain_prefill import prefill_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = [4096, 300, 0, 17, 65, 1500, 6000]


def visible_tiles(length: int, seqlen_q: int, window_left: int) -> int:
    first = 0 if window_left < 0 else max(length - seqlen_q - window_left, 0) // 64
    return max(-(-length // 64) - first, 1)


def assert_covers(pieces, lengths, works, seqlen_q=1, window_left=-1):
    for request, length in enumerate(lengths):
        for work in range(works):
            mine = [p for p in pieces if (p.request, p.work) == (request, work)]
            tiles = [tile for piece in mine for tile in range(piece.begin, piece.end)]
            assert tiles == list(range(visible_tiles(length, seqlen_q, window_left)))
            assert {p.num_splits for p in mine} == {len(mine)}


@pytest.mark.parametrize("fixed", [0, 256, -5, -16, -20, -64])
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_a_schedules_pieces_cover_every_tile_once_and_count_their_splits(parts, fixed):
    pieces = explain.xqa_schedule(LENGTHS, num_kv_heads=2, num_sm_parts=parts, fixed_split_tokens=fixed)
    assert_covers(pieces, LENGTHS, works=2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([-1, 0, 63, 1000]),
    st.sampled_from([0, 64, 512, -3, -17]),
)
def test_pieces_are_the_plans_rows(lengths, parts, seqlen_q, window_left, fixed):
    """The plan's own columns say where a part begins and ends, and how many pieces its first and last work have."""
    pieces = explain.xqa_schedule(
        lengths,
        num_kv_heads=3,
        num_sm_parts=parts,
        seqlen_q=seqlen_q,
        window_left=window_left,
        fixed_split_tokens=fixed,
    )
    assert_covers(pieces, lengths, 3, seqlen_q, window_left)
    rows, num_splits = torch.zeros(parts, 8, dtype=torch.int32), torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.ops.attnops.xqa_decode_plan(
        rows, num_splits, torch.tensor(lengths, dtype=torch.int32), seqlen_q, 3, window_left, fixed
    )
    for part, row in enumerate(rows.tolist()):
        mine = [p for p in pieces if p.part == part]
        if not mine:
            assert row[:2] == row[2:4]
            continue
        first, last = mine[0], mine[-1]
        assert [first.request * 3 + first.work, first.begin] == row[:2]
        assert (first.num_splits, last.num_splits) == (row[5], row[6])
    if fixed:
        for request in range(len(lengths)):
            cuts = {p.num_splits for p in pieces if p.request == request}
            assert cuts == {int(num_splits[request + 1] - num_splits[request])}


@pytest.mark.parametrize(("heads", "seqlen_q", "parts", "group"), [(128, 1, 8, 2), (16, 1, 8, 1), (128, 3, 7, 1)])
@pytest.mark.parametrize("fixed", [0, 256])
def test_blocks_of_mla_cover_every_tile_once(heads, seqlen_q, parts, group, fixed):
    pieces, shared = explain.mla_schedule(
        LENGTHS, num_q_heads=heads, num_sm_parts=parts, seqlen_q=seqlen_q, fixed_split_tokens=fixed
    )
    assert shared == group
    assert_covers(pieces, LENGTHS, -(-heads * seqlen_q // 64) // group, seqlen_q)


def test_the_picture_has_a_line_per_part(capsys):
    def printed(*arguments):
        explain.main(list(arguments))
        return capsys.readouterr().out

    def parts(text):
        return [line for line in text.splitlines() if line.startswith("part ")]

    text = printed("4096", "300", "--num-kv-heads", "2", "--num-sm-parts", "4")
    assert len(parts(text)) == 4 and "r1.1[" in text
    paired = printed("100", "--mla-heads", "128", "--seqlen-q", "2")
    assert "works split" in paired and "each line is a pair of parts" in paired
    grouped = printed("4096", "300", "--num-kv-heads", "2", "--num-sm-parts", "8", "--gpu")
    assert "each line is a group of 2 parts" in grouped and len(parts(grouped)) == 4


def test_the_svg_has_a_box_per_piece_whose_widths_are_its_tiles(tmp_path, capsys):
    target = tmp_path / "plan.svg"
    arguments = ["4096", "300", "17", "--num-kv-heads", "2", "--num-sm-parts", "5"]
    explain.main([*arguments, "--svg", str(target)])
    capsys.readouterr()
    pieces = explain.xqa_schedule([4096, 300, 17], num_kv_heads=2, num_sm_parts=5)
    root = ElementTree.fromstring(target.read_text())
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}g/{space}rect")
    assert len(boxes) == len(pieces)
    unit = float(boxes[0].attrib["width"]) / pieces[0].tiles
    for box, piece in zip(boxes, pieces):
        assert float(box.attrib["width"]) == pytest.approx(unit * piece.tiles, rel=1e-4)
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= float(root.attrib["width"])
    stories = [title.text for title in root.findall(f"{space}g/{space}title")]
    assert stories[0].startswith("request 0, work 0: keys 0 to ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["40", "--num-kv-heads", "0"], "--num-kv-heads must be at least 1, got 0"),
        (["40", "--num-sm-parts", "0"], "--num-sm-parts must be at least 1, got 0"),
        (["40", "--fixed-split-tokens", "65"], "--fixed-split-tokens must be a multiple of 64, got 65"),
        (["40", "--num-sm-parts", "70000"], "num_sm_parts must be in [1, 65535], got 70000"),
        (["40", "--mla-heads", "16", "--fixed-split-tokens", "-2"], "fixed_split_tokens must be 0"),
    ],
)
def test_mistakes_of_a_picture_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        explain.main(arguments)
    assert message in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 40_000)), min_size=1, max_size=6),
    st.sampled_from([(32, 8), (8, 1), (5, 5)]),
    st.sampled_from([1, 20, 132]),
    st.booleans(),
)
def test_prefill_works_cover_every_unit_once(lengths, heads, num_sms, causal):
    new = [n for n, _ in lengths]
    keys = [n + prefix for n, prefix in lengths]
    pieces = prefill_schedule(new, keys, num_q_heads=heads[0], num_kv_heads=heads[1], num_sms=num_sms, causal=causal)
    works = {}
    for piece in pieces:
        works.setdefault((piece.request, piece.work), []).append(piece)
    for mine in works.values():
        mine.sort(key=lambda piece: piece.begin)
        assert mine[0].begin == 0 and {p.num_splits for p in mine} == {len(mine)}
        assert all(left.end == right.begin for left, right in itertools.pairwise(mine))
    assert {request for request, _ in works} == {i for i, n in enumerate(new) if n}
    longest = max((p.tiles for p in pieces), default=0)
    busy = [sum(p.tiles + 1 for p in pieces if p.part == part) for part in range(num_sms)]
    assert max(busy) <= sum(busy) / num_sms + longest + 1  # Graham's bound


def test_prefill_is_drawn(capsys, tmp_path):
    arguments = ["4608", "65600", "--prefill", "512", "64", "--num-q-heads", "32", "--num-sm-parts", "132"]
    explain.main([*arguments, "--svg", str(tmp_path / "plan.svg")])
    text = capsys.readouterr().out
    assert "units" not in text and "tiles of 128 keys" in text and "r1.8[0:64]/8" in text
    ElementTree.parse(tmp_path / "plan.svg")
    for wrong, message in [
        ("100 --prefill 5 --num-kv-heads 8", "--num-q-heads must be a multiple of --num-kv-heads, 8"),
        ("100 --prefill 5 6 --num-q-heads 8", "--prefill must have 1 lengths, got 2"),
        ("100 --prefill -5 --num-q-heads 8", "--prefill must not be negative, got -5"),
        ("100 --prefill 5 --num-q-heads 8 --head-dim 300", r"--head-dim must be in [1, 256], got 300"),
    ]:
        with pytest.raises(SystemExit):
            explain.main(wrong.split())
        assert message in capsys.readouterr().err
