"""Draft loops over any backend: branches of any page size, captured whole, idle ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops import ops
from attnops.backends import (
    DeepseekSparseAttnMultiStepBackend,
    MultiStepDraftBackend,
    NativeSparseAttnMultiStepBackend,
    get_backend_class,
)
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from draft_loops import REQUESTS, Loop, check_replays, close, run_eagerly
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

NAMES = ["torch_native", "intel_amx", "trtllm_mha", "flex_attention"]

# topk, draft steps, and whether branches are tokens of their request
WAYS = [(1, 5, False), (4, 3, False), (3, 2, False), (4, 3, True), (3, 2, True), (2, 6, True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("topk, draft_steps, trees", WAYS)
def test_branches_see_the_prefix_and_their_own_drafts(name, page_size, topk, draft_steps, trees, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    loop = Loop(name, page_size, topk, draft_steps, seed=page_size + topk, trees=trees)
    assert loop.backend.has_trees is trees
    rows = loop.rng.sample(range(1, REQUESTS + 1), 4)
    lengths = [0, page_size, *loop.draw_lengths(2)]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize(
    "kind, names", [("mla", ["torch_native", "intel_amx"]), ("window", ["torch_native", "intel_amx"])]
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("trees", [False, True])
def test_latents_and_windows(kind, names, page_size, trees):
    for name in names:
        loop = Loop(name, page_size, 3, 4, kind, trees=trees)
        assert loop.backend.has_trees is (trees and kind == "mla")
        lengths, rows = [0, 5, 40, 33], [3, 1, 5, 2]
        prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
        out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
        assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("page_size, topk, trees", [(1, 4, False), (16, 4, False), (16, 1, True), (3, 4, True)])
def test_one_graph_holds_the_loop(name, page_size, topk, trees):
    """Replays with other lengths, requests and numbers of them, bit for bit as eager ones."""
    # Products of torch have other bits in a padded batch.
    sizes = range(1, REQUESTS + 1) if name == "torch_native" else [2, REQUESTS]
    check_replays(name, page_size, topk, turns=200, recorder=GraphTape, sizes=sizes, trees=trees)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("topk, draft_steps", [(1, 5), (3, 4)])
def test_branches_of_a_sparse_model_see_what_they_list(page_size, topk, draft_steps):
    loop = Loop("nsa", page_size, topk, draft_steps, "sparse", dtype=torch.bfloat16)
    assert not loop.backend.has_trees and loop.backend.takes_lists
    lengths, rows = [0, page_size, 40, 33], [3, 1, 5, 2]
    prefixes = loop.fill(lengths, rows)
    inputs = loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("page_size, topk", [(1, 3), (16, 1), (16, 3)])
def test_one_graph_holds_the_loop_of_a_sparse_model(page_size, topk):
    sizes = range(1, REQUESTS + 1)  # padding changes where balanced plans cut
    options = {"kind": "sparse", "dtype": torch.bfloat16, "recorder": GraphTape, "sizes": sizes}
    check_replays("nsa", page_size, topk, turns=20, **options)


def test_steps_of_a_sparse_model_share_one_expansion(monkeypatch):
    """One plan of lists for the loop, and lengths of its last step."""
    loop, calls = Loop("nsa", 16, 2, 5, "sparse", dtype=torch.bfloat16), []
    op = ops.sparse_mla_plan
    monkeypatch.setattr(ops, "sparse_mla_plan", lambda *a, **k: calls.append(k["topk_length"].tolist()) or op(*a, **k))
    loop.backend.init_forward_metadata(loop.batch([0, 3, 40], [3, 1, 2]))
    assert calls == [[4, 4, 7, 7, 24, 24]]


def test_the_draft_loop_of_a_sparse_model_by_its_name():
    spec, limits = AttentionSpec.mla(4, page_size=16, sparse_topk=24), Limits(max_batch_size=2, max_seqlen=64)
    assert NativeSparseAttnMultiStepBackend is DeepseekSparseAttnMultiStepBackend
    backend = NativeSparseAttnMultiStepBackend(spec, limits, topk=1, draft_steps=4, decode_impl="fa3")
    assert [one.name for one in backend.backends] == ["nsa"] * 3 and backend.takes_lists
    with pytest.raises(ValueError, match="decode_impl must be one of"):
        NativeSparseAttnMultiStepBackend(spec, limits, topk=1, draft_steps=4, decode_impl="tilelang")


def test_idle_ranks_stay_idle():
    loop = Loop("torch_native", 1, 2, 3)
    none = torch.zeros(0, dtype=torch.int32)
    batch = AttentionBatch(forward_mode=ForwardMode.IDLE, req_pool_indices=none, cache_seqlens=none, num_tokens=3)
    loop.backend.init_forward_metadata(batch)
    step = loop.backend.step(0)
    assert step.forward_mode.is_idle() and step.num_tokens == 6
    assert not loop.layer(*(torch.ones(6, heads * 64) for heads in (4, 2, 2)), step).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("topk", [2, 4])
def test_branches_in_one_request_and_apart_give_the_same(name, topk):
    """At any page size, with any row of slots."""
    outs = []
    for page_size, trees in ((1, False), (16, False), (1, True), (16, True), (64, True)):
        loop = Loop(name, page_size, topk, 4, seed=7, trees=trees)
        loop.generator.manual_seed(3)
        lengths, rows = [0, 17, 40, 33], [3, 1, 5, 2]
        loop.fill(lengths, rows)
        outs.append(run_eagerly(loop, loop.batch(lengths, rows), *loop.inputs(4)))
    for out in outs[1:]:
        assert close(out, outs[0].double())


@pytest.mark.parametrize("trees, times", [(True, 1), (False, 3)])
def test_steps_of_trees_share_tables_and_plans(trees, times, monkeypatch):
    """Their lengths and slots are the same; steps of branches differ in length."""
    loop, calls = Loop("trtllm_mha", 16, 2, 4, trees=trees), []
    for name in ("build_page_table", "xqa_decode_plan"):
        op = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k))
    loop.backend.init_forward_metadata(loop.batch([0, 17, 40], [3, 1, 2]))
    assert calls.count("build_page_table") == calls.count("xqa_decode_plan") == times


def test_a_draft_step_says_what_it_needs():
    loop = Loop("torch_native", 1, 2, 3)
    batch = loop.batch([4, 9], [1, 2])
    mask = torch.ones(2, 2, 1, dtype=torch.uint8)
    step = {"num_tokens": 4, "out_cache_loc": torch.zeros(4, dtype=torch.int64), "positions": None}
    step |= {"tokens_per_request": 2, "tree_mask": mask}
    assert dataclasses.replace(batch, draft_steps=3, **step).tree_keys == 6
    with pytest.raises(ValueError, match="a batch with draft_steps needs a tree_mask"):
        dataclasses.replace(batch, draft_steps=3, **step | {"tree_mask": None})
    with pytest.raises(ValueError, match="draft_steps belong to DECODE, the batch is TARGET_VERIFY"):
        dataclasses.replace(batch, draft_steps=3, **step, forward_mode=ForwardMode.TARGET_VERIFY)
    with pytest.raises(ValueError, match=r"tree_mask must have shape \(2, 2, 2\), got \(2, 2, 1\)"):
        dataclasses.replace(batch, draft_steps=5, **step)
    with pytest.raises(ValueError, match="tokens_per_request of a DECODE batch is 1, got 2"):
        dataclasses.replace(batch, **step)
    with pytest.raises(ValueError, match="draft_steps must not be negative, got -1"):
        dataclasses.replace(batch, draft_steps=-1, **step)


def test_errors_name_what_is_wrong():
    loop = Loop("torch_native", 1, 2, 3)
    with pytest.raises(RuntimeError, match="init_forward_metadata must run before a draft loop's steps"):
        loop.backend.step(0)
    batch = loop.batch([4], [1])
    loop.backend.init_forward_metadata(batch)
    with pytest.raises(RuntimeError, match=r"runs with step\(s\)"):
        loop.layer(torch.ones(1, 256), torch.ones(1, 128), torch.ones(1, 128), batch)
    batch.out_cache_loc = None
    with pytest.raises(ValueError, match="needs req_to_token, out_cache_loc and token_to_kv_pool"):
        loop.backend.init_forward_metadata(batch)
    limits = Limits(max_batch_size=2, max_seqlen=64)
    for topk, steps in ((0, 3), (2, 1)):
        with pytest.raises(ValueError, match="a draft loop needs topk >= 1 and draft_steps >= 2"):
            MultiStepDraftBackend(get_backend_class("torch_native"), loop.spec, limits, topk=topk, draft_steps=steps)
    for topk, steps, message in (
        (2, 64, "draft_steps must be below Limits.max_seqlen 64, .* got 64"),
        (1025, 3, "topk must be at most 1024, .* got 1025"),
    ):
        with pytest.raises(ValueError, match=message):
            MultiStepDraftBackend(get_backend_class("torch_native"), loop.spec, limits, topk=topk, draft_steps=steps)


@pytest.mark.parametrize("name", ["intel_amx", "trtllm_mha", "flashmla"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)])
def test_a_row_of_a_chain_has_the_bits_of_its_decode(name, page_size, heads):
    """Deterministic: a verify step's row i is the decode step of the same token over the same keys."""
    mla = name == "flashmla"
    if mla and page_size != 64:
        pytest.skip("takes pages of 64")
    options = {"page_size": page_size, "deterministic": True}
    num_q_heads, num_kv_heads = heads
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": 64}
    spec = AttentionSpec.mla(num_q_heads, **options) if mla else AttentionSpec(**shape, **options)
    prefixes, nodes = [0, 70, 9], 4
    chain = [[-1, 0, 1, 2]] * 3
    step = make_step(
        Model("one", spec), ForwardMode.TARGET_VERIFY, prefixes, [nodes] * 3, seed=3, uniform=True, tree=chain
    )  # fmt: skip

    def run(batch, rows):
        backend = get_backend_class(name)(spec, LIMITS)
        batch = dataclasses.replace(batch, attn_backend=backend)
        backend.init_forward_metadata(batch)
        return step.layer(step.q[rows], step.k[rows], None if mla else step.v[rows], batch)

    verified = run(step.batch, slice(None)).view(3, nodes, -1)
    no_mask = dataclasses.replace(step.batch, tree_mask=None)
    assert torch.equal(run(no_mask, slice(None)).view(3, nodes, -1), verified)
    for node in range(nodes):
        rows = torch.arange(3) * nodes + node
        decode = dataclasses.replace(
            no_mask,
            forward_mode=ForwardMode.DECODE,
            cache_seqlens=(step.batch.cache_seqlens - nodes + node + 1).contiguous(),
            num_tokens=3,
            tokens_per_request=1,
            out_cache_loc=step.batch.out_cache_loc[rows],
        )
        assert torch.equal(run(decode, rows), verified[:, node]), f"token {node}"
