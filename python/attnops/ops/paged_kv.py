"""Paged KV: page tables from request slots, cumulative lengths, and storing new K/V rows into pages.

A *token slot* is ``page * page_size + offset``. ``req_to_token[r, i]`` is the slot of position ``i`` of the request in
row ``r``; a request's pages hold ``page_size`` consecutive positions each. All ops are device work only: lengths and
indices are never read on the host, so one captured graph serves every length.

``report`` is the buffer of the checked mode everywhere: int32 ``[8]``, zeroed by the caller (``csrc/core/report.h``).
With it, kernels record the first request slot, token slot or length out of range. They leave out what depends on it.
Without it a length is clamped to what the table holds, a token slot outside the pool is not stored, and request
slots are trusted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import names_its_arguments, register_fake


@names_its_arguments
def build_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    *,
    page_table: Tensor | None = None,
    slot_map: Tensor | None = None,
    report: Tensor | None = None,
) -> Tensor:
    """Page table of a batch: cell ``[b, j]`` is the page that holds positions ``j * page_size ...`` of request ``b``.

    Args:
        req_to_token: ``[max_requests, max_context]`` int32, last dim dense: token slot of every position.
        req_pool_indices: ``[batch_size]`` int32 or int64: the request's row of ``req_to_token``.
        cache_seqlens: ``[batch_size]`` int32, contiguous, in tokens. Negative counts as 0.
        page_size: Tokens per page, at least 1.
        page_table: Destination ``[batch_size, max_pages]`` int32, last dim dense. Only the cells that a length needs
            are written; cells beyond are left as they are, and no kernel reads them. Allocated as zeros
            ``[batch_size, ceil(max_context / page_size)]`` when omitted.
        slot_map: ``[num_slots]`` int32 or int64: slot of the full pool to slot of the sliding-window pool, negative
            where a token has left the window. The page is then that of the last token in it, the last one to leave;
            a page wholly outside the window becomes page 0.
        report: Checked mode, see the module.

    Returns:
        ``page_table``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    if page_table is None:
        max_pages = -(-req_to_token.shape[1] // max(page_size, 1))
        page_table = req_to_token.new_zeros(cache_seqlens.shape[0], max_pages)
    torch.ops.attnops.build_page_table(
        page_table, req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map, report
    )
    return page_table


@names_its_arguments
def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    *,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    kv_last_page_len: Tensor | None = None,
    kv_start_idx: Tensor | None = None,
    slot_map: Tensor | None = None,
    report: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The page table in CSR form: request ``b`` owns ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``.

    Args:
        req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map, report: As in :func:`build_page_table`.
        kv_indptr: Destination ``[batch_size + 1]`` int32.
        kv_indices: Destination ``[num_indices]`` int32; ``batch_size * ceil(max_context / page_size)`` cells serve
            every length. Cells past the last one needed are left as they are. What does not fit is not written.
            ``kv_indptr`` still tells how many cells were needed.
        kv_last_page_len: Destination ``[batch_size]`` int32: tokens in the request's last page, 0 without tokens.
            Destinations are allocated when omitted.
        kv_start_idx: ``[batch_size]`` int32: position in its row at which a request begins, such as the decoder's
            tokens behind their encoder's; 0 when omitted. It is clamped to the row, and the length to what is left.
            With pages of more than a token, it belongs on the boundary of one.

    Returns:
        ``(kv_indptr, kv_indices, kv_last_page_len)``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    batch_size = cache_seqlens.shape[0]
    if kv_indptr is None:
        kv_indptr = cache_seqlens.new_empty(batch_size + 1)
    if kv_indices is None:
        kv_indices = cache_seqlens.new_zeros(batch_size * -(-req_to_token.shape[1] // max(page_size, 1)))
    if kv_last_page_len is None:
        kv_last_page_len = cache_seqlens.new_empty(batch_size)
    outputs, rows = (kv_indptr, kv_indices, kv_last_page_len), (req_to_token, req_pool_indices)
    torch.ops.attnops.build_kv_indices(*outputs, *rows, cache_seqlens, page_size, slot_map, report, kv_start_idx)
    return kv_indptr, kv_indices, kv_last_page_len


@names_its_arguments
def build_cu_seqlens(seqlens: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Exclusive prefix sum of lengths, with the total at the end.

    Args:
        seqlens: ``[batch_size]`` int32, contiguous, in tokens. Negative counts as 0. The total must fit int32.
        cu_seqlens: Destination ``[batch_size + 1]`` int32, contiguous; allocated when omitted.

    Returns:
        ``cu_seqlens``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride or device does not fit.
    """
    if cu_seqlens is None:
        cu_seqlens = seqlens.new_empty(seqlens.shape[0] + 1)
    torch.ops.attnops.build_cu_seqlens(cu_seqlens, seqlens)
    return cu_seqlens


@names_its_arguments
def translate_slots(
    slots: Tensor, slot_map: Tensor, *, out: Tensor | None = None, report: Tensor | None = None
) -> Tensor:
    """Slots of the full pool to slots of the sliding-window pool: ``out[i] = slot_map[slots[i]]``.

    Args:
        slots: ``[num_tokens]`` int32 or int64, any stride. A negative slot is padding and is passed on as it is.
        slot_map: ``[num_slots]`` int32 or int64. A slot outside it becomes -1 (recorded in checked mode).
        out: Destination ``[num_tokens]`` int32 or int64, may be ``slots``; allocated like ``slots`` when omitted.
        report: Checked mode, see the module.

    Returns:
        ``out``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype or device does not fit.
    """
    out = torch.empty_like(slots) if out is None else out
    torch.ops.attnops.translate_slots(out, slots, slot_map, report)
    return out


@names_its_arguments
def store_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    out_cache_loc: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """Store new K and V rows into their pages, in place.

    Args:
        k_pages, v_pages: ``[num_pages, page_size, num_kv_heads, head_dim]``, last dim dense, every other stride free;
            the head dims of K and V may differ. In the dtype of ``k``, a plain copy: fp32, fp16, bf16, e4m3 or e5m2. Or
            float8_e4m3fn or float8_e5m2: ``stored = saturate(x / scale)``, rounded to nearest even, +-448 or +-57344 at
            most, NaN kept.
        k, v: ``[num_tokens, num_kv_heads, head_dim]``, one dtype, last dim dense.
        out_cache_loc: ``[num_tokens]`` int32 or int64 token slots. A negative slot is padding: its row is skipped. Of
            rows with the same slot, one is stored, which one is not defined.
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]`` on the device, for FP8 pages; 1 when omitted.
        report: Checked mode, see the module.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    torch.ops.attnops.store_kv(k_pages, v_pages, k, v, out_cache_loc, k_scale, v_scale, report)


@names_its_arguments
def store_mla_kv(
    kv_pages: Tensor,
    latent: Tensor,
    out_cache_loc: Tensor,
    *,
    k_pe: Tensor | None = None,
    kv_scale: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """Store new MLA rows (512 latent, 64 rope) into their pages, in place.

    Args:
        kv_pages: One of, last dim dense, every other stride free:
            ``[num_pages, page_size, 576]`` in the dtype of ``latent``: a plain copy.
            ``[num_pages, page_size, 576]`` float8_e4m3fn or float8_e5m2: ``stored = saturate(x / kv_scale)``.
            ``[num_pages, page_size, 656]`` uint8: 512 e4m3, then 4 float32 scales, then 64 bf16 of rope. A scale is
            that of 128 latents, ``max(amax / 448, 2**-126)``: a group of zeros gets the smallest normal float.
        latent: ``[num_tokens, 576]``, or ``[num_tokens, 512]`` with ``k_pe``, in fp32, fp16 or bf16, last dim dense.
        out_cache_loc: ``[num_tokens]`` int32 or int64 token slots. A negative slot is padding: its row is skipped. Of
            rows with the same slot, one is stored, which one is not defined.
        k_pe: ``[num_tokens, 64]`` in the dtype of ``latent``, or None where ``latent`` holds it.
        kv_scale: float32 ``[1]`` on the device, for FP8 pages; 1 when omitted.
        report: Checked mode, see the module.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.

    Source: the 656-byte row is that of FlashMLA's FP8 cache.
    """
    torch.ops.attnops.store_mla_kv(kv_pages, latent, k_pe, out_cache_loc, kv_scale, report)


for _op in (
    "build_page_table",
    "build_kv_indices",
    "build_cu_seqlens",
    "translate_slots",
    "store_kv",
    "store_mla_kv",
):
    register_fake(_op)
