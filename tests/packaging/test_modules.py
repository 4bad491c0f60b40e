"""What the compiled modules need from the machine that loads them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import attnops
import pytest

PACKAGE = Path(attnops.__file__).parent
STABLE = re.compile(r"^(aoti_torch_|torch_|aoti_)\w+$")  # the C functions of torch's stable ABI


def needs_tool(name):
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed (binutils)")


def module(name):
    path = PACKAGE / name
    if not path.exists():
        pytest.skip(f"{name} is not part of this build (no nvcc)")
    return path


def undefined_symbols(path):
    lines = subprocess.run(["nm", "-D", "--undefined-only", path], check=True, capture_output=True, text=True).stdout
    return [line.split()[-1].split("@")[0] for line in lines.splitlines()]


@needs_tool("nm")
@pytest.mark.parametrize("name", ["_C.so", "_C_cuda.so"])
def test_every_torch_symbol_is_of_the_stable_abi(name):
    torch_symbols = [s for s in undefined_symbols(module(name)) if "torch" in s or "c10" in s or "at::" in s]
    assert torch_symbols, "a module that uses no torch symbol registers nothing"
    foreign = [symbol for symbol in torch_symbols if not STABLE.match(symbol)]
    assert not foreign


@needs_tool("readelf")
def test_the_cuda_module_needs_torch_cuda_and_no_cuda_library():
    lines = subprocess.run(["readelf", "-d", module("_C_cuda.so")], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", lines)
    assert "libtorch_cuda.so" in needed
    # The CUDA runtime is linked in; a driver is not needed to load the module.
    assert not [name for name in needed if name.startswith(("libcudart", "libcuda.so"))]


def test_import_loads_no_optional_dependency():
    program = (
        "import sys, torch; before = set(sys.modules); import attnops;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    optional = {"triton", "transformers", "flashinfer", "matplotlib", "numpy", "safetensors"}
    assert not optional & set(re.findall(r"'(\w+)'", found))
