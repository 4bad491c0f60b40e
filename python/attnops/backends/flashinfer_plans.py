"""FlashInfer's wrappers and their plans, for `flashinfer.py`: one wrapper per kind of layer, and per captured shape.

A plan is host work over the host's lengths. Eager, a kind is planned when the first of its layers runs. A graph replays
no Python. So the wrappers that it holds are planned before it is replayed, all that its capture met.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnops.backends.capability import SIXTEEN_BIT
from attnops.backends.flashinfer_calls import RepeatedRun
from attnops.backends.flashinfer_drafts import PlannedStages, Stage, cumulative, paging
from attnops.backends.store import FP8
from attnops.environment import (
    FLASHINFER_DECODE_SPLIT_TILE,
    FLASHINFER_PREFILL_SPLIT_TILE,
    FLASHINFER_TENSOR_CORE,
    FLASHINFER_WORKSPACE,
    FLASHINFER_WORKSPACE_OWN,
)
from attnops.graph_buffers import PagedStep
from attnops.layers.radix_attention import RadixAttention
from attnops.types import MLA_KV_LORA_RANK, AttentionBatch, AttentionSpec, AttentionType, Limits

MIB = 2**20
WORKSPACE_BYTES = 384 * MIB
WIDE_WORKSPACE_BYTES = 512 * MIB  # of the architectures below, as in SGLang
DETERMINISTIC_WORKSPACE_BYTES = 2048 * MIB  # fixed splits are many in long requests
WIDE_ARCHITECTURES = frozenset(
    {
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MiMoForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
LEAST_GROUP_OF_TENSOR_CORES = 4  # query heads per KV head; below, FlashInfer's CUDA cores are as fast
DECODE_SPLIT_TILE = 2048  # tokens of a split in deterministic mode
PREFILL_SPLIT_TILE = 4096
# Whose kernels serve pages, as in SGLang: they split long keys over blocks, by fixed lengths when asked to, and their
# plans hold in graphs. New tokens apart are left to FlashInfer's choice.
PAGED_KERNELS = "fa2"

Key = tuple[Any, ...]


def workspace_bytes(spec: AttentionSpec, architectures: Iterable[str]) -> int:
    """What the environment says, else as much as the model needs."""
    said = FLASHINFER_WORKSPACE.value() or FLASHINFER_WORKSPACE_OWN.value()
    if said:
        return said
    if spec.deterministic:
        return DETERMINISTIC_WORKSPACE_BYTES
    return WIDE_WORKSPACE_BYTES if WIDE_ARCHITECTURES.intersection(architectures) else WORKSPACE_BYTES


def uses_tensor_cores(spec: AttentionSpec) -> bool:
    """Decode on tensor cores: SGLang's rule, which a variable overrides.

    Raises:
        ValueError: the variable forbids them to a batch-invariant model, whose fixed splits are theirs alone.
    """
    chosen = FLASHINFER_TENSOR_CORE.value()
    if spec.deterministic:
        if chosen is False:
            raise ValueError(
                f"attnops: environment variable {FLASHINFER_TENSOR_CORE.name} must not be 0 beside deterministic=True: "
                "FlashInfer has fixed splits on tensor cores alone"
            )
        return True
    if chosen is not None:
        return chosen
    group = spec.num_q_heads // spec.num_kv_heads
    return spec.cache_dtype in FP8 or (spec.dtype in SIXTEEN_BIT and group >= LEAST_GROUP_OF_TENSOR_CORES)


@dataclass
class GraphBuffers:
    """Of a captured shape: what its wrappers read on the device, and how each is planned.

    Attributes:
        bounds_q, bounds_k: int32 ``[B + 1]``.
        last_page_len, seqlens: int32 ``[B]``.
        plans: By kind of layer; of all that the capture met.
        stages: Those of a draft step's stages, which have bounds of their own.
    """

    bounds_q: Tensor
    bounds_k: Tensor
    last_page_len: Tensor
    seqlens: Tensor
    plans: dict[Key, Callable[[FlashInferStep], None]] = field(default_factory=dict)
    wrappers: dict[Key, Any] = field(default_factory=dict)
    stages: dict[Key, GraphBuffers] = field(default_factory=dict)


@dataclass
class FlashInferStep:
    """A step: its metadata, its lengths on the host, and the layer kinds that are planned for it.

    Attributes:
        bounds_q, bounds_k: Of queries and of pages, on the host.
        num_pages: The last of the second.
        prefixes: Pages before the new tokens: bounds, and tokens in each last page; None where nothing is cached.
        merged: The new tokens and their prefixes are attended to apart.
        graph: The buffers of a captured shape; None: the step is eager.
        planned: The wrapper of each kind of layer that has its plan.
        repeated: How the layers of a kind repeat its first one's call; None: by the wrapper's `run`.
        drafts: The stages of a draft step.
    """

    paged: PagedStep
    bounds_q: Tensor
    bounds_k: Tensor
    last_page_len: Tensor
    seqlens_k: Tensor
    num_pages: int
    prefixes: tuple[Tensor, Tensor] | None = None
    merged: bool = False
    graph: GraphBuffers | None = None
    planned: dict[Key, Any] = field(default_factory=dict)
    repeated: dict[Key, RepeatedRun | None] = field(default_factory=dict)
    drafts: PlannedStages | None = None


def make_step(paged: PagedStep, seqlens_q: Tensor | int, seqlens_k: Tensor, page_size: int) -> FlashInferStep:
    """From lengths on the host: int32 ``[B]``, or one number of queries for all."""
    bounds, last = paging(seqlens_k, page_size)
    if isinstance(seqlens_q, int):
        bounds_q = torch.arange(seqlens_k.shape[0] + 1, dtype=torch.int32) * seqlens_q
    else:
        bounds_q = cumulative(seqlens_q)
    return FlashInferStep(paged, bounds_q, bounds, last, seqlens_k, int(bounds[-1]))


class Wrappers:
    """Every wrapper of a backend, over one workspace.

    Args:
        indices: Page indices, by whether they are those of a sliding-window pool.
        prefix_indices: Those of cached prefixes.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device,
        workspace_size: int,
        indices: dict[bool, Tensor],
        prefix_indices: Tensor,
    ) -> None:
        self.flashinfer = import_flashinfer()
        self._spec, self._device = spec, device
        self.workspace = torch.zeros(workspace_size, dtype=torch.uint8, device=device)
        self._indices, self._prefix_indices = indices, prefix_indices
        self.use_tensor_cores = uses_tensor_cores(spec)
        self._eager: dict[Key, Any] = {}
        self._graphs: dict[Key, GraphBuffers] = {}
        self._limits = limits
        self._copied: torch.cuda.Event | None = None
        decode = FLASHINFER_DECODE_SPLIT_TILE.value() or DECODE_SPLIT_TILE
        prefill = FLASHINFER_PREFILL_SPLIT_TILE.value() or PREFILL_SPLIT_TILE
        self._split_tokens = (decode, prefill)

    # Captured shapes.

    def graph_of(self, batch: AttentionBatch, capture: bool = False) -> GraphBuffers | None:
        """The buffers of a batch's shape, if it was captured or is to be."""
        tokens, drafts = batch.tokens_per_request, (batch.draft_steps, batch.draft_step)
        key = (batch.forward_mode, batch.batch_size, batch.num_tokens, tokens, *drafts)
        if capture and key not in self._graphs:
            self._graphs[key] = self._graph_buffers(batch.batch_size)
        return self._graphs.get(key)

    def stage_buffers(self, graph: GraphBuffers, window: int, sizes: dict[str, int]) -> dict[str, GraphBuffers]:
        """Of a captured draft step's stages for a window, by name. sizes: Their requests."""
        for name, size in sizes.items():
            if (name, window) not in graph.stages:
                graph.stages[name, window] = self._graph_buffers(size)
        return {name: graph.stages[name, window] for name in sizes}

    def _graph_buffers(self, size: int) -> GraphBuffers:
        options = {"dtype": torch.int32, "device": self._device}
        bounds = [torch.zeros(size + 1, **options) for _ in range(2)]  # type: ignore[call-overload]
        lengths = [torch.zeros(size, **options) for _ in range(2)]  # type: ignore[call-overload]
        return GraphBuffers(*bounds, *lengths)

    def plan_graph(self, step: FlashInferStep) -> None:
        """Before a replay: every wrapper that the graph holds is planned with the step's lengths."""
        assert step.graph is not None
        for key, plan in step.graph.plans.items():
            self._run_plan(plan, step)
            step.planned[key] = step.graph.wrappers[key]

    def _run_plan(self, plan: Callable[[FlashInferStep], None], step: FlashInferStep) -> None:
        """A plan is copied from pinned memory, which the next one overwrites: not before the copy has been made."""
        if self._device.type != "cuda":
            plan(step)
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attnops: backend flashinfer plans on the host, which a capture cannot record. Run a step of this "
                "shape once before it, with in_capture=True: every kind of layer then has its plan"
            )
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.synchronize()
        plan(step)
        self._copied.record()

    # Kinds of layers. Each gives a wrapper that is planned for the step.

    def decode(self, step: FlashInferStep, layer: RadixAttention, windowed: bool) -> Any:
        kind = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper

        def make(graph: GraphBuffers | None) -> Any:
            options: dict[str, Any] = {"use_tensor_cores": self.use_tensor_cores, "backend": PAGED_KERNELS}
            if graph is not None:
                names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
                buffers = (graph.bounds_k, self._indices[windowed], graph.last_page_len)
                options |= {"use_cuda_graph": True, **dict(zip(names, buffers))}
            return kind(self.workspace, "NHD", **options)

        def plan(wrapper: Any, step: FlashInferStep, again: bool) -> None:
            indices = self._indices[windowed][: step.num_pages]
            arguments = (step.bounds_k, indices, step.last_page_len, *self._heads(layer), self._spec.page_size)
            options = self._shared(layer) | self._splits(0, step.graph is not None)
            if again:  # the graph itself computes what this one does not copy
                self.flashinfer.fast_decode_plan(wrapper, *arguments, **options)
            else:
                wrapper.plan(*arguments, **options)

        return self._planned(step, paged_key(layer, windowed, decodes=True), make, plan)

    def extend(self, step: FlashInferStep, layer: RadixAttention, windowed: bool) -> Any:
        causal = layer.attn_type is AttentionType.DECODER

        def make(graph: GraphBuffers | None) -> Any:
            options: dict[str, Any] = {"backend": PAGED_KERNELS}
            if graph is not None:
                names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
                buffers = (graph.bounds_q, graph.bounds_k, self._indices[windowed], graph.last_page_len)
                options |= {"use_cuda_graph": True, **dict(zip(names, buffers))}
            return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", **options)

        def plan(wrapper: Any, step: FlashInferStep, again: bool) -> None:
            paging = (step.bounds_q, step.bounds_k, self._indices[windowed][: step.num_pages], step.last_page_len)
            options = self._shared(layer) | self._splits(1, step.graph is not None)
            wrapper.plan(*paging, *self._heads(layer), self._spec.page_size, causal=causal, **options)

        return self._planned(step, paged_key(layer, windowed, decodes=False), make, plan)

    def prefix(self, step: FlashInferStep, layer: RadixAttention) -> Any:
        """Of what was cached before the step."""

        def make(graph: GraphBuffers | None) -> Any:
            return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=PAGED_KERNELS)

        def plan(wrapper: Any, step: FlashInferStep, again: bool) -> None:
            assert step.prefixes is not None
            bounds, last = step.prefixes
            paging = (step.bounds_q, bounds, self._prefix_indices[: int(bounds[-1])], last)
            wrapper.plan(*paging, *self._heads(layer), self._spec.page_size, causal=False, **self._shared(layer))

        return self._planned(step, ("prefix", *_kind(layer)), make, plan)

    def ragged(self, step: FlashInferStep, layer: RadixAttention, causal: bool) -> Any:
        def make(graph: GraphBuffers | None) -> Any:
            return self.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD")

        def plan(wrapper: Any, step: FlashInferStep, again: bool) -> None:
            options = self._shared(layer) | {"kv_data_type": self._spec.dtype}
            wrapper.plan(step.bounds_q, step.bounds_q, *self._heads(layer), causal=causal, **options)

        return self._planned(step, ("ragged", *_kind(layer), causal), make, plan)

    def stage(self, step: FlashInferStep, layer: RadixAttention, stage: Stage, cache_dtype: torch.dtype) -> Any:
        """Of one stage of a draft step: all queries see all of its keys."""
        is_mla, window, name = self._spec.is_mla, layer.sliding_window_size, stage.name

        def make(graph: GraphBuffers | None) -> Any:
            options: dict[str, Any] = {} if is_mla else {"backend": PAGED_KERNELS}
            buffers = stage.graph
            if buffers is not None and is_mla:
                names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
                given = (buffers.bounds_q, buffers.bounds_k, stage.indices, buffers.seqlens)
                options |= {"use_cuda_graph": True, **dict(zip(names, given))}
            elif buffers is not None:
                names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
                given = (buffers.bounds_q, buffers.bounds_k, stage.indices, buffers.last_page_len)
                options |= {"use_cuda_graph": True, **dict(zip(names, given))}
            if is_mla:
                return self.flashinfer.mla.BatchMLAPagedAttentionWrapper(self.workspace, **options)
            return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", **options)

        def plan(wrapper: Any, step: FlashInferStep, again: bool) -> None:
            assert step.drafts is not None
            now = (step.drafts.prefix if name == "prefix" else step.drafts.drafts)[window]
            if again and not now.replanned:
                return
            indices = now.indices[: int(now.bounds_k[-1])]
            if is_mla:
                paging = {"qo_indptr": now.bounds_q, "kv_indptr": now.bounds_k, "kv_indices": indices}
                wrapper.plan(**paging, kv_len_arr=now.seqlens_k, **self._of_latents(layer, now.page_size, cache_dtype))
                return
            options = self._shared(layer) | {"window_left": -1}
            options |= self._splits(1, step.graph is not None, now.page_size)
            paged = (now.bounds_q, now.bounds_k, indices, now.last_page_len)
            wrapper.plan(*paged, *self._heads(layer), now.page_size, causal=False, **options)

        return self._planned(step, (name, *_kind(layer)), make, plan)

    def mla(self, step: FlashInferStep, layer: RadixAttention, cache_dtype: torch.dtype) -> Any:
        causal = layer.attn_type is AttentionType.DECODER

        def make(graph: GraphBuffers | None) -> Any:
            options: dict[str, Any] = {}
            if graph is not None:
                names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
                buffers = (graph.bounds_q, graph.bounds_k, self._indices[False], graph.seqlens)
                options = {"use_cuda_graph": True, **dict(zip(names, buffers))}
            return self.flashinfer.mla.BatchMLAPagedAttentionWrapper(self.workspace, **options)

        def plan(wrapper: Any, step: FlashInferStep, again: bool) -> None:
            wrapper.plan(
                qo_indptr=step.bounds_q,
                kv_indptr=step.bounds_k,
                kv_indices=self._indices[False][: step.num_pages],
                kv_len_arr=step.seqlens_k,
                **self._of_latents(layer, self._spec.page_size, cache_dtype) | {"causal": causal},
            )

        return self._planned(step, latent_key(layer), make, plan)

    def _planned(
        self,
        step: FlashInferStep,
        key: Key,
        make: Callable[[GraphBuffers | None], Any],
        plan: Callable[[Any, FlashInferStep, bool], None],
    ) -> Any:
        if key in step.planned:
            return step.planned[key]
        graph = step.graph
        wrappers = self._eager if graph is None else graph.wrappers
        if key not in wrappers:
            wrappers[key] = make(graph)
        wrapper = wrappers[key]
        self._run_plan(lambda now: plan(wrapper, now, False), step)
        if graph is not None:
            graph.plans[key] = lambda now: plan(wrapper, now, True)
        step.planned[key] = wrapper
        return wrapper

    def _heads(self, layer: RadixAttention) -> tuple[int, int, int]:
        return layer.num_heads, layer.num_kv_heads, layer.head_dim

    def _of_latents(self, layer: RadixAttention, page_size: int, cache_dtype: torch.dtype) -> dict[str, Any]:
        """What every plan of an MLA layer says; queries see all keys."""
        return {
            "num_heads": layer.num_heads,
            "head_dim_ckv": MLA_KV_LORA_RANK,
            "head_dim_kpe": layer.head_dim - MLA_KV_LORA_RANK,
            "page_size": page_size,
            "causal": False,
            "sm_scale": layer.scaling,
            "q_data_type": self._spec.dtype,
            "kv_data_type": cache_dtype,
        }

    def _shared(self, layer: RadixAttention) -> dict[str, Any]:
        """What every plan of a layer says."""
        return {
            "window_left": layer.sliding_window_size,
            "logits_soft_cap": layer.logit_cap or None,
            "sm_scale": layer.scaling,
            "q_data_type": self._spec.dtype,
            "kv_data_type": self._spec.cache_dtype,
        }

    def _splits(self, which: int, in_graph: bool, page_size: int = 0) -> dict[str, Any]:
        """Deterministic: splits of a fixed length, or none in a graph, whose grid is fixed.

        page_size: 0: the model's.
        """
        if not self._spec.deterministic:
            return {}
        if in_graph:
            return {"disable_split_kv": True}
        return {"fixed_split_size": -(-self._split_tokens[which] // (page_size or self._spec.page_size))}


def _kind(layer: RadixAttention) -> Key:
    return layer.sliding_window_size, layer.scaling, layer.logit_cap


def paged_key(layer: RadixAttention, windowed: bool, decodes: bool) -> Key:
    """Of the wrapper that serves a layer over pages. windowed: Those of a sliding-window pool."""
    return "decode" if decodes else "extend", *_kind(layer), windowed, layer.attn_type.name


def latent_key(layer: RadixAttention) -> Key:
    return "mla", layer.scaling, layer.attn_type.name


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
