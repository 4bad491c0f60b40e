"""Which part computes which keys: a picture of a split-KV schedule, read from the plan that the ops write.

``python -m attnops.explain 4096 300 17 --num-kv-heads 8 --num-sm-parts 16``
``python -m attnops.explain 4608 65600 --prefill 512 64 --num-q-heads 32 --num-kv-heads 8 --num-sm-parts 132``

The picture shows the plan's division. Short calls of `xqa_decode` on Hopper ignore the plan: clusters of CTAs divide
each work evenly (docs/kernels/xqa_decode.md).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attnops.explain_prefill import UNIT_TOKENS, prefill_schedule
from attnops.explain_svg import svg
from attnops.metadata.plan import MLA_ROWS_PER_WORK, TILE_TOKENS
from attnops.metadata.plan_checks import cuts_of_rule

FEW_CUTS = 16  # up to so many cuts have an even number of tiles: csrc/scheduler/split_kv.h
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Piece:
    """Tiles ``[begin, end)`` of one work, computed by one part.

    Attributes:
        part: Row of the plan, or group of rows that share their tiles.
        request: Index in the batch.
        work: Index within the request: a KV head, or a block of query rows.
        begin, end: Tiles of `TILE_TOKENS` keys, counted from the first visible one.
        num_splits: Pieces of this work, over all parts.
    """

    part: int
    request: int
    work: int
    begin: int
    end: int
    num_splits: int

    @property
    def tiles(self) -> int:
        return self.end - self.begin


def xqa_schedule(
    cache_seqlens: Sequence[int],
    *,
    num_kv_heads: int,
    num_sm_parts: int,
    seqlen_q: int = 1,
    window_left: int = -1,
    fixed_split_tokens: int = 0,
) -> list[Piece]:
    """The pieces of an `xqa_decode` batch, part after part.

    Args:
        cache_seqlens: Tokens of each request, the new ones included.
        num_kv_heads: Works per request. A GPU's parts may be a multiple of the heads. Then give 1, and the number of
            groups as `num_sm_parts`: a group has one part for each head.
        num_sm_parts: Shares of the plan: CTAs, or CPU threads.
        seqlen_q: Query tokens per request.
        window_left: Keys visible before a query; -1: all.
        fixed_split_tokens: 0: balanced. Above 0: keys of a cut. -n: at most n cuts of a request.

    Raises:
        RuntimeError: from `attnops::xqa_decode_plan`, naming the argument out of range.
    """
    rows, _ = _plan(
        torch.ops.attnops.xqa_decode_plan,
        cache_seqlens,
        num_sm_parts,
        (seqlen_q, num_kv_heads, window_left, fixed_split_tokens),
    )
    tiles = _tiles(cache_seqlens, seqlen_q, window_left)
    return _pieces(rows, tiles, num_kv_heads, fixed_split_tokens)


def mla_schedule(
    cache_seqlens: Sequence[int],
    *,
    num_q_heads: int,
    num_sm_parts: int,
    seqlen_q: int = 1,
    window_left: int = -1,
    fixed_split_tokens: int = 0,
) -> tuple[list[Piece], int]:
    """The pieces of an `mla_decode` batch, and how many parts share each of them: 1, or 2 where blocks pair up.

    Args:
        num_q_heads: Query heads. A work is one block of 64 query rows, or a pair of blocks.

    The other arguments are those of `xqa_schedule`, without -n cuts.
    """
    blocks = -(-seqlen_q * num_q_heads // MLA_ROWS_PER_WORK)
    group = 2 if blocks % 2 == 0 and num_sm_parts % 2 == 0 else 1  # csrc/mla_decode/plan.h
    rows, _ = _plan(
        torch.ops.attnops.mla_decode_plan,
        cache_seqlens,
        num_sm_parts,
        (seqlen_q, num_q_heads, window_left, fixed_split_tokens),
    )
    tiles = _tiles(cache_seqlens, seqlen_q, window_left)
    return _pieces(rows[::group], tiles, blocks // group, fixed_split_tokens), group


def _plan(
    op: Callable[..., None], cache_seqlens: Sequence[int], num_sm_parts: int, options: tuple
) -> tuple[list[list[int]], list[int]]:
    """Rows of the plan, and the cuts before each request."""
    rows = torch.empty(num_sm_parts, 8, dtype=torch.int32)
    num_splits = torch.empty(len(cache_seqlens) + 1, dtype=torch.int32)
    op(rows, num_splits, torch.tensor(cache_seqlens, dtype=torch.int32), *options)
    return rows.tolist(), num_splits.tolist()


def _tiles(cache_seqlens: Sequence[int], seqlen_q: int, window_left: int) -> list[int]:
    """Visible tiles of each request. The planner's own count: cuts of one tile are as many as there are tiles."""
    options = (seqlen_q, 1, window_left, TILE_TOKENS)
    _, before = _plan(torch.ops.attnops.xqa_decode_plan, cache_seqlens, 1, options)
    return [after - first for first, after in itertools.pairwise(before)]


def _pieces(rows: list[list[int]], tiles: list[int], works_per_request: int, fixed_split_tokens: int) -> list[Piece]:
    shares: list[tuple[int, int, int, int]] = []  # part, work, begin, end
    for part, (work, begin, end_work, end_tile, *_) in enumerate(rows):
        while (work, begin) < (end_work, end_tile):
            count = tiles[work // works_per_request]
            last = end_tile if work == end_work else count
            every = _tiles_per_cut(fixed_split_tokens, count)
            shares += [(part, work, first, min(first + every, last)) for first in range(begin, last, every)]
            work, begin = work + 1, 0
    splits: dict[int, int] = {}
    for _, work, _, _ in shares:
        splits[work] = splits.get(work, 0) + 1
    return [
        Piece(part, work // works_per_request, work % works_per_request, begin, end, splits[work])
        for part, work, begin, end in shares
    ]


def _tiles_per_cut(fixed_split_tokens: int, tiles: int) -> int:
    """Tiles from one cut of a work to the next; all of them in balanced mode (csrc/scheduler/split_kv.h)."""
    if fixed_split_tokens >= 0:
        return fixed_split_tokens // TILE_TOKENS or max(tiles, 1)
    most, least = cuts_of_rule(fixed_split_tokens)
    even = -(-tiles // most)
    return max(even + even % 2 if most <= FEW_CUTS else even, least)


def picture(pieces: Sequence[Piece], num_sm_parts: int, width: int = 64, tile_tokens: int = TILE_TOKENS) -> str:
    """A line per part: its tiles as symbols of their requests, then its pieces in words."""
    load = [0] * num_sm_parts
    for piece in pieces:
        load[piece.part] += piece.tiles
    most = max([*load, 1])
    per_symbol = -(-most // width)
    lines = [f"each symbol: {per_symbol} tile{'s' * (per_symbol > 1)} of {tile_tokens} keys; longest part {most} tiles"]
    for part in range(num_sm_parts):
        mine = [piece for piece in pieces if piece.part == part]
        bar = "".join(SYMBOLS[piece.request % len(SYMBOLS)] * piece.tiles for piece in mine)[::per_symbol]
        words = [f"r{p.request}.{p.work}[{p.begin}:{p.end}]" + (f"/{p.num_splits}" * (p.num_splits > 1)) for p in mine]
        if len(words) > 3:
            words = [words[0], f"... {len(words) - 2} more ...", words[-1]]
        lines.append(f"part {part:>3} |{bar:<{-(-most // per_symbol)}}| {' '.join(words) or 'idle'}")
    lines.append(balance(pieces, num_sm_parts))
    lines.append("rR.W[a:b]/n: tiles a to b of work W (KV head, or block of query rows) of request R, split in n")
    return "\n".join(lines)


def balance(pieces: Sequence[Piece], num_sm_parts: int) -> str:
    """How even the shares are, in one sentence."""
    load = [0] * num_sm_parts
    for piece in pieces:
        load[piece.part] += piece.tiles
    total, most = sum(load), max([*load, 1])
    even = total / (most * num_sm_parts) if total else 1.0
    splits = len({(p.request, p.work) for p in pieces if p.num_splits > 1})
    return f"{total} tiles over {num_sm_parts} parts: {even:.0%} of the longest part; {splits} works split"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m attnops.explain", description=__doc__)
    parser.add_argument("cache_seqlens", type=int, nargs="+", help="tokens of each request")
    parser.add_argument("--num-kv-heads", type=int, default=8, help="of xqa_decode: works per request")
    parser.add_argument(
        "--mla-heads", type=int, help="query heads of an MLA model: works are one or two blocks of 64 query rows"
    )
    parser.add_argument(
        "--prefill", type=int, nargs="+", metavar="S_Q", help="new tokens of each request: draws a prefill on a GPU"
    )
    parser.add_argument("--num-q-heads", type=int, help="with --prefill")
    parser.add_argument("--head-dim", type=int, default=128, help="with --prefill")
    parser.add_argument("--full", action="store_true", help="with --prefill: not causal")
    parser.add_argument("--seqlen-q", type=int, default=1, help="query tokens per request")
    parser.add_argument("--num-sm-parts", type=int, default=16, help="CTAs, or CPU threads")
    parser.add_argument(
        "--gpu", action="store_true", help="parts of xqa_decode as on a GPU: in groups of one part for each KV head"
    )
    parser.add_argument("--window-left", type=int, default=-1, help="keys visible before a query; -1: all")
    parser.add_argument(
        "--fixed-split-tokens", type=int, default=0, help="batch-invariant: keys of a cut, or -n: at most n cuts"
    )
    parser.add_argument("--svg", type=Path, help="write the picture to this file, too, as SVG")
    options = parser.parse_args(arguments)
    for name in ("num_kv_heads", "mla_heads", "seqlen_q", "num_sm_parts"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.fixed_split_tokens > 0 and options.fixed_split_tokens % TILE_TOKENS:
        parser.error(f"--fixed-split-tokens must be a multiple of {TILE_TOKENS}, got {options.fixed_split_tokens}")
    if options.prefill is not None:
        _check_prefill(parser, options)
    tile_tokens = TILE_TOKENS if options.prefill is None else UNIT_TOKENS
    try:
        note, pieces, parts = _scheduled(options)
    except RuntimeError as error:
        parser.error(str(error).split("\nException raised")[0])
    print(*note, picture(pieces, parts, tile_tokens=tile_tokens), sep="\n")
    if options.svg:
        options.svg.write_text(svg(pieces, parts, [*note, balance(pieces, parts)], tile_tokens), encoding="utf-8")


def _check_prefill(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    heads, kv_heads = options.num_q_heads, options.num_kv_heads
    if heads is None or heads < 1 or heads % kv_heads:
        parser.error(f"--num-q-heads must be a multiple of --num-kv-heads, {kv_heads}, with --prefill, got {heads}")
    if len(options.prefill) != len(options.cache_seqlens):
        parser.error(f"--prefill must have {len(options.cache_seqlens)} lengths, got {len(options.prefill)}")
    if not 1 <= options.head_dim <= 256:
        parser.error(f"--head-dim must be in [1, 256], got {options.head_dim}")
    if min(options.prefill) < 0:
        parser.error(f"--prefill must not be negative, got {min(options.prefill)}")


def _scheduled(options: argparse.Namespace) -> tuple[list[str], list[Piece], int]:
    """A note about groups of parts, the pieces, and the lines of the picture."""
    shape = {name: getattr(options, name) for name in ("seqlen_q", "window_left", "fixed_split_tokens")}
    parts, heads = options.num_sm_parts, options.num_kv_heads
    if options.prefill is not None:
        pieces = prefill_schedule(
            options.prefill,
            options.cache_seqlens,
            num_q_heads=options.num_q_heads,
            num_kv_heads=heads,
            num_sms=parts,
            head_dim=options.head_dim,
            causal=not options.full,
            window_left=options.window_left,
        )
        return ["SMs take works in turn; pieces of cut tiles come first"], pieces, parts
    if options.mla_heads is not None:
        pieces, group = mla_schedule(options.cache_seqlens, num_q_heads=options.mla_heads, num_sm_parts=parts, **shape)
        note = ["blocks of query rows go in pairs; each line is a pair of parts"] if group == 2 else []
        return note, pieces, parts // group
    note = []
    if options.gpu and heads > 1 and parts % heads == 0:  # csrc/xqa_decode/plan.h
        note = [f"KV heads go side by side; each line is a group of {heads} parts, one for each head"]
        heads, parts = 1, parts // heads
    return note, xqa_schedule(options.cache_seqlens, num_kv_heads=heads, num_sm_parts=parts, **shape), parts


if __name__ == "__main__":
    main()
