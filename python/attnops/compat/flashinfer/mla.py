"""`flashinfer.mla`: FlashInfer's MLA, by the name of its module."""

from __future__ import annotations

from attnops.compat._flashinfer_mla import (
    BatchMLAPagedAttentionWrapper,
)
from attnops.compat._flashinfer_mla_decode import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
    xqa_mla,
)

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]
