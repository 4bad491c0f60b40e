"""Every test: fixed seed. Tests marked `gpu` run only with `-m gpu`, and only for ops that have a CUDA kernel.

Tests marked `triton`, which is done here, run Triton's kernels on the CPU and need TRITON_INTERPRET=1.
"""

import importlib
import importlib.util
import math
import os
import random
import re
import sys
import time
from pathlib import Path

import pytest
import torch

# The op whose CUDA kernel the `gpu` tests of a folder need. Planners have theirs whatever the family's kernel.
FAMILY_OPS = {
    "xqa_decode": "xqa_decode",
    "mla_decode": "mla_decode",
    "fmha": "fmha_varlen",
    "layer_call": "xqa_layer",
}


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        importlib.import_module("triton_interpreter").compute_as_a_gpu()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def flashinfer_stand_in(monkeypatch):
    """`attnops.compat.flashinfer`, which has FlashInfer's names and keywords, where the package would be."""
    stand_in = importlib.import_module("attnops.compat.flashinfer")
    stand_in.mla = stand_in
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", stand_in)
    return stand_in


def has_cuda_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"attnops::{op}", "CUDA")


def runs_in_interpreter(item):
    """Whether a CPU test runs Triton's kernels: it lies in their folder, or has "triton" as a value or in a list."""
    if item.get_closest_marker("gpu"):
        return False
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = any(value in ("triton", ["triton"]) for value in values if isinstance(value, (str, list)))
    return named or Path(item.path).parent.name == "triton_kernels"


# With this variable, tests run in an order by chance, and none begins after so many seconds (tools/sanitize.py).
TEST_SECONDS, BEGIN = float(os.environ.get("TEST_SECONDS", "inf")), time.monotonic()
# "2/5": of the tests that are chosen every fifth, from the third on.
PART, PARTS = map(int, os.environ.get("TEST_PART", "0/1").split("/"))


def pytest_collection_finish(session):
    session.items[:] = session.items[PART::PARTS]


def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and time.monotonic() - BEGIN > TEST_SECONDS:
        items = item.session.items
        ran = f"{items.index(item) + 1} of {len(items)} tests ran"
        item.session.shouldstop = f"TEST_SECONDS={TEST_SECONDS:g} are over, {ran}"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    if math.isfinite(TEST_SECONDS):
        random.Random(0).shuffle(items)
    for item in items:
        op = FAMILY_OPS.get(Path(item.path).parent.name)
        if op and item.get_closest_marker("gpu") and not has_cuda_kernel(op):
            item.add_marker(pytest.mark.skip(reason=f"{op} has no CUDA kernel in this build"))
        # Triton looks at the variable when its kernels are imported, so it belongs to a whole run of pytest.
        if runs_in_interpreter(item):
            item.add_marker(pytest.mark.triton)
            if "TRITON_INTERPRET" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="runs in Triton's interpreter: set TRITON_INTERPRET=1"))


# What a CUDA table may lack. bf16 and fp16 are served everywhere: a table that refuses them has lost a row, and fails.
MAY_BE_UNSERVED = {"float32", "float8_e4m3fn", "uint8"}


def refused_for_its_dtype(message):
    """Whether a CUDA table refused the call because no row takes its element types: an honest no, not a failure."""
    if "no kernel fits these arguments" not in message:
        return False
    listed = message.split("no kernel fits these arguments", 1)[1]
    reasons = re.findall(r"^\s*(?:E\s+)?[a-z]+\w*: (.+)$", listed, re.MULTILINE)
    got = [re.match(r"takes [\w ]+ of [\w ]+, got (\w+)", reason) for reason in reasons]
    return all(got) and bool(MAY_BE_UNSERVED & {match[1] for match in got})


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    if pyfuncitem.get_closest_marker("gpu") and isinstance(error, Exception) and refused_for_its_dtype(str(error)):
        outcome.force_exception(pytest.skip.Exception(f"no CUDA kernel takes these dtypes: {str(error)[:200]}"))


def pytest_sessionfinish(session):
    """TEST_COUNTS names a file that gets a line with the numbers of tests that passed and failed, errors with them."""
    path, reporter = os.environ.get("TEST_COUNTS"), session.config.pluginmanager.get_plugin("terminalreporter")
    if path and reporter and not hasattr(session.config, "workerinput"):
        passed, failed, errors = (len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error"))
        with open(path, "a") as file:
            file.write(f"{passed} {failed + errors}\n")
