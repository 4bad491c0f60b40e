"""The sets of tools/sanitize.py run every row of every impls.cpp under every tool, and select something."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from kernel_rows import ROWS

ROOT = Path(__file__).parent.parent
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]


def sets() -> dict[str, tuple[list[str], str]]:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SETS


def selects(expression: str, name: str) -> bool:
    """Whether `pytest -k expression` runs the test of this name."""
    return not expression or Expression.compile(expression).evaluate(lambda word, **_: word.lower() in name.lower())


def rows_of_the_tables() -> set[str]:
    tables = sorted((ROOT / "csrc").glob("*/impls.cpp"))
    # One test of these reaches all rows of its table, and says so itself.
    tables = [
        table for table in tables if table.parent.name not in {"fmha", "fp4_kv", "sparse_indexer", "delta_rule", "ssd"}
    ]
    assert {table.parent.name for table in tables} == {"xqa_decode", "mla_decode"}, "a table has no row tests"
    return {
        f"{table.parent.name} {row}"
        for table in tables
        for row in re.findall(r'^    \{"(\w+)",', table.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_of_every_table_is_run(tool):
    run = {
        row
        for name, (paths, expression) in sets().items()
        for row in ROWS
        if name.split()[0] == tool
        and "tests/test_kernel_rows.py" in paths
        and selects(expression, f"test_kernel_rows.py::test_every_row[{row}]")
    }
    assert {" ".join(row.split()[:2]) for row in run} == rows_of_the_tables()
    assert "test_dims_reach_every_row" in sets()[f"{tool} fmha every_row"][1]
    assert sets()[f"{tool} sparse_mla every_row"] == (["tests/sparse_mla/test_sparse_mla_rows.py"], "test_every_row")
    assert run == {row for row in ROWS if tool != "synccheck" or "ring" not in row}  # docs/sanitizer.md


@pytest.mark.parametrize("name", sets())
def test_every_set_names_tests_that_exist(name):
    """By the functions' names alone: parameters are pytest's business."""
    tool, (paths, expression) = name.split()[0], sets()[name]
    assert tool in TOOLS
    files = [f for path in paths for f in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("test_*.py"))]
    functions = {
        node.name for f in files for node in ast.parse(f.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    for word in re.findall(r"test_\w+", expression):
        assert any(word in function for function in functions), f"no test of {paths} is called {word}"


# Families whose kernels are run by the tests of another folder.
TESTED_WITH = {name: "linear" for name in ("causal_conv1d", "delta_conv", "delta_rule", "linear_state", "ssd")}


ONLY_MEMCHECK = {"context_parallel"}  # neither shared memory nor a barrier


@pytest.mark.parametrize("tool", TOOLS)
def test_every_family_with_kernels_has_a_set(tool):
    """Every tool runs GPU tests of every folder of `csrc/` that has kernels."""
    families = {path.parts[-3] for path in (ROOT / "csrc").glob("*/*/*.cu") if path.parts[-2] in {"cuda", "sm90"}}
    run = {path for name, (paths, _) in sets().items() if name.startswith(tool) for path in paths}
    run |= {"tests/xqa_decode", "tests/mla_decode"} if "tests/test_kernel_rows.py" in run else set()
    for family in (families | {"sparse_mla"}) - (ONLY_MEMCHECK if tool != "memcheck" else set()):
        tests = f"tests/{TESTED_WITH.get(family, family)}"
        assert any(path == tests or path.startswith(f"{tests}/") for path in run), f"add a {tool} set of {family}"
