"""The pool of DeepSeek-V4: rows of a sliding window, compressed entries, their index keys, and compressors' states.

A token slot is ``page * page_size + offset``. A page of tokens has one of `page_size` / ratio entries, by the same
number, in each layer of a ratio. So one page table finds tokens and entries, and who holds a page of tokens holds its
entries. Rows of the window have pages of their own, which `slot_map` finds, as in `SWAKVPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from attnops.ops.index_keys import quantize_index_q
from attnops.ops.paged_kv import store_kv
from attnops.pools.allocator import PagedTokenToKVPoolAllocator
from attnops.pools.huge_pages import with_huge_pages
from attnops.pools.kv_cache import KVCache
from attnops.types import COMPRESS_RATIOS, AttentionLayer

E4M3 = torch.float8_e4m3fn
ROW_BYTES, DATA_BYTES, SCALE_BYTES = 584, 576, 8  # of a row: 448 e4m3 and 64 bf16; 7 ue8m0 scales and a pad
NOPE, ROPE, GROUP = 448, 64, 64
PAGE_STRIDE = 576  # pages begin at multiples of it, in bytes
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DeepSeekV4TokenToKVPool(KVCache):
    """Of each layer the rows of 584 bytes of a window, and what its ratio needs besides (SGLang's name).

    Args:
        size: Token slots, rounded down to whole pages.
        size_swa: Token slots of window rows; a server of few requests needs some pages for each.
        page_size: Tokens of a page, a multiple of each ratio. V4's own is 256.
        compress_ratios: Of each layer 0, 4 or 128.
        max_num_reqs: Rows of the `ReqToTokenPool`: each has states of its own.
        device, start_layer: As of `KVCache`.
        index_head_dim: Values of an index key, 128 or 64.
        max_draft_tokens: Tokens of a verify step that may be rejected.
        num_snapshots: States of ratio 4 that a prefix cache may keep (`snapshots`).
        state_dtype: Of `kv_score` and the states.

    Attributes:
        slot_map: int32 ``[size]``: slot of a token to slot of its window row; -1: it has none.
            `SWATokenToKVPoolAllocator` writes it.
        snapshots: Who holds which snapshot: slots of 0 to `num_snapshots`, as of pages of one token.

    Raises:
        ValueError: naming what does not fit.
    """

    slot_map: Tensor

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        compress_ratios: Sequence[int],
        max_num_reqs: int,
        device: torch.device | str = "cpu",
        start_layer: int = 0,
        *,
        index_head_dim: int = 128,
        max_draft_tokens: int = 0,
        num_snapshots: int = 0,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(size, page_size, torch.uint8, len(compress_ratios), device, start_layer)
        self.compress_ratios = tuple(compress_ratios)
        for ratio in self.compress_ratios:
            if ratio not in COMPRESS_RATIOS:
                raise ValueError(f"attnops: compress_ratios of a pool must be 0, 4 or 128, got {ratio}")
            if ratio and page_size % ratio:
                raise ValueError(f"attnops: page_size of a pool must be a multiple of ratio {ratio}, got {page_size}")
        if index_head_dim not in (64, 128):
            raise ValueError(f"attnops: index_head_dim of a pool must be 64 or 128, got {index_head_dim}")
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"attnops: state_dtype of a pool must be float32, bfloat16 or float16, got {state_dtype}")
        for name, value, least in (
            ("max_num_reqs", max_num_reqs, 1),
            ("max_draft_tokens", max_draft_tokens, 0),
            ("num_snapshots", num_snapshots, 0),
        ):
            if value < least:
                raise ValueError(f"attnops: {name} of a pool must be {least} or more, got {value}")
        self.max_num_reqs, self.max_draft_tokens, self.num_snapshots = max_num_reqs, max_draft_tokens, num_snapshots
        self.index_head_dim, self.state_dtype = index_head_dim, state_dtype
        self.swa_kv_pool = KVCache(size_swa, page_size, torch.uint8, self.layer_num, device, start_layer)
        self.slot_map = torch.full((self.size,), -1, dtype=torch.int32, device=self.device)
        self.snapshots = PagedTokenToKVPoolAllocator(num_snapshots, 1) if num_snapshots else None
        self._swa = [self._rows(self.swa_kv_pool.num_pages, page_size) for _ in self.compress_ratios]
        self._entries = [self._rows(self.num_pages, page_size // r) if r else None for r in self.compress_ratios]
        self._index = [self._index_pages(page_size // 4) if r == 4 else None for r in self.compress_ratios]
        self._states = [self._state(r, ROW_VALUES) for r in self.compress_ratios]
        self._index_states = [self._state(r, index_head_dim) if r == 4 else None for r in self.compress_ratios]

    def _rows(self, num_pages: int, page_size: int) -> Tensor:
        stride = -(-page_size * ROW_BYTES // PAGE_STRIDE) * PAGE_STRIDE
        pages = with_huge_pages(torch.empty(num_pages, stride, dtype=torch.uint8, device=self.device))
        return pages[:, : page_size * ROW_BYTES].view(num_pages, page_size, ROW_BYTES)

    def _index_pages(self, page_size: int) -> Tensor:
        shape = (self.num_pages, page_size, self.index_head_dim + 4)
        return with_huge_pages(torch.empty(shape, dtype=torch.uint8, device=self.device))

    def _state(self, ratio: int, dim: int) -> Tensor | None:
        """``[slots, tokens, 2 * width]``: of ratio 4 an entry pools two groups, by channels of their own."""
        if not ratio:
            return None
        groups, slots = (2, self.max_num_reqs + self.num_snapshots) if ratio == 4 else (1, self.max_num_reqs)
        shape = (slots, groups * ratio + self.max_draft_tokens, 2 * groups * dim)
        return torch.zeros(shape, dtype=self.state_dtype, device=self.device)

    def ratio_of(self, layer_id: int) -> int:
        """Of a layer 0, 4 or 128."""
        return self.compress_ratios[self._place_of(layer_id)]

    def get_swa_buffer(self, layer_id: int) -> Tensor:
        """uint8 ``[window pages, page_size, 584]``, rows of `ops.sparse_mla_decode`. A page's stride is padded."""
        return self._swa[self._place_of(layer_id)]

    def get_compressed_buffer(self, layer_id: int) -> Tensor:
        """uint8 ``[num_pages, page_size // ratio, 584]``: entries of a layer whose ratio is not 0."""
        return self._of(self._entries, layer_id, "entries, which layers of ratio 4 and 128 have")

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        """uint8 ``[num_pages, page_size // 4, index_head_dim + 4]``, of a layer of ratio 4."""
        return self._of(self._index, layer_id, "index keys, which layers of ratio 4 have")

    def get_state(self, layer_id: int) -> Tensor:
        """``[slots, state_tokens, 2 * width]``, as `ops.compress_kv` takes it; a request's slot is its row."""
        return self._of(self._states, layer_id, "states, which layers of ratio 4 and 128 have")

    def get_index_state(self, layer_id: int) -> Tensor:
        """As `get_state`, of the compressor of index keys."""
        return self._of(self._index_states, layer_id, "states of index keys, which layers of ratio 4 have")

    def _of(self, tensors: Sequence[Tensor | None], layer_id: int, what: str) -> Tensor:
        tensor = tensors[self._place_of(layer_id)]
        if tensor is None:
            raise ValueError(f"attnops: layer {layer_id} has ratio {self.ratio_of(layer_id)} and no {what}")
        return tensor

    def set_swa_buffer(self, layer: AttentionLayer, loc: Tensor, k: Tensor, report: Tensor | None = None) -> None:
        """Quantizes and stores new rows of the window.

        Args:
            loc: int32 or int64 ``[num_tokens]``, slots of the window (`slot_map`); negative: not stored.
            k: ``[num_tokens, 512]`` float32, bf16 or fp16, last dim dense: normalized, and its last 64 rotated. Also as
                ``[num_tokens, 1, 512]``.
            report: The checked mode's buffer (`attnops.report`).
        """
        k = k.squeeze(1) if k.dim() == 3 else k
        if k.dim() != 2 or k.shape[1] != ROW_VALUES:
            raise ValueError(f"attnops: k must be [num_tokens, {ROW_VALUES}], got {list(k.shape)}")
        tokens, groups = k.shape[0], NOPE // GROUP
        rows = k.new_empty(tokens, DATA_BYTES, dtype=torch.uint8)
        scales = k.new_zeros(tokens, SCALE_BYTES, dtype=torch.uint8)
        # A group of 64 is quantized as an index query of 64 is; its weight of 1 comes back as its scale.
        ones = torch.ones(tokens, groups, dtype=torch.float32, device=k.device)
        quantized = rows[:, :NOPE].view(E4M3).unflatten(1, (groups, GROUP))
        grouped = k[:, :NOPE].unflatten(1, (groups, GROUP))
        _, powers = quantize_index_q(grouped, ones, hadamard=False, ue8m0=True, q_fp8=quantized)
        scales[:, :groups] = (powers.view(torch.int32) >> 23).to(torch.uint8)
        rows[:, NOPE:] = k[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
        data, tail = row_parts(self.get_swa_buffer(layer.layer_id))
        store_kv(
            data.view(E4M3).unsqueeze(2),  # bytes: a copy of e4m3 looks at no value
            tail.view(E4M3).unsqueeze(2),
            rows.view(E4M3).unsqueeze(1),
            scales.view(E4M3).unsqueeze(1),
            loc,
            report=report,
        )

    def save_state(self, row: int, snapshot: int) -> None:
        """What the next token of request `row` needs of those before it, at the end of a whole page of tokens.

        Entries of ratio 128 begin anew there. Those of ratio 4 pool the group before.

        Raises:
            ValueError: no such row, or nobody or more than one holds `snapshot`.
        """
        self._copy_states(self._checked_row(row), self._slot_of(snapshot, writes=True))

    def load_state(self, snapshot: int, row: int) -> None:
        """A request begins behind a prefix of whole pages whose state was saved.

        Raises:
            ValueError: no such row, or nobody holds `snapshot`.
        """
        self._copy_states(self._slot_of(snapshot, writes=False), self._checked_row(row))

    def _slot_of(self, snapshot: int, writes: bool) -> int:
        holders = 0 if self.snapshots is None else self.snapshots.holders(snapshot)
        if holders < 1 or (writes and holders > 1):
            raise ValueError(f"attnops: snapshot {snapshot} of the pool has {holders} holders")
        return self.max_num_reqs + snapshot

    def _checked_row(self, row: int) -> int:
        if not 0 <= row < self.max_num_reqs:  # the slots behind are snapshots'
            raise ValueError(f"attnops: row must be in [0, {self.max_num_reqs}) of the pool, got {row}")
        return row

    def _copy_states(self, source: int, target: int) -> None:
        for ratio, *states in zip(self.compress_ratios, self._states, self._index_states):
            for state in states if ratio == 4 else []:
                assert state is not None
                state[target].copy_(state[source])

    def get_kv_buffer(self, layer_id: int) -> NoReturn:
        raise ValueError("attnops: a DeepSeekV4TokenToKVPool holds no K and V to view; see get_swa_buffer")

    def all_buffers(self) -> NoReturn:
        raise NotImplementedError(
            "attnops: tokens of a DeepSeekV4TokenToKVPool cannot be moved: its entries belong to groups of tokens. "
            "Drafts are chains there, which need no move"
        )

    def nbytes(self) -> int:
        parts = (self._swa, self._entries, self._index, self._states, self._index_states)
        return sum(t.shape[0] * t.stride(0) * t.element_size() for tensors in parts for t in tensors if t is not None)


ROW_VALUES = NOPE + ROPE


def row_parts(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Data ``[P, page_size, 576]`` and scales ``[P, page_size, 8]`` of pages, in their memory."""
    num_pages, page_size, _ = pages.shape
    data = (num_pages, page_size, DATA_BYTES), (pages.stride(0), DATA_BYTES, 1)
    scales = (num_pages, page_size, SCALE_BYTES), (pages.stride(0), SCALE_BYTES, 1)
    first = pages.storage_offset()
    return pages.as_strided(*data, first), pages.as_strided(*scales, first + page_size * DATA_BYTES)
