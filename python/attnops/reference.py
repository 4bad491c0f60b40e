"""Attention in plain torch, one request at a time: the definition of right for every op, in float64 by default.

Rules, for the query rows i = 0 .. S_q - 1 of a request with S_k keys (the new tokens' keys included):

* Row i stands at position ``p = S_k - S_q + i`` (bottom-right alignment); at a negative one a causal row sees nothing.
* causal: keys at positions <= p. window_left: keys >= p - window_left; window_right: keys <= p + window_right; -1: off.
* chunk_size: keys of the row's own chunk of positions, ``[p // n * n, ...]``; 0: off.
* tree_mask takes the place of the causal rule among the last S_q keys, or the last tree_keys. Row i sees the j-th of
  them when its bit j is set. Keys before them are visible. window_left then counts steps of the tree. A row's depth is
  the number of its bits, less one, and it stands as many positions behind the first of these keys. A key of the tree
  is as far behind it as the row has bits behind that key's own.
* score = softmax_scale * <q, k>; then logit_cap * tanh(score / logit_cap) when the cap is not 0.
* sinks: one more logit per query head, with no value. ``lse`` (natural log) leaves it out unless ``sinks_in_lse``.
* A row without a visible key gives zeros and ``lse = -inf``, sinks or not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MLA_HEAD_DIM_QK = 576
MLA_HEAD_DIM_V = 512
MLA_FP8_ROW_BYTES = 656  # 512 e4m3, 4 float32 scales (one per 128 values), 64 bf16


def unpack_tree_mask(tree_mask: Tensor, seqlen_q: int) -> Tensor:
    """Bits ``[..., ceil(S_q / 8)]`` uint8, little-endian, to bool ``[..., S_q]``; S_q or as many keys as there are."""
    bits = (tree_mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=tree_mask.device)) & 1
    return bits.flatten(-2)[..., :seqlen_q].bool()


def pack_tree_mask(visible: Tensor) -> Tensor:
    """Bool ``[..., S_q]`` to bits ``[..., ceil(S_q / 8)]`` uint8, little-endian."""
    padded = torch.nn.functional.pad(visible.to(torch.uint8), (0, -visible.shape[-1] % 8))
    weights = (1 << torch.arange(8, device=visible.device)).to(torch.uint8)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)


def visibility(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    chunk_size: int = 0,
    tree_mask: Tensor | None = None,
    tree_keys: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys each query sees: bool ``[S_q, S_k]``.

    Args:
        tree_mask: The request's rows, ``[S_q, ceil(S_q / 8)]`` uint8 or more bytes, or None.
        tree_keys: Keys that it is over; 0: S_q.
    """
    key = torch.arange(seqlen_k, device=device)
    position = torch.arange(seqlen_q, device=device).unsqueeze(1) + (seqlen_k - seqlen_q)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    bits = None
    if tree_mask is not None and seqlen_q:
        tree_keys = tree_keys or seqlen_q
        draft = key - (seqlen_k - tree_keys)  # which of the tree's tokens a key belongs to; negative: prefix
        bits = unpack_tree_mask(tree_mask, tree_keys)
        visible &= (draft < 0) | bits[:, draft.clamp(min=0)]
    elif causal:
        visible &= key <= position
    if window_left >= 0 and bits is not None:
        counted = bits.cumsum(1)[:, draft.clamp(min=0)]
        count = bits.sum(1, keepdim=True)
        visible &= torch.where(draft < 0, count.clamp(min=1) - 1 - draft, count - counted) <= window_left
    elif window_left >= 0:
        visible &= key >= position - window_left
    if window_right >= 0:
        visible &= key <= position + window_right
    if chunk_size:
        visible &= key // chunk_size == torch.div(position, chunk_size, rounding_mode="floor")
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    chunk_size: int = 0,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    tree_keys: int = 0,
    sinks_in_lse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of one request.

    Args:
        q: ``[S_q, H_q, D_qk]``.
        k, v: ``[S_k, H_kv, D_qk]`` and ``[S_k, H_kv, D_v]``; query head h uses KV head ``h // (H_q / H_kv)``.
        softmax_scale: ``1 / sqrt(D_qk)`` when None.
        sinks: ``[H_q]``, or None.
        tree_mask: ``[S_q, >= ceil(S_q / 8)]`` uint8, or None.
        tree_keys: Keys that it is over; 0: S_q.
        dtype: Of the whole computation and of the results.

    Returns:
        ``(out [S_q, H_q, D_v], lse [S_q, H_q])``.
    """
    seqlen_q, num_q_heads, head_dim = q.shape
    seqlen_k, num_kv_heads, _ = k.shape
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    q = q.to(dtype).unflatten(1, (num_kv_heads, num_q_heads // num_kv_heads))
    scores = torch.einsum("qhgd,khd->hgqk", q, k.to(dtype)) * scale
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    visible = visibility(
        seqlen_q,
        seqlen_k,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        chunk_size=chunk_size,
        tree_mask=tree_mask,
        tree_keys=tree_keys,
        device=q.device,
    )
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1) if seqlen_k else scores.new_full(scores.shape[:-1], -math.inf)
    lse_with_sinks = lse
    if sinks is not None:
        lse_with_sinks = torch.logaddexp(lse, sinks.to(dtype).view(num_kv_heads, -1, 1))
    empty = lse == -math.inf
    weights = torch.exp(scores - lse_with_sinks.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0)
    out = torch.einsum("hgqk,khd->qhgd", weights, v.to(dtype)).flatten(1, 2)
    if sinks_in_lse:
        lse = torch.where(empty, lse, lse_with_sinks)
    return out, lse.permute(2, 0, 1).flatten(1, 2)


def dequantize(stored: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Real values of ``[..., H, D]``: stored x scale, with scale None, ``[1]`` or ``[H]``."""
    values = stored.to(dtype)
    return values if scale is None else values * scale.to(dtype).view(-1, 1)


def unpack_mla_fp8_rows(rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The 656-byte MLA rows, uint8 ``[..., 656]``, to values ``[..., 576]``."""
    rows = rows.contiguous()
    latent = rows[..., :512].contiguous().view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (4, 128))
    scales = rows[..., 512:528].contiguous().view(torch.float32).to(dtype)
    rope = rows[..., 528:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat([(latent * scales.unsqueeze(-1)).flatten(-2), rope], dim=-1)


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of float4_e2m1fn's codes 0 to 7; 8 to 15 are negative


def quantize_fp4(values: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows ``[..., D]`` as codes, ``[..., D / 2]`` uint8, and scales, ``[..., D / 16]`` of e4m3: `ops.store_kv_fp4`."""
    blocks = values.float().unflatten(-1, (-1, 16))
    tensor_scale = 1.0 if scale is None else scale.float()
    scales = (blocks.abs().amax(-1) / tensor_scale / FP4_VALUES[-1]).clamp(max=448).to(torch.float8_e4m3fn)
    real = (scales.float() * tensor_scale).unsqueeze(-1)
    sizes = torch.where(real > 0, blocks / real, 0.0)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(FP4_VALUES)]
    codes = sum((sizes.abs() > m) if i % 2 == 0 else (sizes.abs() >= m) for i, m in enumerate(middles))  # ties to even
    codes = (codes + 8 * torch.signbit(sizes)).to(torch.uint8).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def dequantize_fp4(
    codes: Tensor, scales: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``[..., D]`` of what `quantize_fp4` made."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    size = (both & 7).to(dtype)  # of FP4_VALUES, without a table: a capture cannot copy one from the host
    size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
    values = torch.where(both < 8, size, -size).unflatten(-1, (-1, 16)) * scales.float().to(dtype).unsqueeze(-1)
    return values.flatten(-2) if scale is None else values.flatten(-2) * scale.to(dtype)


def pack_mla_fp8_rows(latent: Tensor) -> Tensor:
    """Values ``[..., 576]`` to 656-byte rows: each 128 of the first 512 scaled so that the largest becomes 448."""
    blocks = latent[..., :512].float().unflatten(-1, (4, 128))
    scales = (blocks.abs().amax(-1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    stored = (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    rope = latent[..., 512:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([stored, scales.contiguous().view(torch.uint8), rope], dim=-1)


def gather_tokens(
    pages: Tensor, page_table: Tensor, request: int, seqlen: int, kv_indptr: Tensor | None = None
) -> Tensor:
    """The first ``seqlen`` cached tokens of a request, ``[seqlen, ...]``; nothing else of table or pool is read.

    Args:
        pages: ``[P, page_size, ...]``.
        page_table: int32 ``[B, max_pages]``; or, with ``kv_indptr`` ``[B + 1]``, the flat ``[num_indices]``.
    """
    page_size = pages.shape[1]
    num_pages = -(-max(seqlen, 0) // page_size)
    if kv_indptr is None:
        cells = page_table[request, :num_pages]
    else:
        begin = int(kv_indptr[request])
        cells = page_table[begin : begin + num_pages]
    token = torch.arange(max(seqlen, 0), device=pages.device)
    page = cells.long()[token // page_size]
    offset = token % page_size
    if pages.dtype == torch.float8_e4m3fn:  # torch does not index this dtype on every device
        return pages.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn)
    return pages[page, offset]


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attention` of every request of a ragged batch.

    Args:
        q: ``[T, H_q, D_qk]``, k: ``[T_k, H_kv, D_qk]``, v: ``[T_k, H_kv, D_v]``.
        cu_seqlens_q, cu_seqlens_k: int ``[B + 1]``.
        tree_mask: uint8 ``[T, mask_bytes]``, bits over the query tokens of the row's request, or None.
        options: The keyword arguments of `attention`.

    Returns:
        ``(out [T, H_q, D_v], lse [T, H_q])``; tokens of no request hold zeros and ``-inf``.
    """
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(bounds_q) - 1):
        rows = slice(bounds_q[request], bounds_q[request + 1])
        keys = slice(bounds_k[request], bounds_k[request + 1])
        out[rows], lse[rows] = attention(
            q[rows],
            dequantize(k[keys], k_scale, dtype),
            dequantize(v[keys], v_scale, dtype),
            tree_mask=None if tree_mask is None else tree_mask[rows],
            dtype=dtype,
            **options,
        )
    return out, lse


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attention` of every request of a batch whose keys and values are in pages.

    Args:
        q: ``[B, S_q, H_q, D_qk]``; or ``[T, H_q, D_qk]`` with ``cu_seqlens_q`` ``[B + 1]``.
        k_pages, v_pages: ``[P, page_size, H_kv, D]``, any strides.
        page_table, kv_indptr: As in `gather_tokens`.
        cache_seqlens: int ``[B]``, the new tokens included. Below zero counts as zero.
        tree_mask: uint8 ``[B, S_q, mask_bytes]``, or ``[T, mask_bytes]`` with ``cu_seqlens_q``, or None.
        k_scale, v_scale: None, ``[1]`` or ``[H_kv]``: real value = stored x scale.
        options: The keyword arguments of `attention`.

    Returns:
        ``(out, lse)`` in the shape of q with D_v, and of q without its last dimension.
    """

    def keys_of(request: int, seqlen: int) -> tuple[Tensor, Tensor]:
        k = gather_tokens(k_pages, page_table, request, seqlen, kv_indptr)
        v = gather_tokens(v_pages, page_table, request, seqlen, kv_indptr)
        return dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)

    return _per_request(q, keys_of, cache_seqlens, cu_seqlens_q, tree_mask, v_pages.shape[-1], dtype, options)


def mla_attention(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    q_pe: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """MLA attention with absorbed queries: one KV head of 576, whose first 512 are also the value.

    Args:
        q: ``[B, S_q, H_q, 576]`` (or ``[T, H_q, 576]`` with ``cu_seqlens_q``); the first 512 when ``q_pe`` is given.
        q_pe: The last 64 of q, or None.
        kv_pages: ``[P, page_size, 576]`` of a float dtype, or e4m3 with ``kv_scale`` ``[1]``; or uint8 ``[..., 656]``.
        options: The keyword arguments of `attention`; give ``softmax_scale``, the default ``1 / sqrt(576)`` is rarely
            what a model wants.

    Returns:
        ``(out, lse)``, out ``[..., H_q, 512]``.
    """
    q = q if q_pe is None else torch.cat([q, q_pe], dim=-1)

    def keys_of(request: int, seqlen: int) -> tuple[Tensor, Tensor]:
        latent = gather_tokens(kv_pages, page_table, request, seqlen, kv_indptr)
        if kv_pages.shape[-1] == MLA_FP8_ROW_BYTES:
            latent = unpack_mla_fp8_rows(latent, dtype)
        latent = dequantize(latent.unsqueeze(1), kv_scale, dtype)
        return latent, latent[..., :MLA_HEAD_DIM_V]

    return _per_request(q, keys_of, cache_seqlens, cu_seqlens_q, tree_mask, MLA_HEAD_DIM_V, dtype, options)


def _per_request(
    q: Tensor,
    keys_of: Callable[[int, int], tuple[Tensor, Tensor]],
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    tree_mask: Tensor | None,
    head_dim_v: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Run `attention` for each request; q by request, or ragged with `cu_seqlens_q`."""
    out = q.new_zeros(*q.shape[:-1], head_dim_v, dtype=dtype)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=dtype)
    bounds = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for request, seqlen in enumerate(cache_seqlens.tolist()):
        rows = request if bounds is None else slice(bounds[request], bounds[request + 1])
        k, v = keys_of(request, seqlen)
        mask = None if tree_mask is None else tree_mask[rows]
        out[rows], lse[rows] = attention(q[rows], k, v, tree_mask=mask, dtype=dtype, **options)
    return out, lse
