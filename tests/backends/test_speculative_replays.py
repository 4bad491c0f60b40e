"""Verify and draft-extend steps with attention: one graph, 200 replays with other lengths, trees and requests."""

from __future__ import annotations

import random

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.graphs import CudaGraphs
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from draft_trees import draw_parents
from gpu_steps import on_gpu
from graph_tape import GraphTape
from steps import LIMITS, Model, make_step

VERIFY, EXTEND = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
GQA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
MODELS = {
    "gqa": Model("gqa", AttentionSpec(**GQA)),
    "window": Model("window", AttentionSpec(**GQA, sliding_window_size=6)),
    "mla": Model("mla", AttentionSpec.mla(16, page_size=64), scale=0.1),
}
CASES = [("cpu", *case) for case in (("intel_amx", "gqa"), ("intel_amx", "mla"), ("intel_amx", "window"))]
CASES += [("cpu", *case) for case in (("trtllm_mha", "gqa"), ("flashmla", "mla"), ("fa3", "gqa"))]
GPU_CASES = [("trtllm_mha", "gqa"), ("trtllm_mha", "window"), ("fa3", "gqa"), ("fa3", "window"), ("flashmla", "mla")]
CASES += [pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in GPU_CASES]
STEPS, REPLAYS, REQUESTS, NODES = 12, 200, 4, 5


def draw_step(rng, model, shape, device):
    """Of 4 requests of any lengths; in "ragged" ones each brings 1 to 3 tokens, 8 together."""
    prefixes = [rng.choice([0, 1, rng.randint(2, 110)]) for _ in range(REQUESTS)]
    options = {"seed": rng.randrange(10**6), "uniform": shape != "ragged extend"}
    if shape == "verify":
        trees = [draw_parents(rng, NODES) for _ in prefixes]
        step = make_step(model, VERIFY, prefixes, [NODES] * REQUESTS, tree=trees, **options)
    else:
        new = [1, 2, 2, 3] if shape == "ragged extend" else [3] * REQUESTS
        rng.shuffle(new)
        step = make_step(model, EXTEND, prefixes, new, **options)
    return on_gpu(step) if device == "cuda" else step


@pytest.mark.parametrize("device, name, kind", CASES)
@pytest.mark.parametrize("shape", ["verify", "extend", "ragged extend"])
def test_replays_have_the_bits_of_eager_steps(device, name, kind, shape):
    rng, model = random.Random(f"{name} {kind} {shape}"), MODELS[kind]
    steps = [draw_step(rng, model, shape, device) for _ in range(STEPS)]
    results = []
    for step in steps:
        backend = get_backend_class(name)(model.spec, LIMITS, device)
        backend.init_forward_metadata(step.batch)
        results.append(step.run(backend).clone())
        bound = MAX_RELATIVE_ERROR[model.spec.dtype]
        assert relative_error(results[-1].cpu().view(step.expected.shape), step.expected) <= bound
    static = draw_step(rng, model, shape, device)
    backend = get_backend_class(name)(model.spec, LIMITS, device)
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata(static.batch)  # a warm-up
    static.run(backend)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    recorder = (GraphTape if device == "cpu" else CudaGraphs(device))()
    with recorder.capture():
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    seen = set()
    for turn in range(REPLAYS):
        which = rng.randrange(STEPS)
        seen.add(which)
        static.overwrite(steps[which])
        backend.init_forward_metadata_out_graph(static.batch)
        recorder.replay()
        assert torch.equal(out, results[which]), f"replay {turn}"
    assert len(seen) == STEPS
