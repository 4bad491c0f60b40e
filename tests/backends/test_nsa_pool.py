"""A layer of a sparse model on one pool: index keys stored, logits, selection, attention; eager and captured."""

from __future__ import annotations

import indexer_reference
import pytest
import torch
from attnops.speculative import Verified, keep_accepted
from attnops.types import ForwardMode
from graph_tape import GraphTape
from sparse_layers import MODELS, SHAPES, backend_for, expected_lists, indexer_of, run, store_cached
from sparse_lists import check
from steps import make_step, rounded


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
