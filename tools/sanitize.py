"""Runs compute-sanitizer over a small, representative set of the gpu tests, on a machine with a GPU.

    python tools/sanitize.py                      every set
    python tools/sanitize.py memcheck xqa_decode  only the sets whose names hold all the words
    python tools/sanitize.py --jobs 4             at most four sets at a time
    python tools/sanitize.py --seconds 60         of each set the tests that fit, in an order by chance
    python tools/sanitize.py --parts 4 --total 300   each set by four processes, all within 300 s

All run with torch's caching allocator off, so that a tensor's end is a bound. A capture that allocates fails then, so
sets leave such tests out by name. `memcheck` sees reads and writes out of bounds;
`racecheck` sees hazards in shared memory, and is slow, so its problems are the smallest that reach every role;
`synccheck` sees barriers that not all threads reach that should; `initcheck` sees reads of memory that nobody wrote.
With each of them the sets run every row of every impls.cpp (tests/test_sanitizer_sets.py). Sets run side by side: most
of their time is spent on the CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MLA = ["tests/mla_decode/test_mla_decode_kernels.py"]
XQA = ["tests/xqa_decode/test_xqa_decode_cuda.py"]
XQA_INVARIANT = ["tests/xqa_decode/test_xqa_invariant_cuda.py"]
XQA_MERGES = ["tests/xqa_decode/test_xqa_merges_cuda.py"]
XQA_CHUNKS = ["tests/xqa_decode/test_chunks.py"]
XQA_SHORT = ["tests/xqa_decode/test_xqa_short_works_cuda.py"]
ROWS = ["tests/test_kernel_rows.py"]
FMHA = ["tests/fmha/test_fmha_cuda.py"]
FMHA_CUTS = ["tests/fmha/test_split_keys.py"]
CONVERTED = ["tests/sparse_mla/test_converted_rows.py"]
SPARSE_MLA = ["tests/sparse_mla/test_sparse_mla_rows.py"]
COMPRESSED = ["tests/compressed_kv"]
INDEXER = ["tests/sparse_indexer"]
SPECULATION = ["tests/speculation"]
BLOCKS = ["tests/block_lists"]
LINEAR = ["tests/linear"]

# name: (pytest paths, -k expression)
SETS = {
    # Every row of every impls.cpp. synccheck takes the ring's barriers for others than they are: docs/sanitizer.md.
    "memcheck xqa_decode every_row": (ROWS, "test_every_row and xqa_decode"),
    "memcheck mla_decode every_row": (ROWS, "test_every_row and mla_decode"),
    "racecheck xqa_decode every_row": (ROWS, "test_every_row and xqa_decode"),
    "racecheck mla_decode every_row": (ROWS, "test_every_row and mla_decode"),
    "synccheck xqa_decode every_row": (ROWS, "test_every_row and xqa_decode"),
    "synccheck mla_decode every_row": (ROWS, "test_every_row and mla_decode and not ring"),
    "initcheck xqa_decode every_row": (ROWS, "test_every_row and xqa_decode"),
    "initcheck mla_decode every_row": (ROWS, "test_every_row and mla_decode"),
    "memcheck fmha every_row": (FMHA, "test_dims_reach_every_row or test_pages"),
    "memcheck fmha hidden_keys": (["tests/fmha/test_hidden_keys.py"], "bfloat16-None"),
    "memcheck fmha small_pages": (["tests/fmha/test_small_pages.py"], "any_batch and (3 or 8)"),
    "racecheck fmha small_pages": (["tests/fmha/test_small_pages.py"], "any_batch and (3 or 8)"),
    "memcheck fmha gathered_rows": (["tests/fmha/test_gathered_rows.py"], "any_batch and (3 or 8)"),
    "racecheck fmha gathered_rows": (["tests/fmha/test_gathered_rows.py"], "any_batch and (3 or 8)"),
    "racecheck fmha every_row": (FMHA, "test_dims_reach_every_row"),
    "synccheck fmha every_row": (FMHA, "test_dims_reach_every_row"),
    "initcheck fmha every_row": (FMHA, "test_dims_reach_every_row"),
    "memcheck fmha forms": (FMHA, "test_every_form"),
    "racecheck fmha forms": (FMHA, "test_every_form"),
    "synccheck fmha forms": (FMHA, "test_every_form"),
    "initcheck fmha forms": (FMHA, "test_every_form"),
    "memcheck fmha cuts80": (FMHA_CUTS, "cut_tiles_are_right and 80- or rows_of_the_output"),
    "racecheck fmha cuts80": (FMHA_CUTS, "cut_tiles_are_right and 80- or rows_of_the_output"),
    "memcheck sparse_mla every_row": (SPARSE_MLA, "test_every_row"),
    "racecheck sparse_mla every_row": (SPARSE_MLA, "test_every_row"),
    "synccheck sparse_mla every_row": (SPARSE_MLA, "test_every_row"),
    "initcheck sparse_mla every_row": (SPARSE_MLA, "test_every_row"),
    # What a value in a tensor may lead to: nothing outside the pools.
    "memcheck hostile pages": (ROWS, "test_bad_pages or test_kv_indptr or test_lengths_below"),
    "memcheck hostile lengths": (ROWS, "test_a_length_beyond and balanced"),
    "memcheck hostile plans": (["tests/device_values/test_hostile_plans.py"], "hd128 or fp32 or e4m3 or pairs or wrap"),
    "memcheck trees": (ROWS, "test_what_no_row_sees"),
    "memcheck speculation": (SPECULATION, "not schemas and not sampled_paths and not errors and not one_graph"),
    "memcheck sparse_indexer": (INDEXER, "not schemas and not errors and not long_rows and not replays"),
    "racecheck sparse_indexer": (INDEXER, "page_sizes or different_lengths or stable_sort"),
    "synccheck sparse_indexer": (INDEXER, "page_sizes or different_lengths"),
    "initcheck sparse_indexer": (INDEXER, "page_sizes or different_lengths"),
    "memcheck compressed_kv": (COMPRESSED, "not schemas and not errors"),
    "racecheck compressed_kv": (COMPRESSED, "any_chunks and dtype0 or index_keys or 584"),
    "synccheck compressed_kv": (COMPRESSED, "any_chunks and dtype0"),
    "initcheck compressed_kv": (COMPRESSED, "index_keys or 584"),
    "memcheck sparse_mla": (
        ["tests/sparse_mla"],
        "not schema and not errors and not every_instruction_set and not replays and not above",
    ),
    "racecheck sparse_mla": (["tests/sparse_mla"], "equals_attention and 7-shape"),
    "racecheck sparse_mla shared_lists": (
        ["tests/sparse_mla/test_share_lists.py"],
        "own_list and 40 or rows_once and 64",
    ),
    "synccheck sparse_mla shared_lists": (
        ["tests/sparse_mla/test_share_lists.py"],
        "own_list and 40 or rows_once and 64",
    ),
    "initcheck sparse_mla shared_lists": (
        ["tests/sparse_mla/test_share_lists.py"],
        "own_list and 40 or rows_once and 64",
    ),
    # Rows that are converted once.
    "memcheck sparse_mla converted": (CONVERTED, "attended_to and 48 or once or scratch"),
    "racecheck sparse_mla converted": (CONVERTED, "once or more_rows and 48"),
    "synccheck sparse_mla converted": (CONVERTED, "once or more_rows and 48"),
    "initcheck sparse_mla converted": (CONVERTED, "once or more_rows and 48"),
    # Short calls in clusters, which merge in shared memory.
    "memcheck sparse_mla clusters": (SPARSE_MLA, "short_calls and 61"),
    "racecheck sparse_mla clusters": (SPARSE_MLA, "short_calls and 584_bytes and 61"),
    "synccheck sparse_mla clusters": (SPARSE_MLA, "short_calls and 584_bytes and 61"),
    "initcheck sparse_mla clusters": (SPARSE_MLA, "short_calls and 584_bytes and 61"),
    "racecheck speculation": (SPECULATION, "(walk or move or probabilities) and not sampled_paths"),
    "synccheck speculation": (SPECULATION, "(walk or move) and not sampled_paths"),
    "initcheck speculation": (SPECULATION, "(walk or move) and not sampled_paths"),
    "memcheck extents": (ROWS, "test_extents_of_zero or test_an_empty_batch"),
    "synccheck mla_decode kernels": (MLA, "test_every_kernel and not ring"),
    "memcheck xqa_decode kernels": (XQA, "test_every_kernel and (64 or 128)"),
    "memcheck xqa_decode masks": (XQA, "test_tree_masks or test_checked_mode or test_pairs_of_heads"),
    "memcheck xqa_decode pages": (XQA, "test_page_sizes and (1-None or 16-None or 3-None)"),
    "memcheck xqa_decode invariant": (XQA, "test_batch_invariant_bits"),
    "memcheck xqa_decode clusters": (XQA, "test_short_calls"),
    "memcheck xqa_decode chunks": (
        XQA_CHUNKS,
        "(40-cuda or hold_anything or left_out or rows_of_it or goes_this_way) and not replays",
    ),
    "racecheck xqa_decode chunks": (XQA_CHUNKS, "(40-cuda or rows_of_it) and not replays"),
    # 16-bit and FP8 pages, up to 8, 16, 32 and 64 rows.
    "racecheck xqa_decode kernels": (XQA, "test_every_kernel and 128 and dtype0 and plain"),
    "racecheck xqa_decode checked": (XQA, "test_every_kernel and 128 and dtype0 and checked"),
    "racecheck xqa_decode heads": (XQA, "test_head_counts and (heads6 or heads8 or heads9)"),
    "racecheck xqa_decode trees": (XQA, "(test_tree_masks and plain) or (test_trees_that_hide and plain)"),
    "racecheck xqa_decode windows": (XQA, "test_masks and plain and True and (-100- or -0-)"),
    "racecheck xqa_decode fp8": (XQA, "test_masks_by_page_size and 64 and kv_dtype1 and (heads1 or heads3)"),
    "racecheck xqa_decode rows": (XQA, "test_masks_by_page_size and 64 and heads4"),
    "memcheck xqa_decode rows24": (XQA, "test_24_rows"),
    "racecheck xqa_decode rows24": (XQA, "test_24_rows and (6-5- or 67-5-)"),
    "racecheck xqa_decode fp8_pairs": (XQA_SHORT, "test_short_works_of_pairs_of_heads and options4 and heads0"),
    "racecheck xqa_decode fp8_short": (XQA_SHORT, "test_rules_of_short_works and kv_dtype1 and options4"),
    "racecheck xqa_decode portable_fp8": (XQA, "test_every_kernel and 4-256 and kv_dtype1 and checked"),
    "memcheck xqa_decode short_works": (XQA_SHORT, "test_parts_of_many or test_rules_of_short"),
    "racecheck xqa_decode short_works": (XQA_SHORT, "test_parts_of_many and 5"),
    "racecheck xqa_decode blocks_of_rows": (XQA_SHORT, "test_blocks_of_rows and None"),
    "memcheck xqa_decode blocks_of_rows": (XQA_SHORT, "test_many_rows and None"),
    "racecheck xqa_decode widened": (
        XQA_SHORT,
        "(test_blocks_of_rows and kv_dtype1) or (test_many_rows and kv_dtype1 and heads0 and (128-5 or 192-16))",
    ),
    "memcheck xqa_decode widened": (XQA_SHORT, "(test_many_rows and kv_dtype1) or test_long_works_of_many"),
    "racecheck xqa_decode merges": (XQA_MERGES, "beside_many or (test_merges and -20 and not see_different)"),
    "memcheck xqa_decode merges": (XQA_MERGES, "test_merges and (-2 or -12 or -20)"),
    "racecheck xqa_decode gathers": (XQA, "test_masks_by_page_size and None and -3 and (heads2 or heads3)"),
    "racecheck xqa_decode fp8_gathers": (XQA, "test_masks_by_page_size and kv_dtype1 and -3 and (heads2 or heads3)"),
    "racecheck xqa_decode pairs": (XQA, "test_pairs_of_heads and heads0 and not 256"),
    "racecheck xqa_decode splits": (XQA, "test_heads_side_by_side and 11 and (heads0 or heads3)"),
    "racecheck xqa_decode clusters": (XQA, "test_short_calls and (lengths0 or lengths2)"),
    "racecheck xqa_decode cluster_blocks": (XQA, "test_short_calls and 128 and (lengths3 or lengths5 or lengths6)"),
    "racecheck xqa_decode clusters192": (XQA, "test_short_calls and 192 and 64-lengths"),
    "racecheck xqa_decode cluster_teams": (XQA, "test_clusters_of_every_size and dtype0 and 9 and not heads0"),
    "racecheck xqa_decode cluster_gathers": (XQA, "test_one_request_in_clusters and (1-heads0 or 3-heads2)"),
    "racecheck xqa_decode invariant": (XQA, "test_batch_invariant_bits and -4-"),
    "racecheck xqa_decode folds": (XQA_INVARIANT, "test_windows_sinks and 700-2"),
    "memcheck mla_decode kernels": (MLA, "test_every_kernel"),
    "memcheck mla_decode checked": (["tests/mla_decode"], "test_checked_mode"),
    "racecheck mla_decode ring": (MLA, "test_every_kernel and ring"),
    "racecheck mla_decode many": (MLA, "test_every_kernel and many and not tree"),
    "racecheck mla_decode many_trees": (MLA, "test_every_kernel and many and tree"),
    "racecheck mla_decode few": (MLA, "test_every_kernel and not ring and not many and not e4m3 and not bytes"),
    "racecheck mla_decode e4m3": (MLA, "test_every_kernel and e4m3 and not 72 and not rounded"),
    "racecheck mla_decode e4m3_many": (MLA, "test_every_kernel and e4m3 and 72"),
    "racecheck mla_decode rounded": (MLA, "test_every_kernel and rounded"),
    "racecheck mla_decode rows": (MLA, "test_every_kernel and bytes and not 72"),
    "racecheck mla_decode rows_many": (MLA, "test_every_kernel and bytes and 72"),
    "memcheck paged_kv": (["tests/paged_kv"], "not above_two_to_the_31 and not large_batches"),
    "racecheck paged_kv": (["tests/paged_kv"], "fp8_rows_of_656_bytes or e4m3_pages or cu_seqlens"),
    "synccheck paged_kv": (["tests/paged_kv"], "fp8_rows_of_656_bytes or cu_seqlens"),
    "initcheck paged_kv": (["tests/paged_kv"], "fp8_rows_of_656_bytes or cu_seqlens"),
    "memcheck fp4_kv": (["tests/fp4_kv"], ""),
    "racecheck fp4_kv": (["tests/fp4_kv"], ""),
    "synccheck fp4_kv": (["tests/fp4_kv"], ""),
    "initcheck fp4_kv": (["tests/fp4_kv"], ""),
    "memcheck linear": (
        LINEAR,
        "not 4096 and not replays and not 65536 and not graphs and not cuda_graph and not on_gpu",
    ),
    "racecheck linear": (
        LINEAR,
        "(equals_float64 or equal_float64 or copies or two_ops) and (0 or 1) or is_one_launch",
    ),
    "synccheck linear": (LINEAR, "equals_float64 or equal_float64 or two_ops or is_one_launch"),
    "initcheck linear": (LINEAR, "(equals_float64 or equal_float64 or two_ops) and (0 or 1) or is_one_launch"),
    "memcheck context_parallel": (["tests/context_parallel"], ""),
    "memcheck local_batches": (["tests/local_batches"], ""),
    "racecheck local_batches": (["tests/local_batches"], "not schema"),
    "synccheck local_batches": (["tests/local_batches"], "not schema"),
    "initcheck local_batches": (["tests/local_batches"], "not schema"),
    "memcheck block_lists": (BLOCKS, "not above_4_gb and not captured"),
    "racecheck block_lists": (BLOCKS, "(loops or last or largest or long_lists) and not schema"),
    "synccheck block_lists": (BLOCKS, "(loops or last or largest or long_lists) and not schema"),
    "initcheck block_lists": (BLOCKS, "(loops or last or largest or long_lists) and not schema"),
    "memcheck merge_state": (["tests/merge_state"], ""),
    "racecheck merge_state": (["tests/merge_state"], "union_of_both or many_states"),
    "synccheck merge_state": (["tests/merge_state"], "many_states"),
    "initcheck merge_state": (["tests/merge_state"], "many_states"),
    "memcheck planning": (["tests/planning"], "not fmha and (empty or ragged or skewed or 7777 or captured)"),
    "racecheck planning": (["tests/planning"], "not fmha and 264 and (empty or ragged or skewed or 7777)"),
    "memcheck planning filled": (["tests/planning"], "test_filled_mla_plan and empties"),
    "racecheck planning filled": (["tests/planning"], "test_filled_mla_plan and empties and (62 or 192 or 512)"),
    "synccheck planning filled": (["tests/planning"], "test_filled_mla_plan and empties and (62 or 192 or 512)"),
    "initcheck planning filled": (["tests/planning"], "test_filled_mla_plan and empties and (62 or 192 or 512)"),
}


CLEAN = re.compile(r"SUMMARY: 0 (errors|hazards)")


def run(name: str, part: str, seconds: float) -> str:
    """What a part of a set came to: "clean", "failed", or "cut" where some tests did not begin in time."""
    tool = name.split()[0]
    if seconds <= 0:
        return "cut"
    paths, expression = SETS[name]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    command += [sys.executable, "-m", "pytest", "-x", "-m", "gpu", "-p", "no:cacheprovider", *paths]
    command += ["--import-mode=importlib", *(["-k", expression] if expression else [])]
    begin = time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TEST_PART": part}
    if math.isfinite(seconds):
        environment["TEST_SECONDS"] = str(round(seconds))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    tail = [line for line in lines if any(word in line for word in ("passed", "failed", "SUMMARY", "TEST_SECONDS"))]
    # 2: pytest's code of a run that is stopped.
    cut = result.returncode == 2 and any("TEST_SECONDS" in line for line in lines)
    none = result.returncode == 5 and not part.endswith("/1")  # more parts than tests
    found = "clean" if result.returncode == 0 or none else "failed"
    if cut and any(CLEAN.search(line) for line in lines):
        found = "cut"
    took = time.monotonic() - begin
    report = f"{name} {part}: {found}, exit {result.returncode}, {took:.0f} s; {'; '.join(tail[-3:])}"
    if found == "failed":
        report = "\n".join([report, *lines[-60:], result.stderr[-2000:]])
    print(report, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="compute-sanitizer over a representative set of the gpu tests")
    parser.add_argument("words", nargs="*", help="only the sets whose names hold all of these; a,b: one of them")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="sets at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each set: no test begins later")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds of all: no test begins later")
    parser.add_argument("--parts", type=int, default=1, help="processes of each set")
    arguments = parser.parse_args()
    if not shutil.which("compute-sanitizer"):
        sys.exit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    words = [word.split(",") for word in arguments.words]
    chosen = [name for name in SETS if all(set(any_of) & set(name.split()) for any_of in words)]
    chosen.sort(key=lambda name: [min(any_of.index(w) for w in name.split() if w in any_of) for any_of in words[::-1]])
    if not chosen:
        sys.exit(f"no set has all of {arguments.words}; the sets are {', '.join(SETS)}")
    found: dict[str, set[str]] = {name: set() for name in chosen}
    begin = time.monotonic()

    def run_in_time(name: str, part: int) -> None:
        left = arguments.total - (time.monotonic() - begin)
        found[name].add(run(name, f"{part}/{arguments.parts}", min(arguments.seconds, left)))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for work in [pool.submit(run_in_time, name, part) for name in chosen for part in range(arguments.parts)]:
            work.result()
    for what in ("cut", "failed"):
        if names := [name for name in chosen if what in found[name]]:
            print(f"{what}: {', '.join(names)}")
    print(f"{sum(kinds == {'clean'} for kinds in found.values())} of {len(chosen)} sets ran whole and clean")
    sys.exit(any("failed" in kinds for kinds in found.values()))


if __name__ == "__main__":
    main()
