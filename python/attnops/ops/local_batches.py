"""Local attention (`attention_chunk_size`, Llama 4): chunks of requests as requests of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


def max_local_batches(num_tokens: int, batch_size: int, chunk_size: int) -> int:
    """Virtual requests that any batch of this shape has at most.

    n new tokens touch at most ``n // chunk_size + 2`` chunks, and at most n.
    """
    return min(num_tokens, num_tokens // chunk_size + 2 * batch_size)


@names_its_arguments
def build_local_batches(
    cu_seqlens_q: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    page_size: int,
    chunk_size: int,
    *,
    local_cu_seqlens_q: Tensor,
    local_cache_seqlens: Tensor,
    local_page_table: Tensor,
) -> None:
    """Cut a batch's new tokens at multiples of `chunk_size`, on the device: each piece sees its own chunk's keys only.

    A query at position p sees the keys at ``[p // chunk_size * chunk_size, p]``. Causal `fmha_paged` over the virtual
    requests is that; the queries stay where they are.

    Args:
        cu_seqlens_q: int32 ``[B + 1]``.
        cache_seqlens: int32 ``[B]``, the new tokens included.
        page_table: int32 ``[B, max_pages]``, last dim dense.
        page_size: Tokens per page.
        chunk_size: A multiple of it.
        local_cu_seqlens_q: int32 ``[V + 1]``, written: ``V >= max_local_batches(...)``; what a batch needs no longer is
            empty requests at its end.
        local_cache_seqlens: int32 ``[V]``, written; 0 for those.
        local_page_table: int32 ``[V, chunk_size / page_size]``; cells that no length needs are left as they are.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    torch.ops.attnops.build_local_batches(
        local_cu_seqlens_q,
        local_cache_seqlens,
        local_page_table,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        page_size,
        chunk_size,
    )


register_fake("build_local_batches")
