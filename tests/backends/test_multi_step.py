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
from attnops.graphs import CudaGraphs, GraphRunner, StaticInput
from attnops.info import kernel_counts
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.reference import pack_tree_mask
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_loops import REQUESTS, Loop, check_replays, close, run_eagerly
from gpu_steps import on_gpu
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
        assert loop.backend.has_trees is trees
        lengths, rows = [0, 5, 40, 33], [3, 1, 5, 2]
        prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
        out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
        assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("name", ["torch_native", "flex_attention", "intel_amx", "fa3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_keys_and_values_of_two_head_dims(name, page_size):
    loop = Loop(name, page_size, 3, 4, "two dims")
    assert loop.backend.has_trees
    lengths, rows = [0, 5, 40, 33], [3, 1, 5, 2]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("name, page_size", [("intel_amx", 16), ("fa3", 1)])
def test_one_graph_holds_a_loop_in_two_stages(name, page_size):
    check_replays(name, page_size, 3, kind="two dims", turns=60, recorder=GraphTape, sizes=[2, REQUESTS])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("page_size, topk, draft_steps", [(1, 4, 3), (16, 3, 6), (64, 8, 5)])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_two_stages_take_any_mask(device, page_size, topk, draft_steps, kv_dtype):
    """Rows that see drafts of any branches, as a beam does; drafts that nobody sees are NaN."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    loop = Loop("fa3", page_size, topk, draft_steps, "two dims", seed=topk, device=device, dtype=dtype)
    spec, keys = dataclasses.replace(loop.spec, kv_dtype=kv_dtype, logit_cap=9.0), topk * draft_steps
    pages = -(-loop.context // page_size)
    pool = MHATokenToKVPool(3 * pages * page_size, page_size, spec.cache_dtype, 2, 64, 1, device=device, v_head_dim=32)
    for buffer in pool.all_buffers()[0]:
        buffer.copy_(torch.full(buffer.shape, float("nan"), device=device))
    layer = RadixAttention(4, 64, 0.15, 2, 0, v_head_dim=32, logit_cap=9.0)
    order = torch.randperm(3 * pages, generator=loop.generator).view(3, pages, 1) * page_size
    table = (order + torch.arange(page_size)).flatten(1).int().to(device)
    lengths, rows = [0, page_size, 77], [2, 0, 1]
    seen = torch.rand(3, topk, keys, generator=loop.generator) < 0.4
    seen[..., 0] |= ~seen.any(-1)
    q, expected = loop.draw(3, topk, 4, 64), []
    for b, (length, row) in enumerate(zip(lengths, rows)):
        k, v = loop.draw(length + keys, 2, 64), loop.draw(length + keys, 2, 32)
        used = torch.cat([torch.ones(length, dtype=torch.bool), seen[b].any(0)]).to(device)
        slots = table[row, : length + keys].long()
        pool.set_kv_buffer(layer, slots[used], k[used], v[used])
        stored = [x.flatten(0, 1)[slots].double().nan_to_num(0.0) for x in pool.get_kv_buffer(0)]
        k, v = (x.repeat_interleave(2, 1) for x in stored)
        scores = torch.einsum("thd,khd->thk", q[b].double(), k) * 0.15
        visible = torch.cat([torch.ones(topk, length, dtype=torch.bool), seen[b]], 1).to(device)
        scores = (9.0 * torch.tanh(scores / 9.0)).masked_fill(~visible.unsqueeze(1), float("-inf"))
        expected.append(torch.einsum("thk,khd->thd", scores.softmax(-1), v))
    limits = Limits(max_batch_size=4, max_seqlen=loop.context, max_tokens_per_request=topk)
    backend = get_backend_class("fa3")(spec, limits, device)
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor(rows, device=device),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device) + keys,
        num_tokens=3 * topk,
        req_to_token=table,
        tokens_per_request=topk,
        draft_steps=draft_steps,
        tree_mask=pack_tree_mask(seen).to(device),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)
    out = layer(q.flatten(0, 1), None, None, batch, save_kv_cache=False)
    backend.raise_on_fault()
    bound = MAX_RELATIVE_ERROR[torch.bfloat16 if kv_dtype else dtype]
    assert relative_error(out.view(3, topk, 4, 32), torch.stack(expected)) <= bound


@pytest.mark.parametrize("name", ["triton"])
@pytest.mark.parametrize(
    "kind, page_size, topk, draft_steps",
    [("mha", 1, 4, 3), ("two dims", 16, 3, 3), ("mla", 16, 2, 2), ("window", 16, 2, 2), ("window", 1, 3, 3)],
)
def test_branches_in_tritons_interpreter(name, kind, page_size, topk, draft_steps):
    loop = Loop(name, page_size, topk, draft_steps, kind, seed=page_size + topk)
    assert loop.backend.has_trees
    lengths, rows = [0, page_size, 75], [3, 1, 5]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(3)
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name, trees", [("trtllm_mha", True), ("trtllm_mha", False), ("torch_native", True)])
def test_idle_ranks_replay_the_graphs_of_others(device, name, trees):
    """Nothing is stored, the steps say that they are idle, and replays before and after are right."""
    options = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16, "trees": trees}
    loop, eager = (Loop(name, 16, 2, 5, **options) for _ in range(2))
    shape, dims = (4, 2), loop.dims
    rows_of = {"q": (*shape, 4, dims[0]), "k": (*shape, 2, dims[1]), "v": (*shape, 2, dims[2])}
    runner = GraphRunner(
        loop.model, loop.backend, loop.table, loop.pool, sizes=[2, 4], layers={0: loop.layer},
        inputs={key: StaticInput(rows, dtype=loop.dtype, per="request") for key, rows in rows_of.items()},
        recorder=GraphTape if device == "cpu" else CudaGraphs(device),
    )  # fmt: skip
    runner.capture(progress=False)
    lengths, rows = [17, 40], [3, 1]
    for one in (loop, eager):
        one.generator.manual_seed(1)
        one.fill(lengths, rows)
    for turn in range(2):
        inputs, same = loop.inputs(2), eager.inputs(2)
        named = dict(zip(("q", "k", "v"), inputs))
        got = runner.replay(torch.zeros(2, dtype=torch.int64, device=device), loop.batch(lengths, rows), **named)
        assert torch.equal(got, run_eagerly(eager, eager.batch(lengths, rows), *same)), f"turn {turn}"
        assert loop.backend.step(0).actual_forward_mode is ForwardMode.DECODE
        before = [pages.clone() for pages in loop.pool.all_buffers()[0]]
        none = torch.zeros(0, dtype=torch.int32, device=device)
        for count in (1, 2, 3):
            idle = AttentionBatch(
                forward_mode=ForwardMode.IDLE, req_pool_indices=none, cache_seqlens=none, num_tokens=count
            )
            assert runner.can_replay(idle)
            assert len(runner.replay(none.long(), idle)) == count
            step = loop.backend.step(3)
            assert (step.forward_mode, step.actual_forward_mode) == (ForwardMode.DECODE, ForwardMode.IDLE)
            assert (step.out_cache_loc == -1).all()
        for old, new in zip(before, loop.pool.all_buffers()[0]):
            assert torch.equal(old.nan_to_num(9e9), new.nan_to_num(9e9))
    for count, message in ((0, "an idle batch of no rows has nothing to replay"), (5, "the batch has 5 requests")):
        idle = dataclasses.replace(idle, num_tokens=count)
        assert message in runner.reason_against(idle)
        with pytest.raises(ValueError, match=message):
            runner.replay(none.long(), idle)
    with pytest.raises(ValueError, match=r"actual_forward_mode of a DECODE batch must be DECODE or IDLE, got .*EXTEND"):
        dataclasses.replace(loop.batch(lengths, rows), actual_forward_mode=ForwardMode.EXTEND)


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


CPU_KERNELS = [("intel_amx", "mha", [1, 3, 16, 64]), ("trtllm_mha", "mha", [1, 3, 16, 64]), ("fa3", "mha", [1, 16, 64])]
CPU_KERNELS += [("intel_amx", "mla", [1, 16, 64])]
GPU_KERNELS = [("trtllm_mha", "mha", [1, 3, 16, 64]), ("fa3", "mha", [1, 16, 64])]


@pytest.mark.parametrize(
    "device, name, kind, pages",
    [("cpu", *one) for one in CPU_KERNELS] + [pytest.param("cuda", *one, marks=pytest.mark.gpu) for one in GPU_KERNELS],
)
@pytest.mark.parametrize("topk", [2, 4])
def test_pages_of_any_size_give_the_bits_of_page_1(device, name, kind, pages, topk):
    """Deterministic, branches in one request. On a GPU, where the same kernels serve both pages; else within bounds."""
    outs, rows = [], []
    for page_size in pages:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loop = Loop(name, page_size, topk, 4, kind, seed=7, device=device, dtype=dtype, deterministic=True)
        assert loop.backend.has_trees
        loop.generator.manual_seed(3)
        lengths, requests = [0, 17, 90, 33], [3, 1, 5, 2]
        loop.fill(lengths, requests)
        out, chosen = run_and_say_rows(loop, loop.batch(lengths, requests))
        outs.append(out)
        rows.append(chosen)
    for page_size, out, chosen in zip(pages[1:], outs[1:], rows[1:]):
        assert close(out, outs[0].double())
        if device == "cpu" or chosen == rows[0]:
            assert torch.equal(out, outs[0]), f"page {page_size}"
    if device == "cuda":  # pages of 16 and 64 tokens always have the same kernels
        assert rows[-1] == rows[-2] and torch.equal(outs[-1], outs[-2])


def run_and_say_rows(loop, batch):
    """What a loop gives, and which rows of the kernel tables of decode it chose."""
    before = kernel_counts()
    out = run_eagerly(loop, batch, *loop.inputs(4))
    changed = {row for row, count in kernel_counts().items() if count != before.get(row, 0)}
    return out, {row for row in changed if row.split()[1] in ("xqa_decode", "mla_decode")}


# Query heads and KV heads. On a GPU a group of rows has the kernel of 8, 16, 32, ... rows, MLA's those of 16, 32, 64.
CHAINS = [("cpu", name, heads, 64) for name in ("intel_amx", "trtllm_mha", "flashmla") for heads in ((4, 2), (8, 1))]
GPU_CHAINS = [("trtllm_mha", (4, 2), 64), ("trtllm_mha", (8, 1), 64), ("trtllm_mha", (4, 2), 128)]
GPU_CHAINS += [("trtllm_mha", (32, 8), 128), ("flashmla", (4, 1), 64), ("flashmla", (16, 1), 64)]


@pytest.mark.parametrize(
    "device, name, heads, head_dim",
    CHAINS + [pytest.param("cuda", *one, marks=pytest.mark.gpu) for one in GPU_CHAINS],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_row_of_a_chain_has_the_bits_of_its_decode(device, name, heads, head_dim, page_size):
    """Deterministic: a verify step's row i is the decode step of the same token over the same keys.

    On a GPU, where the same kernel serves both; else within bounds.
    """
    mla = name == "flashmla"
    if mla and page_size != 64:
        pytest.skip("takes pages of 64")
    options = {"page_size": page_size, "deterministic": True}
    num_q_heads, num_kv_heads = heads
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    spec = AttentionSpec.mla(num_q_heads, **options) if mla else AttentionSpec(**shape, **options)
    prefixes, nodes = [0, 70, 9], 4
    chain = [[-1, 0, 1, 2]] * 3
    step = make_step(
        Model("one", spec), ForwardMode.TARGET_VERIFY, prefixes, [nodes] * 3, seed=3, uniform=True, tree=chain
    )  # fmt: skip
    step = on_gpu(step) if device == "cuda" else step
    rows_of_decode = num_q_heads if mla else num_q_heads // num_kv_heads
    kernels = [next(n for n in ((16,) if mla else (8,)) + (32, 64, 128) if n >= rows_of_decode * k) for k in (1, nodes)]
    same_kernel = device == "cpu" or kernels[0] == kernels[1]

    def run(batch, rows):
        backend = get_backend_class(name)(spec, LIMITS, device)
        batch = dataclasses.replace(batch, attn_backend=backend)
        backend.init_forward_metadata(batch)
        return step.layer(step.q[rows], step.k[rows], None if mla else step.v[rows], batch)

    verified = run(step.batch, slice(None)).view(3, nodes, -1)
    assert relative_error(verified.cpu().view(step.expected.shape), step.expected) <= MAX_RELATIVE_ERROR[spec.dtype]
    no_mask = dataclasses.replace(step.batch, tree_mask=None)
    assert torch.equal(run(no_mask, slice(None)).view(3, nodes, -1), verified)
    for node in range(nodes):
        rows = torch.arange(3, device=device) * nodes + node
        decode = dataclasses.replace(
            no_mask,
            forward_mode=ForwardMode.DECODE,
            cache_seqlens=(step.batch.cache_seqlens - nodes + node + 1).contiguous(),
            num_tokens=3,
            tokens_per_request=1,
            out_cache_loc=step.batch.out_cache_loc[rows],
        )
        out = run(decode, rows)
        assert close(out, verified[:, node].double())
        if same_kernel:
            assert torch.equal(out, verified[:, node]), f"token {node}"
