"""Names what a build needs from the machine and cannot get from pip, with the command that installs it."""

import shutil
import sys
import sysconfig
from pathlib import Path

INSTALL = {
    "apt-get": "sudo apt-get install -y {debian}",
    "dnf": "sudo dnf install -y {fedora}",
    "brew": "brew install {brew}",
}


def how_to_install(debian: str, fedora: str, brew: str) -> str:
    for tool, command in INSTALL.items():
        if shutil.which(tool):
            return command.format(debian=debian, fedora=fedora, brew=brew)
    return f"install the package `{debian}` (its name on Debian)"


def missing_parts() -> list[str]:
    missing = []
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        missing.append(f"a C++20 compiler: {how_to_install('g++', 'gcc-c++', 'gcc')}")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append(f"Python's headers: {how_to_install('python3-dev', 'python3-devel', 'python3')}")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append(f"Python's venv module: {how_to_install('python3-venv', 'python3', 'python3')}")
    if sys.version_info < (3, 10):  # noqa: UP036  (this runs before anything that requires it)
        missing.append(f"Python 3.10 or newer (this is {sys.version.split()[0]}): set PYTHON=python3.x for make")
    return missing


if __name__ == "__main__":
    parts = missing_parts()
    if parts:
        sys.exit("attnops: this machine lacks\n" + "\n".join(f"  - {part}" for part in parts))
