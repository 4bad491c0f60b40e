"""DeepSeek-V4: layers that attend to a window of rows, and to entries that pool 4 or 128 tokens (`compressed_steps`).

The name is SGLang's, `compressed` its older one. A layer is a `CompressedAttention`. It stores its rows and pools
the step's tokens into entries. Where its ratio is 4 it selects among them. One call attends to both pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import IDLE, AttentionBackend, LayerCall
from attnops.backends.capability import DECODER_MODES, SIXTEEN_BIT, Capability
from attnops.backends.compressed_steps import CompressedStep, CompressedSteps, Part
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import heads
from attnops.graph_buffers import PagedBuffers
from attnops.metadata.plan import MLA_HEAD_DIM_V
from attnops.pools.deepseek_v4 import DeepSeekV4TokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

if TYPE_CHECKING:
    from attnops.layers.compressed_attention import CompressedAttention, Compressor


@register_attention_backend("dsv4")
class DeepseekV4AttnBackend(AttentionBackend):
    """Every mode of a model of `AttentionSpec.compress_ratios`, but trees of drafts.

    Args:
        spec, limits, device: As of `AttentionBackend`.
    """

    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        archs=frozenset({90}),
        modes=DECODER_MODES,
        dtypes=SIXTEEN_BIT,
        kv_dtypes=frozenset({torch.uint8}),
        mla=True,
        sliding_window=True,
        swa_pool=True,
        sinks=True,
        sparse=True,
        compressed=True,
        deterministic=True,
        cuda_graph=True,
    )
    takes_compressed = True

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._buffers = PagedBuffers(spec, limits, self.device)
        self._steps = CompressedSteps(spec, limits, self.device)
        self._prepared: PreparedStep[CompressedStep] = PreparedStep()

    @property
    def fault_report(self) -> Tensor | None:
        return self._buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        """Host work of a step: limits and views.

        Raises:
            NotImplementedError: drafts have branches.
            ValueError: the batch exceeds the limits, its pool does not fit, or has fewer states than there are rows.
        """
        if batch.tree_mask is not None or batch.draft_steps:
            raise NotImplementedError(
                "attnops: backend dsv4 serves no trees of drafts: groups of tokens that are pooled lie in one chain. "
                "Draft with speculative_eagle_topk=1"
            )
        self.limits.check(batch)
        pool, drafts = batch.token_to_kv_pool, batch.tokens_per_request - 1
        paged = self._buffers.step(batch)
        if isinstance(pool, DeepSeekV4TokenToKVPool) and any(pool.compress_ratios):
            most, rows = pool.max_draft_tokens, 0 if batch.req_to_token is None else batch.req_to_token.shape[0]
            if rows > pool.max_num_reqs:  # behind the states of requests lie snapshots
                raise ValueError(
                    f"attnops: req_to_token.shape[0] must be at most {pool.max_num_reqs} (max_num_reqs of the pool: a "
                    f"row without states has no place for them), got {rows}"
                )
            if batch.forward_mode is ForwardMode.TARGET_VERIFY and drafts > most:
                raise ValueError(
                    f"attnops: {drafts} drafts of a TARGET_VERIFY step may be rejected, above max_draft_tokens = "
                    f"{most} of the pool: its states would have lost the tokens before them"
                )
        self._prepared.begin(batch, self._steps.step(batch, paged))

    @in_one_thread
    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens and batch.forward_mode is not IDLE:
            self._buffers.build(step.paged, batch)
            self._steps.build(step, batch, self.fault_report)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor | None,
        v: None,
        layer: CompressedAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        *,
        kv_score: Tensor | None = None,
        index_kv_score: Tensor | None = None,
        index_q: Tensor | None = None,
        index_weights: Tensor | None = None,
        out: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """One layer of the step; arguments as of `CompressedAttention.forward`.

        Args:
            out: Destination ``[num_tokens, num_heads * 512]``, contiguous; allocated when None.
            others: None each: arguments of other layers.
        """
        if not hasattr(layer, "compress_ratio"):
            raise ValueError(f"attnops: backend dsv4 serves CompressedAttention layers, got a {type(layer).__name__}")
        others["v"] = v
        if unknown := sorted(name for name, value in others.items() if value is not None):
            raise ValueError(f"attnops: backend dsv4 takes no {', '.join(unknown)}: rows are key and value at once")
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_heads * MLA_HEAD_DIM_V)
        if batch.forward_mode is IDLE or batch.num_tokens == 0:
            return out.zero_()
        rows = {"q": q, "k": k, "kv_score": kv_score, "index_kv_score": index_kv_score}
        rows |= {"index_q": index_q, "index_weights": index_weights}
        for name, tensor in rows.items():
            if tensor is not None and tensor.shape[0] != batch.num_tokens:
                raise ValueError(
                    f"attnops: {name}.shape[0] must be {batch.num_tokens} (num_tokens of the step), got "
                    f"{tensor.shape[0]}"
                )
        self._check_layer(layer, batch)
        step = self._prepared.of(batch)
        with self._prepared.in_use():
            if save_kv_cache and k is not None:
                self._store(layer, batch, step, k, kv_score, index_kv_score)
            self._attend(q, layer, batch, step, index_q, index_weights, out)
        return out

    def attend(self, call: LayerCall) -> None:
        raise ValueError(f"attnops: backend dsv4 serves CompressedAttention, got a {type(call.layer).__name__}")

    def _check_layer(self, layer: CompressedAttention, batch: AttentionBatch) -> None:
        pool, spec = batch.token_to_kv_pool, self.spec
        assert isinstance(pool, DeepSeekV4TokenToKVPool)  # as of `PagedBuffers.step`
        for what, got, expected in (
            ("compress_ratio", layer.compress_ratio, pool.ratio_of(layer.layer_id)),
            ("sliding_window_size", layer.sliding_window_size, spec.sliding_window_size),
            ("num_heads", layer.num_heads, spec.num_q_heads),
        ):
            if got != expected:
                owner = "the pool" if what == "compress_ratio" else "the backend"
                raise ValueError(
                    f"attnops: {what} of layer {layer.layer_id} must be {expected}, as {owner} has it, got {got}"
                )

    def _store(
        self,
        layer: CompressedAttention,
        batch: AttentionBatch,
        step: CompressedStep,
        k: Tensor,
        kv_score: Tensor | None,
        index_kv_score: Tensor | None,
    ) -> None:
        """Rows of the window, entries and index keys that the step's tokens complete, and the states."""
        pool: Any = batch.token_to_kv_pool
        slots = step.paged.window_out_cache_loc
        if slots is None or batch.out_cache_loc is None:
            raise ValueError("attnops: save_kv_cache=True needs out_cache_loc in the batch")
        pool.set_swa_buffer(layer, slots, k, self.fault_report)
        if not layer.compress_ratio:
            return
        place = layer.layer_id
        self._compress(layer, batch, step, "", pool.get_compressed_buffer(place), pool.get_state(place), kv_score)
        if layer.compress_ratio == 4:
            pages, state = pool.get_index_k_with_scale_buffer(place), pool.get_index_state(place)
            self._compress(layer, batch, step, "index_", pages, state, index_kv_score)

    def _compress(
        self,
        layer: CompressedAttention,
        batch: AttentionBatch,
        step: CompressedStep,
        kind: str,
        pages: Tensor,
        state: Tensor,
        kv_score: Tensor | None,
    ) -> None:
        if kv_score is None:
            raise ValueError(f"attnops: layer {layer.layer_id} of ratio {layer.compress_ratio} needs {kind}kv_score")
        given: Compressor = getattr(layer, f"{kind}compressor")
        assert step.paged.page_table is not None
        ops.compress_kv(
            pages,
            state,
            kv_score,
            ape=given.ape,
            norm_weight=given.norm_weight,
            cos_sin=given.cos_sin,
            page_table=step.paged.page_table,
            state_indices=step.states,
            cache_seqlens=batch.cache_seqlens,
            cu_seqlens_q=step.cu_seqlens_q,
            entry_indptr=step.entries[layer.compress_ratio],
            ratio=layer.compress_ratio,
            eps=given.eps,
            interleaved=given.interleaved,
            hadamard=given.hadamard,
            ue8m0=given.ue8m0,
            report=self.fault_report,
        )

    def _attend(
        self,
        q: Tensor,
        layer: CompressedAttention,
        batch: AttentionBatch,
        step: CompressedStep,
        index_q: Tensor | None,
        index_weights: Tensor | None,
        out: Tensor,
    ) -> None:
        pool: Any = batch.token_to_kv_pool
        ratio, report = layer.compress_ratio, self.fault_report
        q = heads("q", q, layer.num_heads, MLA_HEAD_DIM_V)
        out = heads("out", out, layer.num_heads, MLA_HEAD_DIM_V)
        rows, options = pool.get_swa_buffer(layer.layer_id), {"softmax_scale": layer.scaling, "sinks": layer.sinks}
        if ratio == 0 and not batch.is_uniform:
            lists = {"topk_length": step.window_lengths, "out": out, "report": report}
            ops.sparse_mla_prefill(q, rows, step.windows, **options, **lists)  # type: ignore[arg-type]
            return
        if ratio == 4:
            index_q, index_weights = self._quantize(layer, pool, index_q, index_weights)
        for part in step.parts:
            if len(step.parts) > 1:  # a long ragged step: its parts share lists and plans
                self._steps.build_part(step, part, report)
            own: dict[str, Any] = {}
            if ratio:
                own["extra_kv_pages"] = pool.get_compressed_buffer(layer.layer_id)
                own["extra_indices"] = part.lists[ratio]
                own["extra_topk_length"] = step.entry_lengths[ratio][part.tokens]
            if ratio == 4:
                assert index_q is not None and index_weights is not None
                self._select(
                    pool.get_index_k_with_scale_buffer(layer.layer_id), batch, step, part, index_q, index_weights
                )
            ops.sparse_mla_decode(
                q[part.tokens],
                rows,
                step.windows[part.tokens],
                part.plans[ratio],
                topk_length=step.window_lengths[part.tokens],
                out=out[part.tokens],
                report=report,
                **own,
                **options,  # type: ignore[arg-type]
            )

    def _quantize(
        self, layer: CompressedAttention, pool: Any, index_q: Tensor | None, index_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if index_q is None or index_weights is None:
            missing = "index_q" if index_q is None else "index_weights"
            raise ValueError(f"attnops: layer {layer.layer_id} of ratio 4 needs {missing}")
        if index_q.dim() != 3 or index_q.shape[2] != pool.index_head_dim:
            raise ValueError(
                f"attnops: index_q must be [num_tokens, index heads, {pool.index_head_dim}], got {list(index_q.shape)}"
            )
        given, scale = layer.index_compressor, (index_q.shape[1] * index_q.shape[2]) ** -0.5
        assert given is not None
        return ops.quantize_index_q(index_q, index_weights, scale=scale, hadamard=given.hadamard, ue8m0=given.ue8m0)

    def _select(
        self,
        index_pages: Tensor,
        batch: AttentionBatch,
        step: CompressedStep,
        part: Part,
        index_q: Tensor,
        index_weights: Tensor,
    ) -> None:
        """The list of each token: the `sparse_topk` entries with the largest logits, among those that it sees."""
        q, lengths = index_q[part.tokens], step.entry_seqlens[4][part.tokens]
        requests = part.requests
        assert part.index_table is not None and part.scratch is not None
        ops.index_topk(
            q.unflatten(0, (requests, -1)),
            index_pages,
            part.index_table,
            index_weights[part.tokens],
            lengths.view(requests, -1),
            self.spec.sparse_topk,
            indices=part.lists[4],
            scratch=part.scratch,
            report=self.fault_report,
        )
