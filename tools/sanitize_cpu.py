"""Builds the CPU modules with gcc's sanitizers and runs tests and the fuzzer over them. A finding ends the process.

    python tools/sanitize_cpu.py                      both
    python tools/sanitize_cpu.py address,undefined    tests of every op, and the fuzzer
    python tools/sanitize_cpu.py thread               what threads share
    python tools/sanitize_cpu.py thread --cases 200 --paths tests/layer_call
    python tools/sanitize_cpu.py --jobs 16            folders of tests side by side; by default as many as cores

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
from concurrent.futures import ThreadPoolExecutor
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
# Folders that take long come first.
PATHS = {
    "address,undefined": [
        *("mla_decode", "xqa_decode", "fmha", "speculation", "sparse_indexer", "linear", "device_values", "paged_kv"),
        *("sparse_mla", "fp4_kv", "layer_call", "merge_state", "block_lists", "local_batches"),
    ],
    "thread": ["layer_call", "device_values/test_shared_plans.py", "backends/test_one_step_at_a_time.py"],
}
CASES = {"address,undefined": 3000, "thread": 500}  # of the fuzzer
# What ThreadSanitizer looks for needs more threads than one. AddressSanitizer does not: folders run side by side.
THREADS = {"address,undefined": "1", "thread": "2"}


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


def parts_of(sanitizers: str, cases: int, paths: list[str], jobs: int) -> dict[str, list[str]]:
    """Commands by name. A folder of tests each, so that the times show which of them takes long."""
    options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "--import-mode=importlib"]
    chosen = paths or [f"tests/{name}" for name in PATHS[sanitizers]]
    fuzzer = [sys.executable, "-m", "tests.fuzz", "--seed", "20", "--cases", str(cases), "--partial"]
    parts = {"fuzzer": [*fuzzer, "--jobs", str(max(jobs // 4, 1))]} if cases else {}
    return parts | {path: [sys.executable, "-m", "pytest", *options, path] for path in chosen}


def run(sanitizers: str, options: argparse.Namespace) -> bool:
    """Whether tests and fuzzer found nothing."""
    library = options.library
    if library is None:
        begin = time.monotonic()
        library = build(sanitizers)
        print(f"{sanitizers}: built in {time.monotonic() - begin:.0f} s", flush=True)
    runtime = library.resolve() / LIBRARIES[sanitizers]
    if not runtime.exists():
        found = subprocess.run(["gcc", f"-print-file-name={runtime.name}"], capture_output=True, text=True, check=True)
        runtime = Path(found.stdout.strip())
    # libstdc++ beside it: the sanitizer looks for __cxa_throw before torch has brought it.
    preload = f"{runtime}:libstdc++.so.6"
    environment = {**os.environ, **OPTIONS[sanitizers], "LD_PRELOAD": preload, "PYTHONPATH": str(library.resolve())}
    environment |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": THREADS[sanitizers]}

    def run_part(name: str, command: list[str]) -> bool:
        begin = time.monotonic()
        result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        status, lines = result.returncode, result.stdout.decode(errors="replace").splitlines()
        print(f"{sanitizers}: {name}: exit {status} after {time.monotonic() - begin:.0f} s; {' '.join(lines[-1:])}")
        if status:
            print("\n".join(lines[-120:]))
        sys.stdout.flush()
        return status == 0

    cases = CASES[sanitizers] if options.cases is None else options.cases
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = parts_of(sanitizers, cases, options.paths, options.jobs)
        clean = [pool.submit(run_part, *part) for part in parts.items()]
        return all([part.result() for part in clean])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sanitizers", nargs="*", default=list(LIBRARIES), help=", ".join(LIBRARIES))
    parser.add_argument("--cases", type=int, help=f"of the fuzzer, {CASES}; 0: without it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="processes at a time")
    parser.add_argument("--library", type=Path, help="a folder that is built, and may hold the sanitizer's library")
    parser.add_argument("--paths", nargs="*", default=[], help="tests, instead of those that suit each sanitizer")
    options = parser.parse_args()
    if unknown := set(options.sanitizers) - set(LIBRARIES):
        sys.exit(f"no build for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    failed = [name for name in options.sanitizers if not run(name, options)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
