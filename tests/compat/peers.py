"""Runs the peers' own test files, unmodified, over `attnops.compat`, and prints what came of them.

    python tests/compat/peers.py --flashinfer DIR --flash-attention DIR --flash-mla DIR --sgl-kernel DIR

DIR is a checkout (or what it holds of tests): FlashInfer's with `tests/attention`, FlashAttention's with `hopper`,
FlashMLA's with `tests`, sglang's with `sgl-kernel/tests`. Module shims (`peer_shims.py`) stand for the peers. Every
file is a process, a fork of one that has imported everything, so one that ends takes nothing with it. On a CPU, "cuda"
means the CPU. Needs no network.

Outcomes: passed; serves more (the peer's test expects an error); refused, by reason (an error of attnops that names
what it does not serve); absent (a name that `attnops.compat` lacks); wrong (an assertion of the peer); error (anything
else); crashed; skipped (by the peer's test, for this GPU); not run (time, memory, or no GPU). The share is of all but
the last two.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
FILES = {
    "flashinfer": [
        f"tests/attention/test_{name}.py"
        for name in [
            "alibi",
            "attention_sink",
            "batch_attention",
            "batch_decode_kernels",
            "batch_invariant_fa2",
            "batch_prefill",
            "batch_prefill_kernels",
            "block_sparse",
            "cudnn_decode",
            "cudnn_graph_cache_key",
            "cudnn_prefill",
            "cudnn_prefill_deepseek",
            "cudnn_prefill_paged_cu_seqlens",
            "cudnn_prefill_token_indptr",
            "decode_fp8_calibration_scale",
            "decode_prefill_lse",
            "deepseek_mla",
            "fmha_v2_prefill",
            "fp8_prefill",
            "hopper",
            "hopper_fp8_attention",
            "hopper_fp8_sliding_window",
            "logits_cap",
            "mla_decode_kernel",
            "mla_page",
            "non_contiguous_decode",
            "non_contiguous_prefill",
            "page",
            "shared_prefix_kernels",
            "single_prefill",
            "sliding_window",
            "tensor_cores_decode",
            "trtllm_gen_attention_decode",
            "trtllm_gen_attention_decode_xqa",
            "trtllm_ragged_kv_stride",
            "workspace_size",
            "xqa",
            "xqa_batch_decode",
            "xqa_mla_batch_decode",
            "xqa_mla_bf16",
        ]
    ],
    "flash_attention": ["hopper/test_flash_attn.py"],
    "flash_mla": [
        f"tests/test_flash_mla_{name}.py" for name in ("dense_decoding", "sparse_decoding", "sparse_prefill")
    ],
    "sgl_kernel": [
        f"sgl-kernel/tests/test_{name}.py"
        for name in (
            "flash_attention",
            "flashmla",
            "merge_state",
            "merge_state_v2",
            "cutlass_mla",
            "topk",
            "flash_attn_sparse",
            "sparse_flash_attn",  # its name before January 2026
        )
    ],
}
# Files that take longest are several processes, and start first, in this order.
SHARDS = {
    "sgl-kernel/tests/test_topk.py": 6,
    "sgl-kernel/tests/test_flashmla.py": 6,
    "hopper/test_flash_attn.py": 6,
    "tests/attention/test_fmha_v2_prefill.py": 6,
    "tests/attention/test_batch_prefill_kernels.py": 6,
    "tests/test_flash_mla_sparse_decoding.py": 4,
    "sgl-kernel/tests/test_flash_attention.py": 3,
    "tests/attention/test_hopper.py": 3,
    "tests/attention/test_deepseek_mla.py": 3,
    "tests/attention/test_batch_decode_kernels.py": 6,
    "tests/test_flash_mla_dense_decoding.py": 4,
    "tests/attention/test_attention_sink.py": 3,
    "tests/attention/test_hopper_fp8_attention.py": 2,
    "tests/attention/test_tensor_cores_decode.py": 3,
    "tests/attention/test_fp8_prefill.py": 2,
    "tests/attention/test_sliding_window.py": 2,
    "tests/attention/test_xqa_batch_decode.py": 2,
}


class Task(NamedTuple):
    """A file of a peer, or one of the shares of its cases. With `--breadth` all files."""

    kind: str
    directory: Path
    names: tuple[str, ...]
    shard: int
    shards: int

    @property
    def label(self) -> str:
        return f"{self.kind}-{Path(self.names[0]).stem if len(self.names) == 1 else 'all'}-{self.shard}"


COUNTED = ("passed", "serves more", "refused", "absent", "wrong", "error", "crashed")


def outcomes(path: Path) -> dict[str, dict]:
    """The last line of every test that a file's processes wrote."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["test"]: line for line in lines if "outcome" in line and line["test"]}


def run_file(task: Task, options: argparse.Namespace) -> list[dict]:
    """The last line of every test of a shard, also of those that ended their process."""
    out = options.keep / f"{task.label}.jsonl"
    if options.deadline and time.time() > options.deadline:
        line = {"test": task.label, "outcome": "not run", "reason": "time", "seeds": options.seeds}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return list(outcomes(out).values())
    for _ in range(options.most_crashes + 1):
        done = outcomes(out)
        cut = {test for test, line in done.items() if line["outcome"] in ("not run", "started")}
        again = cut if options.again else set()
        files = [str(task.directory / name) for name in task.names]
        given = {"kind": task.kind, "directory": str(task.directory), "files": files}
        given |= {"out": str(out), "errors": str(out.with_suffix(".txt")), "done": sorted(done.keys() - again)}
        given |= {"device": options.device, "draws": options.draws, "seeds": options.seeds}
        given |= {"timeout": options.timeout, "verbose": options.verbose, "deadline": options.deadline}
        given |= {"functions": options.functions, "shard": task.shard, "shards": task.shards}
        given |= {"cases": options.cases.read_text().splitlines() if options.cases else [], "breadth": options.breadth}
        given |= {"in_order": options.in_order}
        began = out.stat().st_size if out.exists() else 0
        child = options.processes.Process(target=peer_child_run, args=(given,))
        child.start()
        child.join()
        with out.open("a+") as file:
            file.seek(began)
            written = [json.loads(line) for line in file.read().splitlines()]
            for line in written:
                if "trace" in line:
                    print(line["test"], line["trace"], sep="\n")
            if written and written[-1]["outcome"] == "finished":
                break
            started = [line for line in outcomes(out).values() if line["outcome"] == "started"]
            for line in started:
                line |= {"outcome": "crashed", "reason": f"exit status {child.exitcode}"}
                file.write(json.dumps(line) + "\n")
        if not started:
            reason = Path(given["errors"]).read_text().strip()[-200:]
            line = {"test": task.label, "outcome": "error", "reason": reason, "seeds": options.seeds}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            break
    done = outcomes(out)
    print(compact(task, done.values()), flush=True)
    return list(done.values())


def peer_child_run(given: dict) -> None:
    import peer_child  # in a process that has it already

    peer_child.run(given)


def compact(task: Task, lines: Iterable[dict]) -> str:
    """What a cut run needs of a shard: passed and all by function and seed, and every other outcome with its reason."""
    functions: dict[str, dict] = {}
    others, seconds = {}, 0.0

    def short(function: str) -> str:
        file, _, name = function.rpartition("::")
        return name if len(task.names) == 1 else f"{Path(file).stem}::{name}"

    for line in lines:
        seconds += line.get("seconds", 0)
        function, _, case = line["test"].partition("[")
        for seed in line.get("seeds", []):
            counts = functions.setdefault(short(function), {}).setdefault(seed, collections.Counter())
            counts[line["outcome"]] += 1
        if line["outcome"] not in ("passed", "skipped") and line["reason"] != "time":
            name = f"{short(function)}[{case}"
            others[name] = [line["outcome"], line["reason"][:160], line.get("seeds")]
    part = {"part": task.label.replace("-", "/"), "seconds": round(seconds), "counts": functions}
    return "PART " + json.dumps(part | ({"others": others} if others else {}), separators=(",", ":"))


def table(lines: list[dict]) -> str:
    """Counts by test function, as a table of Markdown, and the reasons of what is not passed."""
    functions: dict[str, collections.Counter] = {}
    reasons: collections.Counter = collections.Counter()
    for line in lines:
        name = line["test"].partition("[")[0].replace("tests/attention/", "").replace("hopper/", "")
        functions.setdefault(name, collections.Counter())[line["outcome"]] += 1
        if line["outcome"] not in ("passed", "skipped"):
            reasons[line["outcome"], line["reason"]] += 1
    rows = [
        "| test | passed | serves more | refused | absent | wrong | error | crashed | skipped | not run |",
        "|---" * 10 + "|",
    ]
    for name, counts in sorted(functions.items()):
        cells = [str(counts[outcome]) for outcome in (*COUNTED, "skipped", "not run")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    total = collections.Counter(line["outcome"] for line in lines)
    counted = sum(total[outcome] for outcome in COUNTED)
    rows.append(f"\n{total['passed']} of {counted} passed: " + ", ".join(f"{n} {o}" for o, n in total.most_common()))
    rows += [f"{count:6} {outcome}: {reason}" for (outcome, reason), count in reasons.most_common(60)]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in FILES:
        parser.add_argument(f"--{kind.replace('_', '-')}", type=Path, help="the peer's checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--draws", type=int, default=40, help="of a function's parameters, for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--timeout", type=float, default=60, help="seconds of a test")
    parser.add_argument("--stop-after", type=float, help="seconds of the whole run; later tests are not run")
    parser.add_argument("--most-crashes", type=int, default=10, help="of a file, before the rest of it is left")
    parser.add_argument("--only", nargs="+", default=[""], help="files whose name holds one of these")
    parser.add_argument("--functions", nargs="+", default=[], help="run these alone, in files that have one of them")
    parser.add_argument("--cases", type=Path, help="a file of functions and cases (`FILE::TEST`); run these alone")
    parser.add_argument("--breadth", action="store_true", help="a few cases of every function in turn, seed by seed")
    parser.add_argument("--in-order", action="store_true", help="run cases as the file of --cases lists them")
    parser.add_argument("--json", type=Path, help="where to write a line for every test")
    parser.add_argument(
        "--keep", type=Path, help="a folder for what every file's tests write; what it has is not rerun"
    )
    parser.add_argument("--again", action="store_true", help="rerun what time or memory cut")
    parser.add_argument("--report", type=Path, help="print the table of such a folder, and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="files at a time")
    options = parser.parse_args()
    if options.report:
        for kind in FILES:
            lines = [
                line for path in sorted(options.report.glob(f"{kind}-*.jsonl")) for line in outcomes(path).values()
            ]
            for line in lines:
                if line["outcome"] == "started":
                    line |= {"outcome": "not run", "reason": "stopped with its process"}
            report(kind, lines, options.seeds)
        return 0
    options.deadline = time.time() + options.stop_after if options.stop_after else None
    tasks = []
    for kind, names in FILES.items():
        directory = getattr(options, kind)
        if not directory:
            continue
        found = [name for name in names if any(part in name for part in options.only) and (directory / name).exists()]
        for group in [tuple(found)] if options.breadth and found else [(name,) for name in found]:
            shards = options.jobs if options.breadth else SHARDS.get(group[0], 1)
            tasks += [Task(kind, directory.resolve(), group, shard, shards) for shard in range(shards)]
    if not options.breadth:
        order = {name: i for i, name in enumerate(SHARDS)}
        tasks.sort(key=lambda task: order.get(task.names[0], len(order)))
    with tempfile.TemporaryDirectory() as folder:
        options.keep = options.keep or Path(folder)
        options.keep.mkdir(parents=True, exist_ok=True)
        options.processes = processes(options.device)
        with ThreadPoolExecutor(options.jobs) as pool:
            done = dict(zip(tasks, pool.map(lambda task: run_file(task, options), tasks), strict=True))
        options.again = True
        for task, lines in done.items():
            if any(line["outcome"] == "not run" and line["reason"].startswith("memory") for line in lines):
                done[task] = run_file(task, options)  # alone, where memory was short beside others
    status = 0
    for kind in FILES:
        lines = [line for task, file in done.items() for line in file if task.kind == kind]
        if not lines:
            continue
        report(kind, lines, options.seeds)
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps({"kind": kind, **line}) + "\n" for line in lines)
        status |= any(line["outcome"] in ("wrong", "crashed") for line in lines)
    return status


def report(kind: str, lines: list[dict], seeds: list[int]) -> None:
    """Prints a table of every seed's cases, and what share of them passed."""
    for seed in seeds:
        of_seed = [line for line in lines if seed in line.get("seeds", ())]
        if of_seed:
            print(f"\n## {kind}, seed {seed}\n\n{table(of_seed)}", flush=True)


def processes(device: str) -> multiprocessing.context.BaseContext:
    """Starts processes as forks of one that has imported everything; where a fork cannot use the GPU, anew."""
    paths = [str(HERE.parent.parent / "python"), str(HERE), os.environ.get("PYTHONPATH", "")]
    sys.path[:0] = paths[:2]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "passive"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check starts CUDA, which no fork survives
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["peer_child"])
    child = forked.Process(target=peer_child_probe, args=(device,))
    child.start()
    child.join()
    if child.exitcode == 0:
        return forked
    print(f"a fork cannot use {device}: every process imports for itself", flush=True)
    return multiprocessing.get_context("spawn")


def peer_child_probe(device: str) -> None:
    import peer_child

    peer_child.probe(device)


if __name__ == "__main__":
    sys.exit(main())
