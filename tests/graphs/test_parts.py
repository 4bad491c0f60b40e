"""Sizes that engines choose, the report of memory, and the progress bar."""

from __future__ import annotations

import importlib.util
import itertools
import sys

import pytest
from attnops.graphs import MemoryReport, capture_sizes, pad_to_size, token_buckets
from attnops.graphs.progress import reporting


def test_sizes_are_those_of_the_engines():
    assert capture_sizes(1) == [1]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(300)[-4:] == [256, 272, 288, 300]
    assert len(capture_sizes(512)) == 51
    assert capture_sizes(24, "sglang") == [1, 2, 4, 8, 12, 16, 24]
    assert capture_sizes(600, "sglang")[-5:] == [496, 512, 544, 576, 600]
    assert capture_sizes(16, "sglang_speculative") == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert capture_sizes(5, "every") == [1, 2, 3, 4, 5]
    assert capture_sizes(20, multiple_of=8) == [8, 16, 24]
    with pytest.raises(ValueError, match="must be positive, got 0"):
        capture_sizes(0)
    with pytest.raises(ValueError, match=r"like must be one of vllm, sglang, .*, got 'trt'"):
        capture_sizes(8, "trt")
    with pytest.raises(ValueError, match="multiple_of must be positive"):
        capture_sizes(8, multiple_of=0)


def test_buckets_of_tokens_grow_by_a_third_at_most():
    buckets = token_buckets(8000)
    assert buckets[:8] == [1, 2, 4, 8, 16, 24, 32, 48] and buckets[-1] == 8000
    assert all(3 * b <= 4 * a for a, b in itertools.pairwise(buckets) if b > 48)
    assert token_buckets(3) == [1, 2, 3]


def test_a_batch_takes_the_smallest_size_that_holds_it():
    assert [pad_to_size([1, 4, 8], count) for count in (0, 1, 2, 4, 5, 8, 9)] == [1, 1, 4, 4, 8, 8, None]


def test_the_report_says_what_each_size_and_piece_took():
    mib = 2**20
    report = MemoryReport(mib, {16: (3 * mib, 5 * mib, mib), 4: (0, 0, mib)}, 8 * mib, "tokens")
    assert report.graphs == {16: 9 * mib, 4: mib} and report.total == 11 * mib
    assert str(report).splitlines() == [
        "    16 tokens:     9.0 MiB in 3 pieces, at most 5.0 MiB (piece 1)",
        "     4 tokens:     1.0 MiB in 3 pieces, at most 1.0 MiB (piece 2)",
        "pool of the graphs: 8.0 MiB",
        "static inputs and outputs: 1.0 MiB",
    ]


class FakeTerminal:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self): ...

    def isatty(self):
        return True


def test_a_bar_is_drawn_on_a_terminal_and_can_be_turned_off(monkeypatch):
    for progress, drawn in ((True, True), (False, False)):
        terminal = FakeTerminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with reporting(progress, 3, "segments") as report:
            for done in (1, 2, 3):
                report(done, 3, 8)
        assert ("capturing segments" in terminal.text and "size 8" in terminal.text) == drawn


def test_without_a_terminal_or_without_tqdm_nothing_is_drawn(monkeypatch, capfd):
    with reporting(True, 1, "graphs") as report:
        report(1, 1, 8)
    assert capfd.readouterr().err == ""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tqdm" else find_spec(name))
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with reporting(True, 1, "graphs") as report:
        report(1, 1, 8)
    assert terminal.text == ""
