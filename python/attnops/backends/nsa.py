"""DeepSeek Sparse Attention: MLA over the rows that an indexer has listed for each query token.

The name is SGLang's (`dsa` is its newer one), not that of the paper on native sparse attention. A layer that brings
`topk_indices` attends to these rows. One that brings none attends to all of its request, as `fa3` does.

Lists hold slots of the pool, so no page table of single tokens is made. Uniform steps have a plan over all tokens'
lists. Ragged ones are `sparse_mla_prefill`. A list is looked at as far as its token has rows to list.

Under context parallelism a rank brings queries and lists of some rows of an EXTEND step, and the new latents of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import IDLE, AttentionBackend, LayerCall
from attnops.backends.capability import DECODER_MODES, SIXTEEN_BIT, Capability
from attnops.backends.decode_steps import DecodeStep, DecodeSteps
from attnops.backends.prepared import PreparedStep
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import heads, store_mla
from attnops.metadata.plan import MLA_HEAD_DIM_V
from attnops.metadata.query_rows import SPLIT_MODES, QueryRows, check_split
from attnops.metadata.sparse_plan import SparseMlaPlan
from attnops.ops.sparse_mla import sparse_mla_prefill_scratch_size
from attnops.plan_buffers import MLA_INVARIANT_SPLIT_TOKENS
from attnops.types import MLA_KV_LORA_RANK, MLA_ROPE_DIM, AttentionBatch, AttentionSpec, ForwardMode, Limits

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

# SGLang's names of kernels. The kernels here are the same for all of them: what differs there is which rows they take.
SERVED_IMPLS = frozenset({"flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3"})
REFUSED_IMPLS = {
    "trtllm": "its kernels are for Blackwell",
    "tilelang": "its kernels are compiled by TileLang at run time",
    "aiter": "its kernels are for AMD",
    "flashmla_sparse_q8": "it rounds queries to e4m3, which no kernel here does",
}


@register_attention_backend("nsa")
class DeepseekSparseAttnBackend(AttentionBackend):
    """MLA with lists of rows, and without; every mode.

    Args:
        spec, limits, device: As of `AttentionBackend`.
        prefill_impl, decode_impl: Of `SERVED_IMPLS`, by SGLang's names: the same kernels here.
        prefill_cp_mode: "in-seq-split" or "round-robin-split" (`QueryRows`): ranks share the queries of EXTEND steps.
            None: each has all.
        cp_rank, cp_size: This rank, and how many share a step.

    Raises:
        ValueError: nobody serves the kernel, or the ranks or their mode are none.
    """

    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        archs=frozenset({90}),
        modes=DECODER_MODES,
        dtypes=SIXTEEN_BIT,
        kv_dtypes=frozenset({torch.uint8}),
        mla=True,
        sinks=True,
        tree_mask=True,
        sparse=True,
        deterministic=True,
        cuda_graph=True,
    )
    takes_lists = True

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        prefill_impl: str = "flashmla_auto",
        decode_impl: str = "flashmla_auto",
        prefill_cp_mode: str | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
    ) -> None:
        super().__init__(spec, limits, device)
        for option, impl in (("prefill_impl", prefill_impl), ("decode_impl", decode_impl)):
            if impl not in SERVED_IMPLS:
                reason = REFUSED_IMPLS.get(impl, "nobody knows it")
                known = ", ".join(sorted(SERVED_IMPLS))
                raise ValueError(f"attnops: backend nsa: {option} must be one of {known}, got {impl!r}: {reason}")
        if prefill_cp_mode is None and (cp_rank, cp_size) != (0, 1):
            raise ValueError(
                f"attnops: backend nsa: cp_rank {cp_rank} and cp_size {cp_size} need prefill_cp_mode, one of "
                f"{', '.join(SPLIT_MODES)}"
            )
        if prefill_cp_mode is not None:
            check_split(cp_rank, cp_size, prefill_cp_mode)
            if not spec.sparse_topk:
                raise ValueError("attnops: backend nsa: prefill_cp_mode needs AttentionSpec.sparse_topk, which is 0")
        self._cp = None if prefill_cp_mode is None else (cp_rank, cp_size, prefill_cp_mode)
        self._prepared: PreparedStep[DecodeStep] = PreparedStep()
        self._dense = DecodeSteps(self.name, spec, limits, self.device, modes=DECODER_MODES, prepared=self._prepared)
        self._lists = _Lists(spec, limits, self.device) if spec.sparse_topk else None
        self._borrows_lists = False

    def query_rows(self, batch: AttentionBatch) -> QueryRows | None:
        """Which tokens' queries and lists the layers of a step bring to this rank; None: those of all.

        Ranks share EXTEND steps of at least one token a chunk. Latents, slots and lengths are always those of all.
        """
        if self._cp is None or batch.forward_mode is not ForwardMode.EXTEND or batch.is_uniform:
            return None
        _, world_size, mode = self._cp
        chunks = 2 * world_size if mode == "in-seq-split" else world_size
        return QueryRows.of_rank(batch.num_tokens, *self._cp) if batch.num_tokens >= chunks else None

    @property
    def fault_report(self) -> Tensor | None:
        return self._dense.buffers.report

    def lead_drafts(self, others: Sequence[AttentionBackend]) -> None:
        """As of `AttentionBackend.lead_drafts`: lengths and plan are those of the last step.

        Earlier steps then look at some negative entries behind their rows. Those are no keys.
        """
        if self._lists is None:
            return
        self._lists.ahead = len(others)
        for other in others:
            if isinstance(other, DeepseekSparseAttnBackend):
                other._lists, other._borrows_lists = self._lists, True

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        self._dense.out_graph(batch)
        if self._lists is not None and batch.is_uniform:
            self._lists.plan(batch.batch_size, batch.tokens_per_request)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        self._dense.in_graph(batch)
        if self._lists is not None and batch.num_tokens and not self._borrows_lists:
            self._lists.build(batch, self._prepared.of(batch), self.query_rows(batch))

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        *,
        topk_indices: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As of `AttentionBackend.forward`, and `topk_indices` as of `RadixAttention.forward`."""
        if topk_indices is None:
            if self._cp is not None and q.shape[0] != batch.num_tokens:
                raise ValueError(
                    f"attnops: q.shape[0] must be {batch.num_tokens} (num_tokens of the step), got {q.shape[0]}: ranks "
                    "share the queries of layers with topk_indices alone"
                )
            return self._dense.forward(q, k, v, layer, batch, save_kv_cache, **options)
        if self._lists is None:
            raise ValueError("attnops: topk_indices need AttentionSpec.sparse_topk, which is 0")
        out: Tensor | None = options.pop("out", None)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_heads * MLA_HEAD_DIM_V)
        if batch.forward_mode is IDLE or batch.num_tokens == 0:
            return out.zero_()
        rows = self.query_rows(batch)
        tokens, whose = (batch.num_tokens, "num_tokens") if rows is None else (len(rows), "query_rows of this rank")
        if q.shape[0] != tokens:
            raise ValueError(f"attnops: q.shape[0] must be {tokens} ({whose} of the step), got {q.shape[0]}")
        self._prepared.of(batch)
        with self._prepared.in_use():
            if k is not None and save_kv_cache:
                store_mla(layer, batch, k, options.get("k_rope"), self.fault_report)
            self._attend_to_lists(q, options.get("q_rope"), layer, batch, topk_indices, out)
        return out

    def _attend_to_lists(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        topk_indices: Tensor,
        out: Tensor,
    ) -> None:
        assert self._lists is not None
        expected = [q.shape[0], self.spec.sparse_topk]
        if list(topk_indices.shape) != expected:
            raise ValueError(f"attnops: topk_indices must be {expected}, got {list(topk_indices.shape)}")
        width = MLA_KV_LORA_RANK if q_rope is not None else MLA_KV_LORA_RANK + MLA_ROPE_DIM
        pages = batch.token_to_kv_pool.get_latent_buffer(layer.layer_id)  # type: ignore[union-attr]
        q = heads("q", q, layer.num_heads, width)
        options: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "q_pe": None if q_rope is None else heads("q_rope", q_rope, layer.num_heads, MLA_ROPE_DIM),
            "topk_length": self._lists.lengths[: q.shape[0]],
            "sinks": layer.sinks,
            "out": heads("out", out, layer.num_heads, MLA_HEAD_DIM_V),
            "report": self.fault_report,
        }
        if batch.is_uniform:
            plan = self._lists.plan(batch.batch_size, batch.tokens_per_request)
            ops.sparse_mla_decode(q, pages, topk_indices, plan, **options)
        else:
            ops.sparse_mla_prefill(q, pages, topk_indices, scratch=self._scratch(q, pages), **options)

    def _scratch(self, q: Tensor, pages: Tensor) -> Tensor | None:
        """Where rows are converted that many tokens list. A token's bits depend on the others' lists then."""
        if (
            self.spec.deterministic
            or q.device.type != "cuda"
            or q.dtype != torch.bfloat16
            or pages.dtype != torch.uint8
        ):
            return None
        rows = pages.shape[0] * pages.shape[1]
        size = sparse_mla_prefill_scratch_size(q.shape[0], q.shape[1], self.spec.sparse_topk, rows)
        return q.new_empty(size, dtype=torch.uint8) if size > 0 else None

    def attend(self, call: LayerCall) -> None:
        self._dense.attend(call)


NativeSparseAttnBackend = DeepseekSparseAttnBackend


class _Lists:
    """How many rows each token may list, and plans of uniform steps, at addresses that never change.

    Attributes:
        lengths: int32 ``[max_num_tokens]``.
        ahead: Tokens that the last step of a draft loop sees beyond those of the step that is built.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device) -> None:
        self._topk, self.ahead = spec.sparse_topk, 0
        tokens = limits.max_batch_size * limits.max_tokens_per_request
        self._whole = SparseMlaPlan.allocate(
            tokens,
            num_q_heads=spec.num_q_heads,
            topk=spec.sparse_topk,
            fixed_split_tokens=MLA_INVARIANT_SPLIT_TOKENS if spec.deterministic else 0,
            device=device,
        )
        self._plans: dict[tuple[int, int], SparseMlaPlan] = {}
        self.lengths = torch.zeros(limits.max_num_tokens, dtype=torch.int32, device=device)
        self._index = torch.arange(limits.max_num_tokens, dtype=torch.int32, device=device)

    def plan(self, batch_size: int, seqlen_q: int) -> SparseMlaPlan:
        """Views of one memory, whatever the shape."""
        key, tokens = (batch_size, seqlen_q), batch_size * seqlen_q
        if key not in self._plans:
            self._plans[key] = dataclasses.replace(
                self._whole,
                batch_size=batch_size,
                seqlen_q=seqlen_q,
                num_splits=self._whole.num_splits[: tokens + 1],
            )
        return self._plans[key]

    def build(self, batch: AttentionBatch, step: DecodeStep, rows: QueryRows | None) -> None:
        """Device work, recorded in a graph: token j of n new ones has cache_seqlens - (n - 1 - j) rows to list.

        Args:
            rows: Those of the step that this rank has: lengths are then theirs.
        """
        lengths, index = self.lengths[: batch.num_tokens], self._index[: batch.num_tokens]
        if batch.is_uniform:
            count = batch.tokens_per_request
            by_request = lengths.view(batch.batch_size, count)
            torch.add(batch.cache_seqlens.unsqueeze(1), index[:count] - (count - 1 - self.ahead), out=by_request)
        else:
            ends = step.paged.cu_seqlens_q
            assert ends is not None
            request = torch.searchsorted(ends[1:], index, right=True).clamp(max=batch.batch_size - 1)
            torch.sub(batch.cache_seqlens[request] + index + 1, ends[1:][request], out=lengths)
            lengths.masked_fill_(index >= ends[-1], 0)  # rows that pad the step
        lengths.clamp_(0, self._topk)
        if rows is not None:
            lengths[: len(rows)].copy_(rows.take(lengths))
        if batch.is_uniform:
            plan = self.plan(batch.batch_size, batch.tokens_per_request)
            ops.sparse_mla_plan(plan, topk_length=lengths)
