"""The pool of double sparsity: K and V, and beside them labels, a few channels of K by which keys are selected."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnops.ops.paged_kv import store_kv
from attnops.pools.huge_pages import with_huge_pages
from attnops.pools.kv_cache import LayerBuffers, MHATokenToKVPool
from attnops.types import AttentionLayer


class DoubleSparseTokenToKVPool(MHATokenToKVPool):
    """K and V, and per layer ``[num_pages, page_size, head_num, heavy_channel_num]`` labels (SGLang's name).

    Args:
        size, page_size, dtype, head_num, head_dim, layer_num, device, start_layer, layout: As of `MHATokenToKVPool`.
        heavy_channel_num: Channels of a label, an even number.
        label_dtype: Of labels: bf16, fp16 or fp32. None: `dtype`, or bf16 where that is of 8 bits.

    Raises:
        ValueError: naming what does not fit.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str = "cpu",
        start_layer: int = 0,
        layout: str = "NHD",
        heavy_channel_num: int = 32,
        label_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(size, page_size, dtype, head_num, head_dim, layer_num, device, -1, start_layer, layout)
        if not 2 <= heavy_channel_num <= head_dim or heavy_channel_num % 2:
            raise ValueError(
                f"attnops: heavy_channel_num of a pool must be an even number of at most {head_dim} (head_dim), "
                f"got {heavy_channel_num}"
            )
        self.heavy_channel_num = heavy_channel_num
        self.label_dtype = label_dtype or (dtype if dtype.itemsize > 1 else torch.bfloat16)
        shape = (self.num_pages, page_size, head_num, heavy_channel_num)
        self.label_buffer = [
            with_huge_pages(torch.empty(shape, dtype=self.label_dtype, device=self.device)) for _ in range(layer_num)
        ]

    @property
    def label_buffer(self) -> LayerBuffers:
        """The pages of labels, by layer."""
        return self._label_buffer

    @label_buffer.setter
    def label_buffer(self, buffers: Iterable[Tensor]) -> None:
        self._label_buffer = self._replace(buffers)

    def get_label_buffer(self, layer_id: int) -> Tensor:
        """``[num_pages, page_size, head_num, heavy_channel_num]``, as `ops.label_scores` takes it."""
        return self._label_buffer[self._place_of(layer_id)]

    def set_label_buffer(self, layer: AttentionLayer, loc: Tensor, label: Tensor, report: Tensor | None = None) -> None:
        """Stores labels of new tokens.

        Args:
            loc: int32 or int64 ``[num_tokens]``, slots; negative: not stored.
            label: ``[num_tokens, head_num, heavy_channel_num]``.
            report: The checked mode's buffer (`attnops.report`).
        """
        halves = self.get_label_buffer(layer.layer_id).chunk(2, -1)  # one store of K and V is one of both halves
        new = label.to(self.label_dtype).chunk(2, -1)
        store_kv(halves[0], halves[1], new[0], new[1], loc, report=report)

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """K, V and labels: what moves tokens moves all three."""
        pages, window = super().all_buffers()
        return [*pages, *self._label_buffer], window

    def nbytes(self) -> int:
        return super().nbytes() + sum(t.numel() * t.element_size() for t in self._label_buffer)
