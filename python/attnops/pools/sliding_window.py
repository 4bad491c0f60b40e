"""Two pools for a model in which some layers see a window only: those layers keep few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.pools.allocator import PagedTokenToKVPoolAllocator
from attnops.pools.kv_cache import KVCache, MHATokenToKVPool
from attnops.types import AttentionLayer

if TYPE_CHECKING:
    from attnops.pools.deepseek_v4 import DeepSeekV4TokenToKVPool


class SWAKVPool(KVCache):
    """A pool for the layers that see everything and a smaller one for those that see a window.

    Requests have slots of the full pool. `slot_map` translates them for windowed layers.

    Args:
        size, size_swa: Token slots of the full and of the window pool.
        full_attention_layer_ids, swa_attention_layer_ids: Every layer is in one of the two.
        options: As of `MHATokenToKVPool`: `v_head_dim`, `layout`.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        full_attention_layer_ids: Sequence[int],
        swa_attention_layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        v_head_dim: int = -1,
        layout: str = "NHD",
    ) -> None:
        both = set(full_attention_layer_ids) & set(swa_attention_layer_ids)
        if both:
            raise ValueError(f"attnops: layers {sorted(both)} are in both pools")
        layer_num = len(full_attention_layer_ids) + len(swa_attention_layer_ids)
        super().__init__(size, page_size, dtype, layer_num, device)

        def pool(tokens: int, layers: Sequence[int]) -> MHATokenToKVPool:
            part = MHATokenToKVPool(
                tokens, page_size, dtype, head_num, head_dim, len(layers), device, v_head_dim, 0, layout
            )
            part._replacements = self._replacements  # one count for both parts
            part.k_buffer, part.v_buffer = part.k_buffer, part.v_buffer
            return part

        self.full_kv_pool = pool(size, full_attention_layer_ids)
        self.swa_kv_pool = pool(size_swa, swa_attention_layer_ids)
        self._place = {layer: (self.full_kv_pool, i) for i, layer in enumerate(full_attention_layer_ids)}
        self._place |= {layer: (self.swa_kv_pool, i) for i, layer in enumerate(swa_attention_layer_ids)}
        self.slot_map = torch.full((self.size,), -1, dtype=torch.int32, device=self.device)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        if layer_id not in self._place:
            raise ValueError(f"attnops: layer_id must be one of {sorted(self._place)}, the pool's, got {layer_id}")
        pool, index = self._place[layer_id]
        return pool.get_kv_buffer(index)

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.full_kv_pool.all_buffers()[0], self.swa_kv_pool.all_buffers()[0]

    def is_windowed(self, layer_id: int) -> bool:
        """The layer's pages are of the window pool: its slots are translated through `slot_map`."""
        place = self._place.get(layer_id)  # of no layer here: get_kv_buffer says so
        return place is not None and place[0] is self.swa_kv_pool

    def set_kv_buffer(
        self,
        layer: AttentionLayer,
        loc: Tensor,
        k: Tensor,
        v: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        report: Tensor | None = None,
    ) -> None:
        """As of `MHATokenToKVPool`; `loc` are slots of the pool that the layer is in: translated for a windowed one."""
        k_pages, v_pages = self.get_kv_buffer(layer.layer_id)
        torch.ops.attnops.store_kv(k_pages, v_pages, k, v, loc, k_scale, v_scale, report)

    def nbytes(self) -> int:
        return self.full_kv_pool.nbytes() + self.swa_kv_pool.nbytes()


class SWATokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Pages of the full pool, each with a page of the window pool until its tokens have left every window.

    The window page goes when its full page does, or earlier by `free_swa`. That one leaves pages with several holders
    alone: another holder may still need them.
    """

    def __init__(self, pool: SWAKVPool | DeepSeekV4TokenToKVPool) -> None:
        self._pool = pool
        self._window = PagedTokenToKVPoolAllocator(pool.swa_kv_pool.size, pool.page_size)
        super().__init__(pool.size, pool.page_size)

    def clear(self) -> None:
        super().clear()
        self._window.clear()
        self._window_page = [-1] * self.num_pages
        self._slot_map.fill_(-1)

    @property
    def _slot_map(self) -> Tensor:
        assert self._pool.slot_map is not None
        return self._pool.slot_map

    @property
    def available_window_pages(self) -> int:
        """Free pages of the window pool."""
        return self._window.available_pages

    def available_size(self) -> int:
        """Tokens for which both pools have pages."""
        return min(super().available_size(), self._window.available_size())

    def alloc_pages(self, count: int) -> list[int] | None:
        if count > self._window.available_pages:
            return None
        return super().alloc_pages(count)

    def free_swa(self, slots: Tensor) -> int:
        """Gives back the window pages of `slots` (host), whose tokens no window reaches any more.

        Pass whole pages: tokens that share a page with one still in the window lose theirs, too.

        Returns:
            How many window pages became free.
        """
        pages = self.pages_of(slots)
        self._check_pages(pages)
        pages = [p for p in pages if self._holders[p] == 1 and self._window_page[p] >= 0]
        self._on_free(pages)
        return len(pages)

    def is_window_resident(self, slots: Tensor) -> bool:
        """Every page of `slots` still has its window page: what a request must know before it reuses a prefix."""
        pages = self.pages_of(slots)
        self._check_pages(pages)
        return all(self._window_page[page] >= 0 for page in pages)

    def _on_alloc(self, pages: list[int]) -> None:
        window = self._window.alloc_pages(len(pages))
        assert window is not None, "alloc_pages has asked"
        for page, window_page in zip(pages, window):
            self._window_page[page] = window_page
        self._write_map(pages, window)

    def _on_free(self, pages: list[int]) -> None:
        held = [page for page in pages if self._window_page[page] >= 0]
        freed = [self._window_page[page] for page in held]
        if freed:
            offset = self.page_size
            self._window.free(torch.tensor(freed, dtype=torch.int64) * offset)
        for page in held:
            self._window_page[page] = -1
        self._write_map(held, None)

    def _write_map(self, pages: list[int], window: list[int] | None) -> None:
        """`slot_map` of whole pages: their window slots, or -1."""
        if not pages:
            return
        rows = self._slot_map.view(self.num_pages, self.page_size)
        index = torch.tensor(pages, dtype=torch.int64)
        if window is None:
            rows[index.to(rows.device, non_blocking=True)] = -1
            return
        first = torch.tensor(window, dtype=torch.int32).unsqueeze(1) * self.page_size
        slots = first + torch.arange(self.page_size, dtype=torch.int32)
        rows[index.to(rows.device, non_blocking=True)] = slots.to(rows.device, non_blocking=True)
