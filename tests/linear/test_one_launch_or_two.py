"""Decode steps of layers with a convolution, in one launch or in two: which of them, and the same bits."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from attnops import ops
from attnops.backends import GDNAttnBackend, KDAAttnBackend, linear
from attnops.layers import RadixLinearAttention
from attnops.pools import HybridReqToTokenPool, MambaPool
from attnops.types import AttentionBatch, ForwardMode, Limits
from graph_hosts import Captured
from hybrid_model import make_engine
from model_zoo import run_eager, serve

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Heads of values, requests, whether the states are of 16 bit; microseconds of one launch and of two, on an H200.
MEASURED = [
    (32, 1, False, 4.8, 6.0),
    (32, 8, False, 13.7, 14.3),
    (4, 116, False, 23.5, 21.9),
    (32, 64, False, 80.9, 74.0),
    (32, 256, False, 309.0, 280.4),
    (32, 64, True, 50.5, 41.2),
]


@pytest.mark.parametrize("heads, batch, halves, one, two", MEASURED)
def test_the_faster_form_is_taken_on_a_gpu(heads, batch, halves, one, two):
    states = SimpleNamespace(is_cuda=True, shape=(500, heads, 128, 128), dtype=torch.bfloat16 if halves else None)
    assert linear.takes_one_launch(states, batch) == (one < two)
    assert linear.takes_one_launch(SimpleNamespace(is_cuda=False, shape=states.shape), batch), "always on a CPU"


@pytest.mark.parametrize("host", [None, Captured])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_model_serves_with_the_same_bits(kind, dtype, host, monkeypatch):
    """Requests come and go; a captured step has rows of padding."""
    calls, joined = [], ops.delta_conv_decode
    monkeypatch.setattr(ops, "delta_conv_decode", lambda *args, **given: calls.append(0) or joined(*args, **given))
    served, model = [], None
    for one in (True, False):
        monkeypatch.setattr(linear, "takes_one_launch", lambda *_, one=one: one)
        calls.clear()
        engine = make_engine(kind, model, host() if host else run_eager, dtype=dtype)
        model, (tokens, logits) = engine.model, serve(engine)
        assert bool(calls) == one
        served.append([torch.tensor(tokens[0]), *logits, *(p.nan_to_num() for p in engine.rows.mamba_pool.states)])
    assert len(served[0]) == len(served[1]) and all(map(torch.equal, *served))


class Layer:
    """A linear layer of 16 heads of keys and 32 of values, its backend and a request in each of its pool's rows."""

    def __init__(self, device, kind, requests, kept_as):
        heads, dim = (16 if kind is GDNAttnBackend else 32, 32), 128 if device == "cuda" else 8
        channels = (2 * heads[0] + heads[1]) * dim
        normal = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape).to(device, dtype)  # noqa: E731
        states = MambaPool(requests, 1, (channels, 3), (heads[1], dim, dim), temporal_dtype=kept_as, device=device)
        self.pool = HybridReqToTokenPool(requests, 64, states, device)
        limits = Limits(max_batch_size=requests, max_seqlen=64, max_num_tokens=requests)
        rows = self.pool.alloc(requests)
        self.states = [pool.normal_() for pool in states.states]
        self.backend = kind(self.pool, limits, [0])
        gate = [heads[1]] + ([dim] if kind is KDAAttnBackend else [])
        options = {"A_log": torch.randn(heads[1], device=device), "dt_bias": torch.randn(*gate, device=device)}
        self.layer = RadixLinearAttention(0, *heads, dim, dim, normal(channels, 4), normal(channels), **options)
        self.rows, self.device = torch.tensor(rows, device=device), device
        self.given = [normal(requests, channels), normal(requests, *gate), normal(requests, heads[1])]

    def batch(self, first, last, padding=()):
        size = last - first
        stored = torch.arange(size, device=self.device)
        stored[list(padding)] = -1
        return AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=self.rows[first:last],
            cache_seqlens=torch.full((size,), 5, dtype=torch.int32, device=self.device),
            num_tokens=size,
            req_to_token=self.pool.req_to_token,
            out_cache_loc=stored,
            attn_backend=self.backend,
        )

    def step(self, first, last, padding=()):
        batch = self.batch(first, last, padding)
        self.backend.init_forward_metadata(batch)
        return self.backend.forward(self.layer, batch, *(x[first:last] for x in self.given))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [GDNAttnBackend, KDAAttnBackend])
def test_requests_of_few_and_of_many_have_the_same_bits(kind, kept_as, device):
    """18 requests of 32 heads are two launches, nine as well, and one to eight are one. Padding touches nothing."""
    layer = Layer(device, kind, 18, kept_as)
    first = [pool.clone() for pool in layer.states]
    out = layer.step(0, 18, padding=[3, 17])
    assert out.isfinite().all() and not out[3].any() and not out[17].any()
    slots = [layer.pool.mamba_slot(int(layer.rows[i])) for i in (3, 17)]
    after = [pool.clone() for pool in layer.states]
    assert all(torch.equal(a[:, slots], b[:, slots]) for a, b in zip(after, first)), "padding has no state"
    for cuts in ([0, 8, 16, 18], [0, 9, 10, 18]):
        for pool, start in zip(layer.states, first):
            pool.copy_(start)
        for begin, end in pairwise(cuts):
            few = layer.step(begin, end, padding=[i - begin for i in (3, 17) if begin <= i < end])
            assert torch.equal(few, out[begin:end])
        assert all(map(torch.equal, layer.states, after))


@pytest.mark.gpu
def test_two_launches_are_replayed_and_allocate_nothing():
    """What is convolved lies in the backend's own rows. One graph serves whatever its inputs hold then."""
    layer = Layer("cuda", GDNAttnBackend, 12, torch.float32)
    batch, out = layer.batch(0, 12), torch.empty(12, 32 * 128, dtype=torch.bfloat16, device="cuda")
    layer.backend.init_forward_metadata(batch)
    run = lambda: layer.backend.forward(layer.layer, batch, *layer.given, out=out)  # noqa: E731
    counts = torch.ops.attnops.impl_counts_cuda
    joined = lambda: [row for row in counts().splitlines() if "one_launch" in row]  # noqa: E731
    before, taken = joined(), torch.cuda.memory_stats()["allocation.all.allocated"]
    run()
    assert joined() == before and torch.cuda.memory_stats()["allocation.all.allocated"] == taken
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        for x in layer.given:
            x.normal_()
        start = [pool.clone() for pool in layer.states]
        graph.replay()
        replayed = [out.clone(), *(pool.clone() for pool in layer.states)]
        for pool, old in zip(layer.states, start):
            pool.copy_(old)
        run()
        assert all(map(torch.equal, [out, *layer.states], replayed))
