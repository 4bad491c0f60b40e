"""The dashboard's arithmetic on rows made up for it, and `run_all.py`, which goes on where it stopped."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def dashboard(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("dashboard")


@pytest.fixture
def run_all(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = __import__("run_all")
    monkeypatch.setattr(module, "STATE", tmp_path / "build" / "run_all.json")
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def row(case, peer, ms, params=None, **more):
    return json.dumps(
        {"case": case, "peer": peer, "ms": ms, "params": params or {"n": 1}, "commit": "c", "device": "d"} | more
    )


def test_a_cell_is_beside_its_best_peer_and_its_runs_ceiling(dashboard):
    text = "\n".join(
        [
            row("ceiling", "read sweep", 0.0, gbs=4000.0),
            row("decode", "attnops", 0.01, gbs=2000.0),
            row("decode", "attnops rounded", 0.001),
            row("decode", "with plan", 0.001),
            row("decode", "slow", 0.04),
            row("decode", "quick", 0.02),
            row("decode", "attnops", 0.03, {"n": 2}),
            row("decode", "quick", 0.015, {"n": 2}),
            row("alone", "attnops", 0.01),
        ]
    )
    first, second = dashboard.cells_of(text)
    assert (first.peer, first.best, first.ratio, first.share) == ("quick", 20.0, 2.0, 0.5)
    assert second.ratio == pytest.approx(0.5) and second.share is None
    assert [cell.case for cell in dashboard.alone_in(text)] == ["alone"]
    listed = dashboard.slowest([("F", first), ("F", second)])
    assert "1 of 2 cells are slower" in listed and "0.50x" in listed and "2.00x" not in listed
    crowded = dashboard.slowest([("F", second)] * 5 + [("G", second)])
    assert crowded.count("| F |") == dashboard.OF_A_CASE and crowded.count("| G |") == 1


def test_peers_are_listed_with_their_versions(dashboard):
    text = "\n".join(
        [
            row("ceiling", "read sweep", 0.0),
            row("decode", "attnops", 1.0),
            row("decode", "old", 1.0),
            row("decode", "new", 1.0, version="2"),
            row("decode", "both", 1.0, version="1"),
            row("decode", "both", 1.0),
        ]
    )
    lines = dashboard.beside({"F": text}).strip().splitlines()[2:]
    assert lines == ["| F | both | 1; not recorded |", "| F | new | 2 |", "| F | old | not recorded |"]


def test_cells_are_named_for_readers(dashboard):
    assert dashboard.called("sampled xqa16 seed 31") == "drawn, GQA in 16 bits, seed 31"
    assert dashboard.called("sample 51") == "drawn, seed 51" and dashboard.called("store_kv") == "store_kv"
    params = {"heads": [32, 8], "head_dim": 128, "window_left": -1, "kv": "float8_e4m3fn", "causal": True, "tokens": 9}
    assert dashboard.described(params) == "heads 32/8, head dim 128, cache e4m3, causal"


def test_attnops_is_no_peer_of_itself(dashboard):
    text = "\n".join([row("d", "attnops", 0.02), row("d", "balanced", 0.01)])
    assert not dashboard.cells_of(text) and len(dashboard.alone_in(text)) == 1


def test_a_ceiling_may_be_in_a_rows_note(dashboard):
    text = "\n".join(
        [row("d", "attnops", 1.0, gbs=15.0, note="spread 1; read sweep 30.00 GB/s"), row("d", "torch", 2.0)]
    )
    assert dashboard.cells_of(text)[0].share == 0.5
    (alone,) = dashboard.alone_in(row("d", "attnops", 1.0, note="floor 640.0 us, 0.64 of it"))
    assert alone.share == 0.64


def test_every_result_file_with_peers_has_a_place_on_the_page(dashboard):
    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        if dashboard.cells_of(path.read_text()) and path.stem != "h200-step_overhead":
            assert path.stem in dashboard.FAMILIES, "add it to FAMILIES"


def test_run_all_goes_on_where_it_stopped(run_all, tmp_path, capsys):
    for name, code in (("one", "pass"), ("two", "raise SystemExit(3)"), ("slow", "import time; time.sleep(60)")):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'log')!r}, 'a').write({name!r} + ' ')\n{code}\n")
    jobs = [run_all.Job(name, f"{name}.py", (), "cpu") for name in ("one", "two", "slow")]
    assert run_all.run(jobs, 3, "cpu") == 1
    assert "failed with exit code 3" in (said := capsys.readouterr().out) and "stopped after" in said
    assert run_all.run(jobs[:2], 20, "cpu") == 1
    assert "done before" in capsys.readouterr().out
    assert (tmp_path / "log").read_text().split() == ["one", "two", "slow", "two"]
    assert run_all.run(jobs, 0, "cpu") == 0
    assert "left for the next call" in capsys.readouterr().out


def test_every_job_is_a_script_that_exists_and_takes_its_options(run_all):
    names = [job.name for job in run_all.JOBS]
    assert len(set(names)) == len(names)
    for job in run_all.JOBS:
        source = (BENCHMARKS / job.script).read_text()
        assert job.command("cpu-x")[0] == sys.executable and "CPU_NAME" not in job.command("cpu-x")
        assert all(f'"{option}"' in source for option in job.options if option.startswith("--"))
