"""Every mode in Triton, for machines that the compiled kernels do not serve. Triton is imported when one is built.

Uniform steps are split-KV decode, whatever their tokens per request. Ragged steps read their prefix from pages and
their new tokens from k and v. Over FP8 pages, with MLA, and in deterministic mode, they read all from pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from attnops.backends.attend import plan_of
from attnops.backends.base import AttentionBackend, LayerCall, is_causal
from attnops.backends.capability import DECODER_MODES, FLOATS, Capability, HeadDims
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import FP8, heads, store_kv, store_mla, uses_window_slots
from attnops.environment import (
    TRITON_DECODE_SPLIT_TILE_SIZE,
    TRITON_INTERPRET,
    TRITON_NUM_KV_SPLITS,
    TRITON_SPLIT_TILE_SIZE,
)
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.pools import MLATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

DEFAULT_KV_SPLITS = 8
DETERMINISTIC_SPLIT_TILE = 256
LEAST_SPLIT_TILE = 128  # tokens: a shorter split costs more to merge than it saves


@dataclass(frozen=True)
class TritonStep:
    """Views for one shape of a step.

    Attributes:
        splits: int32 ``[B]`` by window of the model; empty for a ragged step.
        scratch: float32 partial results and their lse, as wide as the most splits of the shape.
        tile_tokens: Of a ragged step's tiles.
    """

    paged: PagedStep
    splits: dict[int, Tensor] = field(default_factory=dict)
    scratch: tuple[Tensor, Tensor] | None = None
    tile_tokens: int = 0


@register_attention_backend("triton")
class TritonAttnBackend(AttentionBackend):
    """Every mode on Triton's kernels.

    Args:
        triton_attention_num_kv_splits: Most splits of a request in decode; None: what the environment says, else 8.
        triton_attention_split_tile_size: Tokens of a split, whatever the batch; None: the environment's, else chosen
            on the device. Deterministic: 256, or SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE.
        triton_attention_reduce_in_fp32: Taken, either way, as SGLang's default is False: partial results are float32.

    Raises:
        ValueError: a number below 1, or a malformed environment variable.
        ImportError: triton is not installed.
    """

    capability = Capability(
        devices=frozenset({"cpu", "cuda", "hip", "xpu"}),
        chosen_on=frozenset({"cuda", "hip", "xpu"}),
        needs_cuda_kernels=False,
        interpreted_on_cpu=True,
        package="triton",
        compiles_at_run_time=True,
        modes=DECODER_MODES,
        attn_types=frozenset(AttentionType),
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn, torch.float8_e5m2}),
        head_dims=HeadDims(1, 256, equal=False),
        mla=True,
        sliding_window=True,
        swa_pool=True,
        logit_cap=True,
        sinks=True,
        tree_mask=True,
        draft_trees=True,
        draft_trees_two_dims=True,
        draft_windows=True,
        deterministic=True,
        cuda_graph=True,
    )

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        triton_attention_num_kv_splits: int | None = None,
        triton_attention_split_tile_size: int | None = None,
        triton_attention_reduce_in_fp32: bool = False,
    ) -> None:
        super().__init__(spec, limits, device)
        if self.device.type == "cpu" and not TRITON_INTERPRET.value():
            raise RuntimeError(
                "attnops: backend triton runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1"
            )
        for name, given in (
            ("triton_attention_num_kv_splits", triton_attention_num_kv_splits),
            ("triton_attention_split_tile_size", triton_attention_split_tile_size),
        ):
            if given is not None and given < 1:
                raise ValueError(f"attnops: backend triton: {name} must be 1 or more, got {given}")
        self._kernels = _import_kernels()
        self._max_splits = triton_attention_num_kv_splits or TRITON_NUM_KV_SPLITS.value() or DEFAULT_KV_SPLITS
        tile = triton_attention_split_tile_size or TRITON_SPLIT_TILE_SIZE.value()
        if spec.deterministic and triton_attention_split_tile_size is None:
            tile = TRITON_DECODE_SPLIT_TILE_SIZE.value() or DETERMINISTIC_SPLIT_TILE
        self._fixed_tile = tile is not None
        self._split_tile = tile or LEAST_SPLIT_TILE
        self._buffers = PagedBuffers(spec, limits, self.device)
        self._has_cache = spec.attn_type is not AttentionType.ENCODER_ONLY
        size = limits.max_batch_size if self._has_cache else 0
        self._splits = {w: torch.ones(size, dtype=torch.int32, device=self.device) for w in spec.windows}
        cells = size * max(self._max_splits, limits.max_tokens_per_request) * spec.num_q_heads
        self._out_partial = torch.empty(cells * spec.v_head_dim, dtype=torch.float32, device=self.device)
        self._lse_partial = torch.empty(cells, dtype=torch.float32, device=self.device)
        self._steps: dict[tuple[int, int, int, bool], TritonStep] = {}
        self._prepared: PreparedStep[TritonStep] = PreparedStep()

    @property
    def fault_report(self) -> Tensor | None:
        return self._buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        paged = self._buffers.step(batch)
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request, paged.window_out_cache_loc is not None)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = self._make(batch, paged)
        self._prepared.begin(batch, self._steps[key])

    @in_one_thread
    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0:
            return
        self._buffers.build(step.paged, batch)
        for window, splits in step.splits.items():
            self._kernels.triton_decode_plan(
                splits,
                batch.cache_seqlens,
                batch.tree_keys or batch.tokens_per_request,
                self.spec.num_kv_heads,
                self._splits_of(batch.tokens_per_request),
                self._split_tile,
                self._fixed_tile,
                window,
            )

    @in_one_thread
    def attend(self, call: LayerCall) -> None:
        step, layer, batch = self._prepared.of(call.batch), call.layer, call.batch
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            self._encode(call, step)
            return
        pool = batch.token_to_kv_pool
        assert pool is not None, "PagedBuffers.build has checked"
        table = step.paged.window_page_table if uses_window_slots(layer, pool) else step.paged.page_table
        stores = call.save_kv_cache and call.k is not None
        if stores and self.spec.is_mla:
            assert call.k is not None
            store_mla(layer, batch, call.k, call.k_rope, self._buffers.report)
        elif stores:
            if call.v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, call.k, call.v, self._buffers.report)  # type: ignore[arg-type]
        k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
        fp8 = pool.dtype in FP8
        q_pe = self._rotary(call)
        q = heads("q", call.q, layer.num_heads, layer.head_dim - (0 if q_pe is None else q_pe.shape[-1]))
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        options = (layer.scaling, is_causal(layer), layer.sliding_window_size, layer.logit_cap, layer.sinks)
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if fp8:
            scales = (layer.k_scale, layer.k_scale if self.spec.is_mla else layer.v_scale)
        pages = (k_pages, v_pages, table, batch.cache_seqlens)
        if batch.is_uniform:
            assert step.scratch is not None
            splits = plan_of(layer, step.splits)
            self._kernels.triton_decode(
                out, None, *step.scratch, q, q_pe, *pages, splits, batch.tokens_per_request, *options,
                batch.tree_mask, *scales, self._split_tile, batch.tree_keys,
            )  # fmt: skip
            return
        plan_of(layer, self._splits)  # a window that the backend was not built for is refused
        bounds, tokens = step.paged.cu_seqlens_q, step.tile_tokens
        if not stores or call.k is None or call.v is None or fp8 or self.spec.is_mla or self.spec.deterministic:
            self._kernels.triton_unified_extend(out, None, q, q_pe, *pages, bounds, tokens, *options, *scales)
            return
        k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)
        v = heads("v", call.v, layer.num_kv_heads, layer.v_head_dim)
        self._kernels.triton_extend(out, None, q, q_pe, k, v, *pages, bounds, tokens, *options)

    def _encode(self, call: LayerCall, step: TritonStep) -> None:
        layer, bounds = call.layer, step.paged.cu_seqlens_q
        if call.k is None or call.v is None or bounds is None:
            raise ValueError("attnops: an encoder's layer needs k and v, and its step extend_seq_lens")
        plan_of(layer, self._splits)
        self._kernels.triton_ragged_prefill(
            heads("out", call.out, layer.num_heads, layer.v_head_dim),
            None,
            heads("q", call.q, layer.num_heads, layer.head_dim),
            heads("k", call.k, layer.num_kv_heads, layer.head_dim),
            heads("v", call.v, layer.num_kv_heads, layer.v_head_dim),
            bounds,
            bounds,
            step.tile_tokens,
            layer.scaling,
            False,
            layer.sliding_window_size,
            layer.logit_cap,
            layer.sinks,
        )

    def _rotary(self, call: LayerCall) -> Tensor | None:
        """The rotary part of MLA queries, where a model brings it apart."""
        pool = call.batch.token_to_kv_pool
        if not self.spec.is_mla:
            if call.q_rope is not None or call.k_rope is not None:
                raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
            return None
        if not isinstance(pool, MLATokenToKVPool):
            raise ValueError(f"attnops: an MLA layer reads an MLATokenToKVPool, the batch has a {type(pool).__name__}")
        if call.q_rope is None:
            return None
        return heads("q_rope", call.q_rope, call.layer.num_heads, pool.qk_rope_head_dim)

    def _splits_of(self, seqlen_q: int) -> int:
        """Most splits of a request in a step of so many tokens each: all such steps share one scratch."""
        return max(1, self._max_splits // seqlen_q)

    def _make(self, batch: AttentionBatch, paged: PagedStep) -> TritonStep:
        if not batch.is_uniform:
            mean = max(1, batch.num_tokens // max(1, batch.batch_size))
            return TritonStep(paged, tile_tokens=1 << math.ceil(math.log2(mean)))  # whose bits do not depend on it
        rows, splits = batch.num_tokens, self._splits_of(batch.tokens_per_request)
        shape = (rows, self.spec.num_q_heads, splits)
        cells = math.prod(shape)
        out_partial = self._out_partial[: cells * self.spec.v_head_dim].view(*shape, self.spec.v_head_dim)
        views = {window: one[: batch.batch_size] for window, one in self._splits.items()}
        return TritonStep(paged, views, (out_partial, self._lse_partial[:cells].view(shape)))


def _import_kernels() -> ModuleType:
    try:
        from attnops import triton_kernels
    except ImportError as error:
        raise ImportError(
            f"attnops: backend triton needs the package triton: pip install attnops[triton] ({error}). Without it "
            "select_backend takes the next that serves the model"
        ) from error
    return triton_kernels
