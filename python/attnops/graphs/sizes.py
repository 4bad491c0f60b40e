"""Which sizes are captured, and which of them serves a batch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence


def default_capture_sizes(max_size: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 256 and of 16 beyond, and `max_size` itself; ascending.

    Raises:
        ValueError: `max_size` is below 1.
    """
    if max_size < 1:
        raise ValueError(f"attnops: max_size must be positive, got {max_size}")
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_size + 1, 16)]
    return sorted({size for size in sizes if size <= max_size} | {max_size})


def pad_to_size(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of `sizes` (ascending) that holds `count`; None: all are smaller."""
    place = bisect.bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def checked_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Ascending, without repeats.

    Raises:
        ValueError: there is none, or one is below 1.
    """
    ascending = tuple(sorted(set(sizes)))
    if not ascending or ascending[0] < 1:
        raise ValueError(f"attnops: capture sizes must be positive, got {list(ascending)}")
    return ascending
