"""A wheel of this tree as it is built, made and installed by pip: its entry points are those that users get."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install(place: Path) -> Path:
    """Installs the wheel into `place`/site, which it returns.

    Nothing is compiled: the modules are those that the package has. `tests/packaging` builds a wheel from the source.

    Raises:
        AssertionError: with what pip says.
    """
    source, site = place / "source", place / "site"
    shutil.copytree(ROOT / "python/attnops", source / "python/attnops", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    project = (ROOT / "pyproject.toml").read_text()
    declared = 'attnops = ["py.typed", "*.pyi"]'
    assert declared in project
    (source / "pyproject.toml").write_text(project.replace(declared, 'attnops = ["py.typed", "*.pyi", "*.so"]'))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    _run([*pip, "wheel", *options, "-w", str(place), str(source)])
    (wheel,) = place.glob("attnops-*.whl")
    _run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)])
    return site


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
