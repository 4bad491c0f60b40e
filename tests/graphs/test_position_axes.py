"""Positions of three axes (M-RoPE) in captured steps: ``[3, num_tokens]``, padded and replayed like any input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.graphs import GraphRunner, PiecewiseRunner, SegmentRunner, StaticInput
from graph_hosts import engine_and_batch
from graph_tape import GraphTape


class ThreeAxes(torch.nn.Module):
    """The zoo's model, whose rotation takes one position made of three."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, input_ids, positions, batch=None):
        return self.whole(input_ids, positions[0] + 2 * positions[1] - positions[2], batch)


def make(kind, engine):
    options = {"sizes": [2, 4], "position_axes": 3}
    model = ThreeAxes(engine.model)
    if kind is GraphRunner:
        table = engine.rows.req_to_token
        return GraphRunner(model, engine.backend, table, engine.pool, recorder=GraphTape, **options)
    if kind is SegmentRunner:
        return SegmentRunner(model, engine.backend, recorder=GraphTape, **options)
    return PiecewiseRunner(model, engine.backend, **options)


def step_of(engine, batch, turn, count=2):
    """A step of the first requests of a batch, with three positions each."""
    generator = torch.Generator().manual_seed(turn)
    positions = torch.randint(0, 9, (3, count), generator=generator) + torch.tensor([[20], [9], [0]])
    names = ("req_pool_indices", "cache_seqlens", "out_cache_loc")
    rows = {name: getattr(batch, name)[:count] for name in names}
    step = dataclasses.replace(batch, num_tokens=count, positions=positions, **rows)
    step.attn_backend = engine.backend
    return step


@pytest.mark.parametrize("kind", [GraphRunner, SegmentRunner, PiecewiseRunner])
def test_three_positions_per_token(kind):
    engine, input_ids, batch = engine_and_batch()
    runner = make(kind, engine)
    runner.capture(progress=False)
    answers = []
    for turn, count in enumerate((2, 1, 2, 2)):
        step = step_of(engine, batch, turn, count)
        got = runner.replay(input_ids[:count], step).clone()
        engine.backend.init_forward_metadata(step)
        with torch.no_grad():
            expected = ThreeAxes(engine.model)(input_ids[:count], step.positions, step)
        torch.testing.assert_close(got, expected)
        answers.append(got)
    assert not torch.allclose(answers[0], answers[2], atol=1e-4), "positions tell these steps apart"
    with pytest.raises(ValueError, match=r"positions must have shape \(3, 2\), got \(2,\)"):
        runner.replay(input_ids, dataclasses.replace(batch, positions=torch.zeros(2, dtype=torch.int64)))


def test_padding_of_earlier_steps_is_gone_in_every_axis():
    engine, input_ids, batch = engine_and_batch()
    runner = make(GraphRunner, engine)
    runner.static.fill(input_ids, step_of(engine, batch, 0), {})
    assert runner.static.positions[:, :2].all()
    runner.static.fill(input_ids[:1], step_of(engine, batch, 1, 1), {})
    assert not runner.static.positions[:, 1:].any()


def test_an_input_per_step_has_no_rows():
    with pytest.raises(ValueError, match=r"an input per step has no rows, so no dimensions before them \(lead\)"):
        StaticInput((3,), per="step", lead=(2,))
