"""What some peers' kernels do on load, done by ops before the call: rotary embeddings and ALiBi.

Rotated or biased keys are a copy of the pages in use, so these calls cost memory and bandwidth that others do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._convert import refuse
from attnops.compat._wide import is_wide
from attnops.ops._pages import gathered, own_cells

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_BIAS_DIMS = 8  # what keeps head dims a multiple of 8; two are used


def check_mode(function: str, mode: str | None) -> None:
    if mode not in MODES:
        raise KeyError(f"attnops.compat: {function}: pos_encoding_mode must be one of {', '.join(MODES)}, got {mode!r}")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first ``2 * cos.shape[-1]`` dimensions of rows turned by angles of which `cos` and `sin` are given.

    Args:
        x: ``[..., D]``.
        cos, sin: Broadcast against ``[..., R / 2]``.
        interleaved: Pairs are neighbours; else halves.
    """
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    cos, sin = cos.float(), sin.float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def llama_angles(positions: Tensor, head_dim: int, scale: float | None, theta: float | None) -> tuple[Tensor, Tensor]:
    """cos and sin ``[..., 1, D / 2]`` of ROPE_LLAMA: angle i is ``position / scale / theta ** (2 i / D)``."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double().unsqueeze(-1) / (scale or 1.0) / (theta or 1e4) ** steps
    return angles.cos().float().unsqueeze(-2), angles.sin().float().unsqueeze(-2)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """float32 ``[H]``: a geometric series from ``2 ** (-8 / n)``, n the power of two below H; then every other one of
    the series for ``2 n``."""
    n = 1 << (num_heads.bit_length() - 1)
    steps = torch.arange(1, n + 1, dtype=torch.float64, device=device)
    more = 2 * torch.arange(num_heads - n, dtype=torch.float64, device=device) + 1
    return torch.cat([2.0 ** (-8 / n * steps), 2.0 ** (-4 / n * more)]).float()


def owner_of(token: Tensor, bounds: Tensor) -> Tensor:
    """The request that each token belongs to; those outside all belong to the nearest."""
    return (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, max(bounds.shape[0] - 2, 0))


def query_positions(lens: Tensor, seqlen_q: int) -> Tensor:
    """Of rows ``[B * S_q]``: a request's queries are its last tokens."""
    return (lens.unsqueeze(1) - seqlen_q + torch.arange(seqlen_q, device=lens.device)).flatten()


def key_positions(cells: Tensor, indptr: Tensor | None, lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Position ``[num_cells, page_size]`` of every token of a page table's cells, and the length of its request."""
    if indptr is None:
        pages = torch.arange(cells.shape[1], device=cells.device).expand(cells.shape)
        owner = torch.arange(cells.shape[0], device=cells.device).unsqueeze(1).expand(cells.shape)
    else:
        index = torch.arange(cells.shape[0], device=cells.device)
        owner = (torch.searchsorted(indptr[1:].long().contiguous(), index, right=True)).clamp(max=lens.shape[0] - 1)
        pages = index - indptr.long()[owner]
    offsets = torch.arange(page_size, device=cells.device)
    return pages.reshape(-1, 1) * page_size + offsets, lens.long()[owner.reshape(-1)].unsqueeze(1)


def with_rope(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    indptr: Tensor | None,
    lens: Tensor,
    seqlen_q: int,
    scale: float | None,
    theta: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and a copy of the cache in q's dtype with ROPE_LLAMA applied, and its page table.

    Args:
        q: ``[B * S_q, H, D]``.
        cells: ``[B, max_pages]``, or flat with `indptr`.
    """
    positions, _ = key_positions(cells, indptr, lens, k_pages.shape[1])
    angles = llama_angles(positions, k_pages.shape[-1], scale, theta)
    k = rotate(gathered(k_pages, cells).to(q.dtype), *angles, interleaved=False)
    v = gathered(v_pages, cells).to(q.dtype)
    angles = llama_angles(query_positions(lens, seqlen_q), q.shape[-1], scale, theta)
    return rotate(q, *angles, interleaved=False), k, v, own_cells(cells)


def with_alibi(
    function: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    indptr: Tensor | None,
    lens: Tensor,
    seqlen_q: int,
    softmax_scale: float,
    slopes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float32 q and a float32 copy of the cache whose products hold ALiBi's bias in two more dimensions, and its table.

    The bias of key j to the query at p is ``slope * (j - p)``; positions count from the request's end, where they are
    exact. Where v is wider than its cache, the last dimensions of the output are zeros.

    Args:
        slopes: float32 ``[H]`` or ``[B, H]``.
    """
    if softmax_scale == 0:
        raise refuse(function, "ALiBi with a softmax scale of 0", "give another scale")
    positions, lengths = key_positions(cells, indptr, lens, k_pages.shape[1])
    k, v = gathered(k_pages, cells).float(), gathered(v_pages, cells).float()
    ahead = torch.arange(seqlen_q - 1, -1, -1, dtype=torch.float32, device=q.device).repeat(lens.shape[0])
    slope = slopes.float().to(q.device) / softmax_scale
    slope = slope.repeat_interleave(seqlen_q, 0) if slope.dim() == 2 else slope.expand(q.shape[:2])
    if not is_wide(k.shape[-1] + _BIAS_DIMS, v.shape[-1] + _BIAS_DIMS):
        v = torch.nn.functional.pad(v, (0, _BIAS_DIMS))
    return biased_queries(q, slope, ahead), biased_keys(k, positions - lengths + 1), v, own_cells(cells)


def biased_queries(q: Tensor, slope: Tensor, ahead: Tensor) -> Tensor:
    """float32 queries with ALiBi's dimensions.

    Args:
        q: ``[T, H, D]``.
        slope: ``[T, H]``, over the softmax scale.
        ahead: ``[T]``: tokens behind each in its request.
    """
    more = q.new_zeros(*q.shape[:-1], _BIAS_DIMS, dtype=torch.float32)
    more[..., 0] = slope
    more[..., 1] = slope * ahead.unsqueeze(1)
    return torch.cat([q.float(), more], -1)


def biased_keys(k: Tensor, from_end: Tensor) -> Tensor:
    """float32 keys ``[..., H, D]`` with ALiBi's dimensions; `from_end` ``[...]``: 0 for the last, else negative."""
    bias = k.new_zeros(*k.shape[:-1], _BIAS_DIMS, dtype=torch.float32)
    bias[..., 0] = from_end.unsqueeze(-1)
    bias[..., 1] = 1
    return torch.cat([k.float(), bias], -1)
