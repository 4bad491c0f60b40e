"""vLLM's whole engine on a GPU: the tokens of its own backend, with graphs of whole decode steps."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import vllm_engine
from attnops.plugins import unsupported

MISSING = unsupported("vllm")
if not MISSING and not importlib.util.find_spec("vllm._C_stable_libtorch"):
    MISSING = "this vLLM has no compiled CUDA module"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "-"),
]

OPTIONS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
    "dtype": "bfloat16",
    "block_size": 64,  # what every MLA backend of vLLM takes
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,  # prompts come in pieces, beside decodes
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.02,  # other tests share the GPU
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vllm_engine.declare_packages(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def run(folder):
    def of(kind: str, backend: str | None, rounds: int = 1) -> dict:
        chosen = {"attention_backend": backend} if backend else {}
        return vllm_engine.run(folder, kind, OPTIONS | chosen, rounds)

    return functools.cache(of)


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt_oss", "gemma4"])
def test_tokens_are_those_of_vllms_own_backend(kind, run):
    """Of `gemma4` the layers of head size 512 are TRITON_ATTN's on both sides, and the log says so."""
    got, expected = run(kind, "ATTNOPS", 2), run(kind, "TRITON_ATTN", 2)
    equal = vllm_engine.check_tokens(got, expected)
    print(f"{kind}: {equal} of {len(expected['tokens'][0])} requests are equal to their end")
    assert got["calls"]["xqa_decode"] and got["calls"]["fmha_paged"] and got["calls"]["store_kv"]
    assert not any(expected["calls"].values())
    said = [line for line in got["log"] if "attnops does not serve head size 512" in line]
    assert len(said) == (kind == "gemma4") and all("TRITON_ATTN serves those layers" in line for line in said)


def test_mla_tokens_are_those_of_vllms_own_backend(run):
    got, expected = run("deepseek_192", "ATTNOPS_MLA"), run("deepseek_192", "TRITON_MLA")
    equal = vllm_engine.check_tokens(got, expected)
    print(f"MLA: {equal} of {len(expected['tokens'][0])} requests are equal to their end")
    assert got["calls"]["mla_decode"] and got["calls"]["store_mla_kv"]
    assert got["calls"]["fmha_varlen"], "prompts go to fmha where the option mla_prefill_backend is left open"
    assert not any(expected["calls"].values()), "and to vLLM's own where another backend decodes"


def test_mla_prompts_stay_vllms_own_where_the_option_names_it(folder, run):
    chosen = {"attention_backend": "ATTNOPS_MLA", "attention_config": {"mla_prefill_backend": "FLASH_ATTN"}}
    got = vllm_engine.run(folder, "deepseek_192", OPTIONS | chosen)
    vllm_engine.check_tokens(got, run("deepseek_192", "TRITON_MLA"))
    assert got["calls"]["mla_decode"] and "fmha_varlen" not in got["calls"]
    assert any("vLLM's own: mla_prefill_backend is FLASH_ATTN" in line for line in got["log"])
