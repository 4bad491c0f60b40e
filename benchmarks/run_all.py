"""Runs every benchmark that this machine can run, within a time limit, and goes on where the last call stopped.

    python benchmarks/run_all.py --seconds 600              # again, until it says that nothing is left
    python benchmarks/run_all.py --list
    python benchmarks/run_all.py --only xqa_decode --again  # forget what was done before

Each job writes its rows to `results/`. What is done is kept in build/run_all.json, by commit: a new commit starts anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import records
import torch

HERE = Path(__file__).parent
STATE = HERE.parent / "build" / "run_all.json"
GPU_OF_RESULTS = "H200"  # names of GPU result files say it; rows of another GPU do not belong there


@dataclass(frozen=True)
class Job:
    """One call of a benchmark: small enough that a short limit gets through a few."""

    name: str
    script: str
    options: tuple[str, ...]
    device: str  # "cpu" or "cuda"
    needs: str = ""  # a package without which it has nothing to measure

    def command(self, cpu_name: str) -> list[str]:
        options = [cpu_name if option == "CPU_NAME" else option for option in self.options]
        return [sys.executable, str(HERE / self.script), *options]


def _jobs() -> list[Job]:
    jobs = [Job("import", "bench_import.py", (), "cpu")]
    for group in ("decode", "prefill", "mla"):
        options = ("--only", group, "--write", "--name", "CPU_NAME")
        jobs.append(Job(f"cpu_{group}", "bench_cpu.py", options, "cpu"))
    jobs.append(Job("cpu_linear", "bench_linear.py", ("--cpu", "--write", "--name", "CPU_NAME"), "cpu"))
    grid = ("latency", "bf16", "fp8", "page", "speculative", "skew", "invariant", "sustained")
    for script, flag, groups in (
        ("bench_xqa_decode.py", "--groups", grid),
        ("bench_fmha.py", "--groups", ("table", "hopper", "plan", "sustained")),
        ("bench_step_overhead.py", "--groups", ("call", "step", "compiled", "capture")),
    ):
        family = script.removeprefix("bench_").removesuffix(".py")
        jobs += [Job(f"{family}_{group}", script, (flag, group, "--write"), "cuda") for group in groups]
    for group in ("decode", "conv_decode", "convolve", "prefill", "verify", "first"):
        jobs.append(Job(f"linear_{group}", "bench_linear.py", ("--only", group, "--write"), "cuda"))
    wide, groups = ("--context", "131072"), "bf16,fp8,page,skew,latency"
    jobs += [
        Job("mla_decode", "bench_mla_decode.py", ("--write",), "cuda"),
        Job("mla_decode_wide", "bench_mla_decode.py", ("--write", *wide), "cuda"),
        Job(
            "xqa_decode_wide",
            "bench_xqa_decode.py",
            ("--groups", groups, *wide, "--write"),
            "cuda",
        ),
        Job("paged_kv", "bench_paged_kv.py", (), "cuda"),
        Job("speculation", "bench_speculation.py", ("--write",), "cuda"),
        Job("indexer", "bench_indexer.py", ("--write",), "cuda"),
        Job("sparse_mla", "bench_sparse_mla.py", ("--write",), "cuda"),
        Job("sparse_sampled", "bench_sparse_sampled.py", ("--write",), "cuda"),
        Job("block_lists", "bench_block_lists.py", ("--write",), "cuda"),
        Job("fp4", "bench_fp4.py", ("--write",), "cuda"),
        Job("decode_sampled", "bench_decode_sampled.py", ("--write",), "cuda"),
        Job("fmha_engine", "bench_fmha_engine.py", ("--write",), "cuda"),
        Job("triton", "bench_triton.py", ("--write",), "cuda", "triton"),
        Job("flashinfer", "bench_flashinfer.py", ("--write",), "cuda", "flashinfer"),
        Job("vllm_step", "bench_vllm_step.py", ("--write",), "cuda", "vllm"),
        Job("sglang_step", "bench_sglang_step.py", ("--write",), "cuda", "sglang"),
        Job("transformers_batch", "bench_transformers_batch.py", ("--write",), "cuda", "transformers"),
    ]
    return jobs


JOBS = tuple(_jobs())


def cannot_run(job: Job) -> str:
    """Why a job does not run here; empty where it does."""
    if job.needs and importlib.util.find_spec(job.needs) is None:
        return f"{job.needs} is not installed"
    if job.device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return "no GPU"
    name = torch.cuda.get_device_name()
    return "" if GPU_OF_RESULTS in name else f"results are of an {GPU_OF_RESULTS}, this is {name}: run {job.script}"


def read_state() -> dict[str, str]:
    """Jobs done, by name, at the present commit."""
    if not STATE.exists():
        return {}
    kept = json.loads(STATE.read_text())
    return kept["done"] if kept.get("commit") == records.current_commit().rstrip("+") else {}


def write_state(done: dict[str, str]) -> None:
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps({"commit": records.current_commit().rstrip("+"), "done": done}, indent=1))


def run(jobs: list[Job], seconds: float, cpu_name: str) -> int:
    """Runs what is left until the time is over. Returns how many jobs failed."""
    end, failed = time.monotonic() + seconds, 0
    done = read_state()
    for job in jobs:
        left = end - time.monotonic()
        if job.name in done or cannot_run(job):
            print(f"{job.name:24} {cannot_run(job) or 'done before'}")
            continue
        if left <= 0:
            print(f"{job.name:24} left for the next call")
            continue
        start = time.monotonic()
        try:
            code = subprocess.run(job.command(cpu_name), timeout=left, stdout=subprocess.DEVNULL).returncode
        except subprocess.TimeoutExpired:
            print(f"{job.name:24} stopped after {left:.0f} s: its rows are as before, the next call starts it again")
            continue
        taken = time.monotonic() - start
        if code:
            failed += 1
            print(f"{job.name:24} failed with exit code {code} after {taken:.0f} s")
            continue
        done[job.name] = f"{taken:.0f} s"
        write_state(done)
        print(f"{job.name:24} {taken:.0f} s")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="start nothing after this long, and stop what runs")
    parser.add_argument("--only", default="", help="jobs whose name has this text")
    parser.add_argument("--again", action="store_true", help="run jobs that were done at this commit, too")
    parser.add_argument("--list", action="store_true", help="print the jobs and whether they can run here")
    parser.add_argument("--cpu-name", default="cpu", help="prefix of the CPU's result files, for another machine")
    options = parser.parse_args(arguments)
    jobs = [job for job in JOBS if options.only in job.name]
    if not jobs:
        parser.error(f"--only {options.only}: no job has this in its name")
    if options.list:
        for job in jobs:
            print(f"{job.name:24} {job.device:5} {cannot_run(job) or 'runs here'}")
        return 0
    if options.again:
        write_state({name: taken for name, taken in read_state().items() if name not in {job.name for job in jobs}})
    return run(jobs, options.seconds, options.cpu_name)


if __name__ == "__main__":
    sys.exit(main())
