"""The fixed grids of decode: page tables as wide as asked for, and the sampler's peers."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def mla(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_DECODE_AUTO_CUDNN"):
        monkeypatch.setenv(name, "1")  # sampled_contenders sets what is unset
    return importlib.import_module("bench_mla_decode")


@pytest.fixture
def xqa(mla, monkeypatch):
    module = importlib.import_module("bench_xqa_decode")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


def problem_of(mla, **options):
    cell = mla.Cell(4, [100, 7, 65], page=16, **options)
    pool = torch.arange(3 * 13 * 16 * 576, dtype=torch.float32).view(-1, 576).bfloat16()
    return mla.Problem(cell, {"bf16": pool})


@pytest.mark.parametrize(("context", "columns"), [(0, 7), (64, 7), (2048, 128), (2049, 129)])
def test_tables_are_as_wide_as_asked_for(mla, xqa, context, columns):
    problem = problem_of(mla, context=context)
    assert problem.page_table.shape == (3, columns)
    assert problem.kv_indptr.tolist() == [0, 7, 8, 13]
    assert problem.page_table[1, 0] == problem.kv_indices[7] and problem.page_table[0].tolist()[7:] == [0] * (
        columns - 7
    )
    assert ("context" in problem.cell.params) == (context > 0)
    pool = torch.zeros(10**6, dtype=torch.bfloat16)
    cell = xqa.Cell((8, 2), [100, 7, 65], 16, context=context).build({torch.bfloat16: (pool, pool)})
    assert cell.page_table.shape == (3, columns) and ("context" in cell.params) == (context > 0)


def test_every_call_of_a_peer_reads_its_own_slice_and_none_plans(mla):
    problem = problem_of(mla)
    calls = []

    def prepare(sampled, *arguments):
        def step(r):
            calls.append((r % mla.sampled_contenders.PLAN_EVERY == 0, sampled.latents(r).data_ptr()))

        return step

    call = mla.sampled_call(prepare)(problem)
    assert calls == [(True, problem.pools[0].data_ptr())]
    assert problem.rotations == 3
    for r in range(problem.rotations):
        call(r)
    assert calls[1:] == [(False, pool.data_ptr()) for pool in problem.pools]


def test_a_peer_that_fails_or_errs_is_named_and_left_out(mla, monkeypatch, capsys):
    problem = problem_of(mla)
    right = torch.stack([problem.reference(request) for request in range(3)])

    def missing(problem):
        raise ModuleNotFoundError("no sgl_kernel here")

    peers = {"attnops": lambda p: lambda r: right, "FlashMLA": missing, "FA3 qv": lambda p: lambda r: right * 2}
    monkeypatch.setattr(mla, "peers_of", lambda cell: peers)
    assert list(mla.ready(problem)) == ["attnops"]
    said = capsys.readouterr().out
    assert "FlashMLA: ModuleNotFoundError: no sgl_kernel here" in said and "FA3 qv: RuntimeError: WRONG" in said


def test_who_may_take_a_cell_of_the_grid(mla):
    fi = {"FlashInfer fa2", "FlashInfer fa3"}
    for options, peers in (
        ({}, {"FlashMLA", "FA3 qv"} | fi),
        ({"page": 1}, {"FA3 qv"} | fi),
        ({"kv": "e4m3"}, {"FlashMLA", "attnops rounded"} | fi),
        ({"kv": "rows"}, set()),
        ({"fixed": 512}, set()),
    ):
        assert set(mla.peers_of(mla.Cell(128, [9], **options))) == {"attnops"} | peers


@pytest.fixture
def gqa_cell(xqa):
    def make(**options):
        dtype = options.get("kv_dtype", torch.bfloat16)
        pool = torch.zeros(10**6, dtype=torch.bfloat16).to(dtype)
        return xqa.Cell((8, 2), [100, 7, 65], **{"page_size": 16, **options}).build({dtype: (pool, pool)})

    return make


def test_the_grid_asks_whom_the_sampler_asks(xqa, gqa_cell):
    one = {"FA3", "FlashInfer fa2", "FlashInfer fa3", "FlashInfer cuda-core", "cuDNN", "XQA", "XQA hnd"}
    for options, peers in (
        ({}, one),
        ({"page_size": 1}, one - {"cuDNN", "XQA", "XQA hnd"}),
        ({"kv_dtype": torch.float8_e4m3fn}, one - {"FlashInfer fa3", "cuDNN"}),
        ({"seqlen_q": 4}, one - {"FlashInfer cuda-core"}),
    ):
        assert {name for name, _, _ in xqa.contenders(gqa_cell(**options))} == {"attnops"} | peers


def test_every_call_of_a_peer_of_gqa_reads_its_own_slice(xqa, gqa_cell, monkeypatch):
    cell, calls = gqa_cell(), []

    def prepare(sampled):
        def step(r):
            planned = r % xqa.sampled_contenders.PLAN_EVERY == 0
            calls.append((planned, [(x.data_ptr(), x.shape) for x in sampled.kv(r, hnd=True)]))

        return step

    monkeypatch.setattr(xqa.sampled_contenders, "peers", lambda asked: [("peer", prepare, True)])
    (_, prepared, _) = xqa.contenders(cell)[1]
    call = prepared()
    for r in range(3):
        call(r)
    expected = [(r == 0, [(x.data_ptr(), x.shape) for x in cell.kv(max(r - 1, 0), hnd=True)]) for r in range(4)]
    assert calls == expected and len({kv[0] for _, kv in calls}) == 3


@pytest.mark.parametrize(("case", "budgets"), [("bf16", [(12, 30)] * 2), ("sustained at 131072", [(700, 1 << 20)])])
def test_a_sustained_case_is_one_long_stretch(xqa, gqa_cell, monkeypatch, case, budgets):
    cell, asked = gqa_cell(), []

    def replay_ms(graph, budget_ms, most=30):
        asked.append((budget_ms, most))
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(xqa, "record_graph", lambda step, rotation: None)
    monkeypatch.setattr(xqa, "replay_ms", replay_ms)
    monkeypatch.setattr(cell, "relative_error", lambda *given: 0.001)
    (record,) = xqa.measure(cell, case, [("attnops", lambda: lambda r: None, False)], 12, 0.02)
    assert asked == budgets and record.state == case.split()[0].replace("bf16", "burst")
    assert record.ms == pytest.approx(2 / cell.rotation, abs=1e-6)
