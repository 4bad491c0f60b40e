"""A backend holds one step: lengths that change under its plan are refused, and so are threads that overlap."""

from __future__ import annotations

import threading

import pytest
import torch
from attnops.backends import get_backend_class
from attnops.types import AttentionSpec, ForwardMode
from steps import LIMITS, Model, make_step

BACKENDS = ["torch_native", "intel_amx", "trtllm_mha"]
MODEL = Model("gqa", AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16))
STALE = "the step's plan is stale: the batch, DECODE of 2 requests and 2 tokens, has other cache_seqlens"


def planned(name: str):
    step = make_step(MODEL, ForwardMode.DECODE, [40, 63], [1, 1])
    backend = get_backend_class(name)(MODEL.spec, LIMITS)
    backend.init_forward_metadata(step.batch)
    return backend, step


CHANGES = {
    "add_": lambda batch: batch.cache_seqlens.add_(1),
    "copy_": lambda batch: batch.cache_seqlens.copy_(torch.tensor([1, 2])),
    "one element": lambda batch: batch.cache_seqlens.__setitem__(1, 7),
    "a view": lambda batch: batch.cache_seqlens[:1].fill_(3),
    "another tensor": lambda batch: setattr(batch, "cache_seqlens", batch.cache_seqlens.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", BACKENDS)
def test_new_lengths_on_an_old_plan_are_refused(name, change):
    backend, step = planned(name)
    expected = step.run(backend)
    assert torch.equal(step.run(backend), expected), "nothing has changed"
    old = step.batch.cache_seqlens.clone()
    CHANGES[change](step.batch)
    with pytest.raises(RuntimeError, match=STALE):
        step.run(backend)
    step.batch.cache_seqlens.copy_(old)
    backend.init_forward_metadata(step.batch)
    assert torch.equal(step.run(backend), expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_lengths_that_nobody_counts_are_served(name):
    """Inference tensors have no version: what is written to them is not seen, and nothing breaks."""
    with torch.inference_mode():
        step = make_step(MODEL, ForwardMode.DECODE, [40, 63], [1, 1])
        assert step.batch.cache_seqlens.is_inference()
        backend = get_backend_class(name)(MODEL.spec, LIMITS)
        backend.init_forward_metadata(step.batch)
        assert step.run(backend).isfinite().all()


class Held:
    """A pool whose pages are asked for: the layer's thread waits there until another has tried to prepare its step."""

    def __init__(self, pool, monkeypatch) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        ask = type(pool).get_kv_buffer

        def wait(pool, layer_id):
            self.entered.set()
            assert self.go_on.wait(30)
            return ask(pool, layer_id)

        monkeypatch.setattr(type(pool), "get_kv_buffer", wait)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_thread_that_prepares_a_step_while_another_runs_one_is_refused(name, monkeypatch):
    backend, step = planned(name)
    other = make_step(MODEL, ForwardMode.DECODE, [7, 20], [1, 1], seed=1)
    held = Held(step.batch.token_to_kv_pool, monkeypatch)
    outs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outs.append(step.run(backend)))
    thread.start()
    try:
        assert held.entered.wait(30)
        with pytest.raises(
            RuntimeError, match=r"thread \d+ prepares a step while thread \d+ runs one with the same back"
        ):
            backend.init_forward_metadata(other.batch)
    finally:
        held.go_on.set()
        thread.join()
    assert torch.equal(outs[0], step.run(backend)), "the step that was there first is not disturbed"
    backend.init_forward_metadata(other.batch)
    assert other.run(backend).isfinite().all(), "one after the other is right"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_in_the_midst_of_which_another_began_is_refused(name):
    """Two threads, one after the other at every call: neither gets the other's pages."""
    backend, step = planned(name)
    other = make_step(MODEL, ForwardMode.DECODE, [7, 20], [1, 1], seed=1)
    thread = threading.Thread(target=lambda: backend.init_forward_metadata(other.batch))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="plan is stale: it was made for DECODE"):
        step.run(backend)
    assert other.run(backend).isfinite().all()
