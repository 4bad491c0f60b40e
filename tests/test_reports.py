"""The tables beside the measurements are those of the measurements, and the plots exist."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("op", ["xqa_decode", "mla_decode"])
def test_the_table_is_that_of_the_committed_rows(op, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for shared in ("records", "report"):  # modules of that folder, not of another
        monkeypatch.delitem(sys.modules, shared, raising=False)
    script = BENCHMARKS / f"report_{op}.py"
    spec = importlib.util.spec_from_file_location(script.stem, script)
    report = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, script.stem, report)  # where dataclasses look their module up
    spec.loader.exec_module(report)
    name = f"h200-{op}"
    written = BENCHMARKS / "results" / f"{name}.md"
    expected = report.table_text(report.read_cells(name), name)
    assert written.read_text() == expected, f"newer rows: run python benchmarks/report_{op}.py"
    assert written.with_suffix(".svg").stat().st_size > 1000
