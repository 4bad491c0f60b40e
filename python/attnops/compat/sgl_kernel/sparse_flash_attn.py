"""`sgl_kernel.sparse_flash_attn`: attention over blocks of keys and single keys, listed for every 64 queries of a head.

Queries of a head that share lists are a request of paged prefill, and the keys that they list are its pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._convert import as_int32, refuse
from attnops.compat._errors import names_the_peers
from attnops.compat._kvcache import Call
from attnops.compat._slash_lists import convert_vertical_slash_indexes, convert_vertical_slash_indexes_mergehead
from attnops.compat._varlen import check_no_grad

__all__ = [
    "convert_vertical_slash_indexes",
    "convert_vertical_slash_indexes_mergehead",
    "sparse_attn_func",
    "sparse_attn_varlen_func",
]

BLOCK = 64  # queries that share lists, and keys of a block
NOWHERE = torch.iinfo(torch.int32).max


@names_the_peers("sparse_attn_func")
def sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a batch of equal lengths; the other arguments are those of `sparse_attn_varlen_func`.

    Args:
        q: ``[B, S_q, H_q, D]``.
        k, v: ``[B, S_k, H_kv, D]``.

    Returns:
        ``out`` like q, or with `return_softmax_lse` ``(out, lse)``: natural log ``[B, H_q, S_q]``.
    """
    result, lse = _attend(
        "sparse_attn_func",
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        (block_count, block_offset, column_count, column_index),
        _bounds(q),
        _bounds(k),
        q.shape[1],
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    result = result.view(q.shape) if out is None else out.copy_(result.view(q.shape))
    return (result, lse.unflatten(1, q.shape[:2]).transpose(0, 1)) if return_softmax_lse else result


@names_the_peers("sparse_attn_varlen_func")
def sparse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over the keys that their lists name; a key that two entries name counts twice.

    Args:
        q: ``[T, H_q, D]``.
        k, v: ``[T_k, H_kv, D]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.
        block_count, column_count: int32 ``[B, H_q, R]``: entries in use of every 64 queries' lists, ``R >=
            ceil(max_seqlen_q / 64)``.
        block_offset: int32 ``[B, H_q, R, n]``: first keys of blocks of 64.
        column_index: ``[B, H_q, R, m]``: keys.
        max_seqlen_q, max_seqlen_k: Bounds of the lengths.
        causal: A listed key that follows its query is not seen. Every query is then a request with lists of its own.
        deterministic, return_attn_probs: Accepted and ignored, since no result depends on it.

    Returns:
        ``out`` like q, or with `return_softmax_lse` ``(out, lse)``: natural log ``[H_q, T]``, -inf for an empty row.
    """
    result, lse = _attend(
        "sparse_attn_varlen_func",
        q,
        k,
        v,
        (block_count, block_offset, column_count, column_index),
        as_int32("sparse_attn_varlen_func", "cu_seqlens_q", cu_seqlens_q, q.device),
        as_int32("sparse_attn_varlen_func", "cu_seqlens_k", cu_seqlens_k, q.device),
        max_seqlen_q,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_softmax_lse else result


def _bounds(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_seqlen_q: int,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, D]`` and lse ``[H, T]``. Rows are one head after the other, and requests (head, request, list)."""
    check_no_grad(name, q, k, v)
    if dropout_p:
        raise refuse(name, "dropout_p", "attnops serves inference")
    if alibi_slopes is not None:
        raise refuse(name, "alibi_slopes", "flash_attn_varlen_func takes them, without lists")
    num_tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    keys, counts = _listed(name, lists, bounds_q.shape[0] - 1, heads, max_seqlen_q, bounds_k)
    lens_q = bounds_q.diff()
    begins = torch.arange(keys.shape[2], device=q.device, dtype=torch.int32) * BLOCK
    begins = bounds_q[:-1, None] + torch.minimum(begins, lens_q.unsqueeze(1))  # [B, R], of one head
    ahead = torch.arange(heads, device=q.device, dtype=torch.int32) * num_tokens
    starts = (ahead.view(-1, 1, 1) + begins).flatten()
    ends = torch.nn.functional.pad(starts, (0, 1), value=heads * num_tokens)
    head = torch.arange(heads, device=q.device) // (heads // kv_heads)
    tokens = bounds_k[:-1].long().view(-1, 1, 1) + keys.masked_fill(keys == NOWHERE, 0)
    table = (tokens * kv_heads + head.view(-1, 1, 1, 1)).to(torch.int32).flatten(0, 2)
    keys, counts = keys.flatten(0, 2), counts.flatten()
    if causal:
        row = torch.arange(heads * num_tokens, device=q.device)
        owner = torch.searchsorted(ends[1:].long().contiguous(), row, right=True).clamp(max=starts.shape[0] - 1)
        request = owner // begins.shape[1] % begins.shape[0]
        shift = bounds_k.diff() - lens_q
        last = row % num_tokens - bounds_q[:-1].long()[request] + shift[request]
        seen = (keys[owner] <= last.unsqueeze(1)).sum(1).to(torch.int32)
        counts, table = torch.minimum(counts[owner], seen), table[owner]
        ends, most = torch.arange(heads * num_tokens + 1, device=q.device, dtype=torch.int32), 1
    else:
        most = min(BLOCK, max_seqlen_q)
    out, lse = Call(
        name,
        q.transpose(0, 1).reshape(-1, 1, q.shape[2]),
        k.reshape(-1, 1, 1, k.shape[2]),
        v.reshape(-1, 1, 1, v.shape[2]),
        cache_seqlens=counts,
        page_table=table,
        cu_seqlens_q=ends,
        max_seqlen_q=most,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
    ).run()
    assert lse is not None
    return out.view(heads, num_tokens, -1).transpose(0, 1), lse.view(heads, num_tokens)


def _listed(
    name: str, lists: tuple[Tensor, Tensor, Tensor, Tensor], batch: int, heads: int, max_seqlen_q: int, bounds_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys ``[H, B, R, W]``, rising, those that are none last; and how many there are, int32 ``[H, B, R]``."""
    names = ("block_count", "block_offset", "column_count", "column_index")
    for argument, tensor in zip(names, lists, strict=True):
        expected = (batch, heads, lists[0].shape[-1])
        if tuple(tensor.shape[:3]) != expected or tensor.dim() != (3 if argument.endswith("count") else 4):
            raise ValueError(
                f"attnops.compat: {name}: {argument} must be [{batch} (requests), {heads} (heads of q), {expected[2]} "
                f"(every {BLOCK} queries){'' if argument.endswith('count') else ', entries'}], got {list(tensor.shape)}"
            )
    if lists[0].shape[-1] * BLOCK < max_seqlen_q:
        raise ValueError(
            f"attnops.compat: {name}: block_count.shape[2] must be at least {-(-max_seqlen_q // BLOCK)} "
            f"(ceil(max_seqlen_q / {BLOCK})), got {lists[0].shape[-1]}"
        )
    block_count, block_offset, column_count, column_index = (t.transpose(0, 1).long() for t in lists)
    device = block_offset.device
    inside = torch.arange(BLOCK, device=device)
    blocks = block_offset.unsqueeze(-1) + inside
    of_block = torch.arange(blocks.shape[-2], device=device).unsqueeze(-1) < block_count.view(*block_count.shape, 1, 1)
    column = torch.arange(column_index.shape[-1], device=device) < column_count.unsqueeze(-1)
    none = column_index.new_full((*column_count.shape, 1), -1)  # so that no list has no entry at all
    keys = torch.cat([blocks.flatten(-2), column_index, none], -1)
    known = torch.cat([of_block.expand_as(blocks).flatten(-2), column, none >= 0], -1)
    known &= (keys >= 0) & (keys < bounds_k.diff().long().view(1, -1, 1, 1))
    return torch.where(known, keys, NOWHERE).sort(-1).values, known.sum(-1).to(torch.int32)
