"""Environment variables: a malformed one is an error, and `attnops.info` lists those that are set."""

from __future__ import annotations

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
