"""Layers with and without `attention_chunk_size` in one model, and what such models are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import Machine, get_backend_class, select
from attnops.layers import RadixAttention
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, make_step

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, attention_chunk_size=32)
BACKENDS = ["fa3", "intel_amx", "torch_native"]
MODES = {
    "extend": (ForwardMode.EXTEND, ([0, 65, 100], [33, 1, 20]), {}),
    "decode": (ForwardMode.DECODE, ([63, 64, 150, 31], [1] * 4), {"uniform": True}),
    "verify": (ForwardMode.TARGET_VERIFY, ([59, 100, 0], [5] * 3), {"uniform": True}),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_layers_of_both_kinds_share_a_step(name, mode):
    forward_mode, lengths, options = MODES[mode]
    local = make_step(Model("local", SPEC), forward_mode, *lengths, **options)
    whole = make_step(
        Model("whole", dataclasses.replace(SPEC, attention_chunk_size=0)), forward_mode, *lengths, **options
    )
    assert relative_error(local.expected, whole.expected) > 0.05, "the chunk matters here"
    backend = get_backend_class(name)(SPEC, LIMITS)
    backend.init_forward_metadata(local.batch)
    bound = MAX_RELATIVE_ERROR[SPEC.dtype]
    for _ in range(2):  # one after the other, as in a model
        assert relative_error(local.run(backend), local.expected) <= bound
        plain = dataclasses.replace(whole, batch=local.batch)
        assert relative_error(plain.run(backend), whole.expected) <= bound


def test_a_tree_mask_is_refused():
    step = make_step(Model("local", SPEC), ForwardMode.TARGET_VERIFY, [9, 3], [4, 4], uniform=True, tree=True)
    backend = get_backend_class("fa3")(SPEC, LIMITS)
    backend.init_forward_metadata(step.batch)
    with pytest.raises(NotImplementedError, match="a tree mask and attention_chunk_size exclude each other"):
        step.run(backend)


def test_a_backend_that_was_not_told_refuses_the_layer():
    step = make_step(Model("local", SPEC), ForwardMode.DECODE, [40], [1], uniform=True)
    spec = dataclasses.replace(SPEC, attention_chunk_size=0)
    for name in (*BACKENDS, "trtllm_mha"):
        backend = get_backend_class(name)(spec, LIMITS)
        backend.init_forward_metadata(step.batch)
        with pytest.raises(ValueError, match=r"attention_chunk_size|attends in chunks of 32"):
            step.run(backend)


def test_selection_and_specs():
    hopper = Machine(device="cuda", arch=90, has_cuda_kernels=True)
    selection = select(SPEC, hopper)
    assert (selection.prefill, selection.decode) == ("fa3", "fa3")
    with pytest.raises(NotImplementedError, match="has no local attention"):
        get_backend_class("trtllm_mha")(SPEC, LIMITS)
    with pytest.raises(ValueError, match=r"attention_chunk_size \(24\) must be a multiple of page_size \(16\)"):
        dataclasses.replace(SPEC, attention_chunk_size=24)
    with pytest.raises(ValueError, match="belongs to causal layers with K and V"):
        AttentionSpec.mla(4, attention_chunk_size=64)
    assert RadixAttention(2, 64, 0.1, 1, 0).attention_chunk_size == 0
    assert torch.float16 in get_backend_class("fa3").capability.dtypes
