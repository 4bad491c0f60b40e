"""Builds the CPU modules with gcc's sanitizers and runs tests and the fuzzer over them.

A finding ends the process of a test, and is printed. The tests behind it go on in another process. What --seconds cut
is named, and is no failure.

    python tools/sanitize_cpu.py                      both
    python tools/sanitize_cpu.py address,undefined    tests of every op, and the fuzzer
    python tools/sanitize_cpu.py thread               what threads share
    python tools/sanitize_cpu.py thread --cases 200 --paths tests/layer_call
    python tools/sanitize_cpu.py --jobs 16            processes side by side; by default as many as cores
    python tools/sanitize_cpu.py --seconds 600 --state build/sanitized   each call goes on where the last was cut
    python tools/sanitize_cpu.py --build-only         the modules alone, for a later call

torch itself is not instrumented, and neither is OpenMP, so:

* leaks are not asked for (Python and torch keep memory until they exit), nor whether `new` and `delete` of memory that
  crosses the border to torch agree on its size;
* ThreadSanitizer does not see how OpenMP hands work to its threads and takes it back. `torch_bindings/tsan_parallel.h`
  tells it; accesses of libraries that are not instrumented are left out (`ignore_noninstrumented_modules`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
    begin = time.monotonic()
    environment = {**os.environ, "ATTNOPS_SANITIZE": sanitizers, "ATTNOPS_BUILD_CUDA": "0"}
    environment["ATTNOPS_BUILD_DIR"] = str(work)
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--build-lib", str(library)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "attnops", library / "attnops", ignore=ignored, dirs_exist_ok=True)
    print(f"{sanitizers}: built in {time.monotonic() - begin:.0f} s", flush=True)
    return library


def parts_of(sanitizers: str, options: argparse.Namespace, state: Path) -> dict[str, list[str]]:
    """Commands by name. Those that were cut write what they did to files that start with `state`."""
    cases = CASES[sanitizers] if options.cases is None else options.cases
    paths = options.paths or [f"tests/{name}" for name in PATHS[sanitizers]]
    # A test may take long: ThreadSanitizer makes some twenty times as much of it.
    command = [sys.executable, "tools/gpu_tests.py", "-s", "--test-seconds", "900", "--most", "40"]
    tests = [*command, "--marks", "not gpu", *paths]
    fuzzer = [sys.executable, "-m", "tests.fuzz", "--seed", "20", "--cases", str(cases), "--partial"]
    parts = {"tests": tests} | ({"fuzzer": fuzzer} if cases else {})
    return {
        name: [*part, "--jobs", str(options.jobs), "--state", f"{state}-{name}.json"] for name, part in parts.items()
    }


def run(sanitizers: str, options: argparse.Namespace, end: float) -> str:
    """Runs tests and fuzzer until `end`. "" where all ended clean, or what failed and what was cut."""
    kind = sanitizers.replace(",", "-")
    library = options.library or build(sanitizers)
    runtime = library.resolve() / LIBRARIES[sanitizers]
    if not runtime.exists():
        found = subprocess.run(["gcc", f"-print-file-name={runtime.name}"], capture_output=True, text=True, check=True)
        runtime = Path(found.stdout.strip())
    state = options.state or Path(tempfile.mkdtemp(prefix=f"attnops-{kind}-"))
    state.mkdir(parents=True, exist_ok=True)
    # libstdc++ beside it: the sanitizer looks for __cxa_throw before torch has brought it.
    preload = f"{runtime}:libstdc++.so.6"
    environment = {**os.environ, **OPTIONS[sanitizers], "LD_PRELOAD": preload, "PYTHONPATH": str(library.resolve())}
    environment |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": THREADS[sanitizers]}
    failed: list[str] = []
    late: list[str] = []  # no finding, and not at their ends
    for name, command in parts_of(sanitizers, options, state / kind).items():
        begin, left = time.monotonic(), end - time.monotonic()
        if left < 5:
            late.append(name)
            continue
        command += [] if end == float("inf") else ["--seconds", f"{left:.0f}"]
        result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = result.stdout.decode(errors="replace").splitlines() or [""]
        print(f"{sanitizers}: {name}: exit {result.returncode} after {time.monotonic() - begin:.0f} s; {lines[-1]}")
        if name == "fuzzer":
            counted = re.search(r": (\d+) cases counted", lines[-1])
            cut = counted is not None and int(counted[1]) < int(command[command.index("--cases") + 1])
        else:
            cut = " 0 failed" in lines[-1] and lines[-1].endswith("s are over)")
        if cut:
            late.append(name)
        if result.returncode and (name == "fuzzer" or not cut):
            failed.append(name)
            print("\n".join(lines[-120:]))
        sys.stdout.flush()
    if not options.state:
        shutil.rmtree(state)
    named = {"failed": failed, "not at an end": late}
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in named.items() if names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sanitizers", nargs="*", default=list(LIBRARIES), help=", ".join(LIBRARIES))
    parser.add_argument("--cases", type=int, help=f"of the fuzzer, {CASES}; 0: without it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="all end then")
    parser.add_argument("--state", type=Path, help="a folder: what ended clean in an earlier call is left out")
    parser.add_argument("--build-only", action="store_true", help="compile, and run nothing")
    parser.add_argument("--library", type=Path, help="a folder that is built, and may hold the sanitizer's library")
    parser.add_argument("--paths", nargs="*", default=[], help="tests, instead of those that suit each sanitizer")
    options = parser.parse_args()
    if unknown := set(options.sanitizers) - set(LIBRARIES):
        sys.exit(f"no build for {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    if options.build_only:
        for name in options.sanitizers:
            build(name)
        return
    end = time.monotonic() + options.seconds
    ends = {name: run(name, options, end) for name in options.sanitizers}
    for name, how in ends.items():
        print(f"{name}: {how or 'clean'}")
    sys.exit(any("failed" in how for how in ends.values()))


if __name__ == "__main__":
    main()
