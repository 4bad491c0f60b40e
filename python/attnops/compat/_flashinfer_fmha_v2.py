"""FlashInfer's `trtllm_fmha_v2_prefill`, for `attnops.compat.flashinfer`: prompts in five layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._chunks import extend_chunks
from attnops.compat._convert import as_dtype, as_int32, as_scale, as_sinks, finish, fold_scale, refuse
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import extend, varlen
from attnops.ops._pages import gathered, own_cells

NAME = "trtllm_fmha_v2_prefill"
PAGED = ("Q_PAGED_KV_NHD", "Q_PAGED_KV_HND")
LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", *PAGED)
MASKS = ("causal", "padding", "sliding_window", "chunked")
Operands = Tensor | tuple[Any, ...]


@names_the_peers(
    NAME,
    q="of qkv",
    k="of qkv",
    v="of qkv",
    k_pages="of qkv",
    v_pages="of qkv",
    page_table="block_tables",
    cache_seqlens="seq_lens",
    cu_seqlens_q="cum_seq_lens_q",
    cu_seqlens_k="cum_seq_lens_kv",
)
def trtllm_fmha_v2_prefill(
    qkv: Operands,
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: Tensor | list[Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prefill in any of five layouts.

    Args:
        qkv: By `input_layout`. ``PACKED_QKV``: ``[T, 3, H, D]``. ``CONTIGUOUS_Q_KV``: q ``[T, H_q, D]`` and
            ``[T_k, 2, H_kv, D]``. ``SEPARATE_Q_K_V``: three tensors. ``Q_PAGED_KV_NHD``, ``Q_PAGED_KV_HND``: q and
            pages, joint or as two tensors of one allocation.
        workspace_buffer: Its memory is not needed.
        max_q_len: Nothing depends on it.
        max_kv_len: Of keys that are not paged, with chunks.
        seq_lens: ``[B]``, of paged keys; others take cum_seq_lens_kv.
        cum_seq_lens_q, cum_seq_lens_kv: ``[B + 1]``.
        bmm1_scale: q scale x k scale x softmax scale. bmm2_scale: v scale. Numbers, or float32 tensors of one.
        block_tables: int32 ``[B, max_pages]``. For two tensors ``[B, 2, max_pages]``: K's and V's pages, counted from
            K's first. Their pages in use are copied.
        mask_mode: "causal", "padding" (none), "sliding_window" (causal, with `window_left`), "chunked" (causal, within
            chunks of `chunked_attention_size` tokens), in any case.
        skip_softmax_threshold_scale_factor: Taken. Nothing is skipped: results are the exact ones.
        save_softmax_stats: Return statistics, too. Needs a number as `bmm1_scale`.

    Returns:
        ``[T, H_q, D]``, or ``(out, stats)``. stats float32 ``[T, H_q, 2]`` is a maximum and a sum of exponentials that
        give FlashInfer's lse on Hopper. The sum is always 1.
    """
    mask = mask_mode.lower()
    if input_layout not in LAYOUTS:
        raise ValueError(
            f"attnops.compat: {NAME}: input_layout must be one of {', '.join(LAYOUTS)}, got {input_layout}"
        )
    if mask not in MASKS:
        raise refuse(NAME, f"mask_mode={mask_mode}", f"{', '.join(MASKS)} work")
    if (mask == "chunked") != (chunked_attention_size > 0):
        raise ValueError(
            f"attnops.compat: {NAME}: chunked_attention_size must be above 0 with mask_mode=chunked, else 0, "
            f"got {chunked_attention_size} with {mask_mode}"
        )
    if pos_encoding_mode not in (None, "NONE"):
        raise refuse(NAME, f"pos_encoding_mode={pos_encoding_mode}", "BatchPrefillWithRaggedKVCacheWrapper has ALiBi")
    if save_softmax_stats and isinstance(bmm1_scale, Tensor):
        raise refuse(NAME, "save_softmax_stats with a tensor as bmm1_scale", "give bmm1_scale as a number")
    if cum_seq_lens_q.shape[0] != batch_size + 1:
        raise ValueError(
            f"attnops.compat: {NAME}: cum_seq_lens_q must have batch_size + 1 = {batch_size + 1} elements, "
            f"got {cum_seq_lens_q.shape[0]}"
        )
    q, k, v = operands(qkv, input_layout)
    scale, on_device = fold_scale(NAME, "bmm1_scale", bmm1_scale, q.device)
    bounds = as_int32(NAME, "cum_seq_lens_q", cum_seq_lens_q, q.device)
    query = q.to(torch.bfloat16) if q.dtype.itemsize == 1 else q
    options: dict[str, Any] = {
        "causal": mask != "padding",
        "window_left": window_left if mask == "sliding_window" else -1,
        "softmax_scale": scale,
        "logit_cap": logits_soft_cap_scale or 0.0,
        "sinks": as_sinks(sinks, q.shape[1], NAME),
        "k_scale": on_device,
        "v_scale": as_scale(NAME, "bmm2_scale", bmm2_scale, q.device),
        "out": out if out is not None and out.dtype == query.dtype else None,
        "return_lse": save_softmax_stats,
    }
    if input_layout in PAGED:
        if block_tables is None:
            raise ValueError(f"attnops.compat: {NAME}: block_tables is needed with input_layout={input_layout}")
        k, v, cells = pages_of(k, v, block_tables, isinstance(qkv[1], tuple))
        lens = as_int32(NAME, "seq_lens", seq_lens.reshape(-1), q.device)
    else:
        bounds_k = as_int32(NAME, "cum_seq_lens_kv", cum_seq_lens_kv, q.device)
    if mask == "chunked":
        if input_layout not in PAGED:
            k, v, lens = k.unsqueeze(1), v.unsqueeze(1), bounds_k.diff()
            cells = bounds_k[:-1].unsqueeze(1) + torch.arange(max_kv_len, dtype=torch.int32, device=q.device)
        result, lse = extend_chunks(query, k, v, cells, lens, bounds, chunked_attention_size, **options)
    elif input_layout in PAGED:
        result, lse = extend(query, k, v, cells, lens, bounds, **options)
    else:
        result, lse = varlen(query, k, v, bounds, bounds_k, **options)
    result = finish(result, out, as_dtype(NAME, "out_dtype", out_dtype) or q.dtype)
    if not save_softmax_stats:
        return result
    assert lse is not None and not isinstance(bmm1_scale, Tensor)
    # Hopper's kernels keep maxima of plain scores over sqrt(D); with a soft cap, of capped ones.
    unit = 1.0 if logits_soft_cap_scale else bmm1_scale
    return result, torch.stack([lse * (q.shape[2] ** -0.5 / unit), torch.ones_like(lse)], dim=-1)


def operands(qkv: Operands, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, and keys and values ``[T_k, H_kv, D]`` or pages ``[P, page_size, H_kv, D]``: views.

    Raises:
        ValueError: `qkv` is not what the layout needs.
    """
    parts: tuple[Any, ...] = qkv if isinstance(qkv, tuple) else (qkv,)
    wanted = {"PACKED_QKV": 1, "SEPARATE_Q_K_V": 3}.get(layout, 2)
    if len(parts) != wanted:
        raise ValueError(f"attnops.compat: {NAME}: qkv must have {wanted} parts with {layout}, got {len(parts)}")
    if layout == "SEPARATE_Q_K_V":
        return parts[0], parts[1], parts[2]
    if layout in PAGED:
        q, pages = parts
        k, v = pages if isinstance(pages, tuple) else pages.unbind(1)
        return (q, k.transpose(1, 2), v.transpose(1, 2)) if layout == "Q_PAGED_KV_HND" else (q, k, v)
    count, joint = (3, parts[0]) if layout == "PACKED_QKV" else (2, parts[1])
    if joint.dim() != 4 or joint.shape[1] != count:
        raise ValueError(
            f"attnops.compat: {NAME}: {layout} needs [tokens, {count}, heads, head_dim] in qkv, got {list(joint.shape)}"
        )
    first, *others = joint.unbind(1) if count == 3 else (parts[0], *joint.unbind(1))
    return first, others[0], others[1]


def pages_of(k: Tensor, v: Tensor, tables: Tensor, apart: bool) -> tuple[Tensor, Tensor, Tensor]:
    """K's and V's pages with one table for both.

    Two tensors share no page indices: the pages in use are copied from the allocation that both lie in.
    """
    if not apart:
        return k, v, tables
    if tables.dim() != 3 or tables.shape[1] != 2:
        raise ValueError(
            f"attnops.compat: {NAME}: block_tables must be [batch_size, 2, max_pages] for K and V in two tensors, "
            f"got {list(tables.shape)}"
        )
    elements = k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()
    whole = k.as_strided((elements // k.stride(0), *k.shape[1:]), k.stride())
    cells = tables.unbind(1)
    return gathered(whole, cells[0]), gathered(whole, cells[1]), own_cells(cells[0])
