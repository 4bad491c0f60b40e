"""The sets of tools/sanitize.py run every row of every impls.cpp under every tool, and select something."""

import ast
import importlib.util
import itertools
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
    # Tests of these reach all rows of their table, and say so themselves.
    tables = [table for table in tables if table.parent.name not in {"fmha", "sparse_indexer", "delta_rule", "ssd"}]
    assert {table.parent.name for table in tables} == {"xqa_decode", "mla_decode"}, "a table has no row tests"
    return {
        f"{table.parent.name} {row}"
        for table in tables
        for row in re.findall(r'^    \{"(\w+)",', table.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_of_every_table_is_run(tool):

    def serves(row: str) -> bool:
        return tool != "synccheck" or "ring" not in row  # docs/sanitizer.md

    run = {
        row
        for name, (paths, expression) in sets().items()
        for row in ROWS
        if name.split()[0] == tool
        and "tests/test_kernel_rows.py" in paths
        and selects(expression, f"test_kernel_rows.py::test_every_row[{row}]")
    }
    assert {" ".join(row.split()[:2]) for row in run} == {row for row in rows_of_the_tables() if serves(row)}
    assert "test_dims_reach_every_row" in sets()[f"{tool} fmha every_row"][1]
    assert sets()[f"{tool} fmha forms"] == (["tests/fmha/test_fmha_cuda.py"], "test_every_form")
    assert sets()[f"{tool} sparse_mla every_row"] == (["tests/sparse_mla/test_sparse_mla_rows.py"], "test_every_row")
    assert run == {row for row in ROWS if serves(row)}


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
TESTED_WITH = {name: "linear" for name in ("causal_conv1d", "conv_step", "delta_rule", "linear_state", "ssd")}


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


# Tests whose captured call allocates nothing. The tools run with torch's caching allocator off, and then a capture may
# not allocate.
CAPTURE_NOTHING_NEW = {
    "tests/linear/test_one_launch_or_two.py::test_two_launches_are_replayed_and_allocate_nothing",
    "tests/planning/test_cuda_plans.py::test_one_captured_graph_plans_every_length",
    "tests/xqa_decode/test_xqa_decode_cuda.py::test_batch_invariant_bits_in_any_company_and_under_replay",
}
CAPTURES = re.compile(r"cuda\.graph\(|CudaGraphs\(")


def may_select(expression: str, name: str, others: set[str]) -> bool:
    """Whether `pytest -k expression` runs the test of this name with some parameters.

    Words of parameters may hold or not: those that are in the name of none of the `others`, the tests of the set.
    """
    words = set(re.findall(r"[\w-]+", expression)) - {"and", "or", "not"}
    free = [word for word in sorted(words) if not any(word.lower() in other.lower() for other in others)]
    for chosen in itertools.product((False, True), repeat=len(free)):
        values = dict(zip(free, chosen))
        matcher = lambda word, values=values, **_: values.get(word, word.lower() in name.lower())  # noqa: E731
        if not expression or Expression.compile(expression).evaluate(matcher):
            return True
    return False


def capturing_tests() -> set[tuple[str, str]]:
    """(file, test): GPU tests that capture a graph, by themselves or through functions that they call by name."""

    def bodies_of(path: Path) -> dict[str, str]:
        return {
            node.name: ast.unparse(node)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }

    support = {path.stem: bodies_of(path) for path in (ROOT / "tests" / "support").glob("*.py")}
    found = set()
    for path in (ROOT / "tests").glob("*/test_*.py"):
        text = path.read_text()
        if "mark.gpu" not in text:
            continue
        bodies = bodies_of(path)
        for module, names in re.findall(r"^from (\w+) import (.*)$", text, re.MULTILINE):
            bodies |= {name: support[module][name] for name in names.split(", ") if name in support.get(module, {})}
        capturing = {name for name, body in bodies.items() if CAPTURES.search(body)}
        calls = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(capturing))) + r")\(")
        if capturing:
            capturing |= {name for name, body in bodies.items() if calls.search(body)}
        found |= {(str(path.relative_to(ROOT)), name) for name in capturing if name.startswith("test_")}
    return found


def names_of(paths: list[str]) -> set[str]:
    files = [f for path in paths for f in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("test_*.py"))]
    return {
        f"{f.relative_to(ROOT)}::{node.name}"
        for f in files
        for node in ast.parse(f.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def test_no_set_captures_what_allocates():
    captured = {f"{path}::{test}" for path, test in capturing_tests()}
    assert "tests/sparse_mla/test_sparse_replays.py::test_a_thousand_replays_equal_eager_bit_for_bit" in captured
    run = {
        test
        for paths, expression in sets().values()
        for test in captured & names_of(paths)
        if may_select(expression, test, names_of(paths))
    }
    assert run <= CAPTURE_NOTHING_NEW, f"leave them out by name, or show that they allocate nothing: {run}"
    assert run >= CAPTURE_NOTHING_NEW, f"no set runs them: {CAPTURE_NOTHING_NEW - run}"
