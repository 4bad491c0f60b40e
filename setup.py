"""Builds the compiled modules with CMake and ninja and places them in the package.

Environment:
    ATTNOPS_BUILD_CUDA: 1 to build the CUDA module, 0 not to; by default, when nvcc is found.
    ATTNOPS_ARCHS: GPU architectures, "80;90a" by default.
    ATTNOPS_FAMILIES: glob of op families whose CUDA kernels are built, for a developer's inner loop.
    ATTNOPS_LINEINFO: 1 to keep line numbers in kernels, for profilers; the CUDA module is then three times larger.
    CUTLASS_DIR: a CUTLASS source tree, instead of the nvidia-cutlass package.
    MAX_JOBS: parallel compilations, the number of cores by default.
    ATTNOPS_SANITIZE: sanitizers of gcc for the CPU module, such as "address,undefined" (tools/sanitize_cpu.py).
    ATTNOPS_BUILD_DIR: where CMake works, build/<platform> by default.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
MODULES = ("_C.so", "_C_cuda.so", "_layer_call.abi3.so")
OLDEST_PYTHON = "cp310"  # of the limited API that _layer_call is compiled for: CMakeLists.txt


def package_dir(name: str) -> Path:
    """Folder of an installed package, without importing it: importing torch here would cost seconds."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"attnops: building needs the package {name}: `pip install {name}`")
    return Path(spec.origin).parent


def pybind11_dir() -> Path | str:
    """Where CMake finds pybind11; empty without it. `make build` installs it."""
    if importlib.util.find_spec("pybind11") is None:
        return ""
    return package_dir("pybind11") / "share" / "cmake" / "pybind11"


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def wants_cuda() -> bool:
    asked = os.environ.get("ATTNOPS_BUILD_CUDA", "")
    if asked == "1" and not find_nvcc():
        raise SystemExit("attnops: ATTNOPS_BUILD_CUDA=1, but no nvcc: install the CUDA toolkit, or put nvcc on PATH")
    return asked == "1" or (asked != "0" and find_nvcc() is not None)


class FreshBuild(build):
    """Collects a wheel's files in an empty folder: what an earlier build left there must not enter the wheel."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def place(source: Path, target: Path) -> None:
    """A new file of the name: processes that have the old one open keep it."""
    part = target.with_name(f"{target.name}.part")
    shutil.copy2(source, part)
    part.replace(target)


class CMakeBuild(build_ext):
    def run(self):
        build = Path(os.environ.get("ATTNOPS_BUILD_DIR", ROOT / "build" / sysconfig.get_platform()))
        cuda = wants_cuda()
        options = {
            "ATTNOPS_TORCH": package_dir("torch"),
            # The planners for tests, in checkouts alone: a module of pybind11 is tied to one Python, a wheel is not.
            "ATTNOPS_PYBIND11": pybind11_dir() if self.inplace else "",
            "ATTNOPS_CUDA": "ON" if cuda else "OFF",
            "ATTNOPS_ARCHS": os.environ.get("ATTNOPS_ARCHS", "80;90a"),
            "ATTNOPS_FAMILIES": os.environ.get("ATTNOPS_FAMILIES", "*"),
            "ATTNOPS_LINEINFO": os.environ.get("ATTNOPS_LINEINFO", "0"),
            "ATTNOPS_SANITIZE": os.environ.get("ATTNOPS_SANITIZE", ""),
            "Python_EXECUTABLE": sys.executable,
        }
        if cuda:
            options["CMAKE_CUDA_COMPILER"] = find_nvcc()
        defines = [f"-D{name}={value}" for name, value in options.items()]
        subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *defines], check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        subprocess.run(["cmake", "--build", build, "-j", jobs], check=True)
        self._place(build, ROOT / "python/attnops" if self.inplace else Path(self.build_lib) / "attnops")

    def _place(self, build: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in MODULES:
            if (build / name).exists():
                place(build / name, target / name)
        scheduler = "_scheduler" + sysconfig.get_config_var("EXT_SUFFIX")
        if self.inplace and (build / scheduler).exists():
            place(build / scheduler, ROOT / "tests/support" / scheduler)

    def get_outputs(self):
        return [str(path) for path in (Path(self.build_lib) / "attnops").glob("*.so")]


setup(
    ext_modules=[Extension("attnops._C", sources=[], py_limited_api=True)],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": OLDEST_PYTHON}},
)
