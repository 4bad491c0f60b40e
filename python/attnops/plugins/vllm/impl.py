"""A layer of the backend ATTNOPS: stores a step's new rows, then attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from attnops import ops
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.ops.layer_call import bind_xqa_layer, repeatable, xqa_layer
from attnops.plugins.vllm import context_parallel, own_kernels
from attnops.plugins.vllm.metadata import AttnopsMetadata, first_rows
from attnops.plugins.vllm.plans import window_left

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class BoundDecode:
    """A layer's store and `xqa_decode` as one call. A shape's second step binds it to pages, table and plan, which vLLM
    keeps where they are. Later steps bring addresses alone.
    """

    def __init__(self) -> None:
        self._shape: tuple[Any, ...] = ()
        self._kept: tuple[Any, ...] = ()
        self._call: Callable[..., None] | None = None

    def find(self, shape: tuple[Any, ...], plan: Any, kv_cache: Tensor) -> Callable[..., None] | None:
        """The call of this shape, if it is bound to this plan and cache."""
        kept = self._kept
        if self._call is not None and shape == self._shape and kept[0] is plan and kept[1] is kv_cache:
            return self._call
        return None

    def comes_again(self, shape: tuple[Any, ...], plan: Any, kv_cache: Tensor) -> bool:
        """Whether the last step had this shape, too, and so it is worth binding.

        Not where `ops.xqa_decode` leaves attending to other kernels.
        """
        again = shape == self._shape and self._kept[0] is plan and self._kept[1] is kv_cache and plan.prefill is None
        self._shape, self._kept, self._call = shape, (plan, kv_cache), None
        return again

    def bind(
        self,
        query: Tensor,
        output: Tensor,
        memory: tuple[Tensor, Tensor, Tensor],
        lens: Tensor,
        options: dict[str, Any],
    ) -> Callable[..., None]:
        """`memory`: K pages, V pages, page table."""
        plan = self._kept[0]
        shape = (plan.batch_size, plan.seqlen_q, *query.shape[1:])
        shared = {name: options[name] for name in ("softmax_scale", "causal", "window_left", "logit_cap")}
        rows = output.view(shape), query.view(shape)
        bound = bind_xqa_layer(*rows, *memory, lens, plan, report=None, **shared)
        self._call = repeatable(xqa_layer, bound)
        return self._call


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
        own = own_kernels.storing_impl(own_kernels.backend_of(head_size).get_impl_cls())
        return own(num_heads, head_size, *args, **options)

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
        self.attn_type, self._is_encoder = attn_type, attn_type in ENCODERS
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._float_sinks: Tensor | None = None
        self._is_fp8 = kv_cache_dtype.startswith("fp8")
        self._kept_pages: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._decoder = BoundDecode()
        self._kept_scales: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks as the kernels take them: converted once, at an address that graphs keep when weights change."""
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

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Of K and V, views kept with the layer's own."""
        if not self._is_fp8:
            return None, None
        kept = self._kept_scales
        if kept is None or kept[0] is not layer._k_scale or kept[1] is not layer._v_scale:
            k_scale, v_scale = layer._k_scale, layer._v_scale
            kept = self._kept_scales = (k_scale, v_scale, k_scale.view(-1), v_scale.view(-1))
        return kept[2], kept[3]

    def _sinks(self) -> Tensor | None:
        if self._float_sinks is None and self.sinks is not None:  # a layer that nothing was loaded into
            return self.sinks.float()
        return self._float_sinks

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores the step's rows, which `forward` does where it is given them; an encoder has no cache."""
        if self._is_encoder:
            return
        size = slot_mapping.shape[0]
        pages, (k_scale, v_scale) = self._pages(kv_cache), self._scales(layer)
        rows = first_rows(key, size), first_rows(value, size)
        ops.store_kv(*pages, *rows, slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AttnopsMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output: ``[T, num_heads, head_size]``; a step's own tokens come first, the rest is padding.
        key, value: None where there is nothing to store."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attnops: the vLLM backend ATTNOPS does not quantize its output")
        step = attn_metadata
        if step is None:  # vLLM measures its memory
            self._kept_pages, self._decoder = None, BoundDecode()
            return output.fill_(0)
        if self._is_encoder:
            assert key is not None and value is not None
            self._encode(query, key, value, output, step)
            return output
        new: tuple[Tensor, Tensor, Tensor] | None = None
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            slots = step.slot_mapping
            size = slots.shape[0]
            new = first_rows(key, size), first_rows(value, size), slots
        if step.decode and not step.prompts and self.dcp_world_size == 1:
            self._decode(layer, query, new, kv_cache, step, output)
            return output
        if new is not None:
            self.do_kv_cache_update(layer, new[0], new[1], kv_cache, new[2])
        pages, options = self._pages(kv_cache), self._options(layer, step.causal)
        if self.dcp_world_size > 1:
            assert key is not None and value is not None
            end = step.num_actual_tokens
            self._share(query[:end], key[:end], value[:end], pages, output[:end], step, options)
        else:
            self._attend(query, pages, step, output, options)
        return output

    def _decode(
        self,
        layer: Any,
        query: Tensor,
        new: tuple[Tensor, Tensor, Tensor] | None,
        kv_cache: Tensor,
        step: AttnopsMetadata,
        output: Tensor,
    ) -> None:
        """A step of decodes alone. `new`: keys, values and their slots, to store."""
        plan: Any = step.decode[self.window_left]
        size = step.num_decode_tokens
        query, output = first_rows(query, size), first_rows(output, size)
        call = self._decoder.find(step.decode_shape, plan, kv_cache)
        if call is None:
            memory, options = (*self._pages(kv_cache), step.decode_table), self._options(layer, step.causal)
            if not self._decoder.comes_again(step.decode_shape, plan, kv_cache):
                if new is not None:
                    self.do_kv_cache_update(layer, new[0], new[1], kv_cache, new[2])
                ops.xqa_decode(query, *memory, step.decode_lens, plan, out=output, **options)
                return
            call = self._decoder.bind(query, output, memory, step.decode_lens, options)
        stored = (None, None, None) if new is None else new
        call(output, query, *stored, step.decode_lens, None, self._sinks(), *self._scales(layer))

    def _attend(
        self,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        step: AttnopsMetadata,
        output: Tensor,
        options: dict[str, Any],
    ) -> None:
        """A step with prompts, whose rows are stored."""
        first, end = step.num_decode_tokens, step.num_actual_tokens
        if step.decode:
            memory, plan = (*pages, step.decode_table), cast(Any, step.decode[self.window_left])
            ops.xqa_decode(query[:first], *memory, step.decode_lens, plan, out=output[:first], **options)
        self._attend_prompts(query[first:end], pages, step, step.prompts, output[first:end], options)
        if step.unmasked is not None:
            assert step.causal_tokens is not None
            free = torch.empty_like(output[first:end])
            unmasked = options | {"causal": False}
            self._attend_prompts(query[first:end], pages, step, step.unmasked, free, unmasked)
            torch.where(step.causal_tokens.view(-1, 1, 1), output[first:end], free, out=output[first:end])

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

    def _encode(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, step: AttnopsMetadata) -> None:
        """Every token sees its whole request, straight from key and value."""
        assert step.cu_seqlens_q is not None
        end, bounds, plan = step.num_actual_tokens, step.cu_seqlens_q, step.prompts[self.window_left]
        options = {**self._options(None, step.causal), "window_right": self.window_left, "out": output[:end]}
        ops.fmha_varlen(query[:end], key[:end], value[:end], bounds, bounds, plan, **options)

    def _options(self, layer: Any, causal: bool) -> dict[str, Any]:
        """Of every call that is not bound."""
        options: dict[str, Any] = {"softmax_scale": self.scale, "window_left": self.window_left, "causal": causal}
        options |= {"logit_cap": self.logit_cap, "sinks": self._sinks()}
        if self._is_fp8 and not self._is_encoder:
            options["k_scale"], options["v_scale"] = self._scales(layer)
        return options
