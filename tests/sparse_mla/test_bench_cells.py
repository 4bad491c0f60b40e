"""The law of benchmarks/bench_sparse_sampled.py: what a seed draws, and contenders that agree with each other."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SETS = ["rows656", "rows584", "rows576", "prefill656", "prefill576", "paged_logits", "logits", "topk"]


@pytest.fixture
def sampled(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_sparse_sampled")


@pytest.mark.parametrize("name", SETS)
def test_a_seed_draws_the_same_cells_a_third_in_each_range(sampled, name):
    first, second = list(sampled.cells(name, 5, 12)), list(sampled.cells(name, 5, 24))
    assert first == second[:12] and first != list(sampled.cells(name, 6, 12))
    for i, cell in enumerate(second):
        low, high = [(0, 10), (10, 100), (100, float("inf"))][i % 3]
        assert low <= cell.roofline < high and cell.fits and cell.rows == name


def test_seeds_that_were_judged_draw_what_they_drew(sampled):
    """The sets of decode, before others were added."""
    names = [cell.name for cell in sampled.cells("rows656", 29, 3)]
    assert names == [
        "12 heads, 3 x1, lists of 106, page 238",
        "64 heads, 268 x1, lists of 945, page 9",
        "128 heads, 53 x7, lists of 2048 at most, page 72",
    ]


def test_lists_of_contenders_are_compared_in_any_order(sampled):
    indexer = importlib.import_module("bench_indexer")
    logits = torch.randn(3, 50)
    chosen = logits.topk(9)[1].int()
    other = torch.cat([chosen.flip(1), torch.full((3, 2), -1)], 1)
    digest = indexer.selected(logits)
    assert indexer.difference(digest(other), digest(chosen)) < 1e-12
    other[1, 0] = int(logits[1].argmin())
    assert indexer.difference(digest(other), digest(chosen)) > 1e-3
    lengths = torch.tensor([50, 3, 0])
    spoiled = logits.clone()
    spoiled[1, 3:], spoiled[2] = float("nan"), float("nan")
    seen = indexer.in_rows(lengths)
    assert indexer.difference(seen(spoiled), seen(logits)) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is of the CPU")
@pytest.mark.parametrize("name", ["prefill576", "paged_logits", "logits", "topk"])
def test_small_cells_are_measured(sampled, name):
    cell = sampled.made_small(next(sampled.cells(name, 1, 1)))
    times = sampled.SampledBench().measure(cell, 1)
    assert times["attnops"] > 0


def _fails(*given, **options):
    raise RuntimeError("it has no kernel\nand more")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is of the CPU")
def test_a_peer_that_fails_or_differs_is_named_and_left_out(sampled, monkeypatch, capsys):
    indexer, cells = importlib.import_module("bench_indexer"), importlib.import_module("sampled_indexer")
    calls = {"broken": _fails, "wrong": lambda: torch.zeros(2, 64, dtype=torch.int32)}
    monkeypatch.setattr(cells, "_found", [SimpleNamespace(topk=lambda *given: dict(calls))])
    times = sampled.SampledBench().measure(cells.TopkCell("topk", 2, 600, 64, True), 1)
    said = capsys.readouterr().out
    assert list(times) == ["attnops"]
    assert "broken: it has no kernel\n" in said and "wrong: differs from attnops by" in said

    bench = indexer.IndexerBench(sustained=False)
    logits = torch.randn(2, 64)
    ours = {"attnops": lambda: logits.topk(3)[1], "broken": _fails}
    bench.cell("topk_select", {}, ours, 1, digest=indexer.selected(logits))
    assert [record.peer for record in bench.records] == ["attnops"]
    assert "broken refused {}: it has no kernel\n" in capsys.readouterr().out


def test_a_schedule_that_fails_leaves_deep_gemm_out(sampled, monkeypatch, capsys):
    indexer = importlib.import_module("bench_indexer")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    peers = indexer.Peers()
    peers.deep_gemm = SimpleNamespace(get_paged_mqa_logits_metadata=_fails)
    keys = indexer.PagedKeys(2, 128)
    given = (keys.q, keys.pages, keys.table, keys.weights, keys.lengths[:, None], 128)
    assert peers.paged_logits(*given) == {}
    assert "DeepGEMM makes no schedule of [2, 1]: it has no kernel\n" in capsys.readouterr().out
    answer = torch.zeros(2, 128)
    for name in ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"):
        made = {
            "get_paged_mqa_logits_metadata": lambda *given: torch.zeros(133, 2),
            name: lambda *given, **more: answer,
        }
        peers.deep_gemm = SimpleNamespace(**made)
        assert peers.paged_logits(*given)["DeepGEMM"]() is answer
