"""Plans of calls with a `block_list`: the page tables that lists become, and plans of the kernels that walk them."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from attnops.metadata.fmha_plan import FmhaPlan, default_tile_q, tokens_as_a_rule
from attnops.metadata.plan import XqaDecodePlan
from attnops.metadata.plan_checks import check_shared
from attnops.types import check_range

MAX_BLOCK_SIZE = 1 << 20  # csrc/block_lists/checks.h
MAX_LISTED = 1 << 30  # tokens of a list


def unit_size(block_size: int, page_size: int) -> int:
    """Tokens of a cell: what blocks and pages are both made of."""
    return math.gcd(block_size, page_size)


def _check_lists(
    kind: str, num_q_heads: int, num_kv_heads: int, num_blocks: int, block_size: int, page_size: int
) -> None:
    owner = f"{kind}.allocate"
    check_range(owner, "num_q_heads", num_q_heads, 1)
    check_range(owner, "num_kv_heads", num_kv_heads, 1)
    check_range(owner, "num_blocks", num_blocks, 0)
    check_range(owner, "block_size", block_size, 1, MAX_BLOCK_SIZE)
    check_range(owner, "page_size", page_size, 1)
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"{owner}: num_q_heads must be a positive multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}"
        )
    if num_blocks * block_size > MAX_LISTED:
        raise ValueError(
            f"{owner}: num_blocks * block_size must be at most {MAX_LISTED}, got {num_blocks} * {block_size}"
        )


@dataclasses.dataclass(frozen=True)
class BlockDecodePlan:
    """Plan of `ops.xqa_decode` with a `block_list`. A call fills all of it from lists and lengths, on the device."""

    batch_size: int
    seqlen_q: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    page_size: int
    block_tables: Tensor  # int32 [B * S_q, H_kv, num_blocks * block_size / unit]
    block_seqlens: Tensor  # int32 [B * S_q, H_kv]
    decode: XqaDecodePlan  # of B * S_q * H_kv requests of one token and one KV head
    sink_lse: Tensor  # float32 [2, B * S_q, H_q], scratch of calls with sinks; empty with one KV head, as is the next
    no_values: Tensor  # uint8 [4 * head_dim], zeros: the value of a sink
    window_left: int = -1

    @property
    def key(self) -> dict[str, int]:
        """What a call must agree with."""
        names = ("batch_size", "seqlen_q", "num_q_heads", "num_kv_heads", "head_dim", "num_blocks", "page_size")
        return {name: getattr(self, name) for name in (*names, "window_left")}

    @property
    def unit(self) -> int:
        """Tokens of a cell: a window may begin with any token."""
        return unit_size(self.block_size, self.page_size) if self.window_left < 0 else 1

    @staticmethod
    def scratch_of_sinks(
        rows: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """`sink_lse` and `no_values`. The one KV head of a call has its sinks in the kernels."""
        several = num_kv_heads > 1
        lse = torch.empty(2, rows, num_q_heads if several else 0, dtype=torch.float32, device=device)
        return lse, torch.zeros(4 * head_dim if several else 0, dtype=torch.uint8, device=device)

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        page_size: int,
        seqlen_q: int = 1,
        window_left: int = -1,
        fixed_split_tokens: int = 0,
        num_sm_parts: int | None = None,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> BlockDecodePlan:
        """Allocate a plan and its scratch.

        Args:
            batch_size, seqlen_q: Requests, and query tokens of each. A token attends by itself.
            num_q_heads, num_kv_heads, head_dim: Of the attention; `num_q_heads` is a multiple of `num_kv_heads`.
            num_blocks: Columns of `block_list`.
            block_size: Tokens of a block.
            page_size: Of the pages.
            window_left: As of `ops.xqa_decode`; tables then have a cell for each token.
            fixed_split_tokens, num_sm_parts, kv_dtype: As of `XqaDecodePlan`; a request is here a token and KV head.

        Raises:
            TypeError, ValueError: naming the argument that is out of its range.
        """
        kind = cls.__name__
        check_shared(kind, batch_size, seqlen_q, window_left, num_sm_parts, None)
        _check_lists(kind, num_q_heads, num_kv_heads, num_blocks, block_size, page_size)
        device, rows = torch.device(device), batch_size * seqlen_q
        unit = unit_size(block_size, page_size) if window_left < 0 else 1
        cells = max(num_blocks, 1) * (block_size // unit)
        decode = XqaDecodePlan.allocate(
            rows * num_kv_heads,
            num_q_heads=num_q_heads // num_kv_heads,
            num_kv_heads=1,
            head_dim=head_dim,
            fixed_split_tokens=fixed_split_tokens,
            max_seqlen_k=num_blocks * block_size,
            num_sm_parts=num_sm_parts,
            kv_dtype=kv_dtype,
            device=device,
        )
        sink_lse, no_values = cls.scratch_of_sinks(rows, num_q_heads, num_kv_heads, head_dim, device)
        return cls(
            batch_size=batch_size,
            seqlen_q=seqlen_q,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            page_size=page_size,
            block_tables=torch.zeros(rows, num_kv_heads, cells, dtype=torch.int32, device=device),
            block_seqlens=torch.zeros(rows, num_kv_heads, dtype=torch.int32, device=device),
            decode=decode,
            sink_lse=sink_lse,
            no_values=no_values,
            window_left=window_left,
        )


@dataclasses.dataclass(frozen=True)
class BlockPrefillPlan:
    """Plan of `ops.fmha_paged` with a `block_list`. A call fills all of it from lists and lengths, on the device.

    Every request and KV head is a request of its own. One more for each head has the rows of q that nobody owns, and no
    keys.
    """

    max_num_tokens: int
    max_batch_size: int
    num_q_heads: int
    num_kv_heads: int
    num_blocks: int
    block_size: int
    page_size: int
    block_tables: Tensor  # int32 [H_kv * (max_batch_size + 1), cells]
    block_seqlens: Tensor  # int32 [H_kv * (max_batch_size + 1)]
    bounds: Tensor  # int32 [1 + H_kv * (max_batch_size + 1)]: where their rows begin, the first at 0
    heads: Tensor  # int32 [H_kv, 1]: 0, 1, ...
    q_by_head: Tensor  # uint8, scratch: q as [H_kv, T, group, D]; empty with one KV head, as are the other two
    out_by_head: Tensor  # uint8, scratch: out
    lse_by_head: Tensor  # float32, scratch: lse as [H_kv, T, group]
    fmha: FmhaPlan  # of all those requests, of one KV head each

    @property
    def key(self) -> dict[str, int]:
        """What a call must agree with."""
        names = ("num_q_heads", "num_kv_heads", "num_blocks", "page_size")
        return {name: getattr(self, name) for name in names} | {"causal": self.fmha.causal}

    def requests(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """`block_tables` as ``[H_kv, B + 1, cells]``, `block_seqlens` as ``[H_kv, B + 1]``, `bounds` of these rows.

        Row 0 of each head is the one that nobody owns.
        """
        count, shape = self.num_kv_heads * (batch_size + 1), (self.num_kv_heads, batch_size + 1)
        tables, lengths = self.block_tables[:count], self.block_seqlens[:count]
        return tables.view(*shape, -1), lengths.view(shape), self.bounds[: count + 1]

    def fmha_of(self, num_tokens: int, batch_size: int) -> FmhaPlan:
        """`fmha` without the rows that a call of so many tokens and requests cannot need."""
        tiles = -(-num_tokens // self.fmha.tile_q) + batch_size
        return dataclasses.replace(self.fmha, tile_order=self.fmha.tile_order[:tiles])

    def has_room(self, q: Tensor, out: Tensor) -> bool:
        """Whether the scratch holds them."""
        return q.nbytes <= self.q_by_head.nbytes and out.nbytes <= self.out_by_head.nbytes

    def by_head(self, rows: Tensor, scratch: Tensor) -> Tensor:
        """`scratch`, which has room, as ``[H_kv, T, group, ...]`` for rows ``[T, H_q, ...]``."""
        shape = (self.num_kv_heads, rows.shape[0], self.num_q_heads // self.num_kv_heads, *rows.shape[2:])
        return scratch.view(torch.uint8)[: rows.nbytes].view(rows.dtype).view(shape)

    @classmethod
    def allocate(
        cls,
        max_num_tokens: int,
        max_batch_size: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        page_size: int,
        max_seqlen_q: int | None = None,
        causal: bool = True,
        split_keys: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> BlockPrefillPlan:
        """Allocate a plan and its scratch.

        With several KV heads, the scratch holds q, out and lse of the largest batch a second time. That is
        ``max_num_tokens * num_q_heads * (2 * head_dim * size of dtype + 4)`` bytes. Tables take ``4 * num_kv_heads *
        (max_batch_size + 1) * cells``, where a list's and new blocks need `cells`.

        Args:
            max_num_tokens, max_batch_size: Rows of q, and requests, of the largest batch.
            num_q_heads, num_kv_heads, head_dim: Of the attention, the larger head dim.
            num_blocks: Columns of `block_list`.
            block_size: Tokens of a block.
            page_size: Of the pages.
            max_seqlen_q: New tokens of a request, at most; `max_num_tokens` when None. Their blocks need cells, too.
            causal, split_keys: As of `FmhaPlan`.
            dtype: Of q. A call whose q or out is larger than the scratch has a launch for each KV head.

        Raises:
            TypeError, ValueError: naming the argument that is out of its range.
        """
        kind = cls.__name__
        owner = f"{kind}.allocate"
        check_range(owner, "max_num_tokens", max_num_tokens, 0)
        check_range(owner, "max_batch_size", max_batch_size, 0)
        check_range(owner, "head_dim", head_dim, 1)
        _check_lists(kind, num_q_heads, num_kv_heads, num_blocks, block_size, page_size)
        check_range(owner, "num_kv_heads * max_num_tokens", num_kv_heads * max_num_tokens, 0)
        most_new = max_num_tokens if max_seqlen_q is None else max_seqlen_q
        check_range(owner, "max_seqlen_q", most_new, 0)
        device, group = torch.device(device), num_q_heads // num_kv_heads
        new_blocks = -(-max(most_new - 1, 0) // block_size) + 1 if causal else 0
        cells = max(num_blocks + new_blocks, 1) * (block_size // unit_size(block_size, page_size))
        requests, tokens = num_kv_heads * (max_batch_size + 1), num_kv_heads * max_num_tokens
        as_a_rule = tokens_as_a_rule(tokens, num_kv_heads * max_batch_size)
        fmha = FmhaPlan.allocate(
            tokens,
            requests,
            causal=causal,
            num_q_heads=group,
            num_kv_heads=1,
            head_dim=head_dim,
            tile_q=default_tile_q(device, group, 1, head_dim, as_a_rule),
            split_keys=split_keys,
            device=device,
        )
        rows = max_num_tokens * num_q_heads if num_kv_heads > 1 else 0
        size_of_out = max(dtype.itemsize, 2)  # FP8 queries have results of 16 bits
        return cls(
            max_num_tokens=max_num_tokens,
            max_batch_size=max_batch_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            num_blocks=num_blocks,
            block_size=block_size,
            page_size=page_size,
            block_tables=torch.zeros(requests, cells, dtype=torch.int32, device=device),
            block_seqlens=torch.zeros(requests, dtype=torch.int32, device=device),
            bounds=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            heads=torch.arange(num_kv_heads, dtype=torch.int32, device=device).unsqueeze(1),
            q_by_head=torch.empty(rows * head_dim * dtype.itemsize, dtype=torch.uint8, device=device),
            out_by_head=torch.empty(rows * head_dim * size_of_out, dtype=torch.uint8, device=device),
            lse_by_head=torch.empty(rows, dtype=torch.float32, device=device),
            fmha=fmha,
        )
