"""How Hopper's prefill divides a plan over CTAs, in C++ without a GPU: tests/cpp/fmha_works_check.cpp."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
WORK = "csrc/fmha/sm90/work.cuh"
FAULTS = {
    "(block - w.kv_head * s.blocks_per_group) * s.pack;": "block * s.pack;",
    "head < (w.kv_head + 1) * s.group}": "true}",
    "chunk = s.chunks - 1 - (step - from_last * s.chunks);": "chunk = s.chunks - 1;",
    "* (piece + 1) / pieces)": "* (piece + 1) / (pieces + 1))",
    "> cuts.limit;": ">= cuts.limit;",
}

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason="needs a C++ compiler")


def run(sources, folder):
    flags = ["-std=c++20", "-O1", "-w", f"-I{sources}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([CXX, *flags, ROOT / "tests/cpp/fmha_works_check.cpp", "-o", folder / "check"], check=True)
    return subprocess.run([folder / "check", "120"], capture_output=True, text=True)


def test_every_row_meets_its_keys_once(tmp_path):
    result = run(ROOT / "csrc", tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("right", FAULTS)
def test_faults_are_found(right, tmp_path):
    text = (ROOT / WORK).read_text()
    assert text.count(right) == 1, "the kernel's text has changed: plant this fault anew"
    wrong = tmp_path / "fmha/sm90/work.cuh"
    wrong.parent.mkdir(parents=True)
    wrong.write_text(text.replace(right, FAULTS[right]))
    assert run(tmp_path, tmp_path).returncode == 1
