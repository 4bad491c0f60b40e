"""Decay rates of all layers at once: what a step computes, and weights that change between steps and replays."""

from __future__ import annotations

import pytest
import torch
from attnops.backends.linear_rates import DecayRates
from attnops.graphs import CudaGraphs
from graph_hosts import Captured, Segments
from graph_tape import GraphTape
from hybrid_model import LINEAR, make_engine
from linear_reference import relative
from model_zoo import prompt, run_eager
from op_calls import OpCalls

KINDS = ["mamba2", "lightning"]


class Apart(DecayRates):
    """Each layer's by themselves, when it runs."""

    def compute(self):
        pass


def twins(kind, host, **options):
    """An engine, and one over the same weights whose layers compute their own rates."""
    one = make_engine(kind, host=host, **options)
    other = make_engine(kind, one.model, **options)
    linear = other.backend.linear_attn_backend
    linear._rates = Apart(len(LINEAR), 4, linear.device)
    for engine in (one, other):
        engine.add(prompt(20, 1), prompt(5, 2))
        engine.decode()
    return one, other


def through_data(layer, new):
    layer.A_log.data.copy_(new)


def in_place(layer, new):
    with torch.no_grad():
        layer.A_log.copy_(new)


def as_another(layer, new):
    layer.A_log = new


def as_data(layer, new):
    layer.A_log.data = new


CHANGES = [through_data, in_place, as_another, as_data]


def change_all(engine, change, by):
    for place in LINEAR:
        layer = engine.model.mixers[place].recurrence
        change(layer, layer.A_log.detach() + by)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_of_all_layers_are_one_exponential_once_each_has_run(kind):
    engine = make_engine(kind)
    with OpCalls() as calls:
        engine.add(prompt(20, 1))
    assert (calls.count["aten::exp"], calls.count["aten::exp_"]) == (len(LINEAR), 0)
    for _ in range(2):
        with OpCalls() as calls:
            engine.decode()
        assert (calls.count["aten::exp"], calls.count["aten::exp_"]) == (0, 1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_weights_count_in_the_next_step(kind, change):
    one, other = twins(kind, run_eager)
    old = one.decode().clone()
    assert torch.equal(old, other.decode())
    change_all(one, change, 2.0)
    for _ in range(3):
        assert torch.equal(one.decode(), other.decode())


@pytest.mark.parametrize("change", [through_data, in_place])
@pytest.mark.parametrize("host", [Captured, Segments])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_written_in_place_count_in_the_next_replay(kind, host, change):
    one, other = twins(kind, host())
    for by in (2.0, -3.0):
        change_all(one, change, by)
        for _ in range(2):
            assert relative(one.decode(), other.decode()) < 1e-5
    assert one.host.replays > 4


@pytest.mark.gpu
@pytest.mark.parametrize("change", [through_data, in_place])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_written_in_place_count_in_the_next_cuda_graph(kind, change):
    options = {"backend": "torch_native", "device": "cuda"}
    one, other = twins(kind, Captured(recorder=CudaGraphs()), **options)
    for by in (2.0, -3.0):
        change_all(one, change, by)
        for _ in range(2):
            assert torch.equal(one.decode(), other.decode())


def test_rates_are_the_steps_own_or_the_layers():
    rates, weights = DecayRates(2, 3, torch.device("cpu")), [torch.randn(3) for _ in range(2)]
    shared = []
    for _ in range(2):
        rates.begin()
        rates.compute()
        shared.append([rates.of(place, weight) for place, weight in enumerate(weights)])
    assert all(torch.equal(got, -weight.exp()) for row in shared for got, weight in zip(row, weights))
    assert shared[1][1].data_ptr() - shared[1][0].data_ptr() == 12, "rows of one tensor"
    rates.begin()  # a replayed graph computes what it was captured with: its layers may not rely on it
    weights[0].add_(1)
    assert torch.equal(rates.of(0, weights[0]), -weights[0].exp())


@pytest.mark.parametrize("other", [torch.zeros(3, dtype=torch.float64), torch.zeros(4), torch.zeros(3, device="meta")])
def test_what_does_not_fit_stays_as_it_was_for_the_op_to_judge(other):
    rates = DecayRates(2, 3, torch.device("cpu"))
    for place, weight in enumerate((torch.zeros(3), other)):
        rates.of(place, weight)
    rates.begin()
    rates.compute()
    got = rates.of(1, other)
    assert (got.dtype, got.shape, got.device) == (other.dtype, other.shape, other.device)


def test_memory_that_was_given_back_is_not_read():
    rates, away = DecayRates(1, 3, torch.device("cpu")), torch.zeros(3)
    rates.of(0, away)
    away.untyped_storage().resize_(0)
    rates.begin()
    rates.compute()
    assert torch.equal(rates.of(0, torch.ones(3)), -torch.ones(3).exp())


def test_a_tape_has_the_rates_of_the_step():
    """Of all layers, in three operations, whatever the number of layers."""
    rates, weights = DecayRates(5, 3, torch.device("cpu")), [torch.randn(3) for _ in range(5)]
    for place, weight in enumerate(weights):
        rates.of(place, weight)
    tape = GraphTape()
    rates.begin()
    with tape.capture():
        rates.compute()
        rows = [rates.of(place, weight) for place, weight in enumerate(weights)]
    for weight in weights:
        weight.data.mul_(2)
    tape.replay()
    assert all(torch.equal(row, -weight.exp()) for row, weight in zip(rows, weights))
