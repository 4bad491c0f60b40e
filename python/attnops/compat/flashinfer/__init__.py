"""FlashInfer's functions and wrappers of attention, and its modules by name.

lse is ``[T, H]`` in base 2 here, as its users have it.

`backend=` takes any of the peer's names, all of which are "auto" here: it chooses among kernels, not results.
"""

from __future__ import annotations

from typing import NoReturn

from attnops.compat._errors import NameNotServed
from attnops.compat._flashinfer_batch import BatchAttention
from attnops.compat._flashinfer_cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from attnops.compat._flashinfer_context import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from attnops.compat._flashinfer_cudnn import cudnn_batch_prefill_with_kv_cache
from attnops.compat._flashinfer_decode import single_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache
from attnops.compat._flashinfer_fast_plan import CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from attnops.compat._flashinfer_fmha_v2 import trtllm_fmha_v2_prefill
from attnops.compat._flashinfer_linear import (
    chunk_gated_delta_rule,
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
    selective_state_update,
)
from attnops.compat._flashinfer_mla import BatchMLAPagedAttentionWrapper
from attnops.compat._flashinfer_mla_decode import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
    xqa_mla,
)
from attnops.compat._flashinfer_older_mla import BatchDecodeMlaWithPagedKVCacheWrapper
from attnops.compat._flashinfer_paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from attnops.compat._flashinfer_pages import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
    variable_length_merge_states,
)
from attnops.compat._flashinfer_ragged_prefill import (
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from attnops.compat._flashinfer_sinks import BatchAttentionWithAttentionSinkWrapper
from attnops.compat._flashinfer_sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from attnops.compat._flashinfer_wrapper import BatchDecodeWithPagedKVCacheWrapper
from attnops.compat._flashinfer_xqa import cudnn_batch_decode_with_kv_cache, xqa, xqa_batch_decode_with_kv_cache
from attnops.compat._topk import top_k_page_table_transform, top_k_ragged_transform
from attnops.compat.flashinfer import cascade, decode, mla, page, prefill

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cascade",
    "chunk_gated_delta_rule",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "decode",
    "fast_decode_plan",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "page",
    "prefill",
    "selective_state_update",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "variable_length_merge_states",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

_RINGS = "its rings are of bf16, with a cursor of the caller; attnops.ops.delta_verify and delta_commit have their own"
_NOT_SERVED = {"gated_delta_rule_mtp_ucache": _RINGS, "gated_delta_rule_mtp_ucache_flush": _RINGS}


def __getattr__(name: str) -> NoReturn:
    """Names of FlashInfer that are refused, with what works instead."""
    if name in _NOT_SERVED:
        raise NameNotServed(f"attnops.compat: {name} is not served: {_NOT_SERVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
