"""SGLang's whole engine on a GPU, with graphs of decodes: the tokens of its own backend `triton`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sglang_engine
import tiny_models
import torch
from vllm_engine import check_tokens, declare_packages

# What a GPU's engine imports. The compiled module may be a stand-in: all but attention is plain PyTorch.
MISSING = sglang_engine.missing(("uvloop", "xgrammar", "tiktoken", "python_multipart", "sgl_kernel"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "-"),
]
OPTIONS = {
    "dtype": "bfloat16",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": False,
    "cuda_graph_bs_decode": [1, 2, 4],
    "disable_prefill_cuda_graph": True,
    "mem_fraction_static": 0.5,  # of what is free now; other tests take of it, too
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return declare_packages(tmp_path_factory.mktemp("sglang"))


KINDS = [
    ("llama", "bfloat16"),
    ("gemma", "bfloat16"),
    ("gpt_oss", "bfloat16"),
    ("deepseek_yarn", "bfloat16"),
    ("gpt_oss", "float32"),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_tokens_are_those_of_triton(kind, dtype, folder, monkeypatch):
    """Prompts in pieces, then from the prefix cache. A decode in a graph calls no Python: captures are counted.

    GPT-OSS runs without graphs: its experts, in plain PyTorch, copy from the CPU. A router may turn a
    rounding into another expert, so it runs in float32, too: there only equal tokens pass.
    """
    monkeypatch.setenv("PLAIN_OPS", "1")
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    model = sglang_engine.save(tiny_models.model(kind).to(getattr(torch, dtype)), kind, folder / f"{kind}-{dtype}")

    def run(backend: str) -> dict:
        options = OPTIONS | {"attention_backend": backend, "dtype": dtype, "disable_cuda_graph": kind == "gpt_oss"}
        return sglang_engine.run(folder, model, 2, options, calls=f"calls-{kind}-{dtype}-{backend}", device="cuda")

    with ThreadPoolExecutor() as pool:
        got, theirs = pool.map(run, ("attnops", "triton"))
    for turn in range(2):
        one, other = ({name: got_or[name][turn:] for name in ("tokens", "logprobs")} for got_or in (got, theirs))
        equal = check_tokens(one, other, 2**-8 * 32 if dtype == "bfloat16" else 1e-3)
        print(f"{kind}, round {turn}: {equal} of {len(one['tokens'][0])} requests are equal to their end")
    assert any(call.startswith("DECODE") for call in got["calls"])
    assert any(call.startswith("EXTEND") for call in got["calls"])
    assert not theirs["calls"]
