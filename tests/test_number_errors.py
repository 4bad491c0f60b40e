"""A number that a pool, a plan or a layer cannot have is an error that names owner, argument and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attnops.layers import RadixAttention, RadixLinearAttention
from attnops.metadata import BlockPrefillPlan, FmhaPlan, XqaDecodePlan
from attnops.pools import (
    DoubleSparseTokenToKVPool,
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    SWAKVPool,
)

ROWS = {"size": 64, "page_size": 4, "dtype": torch.bfloat16}
HEADS = {"head_num": 2, "head_dim": 64}
LAYERS = {"layer_num": 2, "start_layer": 1}
LISTS = {"num_blocks": 4, "block_size": 16, "page_size": 16}
GROUPS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
DRAFTS = {"speculative_num_draft_tokens": 4, "num_k_heads": 2, "ring_rows": 12}
# A right call of each: numbers that fit, and what is no number.
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any], dict[str, Any]]] = {
    "ReqToTokenPool": (ReqToTokenPool, {"size": 4, "max_context_len": 16}, {}),
    "PagedTokenToKVPoolAllocator": (PagedTokenToKVPoolAllocator, {"size": 64, "page_size": 4}, {}),
    "MHATokenToKVPool": (MHATokenToKVPool, {**ROWS, **HEADS, **LAYERS, "v_head_dim": 64}, {}),
    "MHATokenToKVPoolFP4": (MHATokenToKVPoolFP4, {**ROWS, **HEADS, **LAYERS, "v_head_dim": 64}, {}),
    "MLATokenToKVPool": (MLATokenToKVPool, {**ROWS, **LAYERS}, {}),
    "DSATokenToKVPool": (DSATokenToKVPool, {**ROWS, **LAYERS, "page_size": 64}, {}),
    "DoubleSparseTokenToKVPool": (DoubleSparseTokenToKVPool, {**ROWS, **HEADS, **LAYERS}, {}),
    "SWAKVPool": (
        SWAKVPool,
        {**ROWS, **HEADS, "size_swa": 32, "v_head_dim": 64},
        {"full_attention_layer_ids": [0], "swa_attention_layer_ids": [1]},
    ),
    "HybridLinearKVPool": (HybridLinearKVPool, {**ROWS, **HEADS}, {"full_attention_layer_ids": [0]}),
    "MambaPool": (
        MambaPool,
        {"size": 4, "num_layers": 2, "dtype": torch.bfloat16, "temporal_dtype": torch.float32, **DRAFTS},
        {"conv_shape": (8, 3), "temporal_shape": (4, 8, 8)},
    ),
    "XqaDecodePlan": (XqaDecodePlan.allocate, {"batch_size": 4, **GROUPS, "page_size": 16}, {}),
    "FmhaPlan": (
        FmhaPlan.allocate,
        {"max_num_tokens": 16, "max_batch_size": 4, **GROUPS, "window_left": 7, "max_seqlen_q": 16, "tile_q": 32},
        {},
    ),
    "BlockPrefillPlan": (BlockPrefillPlan.allocate, {"max_num_tokens": 16, "max_batch_size": 4, **GROUPS, **LISTS}, {}),
    "RadixAttention": (
        RadixAttention,
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "layer_id": 0}
        | {"sliding_window_size": 7, "attention_chunk_size": 0},
        {"scaling": 0.1},
    ),
    "RadixLinearAttention": (
        RadixLinearAttention,
        {"layer_id": 0, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 64, "head_v_dim": 64},
        {},
    ),
}
CALLS["MHATokenToKVPoolFP4"][1].pop("dtype")
PARTS = {"SWAKVPool": ("MHATokenToKVPool",)}  # say what does not fit them


@pytest.mark.parametrize(("owner", "argument"), [(name, number) for name, call in CALLS.items() for number in call[1]])
def test_a_number_out_of_its_range_is_named(owner, argument):
    make, numbers, rest = CALLS[owner]
    make(**numbers, **rest)
    for wrong in (-7, "seven", 2.5):
        with pytest.raises((TypeError, ValueError)) as raised:
            make(**{**numbers, **rest, argument: wrong})
        says = str(raised.value).removeprefix("attnops: ")
        assert says.startswith((owner, *PARTS.get(owner, ()))), says
        assert argument.removesuffix("_swa") in says and str(wrong) in says, says


def test_no_dtype_is_not_torchs_default():
    """`torch.empty(dtype=None)` is float32."""
    for owner in ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "MambaPool"):
        make, numbers, rest = CALLS[owner]
        with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, got NoneType None"):
            make(**{**numbers, **rest, "dtype": None})


def test_a_cap_below_zero_is_not_off():
    with pytest.raises(ValueError, match=r"RadixAttention: logit_cap must be 0 \(off\) or positive, got -1"):
        RadixAttention(8, 64, 0.1, 2, 0, logit_cap=-1.0)
