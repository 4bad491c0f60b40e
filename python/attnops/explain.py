"""Which part computes which keys: a picture of a split-KV schedule, made by the planner that the kernels run.

``python -m attnops.explain 4096 300 17 --num-kv-heads 8 --num-sm-parts 16``

It is the plan's division. Short calls of `xqa_decode` on Hopper do not look at the plan: clusters of CTAs divide each
work evenly (docs/kernels/xqa_decode.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from attnops import _scheduler
from attnops.metadata.plan import TILE_TOKENS

# What a work costs besides its tiles, in eighths of a tile: csrc/xqa_decode/plan.h and csrc/mla_decode/plan.h.
XQA_WORK_OVERHEAD = 4
MLA_WORK_OVERHEAD = 16

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Piece:
    """Tiles ``[begin, end)`` of one work, computed by one part."""

    part: int
    request: int
    work: int  # within the request: KV head, or block of query rows
    begin: int
    end: int
    num_splits: int  # pieces of this work, all parts together

    @property
    def tiles(self) -> int:
        return self.end - self.begin


def split_kv_schedule(
    cache_seqlens: Sequence[int],
    *,
    works_per_request: int,
    num_sm_parts: int,
    seqlen_q: int = 1,
    window_left: int = -1,
    fixed_split_tokens: int = 0,
    work_overhead: int = XQA_WORK_OVERHEAD,
    even_shares: int = 0,
) -> list[Piece]:
    """The pieces of a batch, part after part.

    Args:
        cache_seqlens: Tokens of each request, the new ones included.
        works_per_request: KV heads of `xqa_decode` on a CPU; on a GPU whose parts are a multiple of them 1, for a group
            of parts has one head each; blocks of 64 query rows of `mla_decode`, or pairs of them.
        num_sm_parts: Shares of the plan: CTAs, or CPU threads.
        work_overhead: `XQA_WORK_OVERHEAD` or `MLA_WORK_OVERHEAD`.
        even_shares: Shares that `mla_decode_plan` divides a batch of one length over; 0: `num_sm_parts`.
    """
    geometry = _scheduler.SplitKvGeometry(
        works_per_request=works_per_request,
        seqlen_q=seqlen_q,
        tile_tokens=TILE_TOKENS,
        window_left=window_left,
        num_sm_parts=num_sm_parts,
        work_overhead=work_overhead,
        even_shares=even_shares,
        fixed_split_tiles=fixed_split_tokens // TILE_TOKENS if fixed_split_tokens > 0 else fixed_split_tokens,
    )
    tiles = [_scheduler.num_tiles(geometry, length) for length in cache_seqlens]
    shares: list[tuple[int, int, int, int]] = []  # part, work, begin, end
    for part, entry in enumerate(_scheduler.plan_split_kv(geometry, list(cache_seqlens))):
        work, begin = entry.begin_work, entry.begin_tile
        while (work, begin) < (entry.end_work, entry.end_tile):
            count = tiles[work // works_per_request]
            last = entry.end_tile if work == entry.end_work else count
            fixed = geometry.fixed_split_tiles
            every = _scheduler.tiles_per_cut(fixed, count) if fixed else 0
            shares += [(part, work, *cut) for cut in _cuts(begin, last, every)]
            work, begin = work + 1, 0
    splits: dict[int, int] = {}
    for _, work, _, _ in shares:
        splits[work] = splits.get(work, 0) + 1
    return [
        Piece(part, work // works_per_request, work % works_per_request, begin, end, splits[work])
        for part, work, begin, end in shares
    ]


def _cuts(begin: int, end: int, every: int) -> list[tuple[int, int]]:
    """A part's tiles of a work: one piece, or one per fixed split."""
    if not every:
        return [(begin, end)]
    return [(first, min(first + every, end)) for first in range(begin, end, every)]


def picture(pieces: Sequence[Piece], num_sm_parts: int, width: int = 64) -> str:
    """A line per part: its tiles as symbols of their requests, then its pieces in words."""
    load = [0] * num_sm_parts
    for piece in pieces:
        load[piece.part] += piece.tiles
    most = max([*load, 1])
    per_symbol = -(-most // width)
    lines = [f"each symbol: {per_symbol} tile{'s' * (per_symbol > 1)} of {TILE_TOKENS} keys; longest part {most} tiles"]
    for part in range(num_sm_parts):
        mine = [piece for piece in pieces if piece.part == part]
        bar = "".join(SYMBOLS[piece.request % len(SYMBOLS)] * piece.tiles for piece in mine)[::per_symbol]
        words = [f"r{p.request}.{p.work}[{p.begin}:{p.end}]" + (f"/{p.num_splits}" * (p.num_splits > 1)) for p in mine]
        if len(words) > 3:
            words = [words[0], f"... {len(words) - 2} more ...", words[-1]]
        lines.append(f"part {part:>3} |{bar:<{-(-most // per_symbol)}}| {' '.join(words) or 'idle'}")
    total = sum(load)
    balance = total / (most * num_sm_parts) if total else 1.0
    splits = len({(p.request, p.work) for p in pieces if p.num_splits > 1})
    lines.append(f"{total} tiles over {num_sm_parts} parts: {balance:.0%} of the longest part; {splits} works split")
    lines.append("rR.W[a:b]/n: tiles a to b of work W (KV head, or block of query rows) of request R, split in n")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m attnops.explain", description=__doc__)
    parser.add_argument("cache_seqlens", type=int, nargs="+", help="tokens of each request")
    parser.add_argument("--num-kv-heads", type=int, default=8, help="of xqa_decode: works per request")
    parser.add_argument(
        "--mla-heads", type=int, help="query heads of an MLA model: works are one or two blocks of 64 query rows"
    )
    parser.add_argument("--seqlen-q", type=int, default=1, help="query tokens per request")
    parser.add_argument("--num-sm-parts", type=int, default=16, help="CTAs, or CPU threads")
    parser.add_argument(
        "--gpu", action="store_true", help="parts of xqa_decode as on a GPU: in groups of one part for each KV head"
    )
    parser.add_argument("--window-left", type=int, default=-1)
    parser.add_argument(
        "--fixed-split-tokens", type=int, default=0, help="batch-invariant: keys of a cut, or -n: at most n cuts"
    )
    options = parser.parse_args(arguments)
    for name in ("num_kv_heads", "mla_heads", "seqlen_q", "num_sm_parts"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.fixed_split_tokens > 0 and options.fixed_split_tokens % TILE_TOKENS:
        parser.error(f"--fixed-split-tokens must be a multiple of {TILE_TOKENS}, got {options.fixed_split_tokens}")
    mla = options.mla_heads is not None
    works, parts = options.num_kv_heads, options.num_sm_parts
    if mla:  # blocks of 64 rows pair up where parts do, and a pair of parts shares its tiles: csrc/mla_decode/plan.h
        works = -(-options.seqlen_q * options.mla_heads // 64)
        if works % 2 == 0 and parts % 2 == 0:
            works, parts = works // 2, parts // 2
            print("blocks of query rows go in pairs; each line is a pair of parts")
    elif options.gpu and works > 1 and parts % works == 0:  # csrc/xqa_decode/plan.h
        print(f"KV heads go side by side; each line is a group of {works} parts, one for each head")
        works, parts = 1, parts // works
    pieces = split_kv_schedule(
        options.cache_seqlens,
        works_per_request=works,
        num_sm_parts=parts,
        seqlen_q=options.seqlen_q,
        window_left=options.window_left,
        fixed_split_tokens=options.fixed_split_tokens,
        work_overhead=MLA_WORK_OVERHEAD if mla else XQA_WORK_OVERHEAD,
        even_shares=_scheduler.shares_of_even_works(len(options.cache_seqlens) * works, parts) if mla else 0,
    )
    print(picture(pieces, parts))


if __name__ == "__main__":
    main()
