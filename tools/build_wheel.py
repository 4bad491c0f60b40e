"""Builds the wheel, and names in its tag the oldest Linux that it runs on.

``python tools/build_wheel.py [folder]``, "dist" by default. setuptools tags a wheel "linux_x86_64", which no index
takes. auditwheel reads which glibc the modules need and writes that into the tag (manylinux_2_34, say).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Torch's libraries come with torch, the driver with the machine: a wheel brings neither.
FROM_ELSEWHERE = ("libtorch*.so", "libc10*.so", "libcuda.so.1")


def build(folder: Path) -> Path:
    """The wheel in `folder`, from this checkout, with the packages of this environment.

    Raises:
        SystemExit: with the output of the step that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
        run([*pip, "--no-deps", "--no-build-isolation", "-w", work, ROOT])
        (plain,) = Path(work).glob("attnops-*.whl")
        excluded = [f"--exclude={name}" for name in FROM_ELSEWHERE]
        run([sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", f"{work}/tagged", plain])
        (tagged,) = Path(work, "tagged").glob("attnops-*.whl")
        target = folder / tagged.name
        target.write_bytes(tagged.read_bytes())
        return target


def run(command: list) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{result.stdout}{result.stderr}\nattnops: `{' '.join(map(str, command))}` failed")


if __name__ == "__main__":
    wheel = build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist"))
    sys.stdout.write(f"{wheel} {wheel.stat().st_size / 1e6:.1f} MB\n")
