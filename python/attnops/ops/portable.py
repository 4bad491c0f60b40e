"""`paged_kv` in plain torch, for devices without compiled kernels: HIP, XPU, NPU, and GPUs of an architecture that was
not built. Shapes are static and nothing is read on the host, as in the kernels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attnops import _load

E4M3_MAX = 448.0
MLA_LATENT, MLA_ROW_BYTES, MLA_GROUP = 512, 656, 128
LEAST_SCALE = 2.0**-126
_libraries: list[torch.library.Library] = []  # a registration lives as long as its library


def serve(device: torch.device) -> None:
    """Makes the ops of `paged_kv` run on a device, where no compiled kernel does. Called when a backend is built."""
    key = {"cuda": "CUDA", "xpu": "XPU", "npu": "PrivateUse1", "privateuseone": "PrivateUse1"}.get(device.type)
    if key is not None and not (key == "CUDA" and _is_built_for(device)):
        _register(key)


def _is_built_for(device: torch.device) -> bool:
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return _load.has_code_for(major * 10 + minor, _load.built_archs())


@functools.cache
def _register(key: str) -> None:
    library = torch.library.Library("attnops", "IMPL")
    for function in (build_cu_seqlens, build_page_table, build_kv_indices, translate_slots, store_kv, store_mla_kv):
        library.impl(function.__name__, function, key, allow_override=True)
    _libraries.append(library)


def _unchecked(op: str, report: Tensor | None) -> None:
    if report is not None:
        raise NotImplementedError(f"attnops::{op}: the checked mode (report) needs the compiled kernels")


def build_cu_seqlens(cu_seqlens: Tensor, seqlens: Tensor) -> None:
    cu_seqlens[:1].zero_()
    total = seqlens.clamp(min=0).to(torch.int64).cumsum(0)
    cu_seqlens[1:].copy_(total.clamp(max=2**31 - 1))


def _pages(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    slot_map: Tensor | None,
    max_pages: int,
    kv_start_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(page of every cell ``[B, max_pages]``, pages of every request ``[B]``)."""
    max_requests, max_tokens = req_to_token.shape
    rows = req_pool_indices.to(torch.int64)
    has_row = (rows >= 0) & (rows < max_requests)
    start = _starts(kv_start_idx, cache_seqlens, max_tokens)
    most = (max_tokens - start).clamp(max=max_pages * page_size)
    tokens = torch.where(has_row, torch.minimum(cache_seqlens.clamp(min=0), most), 0).to(torch.int64)
    counts = (tokens + page_size - 1) // page_size
    if max_requests == 0 or max_tokens == 0 or max_pages == 0:
        return rows.new_zeros(rows.shape[0], max_pages), counts.clamp(max=0)
    first = torch.arange(max_pages, device=rows.device) * page_size
    position = first.unsqueeze(0)
    if slot_map is not None:  # a window holds the newest tokens, so a page's last token is the last to leave
        position = torch.minimum(position + page_size, tokens.unsqueeze(1)) - 1
    position = (position + start.unsqueeze(1)).clamp(0, max_tokens - 1)
    slot = req_to_token[rows.clamp(0, max_requests - 1).unsqueeze(1), position].to(torch.int64)
    if slot_map is not None:
        slot = _mapped(slot, slot_map)
    return torch.where(slot < 0, 0, slot // page_size), counts


def _starts(kv_start_idx: Tensor | None, cache_seqlens: Tensor, max_tokens: int) -> Tensor:
    """Where in its row each request begins, within the row."""
    if kv_start_idx is None:
        return torch.zeros_like(cache_seqlens)
    return kv_start_idx.clamp(0, max_tokens)


def _mapped(slot: Tensor, slot_map: Tensor) -> Tensor:
    size = slot_map.shape[0]
    if size == 0:
        return torch.where(slot < 0, slot, -1)
    found = slot_map[slot.clamp(0, size - 1)].to(torch.int64)
    return torch.where(slot < 0, slot, torch.where(slot < size, found, -1))


def build_page_table(
    page_table: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    slot_map: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    _unchecked("build_page_table", report)
    pages, counts = _pages(req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map, page_table.shape[1])
    cell = torch.arange(page_table.shape[1], device=pages.device)
    page_table.copy_(torch.where(cell < counts.unsqueeze(1), pages.to(torch.int32), page_table))


def build_kv_indices(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor | None,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    cache_seqlens: Tensor,
    page_size: int,
    slot_map: Tensor | None = None,
    report: Tensor | None = None,
    kv_start_idx: Tensor | None = None,
) -> None:
    _unchecked("build_kv_indices", report)
    max_pages = -(-req_to_token.shape[1] // page_size)
    of_tokens = (req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map)
    pages, counts = _pages(*of_tokens, max_pages, kv_start_idx)
    build_cu_seqlens(kv_indptr, counts.to(torch.int32))
    if kv_last_page_len is not None:
        most = req_to_token.shape[1] - _starts(kv_start_idx, cache_seqlens, req_to_token.shape[1])
        tokens = torch.minimum(cache_seqlens.clamp(min=0), most).to(torch.int64)
        last = tokens - (counts - 1) * page_size
        kv_last_page_len.copy_(torch.where(counts > 0, last, 0))
    # Cell i belongs to the request whose range holds it; a search finds it without a shape that depends on lengths.
    bounds = kv_indptr.to(torch.int64)
    if pages.numel() == 0 or kv_indices.numel() == 0:
        return
    index = torch.arange(kv_indices.shape[0], device=pages.device)
    request = (torch.searchsorted(bounds, index, right=True) - 1).clamp(0, pages.shape[0] - 1)
    cell = (index - bounds[request]).clamp(0, max_pages - 1)
    kv_indices.copy_(torch.where(index < bounds[-1], pages[request, cell].to(torch.int32), kv_indices))


def translate_slots(out: Tensor, slots: Tensor, slot_map: Tensor, report: Tensor | None = None) -> None:
    _unchecked("translate_slots", report)
    out.copy_(_mapped(slots.to(torch.int64), slot_map))


def _store(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows into pages ``[P, page_size, ...]`` at token slots; one that is no slot of the pool is not stored.

    A row that is not stored repeats the first one that is, or, where none is, what is there already.
    """
    page_size = pages.shape[1]
    size = pages.shape[0] * page_size
    if rows.shape[0] == 0 or size == 0:
        return
    if pages.element_size() == 1:  # torch does not index FP8 on every device
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    slots = slots.to(torch.int64)
    valid = (slots >= 0) & (slots < size)
    token = torch.arange(rows.shape[0], device=rows.device)
    first = valid.to(torch.int32).argmax()
    token = torch.where(valid, token, first)
    slot = slots[token].clamp(0, size - 1)
    page, offset = slot // page_size, slot % page_size
    any_valid = valid.any()
    kept = torch.where(any_valid, rows[token], pages[page[:1], offset[:1]])
    pages.index_put_((page, offset), kept)


def quantized(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``saturate(rows / scale)`` in an FP8 type; NaN stays."""
    values = rows.to(torch.float32)
    if scale is not None:
        values = values / scale
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def store_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    out_cache_loc: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    _unchecked("store_kv", report)
    for pages, rows, scale in ((k_pages, k, k_scale), (v_pages, v, v_scale)):
        if pages.dtype != rows.dtype:
            rows = quantized(rows, None if scale is None else scale.view(-1, 1), pages.dtype)
        _store(pages, rows, out_cache_loc)


def store_mla_kv(
    kv_pages: Tensor,
    latent: Tensor,
    k_pe: Tensor | None,
    out_cache_loc: Tensor,
    kv_scale: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    _unchecked("store_mla_kv", report)
    rows = latent if k_pe is None else torch.cat([latent, k_pe], -1)
    if kv_pages.shape[-1] == MLA_ROW_BYTES:
        rows = _fp8_rows(rows)
    elif kv_pages.dtype != rows.dtype:
        rows = quantized(rows, kv_scale, kv_pages.dtype)
    _store(kv_pages, rows, out_cache_loc)


def _fp8_rows(rows: Tensor) -> Tensor:
    """uint8 ``[T, 656]``: 512 e4m3, a float32 scale per 128 of them, 64 bf16."""
    groups = rows[:, :MLA_LATENT].to(torch.float32).unflatten(1, (-1, MLA_GROUP))
    # As fmaxf: a NaN among numbers does not decide the scale.
    scales = (groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1) / E4M3_MAX).clamp(min=LEAST_SCALE)
    stored = quantized(groups, scales.unsqueeze(-1), torch.float8_e4m3fn).flatten(1)
    rope = rows[:, MLA_LATENT:].to(torch.bfloat16).contiguous()
    return torch.cat([stored.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], 1)
