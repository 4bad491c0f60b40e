"""Runs `sglang_program.py`: SGLang's whole engine in processes of its own, with attnops found by its entry point."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import tiny_models
import torch
from attnops.plugins import unsupported
from vllm_engine import LENGTHS, ROOT

NEW = 20
NEEDED = ("uvloop", "xgrammar", "tiktoken", "watchfiles", "zstandard", "python_multipart", "scipy", "soundfile")
OPTIONS = {
    "attention_backend": "attnops",
    "dtype": "float32",
    "context_length": 512,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}
# What SGLang reads of a configuration, and transformers has otherwise.
MORE = {
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "deepseek_yarn": {"moe_layer_freq": 1},
    "gpt_oss": {"swiglu_limit": 7.0},
}


def missing(needed=NEEDED) -> str:
    """Why the engine cannot run; empty where it can."""
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    return unsupported("sglang") or (f"SGLang's engine needs {', '.join(absent)}" if absent else "")


def prompts() -> list[list[int]]:
    return [tiny_models.prompts(1, length, seed=length)[0].tolist() for length in LENGTHS]


def eager_tokens(model) -> list[list[int]]:
    """What transformers' own attention, in plain PyTorch, generates from the prompts."""
    model.set_attn_implementation("eager")
    given = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    rows = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        rows.append(model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, len(prompt) :].tolist())
    return rows


def save(model, kind: str, place: Path) -> Path:
    """The model's folder, with what SGLang reads of its configuration."""
    model.save_pretrained(place)
    config = place / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MORE.get(kind, {})))
    return place


def run(place: Path, model: Path, rounds: int, options: dict, calls: str = "calls", **more: object) -> dict:
    """The program's result: tokens, the two best log-probabilities of each, calls of attnops by mode and pool.

    Programs that run at once need names of their own for the file of `calls`.
    """
    request = {"options": OPTIONS | {"model_path": str(model)} | options, "prompts": prompts(), "rounds": rounds}
    support = ROOT / "tests" / "support"
    paths = [str(place / "site"), str(support / "sglang_site"), str(ROOT / "python"), str(support), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CALLS": str(place / calls)}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    (place / calls).write_text("")
    request |= {"max_tokens": NEW, **more}
    command = [sys.executable, str(support / "sglang_program.py"), json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=place)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("RESULT "))
