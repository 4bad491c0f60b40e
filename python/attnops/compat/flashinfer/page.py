"""`flashinfer.page`: FlashInfer's pages, by the name of its module."""

from __future__ import annotations

from attnops.compat._flashinfer_pages import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]
