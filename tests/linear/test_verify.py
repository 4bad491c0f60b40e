"""Verification of drafts and commits: rings give what decoding the accepted tokens gives."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from draft_layer import Layer, indices, path_to
from linear_reference import relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ISAS = ["scalar", "avx2", "amx"]
OUT = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}


def decode_paths(layer, tokens, paths, pool):
    """Out of the last draft of each request's path, and of the pool after all of them."""
    out = torch.zeros(layer.batch, layer.heads, layer.rows, device=layer.device, dtype=layer.io)
    for step in range(max(len(p) for p in paths)):
        slots = [s if step < len(p) else -1 for s, p in zip(layer.slots, paths)]
        rows = [p[step] if step < len(p) else 0 for p in paths]
        now = [torch.stack([t[i, row] for i, row in enumerate(rows)]) for t in tokens]
        new = layer.call("decode", now, slots, states=pool)
        for i, p in enumerate(paths):
            if step == len(p) - 1:
                out[i] = new[i]
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("seed", range(16))
def test_rings_give_what_decoding_the_accepted_drafts_gives(seed, kind, device, monkeypatch):
    layer = Layer(seed, device, kind)
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CPU_ISA", layer.random.choice(ISAS))
    steps_give_what_decoding_gives(layer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("seed", range(8))
def test_rings_of_keys_of_128_elements(seed, kind, device):
    """Whose products are made by matrix units, on a GPU: one to eight drafts, rows that fill CTAs or do not."""
    dims = (128, [128, 64, 20, 132][seed % 4])
    steps_give_what_decoding_gives(Layer(seed, device, kind, drafts=seed + 1, dims=dims, io=torch.bfloat16))


def steps_give_what_decoding_gives(layer):
    """Several steps of trees or chains; each draft against decoding its path; then a fold."""
    before = layer.states.clone()
    for _ in range(5):
        tokens = layer.tokens()
        parents, mask = layer.trees()
        if layer.random.random() < 0.4:
            parents, mask = [list(range(-1, layer.drafts - 1))] * layer.batch, None
        out = layer.call("verify", tokens, layer.slots, states=layer.states, tree_mask=mask, **layer.rings)
        out = out.unflatten(0, (layer.batch, layer.drafts))
        for t in range(layer.drafts):
            paths = [path_to(p, t) for p in parents]
            expected = decode_paths(layer, tokens, paths, layer.twin.clone())
            live = [i for i, s in enumerate(layer.slots) if s >= 0]
            assert not out[[i for i in range(layer.batch) if i not in live], t].any(), "padding gives 0"
            if live:
                assert relative(out[live, t], expected[live]) < OUT[layer.io]
        ends = [layer.random.randrange(-1, layer.drafts) for _ in parents]
        accepted = [path_to(p, end) for p, end in zip(parents, ends)]
        decode_paths(layer, tokens, accepted, layer.twin)
        layer.commit(accepted)
    layer.commit([[]] * layer.batch, fold=True)
    assert not layer.rings["ring_len"].any()
    assert relative(layer.states, layer.twin) < 1e-6
    untouched = [s for s in range(layer.num_slots) if s not in layer.slots]
    assert torch.equal(layer.states[untouched], before[untouched])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_a_chain_gives_the_bits_of_decoding(kind, device):
    """States of float32: verified, committed and folded, as decoded token by token. On a GPU norms are summed apart."""
    layer = Layer(3, device, kind, drafts=4, dims=(128, 128))
    for _ in range(6):
        tokens = layer.tokens()
        out = layer.call("verify", tokens, layer.slots, states=layer.states, **layer.rings)
        kept = [list(range(layer.random.randrange(1, 5))) for _ in range(layer.batch)]
        expected = decode_paths(layer, tokens, kept, layer.twin)
        out = out.unflatten(0, (layer.batch, 4))
        for i, path in enumerate(kept):
            if device == "cpu":
                assert torch.equal(out[i, path[-1]], expected[i])
            elif layer.slots[i] >= 0:
                assert relative(out[i, path[-1]], expected[i]) < OUT[layer.io]
        layer.commit(kept)
    layer.commit([[]] * layer.batch, fold=True)
    assert torch.equal(layer.states, layer.twin) if device == "cpu" else relative(layer.states, layer.twin) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "ssd"])
def test_drafts_alone_have_the_bits_of_many(kind):
    """A thread has more rows where requests are many."""
    layer = Layer(4, "cuda", kind, drafts=4, dims=(128, 128), io=torch.bfloat16)
    batch, layer.heads, layer.groups = 40, 16, 8
    layer.batch, layer.num_slots, layer.slots = batch, batch, list(range(batch))
    layer.states = layer.normal(batch, 16, 128, 128)
    layer.rate, layer.bias, layer.skip = (layer.normal(16) for _ in range(3))
    layer.rings = {
        "ring_u": layer.normal(batch, 16, 12, 128),
        "ring_k": layer.normal(batch, 8, 12, 128),
        "ring_decay": layer.normal(batch, 16, 12).sigmoid(),
        "ring_len": indices([i % 9 for i in range(batch)], "cuda"),
    }
    tokens = layer.tokens()
    rings = {name: ring.clone() for name, ring in layer.rings.items()}
    many = layer.call("verify", tokens, layer.slots, states=layer.states, **rings)
    assert many.isfinite().all()
    for i in range(0, batch, 7):
        own = {name: ring.clone() for name, ring in layer.rings.items()}
        alone = layer.call("verify", [t[i : i + 1] for t in tokens], [i], states=layer.states, **own)
        assert torch.equal(alone, many[4 * i : 4 * i + 4])
        assert all(torch.equal(own[name][i], rings[name][i]) for name in rings)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_folds_alone_have_the_bits_of_many(kind):
    """A CTA has several of them."""
    layer = Layer(5, "cuda", kind, drafts=4, dims=(128, 128))
    batch, layer.heads, layer.groups = 50, 16, 8
    layer.batch, layer.num_slots, layer.slots = batch, batch, list(range(batch))
    layer.states = layer.normal(batch, 16, 128, 128)
    per_channel = [128] if kind == "kda" else []
    layer.rings = {
        "ring_u": layer.normal(batch, 16, 12, 128),
        "ring_k": layer.normal(batch, 8, 12, 128),
        "ring_decay": layer.normal(batch, 16, 12, *per_channel).sigmoid(),
        "ring_len": indices([i % 9 for i in range(batch)], "cuda"),
    }
    rings = {name: ring.clone() for name, ring in layer.rings.items()}
    states, paths = layer.states.clone(), [list(range(i % 5)) for i in range(batch)]
    layer.commit(paths)
    many, lengths = layer.states, layer.rings["ring_len"]
    for i in range(0, batch, 7):
        layer.batch, layer.slots, layer.states = 1, [i], states.clone()
        layer.rings = {name: ring.clone() for name, ring in rings.items()}
        layer.commit(paths[i : i + 1])
        assert torch.equal(layer.states[i], many[i]) and layer.rings["ring_len"][i] == lengths[i]
    folds = torch.tensor([i % 9 + i % 5 > 8 for i in range(batch)], device="cuda")
    assert torch.equal((many != states).flatten(1).any(1), folds) and not lengths[folds].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("drafts", [3, 4, 7, 8])
def test_drafts_from_states_of_16_bits(kind, drafts):
    """Those of the CPU: states of bf16 are only read, so they round nothing."""
    cpu = Layer(drafts, "cpu", kind, drafts=drafts, dims=(128, 128), io=torch.bfloat16, kept=torch.bfloat16)
    for name, ring in cpu.rings.items():
        if name != "ring_len":
            cpu.rings[name] = cpu.normal(*ring.shape).sigmoid()
    cpu.rings["ring_len"].fill_(cpu.rings["ring_u"].shape[2] - drafts)
    gpu = Layer(drafts, "cuda", kind, drafts=drafts, dims=(128, 128), io=torch.bfloat16, kept=torch.bfloat16)
    gpu.states, gpu.rings = cpu.states.cuda(), {name: ring.cuda() for name, ring in cpu.rings.items()}
    gpu.rate, gpu.bias, gpu.skip = cpu.rate.cuda(), cpu.bias.cuda(), cpu.skip.cuda()
    tokens = cpu.tokens()
    expected = cpu.call("verify", tokens, cpu.slots, states=cpu.states, **cpu.rings)
    out = gpu.call("verify", [t.cuda() for t in tokens], cpu.slots, states=gpu.states, **gpu.rings)
    assert relative(out.cpu(), expected) < 3e-3
    for name in ("ring_u", "ring_k", "ring_decay"):
        assert relative(gpu.rings[name].cpu(), cpu.rings[name]) < 1e-6


def test_bad_values_are_errors_on_the_cpu():
    layer = Layer(0, "cpu", "gdn", drafts=4, dims=(16, 8))
    layer.slots = list(range(layer.batch))
    tokens = layer.tokens()
    layer.rings["ring_len"][0] = layer.rings["ring_u"].shape[2] - 3
    with pytest.raises(RuntimeError, match="delta_verify: ring_len, request 0 must be in"):
        layer.call("verify", tokens, layer.slots, states=layer.states, **layer.rings)
    layer.rings["ring_len"][0] = 0
    for path, text in (([2, 1], "position 1"), ([4], "position 0"), ([-1], "position 0")):
        with pytest.raises(RuntimeError, match=f"delta_commit: accepted_path, request 0, {text} must be in"):
            layer.commit([path] + [[]] * (layer.batch - 1))
    with pytest.raises(RuntimeError, match="accepted_len"):
        layer.commit([[0, 1, 2, 3, 4]] + [[]] * (layer.batch - 1))
    with pytest.raises(RuntimeError, match=r"ring_u.shape\[2\] \(ring_rows\) must be at least 4"):
        short = {n: t if t.dim() == 1 else t[:, :, :3].contiguous() for n, t in layer.rings.items()}
        layer.call("verify", tokens, layer.slots, states=layer.states, **short)
    with pytest.raises(RuntimeError, match="ring_decay must have 3 dimensions"):
        wrong = {**layer.rings, "ring_decay": torch.zeros(*layer.rings["ring_decay"].shape, 16)}
        layer.call("verify", tokens, layer.slots, states=layer.states, **wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_the_checked_mode_records(device):
    layer, report = Layer(0, device, "gdn", drafts=4, dims=(16, 8)), new_report(device)
    layer.slots = list(range(layer.batch))
    layer.rings["ring_len"][0] = 10**6
    for name in ("ring_u", "ring_k", "ring_decay"):
        layer.rings[name].zero_()
    layer.call("verify", layer.tokens(), layer.slots, states=layer.states, report=report, **layer.rings)
    assert "delta_verify: ring length 1000000 at request 0" in first_fault(report)
    report.zero_()
    layer.rings["ring_len"][0] = 0
    layer.commit([[3, 7]] + [[]] * (layer.batch - 1), report=report)
    assert "delta_commit: accepted draft 7 at request 0, position 1" in first_fault(report)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_nothing(device):
    layer = Layer(0, device, "gdn", drafts=2, dims=(16, 8))
    layer.batch, layer.slots = 0, []
    before = layer.states.clone()
    assert layer.call("verify", layer.tokens(), [], states=layer.states, **layer.rings).shape[0] == 0
    given = {**layer.rings, "state_indices": indices([], device)}
    ops.delta_commit(layer.states, torch.zeros(0, 2, dtype=torch.int32, device=device), indices([], device), **given)
    assert torch.equal(layer.states, before)
