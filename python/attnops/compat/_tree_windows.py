"""Windows beside masks of new tokens, counted as FlashInfer and XQA count them: by position.

The ops' windows count steps of a tree beside a mask, so a row's edge is not where its place says. Here every row
becomes a request of one token, over a table of the tokens that it sees.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tokens_of_pages(k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor, int]:
    """``[N, 1, H, D]`` of pools ``[P, page_size, H, D]``, and how many of these tokens lie from a page to the next.

    Views where that is one whole number, as in every layout that FlashInfer has; else copies.
    """
    pitch = _pitch(k_pages)
    if pitch and pitch == _pitch(v_pages):
        return _tokens(k_pages, pitch), _tokens(v_pages, pitch), pitch
    return k_pages.flatten(0, 1).unsqueeze(1), v_pages.flatten(0, 1).unsqueeze(1), k_pages.shape[1]


def _pitch(pages: Tensor) -> int:
    """Tokens from a page to the next; 0: no whole number."""
    step, token = pages.stride(0), pages.stride(1)
    return step // token if token and step % token == 0 and step // token >= pages.shape[1] > 0 else 0


def _tokens(pages: Tensor, pitch: int) -> Tensor:
    count, size, heads, dim = pages.shape
    tokens = max(count - 1, 0) * pitch + size if count else 0
    return pages.as_strided((tokens, 1, heads, dim), (pages.stride(1), *pages.stride()[1:]))


def tokens_seen(
    table: Tensor, lens: Tensor, mask: Tensor, seqlen_q: int, window_left: int, page_size: int, pitch: int
) -> tuple[Tensor, Tensor]:
    """Tables of one-token pages ``[B * S_q, n]`` int32 of what each row sees, and how many tokens these are.

    Row i of a request stands at ``lens - S_q + i`` and sees tokens from `window_left` before that on. These are all
    before the new ones, and new token j where bit j of the row's mask is set.

    Args:
        table: int32 ``[B, max_pages]``.
        mask: uint8 ``[B, S_q, bytes]``, or ``[B * S_q, bytes]``.
        pitch: Tokens from a page to the next, as of `tokens_of_pages`.
    """
    batch, device = table.shape[0], table.device
    before = lens.long().view(-1, 1, 1) - seqlen_q  # where the new tokens begin
    new = torch.arange(seqlen_q, device=device)
    edge = before + new.view(1, -1, 1) - window_left
    columns = min(window_left, table.shape[1] * page_size)
    older = edge.clamp(min=0) + torch.arange(columns, device=device)
    bits = (mask.view(batch, seqlen_q, -1, 1) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    newer = (before + new).expand(batch, seqlen_q, seqlen_q)
    seen = bits.flatten(2)[..., :seqlen_q].bool() & (newer >= edge) & (newer >= 0)
    seen = torch.cat([older < before, seen], -1)
    order = seen.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices
    position = torch.cat([older.expand(batch, seqlen_q, columns), newer], -1).gather(-1, order)
    page = (position // page_size).clamp(0, max(table.shape[1] - 1, 0))
    slots = table.long().gather(1, page.flatten(1)).view_as(page) * pitch + position.remainder(page_size)
    return slots.clamp(-1, 2**31 - 1).int().flatten(0, 1), seen.sum(-1).int().flatten()
