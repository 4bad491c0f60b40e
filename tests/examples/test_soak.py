"""A short soak (tools/soak.py): nothing leaks, and every text is the one of an unloaded server."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from soak import Engine, Request, Soak, SoakFailed


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_short_soak(kind):
    figures = Soak(kind, seed=5).run(seconds=4)
    assert figures.waves >= 3 and figures.replays and figures.cancelled
    assert figures.preempted and figures.evicted_pages and figures.reused_tokens, figures


def test_a_leak_is_found():
    soak = Soak("gqa", seed=5)
    engine = Engine(soak.unloaded, 24)
    engine.allocator.alloc(1)
    with pytest.raises(SoakFailed, match="1 pages are held"):
        soak._check_pages(engine)


def test_another_text_is_found():
    soak, request = Soak("gqa", seed=5), Request(0, [1, 2, 3], 5)
    request.tokens += [4, 5, 6, 7, 8]
    with pytest.raises(SoakFailed, match="alone"):
        soak._check_text(request)
