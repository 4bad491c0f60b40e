"""Steps of the backend ATTNOPS: what vLLM's runner says of a batch, with plans, once for all layers of a group."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plan_buffers import DecodePlan
from attnops.plugins import adapters
from attnops.plugins.vllm import context_parallel, own_kernels
from attnops.plugins.vllm.plans import (
    DecodePlanner,
    PromptPlanner,
    cache_dtype,
    is_batch_invariant,
    limits_of,
)
from attnops.types import AttentionSpec


def first_rows(rows: Tensor, count: int) -> Tensor:
    """``rows[:count]``, which costs the host some microseconds where it is all of them."""
    return rows if rows.shape[0] == count else rows[:count]


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
        decode_lens, decode_table: Of the decodes: what every layer asks for. `decode_shape` is what a bound call stays
            the same for.
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
    decode_lens: Tensor = field(init=False)
    decode_table: Tensor = field(init=False)
    decode_shape: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.decode_lens = first_rows(self.seq_lens, self.num_decodes)
        table = self.decode_table = first_rows(self.block_table, self.num_decodes)
        self.decode_shape = (table.data_ptr(), table.shape, table.stride(), self.causal)

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
            kv_dtype=cache_dtype(
                vllm_config.cache_config.cache_dtype, dtype, adapters.find("vllm", "ATTNOPS").capability()
            ),
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
        if flags is None and not self._is_encoder and (causal or common.max_query_len <= 1):
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
