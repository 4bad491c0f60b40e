"""Context parallelism of prefill with lists of rows: ranks share queries, and together have the bits of one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.metadata import QueryRows
from attnops.types import ForwardMode
from graph_tape import GraphTape
from sparse_layers import MODELS, TOPK, indexer_of, store_cached
from sparse_lists import check
from steps import LIMITS, make_step

MODES = ["in-seq-split", "round-robin-split"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXTEND = ForwardMode.EXTEND
STEPS = {
    "one prompt": ([0], [100]),
    "prompts": ([70, 0, 9], [13, 40, 8]),
    "one token a chunk": ([31], [8]),
    "padded": ([70, 0], [13, 40]),
}


def backend_for(model, mode=None, rank=0, size=1, device="cpu"):
    options = {} if mode is None else {"prefill_cp_mode": mode, "cp_rank": rank, "cp_size": size}
    return get_backend_class("nsa")(model.spec, LIMITS, device, **options)


def step_of(model, name, seed=0):
    prefixes, new = STEPS[name]
    return make_step(model, EXTEND, prefixes, new, seed=seed, num_tokens=sum(new) + 7 if name == "padded" else None)


def on(device, step):
    if device == "cpu":
        return step
    from gpu_steps import on_gpu

    return on_gpu(step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 100])
def test_ranks_have_each_row_once(mode, size, tokens):
    rows = [QueryRows.of_rank(tokens, rank, size, mode) for rank in range(size)]
    whole = torch.arange(2 * tokens).view(tokens, 2)
    parts = [one.take(whole) for one in rows]
    assert [len(part) for part in parts] == [len(one) for one in rows]
    assert sorted(torch.cat(parts)[:, 0].tolist()) == whole[:, 0].tolist()
    assert max(map(len, rows)) - min(map(len, rows)) <= 2
    padded = [torch.cat([part, torch.full((3, 2), -1)]) for part in parts]
    assert torch.equal(QueryRows.join(padded, tokens, mode), whole)


def test_where_rows_are():
    assert [QueryRows.of_rank(9, rank, 2).ranges for rank in range(2)] == [
        (range(0, 2), range(6, 9)),
        (range(2, 4), range(4, 6)),
    ]
    assert QueryRows.of_rank(9, 1, 3, MODES[1]).ranges == (range(1, 9, 3),)
    sums = [int(QueryRows.of_rank(1600, rank, 8).take(torch.arange(1600)).sum()) for rank in range(8)]
    assert max(sums) == min(sums), "a causal prompt is the same work for every rank"


def run(step, indexer, backend, rows=None):
    """(lists, out) of the rows, or of all tokens: index keys of all, then logits over each row's range of keys."""
    batch, pool = step.batch, step.batch.token_to_kv_pool
    tokens, device = batch.num_tokens, step.q.device
    rows = QueryRows.of_rank(tokens, 0, 1, MODES[1]) if rows is None else rows
    pool.set_index_k(step.layer, batch.out_cache_loc, indexer.k)
    bounds = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=device)
    bounds[1:] = batch.extend_seq_lens.cumsum(0)
    seqlens, request, _ = ops.expand_rows(batch.cache_seqlens, bounds, tokens, TOPK)
    cu_seqlens_k = torch.zeros_like(bounds)
    cu_seqlens_k[1:] = batch.cache_seqlens.cumsum(0)
    table = ops.build_page_table(batch.req_to_token, batch.req_pool_indices, batch.cache_seqlens, pool.page_size)
    pages = pool.get_index_k_with_scale_buffer(step.layer.layer_id)
    keys = LIMITS.max_seqlen * batch.batch_size
    k, k_scale = (torch.zeros(keys, 128, device=device).to(torch.float8_e4m3fn), torch.zeros(keys, device=device))
    ops.gather_index_k(k, k_scale, pages, table, cu_seqlens_k)
    mine, whose = rows.take(seqlens), rows.take(request)
    q, weights = ops.quantize_index_q(rows.take(indexer.q), rows.take(indexer.weights), scale=0.05)
    start = cu_seqlens_k[whose.long()]
    end = torch.where(mine > 0, start + mine, start)
    logits = ops.index_logits(q, k, k_scale, weights, start, end, compressed=True, max_seqlen_k=LIMITS.max_seqlen)
    lists = ops.topk_select(logits, mine, TOPK, page_table=table, row_to_request=whose, page_size=pool.page_size)
    return lists, backend.forward(rows.take(step.q), step.k, None, step.layer, batch, topk_indices=lists)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_have_the_bits_of_one(device, model, name, mode, size):
    def fresh():
        step = step_of(model, name)
        indexer = indexer_of(step, 1)
        step = on(device, step)
        indexer = indexer.to(device)
        store_cached(step, indexer)
        return step, indexer

    step, indexer = fresh()
    whole = backend_for(model, device=device)
    whole.init_forward_metadata(step.batch)
    assert whole.query_rows(step.batch) is None
    lists, out = run(step, indexer, whole)
    check(step, lists, out.view(-1, step.layer.num_heads, 512))
    parts = []
    for rank in range(size):
        step, indexer = fresh()
        backend = backend_for(model, mode, rank, size, device)
        backend.init_forward_metadata(step.batch)
        parts.append(run(step, indexer, backend, backend.query_rows(step.batch)))
    real = slice(0, step.num_real)
    joined = (QueryRows.join(part, step.batch.num_tokens, mode) for part in zip(*parts))
    for got, expected in zip(joined, (lists, out)):
        assert torch.equal(got[real], expected[real])


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_with_other_lengths_equals_a_fresh_step(mode):
    model, steps = MODELS[0], []
    for prefixes, new, seed in (([0, 30], [20, 33], 0), ([90, 2], [40, 9], 5)):
        step = make_step(model, EXTEND, prefixes, new, num_tokens=53, seed=seed)
        steps.append((step, indexer_of(step, seed)))
        store_cached(*steps[-1])
    (static, indexer), (other, other_indexer) = steps
    backend, tape = backend_for(model, mode, 1, 2), GraphTape()
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    rows = backend.query_rows(static.batch)
    with tape.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        captured = run(static, indexer, backend, rows)
    static.overwrite(other)
    for name in ("q", "weights", "k"):
        getattr(indexer, name).copy_(getattr(other_indexer, name))
    backend.init_forward_metadata_out_graph(static.batch)
    tape.replay()
    fresh = backend_for(model, mode, 1, 2)
    fresh.init_forward_metadata(other.batch)
    real = rows.take(torch.arange(53)) < other.num_real
    for got, expected in zip(captured, run(other, other_indexer, fresh, fresh.query_rows(other.batch))):
        assert torch.equal(got[real], expected[real])


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_ranks_do_not_share(mode):
    """Decode, verify, drafts, and prompts of fewer tokens than chunks: each rank has all queries."""
    model, backend = MODELS[0], backend_for(MODELS[0], mode, 1, 4)
    few = 7 if mode == MODES[0] else 3
    steps = [
        make_step(model, ForwardMode.DECODE, [63, 10], [1, 1], uniform=True),
        make_step(model, ForwardMode.TARGET_VERIFY, [63, 10], [5, 5], uniform=True),
        make_step(model, ForwardMode.DRAFT_EXTEND, [63, 10], [3, 1]),
        make_step(model, ForwardMode.MIXED, [63, 10], [30, 1]),
        make_step(model, EXTEND, [63], [few]),
    ]
    assert [backend.query_rows(step.batch) for step in steps] == [None] * 5
    assert backend.query_rows(make_step(model, EXTEND, [63], [few + 1]).batch) is not None


def test_errors_name_what_is_wrong():
    model, make = MODELS[0], get_backend_class("nsa")
    for options, message in (
        (
            {"prefill_cp_mode": "zigzag", "cp_size": 2},
            "mode must be one of in-seq-split, round-robin-split, got 'zigzag'",
        ),
        (
            {"prefill_cp_mode": MODES[0], "cp_rank": 2, "cp_size": 2},
            r"rank must be in \[0, world_size\), got rank 2 of",
        ),
        ({"cp_size": 2}, "cp_rank 0 and cp_size 2 need prefill_cp_mode"),
    ):
        with pytest.raises(ValueError, match=message):
            make(model.spec, LIMITS, **options)
    with pytest.raises(ValueError, match=r"prefill_cp_mode needs AttentionSpec\.sparse_topk"):
        make(dataclasses.replace(model.spec, sparse_topk=0), LIMITS, prefill_cp_mode=MODES[0], cp_size=2)
    step, backend = step_of(model, "one prompt"), backend_for(model, MODES[0], 0, 2)
    backend.init_forward_metadata(step.batch)
    lists = torch.zeros(100, TOPK, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q.shape\[0\] must be 50 \(query_rows of this rank of the step\), got 100"):
        step.run(backend, topk_indices=lists)
    rows = backend.query_rows(step.batch)
    with pytest.raises(ValueError, match=r"topk_indices must be \[50, 24\], got \[100, 24\]"):
        backend.forward(rows.take(step.q), step.k, None, step.layer, step.batch, topk_indices=lists)
    with pytest.raises(ValueError, match="ranks share the queries of layers with topk_indices alone"):
        backend.forward(rows.take(step.q), step.k, None, step.layer, step.batch)
    with pytest.raises(ValueError, match=r"values.shape\[0\] must be 100 \(num_tokens\), got 3"):
        rows.take(torch.zeros(3))
    with pytest.raises(ValueError, match=r"parts\[1\].shape\[0\] must be 50 or more"):
        QueryRows.join([torch.zeros(50), torch.zeros(49)], 100)
    with pytest.raises(ValueError, match="num_tokens must not be negative, got -1"):
        QueryRows.of_rank(-1, 0, 1)
