"""Ragged steps in two parts: new tokens among themselves, as they came, and the prefix in its pages, merged.

The second part writes and the merge reads every result once more. That costs more than what it saves, unless a request
brings thousands of new tokens over pages that come row by row (docs/kernels/fmha_sm90.md). So no rule chooses it: a
backend is built with ``cascade=True``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from attnops import ops
from attnops.backends import attend
from attnops.backends.base import LayerCall
from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plan_buffers import FmhaPlans
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits


@dataclass(frozen=True)
class CascadeStep:
    """Views for one shape of a step.

    Attributes:
        prefix_lens: int32 ``[B]``.
        new, prefix: Plans of the two parts.
    """

    prefix_lens: Tensor
    new: dict[int, FmhaPlan]
    prefix: dict[int, FmhaPlan]


class Cascade:
    """Plans and calls of the two parts, for steps that `FmhaSteps` prepares. The model has passed `check`."""

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        self._new = FmhaPlans(spec, limits, device)
        whole = dataclasses.replace(spec, attn_type=AttentionType.DECODER_BIDIRECTIONAL)  # all see all of the prefix
        self._prefix = FmhaPlans(whole, limits, device)
        self._lens = torch.zeros(limits.max_batch_size, dtype=torch.int32, device=device)

    def views(self, batch: AttentionBatch) -> CascadeStep:
        size, tokens = batch.batch_size, batch.num_tokens
        return CascadeStep(self._lens[:size], self._new.views(size, tokens), self._prefix.views(size, tokens))

    def plan(self, step: CascadeStep, batch: AttentionBatch, cu_seqlens_q: Tensor) -> None:
        """Device work, recorded in a graph."""
        assert batch.extend_seq_lens is not None, "FmhaSteps gives ragged steps alone"
        torch.sub(batch.cache_seqlens, batch.extend_seq_lens, out=step.prefix_lens).clamp_(min=0)
        ops.fmha_plan(step.new[-1], cu_seqlens_q)
        ops.fmha_plan(step.prefix[-1], cu_seqlens_q, cache_seqlens=step.prefix_lens)

    def attend(
        self, call: LayerCall, step: CascadeStep, paged: PagedStep, cu_seqlens_q: Tensor, report: Tensor | None
    ) -> None:
        """Serves a layer whose k and v are in the call, and of the cache's dtype."""
        layer, batch, out = call.layer, call.batch, call.out
        assert call.k is not None and call.v is not None
        heads = (-1, layer.num_heads, layer.v_head_dim)
        part = torch.empty_like(out)
        lse, part_lse = out.new_empty(2, batch.num_tokens, layer.num_heads, dtype=torch.float32)
        attend.fmha_varlen(call.q, call.k, call.v, layer, cu_seqlens_q, step.new, out, report, lse=lse)
        prefix = (step.prefix_lens, part_lse)
        attend.fmha_paged(call.q, layer, batch, paged, cu_seqlens_q, step.prefix, part, report, prefix=prefix)
        ops.merge_state(out.view(heads), lse, part.view(heads), part_lse, out=out.view(heads), lse=lse)


def check(spec: AttentionSpec) -> None:
    """Raises NotImplementedError, listing why, when a model cannot attend in two parts."""
    reasons = [
        reason
        for holds, reason in (
            (spec.is_mla, "MLA's prefill is in parts by itself (AttentionSpec.up_head_dims)"),
            (spec.attn_type is not AttentionType.DECODER, "its layers are not causal"),
            (spec.deterministic, "deterministic: results would depend on where the prefix ends"),
            (spec.sliding_window_size >= 0, "sliding_window_size: a part does not know how far its keys are"),
            (spec.attention_chunk_size > 0, "attention_chunk_size: chunks are requests of their own"),
            (spec.has_sinks, "has_sinks: a sink would count in each part"),
            (spec.cache_dtype != spec.dtype, "kv_dtype: new tokens must be seen as the cache holds them"),
        )
        if holds
    ]
    if reasons:
        raise NotImplementedError(f"attnops: cascade=True does not serve this model: {'; '.join(reasons)}")
