"""`attnops.info` names the row of the kernel table that a call through `attnops.compat` ran on."""

from __future__ import annotations

import collections

import pytest
import torch
from attnops import info
from attnops.compat import flashinfer
from problems import paged_problem
from right_calls import compat_calls

OPS = {
    "cudnn_batch_decode_with_kv_cache": "xqa_decode",
    "cudnn_batch_prefill_with_kv_cache": "fmha_",
    "flash_attn_func": "fmha_",
    "flash_attn_varlen_func": "fmha_",
    "flash_attn_with_kvcache": "xqa_decode",
    "flash_mla_sparse_fwd": "sparse_mla",
    "flash_mla_with_kvcache": "mla_decode",
    "trtllm_batch_context_with_kv_cache": "fmha_",
    "trtllm_batch_decode_with_kv_cache": "xqa_decode",
    "trtllm_batch_decode_with_kv_cache_mla": "mla_decode",
    "xqa": "xqa_decode",
}


def rows_of(call) -> list[str]:
    """The rows that a call chose, and that run attention."""
    before = collections.Counter(info.kernel_counts())
    call()
    return sorted((collections.Counter(info.kernel_counts()) - before).elements())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPS)
def test_the_row_of_a_call_is_named(name, device):
    if device == "cpu" and OPS[name] != "xqa_decode":
        pytest.skip("its CPU kernels are no table")
    function, given = compat_calls(device)[name]
    rows = [row for row in rows_of(lambda: function(**given)) if OPS[name] in row]
    assert len(rows) == 1 and rows[0].startswith(f"{device} "), rows


@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_what_an_op_prepares_runs_on_a_named_row(mode):
    problem = paged_problem([9, 40])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1, dtype=torch.uint8))
    last = (problem.cache_seqlens - 1) % 16 + 1
    plan = (problem.kv_indptr, problem.kv_indices, last, 8, 2, 64, 16)
    wrapper.plan(*plan, pos_encoding_mode=mode, q_data_type="bfloat16")
    rows = [row for row in rows_of(lambda: wrapper.run(problem.q, (problem.k_pages, problem.v_pages))) if "xqa" in row]
    assert rows, "no row is named"
