"""SGLang's pools and layers as attnops knows them: views, nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import MLA_KV_LORA_RANK, MLA_ROPE_DIM, AttentionType


class MHAPoolView(MHATokenToKVPool):
    """K and V of SGLang's pool, ``[slots, heads, dim]`` per layer, as pages. SGLang's getters wait for what is loaded
    layer by layer, so they are asked at every call. Views are made again where a layer's memory has changed."""

    def __init__(self, pool: Any, page_size: int) -> None:
        self._of, self.page_size, self.dtype = pool, page_size, pool.dtype
        self._kept: dict[int, tuple[int, int, tuple[Tensor, Tensor]]] = {}
        slots, self.head_num, self.head_dim = pool.get_key_buffer(pool.start_layer).shape
        self.v_head_dim = pool.get_value_buffer(pool.start_layer).shape[2]
        self.num_pages = slots // page_size
        self.size = self.num_pages * page_size
        self.device = torch.device(pool.device)

    @property
    def buffers_version(self) -> int:
        return 0

    @property  # type: ignore[misc]
    def k_buffer(self) -> list[Tensor]:  # type: ignore[override]
        """The first layer's, which stands for all: what asks for every layer's checks shapes alone."""
        return [self.get_kv_buffer(self._of.start_layer)[0]]

    @property  # type: ignore[misc]
    def v_buffer(self) -> list[Tensor]:  # type: ignore[override]
        return [self.get_kv_buffer(self._of.start_layer)[1]]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Pages ``[num_pages, page_size, heads, dim]`` of K and of V."""
        return self.pages(layer_id, *self._of.get_kv_buffer(layer_id))

    def pages(self, layer_id: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Slots ``[slots, heads, dim]`` of a layer as pages; the same views while they are where they were."""
        kept, places = self._kept.get(layer_id), (k.data_ptr(), v.data_ptr())
        if kept is None or kept[0] != places[0] or kept[1] != places[1]:
            pages = (self.num_pages, self.page_size)
            views = k[: self.size].unflatten(0, pages), v[: self.size].unflatten(0, pages)
            self._kept[layer_id] = kept = (*places, views)
        return kept[2]


class SWAPoolView(SWAKVPool):
    """A full and a sliding-window pool of SGLang. Its allocator maps slots of the one to slots of the other, in place.
    A token that has left every window is at slot 0 there, and no layer sees it."""

    full_kv_pool: MHAPoolView
    swa_kv_pool: MHAPoolView

    def __init__(self, pool: Any, page_size: int) -> None:
        parts = [part for part in (pool.full_kv_pool, pool.swa_kv_pool) if part.layer_num]
        views = [MHAPoolView(part, page_size) for part in parts]
        self._of, self.page_size, self.dtype = pool, page_size, pool.dtype
        self.full_kv_pool, self.swa_kv_pool = views[0], views[-1]  # a model of windows alone has one pool
        self.head_num, self.head_dim, self.v_head_dim = (
            getattr(views[0], name) for name in ("head_num", "head_dim", "v_head_dim")
        )
        self.num_pages, self.size = self.full_kv_pool.num_pages, self.full_kv_pool.size
        self.device = self.full_kv_pool.device

    @property
    def buffers_version(self) -> int:
        return 0

    @property
    def slot_map(self) -> Tensor:  # type: ignore[override]
        """int64 ``[slots of the full pool + 1]``."""
        mapping: Tensor | None = self._of.full_to_swa_index_mapping
        if mapping is None:
            raise RuntimeError("attnops: SGLang's sliding-window pool has no mapping before its allocator is made")
        return mapping

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Pages ``[num_pages, page_size, heads, dim]`` of K and of V, of the pool that the layer is in."""
        part = self.swa_kv_pool if self.is_windowed(layer_id) else self.full_kv_pool
        return part.pages(layer_id, *self._of.get_kv_buffer(layer_id))

    def is_windowed(self, layer_id: int) -> bool:
        place = self._of.layers_mapping.get(layer_id)
        return place is not None and place[1]


class MLAPoolView(MLATokenToKVPool):
    """Latents of SGLang's pool, ``[slots, 1, 576]`` per layer, as pages."""

    def __init__(self, pool: Any, page_size: int) -> None:
        self._of, self.page_size, self.dtype = pool, page_size, pool.dtype
        self._kept: dict[int, tuple[int, Tensor]] = {}
        self.kv_lora_rank, self.qk_rope_head_dim = MLA_KV_LORA_RANK, MLA_ROPE_DIM
        slots, _, self.kv_cache_dim = pool.get_key_buffer(pool.start_layer).shape
        self.num_pages = slots // page_size
        self.size = self.num_pages * page_size
        self.device = torch.device(pool.device)

    @property
    def buffers_version(self) -> int:
        return 0

    @property  # type: ignore[misc]
    def kv_buffer(self) -> list[Tensor]:  # type: ignore[override]
        """The first layer's, which stands for all."""
        return [self.get_latent_buffer(self._of.start_layer)]

    def get_latent_buffer(self, layer_id: int) -> Tensor:
        """Pages ``[num_pages, page_size, 576]``."""
        rows = self._of.get_key_buffer(layer_id)
        kept, place = self._kept.get(layer_id), rows.data_ptr()
        if kept is None or kept[0] != place:
            pages = rows.squeeze(1)[: self.size].unflatten(0, (self.num_pages, self.page_size))
            self._kept[layer_id] = kept = (place, pages)
        return kept[1]


def pool_view(pool: Any, page_size: int, is_mla: bool) -> Any:
    """The view of a pool. By the names of SGLang's classes: what derives from them may keep its rows otherwise.

    Raises:
        NotImplementedError: naming a pool, or its layout, that is not served.
    """
    name = type(pool).__name__
    views: dict[str, Any] = {"MHATokenToKVPool": MHAPoolView, "SWAKVPool": SWAPoolView}
    if is_mla:
        views = {"MLATokenToKVPool": MLAPoolView}
    if name not in views:
        raise NotImplementedError(f"attnops: the SGLang backend serves no {name}")
    for part in (pool.full_kv_pool, pool.swa_kv_pool) if name == "SWAKVPool" else (pool,):
        if name == "SWAKVPool" and type(part).__name__ != "MHATokenToKVPool":
            raise NotImplementedError(f"attnops: the SGLang backend serves no SWAKVPool of {type(part).__name__}")
        layout = getattr(part, "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise NotImplementedError(f"attnops: the SGLang backend reads pools of layout nhd, got {layout}")
    return views[name](pool, page_size)


def layer_view(layer: Any, sinks: Tensor | None) -> RadixAttention:
    """An attnops layer with what SGLang's says.

    Raises:
        NotImplementedError: for what attnops' layers do not have.
    """
    if layer.is_cross_attention:
        raise NotImplementedError("attnops: the SGLang backend serves no cross attention")
    method = getattr(layer, "logit_capping_method", "tanh")
    if layer.logit_cap and method != "tanh":
        raise NotImplementedError(f"attnops: the SGLang backend caps logits by tanh, got {method}")
    return RadixAttention(
        num_heads=layer.tp_q_head_num,
        head_dim=layer.qk_head_dim,
        scaling=layer.scaling,
        num_kv_heads=layer.tp_k_head_num,
        layer_id=layer.layer_id,
        logit_cap=layer.logit_cap,
        v_head_dim=layer.v_head_dim,
        sliding_window_size=layer.sliding_window_size if layer.sliding_window_size is not None else -1,
        sinks=None if sinks is None else sinks.float(),
        k_scale=_scale(layer.k_scale),
        v_scale=_scale(layer.v_scale),
        attn_type=AttentionType(layer.attn_type.value),
    )


def _scale(scale: Any) -> Tensor | None:
    return None if scale is None else scale.detach().float().reshape(-1)
