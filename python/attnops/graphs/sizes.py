"""Which sizes are captured, and which of them serves a batch."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

# Batch sizes that engines capture by default: single ones, then (begin, end, step). The last step goes on for ever.
_LISTS: dict[str, tuple[list[int], list[tuple[int, int, int]]]] = {
    "vllm": ([1, 2, 4], [(8, 256, 8), (272, 0, 16)]),
    "sglang": ([1, 2, 4, 8, 12], [(16, 256, 8), (272, 496, 16), (512, 0, 32)]),
    "sglang_speculative": ([], [(1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, 0, 16)]),
    "every": ([], [(1, 0, 1)]),
}
_TOKENS: tuple[list[int], list[tuple[int, int, int]]] = (
    [1, 2, 4],
    [(8, 32, 8), (48, 256, 16), (288, 512, 32), (640, 4096, 128), (4608, 0, 512)],
)


def capture_sizes(max_size: int, like: str = "vllm", multiple_of: int = 1) -> list[int]:
    """Batch sizes to capture, as an engine chooses them; ascending, `max_size` among them.

    Args:
        like: "vllm": 1, 2, 4, steps of 8 up to 256, of 16 beyond. "sglang": SGLang's list. "sglang_speculative": its
            finer steps for verify and draft extend. "every": no padding at all.
        multiple_of: Each size is rounded up to a multiple, as tensor-parallel attention needs it; so is `max_size`.

    Raises:
        ValueError: `max_size` or `multiple_of` is below 1, or there is no such list.
    """
    if like not in _LISTS:
        raise ValueError(f"attnops: like must be one of {', '.join(_LISTS)}, got {like!r}")
    if multiple_of < 1:
        raise ValueError(f"attnops: multiple_of must be positive, got {multiple_of}")
    return sorted({-(-size // multiple_of) * multiple_of for size in _expand(*_LISTS[like], max_size)})


def token_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens for steps of any mode; ascending, `max_tokens` among them. From 48 on, a bucket is at most a
    third larger than the one before, so that little is computed for nothing.

    Raises:
        ValueError: `max_tokens` is below 1.
    """
    return _expand(*_TOKENS, max_tokens)


def _expand(single: list[int], ranges: list[tuple[int, int, int]], most: int) -> list[int]:
    if most < 1:
        raise ValueError(f"attnops: the largest size must be positive, got {most}")
    sizes = set(single)
    for begin, end, step in ranges:
        sizes |= set(range(begin, (end or most) + 1, step))
    return sorted({size for size in sizes if size <= most} | {most})


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
