"""Options of backend triton: each argument and each environment variable changes what it names; arguments win."""

from __future__ import annotations

import importlib

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from steps import LIMITS, Model, make_step

pytest.importorskip("triton", reason="needs triton")
NAME = "triton"
SPLITS = "SGLANG_TRITON_ATTENTION_NUM_KV_SPLITS"
TILE = "SGLANG_TRITON_ATTENTION_SPLIT_TILE_SIZE"
FIXED_TILE = "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE"


def gqa(**options) -> AttentionSpec:
    return AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, **options)


def planned(name: str, spec: AttentionSpec, **options) -> list[int]:
    """Splits of a decode step's requests, of which one has 151 tokens and one 64."""
    backend = get_backend_class(name)(spec, LIMITS, **options)
    step = make_step(Model("gqa", spec), ForwardMode.DECODE, [150, 63], [1, 1], uniform=True)
    backend.init_forward_metadata(step.batch)
    step.run(backend)
    return backend._prepared.of(step.batch).splits[-1].tolist()


@pytest.mark.parametrize("name", [NAME])
def test_most_splits_and_tokens_of_a_split(name, monkeypatch):
    wide = {"triton_attention_split_tile_size": 16}
    assert planned(name, gqa(), **wide) == [8, 4]
    assert planned(name, gqa(), triton_attention_num_kv_splits=3, **wide) == [3, 3]
    monkeypatch.setenv(SPLITS, "5")
    assert planned(name, gqa(), **wide) == [5, 4]
    assert planned(name, gqa(), triton_attention_num_kv_splits=3, **wide) == [3, 3]
    monkeypatch.setenv(TILE, "64")
    assert planned(name, gqa()) == [3, 1]
    assert planned(name, gqa(), **wide) == [5, 4]
    assert planned(name, gqa(deterministic=True)) == [1, 1]  # 256, whatever the other variable says
    monkeypatch.setenv(FIXED_TILE, "32")
    assert planned(name, gqa(deterministic=True)) == [5, 2]
    assert planned(name, gqa()) == [3, 1]


@pytest.mark.parametrize("name", [NAME])
def test_what_is_malformed_or_refused_is_an_error(name, monkeypatch):
    cls = get_backend_class(name)
    for option in ("triton_attention_num_kv_splits", "triton_attention_split_tile_size"):
        with pytest.raises(ValueError, match=f"{option} must be 1 or more, got 0"):
            cls(gqa(), LIMITS, **{option: 0})
    for variable, spec in ((SPLITS, gqa()), (TILE, gqa()), (FIXED_TILE, gqa(deterministic=True))):
        with monkeypatch.context() as set_for_now:
            set_for_now.setenv(variable, "0")
            with pytest.raises(ValueError, match=f"{variable} must be a positive integer, got '0'"):
                cls(spec, LIMITS)
    assert torch.is_tensor(cls(gqa(), LIMITS)._out_partial)


def test_partial_results_are_float32_whatever_sglangs_option_says(monkeypatch):
    """Its default, False, is taken as it is there, where the sums are float32, too."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for wide in (False, True):
        backend = get_backend_class(NAME)(gqa(), LIMITS, triton_attention_reduce_in_fp32=wide)
        assert backend._out_partial.dtype == backend._lse_partial.dtype == torch.float32


def test_a_cpu_without_the_interpreter_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="backend triton runs on a CPU in Triton's interpreter only: set TRITON_INT"):
        get_backend_class(NAME)(gqa(), LIMITS)
    calls = importlib.import_module("triton_calls")
    monkeypatch.setattr(importlib.import_module("attnops.triton_kernels.core.checks"), "RUNS_ON_CPU", False)
    sides = [torch.zeros(2, 2, 64), torch.zeros(2, 2)] * 2
    with pytest.raises(RuntimeError, match="attnops::triton_merge_state: runs on a CPU in Triton's interpreter only"):
        calls.tk.triton_merge_state(torch.empty(2, 2, 64), torch.empty(2, 2), *sides)
