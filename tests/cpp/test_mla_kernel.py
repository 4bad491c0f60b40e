"""mla_decode's CPU kernel on a software model of AMX, for processors that lack it; in C++, as the model is no part of
the library. The other instruction sets are tested through the op."""

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
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
FLAGS = {
    "csrc/cpu/avx2_tile_ops.cpp": AVX2,
    "csrc/cpu/avx512_tile_ops.cpp": AVX512,
    "csrc/cpu/avx512bf16_tile_ops.cpp": [*AVX512, "-mavx512bf16"],
    "csrc/cpu/amx_tile_ops.cpp": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mavx512vbmi"],
    "csrc/cpu/tile_ops.cpp": [],
    "csrc/cpu/isa.cpp": [],
    "csrc/mla_decode/cpu/kernel.cpp": [],
    "csrc/mla_decode/cpu/pieces.cpp": [],
    "csrc/mla_decode/cpu/reference.cpp": [],
    "tests/cpp/mla_kernel_check.cpp": [],
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
    if "avx512_bf16 page" in result.stdout:
        assert "amx page" in result.stdout
