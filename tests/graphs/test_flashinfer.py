"""A backend that plans on the host, in every host of a model: its plans follow the lengths between replays.

Over the stand-in for the package, so what is held is the adapter and the runners, not FlashInfer's kernels.
"""

from __future__ import annotations

import pytest
import torch
from attnops.types import AttentionBatch, ForwardMode
from graph_hosts import Captured, Piecewise, Segments
from graph_tape import GraphTape
from model_zoo import ZOO, Engine, churn, prompt, run_eager, serve

pytestmark = pytest.mark.usefixtures("flashinfer_stand_in", "fresh_compiler")
CONFIGS = {config.name: config for config in ZOO if config.name in ("gemma", "deepseek")}  # whose head dims it has
HOSTS = {"captured": Captured, "segments": Segments, "pieces": lambda: Piecewise(recorder=GraphTape)}


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", "4096")


def engine_of(name: str, host=run_eager) -> Engine:
    form = {"dtype": torch.bfloat16, "page_size": 64 if name == "deepseek" else 16}
    return Engine(CONFIGS[name], "flashinfer", host, **form)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_host_gives_the_tokens_of_the_eager_model(name, host):
    expected = serve(engine_of(name))
    got = serve(engine_of(name, HOSTS[host]()))
    assert got[0] == expected[0]
    if host == "captured":
        assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


def test_many_replays_of_changing_requests_equal_eager_bit_for_bit():
    host = Captured(sizes=range(1, 7))
    expected, replayed = churn(engine_of("gemma"), 40), churn(engine_of("gemma", host), 40)
    assert host.replays == 40 and replayed[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(replayed[1], expected[1], strict=True))
    wrappers = host.runners[next(iter(host.runners))]._backend.wrappers
    assert all(len(graph.wrappers) == 2 for graph in wrappers._graphs.values()), "one per kind of layer: window, full"


def test_a_replay_without_lengths_on_the_host_is_refused_by_name():
    seen = []

    def keep(engine, input_ids, batch):
        seen.append((input_ids, batch))
        return host(engine, input_ids, batch)

    host = Captured(sizes=[2])
    engine = engine_of("gemma", keep)
    engine.add(prompt(5, 0))
    engine.decode()
    input_ids, batch = seen[-1]
    batch.cache_seqlens_cpu = None
    with pytest.raises(ValueError, match="plans on the host and needs cache_seqlens_cpu in the batch"):
        next(iter(host.runners.values())).replay(input_ids, batch)


def test_an_idle_rank_replays_with_lengths_of_padding():
    host = Captured(sizes=[2, 4])
    engine = engine_of("gemma", host)
    engine.add(prompt(5, 0))
    engine.decode()
    runner = next(iter(host.runners.values()))
    before = [pages.clone() for part in engine.pool.all_buffers() for pages in part]
    none = torch.zeros(0, dtype=torch.int32)
    idle = AttentionBatch(forward_mode=ForwardMode.IDLE, req_pool_indices=none, cache_seqlens=none, num_tokens=3)
    runner.replay(none.long(), idle)
    own = runner._batches[4]
    assert own.actual_forward_mode is ForwardMode.IDLE
    assert own.cache_seqlens_cpu.tolist() == own.cache_seqlens.tolist() and own.extend_seq_lens_cpu is None
    after = [pages for part in engine.pool.all_buffers() for pages in part]
    assert all(x.view(torch.int16).equal(y.view(torch.int16)) for x, y in zip(before, after, strict=True))
