"""vLLM's whole engine on the CPU, with attnops behind it: the tokens of vLLM's own backend.

Each engine is a process of its own. It finds attnops through the entry point that pyproject.toml declares.
"""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path

import installed_wheel
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
KINDS = ["llama", "gemma", "gpt_oss", "deepseek_576"]
MLA = {"attention_config": {"backend": "CPU_MLA"}}  # AMX machines have another by default


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vllm_engine.declare_packages(tmp_path_factory.mktemp("vllm"))


def of_kind(kind: str, **options) -> dict:
    """Options, and those of MLA where a kind needs them."""
    return {**options, **(MLA if kind.startswith("deepseek") else {})}


def run(place: Path, kind: str, ours: bool, options=None, rounds=1, lengths=vllm_engine.LENGTHS, **environment) -> dict:
    environment["ATTNOPS_VLLM_CPU"] = "1" if ours else "0"
    result = vllm_engine.run(place, kind, OPTIONS | of_kind(kind, **(options or {})), rounds, lengths, **environment)
    assert any(result["calls"].values()) == ours, result["calls"]
    return result


@pytest.fixture(scope="module")
def theirs(folder):
    """vLLM's own results, by kind and dtype: of two rounds."""
    return functools.cache(lambda kind, dtype="float32": run(folder, kind, False, {"dtype": dtype}, rounds=2))


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt_oss"])
def test_every_token_is_that_of_vllms_own_backend(kind, folder, theirs):
    """Twice: the second time prompts are found in the prefix cache."""
    expected, got = theirs(kind), run(folder, kind, True, rounds=2)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"]["xqa_decode"] and got["calls"]["fmha_paged"] and got["calls"]["store_kv"]
    assert got["backends"]["CPU_ATTN"].startswith("attnops.plugins.vllm")
    assert expected["backends"]["CPU_ATTN"].startswith("vllm."), "without the variable nothing changes"
    assert expected["backends"]["ATTNOPS"] == got["backends"]["ATTNOPS"], "the entry point was found"


def test_the_entry_point_of_an_installed_wheel_is_found_and_used(theirs, tmp_path):
    """By vLLM, in a site folder that pip has filled, without this tree's package."""
    site = installed_wheel.install(tmp_path)
    got = run(vllm_engine.declare_counter(tmp_path), "llama", True)
    assert got["attnops"].startswith(str(site))
    assert got["tokens"] == theirs("llama")["tokens"][:1]
    assert got["backends"]["CPU_ATTN"] == got["backends"]["ATTNOPS"] == "attnops.plugins.vllm.backend.AttnopsBackend"
    assert got["calls"]["xqa_decode"] and got["calls"]["fmha_paged"] and got["calls"]["store_kv"]


def test_without_the_option_all_is_as_without_attnops(theirs, tmp_path):
    if importlib.metadata.entry_points(group="vllm.general_plugins", name="attnops"):
        pytest.skip("attnops is installed in this environment")
    got = vllm_engine.run(tmp_path, "llama", OPTIONS, rounds=2)
    assert got["attnops"] is None and "ATTNOPS" not in got["backends"], "no entry point of ours is here"
    expected = theirs("llama")
    assert expected["attnops"], "there it is found, and registers its names"
    assert (got["tokens"], got["logprobs"]) == (expected["tokens"], expected["logprobs"])


def test_the_option_knows_the_name_that_the_entry_point_brings(folder, theirs):
    got = run(folder, "llama", True, {"attention_backend": "ATTNOPS"})
    assert got["tokens"] == theirs("llama")["tokens"][:1]


def test_mla_gives_the_tokens_of_vllms_own_backend(folder, theirs):
    """Prompts by vLLM's own extension for them. vLLM's CPU platform has neither chunks nor a prefix cache for MLA."""
    expected, got = theirs("deepseek_576"), run(folder, "deepseek_576", True, rounds=2)
    assert got["tokens"] == expected["tokens"]
    assert got["calls"]["mla_decode"] and got["calls"]["store_mla_kv"] and got["calls"]["fmha_varlen"]
    assert got["prefill_backends"]["CPU"].startswith("attnops.plugins.vllm")
    assert expected["prefill_backends"]["CPU"].startswith("vllm."), "without the variable nothing changes"


def test_layers_of_a_head_size_that_we_have_not_are_vllms_own(folder, theirs):
    """Gemma 4 in kind: windowed layers of head size 64 are ours, the others of 512 vLLM's, and the log says so."""
    expected, got = theirs("gemma4"), run(folder, "gemma4", True)
    assert got["tokens"] == expected["tokens"][:1]
    assert got["calls"]["xqa_decode"] and got["calls"]["fmha_paged"]
    said = [line for line in got["log"] if "attnops does not serve head size 512" in line]
    assert len(said) == 1 and "CPU_ATTN serves those layers" in said[0]
    assert not any("attnops does not serve" in line for line in expected["log"])


@pytest.mark.parametrize("kind, blocks", [("llama", 9), ("gemma", 17), ("gpt_oss", 17), ("deepseek_576", 17)])
def test_requests_that_lose_their_blocks_come_back(kind, blocks, folder, theirs):
    """Too few blocks for what four prompts of 64 tokens become: some are preempted and computed again.

    With MLA vLLM 0.32's own gives four equal prompts different tokens on a CPU. So it is asked for the same four.
    """
    few = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": False}
    got = run(folder, kind, True, few, lengths=(64,) * 4)
    assert got["calls"]["preempted"]
    if kind == "deepseek_576":
        own = vllm_engine.run(folder, kind, OPTIONS | MLA | few, lengths=(64,) * 4, ATTNOPS_VLLM_CPU="0")
        assert own["calls"].keys() == {"preempted"} and got["tokens"] == own["tokens"]
    else:
        assert got["tokens"] == [[theirs(kind)["tokens"][0][vllm_engine.LENGTHS.index(64)]] * 4]


RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PROCESSES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.mark.parametrize("kind", KINDS[:3])
def test_two_ranks_give_the_tokens_of_one(kind, folder, theirs):
    """Over gloo; of vLLM's own backend."""
    got = run(folder, kind, True, RANKS, **PROCESSES)
    assert got["tokens"] == theirs(kind)["tokens"][:1]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_two_ranks_in_bfloat16(kind, folder, theirs):
    """Sums over two ranks are rounded otherwise, which may choose another expert: vLLM's own has two ranks, too."""
    options = {**RANKS, "dtype": "bfloat16"}
    experts = kind == "gpt_oss"
    expected = run(folder, kind, False, options, **PROCESSES) if experts else theirs(kind, "bfloat16")
    vllm_engine.check_tokens(run(folder, kind, True, options, **PROCESSES), expected)


def test_mla_on_two_ranks_is_called_there(folder, theirs):
    """vLLM 0.32's own gives other tokens of MLA on two CPU ranks than on one, and not the same ones twice: tokens say
    nothing of attention there. Where it has the tokens of one rank, ours must have them, too.
    """
    got, own = (run(folder, "deepseek_576", ours, RANKS, **PROCESSES) for ours in (True, False))
    assert got["calls"]["mla_decode"] and got["calls"]["store_mla_kv"] and got["calls"]["fmha_varlen"]
    expected = theirs("deepseek_576")["tokens"][:1]
    if own["tokens"] != expected:
        pytest.skip("vLLM's own backend has other tokens of MLA on two ranks than on one")
    assert got["tokens"] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_a_token_differs_only_where_two_are_a_rounding_apart(kind, folder, theirs):
    vllm_engine.check_tokens(run(folder, kind, True, {"dtype": "bfloat16"}), theirs(kind, "bfloat16"))
