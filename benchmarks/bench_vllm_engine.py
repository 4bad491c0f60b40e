"""vLLM's whole engine on a GPU: the time of a decode step with attnops, and with vLLM's own backends, in turns.

Each side is a process that holds one engine with the same random weights and full decode graphs. A cell's prompts are
computed once and stay in the prefix cache. Then the sides take many short turns, each the first in its own: each
decodes some tokens of every request, and the median of its steps counts. A ratio is the median over the turns of that
turn's ratio, since a host is slower at times. A step is all of the engine: scheduler, builder, graph,
sampling. `host` is what the engine's thread computes of it, since vLLM sleeps while it waits for the GPU, and `build`
the backend's part of that. All sides step on the same cores, the last `--cores` of the machine's, so that none has
faster ones. With `--profile`, steps of some cells run again at the end: eight with times of kernels, twenty with times
of Python functions.

    PYTHONPATH=python python benchmarks/bench_vllm_engine.py --model gqa        # and --model mla
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import records

CONTEXT = 131072
CELLS = {
    "1 x 32768": [32768],
    "64 x 8192": [8192] * 64,
    "ragged 64": sorted(random.Random(0).randint(256, 8192) for _ in range(64)),
    "8 x 1024": [1024] * 8,
}
FIRST_TOKENS, TOKENS = 40, 40  # of a request: those that are compared, and those that are timed
COMMON = {
    "vocab_size": 32000,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "gqa": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **COMMON,
    },
    "mla": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 27,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1000,  # none of the layers has experts
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **COMMON,
    },
}
SIDES = {"gqa": ("ATTNOPS", "FLASH_ATTN", "TRITON_ATTN"), "mla": ("ATTNOPS_MLA", "FLASH_ATTN_MLA", "FLASHMLA")}


@functools.cache
def prompt(seed: int, length: int) -> list[int]:
    """Of one seed, a shorter prompt is the beginning of a longer one: both share the prefix cache."""
    return random.Random(seed).choices(range(3, 32000), k=length)


def timed_builds(backend: str) -> list[float]:
    """Where the host's microseconds of each `build` of the backend's metadata will be."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    times: list[float] = []
    builder = AttentionBackendEnum[backend].get_class().get_builder_cls()
    build = builder.build

    @functools.wraps(build)
    def timed(*args, **options):
        begin = time.perf_counter()
        made = build(*args, **options)
        times.append((time.perf_counter() - begin) * 1e6)
        return made

    builder.build = timed
    return times


class Profile:
    """Eight steps with times of kernels, then twenty with times of functions. The result: microseconds of a step."""

    def __init__(self) -> None:
        self.kernels, self.functions = None, cProfile.Profile()
        self.step, self.result = 0, {}

    def run(self, step):
        import torch

        self.step += 1
        if self.step == 1:
            self.kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.kernels.start()
        outputs = self.functions.runcall(step) if 8 < self.step <= 28 else step()
        if self.step == 8:
            torch.cuda.synchronize()
            self.kernels.stop()
            rows = [
                (row.key[:48], row.self_device_time_total / 8, row.count / 8)
                for row in self.kernels.key_averages()
                if row.self_device_time_total
            ]
            self.result["kernels"] = sorted(rows, key=lambda row: -row[1])
        if self.step == 28:
            rows = [
                (f"{Path(file).stem}.{name}", own / 20 * 1e6, calls / 20)
                for (file, _, name), (_, calls, own, _, _) in pstats.Stats(self.functions).stats.items()
            ]
            self.result["functions"] = sorted(rows, key=lambda row: -row[1])
        return outputs


def serve(backend: str, folder: str, gigabytes: float, cores: int) -> None:
    """A side: reads a request a line, decodes, and prints the microseconds of each step and the tokens."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    answers, sys.stdout = sys.stdout, sys.stderr
    from attnops.plugins import vllm as plugin
    from vllm import LLM, SamplingParams

    if backend.startswith("ATTNOPS"):
        plugin.register()  # a source tree has no entry points
    builds = timed_builds(backend)
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        block_size=64,
        max_model_len=CONTEXT,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=int(gigabytes * 2**30),
        gpu_memory_utilization=0.1,  # vLLM wants that much free, whatever its cache takes; three sides share a GPU
        attention_config={"backend": backend},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
        },
    ).llm_engine
    print("READY", file=answers, flush=True)
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    for count, line in enumerate(sys.stdin):
        wanted = json.loads(line)
        lengths, last = CELLS[wanted["cell"]], wanted["tokens"] - 2
        greedy = SamplingParams(temperature=0, max_tokens=wanted["tokens"], ignore_eos=True, detokenize=False)
        profile = Profile() if wanted["profile"] else None
        for i, n in enumerate(lengths):
            engine.add_request(f"{count}.{i}", {"prompt_token_ids": prompt(i, n)}, greedy)
        steps, hosts, tokens, every = [], [], {}, False
        builds.clear()
        while engine.has_unfinished_requests():
            begin, host = time.perf_counter(), time.thread_time()
            outputs = profile.run(engine.step) if profile and every else engine.step()
            taken, host = time.perf_counter() - begin, time.thread_time() - host
            for output in outputs:
                tokens[output.request_id.split(".")[-1]] = list(output.outputs[0].token_ids)
            made = [len(t) for t in tokens.values()]
            every = len(made) == len(lengths) and min(made) > 4 and max(made) < last
            if every:
                steps.append(taken * 1e6)
                hosts.append(host * 1e6)
        result = {
            "steps": steps,
            "hosts": hosts,
            "tokens": tokens,
            "builds": builds[-len(steps) :],
            **(profile.result if profile else {}),
        }
        print("RESULT " + json.dumps(result), file=answers, flush=True)


class Side:
    """A process that serves one backend."""

    def __init__(self, backend: str, folder: str, gigabytes: float, cores: int) -> None:
        command = [sys.executable, __file__, "--serve", backend, "--folder", folder, "--gigabytes", str(gigabytes)]
        command += ["--cores", str(cores)]
        self.name = backend
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self, word: str) -> str:
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")

    def begin(self, cell: str, tokens: int = FIRST_TOKENS, profile: bool = False) -> None:
        self.process.stdin.write(json.dumps({"cell": cell, "tokens": tokens, "profile": profile}) + "\n")
        self.process.stdin.flush()

    def decode(self, cell: str, tokens: int = FIRST_TOKENS, profile: bool = False) -> dict:
        self.begin(cell, tokens, profile)
        return json.loads(self.answer("RESULT "))


def prepare(sides: list[Side], cells: list[str], signal: Path) -> None:
    """Every side computes the cells' prompts and compiles what it needs, at once; then the file `signal` is awaited."""
    for cell in cells:
        if signal.exists():
            break
        for side in sides:
            side.begin(cell)
        for side in sides:
            side.answer("RESULT ")
        print(f"prepared {cell}", flush=True)
    while not signal.exists():
        time.sleep(0.1)


def equal_share(one: dict, other: dict) -> float:
    """The share of tokens up to each request's first difference."""
    same = total = 0
    for request, tokens in one.items():
        pairs = list(zip(tokens, other[request], strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total = same + first, total + len(pairs)
    return same / total


def quartile(values: list[float], which: int) -> float:
    return sorted(values)[min(len(values) * which // 4, len(values) - 1)]


def show(what: str, profiled: dict) -> None:
    """The largest parts of a step, of kernels and of functions: microseconds, and calls of each."""
    for kind in ("kernels", "functions"):
        rows = profiled.get(kind, [])
        parts = "; ".join(f"{name} {us:.0f} ({calls:.0f})" for name, us, calls in rows[:10])
        print(f"{what}: {kind} {sum(us for _, us, _ in rows):.0f} us: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gqa")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--sides", nargs="*", help="backends, attnops' first")
    parser.add_argument("--layers", type=int, help="of the model, in place of its own")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=600, help="no further turn begins after that")
    parser.add_argument("--signal", type=Path, help="a file: sides are prepared, then nothing begins before it exists")
    parser.add_argument("--gigabytes", type=float, default=24, help="of a side's KV cache")
    parser.add_argument("--cores", type=int, default=2, help="that the sides step on; 0: any")
    parser.add_argument("--profile", nargs="*", default=[], choices=list(CELLS), help="cells to look into at the end")
    parser.add_argument("--write", action="store_true", help="results/h200-vllm-engine-MODEL.jsonl")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.gigabytes, options.cores)
        return
    kept, config = [], dict(MODELS[options.model])
    if options.layers:
        config["num_hidden_layers"] = options.layers
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        given = (folder, options.gigabytes, options.cores)
        sides = [Side(name, *given) for name in options.sides or SIDES[options.model]]
        running = []
        for side in sides:
            try:
                side.answer("READY")
                running.append(side)
            except RuntimeError as error:
                print(f"{side.name} did not start: {error}", flush=True)
        if not running:
            raise SystemExit("no side started")
        if options.signal:
            prepare(running, options.cells, options.signal)
        begin = time.perf_counter()
        for cell in reversed(options.cells) if options.signal else options.cells:
            first = {side.name: side.decode(cell)["tokens"] for side in running}  # prompts, and warm-up
            steps: dict[str, list[float]] = {side.name: [] for side in running}
            medians: dict[str, list[float]] = {side.name: [] for side in running}  # of each turn
            builds: dict[str, list[float]] = {side.name: [] for side in running}
            hosts: dict[str, list[float]] = {side.name: [] for side in running}
            for turn in range(options.turns):
                if turn and time.perf_counter() - begin > options.seconds:
                    break
                at = turn % len(running)
                for side in running[at:] + running[:at]:
                    made = side.decode(cell, TOKENS)
                    steps[side.name] += made["steps"]
                    medians[side.name].append(statistics.median(made["steps"]))
                    builds[side.name] += made["builds"]
                    hosts[side.name] += made["hosts"]
            times = {name: statistics.median(values) for name, values in steps.items()}
            ours = running[0].name
            for name, us in times.items():
                share = equal_share(first[ours], first[name])
                low, high, part = quartile(steps[name], 1), quartile(steps[name], 3), quartile(builds[name], 2)
                host = quartile(hosts[name], 2)
                ratios = [other / own for other, own in zip(medians[name], medians[ours], strict=True)]
                print(
                    f"{options.model} {cell:<12} {name:<16} {us:9.1f} us a step  {statistics.median(ratios):.3f}x"
                    f" ({min(ratios):.3f} to {max(ratios):.3f})"
                    f"  equal {share:.2f}  quartiles {low:.0f} {high:.0f}  host {host:.0f}  build {part:.1f}"
                    f"  ({len(steps[name])} steps)"
                )
                shape = {"step": cell, "model": options.model, "layers": config["num_hidden_layers"]}
                peer, release = ("attnops", "") if name == ours else (f"vLLM {name}", version("vllm"))
                note = f"whole engine, full decode graphs, blocks of 64, context {CONTEXT}"
                kept.append(records.Record(f"vLLM engine {options.model}", peer, shape, us / 1e3, release, note=note))
            sys.stdout.flush()
            if options.write:
                records.write(kept, f"h200-vllm-engine-{options.model}")
        for cell in options.profile:
            for side in running:
                try:
                    show(f"{options.model} {cell} {side.name}", side.decode(cell, TOKENS, profile=True))
                except (RuntimeError, OSError) as error:
                    print(f"{side.name} could not be profiled: {error}", flush=True)
        for side in running:
            side.process.stdin.close()


if __name__ == "__main__":
    main()
