"""vLLM's whole engine on the CPU, with attnops behind it: the tokens of vLLM's own backend.

Each engine is a process of its own. It finds attnops through the entry point that pyproject.toml declares.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import vllm_engine
from attnops.plugins import unsupported

pytestmark = pytest.mark.skipif(bool(unsupported("vllm")), reason=unsupported("vllm") or "-")

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
MLA = {"attention_config": {"backend": "CPU_MLA"}}  # AMX machines have another by default


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vllm_engine.declare_packages(tmp_path_factory.mktemp("vllm"))


def run(place: Path, kind: str, ours: bool, options=None, rounds=1, **environment: str) -> dict:
    environment["ATTNOPS_VLLM_CPU"] = "1" if ours else "0"
    result = vllm_engine.run(place, kind, OPTIONS | (options or {}), rounds, **environment)
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


def test_the_option_knows_the_name_that_the_entry_point_brings(folder, theirs):
    got = run(folder, "llama", True, {"attention_backend": "ATTNOPS"})
    assert got["tokens"] == theirs("llama")["tokens"]


def test_mla_gives_the_tokens_of_vllms_own_backend(folder, theirs):
    """Prompts by vLLM's own extension for them; the second time they are found in the prefix cache."""
    expected = theirs("deepseek_576", json.dumps(MLA), rounds=2)
    got = run(folder, "deepseek_576", True, MLA, rounds=2)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"]["mla_decode"] and got["calls"]["store_mla_kv"] and got["calls"]["fmha_varlen"]
    assert got["prefill_backends"]["CPU"].startswith("attnops.plugins.vllm")
    assert expected["prefill_backends"]["CPU"].startswith("vllm."), "without the variable nothing changes"


def test_layers_of_a_head_size_that_we_have_not_are_vllms_own(folder, theirs):
    """Gemma 4 in kind: windowed layers of head size 64 are ours, the others of 512 vLLM's, and the log says so."""
    expected, got = theirs("gemma4"), run(folder, "gemma4", True)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"]["xqa_decode"] and got["calls"]["fmha_paged"]
    said = [line for line in got["log"] if "attnops does not serve head size 512" in line]
    assert len(said) == 1 and "CPU_ATTN serves those layers" in said[0]
    assert not any("attnops does not serve" in line for line in expected["log"])


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
    vllm_engine.check_tokens(got, expected)
