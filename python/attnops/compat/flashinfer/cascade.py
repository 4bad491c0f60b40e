"""`flashinfer.cascade`: FlashInfer's merges of states and cascade wrappers, by the name of its module."""

from __future__ import annotations

from attnops.compat._flashinfer_cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from attnops.compat._flashinfer_pages import (
    merge_state,
    merge_state_in_place,
    merge_states,
    variable_length_merge_states,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]
