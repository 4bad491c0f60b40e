"""Prompts of few heads, whose parts run at the same time on a GPU: `cut_prompts`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attnops import ops
from attnops.backends import HybridLinearAttnBackend
from attnops.ops.linear_prefill import delta_prefill_scratch_size, ssd_prefill_scratch_size
from attnops.report import first_fault, new_report
from hybrid_model import FULL, make_engine
from linear_prompts import Case, indices
from model_zoo import prompt

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cut_case(seed, kind, lengths, dims, kept=torch.float32):
    """On a GPU, with checkpoints all over the prompts."""
    case = Case(seed, "cuda", kind, torch.bfloat16, lengths, dims, kept).remember()
    width = max(lengths) // 64 + 1
    case.checkpoints = [
        [row[[5, 30, width - 2].index(i)] if i in (5, 30, width - 2) else -1 for i in range(width)]
        for row in case.checkpoints
    ]
    case.cut = True
    return case


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 200), (72, 24)])
@pytest.mark.parametrize("lengths", [[6000], [0, 8000, 1, 5000], [4096, 4096]])
def test_cut_prompts_equal_the_cpu_in_float32(lengths, dims, kind):
    kept = torch.bfloat16 if dims == (64, 200) else torch.float32
    case = cut_case(len(lengths), kind, lengths, dims, kept)
    out, states = case.run()
    again, same = case.run()
    assert torch.equal(again, out) and torch.equal(same, states)
    case.cut = False
    whole, twin = case.run()
    if case.kept_as == torch.float32:
        assert not torch.equal(whole, out) or not torch.equal(twin, states), "nothing was cut"
    case.assert_as_the_cpu_in_float32(out, states)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_graphs_of_cut_prompts_replay_other_lengths(kind):
    """Cuts follow from a request's own length, in the graph."""
    tokens, batch, heads, device = 8192, 2, 2, "cuda"
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator, device=device)  # noqa: E731
    q, k = (normal(tokens, 1, 128).bfloat16() for _ in range(2))
    v, b = normal(tokens, heads, 128).bfloat16(), normal(tokens, heads)
    a = normal(tokens, heads, 128) if kind == "kda" else b
    rate, before = torch.full((heads,), -6.0, device=device), normal(batch, heads, 128, 128)
    bounds, prefix, slots = indices([0, tokens, tokens], device), indices([0, 64], device), indices([1, 0], device)

    def run(states):
        given = {"states": states, "cu_seqlens": bounds, "prefix_lens": prefix, "state_indices": slots}
        if kind == "ssd":
            return ops.ssd_prefill(v, a, -rate.exp(), k, q, dt_softplus=True, cut_prompts=True, **given)
        return ops.delta_prefill(q, k, v, a, b, A_log=rate, cut_prompts=True, **given)

    states = before.clone()
    run(states)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(states)
    for length in (tokens, 5000, 300, 0, 8191):
        bounds.copy_(indices([0, length, tokens if length != 300 else 700], device))
        prefix.copy_(indices([length, 100], device))
        states.copy_(before)
        twin = before.clone()
        expected = run(twin)
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(states, twin)
        assert not out[int(bounds[-1]) :].any(), "tokens of no request"


@pytest.mark.gpu
def test_cut_prompts_know_padding_and_record_faults():
    tokens, device = 8192, "cuda"
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, 1, 128, device=device).bfloat16() for _ in range(3))
    a, b = torch.full((tokens, 1), -0.01, device=device), torch.rand(tokens, 1, device=device)
    states, report = torch.randn(2, 1, 128, 128, device=device), new_report(device)
    before = states.clone()
    given = {"states": states, "cu_seqlens": indices([0, 4000, tokens], device), "report": report, "cut_prompts": True}
    given["prefix_lens"] = indices([5, 5], device)
    out = ops.delta_prefill(q, k, v, a, b, state_indices=indices([-1, 0], device), **given)
    assert not out[:4000].any() and out[4000:].any() and torch.equal(states[1], before[1]) and not report.any()
    out = ops.delta_prefill(q, k, v, a, b, state_indices=indices([1, 2], device), **given)
    assert not out[4000:].any() and "delta_prefill: state slot 2 at request 1" in first_fault(report)


@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_the_cpu_cuts_nothing(kind):
    case = Case(3, "cpu", kind, torch.bfloat16, [700, 20], (64, 64)).remember()
    out, states = case.run()
    case.cut = True
    again, same = case.run()
    assert torch.equal(again, out) and torch.equal(same, states)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "heads, batch, keys", [(2, 1, 128), (3, 5, 40), (8, 8, 64), (64, 1, 96), (65, 1, 64), (2, 1, 200)]
)
@pytest.mark.parametrize("tokens", [70, 20000])
def test_scratch_has_the_size_that_the_op_asks_for(tokens, heads, batch, keys, device):
    x, gate = torch.zeros(1, heads, keys, dtype=torch.bfloat16, device=device), torch.zeros(1, heads, device=device)
    rows, gates = x.expand(tokens, heads, keys), gate.expand(tokens, heads)
    v = torch.zeros(tokens, heads, 8, dtype=torch.bfloat16, device=device)
    given = {"states": torch.zeros(batch, heads, 8, keys, device=device), "cut_prompts": True}
    given |= {"cu_seqlens": indices([0] * (batch + 1), device), "prefix_lens": indices([0] * batch, device)}
    given["state_indices"] = indices(range(batch), device)
    sizes = {
        "delta": delta_prefill_scratch_size(tokens, batch, heads, keys, cut_prompts=True, value_dim=8),
        "ssd": ssd_prefill_scratch_size(tokens, batch, heads, keys, cut_prompts=True, head_dim=8),
    }
    assert sizes["delta"] <= delta_prefill_scratch_size(tokens, batch, heads, keys, cut_prompts=True)
    assert (sizes["ssd"] > ssd_prefill_scratch_size(tokens, batch, heads, keys)) == (
        batch * heads <= 64 and keys <= 128
    )
    for name, size in sizes.items():
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
        for room in (scratch[:-1], scratch):
            call = (rows, rows, v, gates, gates) if name == "delta" else (v, gates, gate[0], rows, rows)
            op = ops.delta_prefill if name == "delta" else ops.ssd_prefill
            if room is scratch:
                assert not op(*call, scratch=room, **given).any()
                continue
            with pytest.raises(
                RuntimeError, match=f"{name}_prefill: scratch.* must be at least {size}, got {size - 1}"
            ):
                op(*call, scratch=room, **given)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind, name", [("gdn", "delta_prefill"), ("mamba2", "ssd_prefill")])
def test_deterministic_backends_cut_nothing(kind, name, deterministic, monkeypatch):
    op, seen = getattr(ops, name), []

    def spy(*args, **options):
        seen.append(options["cut_prompts"])
        return op(*args, **options)

    monkeypatch.setattr(ops, name, spy)
    engine = make_engine(kind)
    full, linear = engine.backend.full_attn_backend, engine.backend.linear_attn_backend
    full.spec = replace(full.spec, deterministic=deterministic)
    engine.backend = HybridLinearAttnBackend(full, linear, FULL)
    engine.add(prompt(40, 1))
    assert seen and all(cut is not deterministic for cut in seen)
