"""Environment variables: a malformed one is an error, and `attnops.info` lists those that are set."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attnops import environment, info
from attnops.environment import VARIABLES
from attnops.report import is_checked


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda one: one.name)
def test_a_malformed_variable_is_an_error_that_names_it(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.value() == variable.default
    monkeypatch.setenv(variable.name, "-3 apples")
    with pytest.raises(ValueError, match=f"environment variable {variable.name} must be .*, got '-3 apples'"):
        variable.value()


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda one: one.name)
def test_one_that_is_set_is_listed_with_its_value(variable, monkeypatch):
    texts = [text for text in ("1", "avx2", "80") if takes(variable, text)]
    for text in texts:
        monkeypatch.setenv(variable.name, text)
        listed = [line for line in environment.describe() if line.startswith(f"  {variable.name}=")]
        assert listed == [f"  {variable.name}={variable.parse(text)}: {variable.meaning}"]
    assert texts


def takes(variable, text: str) -> bool:
    try:
        return variable.parse(text) is not None
    except ValueError:
        return False


def test_every_variable_has_a_test_that_sets_it():
    """By its name as a text of its own; the flashinfer tiles are set by their two sides."""
    texts = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text())) if path != Path(__file__) else []
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    texts |= {f"SGLANG_FLASHINFER_{side}_SPLIT_TILE_SIZE" for side in ("DECODE", "PREFILL")}
    own = {"ATTNOPS_COMPAT_BF16_ROWS"}  # below
    assert {variable.name for variable in VARIABLES} <= texts | own


def test_compat_reads_its_variable_when_it_is_imported():
    program = "from attnops.compat import _flash_mla_sparse as module; print(module.BF16_ROWS)"
    for text, expected in ((None, "False"), ("1", "True"), ("0", "False")):
        given = {key: value for key, value in os.environ.items() if key != "ATTNOPS_COMPAT_BF16_ROWS"}
        given |= {} if text is None else {"ATTNOPS_COMPAT_BF16_ROWS": text}
        done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_those_that_are_set_are_listed(monkeypatch, capsys):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert environment.describe() == []
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    monkeypatch.setenv("SGLANG_TRITON_ATTENTION_NUM_KV_SPLITS", "none")
    assert is_checked()
    info.main(["--device", "cpu"])
    text = capsys.readouterr().out
    assert "  ATTNOPS_CHECK=True: " in text
    assert "SGLANG_TRITON_ATTENTION_NUM_KV_SPLITS must be a positive integer, got 'none'" in text
    monkeypatch.setenv("ATTNOPS_CHECK", "yes please")
    with pytest.raises(ValueError, match="ATTNOPS_CHECK must be 0 or 1"):
        is_checked()


@pytest.mark.parametrize("name", ["ATTNOPS_CPU_ISA", "TRITON_INTERPRET"])
def test_what_hinders_the_description_itself_is_listed_first(name, monkeypatch):
    monkeypatch.setenv("ATTNOPS_VLLM_CPU", "1")
    monkeypatch.setenv(name, "7 pears")
    with pytest.raises(SystemExit) as stopped:
        info.main([])
    text = str(stopped.value)
    assert "  ATTNOPS_VLLM_CPU=True: " in text and f"environment variable {name} must be" in text
    assert name in text.splitlines()[-1]
