"""Dual-chunk attention (Qwen2.5-1M): q is rotated apart for its own chunk, for the one before it, and for all others.

The model brings q as five parts side by side. The first is for a query's own chunk (intra), the second for the chunk
before (successor), the third for all earlier ones (inter). Only the sparse variant reads the others. Each of the three
is a call of `fmha_paged` over the same virtual requests, one per chunk that a request's new tokens touch. Their results
are merged by lse.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.capability import DECODER_MODES, FLOATS, PORTABLE_ARCHS, Capability, HeadDims
from attnops.backends.dual_chunk_torch import GatheredDualChunks
from attnops.backends.fmha_steps import FmhaSteps
from attnops.backends.local_steps import LocalAttentionMetadata, LocalSteps
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.store import FP8, heads, store_kv
from attnops.graph_buffers import PagedBuffers
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plan_buffers import FmhaPlans
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits

PARTS = 5  # of q


@dataclass(frozen=True)
class Chunks:
    """One call's keys of the virtual requests.

    Attributes:
        page_table: int32 ``[V, n]``.
        seqlens: int32 ``[V]``.
    """

    page_table: Tensor
    seqlens: Tensor
    plan: FmhaPlan


@dataclass(frozen=True)
class DualChunkStep:
    local: LocalAttentionMetadata
    successor: Chunks
    inter: Chunks


class DualChunkFlashAttentionBackend(AttentionBackend):
    """Every mode but trees, of layers with K and V.

    Args:
        chunk_size, local_size: Of the model's `dual_chunk_attention_config`. A chunk is `chunk_size` - `local_size`
            tokens.
        original_max_position_embeddings: Beyond as many tokens scores are multiplied by
            ``0.1 * ln(tokens / original_max_position_embeddings) + 1``; 0: never. A request's tokens are those in the
            cache.
        sparse_attention_config: Must be None: the sparse variant is not served.
        impl: "fmha": attnops' kernels, of CPUs and GPUs. "torch_native": plain torch on any device, exact and slow.

    Raises:
        NotImplementedError: the sparse variant, or what `AttentionBackend` refuses.
        ValueError: a chunk has no tokens, or does not consist of whole pages; or there is no such `impl`.
    """

    name = "dual_chunk_flash_attn"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        chosen_on=frozenset(),
        archs=PORTABLE_ARCHS,
        needs_ops=frozenset({"fmha_paged"}),
        modes=DECODER_MODES,
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn}),
        head_dims=HeadDims(32, 256, 8, equal=False),
        logit_cap=True,
        cuda_graph=True,
    )

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        chunk_size: int = 8192,
        local_size: int = 1024,
        original_max_position_embeddings: int = 0,
        sparse_attention_config: Any = None,
        impl: str = "fmha",
    ) -> None:
        super().__init__(spec, limits, device)
        if sparse_attention_config is not None:
            raise NotImplementedError("attnops: dual_chunk_flash_attn has no sparse variant (sparse_attention_config)")
        self.chunk_len = chunk_size - local_size
        if self.chunk_len < 1 or self.chunk_len % spec.page_size:
            raise ValueError(
                f"attnops: chunk_size - local_size must be a positive multiple of {spec.page_size} (page_size), got "
                f"{self.chunk_len}"
            )
        self._original = original_max_position_embeddings
        if impl not in ("fmha", "torch_native"):
            raise ValueError(f"attnops: impl of dual_chunk_flash_attn must be fmha or torch_native, got {impl!r}")
        self._torch = None
        if impl == "torch_native":
            sizes = {"chunk_len": self.chunk_len, "original": self._original}
            self._torch = GatheredDualChunks(spec, limits, self.device, **sizes)
            return
        self._buffers = PagedBuffers(spec, limits, self.device)
        chunked = dataclasses.replace(spec, attention_chunk_size=self.chunk_len)
        self._fmha = FmhaSteps(spec, limits, self.device, self._buffers)
        self._local = LocalSteps(chunked, limits, self.device, self._buffers, self._fmha)
        whole = dataclasses.replace(spec, attn_type=AttentionType.DECODER_BIDIRECTIONAL)
        most = self._local.max_requests
        self._plans = [FmhaPlans(whole, limits, self.device, max_batch_size=most, windows=(-1,)) for _ in range(2)]
        options: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        widths = (self.chunk_len // spec.page_size, limits.max_pages(spec.page_size))
        self._tables = [torch.zeros(most, width, **options) for width in widths]
        self._seqlens = torch.zeros(2, most, **options)
        self._factors = torch.ones(limits.max_num_tokens, dtype=torch.float32, device=self.device)
        self._prepared: PreparedStep[DualChunkStep] = PreparedStep()

    @property
    def fault_report(self) -> Tensor | None:
        return (self._buffers if self._torch is None else self._torch.steps.buffers).report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self.limits.check(batch)
        if batch.tree_mask is not None:
            raise NotImplementedError("attnops: a tree mask and dual chunks exclude each other: verify chains")
        if self._torch is not None:
            self._torch.steps.out_graph(batch, in_capture)
            return
        local = self._local.step(batch, self._buffers.step(batch))
        count = local.local_seqused_k.shape[0]
        keys = [
            Chunks(table[:count], seqlens[:count], plans.views(count, batch.num_tokens)[-1])
            for table, seqlens, plans in zip(self._tables, self._seqlens, self._plans)
        ]
        self._prepared.begin(batch, DualChunkStep(local, *keys))

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        if self._torch is None:
            self._plan(batch)
        else:
            self._torch.steps.in_graph(batch)

    @in_one_thread
    def _plan(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0 or batch.forward_mode.is_idle():
            return
        self._buffers.build(step.local.paged, batch)
        self._local.build(step.local, batch)
        self._build_chunks(step, batch)
        for keys in (step.successor, step.inter):
            ops.fmha_plan(keys.plan, step.local.local_query_start_loc, cache_seqlens=keys.seqlens)

    def _build_chunks(self, step: DualChunkStep, batch: AttentionBatch) -> None:
        """Which pages come before each virtual request's chunk. Static shapes, no value on the host."""
        bounds, starts = step.local.cu_seqlens_q.long(), step.local.local_query_start_loc.long()
        table = step.local.paged.page_table
        assert table is not None
        lengths = batch.cache_seqlens.long()
        prefix = lengths - bounds.diff()

        def request_of(row: Tensor) -> Tensor:
            return (torch.searchsorted(bounds, row, right=True) - 1).clamp(0, batch.batch_size - 1)

        first = starts[:-1]
        request = request_of(first)
        chunk = (prefix[request] + first - bounds[request]).clamp(min=0) // self.chunk_len
        chunk = chunk.masked_fill(starts[1:] <= first, 0)  # of a virtual request that nobody is
        step.successor.seqlens.copy_((chunk >= 1) * self.chunk_len)
        step.inter.seqlens.copy_((chunk - 1).clamp(min=0) * self.chunk_len)
        pages = step.successor.page_table.shape[1]
        columns = (chunk - 1).clamp(min=0).unsqueeze(1) * pages + torch.arange(pages, device=self.device)
        rows = table[request]
        step.successor.page_table.copy_(rows.gather(1, columns.clamp(max=table.shape[1] - 1)))
        step.inter.page_table[:, : table.shape[1]].copy_(rows)
        if self._original:
            of_token = request_of(torch.arange(batch.num_tokens, device=self.device))
            ratio = (lengths.float() / self._original).clamp(min=1.0)
            self._factors[: batch.num_tokens].copy_((0.1 * ratio.log() + 1.0)[of_token])

    def attend(self, call: LayerCall) -> None:
        layer = call.layer
        width = PARTS * layer.num_heads * layer.head_dim
        if call.q.shape[1:].numel() != width:
            raise ValueError(
                f"attnops: q of dual-chunk attention must have {width} columns, {PARTS} parts of {layer.num_heads} "
                f"heads of {layer.head_dim}, got {list(call.q.shape)}"
            )
        if call.save_kv_cache and call.k is not None and call.v is None:
            raise ValueError("attnops: a layer that stores k needs v")
        if self._torch is None:
            self._attend(call)
        else:
            self._torch.attend(call, PARTS)

    @in_one_thread
    def _attend(self, call: LayerCall) -> None:
        step, layer, batch, report = self._prepared.of(call.batch), call.layer, call.batch, self._buffers.report
        if call.save_kv_cache and call.k is not None:
            assert call.v is not None
            store_kv(layer, batch, step.local.paged, call.k, call.v, report)
        pool = batch.token_to_kv_pool
        assert pool is not None, "PagedBuffers.build has checked"
        k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
        parts = call.q.flatten(1).chunk(PARTS, 1)[:3]
        if self._original:
            factors = self._factors[: batch.num_tokens].unsqueeze(1)
            parts = tuple((part * factors).to(part.dtype) for part in parts)
        intra = Chunks(step.local.local_block_table, step.local.local_seqused_k, step.local.plan)
        scales = (layer.k_scale, layer.v_scale) if pool.dtype in FP8 else (None, None)
        outs = call.q.new_empty(3, batch.num_tokens, layer.num_heads, layer.v_head_dim)
        lses = torch.empty(outs.shape[:-1], dtype=torch.float32, device=self.device)
        for index, (part, keys) in enumerate(zip(parts, (intra, step.successor, step.inter))):
            ops.fmha_paged(
                heads("q", part, layer.num_heads, layer.head_dim),
                k_pages,
                v_pages,
                keys.page_table,
                keys.seqlens,
                step.local.local_query_start_loc,
                keys.plan,
                softmax_scale=layer.scaling,
                causal=index == 0,
                logit_cap=layer.logit_cap,
                out=outs[index],
                lse=lses[index],
                report=report,
                k_scale=scales[0],
                v_scale=scales[1],
            )
        ops.merge_states(outs, lses, out=heads("out", call.out, layer.num_heads, layer.v_head_dim))
