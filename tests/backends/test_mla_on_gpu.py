"""The backends on mla_decode on a GPU: decode, verify and draft extend, eager and captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import LIMITS, Model, Step, make_step

pytestmark = pytest.mark.gpu

PAGE_SIZES = {"flashmla": [64], "cutlass_mla": [128], "trtllm_mla": [32, 64]}
CACHES = {"bf16": None, "e4m3": torch.float8_e4m3fn, "rows": torch.uint8}
# Two steps of one shape: what is captured, and what a replay then finds in its place.
SHAPES = {
    "decode": (ForwardMode.DECODE, ([0, 1, 0, 2], [1] * 4), ([63, 64, 150, 17], [1] * 4), {"uniform": True}),
    "verify": (ForwardMode.TARGET_VERIFY, ([0, 1, 2], [5] * 3), ([59, 100, 0], [5] * 3), {"uniform": True}),
    "tree": (ForwardMode.TARGET_VERIFY, ([0, 1, 2], [5] * 3), ([59, 100, 0], [5] * 3), {"uniform": True, "tree": True}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [3] * 3), ([62, 7, 130], [3] * 3), {"uniform": True}),
    "draft_extend_ragged": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [1, 3, 2]), ([62, 7, 130], [3, 2, 1]), {}),
}
BACKENDS = [(name, page_size) for name, page_sizes in PAGE_SIZES.items() for page_size in page_sizes]


def on_gpu(step: Step) -> Step:
    """The step with everything that a backend sees on the GPU; the answer stays."""
    batch, pool = step.batch, step.batch.token_to_kv_pool
    pool.kv_buffer = [pages.cuda() for pages in pool.kv_buffer]
    pool.device = pool.kv_buffer[0].device
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: value.cuda() for name, value in values.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(
        step,
        layer=step.layer.cuda(),
        batch=dataclasses.replace(batch, **moved),
        q=step.q.cuda(),
        k=step.k.cuda(),
        v=step.v.cuda(),
    )


def step_of(page_size: int, heads: int, cache: str, shape: str, which: int) -> Step:
    mode, *lengths, options = SHAPES[shape]
    spec = AttentionSpec.mla(heads, page_size=page_size, kv_dtype=CACHES[cache])
    return on_gpu(make_step(Model("mla", spec, scale=0.1), mode, *lengths[which], seed=which, **options))


def eager(name: str, step: Step) -> torch.Tensor:
    backend = get_backend_class(name)(step.model.spec, LIMITS, device="cuda")
    backend.init_forward_metadata(step.batch)
    return step.run(backend)


@pytest.mark.parametrize("name, page_size", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("cache", CACHES)
def test_eager_equals_the_reference(name, page_size, shape, heads, cache):
    step = step_of(page_size, heads, cache, shape, 1)
    assert relative_error(eager(name, step).cpu(), step.expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.parametrize("name, page_size", BACKENDS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "draft_extend_ragged"])
@pytest.mark.parametrize("cache", CACHES)
def test_replay_with_other_requests_equals_eager_bit_for_bit(name, page_size, shape, cache):
    static, other = (step_of(page_size, 16, cache, shape, which) for which in (0, 1))
    expected = eager(name, step_of(page_size, 16, cache, shape, 1))
    backend = get_backend_class(name)(static.model.spec, LIMITS, device="cuda")
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    for _ in range(2):
        static.overwrite(other)
        backend.init_forward_metadata_out_graph(static.batch)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name, page_size", BACKENDS)
def test_products_are_rounded_to_e4m3_only_when_the_model_allows_it(name, page_size):
    step = step_of(page_size, 128, "e4m3", "decode", 1)
    spec = dataclasses.replace(step.model.spec, fp8_products=True)
    step = dataclasses.replace(step, model=dataclasses.replace(step.model, spec=spec))
    error = relative_error(eager(name, step).cpu(), step.expected)
    assert MAX_RELATIVE_ERROR[torch.bfloat16] < error <= 6e-2
