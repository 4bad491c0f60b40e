"""FlashInfer's wrappers as a backend, for those who trust them: the package `flashinfer-python`, planned on the host.

A step is planned when its first layer of a kind runs. Layers are of one kind when window, scale and soft cap are equal.
The plan reads the lengths that the batch brings on the CPU. Pages are FlashInfer's own pages, so no table is widened.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import AttentionBackend, LayerCall, is_causal
from attnops.backends.capability import DECODER_MODES, SIXTEEN_BIT, Capability, HeadDims
from attnops.backends.prepared import PreparedStep
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import FP8, heads, store_kv, store_mla, uses_window_slots
from attnops.environment import FLASHINFER_TENSOR_CORE, FLASHINFER_WORKSPACE, FLASHINFER_WORKSPACE_OWN
from attnops.graph_buffers import PagedBuffers, PagedStep
from attnops.layers.radix_attention import RadixAttention
from attnops.pools import MLATokenToKVPool
from attnops.types import MLA_KV_LORA_RANK, AttentionBatch, AttentionSpec, AttentionType, Limits

WORKSPACE_BYTES = 384 * 2**20
MERGED_FROM_TOKENS = 4096  # new tokens of a step from which cached prefixes are attended to apart: SGLang's
LEAST_GROUP_OF_TENSOR_CORES = 4  # query heads per KV head; below, FlashInfer's CUDA cores are as fast

_CAPABILITY = Capability(
    devices=frozenset({"cuda"}),
    package="flashinfer",
    compiles_at_run_time=True,
    needs_cpu_seq_lens=True,
    untested_on_hardware=True,
    modes=DECODER_MODES,
    attn_types=frozenset({AttentionType.DECODER, AttentionType.ENCODER_ONLY}),
    dtypes=SIXTEEN_BIT,
    kv_dtypes=frozenset({torch.float8_e4m3fn}),
    head_dims=HeadDims(pairs=frozenset({(64, 64), (128, 128), (256, 256)})),
    mla=True,
    sliding_window=True,
    swa_pool=True,
    logit_cap=True,
)


@dataclass
class FlashInferStep:
    """A step: its metadata, its lengths on the host, and the layer kinds that are planned for it.

    Attributes:
        prefixes: Pages before the new tokens: bounds, and tokens in each last page; None where nothing is cached.
        merged: The new tokens and their prefixes are attended to apart.
    """

    paged: PagedStep
    bounds_q: Tensor
    bounds_k: Tensor
    last_page_len: Tensor
    seqlens_k: Tensor
    prefixes: tuple[Tensor, Tensor] | None = None
    merged: bool = False
    planned: set[tuple[Any, ...]] = field(default_factory=set)


@register_attention_backend("flashinfer")
class FlashInferAttnBackend(AttentionBackend):
    """Decode, extend, verify of chains, and encoders.

    Args:
        workspace_size: Bytes of the workspace that all wrappers share; None: what the environment says, else 384 MB.

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
    ) -> None:
        super().__init__(spec, limits, device)
        if spec.is_mla and (spec.sliding_window_size >= 0 or spec.logit_cap or spec.cache_dtype != spec.dtype):
            raise NotImplementedError(
                "attnops: backend flashinfer serves MLA without windows and soft cap, over a cache of q's dtype"
            )
        self._flashinfer = import_flashinfer()
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        size = workspace_size or FLASHINFER_WORKSPACE.value() or FLASHINFER_WORKSPACE_OWN.value() or WORKSPACE_BYTES
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._buffers = PagedBuffers(spec, limits, self.device)
        self._has_cache = spec.attn_type is not AttentionType.ENCODER_ONLY
        cells = limits.max_batch_size * limits.max_pages(spec.page_size) if self._has_cache else 0
        # By whether slots are those of a sliding-window pool.
        self._indices = {w: torch.zeros(cells, dtype=torch.int32, device=self.device) for w in (False, True)}
        self._prefix_indices = torch.zeros(cells, dtype=torch.int32, device=self.device)
        self._indptr = torch.zeros(limits.max_batch_size + 1, dtype=torch.int32, device=self.device)
        group = spec.num_q_heads // spec.num_kv_heads
        chosen = FLASHINFER_TENSOR_CORE.value()
        by_rule = spec.cache_dtype in FP8 or group >= LEAST_GROUP_OF_TENSOR_CORES
        self._use_tensor_cores = by_rule if chosen is None else chosen
        self._prepared: PreparedStep[FlashInferStep] = PreparedStep()

    @property
    def fault_report(self) -> Tensor | None:
        return self._buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        if in_capture:
            raise NotImplementedError(
                "attnops: backend flashinfer plans on the host, so its steps are not captured whole; use SegmentRunner "
                "or PiecewiseRunner"
            )
        seqlens_q, seqlens_k = self._lengths(batch)
        page_size = self.spec.page_size
        step = FlashInferStep(
            self._buffers.step(batch), _cumulative(seqlens_q), *_paging(seqlens_k, page_size), _int32(seqlens_k)
        )
        if not batch.is_uniform and not self.spec.is_mla:
            cached = [k - q for q, k in zip(seqlens_q, seqlens_k)]
            step.prefixes = _paging(cached, page_size) if any(cached) else None
            step.merged = step.prefixes is not None and batch.num_tokens >= MERGED_FROM_TOKENS
        self._prepared.begin(batch, step)

    def _lengths(self, batch: AttentionBatch) -> tuple[list[int], list[int]]:
        """New tokens and all tokens of each request, from the host's copies."""
        if batch.num_tokens == 0:
            return [], []
        missing = [] if batch.cache_seqlens_cpu is not None else ["cache_seqlens_cpu"]
        if not batch.is_uniform and batch.extend_seq_lens_cpu is None:
            missing.append("extend_seq_lens_cpu")
        if missing:
            raise ValueError(
                f"attnops: backend flashinfer plans on the host and needs {' and '.join(missing)} in the batch; "
                "nothing is copied from the device in silence"
            )
        assert batch.cache_seqlens_cpu is not None
        seqlens_k = batch.cache_seqlens_cpu.tolist()
        if batch.is_uniform:
            return [batch.tokens_per_request] * batch.batch_size, seqlens_k
        assert batch.extend_seq_lens_cpu is not None
        return batch.extend_seq_lens_cpu.tolist(), seqlens_k

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0:
            return
        self._buffers.build(step.paged, batch)
        if not self._has_cache:
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
                kv_indptr=self._indptr[: batch.batch_size + 1],
                kv_indices=self._indices[windowed],
                slot_map=slot_map,
                report=self._buffers.report,
            )
        if step.merged:
            assert batch.extend_seq_lens is not None, "a ragged step has them"
            size = batch.batch_size
            ops.build_kv_indices(
                batch.req_to_token,
                batch.req_pool_indices,
                batch.cache_seqlens - batch.extend_seq_lens,
                self.spec.page_size,
                kv_indptr=torch.empty_like(self._indptr[: size + 1]),
                kv_indices=self._prefix_indices,
                report=self._buffers.report,
            )

    def attend(self, call: LayerCall) -> None:
        step = self._prepared.of(call.batch)
        if call.batch.tree_mask is not None:
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
        pool = batch.token_to_kv_pool
        assert pool is not None, "PagedBuffers.build has checked"
        if call.save_kv_cache and call.k is not None:
            if call.v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, call.k, call.v, self._buffers.report)
        windowed = uses_window_slots(layer, pool)
        options: dict[str, Any] = {"out": heads("out", call.out, layer.num_heads, layer.v_head_dim)}
        if pool.dtype in FP8:
            options |= {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        q = heads("q", call.q, layer.num_heads, layer.head_dim)
        if self._attends_to_new_tokens_apart(call, step):
            self._attend_ragged(call, step, q, options)
            return
        plan = self._plan_decode if batch.forward_mode.is_decode() else self._plan_extend
        plan(step, layer, windowed).run(q, pool.get_kv_buffer(layer.layer_id), **options)

    def _shared(self, layer: RadixAttention) -> dict[str, Any]:
        """What every plan of a layer says."""
        return {
            "window_left": layer.sliding_window_size,
            "logits_soft_cap": layer.logit_cap or None,
            "sm_scale": layer.scaling,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.cache_dtype,
        }

    def _wrapper(self, step: FlashInferStep, key: tuple[Any, ...], kind: Any, *arguments: str, **options: bool) -> Any:
        """The wrapper of a layer kind, about to be planned for a step: made once, it has buffers of its own."""
        if key not in self._wrappers:
            self._wrappers[key] = kind(self._workspace, *arguments, **options)
        step.planned.add(key)
        return self._wrappers[key]

    def _plan_decode(self, step: FlashInferStep, layer: RadixAttention, windowed: bool) -> Any:
        key = ("decode", layer.sliding_window_size, layer.scaling, layer.logit_cap, windowed)
        if key not in step.planned:
            kind = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
            wrapper = self._wrapper(step, key, kind, "NHD", use_tensor_cores=self._use_tensor_cores)
            wrapper.plan(
                step.bounds_k,
                self._indices[windowed],
                step.last_page_len,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                self.spec.page_size,
                **self._shared(layer),
            )
        return self._wrappers[key]

    def _plan_extend(self, step: FlashInferStep, layer: RadixAttention, windowed: bool) -> Any:
        key = ("extend", layer.sliding_window_size, layer.scaling, layer.logit_cap, windowed)
        if key not in step.planned:
            wrapper = self._wrapper(step, key, self._flashinfer.BatchPrefillWithPagedKVCacheWrapper, "NHD")
            wrapper.plan(
                step.bounds_q,
                step.bounds_k,
                self._indices[windowed],
                step.last_page_len,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                self.spec.page_size,
                causal=is_causal(layer),
                **self._shared(layer),
            )
        return self._wrappers[key]

    def _attends_to_new_tokens_apart(self, call: LayerCall, step: FlashInferStep) -> bool:
        """Prompts without a cached prefix, and long extensions of one: SGLang's rule.

        A window is one over all keys, and an FP8 cache rounds keys that later tokens see rounded: then all from pages.
        """
        brings_keys = call.save_kv_cache and call.k is not None and call.v is not None
        whole = call.layer.sliding_window_size >= 0 or self.spec.cache_dtype in FP8
        if call.batch.is_uniform or not brings_keys or whole:
            return False
        return step.prefixes is None or step.merged

    def _attend_ragged(self, call: LayerCall, step: FlashInferStep, q: Tensor, options: dict[str, Any]) -> None:
        """New tokens from k and v, and what is cached from pages; both are merged by their lse."""
        layer, pool = call.layer, call.batch.token_to_kv_pool
        assert call.k is not None and call.v is not None and pool is not None
        k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)
        v = heads("v", call.v, layer.num_kv_heads, layer.v_head_dim)
        ragged = self._plan_ragged(step, layer, "ragged", is_causal(layer))
        if step.prefixes is None:
            ragged.run(q, k, v, out=options["out"])
            return
        key = ("prefix", layer.scaling, layer.logit_cap)
        if key not in step.planned:
            wrapper = self._wrapper(step, key, self._flashinfer.BatchPrefillWithPagedKVCacheWrapper, "NHD")
            shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, self.spec.page_size)
            bounds, last = step.prefixes
            paging = (step.bounds_q, bounds, self._prefix_indices, last)
            wrapper.plan(*paging, *shape, causal=False, **self._shared(layer))
        pages, out = pool.get_kv_buffer(layer.layer_id), options.pop("out")
        cached = self._wrappers[key].run(q, pages, return_lse=True, **options)
        merged, _ = self._flashinfer.merge_state(*ragged.run(q, k, v, return_lse=True), *cached)
        out.copy_(merged)

    def _plan_ragged(self, step: FlashInferStep, layer: RadixAttention, kind: str, causal: bool) -> Any:
        key = (kind, layer.sliding_window_size, layer.scaling, layer.logit_cap)
        if key not in step.planned:
            wrapper = self._wrapper(step, key, self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper, "NHD")
            shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
            options = self._shared(layer) | {"kv_data_type": self.spec.dtype}
            wrapper.plan(step.bounds_q, step.bounds_q, *shape, causal=causal, **options)
        return self._wrappers[key]

    def _encode(self, call: LayerCall, step: FlashInferStep) -> None:
        layer = call.layer
        if call.k is None or call.v is None:
            raise ValueError("attnops: an encoder's layer needs k and v")
        self._plan_ragged(step, layer, "encode", False).run(
            heads("q", call.q, layer.num_heads, layer.head_dim),
            heads("k", call.k, layer.num_kv_heads, layer.head_dim),
            heads("v", call.v, layer.num_kv_heads, layer.v_head_dim),
            out=heads("out", call.out, layer.num_heads, layer.v_head_dim),
        )

    def _attend_mla(self, call: LayerCall, step: FlashInferStep) -> None:
        layer, pool = call.layer, call.batch.token_to_kv_pool
        if not isinstance(pool, MLATokenToKVPool):
            raise ValueError(f"attnops: an MLA layer reads an MLATokenToKVPool, the batch has a {type(pool).__name__}")
        if call.save_kv_cache and call.k is not None:
            store_mla(layer, call.batch, call.k, call.k_rope, self._buffers.report)
        key = ("mla", layer.scaling)
        if key not in step.planned:
            wrapper = self._wrapper(step, key, self._flashinfer.mla.BatchMLAPagedAttentionWrapper)
            wrapper.plan(
                step.bounds_q.to(self.device),
                step.bounds_k.to(self.device),
                self._indices[False],
                step.seqlens_k.to(self.device),
                layer.num_heads,
                MLA_KV_LORA_RANK,
                pool.qk_rope_head_dim,
                self.spec.page_size,
                is_causal(layer),
                layer.scaling,
                self.spec.dtype,
                pool.dtype,
            )
        rope = pool.qk_rope_head_dim
        if call.q_rope is None:
            whole = heads("q", call.q, layer.num_heads, layer.head_dim)
            q_nope, q_pe = whole[..., :MLA_KV_LORA_RANK], whole[..., MLA_KV_LORA_RANK:]
        else:
            q_nope = heads("q", call.q, layer.num_heads, MLA_KV_LORA_RANK)
            q_pe = heads("q_rope", call.q_rope, layer.num_heads, rope)
        latents = pool.get_latent_buffer(layer.layer_id)
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        parts = (latents[..., :MLA_KV_LORA_RANK], latents[..., MLA_KV_LORA_RANK:])
        self._wrappers[key].run(q_nope, q_pe, *parts, out=out)


def _cumulative(lengths: list[int]) -> Tensor:
    return _int32([0, *itertools.accumulate(lengths)])


def _paging(lengths: list[int], page_size: int) -> tuple[Tensor, Tensor]:
    """Bounds of each request's pages, and the tokens in its last one."""
    pages = [-(-length // page_size) for length in lengths]
    return _cumulative(pages), _int32(n - (p - 1) * page_size if p else 0 for n, p in zip(lengths, pages))


def _int32(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def import_flashinfer() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed; says what to install and what runs meanwhile.
    """
    try:
        module = importlib.import_module("flashinfer")
        importlib.import_module("flashinfer.mla")
    except ImportError as error:
        raise ImportError(
            f"attnops: backend flashinfer needs the package flashinfer-python: pip install attnops[flashinfer] "
            f"({error}). Without it select_backend takes the next that serves the model"
        ) from error
    return module
