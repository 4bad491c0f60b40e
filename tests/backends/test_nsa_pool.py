"""A layer of a sparse model on one pool: index keys stored, logits, selection, attention; eager and captured."""

from __future__ import annotations

import dataclasses

import indexer_reference
import pytest
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.speculative import Verified, keep_accepted
from attnops.types import AttentionSpec, ForwardMode
from graph_tape import GraphTape
from sparse_lists import check
from steps import LIMITS, Model, Step, make_step, rounded

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


def indexer_of(step: Step, seed: int) -> Indexer:
    generator, batch = torch.Generator().manual_seed(seed), step.batch
    new = batch.tokens_per_request

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    cached = [values(int(seqlen) - new, DIM) for seqlen in batch.cache_seqlens]
    return Indexer(values(batch.num_tokens, HEADS, DIM), values(batch.num_tokens, HEADS), cached=cached,
                   k=values(batch.num_tokens, DIM))  # fmt: skip


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
    bounds = torch.arange(batch.batch_size + 1, dtype=torch.int32) * new
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


def backend_for(model: Model):
    return get_backend_class("nsa")(model.spec, LIMITS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_layer_selects_and_attends_on_one_pool(model, shape):
    mode, _, lengths = SHAPES[shape]
    step = make_step(model, mode, *lengths, uniform=True)
    indexer, backend = indexer_of(step, 1), backend_for(model)
    store_cached(step, indexer)
    backend.init_forward_metadata(step.batch)
    lists, out = run(step, indexer, backend)
    assert torch.equal(lists, expected_lists(step, indexer))
    check(step, lists, out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_replay_selects_anew(model, shape):
    """Other lengths, tables, keys and queries in the same memory: as a fresh step, bit for bit."""
    mode, captured, replayed = SHAPES[shape]
    static, other = (
        make_step(model, mode, *lengths, uniform=True, seed=seed) for lengths, seed in ((captured, 0), (replayed, 5))
    )
    indexer, other_indexer = indexer_of(static, 1), indexer_of(other, 2)
    store_cached(static, indexer)
    store_cached(other, other_indexer)
    backend, tape = backend_for(model), GraphTape()
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        lists, out = run(static, indexer, backend)
    static.overwrite(other)
    for name in ("q", "weights", "k"):
        getattr(indexer, name).copy_(getattr(other_indexer, name))
    backend.init_forward_metadata_out_graph(static.batch)
    tape.replay()
    fresh = backend_for(model)
    fresh.init_forward_metadata(other.batch)
    fresh_lists, fresh_out = run(other, other_indexer, fresh)
    assert torch.equal(lists, fresh_lists) and torch.equal(fresh_lists, expected_lists(other, other_indexer))
    assert torch.equal(out, fresh_out)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_next_step_selects_among_accepted_tokens(model):
    """After verify, keys of accepted drafts stand where a run without drafts would have put them."""
    step = make_step(model, ForwardMode.TARGET_VERIFY, [59, 100], [5, 5], uniform=True)
    indexer, batch, backend = indexer_of(step, 3), step.batch, backend_for(model)
    store_cached(step, indexer)
    backend.init_forward_metadata(batch)
    run(step, indexer, backend)
    pool, loc = batch.token_to_kv_pool, batch.out_cache_loc
    verified = Verified.allocate(2, 5, 3)
    verified.accept_index.copy_(torch.tensor([[0, 2, 4], [5, 8, -1]]))
    keep_accepted(verified, batch)
    latents, rows = pool.get_latent_buffer(1).flatten(0, 1), rounded(step.k.view(10, 576), model.spec, None)[0]
    pages = pool.get_index_k_with_scale_buffer(1)
    keys, scales = indexer_reference.quantize(indexer.k, rotate=True, ue8m0=False)
    for source, place in ((0, 0), (2, 1), (4, 2), (5, 5), (8, 6)):
        slot = int(loc[place])
        key, scale = indexer_reference.read_key(pages, slot // pool.page_size, slot % pool.page_size)
        assert torch.equal(key.view(torch.uint8), keys[source].view(torch.uint8)), source
        assert torch.equal(scale, scales[source]), source
        assert torch.equal(latents[slot], rows[source]), source


def test_a_replaced_index_page_of_another_size_is_refused_before_the_step():
    step = make_step(MODELS[0], ForwardMode.DECODE, [63, 10], [1, 1], uniform=True)
    backend, pool = backend_for(MODELS[0]), step.batch.token_to_kv_pool
    backend.init_forward_metadata(step.batch)
    pool.index_k_with_scale_buffer[0] = torch.zeros(4, 32, 132, dtype=torch.uint8)
    with pytest.raises(ValueError, match="does not fit the backend's AttentionSpec: index_k_with_scale_buffer's shape"):
        backend.init_forward_metadata(step.batch)
