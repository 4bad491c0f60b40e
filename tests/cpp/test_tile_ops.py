"""The CPU tile operations against plain loops, in C++: every instruction set of this processor, and AMX by a software
model of its instructions where the processor lacks them. Also that their objects cannot leak into the rest."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(
    shutil.which(CXX) is None or os.uname().machine != "x86_64", reason="needs a C++ compiler on x86-64"
)


def isa_flags() -> dict[str, list[str]]:
    """The compiler flags of each instruction set, as the build has them."""
    flags: dict[str, list[str]] = {}
    for name, text in re.findall(r"set\(ATTNOPS_ISA_(\w+) ([^)]*)\)", (ROOT / "cmake/attnops.cmake").read_text()):
        for word in text.split():
            base = re.fullmatch(r"\$\{ATTNOPS_ISA_(\w+)\}", word)
            flags.setdefault(name, []).extend(flags[base[1]] if base else [word])
    return flags


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Each ISA's source and the portable ones, compiled; AMX twice, for the processor and for the model."""
    folder = tmp_path_factory.mktemp("tile_ops")
    base = [CXX, "-std=c++20", "-O2", "-fPIC", f"-I{ROOT / 'csrc'}", "-c"]
    jobs = {name: [ROOT / f"csrc/cpu/{name}_tile_ops.cpp", *flags] for name, flags in isa_flags().items()}
    jobs["amx_model"] = [*jobs["amx"], "-DATTNOPS_EMULATE_AMX"]
    jobs["isa"] = [ROOT / "csrc/cpu/isa.cpp"]
    jobs["tile_ops"] = [ROOT / "csrc/cpu/tile_ops.cpp"]
    jobs["main"] = [ROOT / "tests/cpp/tile_ops_check.cpp"]
    jobs["main_model"] = [*jobs["main"], "-DATTNOPS_EMULATE_AMX"]
    paths = {name: folder / f"{name}.o" for name in jobs}
    running = [subprocess.Popen([*base, *job, "-o", paths[name]]) for name, job in jobs.items()]
    assert [process.wait() for process in running] == [0] * len(running)
    return paths


@pytest.mark.parametrize("amx", ["amx", "amx_model"])
def test_against_plain_loops(objects, amx, tmp_path):
    main = "main_model" if amx == "amx_model" else "main"
    names = ["avx2", "avx512", "avx512bf16", amx, "isa", "tile_ops", main]
    subprocess.run([CXX, *(objects[name] for name in names), "-o", tmp_path / "check"], check=True)
    result = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    if amx == "amx_model" and "avx512_bf16" in result.stdout:
        assert "amx_bf16" in result.stdout


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_objects_define_only_their_table(objects):
    """A weak symbol compiled with AVX-512 could be the one that the linker keeps for a processor without it."""
    for name in isa_flags():
        symbols = subprocess.run(["nm", "--defined-only", "-C", objects[name]], capture_output=True, text=True).stdout
        shared = [
            line for line in symbols.splitlines() if re.search(r" [A-Z] ", line) and not re.search(r" [RDB] ", line)
        ]
        assert len(shared) == 1 and f"{name}_tile_ops()" in shared[0], shared
