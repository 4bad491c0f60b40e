"""K and V of four bits: float4_e2m1fn_x2 codes with a float8_e4m3fn scale for every 16 values of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops._arguments import lse_like, names_its_arguments, register_fake

FP4 = torch.float4_e2m1fn_x2
FP4_BLOCK = 16  # values that share a scale


def _codes(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype == FP4 else pages


@names_its_arguments
def store_kv_fp4(
    k_pages: Tensor,
    v_pages: Tensor | None,
    k_block_scales: Tensor,
    v_block_scales: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    out_cache_loc: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """Quantize new rows to four bits and store them into their pages, in place.

    Args:
        k_pages, v_pages: float4_e2m1fn_x2, or as uint8, ``[num_pages, page_size, num_kv_heads, head_dim / 2]``. A row's
            even values are the low halves of its bytes. V is None where K holds both, as in MLA.
        k_block_scales, v_block_scales: float8_e4m3fn ``[num_pages, page_size, num_kv_heads, head_dim / 16]``. Each is
            ``amax / scale / 6`` of 16 values, rounded to e4m3. Values are then rounded to the nearest code.
            A block that holds NaN has NaN as its scale.
        k, v: ``[num_tokens, num_kv_heads, head_dim]``, fp32, fp16 or bf16, last dim dense; head dims of 16 and more.
        out_cache_loc: ``[num_tokens]`` int32 or int64 token slots. A negative slot is padding: its row is skipped.
        k_scale, v_scale: float32 ``[1]``: a value is code x block's scale x this; 1 when omitted.
        report: Checked mode (`attnops.report`).

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    pages_v = None if v_pages is None else _codes(v_pages)
    torch.ops.attnops.store_kv_fp4(
        _codes(k_pages), pages_v, k_block_scales, v_block_scales, k, v, out_cache_loc, k_scale, v_scale, report
    )


@names_its_arguments
def fp4_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    k_block_scales: Tensor,
    v_block_scales: Tensor | None,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    kv_indptr: Tensor | None = None,
    softmax_scale: float | None = None,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    head_dim_v: int = 512,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    report: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of a few new tokens over pages of four bits, dequantized as they are read.

    Args:
        q: ``[B, S_q, H_q, head_dim]``, fp32, fp16 or bf16.
        k_pages, v_pages, k_block_scales, v_block_scales, k_scale, v_scale: As of `store_kv_fp4`.
        page_table: int32 ``[B, max_pages]``; with `kv_indptr` flat ``[num_indices]``.
        cache_seqlens: int32 ``[B]``, the new tokens included.
        softmax_scale: ``head_dim ** -0.5`` when None.
        window_left: Keys at positions ``[p - window_left, p]``; -1: off.
        logit_cap: 0: off.
        sinks: float32 ``[H_q]``, or None.
        head_dim_v: Without `v_pages`: how many of a K row's first values are V.
        out: Destination ``[B, S_q, H_q, head_dim of V]``.
        lse: float32 ``[B, S_q, H_q]``, natural log.
        report: Checked mode (`attnops.report`).

    Returns:
        ``out``, or ``(out, lse)`` with `return_lse`. A row without a key gives zeros and ``-inf``.

    Raises:
        RuntimeError: naming the argument whose shape, dtype, stride, device or range does not fit.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if out is None:
        dim_v = head_dim_v if v_pages is None else 2 * v_pages.shape[-1]
        out = q.new_empty(*q.shape[:-1], dim_v)
    lse = lse_like(q, lse, return_lse)
    pages_v = None if v_pages is None else _codes(v_pages)
    scratch = _scratch(q, k_pages, v_pages, out) if q.is_cuda else ()
    torch.ops.attnops.fp4_decode(
        out, lse, q, _codes(k_pages), pages_v, k_block_scales, v_block_scales, page_table, kv_indptr, cache_seqlens,
        scale, window_left, logit_cap, sinks, k_scale, v_scale, report, *scratch,
    )  # fmt: skip
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _scratch(q: Tensor, k_pages: Tensor, v_pages: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor]:
    """Room for as many shares of a request's keys as fill the GPU once.

    That is sixteen warps an SM, eight of more than eight rows, and of latents two CTAs.
    """
    if v_pages is None:
        works, places = q.shape[0] * -(-q.shape[1] * q.shape[2] // 16), 2
    else:
        rows = q.shape[1] * q.shape[2] // max(k_pages.shape[2], 1)
        works, places = q.shape[0] * k_pages.shape[2], 16 if rows <= 8 else 8
    places *= torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = min(max(places // max(works, 1), 1), 64)
    partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
    return partial, torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)


register_fake("store_kv_fp4")
register_fake("fp4_decode")
