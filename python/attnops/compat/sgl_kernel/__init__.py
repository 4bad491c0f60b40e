"""`sgl_kernel`'s attention: merges, CUTLASS MLA, draft trees, selections; and its modules by name.

`generate_draft_decode_kv_indices` is a Triton kernel of SGLang's own (`sglang.srt.speculative`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import empty_is_minus_inf, from_log2, to_log2
from attnops.compat._cutlass_mla import cutlass_mla_decode, cutlass_mla_get_workspace_size
from attnops.compat._errors import names_the_peers
from attnops.compat._speculation import (
    build_tree_kernel_efficient,
    generate_draft_decode_kv_indices,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from attnops.compat._topk import fast_topk_transform_fused, fast_topk_transform_ragged_fused, fast_topk_v2
from attnops.compat.sgl_kernel import flash_attn, flash_mla, sparse_flash_attn

__all__ = [
    "build_tree_kernel_efficient",
    "cutlass_mla_decode",
    "cutlass_mla_get_workspace_size",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
    "flash_attn",
    "flash_mla",
    "generate_draft_decode_kv_indices",
    "merge_state",
    "merge_state_v2",
    "sparse_flash_attn",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]


@names_the_peers("merge_state_v2", out_a="v_a", lse_a="s_a", out_b="v_b", lse_b="s_b", out="v_merged", lse="s_merged")
def merge_state_v2(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attnops.ops.merge_state`; lse is natural log, and either infinity marks an empty side.

    Args:
        v_a, v_b, v_merged: ``[T, H, D]``.
        s_a, s_b, s_merged: float32 ``[T, H]``.
    """
    if s_a.dtype != torch.float32 or s_b.dtype != torch.float32:
        s_a, s_b = s_a.to(torch.float32), s_b.to(torch.float32)
    lse_a = empty_is_minus_inf(s_a)
    into = lse_a if s_merged is None else s_merged
    return ops.merge_state(v_a, lse_a, v_b, empty_is_minus_inf(s_b), out=v_merged, lse=into)


@names_the_peers("merge_state", out_a="v_a", lse_a="s_a", out_b="v_b", lse_b="s_b", out="v_merged", lse="s_merged")
def merge_state(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge_state_v2` with lse in base 2, as `flashinfer.merge_state` has it."""
    out, lse = merge_state_v2(v_a, from_log2(s_a), v_b, from_log2(s_b), v_merged)
    lse = to_log2(lse)
    return out, lse if s_merged is None else s_merged.copy_(lse)
