"""Keys and queries of the sparse indexer in FP8: how they are made, stored and gathered.

A page of n tokens holds n keys of D bytes (float8_e4m3fn), then n float32 scales: uint8 ``[num_pages, n, D + 4]``, each
page without gaps. D is 128 or 64.

A row is quantized as ``x / scale``, with ``scale = max(|x|, 1e-4) / 448``. `ue8m0` rounds it up to a power of two.
`hadamard` first multiplies x by the Hadamard matrix (Sylvester's order) and ``D ** -0.5``. All of it is float32. A row
that holds NaN has a NaN for its scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def store_index_k(
    index_pages: Tensor,
    k: Tensor,
    out_cache_loc: Tensor,
    *,
    hadamard: bool = True,
    ue8m0: bool = False,
    report: Tensor | None = None,
) -> None:
    """Quantize new index keys into pages.

    Args:
        index_pages: uint8 ``[num_pages, page_size, D + 4]``, each page without gaps.
        k: ``[T, D]`` float32, bf16 or fp16, last dim dense.
        out_cache_loc: int32 or int64 ``[T]``: token slots; below 0: padding.
        hadamard: Multiply k by the Hadamard matrix and ``D ** -0.5`` first, in float32.
        ue8m0: Round scales up to powers of two.
        report: int32 ``[8]`` of the checked mode.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a slot outside the pages.
    """
    torch.ops.attnops.store_index_k(index_pages, k, out_cache_loc, hadamard, ue8m0, report)


@names_its_arguments
def quantize_index_q(
    q: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    hadamard: bool = True,
    ue8m0: bool = False,
    q_fp8: Tensor | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize index queries, and fold their scales into the heads' weights.

    Args:
        q: ``[T, H, D]`` float32, bf16 or fp16, last dim dense.
        weights: ``[T, H]`` float32, bf16 or fp16, last dim dense.
        scale: Of the weights: ``H ** -0.5 * D ** -0.5`` in DeepSeek's models.
        hadamard, ue8m0: As in `store_index_k`.
        q_fp8: float8_e4m3fn ``[T, H, D]``; allocated when omitted.
        weights_out: float32 ``[T, H]``: ``weights * scale * q's scale``; allocated when omitted.

    Returns:
        ``(q_fp8, weights_out)``.

    Raises:
        RuntimeError: naming the argument that does not fit.
    """
    q_fp8 = q.new_empty(q.shape, dtype=torch.float8_e4m3fn) if q_fp8 is None else q_fp8
    weights_out = weights.new_empty(weights.shape, dtype=torch.float32) if weights_out is None else weights_out
    torch.ops.attnops.quantize_index_q(q_fp8, weights_out, q, weights, scale, hadamard, ue8m0)
    return q_fp8, weights_out


@names_its_arguments
def gather_index_k(
    k: Tensor,
    k_scale: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    cu_seqlens_k: Tensor,
    *,
    report: Tensor | None = None,
) -> None:
    """Copy the index keys of a batch from pages to ragged rows.

    Args:
        k: float8_e4m3fn or uint8 ``[N, D]``, written; rows behind the last request stay as they are.
        k_scale: float32 ``[N]``, written.
        index_pages: uint8 ``[num_pages, page_size, D + 4]``, each page without gaps.
        page_table: int32 ``[B, max_pages]``.
        cu_seqlens_k: int32 ``[B + 1]``: where each request's rows begin, from 0 on, and where the last one's end.
        report: int32 ``[8]`` of the checked mode. Without it, what is out of range is an error on a CPU. On a GPU a key
            without a page is zeros.

    Raises:
        RuntimeError: naming the argument that does not fit; on the CPU also a page outside the table or the pool.
    """
    torch.ops.attnops.gather_index_k(k, k_scale, index_pages, page_table, cu_seqlens_k, report)


for _op in ("store_index_k", "quantize_index_q", "gather_index_k"):
    register_fake(_op)
