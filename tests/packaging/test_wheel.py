"""One wheel for every Python from 3.10, and a source distribution that holds what it is built from."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import attnops
import pytest
from attnops.plugins import ENGINES

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAM = """
import attnops, attnops.explain, torch
from attnops.layers import RadixAttention
from attnops.metadata import XqaDecodePlan
from attnops.ops import layer_call
assert attnops.__file__.startswith({target!r}), attnops.__file__
out, lse = attnops.ops.merge_state(torch.ones(2, 1, 8), torch.zeros(2, 1), torch.zeros(2, 1, 8), torch.zeros(2, 1))
assert torch.equal(out, torch.full((2, 1, 8), 0.5)), out
plan = XqaDecodePlan.allocate(1, num_q_heads=2, num_kv_heads=1, head_dim=32)
lengths, table = torch.tensor([5], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
attnops.ops.xqa_decode_plan(plan, lengths)
keys, values = torch.zeros(1, 16, 1, 32), torch.ones(1, 16, 1, 32)
out, _ = attnops.ops.xqa_decode(torch.randn(1, 1, 2, 32), keys, values, table, lengths, plan)
torch.testing.assert_close(out, torch.ones_like(out))
assert attnops.explain.xqa_schedule([100], num_kv_heads=1, num_sm_parts=1)[0].tiles == 2
from importlib.metadata import entry_points
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (point,) = [found for found in entry_points(group=group) if found.name == "attnops"]
    assert point.load()() in (True, False), "an engine calls it in every process, whatever is installed"
print("cuda:", attnops.cuda_unavailable_reason)
"""


def run(command, **kwargs):
    result = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (ROOT / "build").mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with open(ROOT / "build/wheel.lock", "w") as lock:  # another process of this run may build as well
        fcntl.flock(lock, fcntl.LOCK_EX)
        run([sys.executable, ROOT / "tools/build_wheel.py", folder], env={**os.environ, "PATH": path}, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_tag_promises_every_python_from_3_10_and_a_linux(wheel):
    machine = sysconfig.get_platform().split("-")[-1]
    assert re.fullmatch(rf"attnops-[\d.]+-cp310-abi3-manylinux_2_\d+_{machine}\.whl", wheel.name), wheel.name
    tags = zipfile.ZipFile(wheel).read(f"attnops-{PYPROJECT['project']['version']}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in tags and "Tag: cp310-abi3-manylinux" in tags


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if not name.startswith("attnops-") and not name.endswith("/")}
    package = ROOT / "python"
    files = [path for path in package.glob("attnops/**/*") if path.suffix in {".py", ".pyi"}]
    python = {str(path.relative_to(package)) for path in files}
    cuda = {"attnops/_C_cuda.so"} if any(name.endswith("_C_cuda.so") for name in names) else set()
    assert inside == python | {"attnops/_C.so", "attnops/_layer_call.abi3.so"} | cuda | {"attnops/py.typed"}
    assert wheel.stat().st_size < 40e6


def test_the_wheel_uses_pythons_limited_api_alone(wheel):
    report = json.loads(run([sys.executable, "-m", "abi3audit", "--strict", "--report", wheel]))
    found = {module["name"]: module["result"] for module in report["specs"][str(wheel)]["wheel"]}
    assert {"_C.so", "_layer_call.abi3.so"} <= set(found)
    for name, result in found.items():
        assert result["is_abi3"] and not result["non_abi3_symbols"] and not result["future_abi3_objects"], name


def test_the_wheel_works_without_a_compiler(wheel, tmp_path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel])
    bare = {"PATH": "", "PYTHONPATH": str(target), "HOME": str(tmp_path)}
    run([sys.executable, "-c", PROGRAM.format(target=str(target))], env=bare, cwd=tmp_path)


def test_the_source_distribution_holds_what_is_compiled_and_configures(tmp_path):
    run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], cwd=ROOT)
    (archive,) = tmp_path.glob("attnops-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (tmp_path / "unpacked").iterdir()
    parts = ("csrc", "cmake", "third_party", "python")
    tracked = run(["git", "ls-files", *parts, "CMakeLists.txt", "setup.py", "LICENSE"], cwd=ROOT).split()
    missing = [name for name in tracked if not (source / name).exists() and (ROOT / name).exists()]
    assert not missing
    assert not list(source.rglob("*.so"))
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    torch_folder = Path(__import__("torch").__file__).parent
    options = [f"-DATTNOPS_TORCH={torch_folder}", f"-DPython_EXECUTABLE={sys.executable}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    build = tmp_path / "build"
    run([cmake, "-S", source, "-B", build, "-G", "Ninja", *options], env={**os.environ, "PATH": path})
    run([cmake, "--build", build, "--target", "_layer_call"], env={**os.environ, "PATH": path})
    assert (build / "_layer_call.abi3.so").exists()


def test_every_engine_has_an_extra_with_the_versions_that_its_plugin_serves():
    extras = PYPROJECT["project"]["optional-dependencies"]
    for name, engine in ENGINES.items():
        least, below = (".".join(map(str, numbers)) for numbers in (engine.least, engine.below))
        if name in extras:
            assert extras[name] == [f"{engine.packages[0]}>={least},<{below}"]
    assert {"triton", "flashinfer", "vllm", "sglang", "transformers", "docs", "test"} <= set(extras)
    listed = (ROOT / "requirements/docs.txt").read_text().splitlines()
    assert extras["docs"] == [line for line in listed if line and not line.startswith("#")]


def test_every_place_names_the_same_version():
    version = PYPROJECT["project"]["version"]
    assert attnops.__version__ == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    for page in ("README.md", "docs/install.md"):
        assert set(re.findall(r"attnops-([\d.]+)-cp", (ROOT / page).read_text())) == {version}
