"""Conversions of the CPU's element types, in C++: tests/cpp/convert_check.cpp."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason="needs a C++ compiler")


def test_nan_of_every_payload_becomes_nan_without_overflow(tmp_path):
    flags = ["-std=c++20", "-O0", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", f"-I{ROOT / 'csrc'}"]
    subprocess.run([CXX, *flags, ROOT / "tests/cpp/convert_check.cpp", "-o", tmp_path / "check"], check=True)
    result = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout or f"undefined arithmetic: signal {-result.returncode}"
