"""The picture of a split-KV schedule as SVG: a row per part, a box per piece, a colour per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from attnops.explain import Piece

# Okabe and Ito's colours: readers who cannot tell red from green tell these apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a000", "#777777")
LEFT, WIDTH, ROW, BOX = 64, 640, 22, 16  # pixels: labels, bars, a row, a box in it


def svg(pieces: Sequence[Piece], num_sm_parts: int, notes: Sequence[str], tile_tokens: int) -> str:
    """An SVG document.

    Args:
        pieces: The schedule, part after part (`explain.Piece`).
        num_sm_parts: Rows of the picture.
        notes: Lines of text below it.
        tile_tokens: Keys of a tile, for the tooltips.
    """
    load = [0] * num_sm_parts
    for piece in pieces:
        load[piece.part] += piece.tiles
    scale = WIDTH / max([*load, 1])
    boxes, place = [], [0] * num_sm_parts
    for piece in pieces:
        x, y = LEFT + place[piece.part] * scale, piece.part * ROW + (ROW - BOX) / 2
        place[piece.part] += piece.tiles
        boxes.append(_box(piece, x, y, piece.tiles * scale, tile_tokens))
    labels = [
        f'<text x="{LEFT - 8}" y="{part * ROW + ROW * 0.68:g}" text-anchor="end">part {part}</text>'
        for part in range(num_sm_parts)
    ]
    foot = num_sm_parts * ROW
    lines = [f'<text x="{LEFT}" y="{foot + 16 * (i + 1)}">{escape(note)}</text>' for i, note in enumerate(notes)]
    width, height = LEFT + WIDTH + 8, foot + 16 * len(notes) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="12" role="img">',
            "<title>Which part computes which keys</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *labels,
            *boxes,
            *lines,
            "</svg>\n",
        ]
    )


def _box(piece: Piece, x: float, y: float, width: float, tile_tokens: int) -> str:
    """A piece, labelled where there is room, with the whole story in its tooltip."""
    keys = f"keys {piece.begin * tile_tokens} to {piece.end * tile_tokens} from the first visible tile"
    split = f", one of {piece.num_splits} pieces" if piece.num_splits > 1 else ""
    story = f"request {piece.request}, work {piece.work}: {keys}{split}"
    label = f"r{piece.request}.{piece.work}"
    text = ""
    if width >= 8 * len(label):
        text = f'<text x="{x + width / 2:g}" y="{y + BOX * 0.75:g}" text-anchor="middle" fill="white">{label}</text>'
    colour = COLOURS[piece.request % len(COLOURS)]
    return (
        f'<g><title>{escape(story)}</title><rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}" fill="{colour}"'
        f' stroke="white" rx="2"/>{text}</g>'
    )
