"""SGLang's own attention kit on the CPU, in float32, with attnops as the backend that it tests."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import unittest

import pytest
import torch
from attnops.plugins import unsupported

pytestmark = pytest.mark.skipif(bool(unsupported("sglang")), reason=unsupported("sglang") or "-")
KIT = "sglang.test.kits.attention_unittest"
HEAD_DIM = 64  # the kit's own default, 16, is less than attnops serves


def stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def kit():
    """The kit's modules. Without torchvision, which SGLang imports and attention does not use, a stand-in."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        importlib.import_module("transformers.modeling_utils")  # looks for torchvision first, and finds none
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
            module = types.ModuleType(name)
            module.__getattr__ = stand_in
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules.setdefault(name, module)
        processors = types.SimpleNamespace(register=lambda *args, **options: None)
        importlib.import_module("transformers").AutoImageProcessor = processors  # its own demands torchvision
    from attnops.plugins.sglang import register
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention

    assert register()
    if "attnops" not in dense_attention._SWA_DECODE_EXTEND_WINDOW:  # keys [p - w, p], as the kit asks of new backends
        dense_attention._SWA_DECODE_EXTEND_WINDOW |= {"attnops"}
    return types.SimpleNamespace(dense=dense_attention, mla=mla_attention)


@pytest.fixture
def sglang(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    modules = kit()
    with torch.no_grad():
        yield modules


def dense_cases():
    if unsupported("sglang"):
        return []
    dense = kit().dense
    windows = [
        case
        for make in (dense.make_swa_no_prefix_input_config_cases, dense.make_swa_prefix_input_config_cases)
        for case in make("attnops")
    ]
    return [*dense.make_dense_cases("attnops"), *windows]


@pytest.mark.parametrize("case", dense_cases(), ids=lambda case: case.name)
def test_every_dense_case_of_the_kit_passes(case, sglang):
    options = {"device": "cpu", "head_dim": HEAD_DIM, "hidden_size": 128, "dtype": torch.float32}
    sglang.dense.run_dense_attention_case(unittest.TestCase(), case, **options)


def mla_cases():
    return [] if unsupported("sglang") else kit().mla.make_mla_cases("attnops")


@pytest.mark.parametrize("case", mla_cases(), ids=lambda case: case.name)
def test_every_mla_case_of_the_kit_passes(case, sglang):
    options = {"device": "cpu", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.float32}
    sglang.mla.run_mla_attention_case(unittest.TestCase(), case, **options)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_verification_of_chains_and_trees(page_size, topk, sglang):
    verify = importlib.import_module(f"{KIT}.runner_modes.speculative_target_verify_runner")
    common = {"page_size": page_size, "prefix_lens": (5, 16, 31), "extend_lens": (5 - topk,) * 3, "backend": "attnops"}
    mode = sglang.dense.ForwardMode.TARGET_VERIFY
    options = {"device": "cpu", "dtype": torch.float32, "topk": topk}
    dense = sglang.dense.DenseAttentionCase("verify", forward_mode=mode, num_heads=4, num_kv_heads=2, **common)
    verify.run_dense_eagle_verify_case(unittest.TestCase(), dense, head_dim=HEAD_DIM, hidden_size=128, **options)
    mla = sglang.mla.MLAAttentionCase("verify", forward_mode=mode, num_heads=4, **common)
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    verify.run_mla_eagle_verify_case(unittest.TestCase(), mla, **latent, **options)


def test_the_kits_own_head_dim_is_refused_by_name(sglang):
    case = sglang.dense.make_dense_cases("attnops")[0]
    with pytest.raises(NotImplementedError, match="head_dim"):
        sglang.dense.run_dense_attention_case(unittest.TestCase(), case, device="cpu", dtype=torch.float32)


def test_the_option_knows_the_name(sglang):
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert "attnops" in ATTENTION_BACKENDS and "attnops" in choices.ATTENTION_BACKEND_CHOICES
