"""`flashinfer.prefill`: FlashInfer's prefill, by the name of its module."""

from __future__ import annotations

from attnops.compat._flashinfer_context import (
    trtllm_batch_context_with_kv_cache,
    trtllm_ragged_attention_deepseek,
)
from attnops.compat._flashinfer_cudnn import (
    cudnn_batch_prefill_with_kv_cache,
)
from attnops.compat._flashinfer_fmha_v2 import (
    trtllm_fmha_v2_prefill,
)
from attnops.compat._flashinfer_paged_prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
)
from attnops.compat._flashinfer_ragged_prefill import (
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]
