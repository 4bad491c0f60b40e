"""vLLM's own kernels, for layers that attnops' kernels do not serve: head sizes above 256, or no multiple of 8.

Such layers keep to vLLM's backend altogether: implementation, builder, graphs. Their caches are vLLM's like all others.
They store their rows in `forward`, since vLLM asks the backend, not the layer, who stores.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor
from vllm.platforms import current_platform

from attnops.backends import get_backend_class

logger = logging.getLogger("attnops.plugins.vllm")


def serves(head_size: int) -> bool:
    """attnops' kernels have this head size."""
    dims = get_backend_class("trtllm_mha").capability.head_dims
    return dims is not None and not dims.reason_against(head_size, head_size)


def own_backend() -> Any:
    """The backend of vLLM that takes the most layers: CPU_ATTN on a CPU, TRITON_ATTN elsewhere."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    return TritonAttentionBackend


def backend_of(head_size: int) -> Any:
    """vLLM's backend for a head size that attnops does not serve; says so once, in one line of the log."""
    backend = own_backend()
    _say(head_size, backend.get_name())
    return backend


@functools.cache
def storing_impl(impl: type) -> type:
    """An implementation of vLLM's whose `forward` first stores the step's rows."""

    class StoringImpl(impl):
        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: Tensor,
            attn_metadata: Any,
            *args: Any,
            **options: Any,
        ) -> Tensor:
            shares = attn_metadata is None or self.kv_sharing_target_layer_name is not None
            if not shares and key is not None and value is not None:
                slots = attn_metadata.slot_mapping
                size = slots.shape[0]
                self.do_kv_cache_update(layer, key[:size], value[:size], kv_cache, slots)
            out: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **options)
            return out

    return StoringImpl


@functools.cache
def _say(head_size: int, name: str) -> None:
    logger.warning("attnops does not serve head size %d: vLLM's %s serves those layers", head_size, name)
