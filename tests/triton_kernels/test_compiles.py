"""The Triton ops compile for GPUs that are not here, within the shared memory of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")
ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_compiles_and_fits(arch, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests/support")])
    script = ROOT / "tests/support/triton_compile.py"
    command = [sys.executable, str(script), str(arch), str(SHARED_BYTES[arch])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in kernels].count("attend_kernel") == 6
    assert all(int(shared) <= SHARED_BYTES[arch] for _, shared in kernels)
