"""FlashInfer's wrappers as a backend, for those who trust them: the package `flashinfer-python`, planned on the host.

A step is planned when its first layer of a kind runs; a captured one, before each replay (`flashinfer_plans.py`).
Layers are of one kind when window, scale and soft cap are equal: of a window model there are two. The plan reads the
lengths that the batch brings on the CPU. Pages are FlashInfer's own pages, so no table is widened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import DECODE, AttentionBackend, LayerCall, is_causal
from attnops.backends.capability import DECODER_MODES, SIXTEEN_BIT, Capability, HeadDims
from attnops.backends.flashinfer_calls import record_run, repeats
from attnops.backends.flashinfer_drafts import FlashInferDrafts, paging
from attnops.backends.flashinfer_plans import (
    FlashInferStep,
    Key,
    Wrappers,
    latent_key,
    make_step,
    paged_key,
    workspace_bytes,
)
from attnops.backends.prepared import PreparedStep
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import FP8, heads, store_kv, store_mla, uses_window_slots
from attnops.graph_buffers import PagedBuffers
from attnops.layers.radix_attention import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool
from attnops.types import MLA_KV_LORA_RANK, AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits, TokenPool

MERGED_FROM_TOKENS = 4096  # new tokens of a step from which cached prefixes are attended to apart: SGLang's

_CAPABILITY = Capability(
    devices=frozenset({"cuda"}),
    needs_cuda_kernels=False,
    package="flashinfer",
    compiles_at_run_time=True,
    needs_cpu_seq_lens=True,
    modes=DECODER_MODES,
    attn_types=frozenset(AttentionType),
    dtypes=SIXTEEN_BIT,
    kv_dtypes=frozenset({torch.float8_e4m3fn}),
    head_dims=HeadDims(pairs=frozenset({(64, 64), (128, 128), (256, 256)})),
    mla=True,
    mla_lacks=frozenset({"sliding_window", "logit_cap", "kv_dtypes", "deterministic"}),
    sliding_window=True,
    swa_pool=True,
    logit_cap=True,
    deterministic=True,
    deterministic_modes=frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE}),
    draft_trees=True,
    draft_windows=True,
    cuda_graph=True,
)


_STORE = torch.ops.attnops.store_kv.default


@dataclass(slots=True)
class _BoundLayer:
    """What a layer brings to every step alike, until its `version` or its pool's buffers change.

    Attributes:
        pages: What the wrapper takes them as: K and V, or the two parts of latents.
        options: Scales of an FP8 cache, for `run`.
        keys: Of the wrappers that serve it: in DECODE, and in other steps.
        repeats: Its calls are those of every layer with its key: it has no scales of its own.
        widths: Of q and out, heads side by side.
        stores: K and V go into `pages` by the op itself; False: by `store_kv`.
    """

    version: int
    pool: TokenPool
    buffers_version: int
    windowed: bool
    pages: tuple[Tensor, Tensor]
    options: dict[str, Any]
    keys: tuple[Key, Key]
    repeats: bool
    widths: tuple[int, int]
    stores: bool


@register_attention_backend("flashinfer")
class FlashInferAttnBackend(AttentionBackend):
    """Decode, branches of a draft loop, extend, verify of chains, and encoders.

    Args:
        workspace_size: Bytes of the workspace that all wrappers share; None: what the environment says, else 384 MB.
            Deterministic: 2048 MB.
        model_architectures: As in a model's configuration. Some (Qwen2, Qwen3, Qwen3-VL, MiMo) have 512 MB.

    Raises:
        ImportError: flashinfer-python is not installed.
    """

    capability = _CAPABILITY
    needs_cpu_seq_lens = True

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cuda",
        *,
        workspace_size: int | None = None,
        model_architectures: Sequence[str] = (),
    ) -> None:
        super().__init__(spec, limits, device)
        if spec.attn_type is AttentionType.DECODER_BIDIRECTIONAL and spec.sliding_window_size >= 0:
            raise NotImplementedError("attnops: backend flashinfer has windows to the left of a token only")
        self._buffers = PagedBuffers(spec, limits, self.device)
        self._has_cache = spec.attn_type is not AttentionType.ENCODER_ONLY
        cells = limits.max_batch_size * limits.max_pages(spec.page_size) if self._has_cache else 0
        # By whether slots are those of a sliding-window pool.
        self._indices = {w: torch.zeros(cells, dtype=torch.int32, device=self.device) for w in (False, True)}
        self._prefix_indices = torch.zeros(cells, dtype=torch.int32, device=self.device)
        self._indptr = torch.zeros(limits.max_batch_size + 1, dtype=torch.int32, device=self.device)
        if workspace_size is not None and workspace_size < 1:
            raise ValueError(f"attnops: backend flashinfer: workspace_size must be 1 or more, got {workspace_size}")
        size = workspace_size or workspace_bytes(spec, model_architectures)
        self.wrappers = Wrappers(spec, limits, self.device, size, self._indices, self._prefix_indices)
        self._drafts: FlashInferDrafts | None = None  # of draft steps, made at the first one
        self._prepared: PreparedStep[FlashInferStep] = PreparedStep()
        self._bound: dict[RadixAttention, _BoundLayer] = {}  # by layer, not by id: two models may take turns
        self._is_mla = spec.is_mla
        self._repeats = repeats(self.wrappers.flashinfer)

    @property
    def fault_report(self) -> Tensor | None:
        return self._buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        if self.spec.deterministic and not batch.is_uniform and batch.num_tokens:
            raise NotImplementedError(
                "attnops: backend flashinfer is not batch-invariant in ragged steps: tiles depend on the batch"
            )
        lengths: tuple[Tensor | int, Tensor] = self._placeholders(batch) if in_capture else self._lengths(batch)
        seqlens_q, seqlens_k = lengths
        step = make_step(self._buffers.step(batch), seqlens_q, seqlens_k, self.spec.page_size)
        step.graph = self.wrappers.graph_of(batch, in_capture)
        if batch.draft_steps and batch.num_tokens:
            if self._drafts is None:
                shared = (self.spec, self.limits, self.device, self.wrappers)
                self._drafts = FlashInferDrafts(*shared, self._indices[False])
            step.drafts = self._drafts.stages(batch, seqlens_k, step.graph)
        if step.graph is not None:
            self.wrappers.plan_graph(step)
        elif not batch.is_uniform and not self.spec.is_mla:
            cached = seqlens_k - seqlens_q
            step.prefixes = paging(cached, self.spec.page_size) if bool(cached.any()) else None
            step.merged = step.prefixes is not None and batch.num_tokens >= MERGED_FROM_TOKENS
        self._prepared.begin(batch, step)

    def _placeholders(self, batch: AttentionBatch) -> tuple[int, Tensor]:
        """Lengths of a step that is captured, once: a plan for the most queries holds for fewer."""
        most = batch.tokens_per_request if batch.is_uniform else batch.max_seqlen_q
        return most, batch.cache_seqlens.cpu()

    def _lengths(self, batch: AttentionBatch) -> tuple[Tensor | int, Tensor]:
        """New tokens and all tokens of each request, from the host's copies."""
        if batch.num_tokens == 0:
            return 0, torch.zeros(0, dtype=torch.int32)
        missing = [] if batch.cache_seqlens_cpu is not None else ["cache_seqlens_cpu"]
        if not batch.is_uniform and batch.extend_seq_lens_cpu is None:
            missing.append("extend_seq_lens_cpu")
        if missing:
            raise ValueError(
                f"attnops: backend flashinfer plans on the host and needs {' and '.join(missing)} in the batch; "
                "nothing is copied from the device in silence"
            )
        assert batch.cache_seqlens_cpu is not None
        seqlens_k = batch.cache_seqlens_cpu.to(torch.int32)
        if batch.is_uniform:
            return batch.tokens_per_request, seqlens_k
        assert batch.extend_seq_lens_cpu is not None
        return batch.extend_seq_lens_cpu.to(torch.int32), seqlens_k

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0:
            return
        self._buffers.build(step.paged, batch)
        if not self._has_cache:
            return
        if step.drafts is not None:
            assert self._drafts is not None
            self._drafts.fill(step.drafts, batch, self._buffers.report)
            return
        assert batch.req_to_token is not None and batch.token_to_kv_pool is not None
        slot_maps = {False: None, True: batch.token_to_kv_pool.slot_map}
        for windowed, slot_map in slot_maps.items():
            if windowed and slot_map is None:
                continue
            ops.build_kv_indices(
                batch.req_to_token,
                batch.req_pool_indices,
                batch.cache_seqlens,
                self.spec.page_size,
                kv_indptr=self._indptr[: batch.batch_size + 1] if step.graph is None else step.graph.bounds_k,
                kv_indices=self._indices[windowed],
                kv_last_page_len=None if step.graph is None else step.graph.last_page_len,
                slot_map=slot_map,
                report=self._buffers.report,
            )
        if step.merged:
            assert batch.extend_seq_lens is not None, "a ragged step has them"
            ops.build_kv_indices(
                batch.req_to_token,
                batch.req_pool_indices,
                batch.cache_seqlens - batch.extend_seq_lens,
                self.spec.page_size,
                kv_indptr=self._indptr[: batch.batch_size + 1],
                kv_indices=self._prefix_indices,
                report=self._buffers.report,
            )

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        *,
        out: Tensor | None = None,
        **ropes: Tensor | None,
    ) -> Tensor:
        """`AttentionBackend.forward`; in one piece where a layer repeats the call of one before it in the step."""
        bound, pool, mla = self._bound.get(layer), batch.token_to_kv_pool, self._is_mla
        if (
            bound is None
            or not bound.repeats
            or bound.pool is not pool
            or bound.version != layer.version
            or bound.buffers_version != pool.buffers_version
            or ropes
            or self._prepared.planned is not batch
            or not batch.tokens_per_request
            or batch.tree_mask is not None
            or batch.multi_item is not None
        ):
            return super().forward(q, k, v, layer, batch, save_kv_cache, out=out, **ropes)
        step = self._prepared.of(batch)
        repeated = step.repeated.get(bound.keys[batch.forward_mode is not DECODE])
        (width, out_width), heads_q, dim = bound.widths, layer.num_heads, layer.head_dim
        if (
            repeated is None
            or q.shape not in ((tokens := repeated.tokens, width), (tokens, heads_q, dim))
            or (v is None and k is not None and not mla)
            or (out is not None and out.shape != (tokens, out_width))
        ):
            return super().forward(q, k, v, layer, batch, save_kv_cache, out=out)
        if out is None:
            out = q.new_empty(tokens, out_width)
        queries = q.view(tokens, heads_q, dim) if q.dim() == 2 else q
        rows = out.view(tokens, heads_q, layer.v_head_dim)
        if mla:
            q_nope, q_pe = queries.split_with_sizes((MLA_KV_LORA_RANK, dim - MLA_KV_LORA_RANK), -1)
            tensors: tuple[Tensor, ...] = (q_nope, q_pe, *bound.pages, rows)
        else:
            tensors = (queries, *bound.pages, rows)
        if not repeated.takes(tensors[0], rows):
            return super().forward(q, k, v, layer, batch, save_kv_cache, out=out)
        if save_kv_cache and k is not None:
            if mla:
                store_mla(layer, batch, k, None, self._buffers.report)
            elif bound.stores and batch.out_cache_loc is not None:
                k = heads("k", k, layer.num_kv_heads, layer.head_dim)
                v = heads("v", v, layer.num_kv_heads, layer.v_head_dim)  # type: ignore[arg-type]
                _STORE(*bound.pages, k, v, batch.out_cache_loc, None, None, self._buffers.report)
            else:
                store_kv(layer, batch, step.paged, k, v, self._buffers.report)  # type: ignore[arg-type]
        repeated(*tensors)
        return out

    def attend(self, call: LayerCall) -> None:
        step = self._prepared.of(call.batch)
        if call.batch.tree_mask is not None and step.drafts is None:
            raise NotImplementedError("attnops: backend flashinfer serves chains, the batch has a tree_mask")
        if self.spec.is_mla:
            self._attend_mla(call, step)
            return
        if call.q_rope is not None or call.k_rope is not None:
            raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
        if call.layer.attn_type is AttentionType.ENCODER_ONLY:
            self._encode(call, step)
            return
        layer, batch = call.layer, call.batch
        if call.save_kv_cache and call.k is not None:
            if call.v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, call.k, call.v, self._buffers.report)
        bound = self._bound_of(layer, batch)
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        q = heads("q", call.q, layer.num_heads, layer.head_dim)
        if step.drafts is not None:
            assert self._drafts is not None
            self._drafts.attend(step, layer, batch, (q,), bound.pages, out, bound.options)
            return
        if not batch.is_uniform and self._attends_to_new_tokens_apart(call, step):
            self._attend_ragged(call, step, q, out, bound)
            return
        decodes = batch.forward_mode.is_decode()
        key, pages = bound.keys[not decodes], bound.pages
        repeated = step.repeated.get(key) if bound.repeats else None
        if repeated is not None and repeated.takes(q, out):
            repeated(q, *pages, out)
            return
        wrapper = step.planned.get(key)
        if wrapper is None:
            planned = self.wrappers.decode if decodes else self.wrappers.extend
            wrapper = planned(step, layer, bound.windowed)
        if bound.repeats and key not in step.repeated:
            step.repeated[key] = record_run(wrapper, lambda: wrapper.run(q, pages, out=out), (q, *pages, out))
        else:
            wrapper.run(q, pages, out=out, **bound.options)

    def _bound_of(self, layer: RadixAttention, batch: AttentionBatch) -> _BoundLayer:
        bound, pool = self._bound.get(layer), batch.token_to_kv_pool
        assert pool is not None, "PagedBuffers.build has checked"
        if (
            bound is not None
            and bound.version == layer.version
            and bound.pool is pool
            and bound.buffers_version == pool.buffers_version
        ):
            return bound
        options, windowed = {}, uses_window_slots(layer, pool)
        if self.spec.is_mla:
            if not isinstance(pool, MLATokenToKVPool):
                raise ValueError(
                    f"attnops: an MLA layer reads an MLATokenToKVPool, the batch has a {type(pool).__name__}"
                )
            latents = pool.get_latent_buffer(layer.layer_id)
            pages, keys = (latents[..., :MLA_KV_LORA_RANK], latents[..., MLA_KV_LORA_RANK:]), (latent_key(layer),) * 2
        else:
            if pool.dtype in FP8:
                options = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
            pages = pool.get_kv_buffer(layer.layer_id)
            keys = (paged_key(layer, windowed, True), paged_key(layer, windowed, False))
        again = self._repeats and all(scale is None for scale in options.values())
        widths = (layer.num_heads * layer.head_dim, layer.num_heads * layer.v_head_dim)
        stores = type(pool).__dict__.get("set_kv_buffer") is MHATokenToKVPool.set_kv_buffer
        known = (layer.version, pool, pool.buffers_version)
        bound = _BoundLayer(*known, windowed, pages, options, keys, again, widths, stores)
        self._bound[layer] = bound
        return bound

    def _attends_to_new_tokens_apart(self, call: LayerCall, step: FlashInferStep) -> bool:
        """Prompts without a cached prefix, and long extensions of one: SGLang's rule.

        A window is one over all keys, and an FP8 cache rounds keys that later tokens see rounded: then all from pages.
        """
        brings_keys = call.save_kv_cache and call.k is not None and call.v is not None
        whole = call.layer.sliding_window_size >= 0 or self.spec.cache_dtype in FP8 or self.spec.deterministic
        if step.graph is not None or not is_causal(call.layer) or not brings_keys or whole:
            return False
        return step.prefixes is None or step.merged

    def _attend_ragged(self, call: LayerCall, step: FlashInferStep, q: Tensor, out: Tensor, bound: _BoundLayer) -> None:
        """New tokens from k and v, and what is cached from pages; both are merged by their lse."""
        layer = call.layer
        assert call.k is not None and call.v is not None
        k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)
        v = heads("v", call.v, layer.num_kv_heads, layer.v_head_dim)
        ragged = self.wrappers.ragged(step, layer, is_causal(layer))
        if step.prefixes is None:
            ragged.run(q, k, v, out=out)
            return
        cached = self.wrappers.prefix(step, layer).run(q, bound.pages, return_lse=True, **bound.options)
        _, lse = ragged.run(q, k, v, out=out, return_lse=True)
        self.wrappers.flashinfer.merge_state_in_place(out, lse, *cached)

    def _encode(self, call: LayerCall, step: FlashInferStep) -> None:
        layer = call.layer
        if call.k is None or call.v is None:
            raise ValueError("attnops: an encoder's layer needs k and v")
        self.wrappers.ragged(step, layer, False).run(
            heads("q", call.q, layer.num_heads, layer.head_dim),
            heads("k", call.k, layer.num_kv_heads, layer.head_dim),
            heads("v", call.v, layer.num_kv_heads, layer.v_head_dim),
            out=heads("out", call.out, layer.num_heads, layer.v_head_dim),
        )

    def _attend_mla(self, call: LayerCall, step: FlashInferStep) -> None:
        layer = call.layer
        bound = self._bound_of(layer, call.batch)
        if call.save_kv_cache and call.k is not None:
            store_mla(layer, call.batch, call.k, call.k_rope, self._buffers.report)
        if call.q_rope is None:
            whole = heads("q", call.q, layer.num_heads, layer.head_dim)
            q_nope, q_pe = whole.split_with_sizes((MLA_KV_LORA_RANK, layer.head_dim - MLA_KV_LORA_RANK), -1)
        else:
            q_nope = heads("q", call.q, layer.num_heads, MLA_KV_LORA_RANK)
            q_pe = heads("q_rope", call.q_rope, layer.num_heads, layer.head_dim - MLA_KV_LORA_RANK)
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        if step.drafts is not None:
            assert self._drafts is not None
            self._drafts.attend(step, layer, call.batch, (q_nope, q_pe), bound.pages, out, {})
            return
        key, tensors = bound.keys[0], (q_nope, q_pe, *bound.pages, out)
        repeated = step.repeated.get(key) if bound.repeats else None
        if repeated is not None and repeated.takes(q_nope, out):
            repeated(*tensors)
            return
        wrapper = step.planned.get(key)
        if wrapper is None:
            wrapper = self.wrappers.mla(step, layer, bound.pool.dtype)
        if bound.repeats and key not in step.repeated:
            step.repeated[key] = record_run(wrapper, lambda: wrapper.run(*tensors[:-1], out=out), tensors)
        else:
            wrapper.run(*tensors[:-1], out=out)
