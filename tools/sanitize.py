"""Runs compute-sanitizer over a small, representative set of the gpu tests, on a machine with a GPU.

    python tools/sanitize.py                      every set
    python tools/sanitize.py memcheck xqa_decode  only the sets whose names hold all the words

`memcheck` sees reads and writes out of bounds, with torch's caching allocator off so that a tensor's end is a bound;
`racecheck` sees hazards in shared memory, and is slow, so its problems are the smallest that reach every role.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# name: (pytest paths, -k expression)
SETS = {
    "memcheck xqa_decode": (
        ["tests/xqa_decode/test_xqa_decode_cuda.py"],
        "(test_every_kernel and (64 or 128)) or test_tree_masks or test_batch_invariant_bits or test_checked_mode or "
        "(test_page_sizes and (1-None or 16-None or 3-None))",
    ),
    "racecheck xqa_decode": (
        ["tests/xqa_decode/test_xqa_decode_cuda.py"],
        "(test_every_kernel and 128 and dtype0) or (test_head_counts and (heads6 or heads8))",
    ),
    "memcheck xqa_clusters": (["tests/xqa_decode/test_xqa_decode_cuda.py"], "test_short_calls"),
    "racecheck xqa_clusters": (["tests/xqa_decode/test_xqa_decode_cuda.py"], "test_short_calls"),
    "memcheck mla_decode": (["tests/mla_decode"], "test_checked_mode"),
    "memcheck paged_kv": (["tests/paged_kv"], "not above_two_to_the_31 and not large_batches"),
    "racecheck paged_kv": (["tests/paged_kv"], "fp8_rows_of_656_bytes or e4m3_pages or cu_seqlens"),
    "memcheck merge_state": (["tests/merge_state"], ""),
    "racecheck merge_state": (["tests/merge_state"], "union_of_both or many_states"),
    "memcheck planning": (["tests/planning"], "not fmha and (empty or ragged or skewed or 7777 or captured)"),
    "racecheck planning": (["tests/planning"], "not fmha and 264 and (empty or ragged or skewed or 7777)"),
}


def run(name: str) -> bool:
    tool = name.split()[0]
    paths, expression = SETS[name]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", *paths]
    command += ["--import-mode=importlib", *(["-k", expression] if expression else [])]
    begin = time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    tail = [
        line for line in lines if "passed" in line or "failed" in line or "ERROR SUMMARY" in line or "RACECHECK" in line
    ]
    print(f"{name}: exit {result.returncode}, {time.monotonic() - begin:.0f} s; {'; '.join(tail[-3:])}", flush=True)
    if result.returncode:
        print("\n".join(lines[-60:]), result.stderr[-2000:], sep="\n", flush=True)
    return result.returncode == 0


def main() -> None:
    if not shutil.which("compute-sanitizer"):
        sys.exit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    chosen = [name for name in SETS if all(word in name.split() for word in sys.argv[1:])]
    if not chosen:
        sys.exit(f"no set has all of {sys.argv[1:]}; the sets are {', '.join(SETS)}")
    failed = [name for name in chosen if not run(name)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
