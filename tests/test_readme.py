"""The examples of the README and of the guide to graphs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import attnops.graphs
import pytest
import torch
from attnops.types import ForwardMode
from graph_hosts import engine_and_batch
from graph_tape import GraphTape

ROOT = Path(__file__).parents[1]


def examples(path: str) -> list:
    found = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    return [pytest.param(example, id=f"example{i}") for i, example in enumerate(found)]


@pytest.mark.parametrize("example", examples("README.md"))
def test_example_runs(example):
    exec(compile(example, "README.md", "exec"), {})


def test_the_guide_to_graphs_runs_on_the_tape(monkeypatch):
    """All of it in one namespace, as a reader passes through it; a tape takes the place of CUDA graphs."""
    monkeypatch.setattr(attnops.graphs, "CudaGraphs", lambda: GraphTape)
    for module in (attnops.graphs.runner, attnops.graphs.segments):
        monkeypatch.setattr(module, "recorder_for", lambda device, recorder: recorder or GraphTape)
    engine, input_ids, batch = engine_and_batch()
    _, ragged_ids, ragged = engine_and_batch(mode=ForwardMode.DRAFT_EXTEND, counts=(3, 1), ragged=True)
    ragged.token_to_kv_pool, ragged.req_to_token = engine.pool, engine.rows.req_to_token
    names = {
        "torch": torch,
        "model": engine.model,
        "draft_model": lambda ids, positions, batch, hidden_states: engine.model(ids, positions, batch) + hidden_states,
        "backend": engine.backend,
        "req_to_token": engine.rows.req_to_token,
        "token_to_kv_pool": engine.pool,
        "input_ids": input_ids,
        "batch": batch,
        "ragged_ids": ragged_ids,
        "ragged_batch": ragged,
    }
    found = [param.values[0] for param in examples("docs/graphs.md")]
    assert len(found) == 5
    results = []
    torch._dynamo.reset()
    for example in found:
        exec(compile(example.replace('"inductor"', '"eager"'), "docs/graphs.md", "exec"), names)
        results.append(names.get("logits"))
    assert names["runner"].sizes == (1, 2, 4, 8) and names["verify"].static.tree_mask is not None
    assert names["out"].shape == (4, 61)
    for logits in results[2:]:
        torch.testing.assert_close(logits, results[0])
