"""Runs the peers' own test files, unmodified, over `attnops.compat`, and prints what came of them.

    python tests/compat/peers.py --flashinfer DIR --flash-attention DIR --flash-mla DIR --sgl-kernel DIR

DIR is a checkout (or what it holds of tests): FlashInfer's with `tests/attention`, FlashAttention's with `hopper`,
FlashMLA's with `tests`, sglang's with `sgl-kernel/tests`. Module shims (`peer_shims.py`) stand for the peers. Every
file is a child process, so one that ends takes nothing with it. On a CPU, "cuda" means the CPU. Needs no network.

Outcomes: passed; serves more (the peer's test expects an error); refused, by reason (an error of attnops that names
what it does not serve); absent (a name that `attnops.compat` lacks); wrong (an assertion of the peer); error (anything
else); crashed; skipped (by the peer's test, for this GPU); not run (time, memory, or no GPU). The share is of all but
the last two.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
            "cudnn_prefill",
            "cudnn_prefill_deepseek",
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
            "trtllm_gen_attention_prefill",
            "trtllm_gen_mla",
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
            "sparse_flash_attn",
        )
    ],
}
# Files that take longest are several processes. They also start first.
SHARDS = {
    "hopper/test_flash_attn.py": 2,
    "sgl-kernel/tests/test_flashmla.py": 2,
    "sgl-kernel/tests/test_topk.py": 3,
    "tests/attention/test_batch_prefill_kernels.py": 3,
    "tests/attention/test_fmha_v2_prefill.py": 3,
    "tests/test_flash_mla_sparse_decoding.py": 2,
}
COUNTED = ("passed", "serves more", "refused", "absent", "wrong", "error", "crashed")


def run_file(kind: str, directory: Path, name: str, shard: int, options: argparse.Namespace) -> list[dict]:
    """The last line of every test of a shard, also of those that ended their process."""
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        out, done = kept / f"{kind}-{Path(name).stem}-{shard}.jsonl", {}
        for _ in range(options.most_crashes + 1):
            given = {"kind": kind, "directory": str(directory), "file": str(directory / name), "out": str(out)}
            given |= {"device": options.device, "draws": options.draws, "seeds": options.seeds, "done": sorted(done)}
            given |= {"timeout": options.timeout, "verbose": options.verbose, "deadline": options.deadline}
            given |= {"shard": shard, "shards": SHARDS.get(name, 1)}
            paths = [str(HERE.parent.parent / "python"), str(HERE), os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "passive"}
            command = [sys.executable, str(HERE / "peer_child.py"), json.dumps(given)]
            child = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            for line in lines:
                if "trace" in line:
                    print(line["test"], line["trace"], sep="\n")
                elif line["test"]:
                    done[line["test"]] = line
            if lines and lines[-1]["outcome"] == "finished":
                break
            started = [line for line in done.values() if line["outcome"] == "started"]
            if not started:
                done[name] = {"test": name, "outcome": "error", "reason": child.stderr.strip()[-200:]}
                break
            for line in started:
                line |= {"outcome": "crashed", "reason": f"exit status {child.returncode}"}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return list(done.values())


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
    parser.add_argument("--json", type=Path, help="where to write a line for every test")
    parser.add_argument("--keep", type=Path, help="a folder for what every file's tests write as they run")
    parser.add_argument("--report", type=Path, help="print the table of such a folder, and run nothing")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="files at a time")
    options = parser.parse_args()
    if options.report:
        for kind in FILES:
            last = {}
            for path in sorted(options.report.glob(f"{kind}-*.jsonl")):
                last |= {
                    line["test"]: line for line in map(json.loads, path.read_text().splitlines()) if "outcome" in line
                }
            last.pop("", None)
            for line in last.values():
                if line["outcome"] == "started":
                    line |= {"outcome": "not run", "reason": "stopped with its process"}
            print(f"\n## {kind}\n\n{table(list(last.values()))}", flush=True)
        return 0
    options.deadline = time.time() + options.stop_after if options.stop_after else None
    tasks = []
    for kind, names in FILES.items():
        directory = getattr(options, kind)
        for name in names if directory else []:
            if any(part in name for part in options.only) and (directory / name).exists():
                tasks += [(kind, directory.resolve(), name, shard) for shard in range(SHARDS.get(name, 1))]
    tasks.sort(key=lambda task: task[2] not in SHARDS)
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda task: run_file(*task, options), tasks))
    status = 0
    for kind in FILES:
        lines = [line for task, file in zip(tasks, done, strict=True) for line in file if task[0] == kind]
        if not lines:
            continue
        print(f"\n## {kind}\n\n{table(lines)}", flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps({"kind": kind, **line}) + "\n" for line in lines)
        status |= any(line["outcome"] in ("wrong", "crashed") for line in lines)
    return status


if __name__ == "__main__":
    sys.exit(main())
