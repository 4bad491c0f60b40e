"""The pool of a sparse MLA model: latents for attention, and index keys for the indexer that selects among them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnops.ops.index_keys import gather_index_k, store_index_k
from attnops.ops.paged_kv import build_cu_seqlens, store_kv
from attnops.pools.huge_pages import with_huge_pages
from attnops.pools.kv_cache import LayerBuffers, MLATokenToKVPool
from attnops.types import AttentionLayer

E4M3 = torch.float8_e4m3fn
INDEX_HEAD_DIMS = (64, 128)
SCALE_BYTES = 4  # a float32 per key


class DSATokenToKVPool(MLATokenToKVPool):
    """MLA latents, and per layer an index key for each token (SGLang's name, `NSATokenToKVPool` of old).

    Args:
        size, page_size, dtype, layer_num, device, start_layer: As of `MLATokenToKVPool`. Any page size will do.
        index_head_dim: Values of an index key, 128 or 64.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str = "cpu",
        start_layer: int = 0,
        index_head_dim: int = 128,
    ) -> None:
        if index_head_dim not in INDEX_HEAD_DIMS:
            raise ValueError(f"attnops: index_head_dim of a pool must be 64 or 128, got {index_head_dim}")
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        self.index_head_dim = index_head_dim
        shape = (self.num_pages, page_size, index_head_dim + SCALE_BYTES)
        self.index_k_with_scale_buffer = [
            with_huge_pages(torch.empty(shape, dtype=torch.uint8, device=self.device)) for _ in range(layer_num)
        ]

    @property
    def index_k_with_scale_buffer(self) -> LayerBuffers:
        """The index pages, by layer: a page's keys of e4m3, then their float32 scales."""
        return self._index_k_with_scale_buffer

    @index_k_with_scale_buffer.setter
    def index_k_with_scale_buffer(self, buffers: Iterable[Tensor]) -> None:
        self._index_k_with_scale_buffer = self._replace(buffers)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        """uint8 ``[num_pages, page_size, index_head_dim + 4]``, as ops of the indexer take it.

        SGLang's has the same bytes in two dimensions: ``flatten(1)``.
        """
        return self._index_k_with_scale_buffer[self._place_of(layer_id)]

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Latents, and of index pages the keys and scales apart: a token's are not side by side."""
        latents, window = super().all_buffers()
        return [*latents, *(part for pages in self._index_k_with_scale_buffer for part in _parts(pages))], window

    def set_index_k(
        self,
        layer: AttentionLayer,
        loc: Tensor,
        k: Tensor,
        hadamard: bool = True,
        ue8m0: bool = False,
        report: Tensor | None = None,
    ) -> None:
        """Quantizes and stores new index keys; arguments as of `ops.store_index_k`.

        Args:
            loc: int32 or int64 ``[num_tokens]``, slots; negative: not stored.
            k: ``[num_tokens, index_head_dim]`` float32, bf16 or fp16; also as ``[num_tokens, 1, index_head_dim]``.
            report: The checked mode's buffer (`attnops.report`).
        """
        pages = self.get_index_k_with_scale_buffer(layer.layer_id)
        k = k.squeeze(1) if k.dim() == 3 else k
        store_index_k(pages, k, loc, hadamard=hadamard, ue8m0=ue8m0, report=report)

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: Tensor, index_k: Tensor, index_k_scale: Tensor, report: Tensor | None = None
    ) -> None:
        """Stores index keys that are quantized already, bit for bit.

        Args:
            loc: int32 or int64 ``[num_tokens]``, slots; negative: not stored.
            index_k: float8_e4m3fn or uint8 ``[num_tokens, index_head_dim]``.
            index_k_scale: float32 ``[num_tokens]`` or ``[num_tokens, 1]``.
            report: The checked mode's buffer (`attnops.report`).

        Raises:
            ValueError: naming the argument that does not fit.
        """
        expected = [loc.shape[0], self.index_head_dim]
        if index_k.dtype not in (E4M3, torch.uint8) or list(index_k.shape) != expected:
            raise ValueError(
                f"attnops: index_k must be float8_e4m3fn or uint8 {expected}, got {index_k.dtype} {list(index_k.shape)}"
            )
        shapes = ([expected[0]], [expected[0], 1])
        if index_k_scale.dtype != torch.float32 or list(index_k_scale.shape) not in shapes:
            got = f"{index_k_scale.dtype} {list(index_k_scale.shape)}"
            raise ValueError(f"attnops: index_k_scale must be float32 {shapes[0]} or {shapes[1]}, got {got}")
        keys, scales = (part.view(E4M3).unsqueeze(2) for part in _parts(self.get_index_k_with_scale_buffer(layer_id)))
        new_scales = index_k_scale.reshape(-1, 1).view(E4M3)  # bytes: a copy of e4m3 looks at no value
        store_kv(keys, scales, index_k.view(E4M3).unsqueeze(1), new_scales.unsqueeze(1), loc, report=report)

    def get_index_k_scale_buffer(
        self,
        layer_id: int,
        seq_len_tensor: Tensor,
        page_indices: Tensor,
        seq_len_sum: int,
        max_seq_len: int | None = None,
        report: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Index keys of a batch, request by request, as `ops.index_logits` and DeepGEMM read them.

        Args:
            seq_len_tensor: int32 or int64 ``[B]``, keys of each request.
            page_indices: int32 ``[B, max_pages]``, the page table.
            seq_len_sum: Rows to allocate (host), at least the sum. Rows behind it are not written.
            max_seq_len: SGLang's callers give it. Nothing depends on it.
            report: The checked mode's buffer (`attnops.report`).

        Returns:
            uint8 ``[seq_len_sum, index_head_dim]``, e4m3 keys; uint8 ``[seq_len_sum, 4]``, float32 scales.
        """
        bounds = build_cu_seqlens(seq_len_tensor.to(torch.int32).contiguous())
        return self._gather(layer_id, bounds, page_indices, seq_len_sum, report)

    def get_index_k_continuous(self, layer_id: int, seq_len: int, page_indices: Tensor) -> Tensor:
        """uint8 ``[seq_len, index_head_dim]``: the e4m3 keys of one request, whose pages are int32 ``[n]``."""
        return self._gather_one(layer_id, seq_len, page_indices)[0]

    def get_index_k_scale_continuous(self, layer_id: int, seq_len: int, page_indices: Tensor) -> Tensor:
        """uint8 ``[seq_len, 4]``: the float32 scales of one request's keys."""
        return self._gather_one(layer_id, seq_len, page_indices)[1]

    def _gather_one(self, layer_id: int, seq_len: int, page_indices: Tensor) -> tuple[Tensor, Tensor]:
        bounds = torch.arange(2, dtype=torch.int32, device=self.device) * seq_len
        return self._gather(layer_id, bounds, page_indices.unsqueeze(0), seq_len, None)

    def _gather(
        self, layer_id: int, bounds: Tensor, page_table: Tensor, rows: int, report: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k = torch.empty(rows, self.index_head_dim, dtype=torch.uint8, device=self.device)
        k_scale = torch.empty(rows, 1, dtype=torch.float32, device=self.device)
        pages = self.get_index_k_with_scale_buffer(layer_id)
        gather_index_k(k, k_scale.squeeze(1), pages, page_table, bounds, report=report)
        return k, k_scale.view(torch.uint8)

    def nbytes(self) -> int:
        return super().nbytes() + sum(pages.numel() for pages in self._index_k_with_scale_buffer)


NSATokenToKVPool = DSATokenToKVPool


def _parts(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[num_pages, page_size, D]`` and the bytes of scales ``[num_pages, page_size, 4]``, in the pages."""
    num_pages, page_size, width = pages.shape
    whole, keys = pages.view(num_pages, page_size * width), page_size * (width - SCALE_BYTES)
    return whole[:, :keys].unflatten(1, (page_size, -1)), whole[:, keys:].unflatten(1, (page_size, SCALE_BYTES))
