"""Calls of `attnops.ops.xqa_decode` that need an op before: positions on load, other cache dtypes, ragged queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import FP8
from attnops.compat._positions import alibi_slopes, with_alibi, with_rope
from attnops.compat._tree_windows import tokens_of_pages, tokens_seen
from attnops.compat._wide import WidePlan, is_wide, wide_decode
from attnops.metadata.plan import XqaDecodePlan
from attnops.metadata.plan_parts import xqa_invariant_cuts
from attnops.ops._pages import gathered, own_cells


@dataclasses.dataclass
class Positions:
    """What a peer's kernel would add to scores or turn on load."""

    mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    slopes: Tensor | None = None  # of ALIBI; None: the usual ones


def new_plan(
    q: Tensor, k_pages: Tensor, lens: Tensor, seqlen_q: int, window_left: int, cuts: int = 0, head_dim: int = 0
) -> XqaDecodePlan:
    """A plan for these lengths, made now.

    `cuts`: 0 balanced; n: batch-invariant, at most n cuts of a request, or minus a `cut_rule`.
    """
    plan = XqaDecodePlan.allocate(
        lens.shape[0],
        num_q_heads=q.shape[-2],
        num_kv_heads=k_pages.shape[2],
        head_dim=head_dim or q.shape[-1],
        seqlen_q=seqlen_q,
        window_left=window_left,
        fixed_split_tokens=-cuts,
        page_size=k_pages.shape[1],
        device=q.device,
    )
    ops.xqa_decode_plan(plan, lens)
    return plan


def invariant_cuts(q_heads: int, kv_heads: int, head_dim: int, page_size: int, one_split: bool) -> int:
    """`cuts` of a batch-invariant plan: none where a peer asks for one split, else as many as suit the kernels."""
    if one_split:
        return 1
    return -xqa_invariant_cuts(kv_heads, num_q_heads=q_heads, head_dim=head_dim, page_size=page_size)


def is_plain(q: Tensor, k_pages: Tensor, positions: Positions | None) -> bool:
    """Whether the op takes a call as it is."""
    return (k_pages.dtype == q.dtype or k_pages.dtype == FP8) and (positions is None or positions.mode == "NONE")


def decode(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    lens: Tensor,
    *,
    seqlen_q: int,
    softmax_scale: float,
    indptr: Tensor | None = None,
    positions: Positions | None = None,
    plan: XqaDecodePlan | WidePlan | None = None,
    window_left: int = -1,
    cuts: int = 0,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Out and natural lse of ``[B * S_q, H, D_v]``, with a plan of its own unless it is given one.

    Args:
        q: float8_e4m3fn becomes bfloat16, and so is the output then.
        k_pages, v_pages: ``[P, page_size, H_kv, D]``, of any float dtype.
        cells: ``[B, max_pages]``, or flat with `indptr`.
    """
    if q.dtype.itemsize == 1:
        q = q.to(torch.bfloat16)
    if out is not None and out.dtype != q.dtype:
        out = None  # the caller casts
    if window_left >= 0 and options.get("tree_mask") is not None and indptr is None:
        size, mask = k_pages.shape[1], options.pop("tree_mask")
        k_pages, v_pages, pitch = tokens_of_pages(k_pages, v_pages)
        cells, lens = tokens_seen(cells, lens, mask, seqlen_q, window_left, size, pitch)
        seqlen_q, window_left = 1, -1
    if not is_plain(q, k_pages, positions):
        return _changed(
            name,
            q,
            k_pages,
            v_pages,
            cells,
            indptr,
            lens,
            seqlen_q,
            softmax_scale,
            positions,
            window_left,
            cuts,
            options,
        )
    if is_wide(q.shape[-1], v_pages.shape[-1]):
        given: dict[str, Any] = {
            "indptr": indptr,
            "softmax_scale": softmax_scale,
            "window_left": window_left,
            "out": out,
            "cuts": cuts if plan is None else plan.fixed_split_tokens,
        }
        return wide_decode(q, k_pages, v_pages, cells, lens, seqlen_q, **given, **options)
    if not isinstance(plan, XqaDecodePlan):
        plan = new_plan(q, k_pages, lens, seqlen_q, window_left, cuts)
    return ops.xqa_decode(
        q,
        k_pages,
        v_pages,
        cells,
        lens,
        plan,
        kv_indptr=indptr,
        softmax_scale=softmax_scale,
        window_left=window_left,
        out=out,
        **options,
    )


def _changed(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    indptr: Tensor | None,
    lens: Tensor,
    seqlen_q: int,
    softmax_scale: float,
    positions: Positions | None,
    window_left: int,
    cuts: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """A call over a copy of the pages in use."""
    dtype, head_dim_v = q.dtype, v_pages.shape[-1]
    mode = "NONE" if positions is None else positions.mode
    if positions is not None and mode == "ROPE_LLAMA":
        q, k, v, cells = with_rope(
            q, k_pages, v_pages, cells, indptr, lens, seqlen_q, positions.rope_scale, positions.rope_theta
        )
    elif positions is not None and mode == "ALIBI":
        slopes = alibi_slopes(q.shape[1], q.device) if positions.slopes is None else positions.slopes
        k_scale = options.pop("k_scale", None)
        if k_scale is not None:  # the bias is not scaled by it
            q = q.float() * k_scale.repeat_interleave(q.shape[1] // k_scale.numel()).unsqueeze(1)
        q, k, v, cells = with_alibi(name, q, k_pages, v_pages, cells, indptr, lens, seqlen_q, softmax_scale, slopes)
    else:  # e5m2 is exact in both 16-bit dtypes, which are not in one another
        common = q.dtype if k_pages.dtype.itemsize == 1 else torch.float32
        q, k, v = q.to(common), gathered(k_pages, cells).to(common), gathered(v_pages, cells).to(common)
        cells = own_cells(cells)
    given: dict[str, Any] = {
        "seqlen_q": seqlen_q,
        "softmax_scale": softmax_scale,
        "window_left": window_left,
        "cuts": cuts,
    }
    out, lse = decode(name, q.contiguous(), k, v, cells, lens, indptr=indptr, **given, **options)
    return out[..., :head_dim_v].to(dtype), lse


def padded_rows(bounds: Tensor, num_rows: int, seqlen_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged queries as `seqlen_q` of every request, a request's at the end of its share.

    Args:
        bounds: ``[B + 1]``: where each request's queries begin.

    Returns:
        The row of each of ``B * seqlen_q`` places (any row where it is empty), the place of each row, and which rows
        belong to no request.
    """
    begin, end = bounds[:-1].long(), bounds[1:].long()
    back = torch.arange(seqlen_q, 0, -1, device=bounds.device)
    rows = (end.unsqueeze(1) - back).clamp(min=0).minimum((end - 1).clamp(min=0).unsqueeze(1))
    rows = rows.maximum(begin.unsqueeze(1)).clamp(max=max(num_rows - 1, 0))
    index = torch.arange(num_rows, device=bounds.device)
    owner = torch.searchsorted(end.contiguous(), index, right=True)
    padding = owner >= begin.shape[0]
    owner = owner.clamp(max=begin.shape[0] - 1)
    places = owner * seqlen_q + (seqlen_q - end[owner] + index).clamp(0, seqlen_q - 1)
    return rows.flatten(), places, padding


def padded_mask(mask: Tensor, bounds: Tensor, rows: Tensor, seqlen_q: int) -> Tensor:
    """Tree masks of ragged queries, bytes ``[T, n]`` by a request's own tokens, for `padded_rows`: ``[B, S_q, m]``."""
    bits = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    bits = bits.flatten(1)[rows].view(-1, seqlen_q, mask.shape[1] * 8)
    shift = seqlen_q - (bounds[1:] - bounds[:-1]).long().view(-1, 1, 1)
    token = torch.arange(seqlen_q, device=mask.device) - shift
    moved = bits.gather(2, token.clamp(0, bits.shape[2] - 1).expand(-1, seqlen_q, -1))
    moved = moved | (token < 0)  # of a shorter request, these places are tokens before its new ones
    wide = torch.nn.functional.pad(moved, (0, -seqlen_q % 8)).unflatten(2, (-1, 8))
    return (wide << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1).to(torch.uint8)


def ragged_decode(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    lens: Tensor,
    bounds: Tensor,
    max_q_len: int,
    *,
    tree_mask: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`decode` of queries ``[T, H, D]`` of which request b brings those at ``[bounds[b], bounds[b + 1])``."""
    del out  # the caller copies
    rows, places, padding = padded_rows(bounds, q.shape[0], max_q_len)
    if q.shape[0] == 0:
        return q.clone(), q.new_zeros(q.shape[:2], dtype=torch.float32) if return_lse else None
    mask = None if tree_mask is None else padded_mask(tree_mask, bounds, rows, max_q_len)
    wide = q.view(torch.uint8)[rows].view(q.dtype) if q.dtype.itemsize == 1 else q[rows]
    result, lse = decode(
        name,
        wide,
        k_pages,
        v_pages,
        cells,
        lens,
        seqlen_q=max_q_len,
        tree_mask=mask,
        return_lse=return_lse,
        **options,
    )
    result = result[places].masked_fill(padding.view(-1, 1, 1), 0)
    return result, None if lse is None else lse[places].masked_fill(padding.unsqueeze(1), -torch.inf)
