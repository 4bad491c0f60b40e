"""The cells of benchmarks/bench_fmha.py: what they count, what they compare with, and which ones the sampler draws."""

import importlib
import random
from pathlib import Path

import pytest
import torch
from attnops import reference

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cells(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fmha_cells")


@pytest.fixture
def law(cells):
    return importlib.import_module("fmha_law")


@pytest.fixture
def peers(cells):
    return importlib.import_module("fmha_peers")


@pytest.mark.parametrize("seed", range(200))
def test_pairs_and_visible_keys_are_those_of_the_mask(cells, seed):
    r = random.Random(seed)
    sq, sk, causal = r.randint(0, 40), r.randint(0, 40), r.random() < 0.5
    window_left, window_right = (r.choice([-1, 0, 1, 5, 50]) for _ in range(2))
    cell = cells.Cell((2, 1), [sq], [sk], 64, causal=causal, window_left=window_left, window_right=window_right)
    mask = reference.visibility(sq, sk, causal=causal, window_left=window_left, window_right=window_right)
    assert (cell.pairs, cell.num_visible) == (int(mask.sum()), int(mask.any(0).sum()))


def test_a_seed_draws_the_same_cells_a_third_in_each_range(law, cells):
    first, second = law.sample(5, 30), law.sample(5, 60)
    assert [c.params for c in first] == [c.params for c in second[:30]]
    assert [c.params for c in first] != [c.params for c in law.sample(6, 30)]
    for i, cell in enumerate(second):
        low, high = cells.THIRDS_MS[i % 3]
        assert low <= cell.roofline_ms < high and cell.third == i % 3
        assert cell.fits() and cell.heads[0] % cell.heads[1] == 0
        assert all(k >= q for q, k in zip(cell.q_lens, cell.k_lens)) or not cell.causal


@pytest.mark.parametrize("page", [0, 1, 24])
@pytest.mark.parametrize("options", [{}, {"window_left": 9}, {"sinks": True, "logit_cap": 2.0}, {"causal": False}])
def test_the_answer_is_that_of_the_reference_and_a_wrong_row_is_found(cells, peers, page, options):
    torch.manual_seed(1)
    q_lens, k_lens = ([5, 200, 1], [30, 333, 7]) if page or not options.get("causal", True) else ([5, 200, 1],) * 2
    cell = cells.Cell((6, 2), q_lens, k_lens, 64, 32, page, dtype=cells.FP16, table_tokens=1000, **options)
    cell.build(cells.Pools(2 * cell.slice_elements))
    keys = [cell._rows_of(b) for b in range(3)]
    k, v = ((x.flatten(0, 1) if page else x)[torch.cat(keys)].cpu() for x in cell.kv(0))
    options = {name: value for name, value in options.items() if name != "sinks"}
    sinks = cell.sink_logits.cpu() if cell.sinks else None
    bounds = (cell.cu_q.cpu(), cell.cu_k.cpu())
    expected, _ = reference.ragged_attention(cell.q(0).cpu(), k, v, *bounds, sinks=sinks, **options)
    for rows, part in cell.expected:
        torch.testing.assert_close(part.cpu(), expected[rows.cpu()])
    if cells.DEVICE == "cpu":
        out = peers.attnops(cell)(0)
        assert cell.relative_error(out) < 1e-3
        out[0] *= 1.5
        assert cell.relative_error(out) > 0.1
        out[17] = float("nan")
        assert cell.relative_error(out) == float("inf")


def test_every_row_of_the_fixed_grid_fits_the_pools(law):
    for cell in law.table() + law.hopper():
        assert cell.fits(), cell.name


def test_steps_of_a_model_are_timed_and_planned_once(cells, peers, monkeypatch):
    engine = importlib.import_module("bench_fmha_engine")
    shape = engine.Shape(3, 64, 96, (4, 2), 32, 32, 16, 3, 40, 8, 128)
    planned = []
    fill = peers.fill_plan
    monkeypatch.setattr(peers, "fill_plan", lambda *a: (planned.append(1), fill(*a)))
    cell = shape.cells()[1]
    assert (cell.q_lens, cell.k_lens) == ([16, 1, 1, 1], [32, 40, 40, 40])
    cell.build(cells.Pools(3 * cell.slice_elements))
    attention = peers.attnops(cell, "first")
    by_layer = engine.functools.partial(engine._of_layer, attention, cell.rotation)
    planned.clear()
    out = engine.Model(shape).step(by_layer)
    assert planned == [1] and out.shape == (19, 64) and bool(out.isfinite().all())
