"""A pool that is not the one of a backend's model is refused before a step reads it at wrong places."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool, reason_against
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits, device_of

CPU = torch.device("cpu")
GQA = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16)
WINDOWED = dataclasses.replace(GQA, sliding_window_size=20)
MLA = AttentionSpec.mla(4, page_size=64)
MLA_ROWS = AttentionSpec.mla(4, page_size=64, kv_dtype=torch.uint8)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def mha(page_size=16, dtype=BF16, heads=2, dim=32, v_dim=-1, **options):
    return MHATokenToKVPool(128, page_size, dtype, heads, dim, 2, v_head_dim=v_dim, **options)


def swa(page_size=16, dtype=BF16, heads=2, dim=32):
    return SWAKVPool(128, 64, page_size, dtype, heads, dim, [0], [1])


def mla(page_size=64, dtype=BF16):
    return MLATokenToKVPool(128, page_size, dtype, 2)


def replaced(pool, name, pages):
    getattr(pool, name)[1] = pages
    return pool


FITS = [
    (GQA, mha),
    (GQA, lambda: mha(layout="HND")),
    (WINDOWED, swa),
    (MLA, mla),
    (MLA_ROWS, lambda: mla(dtype=torch.uint8)),
]
MISFITS = [
    (GQA, lambda: mha(page_size=32), "the pool's page_size must be 16, got 32"),
    (GQA, lambda: mha(page_size=1), "the pool's page_size must be 16, got 1"),
    (GQA, lambda: mha(dtype=torch.float16), "k_buffer's dtype must be torch.bfloat16, got torch.float16"),
    (GQA, lambda: mha(dtype=E4M3), "k_buffer's dtype must be torch.bfloat16, got torch.float8_e4m3fn"),
    (GQA, lambda: mha(heads=4), "k_buffer's shape[2] (head_num) must be 2, got 4"),
    (GQA, lambda: mha(dim=64), "k_buffer's shape[3] (head_dim) must be 32, got 64"),
    (GQA, lambda: mha(v_dim=64), "v_buffer's shape[3] (v_head_dim) must be 32, got 64"),
    (GQA, mla, "the pool must be an MHATokenToKVPool or SWAKVPool, got MLATokenToKVPool"),
    (GQA, lambda: mha(device="meta"), "k_buffer's device must be cpu, got meta"),
    (WINDOWED, lambda: swa(page_size=32), "the pool's page_size must be 16, got 32"),
    (WINDOWED, lambda: swa(heads=1), "k_buffer's shape[2] (head_num) must be 2, got 1"),
    (MLA, mha, "the pool must be an MLATokenToKVPool, got MHATokenToKVPool"),
    (MLA, lambda: mla(page_size=32), "the pool's page_size must be 64, got 32"),
    (MLA, lambda: mla(dtype=torch.uint8), "kv_buffer's dtype must be torch.bfloat16, got torch.uint8"),
    (MLA_ROWS, mla, "kv_buffer's dtype must be torch.uint8, got torch.bfloat16"),
    (
        GQA,
        lambda: replaced(mha(), "v_buffer", torch.zeros(4, 32, 2, 32, dtype=BF16)),
        "v_buffer's shape[1] (page_size) must be 16, got 32",
    ),
    (
        GQA,
        lambda: replaced(mha(), "k_buffer", torch.zeros(4, 64, dtype=BF16)),
        "k_buffer must have 4 dimensions, got shape [4, 64]",
    ),
    (
        GQA,
        lambda: replaced(mha(), "k_buffer", torch.zeros(3, 16, 2, 32, dtype=BF16)),
        "k_buffer's shape[0] (num_pages) must be at least 8, got 3",
    ),
    (
        MLA,
        lambda: replaced(mla(), "kv_buffer", torch.zeros(1, 64, 576, dtype=BF16)),
        "kv_buffer's shape[0] (num_pages) must be at least 2, got 1",
    ),
    (
        MLA,
        lambda: replaced(mla(), "kv_buffer", torch.zeros(4, 64, 512, dtype=BF16)),
        "kv_buffer's shape[2] (row) must be 576, got 512",
    ),
]


@pytest.mark.parametrize("spec, make", FITS)
def test_the_right_pool_fits(spec, make):
    assert reason_against(make(), spec, CPU) == ""


@pytest.mark.parametrize("spec, make, reason", MISFITS, ids=[reason for *_, reason in MISFITS])
def test_a_wrong_pool_is_named(spec, make, reason):
    assert reason_against(make(), spec, CPU) == reason


def batch_of(pool) -> AttentionBatch:
    return AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor([0]),
        cache_seqlens=torch.tensor([9], dtype=torch.int32),
        num_tokens=1,
        req_to_token=torch.arange(128, dtype=torch.int32).view(1, 128),
        out_cache_loc=torch.tensor([8]),
        token_to_kv_pool=pool,
    )


BACKENDS = {"GQA": ["torch_native", "intel_amx", "trtllm_mha"], "MLA": ["torch_native", "intel_amx", "flashmla"]}
SERVED = [(GQA, mha, mha, name) for name in BACKENDS["GQA"]] + [(MLA, mla, mla, name) for name in BACKENDS["MLA"]]


@pytest.mark.parametrize("spec, right, wrong, name", SERVED, ids=[name + str(s.is_mla) for s, *_, name in SERVED])
def test_every_backend_refuses_it_before_the_step(spec, right, wrong, name):
    """Also a pool that fitted, when a buffer of it was replaced by one that does not."""
    backend = get_backend_class(name)(spec, Limits(max_batch_size=2, max_seqlen=128))
    with pytest.raises(
        ValueError, match=re.escape("the batch's pool does not fit the backend's AttentionSpec: the pool")
    ):
        backend.init_forward_metadata(batch_of(wrong(page_size=2 * spec.page_size)))
    pool = right()
    backend.init_forward_metadata(batch_of(pool))
    buffers = pool.kv_buffer if spec.is_mla else pool.v_buffer
    buffers[0] = buffers[0].half()
    with pytest.raises(ValueError, match=r"buffer's dtype must be torch.bfloat16, got torch.float16"):
        backend.init_forward_metadata(batch_of(pool))


@pytest.mark.gpu
def test_cuda_is_the_current_cuda_device():
    """A backend and a pool on "cuda" and "cuda:0" are on one device; after set_device they are not."""
    here = torch.cuda.current_device()
    assert device_of("cuda") == torch.device("cuda", here)
    for on_backend, on_pool in (("cuda", f"cuda:{here}"), (f"cuda:{here}", "cuda"), ("cuda", "cuda")):
        backend = get_backend_class("torch_native")(GQA, Limits(max_batch_size=2, max_seqlen=128), on_backend)
        pool = mha(device=on_pool)
        assert pool.device == backend.device == torch.device("cuda", here)
        assert reason_against(pool, GQA, backend.device) == ""


def test_devices_are_named_as_their_tensors_name_them():
    assert device_of("cpu") == device_of(torch.device("cpu")) == torch.zeros(1).device
    assert device_of("cuda:1") == torch.device("cuda", 1)
