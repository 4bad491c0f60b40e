"""MLA prefill without absorbed queries: keys and values are made of latents, a part of the prefix at a time.

Per pair of a query and a key, absorbed attention multiplies over 576 + 512 dimensions, this one over 192 + 128. Its
price is the projection of every key, which pays from some 170 new tokens a request on.

What a step does is chosen by what the host knows. Where all tokens of the batch fit the workspace, they are gathered
from the cache and attended at once. Otherwise the new tokens first attend to each other. Then they attend to the
prefix, in chunks that fill the workspace, all requests side by side. Each chunk's result is merged into the earlier
ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.store import FP8, heads, store_mla
from attnops.graph_buffers import PagedStep
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.pools import MLATokenToKVPool
from attnops.reference import unpack_mla_fp8_rows
from attnops.types import MLA_KV_LORA_RANK, MLA_ROPE_DIM, AttentionBatch, AttentionSpec, ForwardMode, Limits

if TYPE_CHECKING:
    from attnops.backends.base import LayerCall
    from attnops.layers.radix_attention import RadixAttention

WORKSPACE_BYTES = 256 << 20  # of a chunk's keys, values and latents
LEAST_ROWS = 64


@dataclass(frozen=True)
class Part:
    """Cached tokens that a step's queries meet together, gathered side by side.

    Attributes:
        plan: For these keys.
        cu_seqlens_k: int32 ``[B + 1]``: each request's, of the gathered rows.
        slots: int64 ``[rows]``; those behind the last request's lead to any row.
    """

    plan: FmhaPlan
    cu_seqlens_k: Tensor
    slots: Tensor


@dataclass(frozen=True)
class PrefillStep:
    """Attributes:
    cu_seqlens_q: int32 ``[B + 1]``.
    new: The plan by which new tokens attend to each other; None: `parts` has them, too.
    """

    cu_seqlens_q: Tensor
    new: FmhaPlan | None
    parts: list[Part]


class MlaPrefill:
    """Serves layers whose q comes unabsorbed, in ragged steps.

    Args:
        spec: With `up_head_dims`.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        assert spec.up_head_dims is not None
        self._spec, self._limits = spec, limits
        self._head_dim, self._v_head_dim = spec.up_head_dims
        nope = self._head_dim - MLA_ROPE_DIM
        row = spec.num_q_heads * (self._head_dim + nope + self._v_head_dim) + MLA_KV_LORA_RANK + MLA_ROPE_DIM
        most = limits.max_batch_size * limits.max_seqlen
        self.rows = min(max(LEAST_ROWS, WORKSPACE_BYTES // (row * spec.dtype.itemsize)), most)
        rows = max(self.rows, limits.max_num_tokens)  # new tokens that no chunk holds are keys, too
        self._keys = torch.empty(rows, spec.num_q_heads, self._head_dim, dtype=spec.dtype, device=device)
        sizes: dict[str, Any] = {"max_num_tokens": limits.max_num_tokens, "max_batch_size": limits.max_batch_size}
        group: dict[str, Any] = {"num_q_heads": spec.num_q_heads, "num_kv_heads": spec.num_q_heads, "device": device}
        group["head_dim"] = max(self._head_dim, self._v_head_dim)
        group["split_keys"] = not spec.deterministic
        self._causal = FmhaPlan.allocate(**sizes, **group, causal=True)
        self._spare: list[FmhaPlan] = []  # of chunks: a step has as many as it needs, made once
        self._make_plan = lambda: FmhaPlan.allocate(**sizes, **group, causal=False)
        self._step: PrefillStep | None = None

    def begin(self) -> None:
        """A new step: what was made for the last one is out of date."""
        self._step = None

    def takes_absorbed(self, batch: AttentionBatch) -> bool:
        """The rule of the module's text. Host numbers alone."""
        if batch.is_uniform or batch.forward_mode is ForwardMode.IDLE or self._reason_against() or not batch.batch_size:
            return True
        saved = (2 * MLA_KV_LORA_RANK + MLA_ROPE_DIM) - (self._head_dim + self._v_head_dim)
        projection = MLA_KV_LORA_RANK * (self._head_dim - MLA_ROPE_DIM + self._v_head_dim)
        return batch.num_tokens * saved < batch.batch_size * projection

    def attend(self, call: LayerCall, step: PagedStep, report: Tensor | None) -> None:
        """Serves a layer.

        Raises:
            ValueError: the step or the model cannot be served without absorbed queries: says why.
        """
        layer, batch, up = call.layer, call.batch, call.layer.up_projection
        reason = "a uniform step" if batch.is_uniform else self._reason_against()
        if reason:
            raise ValueError(f"attnops: queries of {reason} must come absorbed (RadixAttention.takes_absorbed says so)")
        assert up is not None
        if (up.head_dim, up.v_head_dim) != self._spec.up_head_dims:
            got = (up.head_dim, up.v_head_dim)
            raise ValueError(
                f"attnops: layer {layer.layer_id} projects to {got}, the backend was built for "
                f"up_head_dims {self._spec.up_head_dims}"
            )
        if call.q_rope is not None:
            raise ValueError("attnops: unabsorbed queries hold their rotary part, q_rope must be None")
        if call.save_kv_cache and call.k is not None:
            store_mla(layer, batch, call.k, call.k_rope, report)
        if self._step is None:
            self._step = self._plan(batch, step)
        plan, q = self._step, heads("q", call.q, layer.num_heads, self._head_dim)
        out = heads("out", call.out, layer.num_heads, self._v_head_dim)
        options: dict[str, Any] = {"softmax_scale": layer.scaling, "logit_cap": layer.logit_cap, "report": report}
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if plan.new is not None and plan.parts else None
        if plan.new is not None:
            k, v = self._keys_of(layer, *self._new_latents(call))
            ops.fmha_varlen(q, k, v, plan.cu_seqlens_q, plan.cu_seqlens_q, plan.new, out=out, lse=lse, **options)
        for part in plan.parts:
            k, v = self._keys_of(layer, *self._cached_latents(layer, batch, part.slots))
            bounds = (plan.cu_seqlens_q, part.cu_seqlens_k)
            if lse is None:
                ops.fmha_varlen(q, k, v, *bounds, part.plan, causal=True, out=out, **options)
                continue
            part_out, part_lse = ops.fmha_varlen(q, k, v, *bounds, part.plan, causal=False, return_lse=True, **options)
            assert part_lse is not None
            ops.merge_state(out, lse, part_out, part_lse, out=out, lse=lse)

    def _reason_against(self) -> str:
        """Which models are served with absorbed queries only; empty: this one is not."""
        spec = self._spec
        if spec.deterministic:
            return "a batch-invariant model, whose sums must not depend on where chunks end,"
        if spec.has_sinks or spec.sliding_window_size >= 0:
            return "a model with sinks or a window"
        return ""

    def _plan(self, batch: AttentionBatch, step: PagedStep) -> PrefillStep:
        """Which cached tokens meet the queries when. Shapes are the host's, contents the device's."""
        assert step.cu_seqlens_q is not None and batch.extend_seq_lens is not None
        bound = min(batch.max_cache_seqlen or self._limits.max_seqlen, self._limits.max_seqlen)
        every = batch.batch_size * bound
        prefix = every if batch.max_prefix_tokens is None else min(batch.max_prefix_tokens, every)
        every = min(every, prefix + batch.num_tokens)
        if prefix > 0 and every <= self.rows:
            ops.fmha_plan(self._causal, step.cu_seqlens_q, cache_seqlens=batch.cache_seqlens)
            return PrefillStep(
                step.cu_seqlens_q, None, self._parts(batch, step, batch.cache_seqlens, [self._causal], every)
            )
        ops.fmha_plan(self._causal, step.cu_seqlens_q)
        plans = self._chunk_plans(-(-prefix // self.rows))
        lens = batch.cache_seqlens - batch.extend_seq_lens
        return PrefillStep(step.cu_seqlens_q, self._causal, self._parts(batch, step, lens, plans, prefix))

    def _parts(
        self, batch: AttentionBatch, step: PagedStep, lens: Tensor, plans: list[FmhaPlan], bound: int
    ) -> list[Part]:
        """The first `lens` tokens of each request, at most `bound` in all, cut into a part per plan."""
        assert batch.req_to_token is not None and step.cu_seqlens_q is not None
        bounds = torch.nn.functional.pad(lens.clamp(min=0).long().cumsum(0), (1, 0))
        parts = []
        for i, plan in enumerate(plans):
            first = i * self.rows
            row = torch.arange(first, min(first + self.rows, bound), device=bounds.device)
            cu_seqlens_k = (bounds - first).clamp(0, row.numel()).to(torch.int32)
            request = (torch.searchsorted(bounds, row, right=True) - 1).clamp(0, batch.batch_size - 1)
            token = (row - bounds[request]).clamp(0, batch.req_to_token.shape[1] - 1)
            slots = batch.req_to_token[batch.req_pool_indices[request].long(), token].long()
            if plan is not self._causal:
                ops.fmha_plan(plan, step.cu_seqlens_q, cu_seqlens_k)
            parts.append(Part(plan, cu_seqlens_k, slots))
        return parts

    def _chunk_plans(self, count: int) -> list[FmhaPlan]:
        while len(self._spare) < count:
            self._spare.append(dataclasses.replace(self._make_plan(), partial=self._causal.partial))
        return self._spare[:count]

    def _keys_of(self, layer: RadixAttention, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latents ``[n, 512]`` and rotary parts ``[n, 64]``; the keys in the workspace."""
        assert layer.up_projection is not None
        k_nope, v = layer.up_projection.project(latent)
        k = self._keys[: latent.shape[0]]
        nope = self._head_dim - MLA_ROPE_DIM
        k[..., :nope].copy_(heads("k_nope", k_nope, layer.num_heads, nope))
        k[..., nope:].copy_(k_pe.unsqueeze(1).expand(-1, layer.num_heads, -1))
        return k, heads("v", v, layer.num_heads, self._v_head_dim)

    def _new_latents(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """The step's own: as they came, or as an FP8 cache has rounded them, so that every step sees the same ones."""
        assert call.batch.out_cache_loc is not None
        if call.k is None or self._spec.cache_dtype != self._spec.dtype:
            return self._cached_latents(call.layer, call.batch, call.batch.out_cache_loc.long())
        rows = call.k.view(call.k.shape[0], -1)
        if call.k_rope is not None:
            return rows, call.k_rope.reshape(rows.shape[0], -1)
        return rows[:, :MLA_KV_LORA_RANK], rows[:, MLA_KV_LORA_RANK:]

    def _cached_latents(self, layer: RadixAttention, batch: AttentionBatch, slots: Tensor) -> tuple[Tensor, Tensor]:
        pool, dtype = batch.token_to_kv_pool, self._spec.dtype
        assert isinstance(pool, MLATokenToKVPool), "store_mla and the decode ops take no other"
        pages = pool.get_latent_buffer(layer.layer_id)
        slots = slots.clamp(0, pool.num_pages * pool.page_size - 1)
        stored = pages.view(torch.uint8) if pages.dtype in FP8 else pages  # torch indexes FP8 not on every device
        rows = stored[slots // pool.page_size, slots % pool.page_size]
        if pages.dtype == torch.uint8:
            rows = unpack_mla_fp8_rows(rows, torch.float32).to(dtype)
        elif pages.dtype in FP8:
            scale = 1.0 if layer.k_scale is None else layer.k_scale
            rows = (rows.view(pages.dtype).float() * scale).to(dtype)
        return rows[:, :MLA_KV_LORA_RANK], rows[:, MLA_KV_LORA_RANK:]
