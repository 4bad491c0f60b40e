"""A commit and the verification behind it as one op: the bits of the two."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from draft_layer import Layer, indices, path_to

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


class Step(Layer):
    """A layer whose steps are one op, and copies of all that it writes, which the two ops take along."""

    def __init__(self, seed, device, kind, ring=None, batch=None, **options):
        super().__init__(seed, device, kind, **options)
        if batch is not None:
            self.batch, self.num_slots = batch, batch + 1
            self.slots = self.random.sample(range(batch + 1), batch)
            self.states = self.normal(self.num_slots, self.heads, self.rows, self.keys).to(self.states.dtype)
        shapes = {name: list(t.shape) for name, t in self.rings.items()}
        for name, shape in shapes.items():
            shape[0] = self.num_slots
            if ring is not None and name != "ring_len":
                shape[2] = ring
        self.rings = {name: self.normal(*shape) for name, shape in shapes.items()}
        self.rings["ring_decay"].sigmoid_()
        self.most = self.rings["ring_u"].shape[2] - self.drafts
        lengths = [self.random.randint(0, self.most) for _ in range(self.num_slots)]
        self.rings["ring_len"] = indices(lengths, device)
        self.semaphores = torch.zeros(self.batch * (self.groups + 1), dtype=torch.int32, device=device)

    def take(self, paths, tokens, mask, slots=None, **options):
        """Both ways; what is written must be alike, and so is out."""
        slots = self.slots if slots is None else slots
        filled = [(path + [99] * self.drafts)[: self.drafts] for path in paths]
        path, length = indices(filled, self.device), indices([len(path) for path in paths], self.device)
        states, rings = self.states.clone(), {name: t.clone() for name, t in self.rings.items()}
        given = {**rings, "state_indices": indices(slots, self.device)}
        (ops.ssd_commit if self.kind == "ssd" else ops.delta_commit)(states, path, length, **given)
        expected = self.call("verify", tokens, slots, states=states, tree_mask=mask, **rings)
        out = self.step(path, length, tokens, mask, slots, **options)
        assert torch.equal(out, expected)
        assert torch.equal(self.states, states)
        for name, ring in rings.items():
            assert torch.equal(self.rings[name], ring), name
        assert not self.semaphores.any()
        return out

    def step(self, path, length, tokens, mask, slots, **options):
        options = {"semaphores": self.semaphores, "tree_mask": mask, **options}
        options |= {"states": self.states, "state_indices": indices(slots, self.device), **self.rings}
        q, k, v, a, b = (t.flatten(0, 1) for t in tokens)
        if self.kind == "ssd":
            given = {"D": self.skip, "dt_bias": self.bias, "dt_softplus": True}
            return ops.ssd_draft_step(v, a, -self.rate.exp(), k, q, path, length, **given, **options)
        return ops.delta_draft_step(q, k, v, a, b, path, length, A_log=self.rate, dt_bias=self.bias, **options)

    def drawn(self, tree):
        """Accepted drafts of the step before: a chain's first ones, or a path of a tree."""
        parents = self.trees()[0] if tree else [list(range(-1, self.drafts - 1))] * self.batch
        return [path_to(p, self.random.randrange(-1, self.drafts)) for p in parents]


def steps(layer, count=5):
    """Chains and trees, one after another: rings fill, fold, and fill again."""
    folded = 0
    for turn in range(count):
        tree = turn % 2 == 1
        mask = layer.trees()[1] if tree else None
        paths, before = layer.drawn(tree), layer.rings["ring_len"].clone()
        layer.take(paths, layer.tokens(), mask)
        folded += int((layer.rings["ring_len"] < before).sum())
    return folded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_has_the_bits_of_its_two_ops(seed, kind, device):
    """Of any dims and types: what no kernel takes in one launch, too."""
    steps(Step(seed, device, kind))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("drafts", range(1, 9))
def test_a_step_in_one_launch(drafts, kept, kind, device):
    """Keys of 128 elements, one to eight drafts, rows that fill a CTA or do not; rings of one tile and of two."""
    rows = [64, 20][drafts % 2] if kind == "ssd" else [128, 64, 20, 100][drafts % 4]
    options = {"drafts": drafts, "dims": (128, rows), "io": torch.bfloat16, "kept": kept}
    folded = 0
    for ring in (drafts, drafts + 3, 16, 29):
        folded += steps(Step(drafts, device, kind, ring=ring, batch=4, **options), 3)
    assert folded > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_full_ring_is_folded_and_begins_anew(tree, kind, device):
    """Rows of the new drafts overwrite rows that other heads of their group fold."""
    options = {"drafts": 4, "dims": (128, 64), "io": torch.bfloat16}
    layer = Step(7, device, kind, ring=12, batch=3, **options)
    layer.groups, layer.heads = 2, 8
    layer = _with_heads(layer)
    layer.rings["ring_len"].fill_(8)
    paths = [[1, 3], [0, 2, 3], [3]] if tree else [[0, 1, 2, 3], [0], [0, 1]]
    layer.take(paths, layer.tokens(), layer.trees()[1] if tree else None)
    assert not layer.rings["ring_len"][layer.slots].any()
    layer.take(paths, layer.tokens(), None)
    assert layer.rings["ring_len"][layer.slots].tolist() == [len(path) for path in paths]


def _with_heads(layer):
    """The layer with as many heads and groups as it says."""
    n, ring = layer.num_slots, layer.rings["ring_u"].shape[2]
    channels = [128] if layer.kind == "kda" else []
    layer.states = layer.normal(n, layer.heads, layer.rows, 128).to(layer.states.dtype)
    layer.rings["ring_u"] = layer.normal(n, layer.heads, ring, layer.rows)
    layer.rings["ring_k"] = layer.normal(n, layer.groups, ring, 128)
    layer.rings["ring_decay"] = layer.normal(n, layer.heads, ring, *channels).sigmoid()
    layer.rate, layer.bias = 0.5 * layer.normal(layer.heads), 0.5 * layer.normal(layer.heads, *channels)
    layer.skip = layer.normal(layer.heads)
    layer.semaphores = torch.zeros(layer.batch * (layer.groups + 1), dtype=torch.int32, device=layer.device)
    return layer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_padding_touches_nothing(kind, device):
    layer = Step(2, device, kind, drafts=4, dims=(128, 64), io=torch.bfloat16, ring=8, batch=3)
    layer.rings["ring_len"].fill_(4)
    before, rings = layer.states.clone(), {name: t.clone() for name, t in layer.rings.items()}
    layer.slots = [-1, layer.slots[1], -1]
    out = layer.take([[0, 1]] * 3, layer.tokens(), None).unflatten(0, (3, 4))
    assert not out[[0, 2]].any() and out[1].any()
    others = [slot for slot in range(layer.num_slots) if slot != layer.slots[1]]
    assert torch.equal(layer.states[others], before[others])
    assert all(torch.equal(t[others], rings[name][others]) for name, t in layer.rings.items())


@gpu
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("drafts", [4, 8])
def test_steps_of_many_requests(drafts, kind):
    """CTAs of a request do not all run at the same time: who is last differs from call to call."""
    dims = (128, 64 if kind == "ssd" else 128)
    layer = Step(drafts, "cuda", kind, ring=16, batch=48, drafts=drafts, dims=dims, io=torch.bfloat16)
    layer.groups, layer.heads = 4, 32
    layer = _with_heads(layer)
    assert steps(layer, 12) > 0


@gpu
def test_a_step_makes_its_semaphores():
    layer = Step(1, "cuda", "gdn", drafts=4, dims=(128, 128), io=torch.bfloat16, ring=12, batch=4)
    for _ in range(3):
        layer.take(layer.drawn(True), layer.tokens(), None, semaphores=None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(128, 64), (16, 8)], ids=["one launch", "two"])
def test_the_checked_mode_records(dims, device):
    layer = Step(0, device, "gdn", drafts=4, dims=dims, io=torch.bfloat16, ring=12, batch=3)
    tokens, report = layer.tokens(), new_report(device)
    length = indices([2, 0, 0], device)
    layer.step(indices([[3, 7, 0, 0]] * 3, device), length, tokens, None, layer.slots, report=report)
    assert "delta_draft_step: accepted draft 7 at request 0, position 1" in first_fault(report)
    report.zero_()
    bad = [layer.slots[0], 10**6, layer.slots[2]]
    path = indices([[0, 1, 2, 3]] * 3, device)
    out = layer.step(path, length, tokens, None, bad, report=report)
    assert "delta_draft_step: state slot 1000000 at request 1" in first_fault(report)
    assert not out[4:8].any() and int(report[0]) == 1
    report.zero_()
    layer.rings["ring_len"][layer.slots[2]] = 10**6
    layer.step(path, length, tokens, None, layer.slots, report=report)
    assert "delta_draft_step: ring length 1000000 at request 2" in first_fault(report)
    assert int(report[0]) == 1 and layer.rings["ring_len"][layer.slots[2]] <= layer.most


def test_what_does_not_fit_is_an_error():
    layer = Step(0, "cpu", "gdn", drafts=4, dims=(16, 8), ring=8, batch=3)
    tokens, path, length = layer.tokens(), indices([[0, 1, 2, 3]] * 3, "cpu"), indices([1] * 3, "cpu")
    with pytest.raises(RuntimeError, match=r"accepted_path.shape\[1\].* must be 4"):
        layer.step(path[:, :3].contiguous(), length, tokens, None, layer.slots)
    with pytest.raises(RuntimeError, match=r"accepted_len.shape\[0\].* must be 3"):
        layer.step(path, length[:2], tokens, None, layer.slots)
    with pytest.raises(RuntimeError, match=r"semaphores.shape\[0\] must be at least \d+"):
        layer.step(path, length, tokens, None, layer.slots, semaphores=layer.semaphores[1:])
    with pytest.raises(RuntimeError, match="delta_draft_step: accepted_path, request 0, position 0 must be in"):
        layer.step(path - 1, length, tokens, None, layer.slots)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "ssd"])
def test_nothing_is_nothing(kind, device):
    layer = Step(0, device, kind, drafts=2, dims=(128, 64), io=torch.bfloat16, batch=0)
    none = torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert layer.step(none, none[:, 0], layer.tokens(), None, []).shape[0] == 0
