"""Pools of four bits a value: float4_e2m1fn_x2 codes, and a float8_e4m3fn scale for every 16 values of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops.fp4_kv import FP4, FP4_BLOCK, store_kv_fp4
from attnops.pools.kv_cache import LayerBuffers, MHATokenToKVPool, MLATokenToKVPool
from attnops.types import AttentionLayer, check_range, v_head_dim_of

E4M3 = torch.float8_e4m3fn


def _check_device(device: torch.device) -> None:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "")
    if not key or not torch._C._dispatch_has_kernel_for_dispatch_key("attnops::store_kv_fp4", key):
        raise ValueError(f"attnops: an FP4 pool cannot be on {device}: store_kv_fp4 has no kernel for it")


def _check_dim(name: str, dim: int) -> None:
    if dim % FP4_BLOCK:
        raise ValueError(
            f"attnops: {name} of an FP4 pool must be a multiple of {FP4_BLOCK} (values of a scale), got {dim}"
        )


class MHATokenToKVPoolFP4(MHATokenToKVPool):
    """K and V of MHA, GQA and MQA: per layer ``[num_pages, page_size, head_num, head_dim / 2]`` each, and their scales.

    Args:
        size, page_size, head_num, head_dim, layer_num, device, v_head_dim, start_layer: As of `MHATokenToKVPool`.

    Attributes:
        k_scale_buffer, v_scale_buffer: Per layer ``[num_pages, page_size, head_num, head_dim / 16]`` of float8_e4m3fn.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str = "cpu",
        v_head_dim: int = -1,
        start_layer: int = 0,
    ) -> None:
        owner = f"attnops: {type(self).__name__}"
        check_range(owner, "head_dim", head_dim, 1)
        for name, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim_of(owner, head_dim, v_head_dim))):
            _check_dim(name, dim)
        super().__init__(size, page_size, FP4, head_num, head_dim, layer_num, device, v_head_dim, start_layer)
        _check_device(self.device)
        self.k_scale_buffer = self._scales(self.head_dim)
        self.v_scale_buffer = self._scales(self.v_head_dim)

    def _pages(self, head_dim: int) -> Tensor:
        shape = (self.num_pages, self.page_size, self.head_num, head_dim // 2)
        return torch.empty(shape, dtype=torch.uint8, device=self.device).view(FP4)

    def _scales(self, head_dim: int) -> LayerBuffers:
        shape = (self.num_pages, self.page_size, self.head_num, head_dim // FP4_BLOCK)
        return self._replace(torch.empty(shape, dtype=E4M3, device=self.device) for _ in range(self.layer_num))

    def get_kv_scale_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        place = self._place_of(layer_id)
        return self.k_scale_buffer[place], self.v_scale_buffer[place]

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        codes = [pages.view(torch.uint8) for pages in (*self.k_buffer, *self.v_buffer)]
        return [*codes, *self.k_scale_buffer, *self.v_scale_buffer], []

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
        """Quantizes and stores new rows: as of `ops.store_kv_fp4`, in fp32, fp16 or bf16."""
        pages, scales = self.get_kv_buffer(layer.layer_id), self.get_kv_scale_buffer(layer.layer_id)
        store_kv_fp4(*pages, *scales, k, v, loc, k_scale=k_scale, v_scale=v_scale, report=report)

    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.all_buffers()[0])


class MLATokenToKVPoolFP4(MLATokenToKVPool):
    """MLA latents: per layer ``[num_pages, page_size, 288]``, 576 codes a row, and 36 scales.

    Attributes:
        kv_scale_buffer: By layer, float8_e4m3fn ``[num_pages, page_size, 36]``.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        layer_num: int,
        device: torch.device | str = "cpu",
        start_layer: int = 0,
    ) -> None:
        super().__init__(size, page_size, torch.uint8, layer_num, device, start_layer)
        _check_device(self.device)
        self.dtype, dim = FP4, self.kv_lora_rank + self.qk_rope_head_dim
        self.kv_cache_dim = dim // 2

        def buffers(width: int, dtype: torch.dtype) -> LayerBuffers:
            shape = (self.num_pages, page_size, width)
            pages = (torch.empty(shape, dtype=torch.uint8, device=self.device).view(dtype) for _ in range(layer_num))
            return self._replace(pages)

        self.kv_buffer = buffers(self.kv_cache_dim, FP4)
        self.kv_scale_buffer = buffers(dim // FP4_BLOCK, E4M3)

    def get_kv_scale_buffer(self, layer_id: int) -> Tensor:
        return self.kv_scale_buffer[self._place_of(layer_id)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        raise ValueError("attnops: FP4 latents hold no K and V to view; use get_latent_buffer and get_kv_scale_buffer")

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        return [*(pages.view(torch.uint8) for pages in self.kv_buffer), *self.kv_scale_buffer], []

    def set_mla_kv_buffer(
        self,
        layer: AttentionLayer,
        loc: Tensor,
        latent: Tensor,
        k_rope: Tensor | None = None,
        kv_scale: Tensor | None = None,
        report: Tensor | None = None,
    ) -> None:
        """Quantizes and stores new rows, of 576 or of 512 and 64; as of `MLATokenToKVPool` otherwise."""
        parts = [latent.flatten(1)] if k_rope is None else [latent.flatten(1), k_rope.flatten(1)]
        pages, scales = self.get_latent_buffer(layer.layer_id), self.get_kv_scale_buffer(layer.layer_id)
        store_kv_fp4(
            pages.unsqueeze(2), None, scales.unsqueeze(2), None, torch.cat(parts, 1).unsqueeze(1), None, loc,
            k_scale=kv_scale, report=report,
        )  # fmt: skip

    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.all_buffers()[0])
