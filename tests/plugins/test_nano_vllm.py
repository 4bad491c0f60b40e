"""nano-vllm, a whole engine, unmodified: on `attnops.compat.flash_attn` it gives the tokens of plain PyTorch.

Its checkout is not part of attnops: NANO_VLLM names its folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKOUT = os.environ.get("NANO_VLLM", "")
NEEDED = [name for name in ("transformers", "xxhash", "safetensors", "tqdm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not Path(CHECKOUT, "nanovllm").is_dir(), reason="NANO_VLLM names no checkout of nano-vllm"),
    pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {', '.join(NEEDED)}"),
]
PROGRAM = Path(__file__).parents[1] / "support" / "nano_vllm_program.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=384,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.25,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("qwen3")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def run(model: Path, kind: str, prompts: list[list[int]]) -> dict:
    paths = os.pathsep.join([str(PROGRAM.parents[2] / "python"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, str(PROGRAM), CHECKOUT, str(model), kind, json.dumps(prompts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_every_token_is_that_of_plain_pytorch(model):
    """More requests than run at once, a prompt longer than a block, and a second round from the prefix cache."""
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 300, 17, 600, 255, 256, 40)
    prompts = [torch.randint(3, 384, (n,), generator=generator).tolist() for n in lengths]
    expected, got = run(model, "sdpa", prompts), run(model, "attnops", prompts)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"] == expected["calls"] and min(got["calls"].values()) >= 10
    assert len({token for request in got["tokens"][0] for token in request}) > 20, "a model that repeats itself"
