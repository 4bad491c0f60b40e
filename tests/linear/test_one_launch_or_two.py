"""Decode steps of layers with a convolution, in one launch or in two: which of them, and the same bits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attnops import ops
from attnops.backends import GDNAttnBackend, KDAAttnBackend, Mamba2AttnBackend
from attnops.layers import RadixLinearAttention
from attnops.pools import HybridReqToTokenPool, MambaPool
from attnops.types import AttentionBatch, ForwardMode, Limits
from graph_hosts import Captured
from hybrid_model import make_engine
from model_zoo import run_eager, serve

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def joined_launches():
    """How often the kernel that has both ran, of all calls so far."""
    rows = map(str.split, torch.ops.attnops.impl_counts_cuda().splitlines())
    return sum(int(count) for _, row, count in rows if "one_launch" in row)


@pytest.mark.parametrize("host", [None, Captured])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_a_model_serves_with_the_bits_of_the_two_ops(kind, dtype, host, monkeypatch):
    """Requests come and go; a captured step has rows of padding."""
    family = "ssd" if kind == "mamba2" else "delta"
    calls, joined = [], getattr(ops, f"{family}_conv_decode")
    monkeypatch.setattr(ops, joined.__name__, lambda *args, **given: calls.append(0) or joined(*args, **given))
    served, model = [], None
    for one in (True, False):
        if not one:
            for backend in (GDNAttnBackend, KDAAttnBackend, Mamba2AttnBackend):
                monkeypatch.setattr(backend, "decode_mixed", lambda *_: False)
        calls.clear()
        engine = make_engine(kind, model, host() if host else run_eager, dtype=dtype)
        model, (tokens, logits) = engine.model, serve(engine)
        assert bool(calls) == one
        served.append([torch.tensor(tokens[0]), *logits, *(p.nan_to_num() for p in engine.rows.mamba_pool.states)])
    assert len(served[0]) == len(served[1]) and all(map(torch.equal, *served))


class Layer:
    """A linear layer of some heads of keys and of values, its backend and a request in each of its pool's rows."""

    def __init__(self, device, kind, requests, kept_as, heads=(16, 32)):
        dim = 128 if device == "cuda" else 8
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
    """Up to eight heads of all requests are one launch, more are two. Padding touches nothing."""
    before = joined_launches() if device == "cuda" else 0
    layer = Layer(device, kind, 18, kept_as, (2, 4) if kind is GDNAttnBackend else (4, 4))
    first = [pool.clone() for pool in layer.states]
    out = layer.step(0, 18, padding=[3, 17])
    assert out.isfinite().all() and not out[3].any() and not out[17].any()
    slots = [layer.pool.mamba_slot(int(layer.rows[i])) for i in (3, 17)]
    after = [pool.clone() for pool in layer.states]
    assert all(torch.equal(a[:, slots], b[:, slots]) for a, b in zip(after, first)), "padding has no state"
    for cuts in ([0, 1, 3, 18], [0, 2, 18]):
        for pool, start in zip(layer.states, first):
            pool.copy_(start)
        for begin, end in pairwise(cuts):
            few = layer.step(begin, end, padding=[i - begin for i in (3, 17) if begin <= i < end])
            assert torch.equal(few, out[begin:end])
        assert all(map(torch.equal, layer.states, after))
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert joined_launches() - before == 3  # of 1, 2 and 2 requests


@pytest.mark.gpu
def test_two_launches_are_replayed_and_allocate_nothing():
    """What is convolved lies in the backend's own rows. One graph serves whatever its inputs hold then."""
    layer = Layer("cuda", GDNAttnBackend, 12, torch.float32)
    batch, out = layer.batch(0, 12), torch.empty(12, 32 * 128, dtype=torch.bfloat16, device="cuda")
    layer.backend.init_forward_metadata(batch)
    run = lambda: layer.backend.forward(layer.layer, batch, *layer.given, out=out)  # noqa: E731
    before, taken = joined_launches(), torch.cuda.memory_stats()["allocation.all.allocated"]
    run()
    assert joined_launches() == before and torch.cuda.memory_stats()["allocation.all.allocated"] == taken
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


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 7, 40])
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_states_that_the_launch_before_has_written_in_graphs(kind, kept_as, batch):
    """The second launch reads states while the convolution runs, so what came before that must be there."""
    torch.manual_seed(batch)
    groups, heads, keys, rows = (2, 16, 128, 64) if kind == "ssd" else (4, 8, 128, 128)
    channels = 2 * groups * keys + heads * rows
    make = lambda *shape, dtype=torch.float32: torch.randn(*shape, device="cuda").to(dtype)  # noqa: E731
    x, weight, bias = (make(*shape, dtype=torch.bfloat16) for shape in ((batch, channels), (channels, 4), (channels,)))
    gate = [keys] if kind == "kda" else []
    a, b = make(batch, heads, *gate), make(batch, heads)  # float32 gates: two launches
    per_head, step_bias, z = make(heads), make(heads, *gate), make(batch, heads, rows, dtype=torch.bfloat16)
    start = make(1, 2 * batch, heads, rows, keys).to(kept_as), make(1, 2 * batch, channels, 3, dtype=torch.bfloat16)
    first, second = (torch.arange(n, n + batch, device="cuda", dtype=torch.int32) for n in (0, batch))

    def step(joined, states, conv, slots):
        given = {"states": states, "state_indices": slots}
        if kind == "ssd":
            given |= {"dt_bias": step_bias, "dt_softplus": True, "z": z}
            if joined:
                pools = {"conv_states": conv, "num_groups": groups}
                return ops.ssd_conv_decode(x, weight, bias, a, -per_head.abs(), **pools, **given)
        else:
            given |= {"A_log": per_head, "dt_bias": step_bias}
            if joined:
                pools = {"conv_states": conv, "num_k_heads": groups}
                return ops.delta_conv_decode(x, weight, bias, a, b, **pools, **given)
        mixed = ops.causal_conv1d_update(x, weight, bias, conv_states=conv, state_indices=slots)
        if kind == "ssd":
            v, B, C = mixed.split([heads * rows, groups * keys, groups * keys], 1)
            B, C = B.unflatten(1, (groups, keys)), C.unflatten(1, (groups, keys))
            return ops.ssd_decode(v.unflatten(1, (heads, rows)), a, -per_head.abs(), B, C, **given)
        q, k, v = mixed.split([groups * keys, groups * keys, heads * rows], 1)
        q, k, v = q.unflatten(1, (groups, keys)), k.unflatten(1, (groups, keys)), v.unflatten(1, (heads, rows))
        return ops.delta_decode(q, k, v, a, b, **given)

    def turn(joined, states, conv):
        outs = []
        for i in range(12):
            here, there = (first, second) if i % 2 else (second, first)
            ops.copy_states(states, there, here)
            outs.append(step(joined, states[0], conv[0], here))
            if i % 3 == 0:
                ops.clear_states(states, here[:1])
            outs.append(step(joined, states[0], conv[0], here))
        return outs

    pools = {joined: [pool.clone() for pool in start] for joined in (False, True)}
    expected, graph = turn(False, *pools[False]), torch.cuda.CUDAGraph()
    turn(True, *pools[True])
    assert all(map(torch.equal, *pools.values()))
    with torch.cuda.graph(graph):
        outs = turn(True, *pools[True])
    for _ in range(5):
        for pool, old in zip(pools[True], start):
            pool.copy_(old)
        graph.replay()
        assert all(map(torch.equal, outs, expected)) and all(map(torch.equal, *pools.values()))
