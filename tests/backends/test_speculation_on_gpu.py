"""Draft loops, two-batch overlap and the steps between them on a GPU, eager and captured."""

from __future__ import annotations

import pytest
import torch
from attnops.backends import TboAttnBackend, get_backend_class
from attnops.graphs import CudaGraphs
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_loops import REQUESTS, Loop, check_replays, close, run_eagerly
from gpu_steps import on_gpu
from steps import LIMITS, Model, make_step

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
CASES = [("trtllm_mha", "mha", size) for size in (1, 3, 16, 64)] + [("fa3", "mha", 16), ("fa3", "window", 1)]
CASES += [("trtllm_mha", "window", 16), ("flashmla", "mla", 64), ("trtllm_mla", "mla", 32), ("torch_native", "mha", 16)]
CASES += [("triton", "mha", 16), ("triton", "mla", 16), ("triton", "two dims", 16)]
CASES += [("fa3", "two dims", 16), ("fa3", "two dims", 1)]
cases = pytest.mark.parametrize("name, kind, page_size", CASES)


@cases
@pytest.mark.parametrize("topk, draft_steps", [(1, 5), (4, 3), (3, 2)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("trees", [False, True])
def test_branches_see_the_prefix_and_their_own_drafts(
    name, kind, page_size, topk, draft_steps, dtype, trees, monkeypatch
):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    loop = Loop(
        name, page_size, topk, draft_steps, kind, seed=page_size + topk, device="cuda", dtype=dtype, trees=trees
    )
    rows = loop.rng.sample(range(1, REQUESTS + 1), 4)
    lengths = [0, page_size, *loop.draw_lengths(2)]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@cases
@pytest.mark.parametrize("topk, trees", [(1, False), (4, False), (4, True)])
def test_one_graph_holds_the_loop(name, kind, page_size, topk, trees):
    """Padding changes where balanced plans cut, and the bits of torch's products: a graph for every size."""
    options = {"sizes": range(1, REQUESTS + 1), "device": "cuda", "dtype": BF16, "trees": trees}
    check_replays(name, page_size, topk, kind=kind, turns=200, recorder=CudaGraphs("cuda"), **options)


SPARSE = [(1, 1), (16, 3), (64, 1), (64, 3)]  # page size, branches


@pytest.mark.parametrize("page_size, topk", SPARSE)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_branches_of_a_sparse_model_see_what_they_list(page_size, topk, dtype, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    loop = Loop("nsa", page_size, topk, 4, "sparse", device="cuda", dtype=dtype)
    lengths, rows = [0, page_size, 40, 33], [3, 1, 5, 2]
    prefixes = loop.fill(lengths, rows)
    inputs = loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("page_size, topk", SPARSE)
def test_one_graph_holds_the_loop_of_a_sparse_model(page_size, topk):
    options = {"sizes": range(1, REQUESTS + 1), "device": "cuda", "dtype": BF16, "kind": "sparse"}
    check_replays("nsa", page_size, topk, turns=200, recorder=CudaGraphs("cuda"), **options)


GQA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "deterministic": True}
TBO = {
    "decode": (ForwardMode.DECODE, [60, 0, 33, 16, 5], [1] * 5),
    "verify": (ForwardMode.TARGET_VERIFY, [60, 0, 33], [4] * 3),
    "extend": (ForwardMode.EXTEND, [60, 0, 33, 7], [3, 40, 1, 20]),
}


@pytest.mark.parametrize("name", ["trtllm_mha", "fa3"])
@pytest.mark.parametrize("shape", TBO)
def test_halves_have_the_bits_of_the_whole(name, shape):
    mode, prefixes, new = TBO[shape]
    uniform = mode is not ForwardMode.EXTEND
    if not uniform and name == "trtllm_mha":
        pytest.skip("trtllm_mha serves no prefill")
    model = Model("gqa", AttentionSpec(**GQA))
    step = on_gpu(make_step(model, mode, prefixes, new, uniform=uniform, tree=shape == "verify"))
    if not uniform:
        step.batch.extend_seq_lens_cpu = step.batch.extend_seq_lens.cpu()
    whole, *halves = (get_backend_class(name)(model.spec, LIMITS, device="cuda") for _ in range(3))
    backend = TboAttnBackend(whole, halves)
    step.batch.attn_backend = backend

    def by_halves():
        outs, at = [], 0
        for half in backend.children_of(step.batch):
            rows = slice(at, at := at + half.num_tokens)
            outs.append(step.layer(step.q[rows], step.k[rows], step.v[rows], half))
        return torch.cat(outs)

    backend.init_forward_metadata(step.batch)
    expected = step.layer(step.q, step.k, step.v, step.batch)
    assert relative_error(expected.cpu().view(step.expected.shape), step.expected) <= MAX_RELATIVE_ERROR[BF16]
    assert torch.equal(by_halves(), expected)
    if not uniform:
        return
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
    recorder = CudaGraphs("cuda")()
    torch.cuda.synchronize()
    with recorder.capture():
        backend.init_forward_metadata_in_graph(step.batch)
        out = by_halves()
    out.zero_()
    backend.init_forward_metadata_out_graph(step.batch)
    recorder.replay()
    assert torch.equal(out, expected)
