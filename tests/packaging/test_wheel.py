"""One wheel, installed into an empty folder and used without a compiler on the PATH."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import attnops, torch
assert attnops.__file__.startswith({target!r}), attnops.__file__
out, lse = attnops.ops.merge_state(torch.ones(2, 1, 8), torch.zeros(2, 1), torch.zeros(2, 1, 8), torch.zeros(2, 1))
assert torch.equal(out, torch.full((2, 1, 8), 0.5)), out
print("cuda:", attnops.cuda_unavailable_reason)
"""


def run(command, **kwargs):
    result = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_wheel_works_without_a_compiler(tmp_path):
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], env={**os.environ, "PATH": path})
    (wheel,) = tmp_path.glob("attnops-*.whl")
    assert wheel.stat().st_size < 100e6, "a wheel stays under 100 MB"

    target = tmp_path / "site"
    run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel])
    bare = {"PATH": "", "PYTHONPATH": str(target), "HOME": str(tmp_path)}
    run([sys.executable, "-c", PROGRAM.format(target=str(target))], env=bare, cwd=tmp_path)
