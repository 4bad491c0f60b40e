"""FlashInfer's custom masks: bits of every query over every key of its request, as the ops' masks of new tokens.

An op's tree mask covers a request's last keys, as many as it has queries. A mask over all keys becomes one when the
request has a query for each key. So rows that see nothing are added in front, and dropped afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskedRows:
    """Queries of a batch, each request's filled up to one per key.

    Attributes:
        bounds: int32 ``[B + 1]``, of the rows.
        num_rows: Of all of them.
        row_of_query: int64 ``[T]``: where each query stands.
        tree_mask: uint8 ``[num_rows, bytes]``, as the ops take it.
    """

    bounds: Tensor
    num_rows: int
    row_of_query: Tensor
    tree_mask: Tensor

    def within(self, window_left: int) -> Tensor:
        """`tree_mask` without keys that stand further behind their query than that. The ops' windows count steps of a
        tree; FlashInfer's count positions, whatever its mask says."""
        if window_left < 0:
            return self.tree_mask
        row = torch.arange(self.num_rows, device=self.tree_mask.device)
        row = row - self.bounds.long()[torch.searchsorted(self.bounds, row, right=True, out_int32=True).long() - 1]
        visible = _unpack(self.tree_mask).view(self.num_rows, -1)
        key = torch.arange(visible.shape[1], device=row.device)
        return pack_bits(visible & (row.unsqueeze(1) - key <= window_left))

    def spread(self, q: Tensor) -> Tensor:
        """The rows of queries ``[T, ...]``; queries behind the last request are left out."""
        rows = q.new_zeros(self.num_rows, *q.shape[1:])
        rows[self.row_of_query] = q[: self.row_of_query.shape[0]]
        return rows

    def gather(self, results: Tensor, num_queries: int, nothing: float) -> Tensor:
        """The queries' results, `nothing` for those behind the last request."""
        found = results.new_full((num_queries, *results.shape[1:]), nothing)
        found[: self.row_of_query.shape[0]] = results[self.row_of_query]
        return found


def masked_rows(
    function: str,
    mask: Tensor | None,
    packed: Tensor | None,
    q_lens: list[int],
    k_lens: list[int],
    device: torch.device,
) -> MaskedRows | None:
    """None without a mask.

    Args:
        mask: bool, ``sum(q_len * k_len)`` in any shape: each request's ``[q_len, k_len]``, one after the other.
        packed: uint8: the same in little-endian bits, each request from a byte on. It wins over `mask`.

    Raises:
        ValueError: the mask has another size.
    """
    if mask is None and packed is None:
        return None
    pairs = [q * k for q, k in zip(q_lens, k_lens)]
    if packed is not None:
        parts = [-(-n // 8) for n in pairs]
        _check_size(function, "packed_custom_mask", packed, sum(parts), torch.uint8)
        bits = [_unpack(part)[:n] for part, n in zip(packed.reshape(-1).to(device).split(parts), pairs)]
    else:
        assert mask is not None
        _check_size(function, "custom_mask", mask, sum(pairs), torch.bool)
        bits = list(mask.reshape(-1).to(device).split(pairs))
    rows = [max(q, k) for q, k in zip(q_lens, k_lens)]
    width = -(-max([1, *rows]) // 8) * 8
    visible = torch.zeros(sum(rows), width, dtype=torch.bool, device=device)
    begin, index = 0, []
    for part, q, k, count in zip(bits, q_lens, k_lens, rows):
        mine = visible[begin + count - q : begin + count]
        mine[:, count - k : count] = part.view(q, k)
        index.append(torch.arange(begin + count - q, begin + count))
        begin += count
    bounds = torch.tensor([0, *rows]).cumsum(0).to(device, torch.int32)
    row_of_query = torch.cat([torch.empty(0, dtype=torch.int64), *index]).to(device)
    return MaskedRows(bounds, sum(rows), row_of_query, pack_bits(visible))


def items_mask(
    function: str,
    prefix_lens: Tensor | None,
    places: Tensor | None,
    stride: int,
    q_lens: list[int],
    k_lens: list[int],
    device: torch.device,
) -> Tensor:
    """The `custom_mask` of multi-item scoring: every item sees the prefix and itself, a delimiter the prefix alone.

    Args:
        prefix_lens: uint32 ``[B]``.
        places: uint16: of each token behind the prefix its place in its item, 0 for the delimiter ahead of it. Request
            b begins at ``b * stride``.

    Raises:
        ValueError: one is missing, or `places` ends before a request does.
    """
    if prefix_lens is None or places is None:
        raise ValueError(f"attnops.compat: {function}: prefix_len_ptr and token_pos_in_items_ptr come together")
    prefixes, places = prefix_lens.reshape(-1).tolist(), places.reshape(-1).to(device, torch.int64)
    parts = []
    for request, (q_len, k_len, prefix) in enumerate(zip(q_lens, k_lens, prefixes, strict=True)):
        mine = places[request * stride :][: max(k_len - prefix, 0)]
        if mine.shape[0] < k_len - prefix:
            raise ValueError(
                f"attnops.compat: {function}: token_pos_in_items_ptr must hold {k_len - prefix} places of request "
                f"{request}, got {mine.shape[0]}"
            )
        key = torch.arange(k_len, device=device)
        query = key[k_len - q_len :].unsqueeze(1)
        place = torch.cat([key[:prefix] + 1, mine])[k_len - q_len :].unsqueeze(1)
        parts.append(((key <= query) & ((key < prefix) | (query < key + place))).flatten())
    return torch.cat([torch.empty(0, dtype=torch.bool, device=device), *parts])


def _check_size(function: str, name: str, mask: Tensor, size: int, dtype: torch.dtype) -> None:
    if mask.dtype != dtype or mask.numel() != size:
        raise ValueError(
            f"attnops.compat: {function}: {name} must be {dtype} of {size} elements (queries times keys of every "
            f"request), got {mask.dtype} {list(mask.shape)}"
        )


def _unpack(packed: Tensor) -> Tensor:
    bit = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> bit) & 1).bool().flatten()


def pack_bits(visible: Tensor) -> Tensor:
    """uint8 ``[R, n / 8]`` of bool ``[R, n]``, n a multiple of 8, as the ops take masks: little-endian."""
    weights = (1 << torch.arange(8, device=visible.device)).to(torch.uint8)
    return (visible.unflatten(1, (-1, 8)).to(torch.uint8) * weights).sum(-1).to(torch.uint8)
