"""A sparse layer of small models: index keys stored, logits, selection, attention; and what it selects by float64."""

from __future__ import annotations

import dataclasses

import indexer_reference
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from steps import LIMITS, Model, Step

HEADS, DIM, TOPK = 4, 128, 24
OPTIONS = {"index_keys": True}
MODELS = [
    Model("bf16", AttentionSpec.mla(8, page_size=16, sparse_topk=TOPK), scale=0.1, options=OPTIONS),
    Model("page7", AttentionSpec.mla(3, page_size=7, sparse_topk=TOPK), scale=0.1, options=OPTIONS),
    Model(
        "rows", AttentionSpec.mla(16, page_size=64, kv_dtype=torch.uint8, sparse_topk=TOPK), scale=0.1, options=OPTIONS
    ),
]
SHAPES = {
    "decode": (ForwardMode.DECODE, ([9, 1, 0, 30], [1] * 4), ([63, 64, 150, 17], [1] * 4)),
    "verify": (ForwardMode.TARGET_VERIFY, ([0, 11, 62], [5] * 3), ([59, 100, 0], [5] * 3)),
}


@dataclasses.dataclass
class Indexer:
    """What an indexer's layer computes of a step: queries, weights, keys of new tokens and of those cached before."""

    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor
    cached: list[torch.Tensor]

    def to(self, device: str) -> Indexer:
        moved = {name: getattr(self, name).to(device) for name in ("q", "weights", "k")}
        return Indexer(**moved, cached=[keys.to(device) for keys in self.cached])


def indexer_of(step: Step, seed: int) -> Indexer:
    generator, batch = torch.Generator().manual_seed(seed), step.batch
    new = [batch.tokens_per_request] * batch.batch_size if batch.is_uniform else batch.extend_seq_lens.tolist()

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    cached = [values(int(seqlen) - count, DIM) for seqlen, count in zip(batch.cache_seqlens, new)]
    tokens = batch.num_tokens
    return Indexer(values(tokens, HEADS, DIM), values(tokens, HEADS), cached=cached, k=values(tokens, DIM))


def store_cached(step: Step, indexer: Indexer) -> None:
    """The prefixes' keys, as earlier steps have stored them."""
    batch = step.batch
    for request, keys in enumerate(indexer.cached):
        slots = batch.req_to_token[batch.req_pool_indices[request], : len(keys)]
        batch.token_to_kv_pool.set_index_k(step.layer, slots, keys)


def run(step: Step, indexer: Indexer, backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Device work alone: ``(lists, out)``."""
    batch = step.batch
    pool, new = batch.token_to_kv_pool, batch.tokens_per_request
    pool.set_index_k(step.layer, batch.out_cache_loc, indexer.k)
    pages = pool.get_index_k_with_scale_buffer(step.layer.layer_id)
    q, weights = ops.quantize_index_q(indexer.q, indexer.weights, scale=(HEADS * DIM) ** -0.5)
    table = ops.build_page_table(batch.req_to_token, batch.req_pool_indices, batch.cache_seqlens, pool.page_size)
    bounds = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=batch.cache_seqlens.device) * new
    seqlens, rows, _ = ops.expand_rows(batch.cache_seqlens, bounds, batch.num_tokens, TOPK)
    logits = ops.index_logits_paged(
        q.unflatten(0, (batch.batch_size, new)), pages, table, weights, seqlens.view(batch.batch_size, new)
    )
    lists = ops.topk_select(logits, seqlens, TOPK, page_table=table, row_to_request=rows, page_size=pool.page_size)
    return lists, step.run(backend, topk_indices=lists)


def expected_lists(step: Step, indexer: Indexer) -> torch.Tensor:
    """By float64 logits of keys and queries that were quantized as the indexer's ops say."""
    batch, new = step.batch, step.batch.tokens_per_request
    lists = torch.full((batch.num_tokens, TOPK), -1, dtype=torch.int32)
    q, scales = indexer_reference.quantize(indexer.q, rotate=True, ue8m0=False)
    weights = indexer.weights.double() * scales.double()
    for request, cached in enumerate(indexer.cached):
        mine = slice(request * new, (request + 1) * new)
        k, k_scale = indexer_reference.quantize(torch.cat([cached, indexer.k[mine]]), rotate=True, ue8m0=False)
        slots = batch.req_to_token[batch.req_pool_indices[request]]
        logits = indexer_reference.logits(q[mine], k, k_scale, weights[mine])
        for i, row in enumerate(logits):
            chosen = indexer_reference.selected(row[: len(cached) + i + 1], TOPK)
            lists[request * new + i, : len(chosen)] = slots[chosen]
    return lists


def backend_for(model: Model, device: str = "cpu"):
    return get_backend_class("nsa")(model.spec, LIMITS, device)
