"""Backend flashinfer over the package itself, on a GPU: right, and replayed bit for bit. Skipped without it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.graphs import CudaGraphs
from attnops.types import AttentionSpec, AttentionType, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_loops import REQUESTS, Loop, check_replays, close, run_eagerly
from gpu_steps import on_gpu
from steps import LIMITS, Model, make_step

pytestmark = pytest.mark.gpu
pytest.importorskip("flashinfer", reason="needs flashinfer-python")
E4M3 = torch.float8_e4m3fn
WORKSPACE = 128 << 20


def gqa(**options) -> AttentionSpec:
    return AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, **options})


MODELS = [
    Model("tensor_cores", gqa()),
    Model("cuda_cores_page1", gqa(num_kv_heads=8, page_size=1)),
    Model("fp8_page64", gqa(kv_dtype=E4M3, page_size=64)),
    Model("deterministic", gqa(deterministic=True)),
    Model("window", gqa(sliding_window_size=40)),
    Model("cap", gqa(logit_cap=5.0)),
    Model("mla", AttentionSpec.mla(16, page_size=1), scale=0.1),
    Model("mla_page64", AttentionSpec.mla(128, page_size=64), scale=0.1),
]
PAGES = [  # every page size of the conformance suite, and a model without a multiple of heads
    *(Model(f"page{size}", gqa(page_size=size)) for size in (1, 3, 64, 128)),
    Model("five_heads", gqa(num_q_heads=5, num_kv_heads=1)),
    Model("mla_page3", AttentionSpec.mla(16, page_size=3), scale=0.1),
]
MODES = {
    "decode": (ForwardMode.DECODE, [0, 1, 0, 2], [63, 64, 150, 17], [1] * 4, {"uniform": True}),
    "verify": (ForwardMode.TARGET_VERIFY, [0, 1, 2], [59, 100, 0], [5] * 3, {"uniform": True}),
}


RAGGED = {
    "prompts": (ForwardMode.EXTEND, [0, 0, 0], [0, 0, 0], [33, 1, 150], {}),
    "extend": (ForwardMode.EXTEND, [0, 0, 0], [0, 65, 100], [33, 1, 20], {}),
    "mixed": (ForwardMode.MIXED, [0, 0, 0], [64, 65, 100], [1, 1, 20], {}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, [2, 3, 0], [62, 7, 130], [3, 2, 1], {}),
}


def step_of(model, shape, which):
    mode, *prefixes, new, options = {**MODES, **RAGGED}[shape]
    step = make_step(model, mode, prefixes[which], new, seed=which, **options)
    lengths, new_lengths = step.batch.cache_seqlens, step.batch.extend_seq_lens
    step = on_gpu(step)
    step.batch.cache_seqlens_cpu, step.batch.extend_seq_lens_cpu = lengths, new_lengths
    return step


def build(model):
    return get_backend_class("flashinfer")(model.spec, LIMITS, "cuda", workspace_size=WORKSPACE)


@pytest.mark.parametrize("shape", [*MODES, *RAGGED])
@pytest.mark.parametrize("model", [*MODELS, *PAGES], ids=lambda model: model.name)
def test_equals_the_reference(model, shape):
    if model.spec.deterministic and shape in RAGGED:
        pytest.skip("refused: not batch-invariant")
    backend = build(model)
    for _ in range(2):
        step = step_of(model, shape, 1)
        backend.init_forward_metadata(step.batch)
        error = relative_error(step.run(backend).cpu(), step.expected)
        assert error <= MAX_RELATIVE_ERROR[model.spec.dtype]


def test_new_tokens_and_their_prefixes_apart_are_merged(monkeypatch):
    monkeypatch.setattr("attnops.backends.flashinfer.MERGED_FROM_TOKENS", 40)
    backend, step = build(MODELS[0]), step_of(MODELS[0], "extend", 1)
    backend.init_forward_metadata(step.batch)
    error = relative_error(step.run(backend).cpu(), step.expected)
    assert error <= MAX_RELATIVE_ERROR[torch.bfloat16]
    assert {key[0] for key in backend._prepared.of(step.batch).planned} == {"ragged", "prefix"}


@pytest.mark.parametrize("shape", MODES)
def test_a_deterministic_requests_bits_depend_on_no_other(shape):
    step, backend = step_of(MODELS[3], shape, 1), build(MODELS[3])
    backend.init_forward_metadata(step.batch)
    together, new = step.run(backend), step.batch.tokens_per_request
    for request in range(step.batch.batch_size):
        one, rows = slice(request, request + 1), slice(request * new, (request + 1) * new)
        options = {"num_tokens": new, "out_cache_loc": step.batch.out_cache_loc[rows]}
        for name in ("req_pool_indices", "cache_seqlens", "cache_seqlens_cpu"):
            options[name] = getattr(step.batch, name)[one]
        batch = dataclasses.replace(step.batch, **options)
        backend.init_forward_metadata(batch)
        alone = backend.forward(step.q[rows], step.k[rows], step.v[rows], step.layer, batch)
        assert torch.equal(alone.view(new, *together.shape[1:]), together[rows])


def test_an_encoder():
    """Every token of a request sees every other: new tokens alone, without a cache."""
    spec = gqa(num_kv_heads=8, attn_type=AttentionType.ENCODER_ONLY)
    model = Model("encoder", spec)
    backend, step = build(model), step_of(model, "prompts", 1)
    backend.init_forward_metadata(step.batch)
    assert relative_error(step.run(backend).cpu(), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("shape", MODES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_200_replays_with_other_requests(model, shape):
    static, other = (step_of(model, shape, which) for which in (0, 1))
    expected, lengths = other.expected, other.batch.cache_seqlens_cpu
    backend = build(model)
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(static.batch)
    static.run(backend)  # each kind of layer gets its wrapper
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    first = None
    for _ in range(200):
        static.overwrite(other)
        static.batch.cache_seqlens_cpu = lengths
        backend.init_forward_metadata_out_graph(static.batch)
        graph.replay()
        torch.cuda.synchronize()
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
    assert relative_error(first.cpu(), expected) <= MAX_RELATIVE_ERROR[model.spec.dtype]


def test_a_capture_without_a_step_before_it_is_refused():
    model = MODELS[0]
    static, backend = step_of(model, "decode", 0), build(model)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    refused = pytest.raises(RuntimeError, match="plans on the host, which a capture cannot record")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        backend.init_forward_metadata_in_graph(static.batch)
        static.run(backend)


DRAFTS = [("mha", {}), ("mha", {"kv_dtype": E4M3}), ("window", {}), ("mha", {"window": 40}), ("mla", {})]


@pytest.mark.parametrize("kind, options", DRAFTS, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_branches_of_a_draft_loop_share_a_prefix(kind, options, page_size, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", str(WORKSPACE))
    loop = Loop("flashinfer", page_size, 4, 4, kind, device="cuda", dtype=torch.bfloat16, **options)
    assert loop.backend.has_trees
    lengths, rows = [0, 5, page_size, 75], [3, 1, 5, 2]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert relative_error(out, loop.expected(prefixes, *inputs)) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("kind, page_size", [("mha", 16), ("window", 1), ("mla", 64)])
def test_one_graph_holds_a_draft_loop(kind, page_size, monkeypatch):
    """Splits of an eager step and of a graph differ, so nothing is compared bit for bit."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", str(WORKSPACE))
    options = {"kind": kind, "device": "cuda", "dtype": torch.bfloat16}
    check_replays(
        "flashinfer", page_size, 3, turns=20, recorder=CudaGraphs("cuda"), sizes=[2, REQUESTS], agrees=close, **options
    )
