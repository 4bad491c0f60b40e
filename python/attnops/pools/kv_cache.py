"""The memory of cached tokens: pages of K and V, or of MLA latents, for every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from attnops import _load  # noqa: F401  (the store ops exist once the modules are loaded)
from attnops.pools.allocator import whole_pages
from attnops.pools.huge_pages import with_huge_pages
from attnops.types import (
    MLA_KV_LORA_RANK,
    MLA_ROPE_DIM,
    AttentionLayer,
    check_dtype,
    check_range,
    device_of,
    v_head_dim_of,
)

MLA_FP8_ROW_BYTES = 656  # 512 e4m3, 4 float32 scales (one per 128), 64 bf16 rotary


class Replacements:
    """How often a pool's buffers were replaced."""

    def __init__(self) -> None:
        self.count = 0


class LayerBuffers(list[Tensor]):
    """A pool's tensors, one per layer. A tensor may be replaced, which counts; there are always as many."""

    def __init__(self, tensors: Iterable[Tensor], replacements: Replacements) -> None:
        super().__init__(tensors)
        self._replacements = replacements

    def __setitem__(self, place: SupportsIndex | slice, value: Any) -> None:
        length = len(self)
        replaced = list(self)
        replaced[place] = value
        if len(replaced) != length:
            self._refuse()
        super().__setitem__(place, value)
        self._replacements.count += 1

    def __reduce__(self) -> tuple[type, tuple[list[Tensor], Replacements]]:  # a copy is not made by append
        return LayerBuffers, (list(self), self._replacements)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"attnops: a pool has one buffer for each of its {len(self)} layers: replace them by index")

    append = extend = insert = pop = remove = clear = reverse = sort = _refuse
    __delitem__ = __iadd__ = __imul__ = _refuse


class KVCache:
    """What every pool has. Its memory starts uninitialized: a backend never uses what no token was stored to.

    Buffers may be replaced (``pool.k_buffer[0] = pages``): who holds their addresses asks `buffers_version`. Other
    memory under the same tensor (``pages.set_(...)``) is not counted.

    Attributes:
        slot_map: int32 ``[slots]``: slot of this pool to slot of its sliding-window part; -1: not there. None: windowed
            layers use the same slots as all others.
    """

    slot_map: Tensor | None = None

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str,
        start_layer: int = 0,
    ) -> None:
        owner = f"attnops: {type(self).__name__}"
        check_dtype(owner, "dtype", dtype)
        check_range(owner, "layer_num", layer_num, 0)
        check_range(owner, "start_layer", start_layer, 0)
        self.page_size = page_size
        self.num_pages = whole_pages(owner, size, page_size)
        self.size = self.num_pages * page_size
        self.dtype = dtype
        self.layer_num, self.start_layer = layer_num, start_layer
        self.device = device_of(device)
        self._replacements = Replacements()

    @property
    def buffers_version(self) -> int:
        """How often a buffer of the pool was replaced."""
        return self._replacements.count

    def _replace(self, buffers: Iterable[Tensor]) -> LayerBuffers:
        """All buffers of one kind are replaced by others, one per layer."""
        tensors = list(buffers)
        if len(tensors) != self.layer_num:
            raise ValueError(f"attnops: the pool's {self.layer_num} layers need as many buffers, got {len(tensors)}")
        self._replacements.count += 1
        return LayerBuffers(tensors, self._replacements)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """The pages of K and V of a layer."""
        raise NotImplementedError

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of every layer, as `ops.move_kv` takes them: those of slots, and those of slots that `slot_map` gives."""
        raise NotImplementedError

    def _place_of(self, layer_id: int) -> int:
        """Where among the pool's layers one is.

        Raises:
            ValueError: it is not one of them.
        """
        place = layer_id - self.start_layer
        if not 0 <= place < self.layer_num:
            last = self.start_layer + self.layer_num - 1
            raise ValueError(f"attnops: layer_id must be in {self.start_layer} to {last}, the pool's, got {layer_id}")
        return place

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """The pages of K of a layer, the first of `get_kv_buffer`."""
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """The pages of V of a layer, the second of `get_kv_buffer`."""
        return self.get_kv_buffer(layer_id)[1]

    def nbytes(self) -> int:
        """Bytes of all buffers of the pool, scales and keys of indexers included."""
        raise NotImplementedError


class MHATokenToKVPool(KVCache):
    """K and V of MHA, GQA and MQA: per layer ``[num_pages, page_size, head_num, head_dim]`` each.

    Args:
        size: Token slots, rounded down to whole pages.
        dtype: bf16, fp16, fp32; or `torch.float8_e4m3fn`, `torch.float8_e5m2`: rows are quantized as they are stored.
        head_num, head_dim, v_head_dim: KV heads on this rank; the last -1: as `head_dim`.
        start_layer: `layer_id` of the first layer held.
        layout: "NHD": a token's heads side by side; "HND": a head's tokens of a page side by side. The shape of the
            pages is the same, the strides are not.
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
        v_head_dim: int = -1,
        start_layer: int = 0,
        layout: str = "NHD",
    ) -> None:
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        if dtype == torch.float4_e2m1fn_x2 and type(self) is MHATokenToKVPool:
            raise ValueError("attnops: pages of float4_e2m1fn_x2 have scales: make an MHATokenToKVPoolFP4")
        if layout not in ("NHD", "HND"):
            raise ValueError(f"attnops: layout must be NHD or HND, got {layout}")
        owner = f"attnops: {type(self).__name__}"
        check_range(owner, "head_num", head_num, 1)
        check_range(owner, "head_dim", head_dim, 1)
        self.head_num, self.head_dim = head_num, head_dim
        self.v_head_dim = v_head_dim_of(owner, head_dim, v_head_dim)
        self._layout = layout
        self.k_buffer = [self._pages(self.head_dim) for _ in range(layer_num)]
        self.v_buffer = [self._pages(self.v_head_dim) for _ in range(layer_num)]

    @property
    def k_buffer(self) -> LayerBuffers:
        """The pages of K, by layer."""
        return self._k_buffer

    @k_buffer.setter
    def k_buffer(self, buffers: Iterable[Tensor]) -> None:
        self._k_buffer = self._replace(buffers)

    @property
    def v_buffer(self) -> LayerBuffers:
        """The pages of V, by layer."""
        return self._v_buffer

    @v_buffer.setter
    def v_buffer(self, buffers: Iterable[Tensor]) -> None:
        self._v_buffer = self._replace(buffers)

    def _pages(self, head_dim: int) -> Tensor:
        options = {"dtype": self.dtype, "device": self.device}
        if self._layout == "HND":
            pages = torch.empty(self.num_pages, self.head_num, self.page_size, head_dim, **options)  # type: ignore[call-overload]
            return with_huge_pages(pages).transpose(1, 2)
        return with_huge_pages(torch.empty(self.num_pages, self.page_size, self.head_num, head_dim, **options))  # type: ignore[call-overload]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        place = self._place_of(layer_id)
        return self._k_buffer[place], self._v_buffer[place]

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        return [*self._k_buffer, *self._v_buffer], []

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
        """Stores new rows.

        Args:
            loc: int32 or int64 ``[num_tokens]``, slots; negative: not stored.
            k, v: ``[num_tokens, head_num, head_dim]``, dtype of the pool or, for an FP8 pool, wider.
            k_scale, v_scale: float32 ``[1]`` or ``[head_num]``, device; stored = value / scale. FP8 pools only.
            report: The checked mode's buffer (`attnops.report`).
        """
        k_pages, v_pages = self.get_kv_buffer(layer.layer_id)
        torch.ops.attnops.store_kv(k_pages, v_pages, k, v, loc, k_scale, v_scale, report)

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k_buffer, *self.v_buffer))


class MLATokenToKVPool(KVCache):
    """MLA latents: per layer ``[num_pages, page_size, 576]``, or 656-byte rows.

    Args:
        dtype: bf16, fp16, fp32; `torch.float8_e4m3fn`: one scale per layer; `torch.uint8`: rows of 656 bytes, e4m3
            latents with a scale per 128 and bf16 rotary part.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str = "cpu",
        start_layer: int = 0,
    ) -> None:
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        self.kv_lora_rank, self.qk_rope_head_dim = MLA_KV_LORA_RANK, MLA_ROPE_DIM
        self.kv_cache_dim = MLA_FP8_ROW_BYTES if dtype == torch.uint8 else MLA_KV_LORA_RANK + MLA_ROPE_DIM
        shape = (self.num_pages, page_size, self.kv_cache_dim)
        self.kv_buffer = [
            with_huge_pages(torch.empty(shape, dtype=dtype, device=self.device)) for _ in range(layer_num)
        ]

    @property
    def kv_buffer(self) -> LayerBuffers:
        """The latents, by layer."""
        return self._kv_buffer

    @kv_buffer.setter
    def kv_buffer(self, buffers: Iterable[Tensor]) -> None:
        self._kv_buffer = self._replace(buffers)

    def get_latent_buffer(self, layer_id: int) -> Tensor:
        """``[num_pages, page_size, 576]``, or uint8 ``[num_pages, page_size, 656]``."""
        return self._kv_buffer[self._place_of(layer_id)]

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        return list(self._kv_buffer), []

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K ``[num_pages, page_size, 1, 576]`` and V, its first 512 dimensions; not for 656-byte rows."""
        if self.dtype == torch.uint8:
            raise ValueError("attnops: 656-byte MLA rows hold no K and V to view; use get_latent_buffer")
        pages = self.get_latent_buffer(layer_id).unsqueeze(2)
        return pages, pages[..., : self.kv_lora_rank]

    def set_mla_kv_buffer(
        self,
        layer: AttentionLayer,
        loc: Tensor,
        latent: Tensor,
        k_rope: Tensor | None = None,
        kv_scale: Tensor | None = None,
        report: Tensor | None = None,
    ) -> None:
        """Stores new rows.

        Args:
            loc: int32 or int64 ``[num_tokens]``, slots; negative: not stored.
            latent: ``[num_tokens, 576]``, or ``[num_tokens, 512]`` with `k_rope` ``[num_tokens, 64]``; each also as
                ``[num_tokens, 1, ...]``.
            kv_scale: float32 ``[1]``, device; of an FP8 pool.
            report: The checked mode's buffer (`attnops.report`).
        """
        pages = self.get_latent_buffer(layer.layer_id)
        latent = latent.squeeze(1) if latent.dim() == 3 else latent
        k_rope = k_rope.squeeze(1) if k_rope is not None and k_rope.dim() == 3 else k_rope
        torch.ops.attnops.store_mla_kv(pages, latent, k_rope, loc, kv_scale, report)

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.kv_buffer)
