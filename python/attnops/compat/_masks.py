"""FlashInfer's custom masks: bits of every query over every key of its request, as the ops' masks of new tokens.

An op's tree mask covers a request's last keys, as many as it has queries. A mask over all keys becomes one when the
request has a query for each key. So rows that see nothing are added in front, and dropped afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnops.compat._convert import refuse


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


class TreeBits:
    """Masks of a graph: bits of every query over its request's own new tokens, in memory that stays where it is.

    What such bits cannot say, a key hidden ahead of the new tokens, is refused.
    """

    _bits: Tensor | None = None  # uint8 [rows, bytes]; rows and bytes are those of the first plan

    def __init__(self) -> None:
        self._longer: dict[int, Tensor] = {}

    def set(
        self,
        function: str,
        mask: Tensor | None,
        packed: Tensor | None,
        q_lens: list[int],
        k_lens: list[int],
        device: torch.device,
    ) -> None:
        """Takes masks as `masked_rows` does, but they may be longer: what is behind the last request is not read.

        Raises:
            NotImplementedError: a key ahead of the new tokens is hidden from one of them.
            ValueError: the masks are too short, or there are more queries than at the first call.
        """
        pairs = [q * k for q, k in zip(q_lens, k_lens)]
        flat = _flat_bits(function, mask, packed, pairs, device)
        q, k = torch.tensor([q_lens, k_lens], dtype=torch.int64).view(2, -1)
        owner = torch.repeat_interleave(torch.arange(q.shape[0]), q)
        row = torch.arange(owner.shape[0]) - (q.cumsum(0) - q)[owner]
        first = torch.tensor([0, *pairs]).cumsum(0)[owner] + row * k[owner] + (k - q)[owner]
        if self._bits is None:
            width = max(-(-max(q_lens, default=1) // 8), 1)
            self._bits = torch.zeros(owner.shape[0], width, dtype=torch.uint8, device=device)
        most, width = self._bits.shape
        if owner.shape[0] > most or max(q_lens, default=0) > 8 * width:
            raise ValueError(
                f"attnops.compat: {function}: {owner.shape[0]} queries of at most {max(q_lens)} a request; "
                f"use_cuda_graph fixes {most} and {8 * width} at the first plan with a mask"
            )
        column = torch.arange(8 * width)
        own = (column < q[owner].unsqueeze(1)) & (column >= (q - k)[owner].unsqueeze(1))
        index = torch.where(own, first.unsqueeze(1) + column, 0).to(device)
        visible = flat[index] & own.to(device) if flat.numel() else own.to(device)
        hidden = (flat.numel() - flat.sum()) - (own.sum().to(device) - visible.sum())
        if hidden.item():
            raise refuse(
                function,
                "with use_cuda_graph a custom mask that hides keys ahead of the new tokens",
                "plan without a graph",
            )
        self._bits[: owner.shape[0]] = pack_bits(visible)
        self._bits[owner.shape[0] :] = 0
        for kept in self._longer.values():
            kept[:most] = self._bits

    def of(self, num_queries: int) -> Tensor:
        """uint8 ``[num_queries, bytes]``; queries behind the last request see nothing."""
        assert self._bits is not None
        if num_queries <= self._bits.shape[0]:
            return self._bits[:num_queries]
        if num_queries not in self._longer:
            more = (0, 0, 0, num_queries - self._bits.shape[0])
            self._longer[num_queries] = torch.nn.functional.pad(self._bits, more)
        return self._longer[num_queries]


def _flat_bits(
    function: str, mask: Tensor | None, packed: Tensor | None, pairs: list[int], device: torch.device
) -> Tensor:
    """All requests' masks as one flat bool tensor. They may be longer."""
    if packed is not None:
        parts = [-(-n // 8) for n in pairs]
        flat = packed.reshape(-1)[: sum(parts)].to(device)
        _check_size(function, "packed_custom_mask", flat, sum(parts), torch.uint8)
        bits = [_unpack(part)[:n] for part, n in zip(flat.split(parts), pairs)]
        return torch.cat([torch.empty(0, dtype=torch.bool, device=device), *bits])
    assert mask is not None
    flat = mask.reshape(-1)[: sum(pairs)].to(device)
    _check_size(function, "custom_mask", flat, sum(pairs), torch.bool)
    return flat


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
