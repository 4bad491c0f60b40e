"""Fifty batches of changing sizes, lengths and tables through compiled models: one trace, no break, nothing again."""

from __future__ import annotations

import pytest
import torch
from attnops.graphs import CudaGraphs, PiecewiseRunner
from attnops.layers import forward_context
from graph_tape import GraphTape
from model_zoo import LAYERS, ZOO, Engine, run_eager
from random_steps import RandomSteps

ON_CPU = [
    pytest.param("cpu", "intel_amx", config, inner, id=f"{config.name}-{inner}")
    for config, inner in ((ZOO[0], "aot_eager"), (ZOO[2], "eager"), (ZOO[-1], "aot_eager"))
]
ON_CUDA = [
    pytest.param("cuda", backend, config, "inductor", id=f"{config.name}-cuda-inductor", marks=pytest.mark.gpu)
    for backend, config in (("trtllm_mha", ZOO[0]), ("flashmla", ZOO[-1]))
]


@pytest.mark.parametrize(("device", "backend", "config", "inner"), [*ON_CPU, *ON_CUDA])
def test_fifty_batches_compile_once(device, backend, config, inner):
    options = {"device": "cuda", "dtype": torch.bfloat16, "page_size": 64} if device == "cuda" else {}
    steps = RandomSteps(Engine(config, backend, **options))
    engine, tolerance = steps.engine, 2e-2 if device == "cuda" else 1e-4
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recorder = CudaGraphs() if device == "cuda" else GraphTape
    sizes = [8] if inner == "inductor" else [4, 8]  # a piece takes inductor seconds
    runner = PiecewiseRunner(engine.model, engine.backend, sizes=sizes, inner=inner, recorder=recorder)
    runner.capture(progress=False)
    whole = torch.compile(engine.model, backend=inner, fullgraph=True, dynamic=True)

    def run_whole(input_ids, batch):
        engine.backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(batch, engine.layers):
            return whole(input_ids, batch.positions)

    run_whole(*steps.draw(5))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(50):
            step = steps.draw(steps.number(2, 8))
            eager = run_eager(engine, *step)
            torch.testing.assert_close(runner.replay(*step), eager, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(run_whole(*step), eager, rtol=tolerance, atol=tolerance)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert runner.splitter.num_graphs == 1
    assert runner.splitter.num_compiled == (LAYERS + 1) * len(sizes), "once per piece and bucket"
