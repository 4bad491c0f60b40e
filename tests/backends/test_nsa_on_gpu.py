"""The backend for lists of rows on a GPU: every mode, eager and captured, and a layer that selects by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.graphs import CudaGraphs
from attnops.types import AttentionSpec
from gpu_steps import on_gpu
from sparse_layers import MODELS as POOL_MODELS
from sparse_layers import SHAPES as POOL_SHAPES
from sparse_layers import backend_for, expected_lists, indexer_of, run, store_cached
from sparse_lists import MODELS, SHAPES, check, with_lists
from steps import LIMITS, Model, make_step

pytestmark = pytest.mark.gpu

REPLAYS = 200
FEW = Model("heads16", AttentionSpec.mla(16, page_size=64, kv_dtype=torch.uint8, sparse_topk=24), scale=0.1)
MANY = Model("heads128", AttentionSpec.mla(128, page_size=64, sparse_topk=24), scale=0.1)


def steps_of(model, shape):
    """(the captured step, the replayed one), with lists, on the GPU."""
    mode, *lengths, options = SHAPES[shape]
    if not options:
        options = {"num_tokens": max(sum(new) for _, new in lengths)}
    made = (make_step(model, mode, *of, seed=seed, **options) for seed, of in enumerate(lengths))
    return tuple(on_gpu(with_lists(step, seed)) for seed, step in enumerate(made))


def on_cuda(model):
    return backend_for(model, "cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", [*MODELS, FEW, MANY], ids=lambda model: model.name)
@pytest.mark.parametrize("apart", [False, True])
def test_every_mode_attends_to_the_listed_rows(model, shape, apart, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    step, backend = steps_of(model, shape)[1], on_cuda(model)
    backend.init_forward_metadata(step.batch)
    if apart:
        q, k = step.q, step.k
        ropes = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
        out = backend.forward(
            q[..., :512], k[..., :512], None, step.layer, step.batch, topk_indices=step.lists, **ropes
        )
    else:
        out = step.run(backend)
    check(step, step.lists, out.view(-1, step.layer.num_heads, 512))
    backend.raise_on_fault()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", [*MODELS[:3], MODELS[5], FEW], ids=lambda model: model.name)
def test_200_replays_with_other_lists_and_lengths_equal_a_fresh_step(model, shape):
    static, other = steps_of(model, shape)
    fresh = on_cuda(model)
    again = steps_of(model, shape)[1]
    fresh.init_forward_metadata(again.batch)
    expected = again.run(fresh)[: other.num_real]
    backend = on_cuda(model)
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    torch.cuda.synchronize()
    recorder = CudaGraphs("cuda")()
    with recorder.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    differing = torch.zeros((), dtype=torch.int32, device="cuda")
    for _ in range(REPLAYS):
        static.overwrite(other)
        backend.init_forward_metadata_out_graph(static.batch)
        recorder.replay()
        differing += (out[: other.num_real] != expected).any()
    assert not int(differing)
    check(dataclasses.replace(static, num_real=other.num_real), static.lists, out)


@pytest.mark.parametrize("shape", POOL_SHAPES)
@pytest.mark.parametrize("model", POOL_MODELS, ids=lambda model: model.name)
def test_a_layer_selects_and_attends_on_one_pool(model, shape):
    """Index keys stored, logits, selection and attention in a graph: as eager, and as float64 selects."""
    mode, captured, replayed = POOL_SHAPES[shape]
    static, other, eager = (
        make_step(model, mode, *lengths, uniform=True, seed=seed)
        for lengths, seed in ((captured, 0), (replayed, 5), (replayed, 5))
    )
    given = [indexer_of(static, 1), indexer_of(other, 2)]
    expected = expected_lists(other, given[1])
    static, other, eager = on_gpu(static), on_gpu(other), on_gpu(eager)
    indexer, other_indexer = (one.to("cuda") for one in given)
    for step, keys in ((static, indexer), (other, other_indexer), (eager, other_indexer)):
        store_cached(step, keys)
    backend, recorder = on_cuda(model), CudaGraphs("cuda")()
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(static.batch)
    run(static, indexer, backend)  # what happens once must not happen in a capture
    torch.cuda.synchronize()
    with recorder.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        lists, out = run(static, indexer, backend)
    static.overwrite(other)
    for name in ("q", "weights", "k"):
        getattr(indexer, name).copy_(getattr(other_indexer, name))
    backend.init_forward_metadata_out_graph(static.batch)
    recorder.replay()
    fresh = on_cuda(model)
    fresh.init_forward_metadata(eager.batch)
    fresh_lists, fresh_out = run(eager, other_indexer, fresh)
    assert torch.equal(lists, fresh_lists) and torch.equal(out, fresh_out)
    # e4m3 products keep some 13 bits: a key near the k-th value may change sides.
    chosen = [set(row) - {-1} for row in lists.tolist()]
    wanted = [set(row) - {-1} for row in expected.tolist()]
    assert [len(row) for row in chosen] == [len(row) for row in wanted]
    assert all(len(row - other) <= 1 for row, other in zip(chosen, wanted))
    check(eager, fresh_lists, fresh_out)
