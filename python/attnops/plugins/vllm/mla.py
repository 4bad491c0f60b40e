"""The backend ATTNOPS_MLA: absorbed queries over vLLM's cache of latents, by `mla_decode`.

Prompts are `mla_prompts.py`'s: vLLM expands their keys and values, and has backends of their own for that.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf

from attnops import ops
from attnops.backends import Capability
from attnops.plugins import adapters
from attnops.plugins.vllm import mla_prompts
from attnops.plugins.vllm.plans import (
    DecodePlanner,
    cache_dtype,
    cache_names,
    is_batch_invariant,
    limits_of,
    reason_against_cache,
)
from attnops.types import AttentionSpec


def capability() -> Capability:
    """What this backend serves."""
    return adapters.find("vllm", "ATTNOPS_MLA").capability()


class AttnopsMLABackend(MLACommonBackend):
    """vLLM's description of attnops' MLA."""

    supported_dtypes: ClassVar[list[torch.dtype]] = sorted(capability().dtypes, key=str)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = cache_names(capability())

    @staticmethod
    def get_name() -> str:
        return "ATTNOPS_MLA"

    @staticmethod
    def get_impl_cls() -> type[AttnopsMLAImpl]:
        return AttnopsMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttnopsMLAMetadataBuilder]:
        return AttnopsMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size == 576

    @classmethod
    def supports_sink(cls) -> bool:
        return capability().sinks

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return capability().sliding_window

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return capability().deterministic

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *other: Any, **others: Any
    ) -> str | None:
        return reason_against_cache(kv_cache_dtype)

    @classmethod
    def supports_compute_capability(cls, capability_of_device: DeviceCapability) -> bool:
        archs = capability().archs
        return archs is None or capability_of_device.to_int() in archs


class AttnopsMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's steps, each with a plan for its decodes."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        dtype = vllm_config.model_config.dtype
        spec = AttentionSpec.mla(
            self.num_heads * self.dcp_world_size,
            dtype=dtype,
            kv_dtype=cache_dtype(vllm_config.cache_config.cache_dtype, dtype, capability()),
            page_size=kv_cache_spec.block_size,
            deterministic=is_batch_invariant(),
        )
        self._decode_planner = DecodePlanner(spec, {-1}, limits_of(vllm_config), device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACommonMetadata:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if step.decode is not None:
            tokens = step.num_decode_tokens // max(step.num_decodes, 1)
            step.decode.attnops_plan = self._decode_planner.plan(step.decode.seq_lens, max(tokens, 1))[-1]
        return step


class AttnopsMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """One layer."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        reasons = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a soft cap": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"head_size {head_size}": head_size != 576,
        }
        refused = [reason for reason, holds in reasons.items() if holds]
        if refused:
            raise NotImplementedError(f"attnops: the vLLM backend ATTNOPS_MLA does not serve {', '.join(refused)}")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self._is_fp8 = kv_cache_dtype.startswith("fp8")
        mla_prompts.choose(get_current_vllm_config(), self.qk_head_dim, self.v_head_dim)  # before vLLM asks

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Stores the step's latents."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        size = slots.shape[0]
        pages, kv_scale = self._pages(kv_cache, k_scale)
        ops.store_mla_kv(pages, kv_c_normed[:size], slots, k_pe=k_pe.flatten(1)[:size], kv_scale=kv_scale)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Absorbed queries ``[T, heads, 576]``, or their two parts, over the cache."""
        q, q_pe = q if isinstance(q, tuple) else (q, None)
        decode = attn_metadata.decode
        pages, kv_scale = self._pages(kv_c_and_k_pe_cache, layer._k_scale)
        return ops.mla_decode(
            q,
            pages,
            decode.block_table,
            decode.seq_lens,
            decode.attnops_plan,
            softmax_scale=self.scale,
            q_pe=q_pe,
            causal=attn_metadata.causal,
            kv_scale=kv_scale,
            return_lse=self.need_to_return_lse_for_decode,
        )

    def _pages(self, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._is_fp8:
            return kv_cache.view(torch.float8_e4m3fn), k_scale.view(-1)
        return kv_cache, None
