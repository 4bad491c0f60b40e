"""DeepGEMM's functions over index keys in FP8: logits of sparse attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._errors import names_the_peers

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

_SPLIT = 256  # keys of a split on Hopper
_COLUMNS = 256  # a row's stride is a multiple of 1024 bytes


def _new_logits(rows: int, columns: int, device: torch.device, clean: bool) -> Tensor:
    wide = torch.empty(rows, -(-columns // _COLUMNS) * _COLUMNS, device=device)
    logits = wide[:, :columns]
    return logits.fill_(-math.inf) if clean else logits


@names_the_peers("fp8_mqa_logits", k="kv", k_scale="kv", k_start="cu_seq_len_k_start", k_end="cu_seq_len_k_end")
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Logits of ragged keys: `attnops.ops.index_logits`.

    Args:
        q: float8_e4m3fn ``[T, H, D]``.
        kv: keys float8_e4m3fn ``[N, D]`` and their float32 scales ``[N]``.
        weights: float32 ``[T, H]``.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 ``[T]``: the keys of each row.
        clean_logits: ``-inf`` in the other columns; else they hold anything.
        max_seqlen_k: Above 0: so many columns, and a row's first is its first key.

    Returns:
        float32 ``[T, N]``, or ``[T, max_seqlen_k]``.
    """
    k, k_scale = kv
    columns = max_seqlen_k if max_seqlen_k > 0 else k.shape[0]
    logits = _new_logits(q.shape[0], columns, q.device, clean_logits)
    return ops.index_logits(
        q,
        k,
        k_scale.flatten(),
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        compressed=max_seqlen_k > 0,
        logits=logits,
    )


@names_the_peers("get_paged_mqa_logits_metadata", cache_seqlens="context_lens")
def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """Which query and split of 256 keys each multiprocessor begins with: int32 ``[num_sms + 1, 2]``.

    `fp8_paged_mqa_logits` divides its work by itself, and does not need it.

    Args:
        context_lens: int32 ``[B]`` or ``[B, next_n]``.
    """
    longest = context_lens if context_lens.dim() == 1 else context_lens.amax(1)
    ends = (-(-longest.clamp(min=0).long() // _SPLIT)).cumsum(0)
    total = ends[-1:] if len(ends) else ends.new_zeros(1)
    parts = torch.arange(num_sms + 1, device=context_lens.device)
    first = parts * (total // num_sms) + torch.minimum(parts, total % num_sms)
    query = torch.searchsorted(ends, first, right=True)
    before = torch.cat([ends.new_zeros(1), ends])[query]
    return torch.stack([query, first - before], 1).int()


@names_the_peers(
    "fp8_paged_mqa_logits",
    index_pages="fused_kv_cache",
    cache_seqlens="context_lens",
    page_table="block_table",
    max_seqlen_k="max_context_len",
)
def fp8_paged_mqa_logits(
    q: Tensor,
    fused_kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """Logits of keys in pages: `attnops.ops.index_logits_paged`.

    Args:
        q: float8_e4m3fn ``[B, next_n, H, D]``.
        fused_kv_cache: uint8 ``[num_pages, page_size, 1, D + 4]``, any page size.
        weights: float32 ``[B * next_n, H]``.
        context_lens: int32 ``[B, next_n]``: keys of each token; or ``[B]``: of a request's last token.
        block_table: int32 ``[B, max_pages]``.
        schedule_meta: Not read: a choice of who computes what.
        max_context_len: Columns of the result.
        clean_logits: ``-inf`` in columns from a token's length on; else they hold anything.

    Returns:
        float32 ``[B * next_n, max_context_len]``.
    """
    batch, tokens = q.shape[:2]
    if context_lens.dim() == 1:
        context_lens = context_lens[:, None] + torch.arange(1 - tokens, 1, device=q.device, dtype=torch.int32)
    logits = _new_logits(batch * tokens, max_context_len, q.device, clean_logits)
    pages = fused_kv_cache.squeeze(2) if fused_kv_cache.dim() == 4 else fused_kv_cache
    lengths = context_lens.contiguous()
    return ops.index_logits_paged(q, pages, block_table, weights, lengths, logits=logits)
