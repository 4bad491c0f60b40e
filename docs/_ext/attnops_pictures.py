"""Pictures that the book makes of the code and of the results: plans by `explain --svg`, and the dashboard's plots."""

from __future__ import annotations

from pathlib import Path

import dashboard
from attnops import explain
from attnops.explain_svg import svg
from attnops.metadata.plan import TILE_TOKENS
from sphinx.application import Sphinx

# Name of the file: lengths of the requests, KV heads, parts, and options of the schedule.
PLANS = {
    "plan-balanced": ([4096, 300, 17], 2, 8, {}),
    "plan-fixed": ([4096, 300, 17], 2, 8, {"fixed_split_tokens": 1024}),
}


def draw(app: Sphinx) -> None:
    out = Path(app.srcdir) / "_generated"
    out.mkdir(exist_ok=True)
    for name, (lengths, heads, parts, options) in PLANS.items():
        pieces = explain.xqa_schedule(lengths, num_kv_heads=heads, num_sm_parts=parts, **options)
        (out / f"{name}.svg").write_text(svg(pieces, parts, [explain.balance(pieces, parts)], TILE_TOKENS))
    dashboard.write(out)


def setup(app: Sphinx) -> dict:
    app.connect("builder-inited", draw)
    return {"version": "1", "parallel_read_safe": True}
