"""`flashinfer.decode`: FlashInfer's decode, by the name of its module."""

from __future__ import annotations

from attnops.compat._flashinfer_decode import (
    single_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from attnops.compat._flashinfer_fast_plan import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from attnops.compat._flashinfer_mla_decode import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from attnops.compat._flashinfer_older_mla import (
    BatchDecodeMlaWithPagedKVCacheWrapper,
)
from attnops.compat._flashinfer_wrapper import (
    BatchDecodeWithPagedKVCacheWrapper,
)
from attnops.compat._flashinfer_xqa import (
    cudnn_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]
