"""Backend flashinfer over the package itself, on a GPU: right, and replayed bit for bit. Skipped without it."""

from __future__ import annotations

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
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
    Model("mla", AttentionSpec.mla(16, page_size=1), scale=0.1),
    Model("mla_page64", AttentionSpec.mla(128, page_size=64), scale=0.1),
]
MODES = {
    "decode": (ForwardMode.DECODE, [0, 1, 0, 2], [63, 64, 150, 17], [1] * 4, {"uniform": True}),
    "verify": (ForwardMode.TARGET_VERIFY, [0, 1, 2], [59, 100, 0], [5] * 3, {"uniform": True}),
}


def step_of(model, shape, which):
    mode, *prefixes, new, options = MODES[shape]
    step = make_step(model, mode, prefixes[which], new, seed=which, **options)
    lengths = step.batch.cache_seqlens
    step = on_gpu(step)
    step.batch.cache_seqlens_cpu = lengths
    return step


def build(model):
    return get_backend_class("flashinfer")(model.spec, LIMITS, "cuda", workspace_size=WORKSPACE)


@pytest.mark.parametrize("shape", MODES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_equals_the_reference(model, shape):
    backend = build(model)
    for _ in range(2):
        step = step_of(model, shape, 1)
        backend.init_forward_metadata(step.batch)
        error = relative_error(step.run(backend).cpu(), step.expected)
        assert error <= MAX_RELATIVE_ERROR[model.spec.dtype]


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
