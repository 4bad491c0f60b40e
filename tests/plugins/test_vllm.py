"""vLLM's whole engine on the CPU, with attnops behind it: the tokens of vLLM's own backend.

Each engine is a process of its own. It finds attnops through the entry point that pyproject.toml declares.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from attnops.plugins import unsupported

pytestmark = pytest.mark.skipif(bool(unsupported("vllm")), reason=unsupported("vllm") or "-")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "vllm_program.py"
OPTIONS = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,  # prompts come in pieces, beside decodes
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
}
LENGTHS = (3, 90, 17, 130, 44, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the models are, and an installed package's entry points: what pyproject.toml declares of them."""
    tomllib = pytest.importorskip("tomllib")
    place = tmp_path_factory.mktemp("vllm")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = place / "site" / f"attnops-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: attnops\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    counter = place / "site" / "counter-1.dist-info"
    counter.mkdir()
    (counter / "METADATA").write_text("Metadata-Version: 2.1\nName: counter\nVersion: 1\n")
    (counter / "entry_points.txt").write_text("[vllm.general_plugins]\ncounter = vllm_program:count_calls\n")
    return place


@functools.cache
def model_folder(place: Path, kind: str) -> str:
    path = place / kind
    tiny_models.model(kind).save_pretrained(path)
    return str(path)


def run(place: Path, kind: str, ours: bool, options=None, rounds=1, lengths=LENGTHS, **environment) -> dict:
    request = {
        "model": model_folder(place, kind),
        "options": OPTIONS | (options or {}),
        "prompts": [tiny_models.prompts(1, n, seed=n)[0].tolist() for n in lengths],
        "rounds": rounds,
        "max_tokens": 20,
    }
    paths = [str(place / "site"), str(ROOT / "python"), str(PROGRAM.parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    environment["ATTNOPS_VLLM_CPU"] = "1" if ours else "0"
    environment["CALLS"] = str(place / "calls")
    Path(environment["CALLS"]).write_text("")
    command = [sys.executable, str(PROGRAM), json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=place)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-6000:]
    result = json.loads(lines[-1].removeprefix("RESULT "))
    assert any(result["calls"].values()) == ours, result["calls"]
    return result


@pytest.fixture(scope="module")
def theirs(folder):
    """vLLM's own results, by kind and options."""
    return functools.cache(lambda kind, options="{}", rounds=1: run(folder, kind, False, json.loads(options), rounds))


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt_oss"])
def test_every_token_is_that_of_vllms_own_backend(kind, folder, theirs):
    """Twice: the second time prompts are found in the prefix cache."""
    expected, got = theirs(kind, rounds=2), run(folder, kind, True, rounds=2)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"]["xqa_decode"] and got["calls"]["fmha_paged"] and got["calls"]["store_kv"]
    assert got["backends"]["CPU_ATTN"].startswith("attnops.plugins.vllm")
    assert expected["backends"]["CPU_ATTN"].startswith("vllm."), "without the variable nothing changes"
    assert expected["backends"]["ATTNOPS"] == got["backends"]["ATTNOPS"], "the entry point was found"


def test_mla_gives_the_tokens_of_vllms_own_backend(folder, theirs):
    options = {"attention_config": {"backend": "CPU_MLA"}}
    expected, got = theirs("deepseek_576", json.dumps(options)), run(folder, "deepseek_576", True, options)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"]["mla_decode"] and got["calls"]["store_mla_kv"]


def test_requests_that_lose_their_blocks_come_back(folder, theirs):
    """Too few blocks for four requests at once: some are preempted and computed again."""
    got = run(folder, "llama", True, {"num_gpu_blocks_override": 9})
    assert got["tokens"] == theirs("llama", rounds=2)["tokens"][:1]


def test_two_ranks_give_the_tokens_of_one(folder, theirs):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    got = run(folder, "llama", True, options, VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert got["tokens"] == theirs("llama", rounds=2)["tokens"][:1]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_in_bfloat16_a_token_differs_only_where_two_are_a_rounding_apart(kind, folder, theirs):
    options = {"dtype": "bfloat16"}
    expected, got = theirs(kind, json.dumps(options)), run(folder, kind, True, options)
    for request, (one, other) in enumerate(zip(got["tokens"][0], expected["tokens"][0], strict=True)):
        first = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)
        if first is not None:
            best, second = expected["logprobs"][0][request][first]
            print(f"request {request}, token {first}: two candidates {best - second:.4f} apart")
            assert best - second <= 2**-8 * 32, "logits of some 30: a rounding of bfloat16"
