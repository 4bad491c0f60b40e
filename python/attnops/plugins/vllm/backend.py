"""The backend ATTNOPS: GQA, MQA and MHA over vLLM's paged cache, which is read and written where it is.

vLLM puts requests with as many new tokens as a decode or a verification first. They go to `xqa_decode`, the others to
`fmha_paged`. Plans are made in `build`, on the device; nothing is read on the host. A layer stores its new rows itself:
`forward` of a decode that comes again is one call. Steps are `metadata.py`'s, layers `impl.py`'s. Under decode context
parallelism both are `context_parallel.py`'s. Layers with a head size that no kernel has are vLLM's own:
`own_kernels.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from attnops.backends import Capability
from attnops.plugins import adapters
from attnops.plugins.vllm import own_kernels
from attnops.plugins.vllm.impl import ENCODERS, AttnopsImpl
from attnops.plugins.vllm.metadata import AttnopsMetadata, AttnopsMetadataBuilder
from attnops.plugins.vllm.plans import cache_names, reason_against_cache

__all__ = ["AttnopsBackend", "AttnopsImpl", "AttnopsMetadata", "AttnopsMetadataBuilder"]


def capability() -> Capability:
    """What this backend serves."""
    return adapters.find("vllm", "ATTNOPS").capability()


class AttnopsBackend(AttentionBackend):
    """vLLM's description of attnops; what it serves is derived from attnops' own."""

    supported_dtypes: ClassVar[list[torch.dtype]] = sorted(capability().dtypes, key=str)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = cache_names(capability())
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "ATTNOPS"

    @staticmethod
    def get_impl_cls() -> type[AttnopsImpl]:
        return AttnopsImpl

    @staticmethod
    def get_builder_cls() -> type[AttnopsMetadataBuilder]:
        return AttnopsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        head_size = getattr(kv_cache_spec, "head_size", None)
        if head_size is not None and not own_kernels.serves(head_size):
            sizes: list[int | MultipleOf] = own_kernels.own_backend().get_supported_kernel_block_sizes(kv_cache_spec)
            return sizes
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Any; on the CPU a head's tokens side by side come first: 16 x 4096 takes a sixth less than tokens first."""
        if not current_platform.is_cpu():
            return None
        return (KVCacheLayout.LBHNC, *(layout for layout in KVCacheLayout if layout is not KVCacheLayout.LBHNC))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return own_kernels.serves(head_size) or bool(own_kernels.own_backend().supports_head_size(head_size))

    @classmethod
    def supports_sink(cls) -> bool:
        return capability().sinks

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return capability().sliding_window

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return capability().deterministic

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *ENCODERS)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *other: Any, **others: Any
    ) -> str | None:
        return reason_against_cache(kv_cache_dtype)

    @classmethod
    def supports_compute_capability(cls, capability_of_device: DeviceCapability) -> bool:
        archs = capability().archs
        return archs is None or capability_of_device.to_int() in archs
