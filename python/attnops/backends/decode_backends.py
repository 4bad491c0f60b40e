"""Backends that decode, verify and draft extend on `xqa_decode` or `mla_decode`: one class, whose names differ in data.

Prefill belongs to another backend.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.capability import FLOATS, PORTABLE_ARCHS, SIXTEEN_BIT, Capability, HeadDims
from attnops.backends.decode_steps import MODES, DecodeSteps
from attnops.backends.fp4_steps import Fp4Steps
from attnops.backends.registry import register_attention_backend
from attnops.ops.fp4_kv import FP4
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

_DECODES = Capability(
    devices=frozenset({"cpu", "cuda"}),
    chosen_on=frozenset({"cuda"}),
    modes=MODES,
    delegates_prefill=True,
    dtypes=FLOATS,
    sliding_window=True,
    logit_cap=True,
    sinks=True,
    tree_mask=True,
    draft_trees=True,
    draft_windows=True,
    deterministic=True,
    cuda_graph=True,
)


def _mla(*page_sizes: int, more: frozenset[torch.dtype] = frozenset()) -> Capability:
    """Of `mla_decode`; each name adds the page sizes that its users know. more: Types of caches."""
    return dataclasses.replace(
        _DECODES,
        archs=frozenset({90}),
        dtypes=SIXTEEN_BIT,
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.uint8}) | more,
        mla=True,
        page_sizes=frozenset(page_sizes),
    )


class DecodeBackend(AttentionBackend):
    """What the names below are.

    Attributes:
        table_tokens: Page tables are as wide as whole blocks of so many tokens need.
    """

    table_tokens: ClassVar[int] = 1

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._steps: DecodeSteps | Fp4Steps
        if spec.cache_dtype == FP4:
            self._steps = Fp4Steps(self.name, spec, limits, self.device)
            return
        padded = -(-limits.max_seqlen // self.table_tokens) * self.table_tokens
        width = None if spec.is_mla else limits.max_tokens_per_request  # of a block of a ragged draft extend
        steps = DecodeSteps(self.name, spec, dataclasses.replace(limits, max_seqlen=padded), self.device, width)
        self._steps, self.forward = steps, steps.forward  # type: ignore[method-assign]

    @property
    def fault_report(self) -> Tensor | None:
        return self._steps.buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        self._steps.out_graph(batch)

    def prepare_with(self, other: AttentionBackend) -> None:
        if isinstance(other, DecodeBackend) and isinstance(self._steps, DecodeSteps):
            self._steps.borrow(other._steps)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self._steps.in_graph(batch)

    def attend(self, call: LayerCall) -> None:
        self._steps.attend(call)


@register_attention_backend("trtllm_mha")
class TRTLLMHAAttnBackend(DecodeBackend):
    """GQA. Any page size; windows with or without a pool of their own, sinks, soft cap, trees, FP8 and FP4 caches."""

    capability = dataclasses.replace(
        _DECODES,
        archs=PORTABLE_ARCHS,
        attn_types=frozenset({AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL}),
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.float8_e5m2, FP4}),
        head_dims=HeadDims(32, 256, 8),
        swa_pool=True,
    )


@register_attention_backend("flashmla")
class FlashMLABackend(DecodeBackend):
    """MLA. Pages of 64, the size of FlashMLA; caches of four bits, too."""

    capability = _mla(64, more=frozenset({FP4}))


@register_attention_backend("cutlass_mla")
class CutlassMLABackend(DecodeBackend):
    """MLA. Pages of 128; queries whole or as q_nope and q_pe (`q_rope`), neither padded nor copied."""

    capability = _mla(128)


@register_attention_backend("trtllm_mla")
class TRTLLMMLABackend(DecodeBackend):
    """MLA. Pages of 32 or 64.

    Page tables are as wide as whole blocks of 128 tokens need, which TensorRT-LLM's kernels ask of their users' tables.
    """

    capability = _mla(32, 64)
    table_tokens = 128
