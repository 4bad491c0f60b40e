"""xqa_decode's AMX row on a software model of AMX, for processors that lack it. The other rows are tested by the op."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(
    shutil.which(CXX) is None or os.uname().machine != "x86_64", reason="needs a C++ compiler on x86-64"
)
AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"]
FLAGS = {
    "csrc/xqa_decode/cpu/instantiations/amx_bfloat16.cpp": [*AVX512, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"],
    "csrc/cpu/isa.cpp": [],
    "tests/cpp/xqa_kernel_check.cpp": [],
}


def test_tiles_equal_the_reference_on_the_amx_model(tmp_path):
    base = [CXX, "-std=c++20", "-O2", "-DATTNOPS_EMULATE_AMX", f"-I{ROOT / 'csrc'}", "-c"]
    objects = [tmp_path / f"{i}.o" for i in range(len(FLAGS))]
    jobs = [[*base, *flags, ROOT / source, "-o", out] for (source, flags), out in zip(FLAGS.items(), objects)]
    running = [subprocess.Popen(job) for job in jobs]
    assert [process.wait() for process in running] == [0] * len(running)
    subprocess.run([CXX, *objects, "-o", tmp_path / "check"], check=True)
    result = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
