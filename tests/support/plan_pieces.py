"""What a part of a split-KV plan has to do."""

from __future__ import annotations


def pieces_of(entry, tiles: list[int]) -> list[tuple[int, int, int]]:
    """(work, first tile, end tile) of a part."""
    last = entry.end_work if entry.end_tile > 0 else entry.end_work - 1
    pieces = []
    for work in range(entry.begin_work, last + 1):
        begin = entry.begin_tile if work == entry.begin_work else 0
        end = entry.end_tile if work == entry.end_work else tiles[work]
        if begin < end:
            pieces.append((work, begin, end))
    return pieces
