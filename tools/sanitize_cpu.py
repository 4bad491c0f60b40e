"""Builds the CPU modules with gcc's sanitizers and runs tests and the fuzzer over them. A finding ends the process.

    python tools/sanitize_cpu.py                      both
    python tools/sanitize_cpu.py address,undefined    tests of every op, and the fuzzer
    python tools/sanitize_cpu.py thread               what threads share
    python tools/sanitize_cpu.py thread --cases 200 --paths tests/layer_call

torch itself is not instrumented, and neither is OpenMP, so:

* leaks are not asked for (Python and torch keep memory until they exit), nor whether `new` and `delete` of memory that
  crosses the border to torch agree on its size;
* ThreadSanitizer does not see how OpenMP hands work to its threads and takes it back. `torch_bindings/tsan_parallel.h`
  tells it; accesses of libraries that are not instrumented are left out (`ignore_noninstrumented_modules`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "address,undefined": {
        "ASAN_OPTIONS": "detect_leaks=0:new_delete_type_mismatch=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66:history_size=4"},
}
# Subprocesses that compile or measure are left out: what they start would be slow or without the preloaded library.
PATHS = {
    "address,undefined": [
        *("merge_state", "paged_kv", "layer_call", "device_values", "fp4_kv", "sparse_mla", "sparse_indexer"),
        *("speculation", "linear", "xqa_decode", "mla_decode", "fmha"),
    ],
    "thread": ["layer_call", "device_values"],
}


def build(sanitizers: str) -> Path:
    """A copy of the package with instrumented modules; the folder to put on PYTHONPATH."""
    work = ROOT / "build" / f"sanitize-{sanitizers.replace(',', '-')}"
    library = work / "lib"
    environment = {**os.environ, "ATTNOPS_SANITIZE": sanitizers, "ATTNOPS_BUILD_CUDA": "0"}
    environment["ATTNOPS_BUILD_DIR"] = str(work)
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--build-lib", str(library)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "attnops", library / "attnops", ignore=ignored, dirs_exist_ok=True)
    return library


def parts_of(sanitizers: str, cases: int, paths: list[str]) -> dict[str, list[str]]:
    """Commands by name. A folder of tests each, so that the times show which of them takes long."""
    options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "--import-mode=importlib"]
    chosen = paths or [f"tests/{name}" for name in PATHS[sanitizers]]
    parts = {path: [sys.executable, "-m", "pytest", *options, path] for path in chosen}
    parts["fuzzer"] = [sys.executable, "-m", "tests.fuzz", "--seed", "20", "--cases", str(cases), "--jobs", "2"]
    return parts


def run(sanitizers: str, cases: int, paths: list[str]) -> bool:
    """Whether tests and fuzzer found nothing."""
    begin = time.monotonic()
    library = build(sanitizers)
    print(f"{sanitizers}: built in {time.monotonic() - begin:.0f} s", flush=True)
    found = subprocess.run(["gcc", f"-print-file-name={LIBRARIES[sanitizers]}"], capture_output=True, text=True)
    # libstdc++ beside it: the sanitizer looks for __cxa_throw before torch has brought it.
    preload = f"{found.stdout.strip()}:libstdc++.so.6"
    environment = {**os.environ, **OPTIONS[sanitizers], "LD_PRELOAD": preload, "PYTHONPATH": str(library)}
    environment["OMP_WAIT_POLICY"] = "passive"
    clean = True
    for name, command in parts_of(sanitizers, cases, paths).items():
        begin = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        clean &= status == 0
        print(f"{sanitizers}: {name}: exit {status} after {time.monotonic() - begin:.0f} s", flush=True)
    return clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sanitizers", nargs="*", default=list(LIBRARIES), help=", ".join(LIBRARIES))
    parser.add_argument("--cases", type=int, default=3000, help="of the fuzzer")
    parser.add_argument("--paths", nargs="*", default=[], help="tests, instead of those that suit each sanitizer")
    options = parser.parse_args()
    if unknown := set(options.sanitizers) - set(LIBRARIES):
        sys.exit(f"no build for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    failed = [name for name in options.sanitizers if not run(name, options.cases, options.paths)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
