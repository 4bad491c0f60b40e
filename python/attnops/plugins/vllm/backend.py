"""The backend ATTNOPS: GQA, MQA and MHA over vLLM's paged cache, which is read and written where it is.

vLLM puts requests with as many new tokens as a decode or a verification first. They go to `xqa_decode`, the others to
`fmha_paged`. Plans are made in `build`, on the device; nothing is read on the host. Under decode context parallelism
both are `context_parallel.py`'s. Layers with a head size that no kernel has are vLLM's own: `own_kernels.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheLayout

from attnops import ops
from attnops.backends import Capability, get_backend_class
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.ops.layer_call import bind_xqa_layer, repeatable, xqa_layer
from attnops.plan_buffers import DecodePlan
from attnops.plugins.vllm import context_parallel, own_kernels
from attnops.plugins.vllm.plans import (
    DecodePlanner,
    PromptPlanner,
    cache_dtype,
    is_batch_invariant,
    limits_of,
    window_left,
)
from attnops.types import AttentionSpec

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def capability() -> Capability:
    """What the kernels behind this backend serve."""
    return get_backend_class("trtllm_mha").capability


class AttnopsBackend(AttentionBackend):
    """vLLM's description of attnops; what it serves is derived from attnops' own."""

    supported_dtypes: ClassVar[list[torch.dtype]] = sorted(capability().dtypes, key=str)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update: bool = False

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
    def supports_compute_capability(cls, capability_of_device: DeviceCapability) -> bool:
        archs = capability().archs
        return archs is None or capability_of_device.to_int() in archs


@dataclass
class AttnopsMetadata(AttentionMetadata):
    """A step, for every layer of a group.

    Attributes:
        num_actual_tokens: Rows of q that count; those behind are padding.
        num_decodes, num_decode_tokens: Requests that come first, all of `decode_tokens` tokens, and their tokens.
        decode: A plan per window for these.
        prompts: A plan per window for the others; with `cu_seqlens_q`, where each of them begins.
        causal: Of all requests.
        own_lens, context_lens, context: Under decode context parallelism: keys on this rank that each decode token
            sees. Those of the others that were stored before the step. A plan per window for these.
        unmasked, causal_tokens: Where each request has a causal flag of its own, none is a decode. A plan per window
            without a mask, and the flag of each token.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: dict[int, DecodePlan]
    prompts: dict[int, FmhaPlan]
    cu_seqlens_q: Tensor | None
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    own_lens: Tensor | None = None
    context_lens: Tensor | None = None
    context: dict[int, FmhaPlan] | None = None
    unmasked: dict[int, FmhaPlan] | None = None
    causal_tokens: Tensor | None = None

    @property
    def decode_tokens(self) -> int:
        return self.num_decode_tokens // max(self.num_decodes, 1)


class AttnopsMetadataBuilder(AttentionMetadataBuilder[AttnopsMetadata]):
    """Steps of one group of layers, which share a cache spec and a block table."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __new__(cls, kv_cache_spec: Any, *args: Any, **options: Any) -> Any:
        """vLLM's own builder where its own kernels serve the layers."""
        if own_kernels.serves(kv_cache_spec.head_size):
            return super().__new__(cls)
        if cls is not AttnopsMetadataBuilder:
            raise NotImplementedError(f"attnops: {cls.__name__} does not serve head_size {kv_cache_spec.head_size}")
        builder = own_kernels.backend_of(kv_cache_spec.head_size).get_builder_cls()
        return builder(kv_cache_spec, *args, **options)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        head_size = getattr(kv_cache_spec, "head_size", None)
        support: AttentionCGSupport = cls._cudagraph_support
        if head_size is not None and not own_kernels.serves(head_size):
            support = own_kernels.own_backend().get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
        return support

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        impls = [layer.impl for layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()]
        heads = {impl.num_heads for impl in impls}
        if len(heads) != 1:
            raise NotImplementedError(f"attnops: layers of one cache group with {sorted(heads)} query heads")
        dtype = vllm_config.model_config.dtype
        spec = AttentionSpec(
            num_q_heads=heads.pop(),
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_dim=kv_cache_spec.head_size,
            dtype=dtype,
            kv_dtype=cache_dtype(vllm_config.cache_config.cache_dtype, dtype),
            page_size=kv_cache_spec.block_size,
            deterministic=is_batch_invariant(),
        )
        windows, limits = {impl.window_left for impl in impls}, limits_of(vllm_config)
        self._prompts = PromptPlanner(spec, windows, limits, device)
        self._own: context_parallel.OwnLengths | None = None
        ranks = impls[0].dcp_world_size
        if ranks > 1:
            spec = dataclasses.replace(spec, num_q_heads=spec.num_q_heads * ranks)
            self._context = PromptPlanner(spec, windows, limits, device)
            limits = dataclasses.replace(
                limits, max_batch_size=limits.max_batch_size * (self.reorder_batch_threshold or 1)
            )
            place = (ranks, impls[0].dcp_rank)
            self._own = context_parallel.OwnLengths(vllm_config, *place, limits.max_batch_size, device)
        self._decode = DecodePlanner(spec, windows, limits, device)
        self._is_encoder = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttnopsMetadata:
        """Plans for a batch; device work only."""
        common = common_attn_metadata
        flags = common.causal if isinstance(common.causal, Tensor) else None
        causal = not self._is_encoder and (flags is not None or bool(common.causal))
        decodes, prompts, decode_tokens, prompt_tokens = 0, common.num_reqs, 0, common.num_actual_tokens
        # Without a mask, a window is on both sides, which xqa_decode does not know.
        if flags is None and (causal or common.max_query_len <= 1):
            most, longest = self.reorder_batch_threshold or 1, common.max_query_len
            if longest <= most and longest * prompts == prompt_tokens:  # all have as many: no need to look at each
                decodes, prompts, decode_tokens, prompt_tokens = prompts, 0, prompt_tokens, 0
            else:
                decodes, prompts, decode_tokens, prompt_tokens = split_decodes_and_prefills(
                    common, decode_threshold=most, require_uniform=True
                )
        seq_lens, starts = common.seq_lens, common.query_start_loc
        if decodes and decode_tokens % decodes:  # vLLM pads tokens of a graph, and not always requests with them
            raise NotImplementedError(f"attnops: {decode_tokens} tokens of {decodes} uniform requests")
        decode: dict[int, DecodePlan] = {}
        plans: dict[int, FmhaPlan] = {}
        cu_seqlens_q: Tensor | None = None
        own, context_lens, context, unmasked, causal_tokens = None, None, None, None, None
        if self._own is not None and not self._is_encoder and (flags is not None or not causal):
            raise NotImplementedError("attnops: decode context parallelism without a causal mask")
        if decodes and decode_tokens:
            lens, tokens = first_rows(seq_lens, decodes), decode_tokens // decodes
            if self._own is not None:
                lens = own = self._own.of_decodes(lens, tokens)
                tokens = 1
            decode = self._decode.plan(lens, tokens)
        if prompts:
            cu_seqlens_q = starts[decodes : common.num_reqs + 1]
            if decodes:
                cu_seqlens_q = cu_seqlens_q - decode_tokens
            prompt_lens: Tensor | None = None if self._is_encoder else seq_lens[decodes:]
            if self._own is not None and prompt_lens is not None:
                context_lens = self._own.of_contexts(prompt_lens, cu_seqlens_q)
                context = self._context.plan(cu_seqlens_q, prompt_tokens, False, context_lens)
                prompt_lens = None  # keys of the step itself
            plans = self._prompts.plan(cu_seqlens_q, prompt_tokens, causal, prompt_lens)
            if flags is not None and causal:
                unmasked = self._prompts.plan(cu_seqlens_q, prompt_tokens, False, prompt_lens)
                token = torch.arange(prompt_tokens, device=starts.device)
                request = torch.searchsorted(cu_seqlens_q[1:], token, right=True).clamp(max=prompts - 1)
                causal_tokens = flags[:prompts].bool()[request]
        return AttnopsMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            decode=decode,
            prompts=plans,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal,
            own_lens=own,
            context_lens=context_lens,
            context=context,
            unmasked=unmasked,
            causal_tokens=causal_tokens,
        )


def first_rows(rows: Tensor, count: int) -> Tensor:
    """``rows[:count]``, which costs the host some microseconds where it is all of them."""
    return rows if rows.shape[0] == count else rows[:count]


class BoundDecode:
    """A layer's `xqa_decode`. A shape's second call binds it to pages, table and plan, which vLLM keeps where they are.
    Later calls bring addresses alone.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._call: Callable[..., None] | None = None

    def run(
        self,
        query: Tensor,
        output: Tensor,
        memory: tuple[Tensor, Tensor, Tensor],
        lens: Tensor,
        plan: Any,
        options: dict[str, Any],
    ) -> None:
        """`memory`: K pages, V pages, page table."""
        k_pages, _, table = memory
        key = (plan, k_pages, table.data_ptr(), table.shape, table.stride(), options["causal"])
        known = len(self._key) == len(key) and all(one is other for one, other in zip(key[:2], self._key))
        if not known or key[2:] != self._key[2:]:
            self._key, self._call = key, None
            ops.xqa_decode(query, *memory, lens, plan, out=output, **options)
            return
        if self._call is None:
            queries = query.view(plan.batch_size, plan.seqlen_q, *query.shape[1:])
            names = ("softmax_scale", "causal", "window_left", "logit_cap")
            shared = {name: options[name] for name in names}
            bound = bind_xqa_layer(output.view(queries.shape), queries, *memory, lens, plan, report=None, **shared)
            self._call = repeatable(xqa_layer, bound)
        scales = options.get("k_scale"), options.get("v_scale")
        self._call(output, query, None, None, None, lens, None, options["sinks"], *scales)


class AttnopsImpl(AttentionImpl[AttnopsMetadata]):
    """One layer."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __new__(cls, num_heads: int, head_size: int, *args: Any, **options: Any) -> Any:
        """vLLM's own implementation where no kernel of attnops has the head size."""
        impl = super().__new__(cls)
        if own_kernels.serves(head_size):
            return impl
        if cls is not AttnopsImpl or impl.dcp_world_size > 1:
            where = "decode context parallelism" if impl.dcp_world_size > 1 else cls.__name__
            raise NotImplementedError(f"attnops: {where} is not served with head_size {head_size}")
        return own_kernels.backend_of(head_size).get_impl_cls()(num_heads, head_size, *args, **options)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        reasons = {
            "ALiBi": alibi_slopes is not None,
            f"attention of type {attn_type}": attn_type not in (AttentionType.DECODER, *ENCODERS),
            "windows under decode context parallelism": self.dcp_world_size > 1 and sliding_window is not None,
            f"options {sorted(unknown)}": bool(unknown),
        }
        refused = [reason for reason, holds in reasons.items() if holds]
        if refused:
            raise NotImplementedError(f"attnops: the vLLM backend ATTNOPS does not serve {', '.join(refused)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.window_left = sliding_window, window_left(sliding_window)
        self.kv_cache_dtype, self.logit_cap = kv_cache_dtype, logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._float_sinks: Tensor | None = None
        self._is_fp8 = kv_cache_dtype.startswith("fp8")
        self._kept_pages: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._decoder = BoundDecode()
        self._kept_options: dict[bool, dict[str, Any]] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks as the kernels take them: converted once, at an address that graphs keep when weights change."""
        self._kept_options.clear()
        if self.sinks is not None and self._float_sinks is None:
            self._float_sinks = self.sinks.float()
        elif self.sinks is not None and self._float_sinks is not None:
            self._float_sinks.copy_(self.sinks)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V pages ``[P, page_size, H_kv, D]`` of ``[P, H_kv, page_size, 2 * D]``: views, kept with the cache."""
        if self._kept_pages is not None and self._kept_pages[0] is kv_cache:
            return self._kept_pages[1]
        pages = (kv_cache.view(torch.float8_e4m3fn) if self._is_fp8 else kv_cache).transpose(1, 2)
        views = pages[..., : self.head_size], pages[..., self.head_size :]
        self._kept_pages = kv_cache, views
        return views

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        if not self._is_fp8:
            return {}
        return {"k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1)}

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores the step's rows; an encoder has no cache."""
        if self.attn_type in ENCODERS:
            return
        size = slot_mapping.shape[0]
        k_pages, v_pages = self._pages(kv_cache)
        rows = first_rows(key, size), first_rows(value, size)
        ops.store_kv(k_pages, v_pages, *rows, slot_mapping, **self._scales(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttnopsMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output: ``[T, num_heads, head_size]``; a step's own tokens come first, the rest is padding."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attnops: the vLLM backend ATTNOPS does not quantize its output")
        if attn_metadata is None:  # vLLM measures its memory
            self._kept_pages, self._decoder = None, BoundDecode()
            return output.fill_(0)
        step, options = attn_metadata, self._options(layer, attn_metadata.causal)
        if self.attn_type in ENCODERS:
            self._encode(query, key, value, output, step, options)
            return output
        k_pages, v_pages = self._pages(kv_cache)
        first, end = step.num_decode_tokens, step.num_actual_tokens
        if self.dcp_world_size > 1:
            self._share(query[:end], key[:end], value[:end], (k_pages, v_pages), output[:end], step, options)
            return output
        if step.decode:
            lens, table = first_rows(step.seq_lens, step.num_decodes), first_rows(step.block_table, step.num_decodes)
            rows, plan = (first_rows(query, first), first_rows(output, first)), step.decode[self.window_left]
            self._decoder.run(*rows, (k_pages, v_pages, table), lens, plan, options)
        if step.prompts:
            self._attend_prompts(query[first:end], (k_pages, v_pages), step, step.prompts, output[first:end], options)
        if step.unmasked is not None:
            assert step.causal_tokens is not None
            free = torch.empty_like(output[first:end])
            unmasked = options | {"causal": False}
            self._attend_prompts(query[first:end], (k_pages, v_pages), step, step.unmasked, free, unmasked)
            torch.where(step.causal_tokens.view(-1, 1, 1), output[first:end], free, out=output[first:end])
        return output

    def _attend_prompts(
        self,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        step: AttnopsMetadata,
        plans: dict[int, FmhaPlan],
        output: Tensor,
        options: dict[str, Any],
    ) -> None:
        """Ragged requests, with one mask for all. Without a causal mask a window is on both sides."""
        assert step.cu_seqlens_q is not None
        lens, table = step.seq_lens[step.num_decodes :], step.block_table[step.num_decodes :]
        right = -1 if options["causal"] else self.window_left
        bounds, plan = step.cu_seqlens_q, plans[self.window_left]
        ops.fmha_paged(query, *pages, table, lens, bounds, plan, window_right=right, out=output, **options)

    def _share(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: tuple[Tensor, Tensor],
        output: Tensor,
        step: AttnopsMetadata,
        options: dict[str, Any],
    ) -> None:
        """The step with keys on all ranks of the group."""
        first, window = step.num_decode_tokens, self.window_left
        options = {name: option for name, option in options.items() if name not in ("causal", "window_left")}
        if step.decode:
            assert step.own_lens is not None
            table = step.block_table[: step.num_decodes]
            context_parallel.decode(
                query[:first], pages, table, step.own_lens, step.decode[window], output[:first], **options
            )
        if step.prompts:
            assert step.context is not None and step.context_lens is not None and step.cu_seqlens_q is not None
            table, plans = step.block_table[step.num_decodes :], (step.context[window], step.prompts[window])
            new = (query[first:], key[first:], value[first:])
            context_parallel.prompts(
                new, pages, table, step.context_lens, step.cu_seqlens_q, plans, output[first:], **options
            )

    def _encode(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, step: AttnopsMetadata, options: dict[str, Any]
    ) -> None:
        """Every token sees its whole request, straight from key and value."""
        assert step.cu_seqlens_q is not None
        end, bounds = step.num_actual_tokens, step.cu_seqlens_q
        ops.fmha_varlen(
            query[:end],
            key[:end],
            value[:end],
            bounds,
            bounds,
            step.prompts[self.window_left],
            window_right=self.window_left,
            out=output[:end],
            **options,
        )

    def _options(self, layer: Any, causal: bool) -> dict[str, Any]:
        """Of every call with as much to see; kept where the layer has no scales."""
        if causal in self._kept_options:
            return self._kept_options[causal]
        sinks = self._float_sinks
        if sinks is None and self.sinks is not None:  # a layer that nothing was loaded into
            sinks = self.sinks.float()
        options: dict[str, Any] = {"softmax_scale": self.scale, "window_left": self.window_left}
        options |= {"logit_cap": self.logit_cap, "sinks": sinks, "causal": causal}
        if self._is_fp8 and self.attn_type not in ENCODERS:
            options |= self._scales(layer)
        elif sinks is self._float_sinks:
            self._kept_options[causal] = options
        return options
