"""A batch refuses what cannot be a step, and says which tensor is wrong."""

from __future__ import annotations

import pytest
import torch
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits


def batch(**change) -> AttentionBatch:
    fields = {
        "forward_mode": ForwardMode.DECODE,
        "req_pool_indices": torch.tensor([0, 1]),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        "num_tokens": 2,
        "req_to_token": torch.zeros(2, 8, dtype=torch.int32),
        "out_cache_loc": torch.tensor([0, 1]),
    }
    return AttentionBatch(**{**fields, **change})


def test_a_decode_batch_is_uniform():
    decode = batch()
    assert decode.is_uniform and decode.tokens_per_request == decode.max_seqlen_q == 1 and decode.batch_size == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": torch.tensor([3, 4])}, "cache_seqlens must be torch.int32, got torch.int64"),
        ({"cache_seqlens": torch.tensor([3], dtype=torch.int32)}, r"cache_seqlens must have shape \(2,\), got \(1,\)"),
        ({"out_cache_loc": torch.tensor([0])}, r"out_cache_loc must have shape \(2,\), got \(1,\)"),
        ({"num_tokens": 3, "out_cache_loc": None}, r"batch_size \* tokens_per_request = 2 \* 1, got 3"),
        ({"forward_mode": ForwardMode.EXTEND}, "a ragged EXTEND batch needs extend_seq_lens"),
        ({"tree_mask": torch.zeros(2, 1, 1, dtype=torch.uint8)}, "tree_mask belongs to TARGET_VERIFY"),
        ({"positions": torch.tensor([3])}, r"positions must have 2 columns, got shape \(1,\)"),
        ({"max_cache_seqlen": 0}, "max_cache_seqlen is 0, below the 1 new tokens .*count the new tokens, too"),
    ],
)
def test_a_wrong_tensor_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        batch(**change)


def test_a_tree_mask_has_a_row_of_bits_per_draft_token():
    verify = {
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "num_tokens": 18,
        "tokens_per_request": 9,
        "out_cache_loc": None,
    }
    assert batch(**verify, tree_mask=torch.zeros(2, 9, 2, dtype=torch.uint8)).is_uniform
    with pytest.raises(ValueError, match=r"tree_mask must have shape \(2, 9, 2\)"):
        batch(**verify, tree_mask=torch.zeros(2, 9, 1, dtype=torch.uint8))


def test_predicates_are_sglangs():
    extend = {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND}
    assert {mode for mode in ForwardMode if mode.is_extend()} == extend
    assert {mode for mode in ForwardMode if mode.is_decode_or_idle()} == {ForwardMode.DECODE, ForwardMode.IDLE}


def test_limits_grow_to_hold_their_own_batch():
    assert Limits(max_batch_size=4, max_seqlen=8, max_tokens_per_request=3).max_num_tokens == 12
    assert Limits(max_batch_size=4, max_seqlen=65).max_pages(16) == 5


def test_rounded_products_belong_to_mla_over_a_dense_fp8_cache():
    assert AttentionSpec.mla(16, kv_dtype=torch.float8_e4m3fn, fp8_products=True).fp8_products
    for other in (None, torch.uint8):
        with pytest.raises(ValueError, match="fp8_products belongs to MLA over a float8_e4m3fn cache"):
            AttentionSpec.mla(16, kv_dtype=other, fp8_products=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_q_heads": 8.0}, "num_q_heads must be an int, got float 8.0"),
        ({"head_dim": "64"}, "head_dim must be an int, got str '64'"),
        ({"head_dim": 0}, "head_dim must be positive, got 0"),
        ({"num_kv_heads": 0}, "num_q_heads and num_kv_heads must be positive, got 8 and 0"),
        ({"v_head_dim": -7}, r"v_head_dim must be in \[-1, 2147483647\], got -7"),
        ({"v_head_dim": 0}, "v_head_dim must be positive, or -1 for that of head_dim, got 0"),
        ({"attention_chunk_size": None}, "attention_chunk_size must be an int, got NoneType None"),
        ({"dtype": "bfloat16"}, "dtype must be a torch.dtype, got 'bfloat16'"),
        ({"kv_dtype": 8}, "kv_dtype must be a torch.dtype, got 8"),
        ({"logit_cap": -1.0}, r"logit_cap must be 0 \(off\) or positive, got -1.0"),
    ],
)
def test_mistakes_of_a_spec_are_named(change, message):
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    with pytest.raises((TypeError, ValueError), match=message):
        AttentionSpec(**{**shape, **change})


def test_a_limit_that_is_no_number_is_named():
    with pytest.raises(TypeError, match="max_num_tokens must be an int, got str 'many'"):
        Limits(max_batch_size=4, max_seqlen=8, max_num_tokens="many")
    with pytest.raises(ValueError, match="max_num_tokens must not be negative, got -7"):
        Limits(max_batch_size=4, max_seqlen=8, max_num_tokens=-7)


def test_several_tokens_of_a_request_are_no_decode_step():
    with pytest.raises(ValueError, match="tokens_per_request of a DECODE batch is 1, got 3: several are TARGET_VERIFY"):
        AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor([0, 1]),
            cache_seqlens=torch.tensor([4, 5], dtype=torch.int32),
            num_tokens=6,
            tokens_per_request=3,
        )


def ragged(mode: ForwardMode = ForwardMode.EXTEND, **options) -> AttentionBatch:
    lens = torch.tensor([3, 4], dtype=torch.int32)
    given = {"req_pool_indices": torch.arange(2), "cache_seqlens": lens, "extend_seq_lens": lens, "num_tokens": 7}
    return AttentionBatch(forward_mode=mode, **{**given, **options})


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND])
def test_bounds_that_cannot_hold_the_steps_tokens_are_refused(mode):
    """Two requests bring seven tokens: one of them brings four."""
    assert ragged(mode, max_seqlen_q=4, max_cache_seqlen=4).max_seqlen_q == 4
    assert ragged(mode).max_seqlen_q == 7
    with pytest.raises(ValueError, match="max_seqlen_q is 3: 2 requests of at most so many new tokens have no 7"):
        ragged(mode, max_seqlen_q=3)
    with pytest.raises(ValueError, match="max_seqlen_q is -1: 2 requests"):
        ragged(mode, max_seqlen_q=-1)
    with pytest.raises(ValueError, match="max_cache_seqlen is 3, below the 4 new tokens of a request"):
        ragged(mode, max_cache_seqlen=3)
    nobody = {"req_pool_indices": torch.arange(0), "cache_seqlens": torch.zeros(0, dtype=torch.int32)}
    nobody["extend_seq_lens"] = nobody["cache_seqlens"]
    assert ragged(mode, **nobody, num_tokens=0).batch_size == 0
    with pytest.raises(ValueError, match="num_tokens must not be negative, got -7"):
        ragged(mode, num_tokens=-7)


def test_an_idle_ranks_padding_needs_no_request():
    nobody = {"req_pool_indices": torch.arange(0), "cache_seqlens": torch.zeros(0, dtype=torch.int32)}
    assert AttentionBatch(forward_mode=ForwardMode.IDLE, num_tokens=5, **nobody).num_tokens == 5
