"""SGLang's whole engine on the CPU, with attnops behind it: the tokens of transformers, whose attention is eager.

The engine's processes find attnops through the entry point that pyproject.toml declares. Prompts come in pieces, beside
decodes; in a second round they are found in the prefix cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from attnops.plugins import unsupported
from vllm_engine import LENGTHS, ROOT, declare_packages

MISSING = unsupported("sglang")
if not MISSING:
    needed = ("uvloop", "xgrammar", "tiktoken", "watchfiles", "zstandard", "python_multipart", "scipy", "soundfile")
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    MISSING = f"SGLang's engine needs {', '.join(absent)}" if absent else ""
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")

NEW = 20
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
MORE = {"gemma": {"hidden_act": "gelu_pytorch_tanh"}, "deepseek_yarn": {"moe_layer_freq": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return declare_packages(tmp_path_factory.mktemp("sglang"))


def prompts() -> list[list[int]]:
    return [tiny_models.prompts(1, length, seed=length)[0].tolist() for length in LENGTHS]


def expected(model) -> list[list[int]]:
    model.set_attn_implementation("eager")
    given = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    rows = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        rows.append(model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, len(prompt) :].tolist())
    return rows


def run(place: Path, model: Path, rounds: int, options: dict) -> dict:
    request = {"options": OPTIONS | {"model_path": str(model)} | options, "prompts": prompts(), "rounds": rounds}
    support = ROOT / "tests" / "support"
    paths = [str(place / "site"), str(support / "sglang_site"), str(ROOT / "python"), str(support), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CALLS": str(place / "calls")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    (place / "calls").write_text("")
    command = [sys.executable, str(support / "sglang_program.py"), json.dumps(request | {"max_tokens": NEW})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=place)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


CASES = {  # a model, options, rounds, and what must have served which layers
    "GQA": ("llama", {}, 2, {"EXTEND:MHATokenToKVPool:-1", "DECODE:MHATokenToKVPool:-1"}),
    "pages of 16, beside SGLang's own prompts": (
        "llama",
        {"page_size": 16, "prefill_attention_backend": "torch_native", "decode_attention_backend": "attnops"},
        1,
        {"DECODE:MHATokenToKVPool:-1"},
    ),
    "soft cap, windows": ("gemma", {}, 1, {"EXTEND:MHATokenToKVPool:6", "DECODE:MHATokenToKVPool:-1"}),
    "sinks, windows in a pool of their own": (
        "gpt_oss",
        {},
        2,
        {f"{mode}:SWAKVPool:{window}" for mode in ("EXTEND", "DECODE") for window in (5, -1)},
    ),
    "MLA, prompts not absorbed": ("deepseek_yarn", {}, 2, {"EXTEND:MLATokenToKVPool:-1", "DECODE:MLATokenToKVPool:-1"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_that_of_eager_attention(case, folder):
    kind, options, rounds, served = CASES[case]
    model, place = tiny_models.model(kind), folder / kind
    model.save_pretrained(place)
    config = place / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MORE.get(kind, {})))
    got = run(folder, place, rounds, options)
    assert got["tokens"] == [expected(model)] * rounds
    assert served <= set(got["calls"]), got["calls"]
    if "prefill_attention_backend" in options:
        assert not any(call.startswith("EXTEND") for call in got["calls"])
