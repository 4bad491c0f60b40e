"""Decode whose head dims the decode ops do not take: it goes to `ops.fmha_paged`, whose rows take any to 576."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import joined_latents
from attnops.compat._extend import extend
from attnops.metadata.plan import MAX_HEAD_DIM


@dataclasses.dataclass(frozen=True)
class WidePlan:
    """What a wrapper keeps in place of an `XqaDecodePlan`: such a call makes its own plan."""

    key: dict[str, int]
    fixed_split_tokens: int = 0  # other than 0: keys are not split

    @property
    def batch_size(self) -> int:
        return self.key["batch_size"]

    @property
    def seqlen_q(self) -> int:
        return self.key["seqlen_q"]

    @property
    def head_dim(self) -> int:
        return self.key["head_dim"]

    @property
    def window_left(self) -> int:
        return self.key["window_left"]


def is_wide(head_dim: int, head_dim_v: int) -> bool:
    """Whether `xqa_decode` does not take these head dims."""
    return head_dim != head_dim_v or head_dim > MAX_HEAD_DIM


def wide_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    lens: Tensor,
    seqlen_q: int,
    tree_mask: Tensor | None = None,
    cuts: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `_attend.decode`: out and natural lse of ``[B * S_q, H, D_v]``."""
    bounds = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=q.device) * seqlen_q
    if tree_mask is not None:
        options["tree_mask"] = tree_mask.flatten(0, 1)
    return extend(q, k_pages, v_pages, cells, lens, bounds, split_keys=cuts == 0, **options)


def wide_latents(
    name: str,
    q: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    cells: Tensor,
    indptr: Tensor,
    lens: Tensor,
    bounds: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """MLA of any two dims: out ``[T, H, C]`` and natural lse.

    Args:
        q: ``[T, H, C]`` and ``[T, H, R]``.
        caches: ``[P, page_size, C]`` and ``[P, page_size, R]``; R may be 0.
        bounds: int32 ``[B + 1]``: where each request's queries begin.
    """
    pages = caches[0]
    if caches[1].shape[-1] > 0:
        pages, cells = joined_latents(name, *caches, cells)
    keys = pages.unsqueeze(2)
    values = keys[..., : caches[0].shape[-1]]
    return extend(torch.cat(q, -1), keys, values, cells, lens, bounds, indptr=indptr, **options)
