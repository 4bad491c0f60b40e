"""SGLang's whole engine on a GPU, with graphs of decodes: the tokens of its own backend `triton`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sglang_engine
import tiny_models
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


def engine(folder, model, kind: str, backend: str, **options: object) -> dict:
    options = OPTIONS | {"attention_backend": backend} | options
    return sglang_engine.run(folder, model, 2, options, calls=f"calls-{kind}-{backend}", device="cuda")


def check_calls(result: dict) -> None:
    for mode in ("DECODE", "EXTEND"):
        assert any(call.startswith(mode) for call in result["calls"]), result["calls"]


@pytest.fixture
def plain_ops(monkeypatch):
    monkeypatch.setenv("PLAIN_OPS", "1")
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")


@pytest.mark.parametrize("kind", ["llama", "gemma", "deepseek_yarn"])
@pytest.mark.usefixtures("plain_ops")
def test_tokens_are_those_of_triton(kind, folder):
    """Prompts in pieces, then from the prefix cache. A decode in a graph calls no Python: captures are counted."""
    model = sglang_engine.save(tiny_models.model(kind).bfloat16(), kind, folder / kind)
    with ThreadPoolExecutor() as pool:
        got, theirs = pool.map(lambda backend: engine(folder, model, kind, backend), ("attnops", "triton"))
    for turn in range(2):
        one, other = ({name: got_or[name][turn:] for name in ("tokens", "logprobs")} for got_or in (got, theirs))
        equal = check_tokens(one, other)
        print(f"{kind}, round {turn}: {equal} of {len(one['tokens'][0])} requests are equal to their end")
    check_calls(got)
    assert not theirs["calls"]


@pytest.mark.usefixtures("plain_ops")
def test_tokens_of_gpt_oss_are_those_of_eager_attention(folder):
    """In float32: a router turns a rounding of bfloat16 into another expert. SGLang's `triton` gives other tokens here.

    No graphs: SGLang's experts, in plain PyTorch, copy from the CPU.
    """
    model = tiny_models.model("gpt_oss")
    expected = sglang_engine.eager_tokens(model)
    place = sglang_engine.save(model, "gpt_oss", folder / "gpt_oss")
    got = engine(folder, place, "gpt_oss", "attnops", dtype="float32", disable_cuda_graph=True)
    assert got["tokens"] == [expected] * 2
    check_calls(got)
