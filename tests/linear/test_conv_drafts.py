"""Drafts in causal_conv1d_update: chains and trees, the windows that they leave, and their commits."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.reference import pack_tree_mask
from attnops.report import first_fault, new_report
from linear_reference import convolve, relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IO = [torch.float32, torch.float16, torch.bfloat16]
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Drafts:
    """A call of drawn extents, and what it shall give."""

    def __init__(self, seed, device):
        r, self.device = random.Random(seed), device
        torch.manual_seed(seed)
        self.io, width = r.choice(IO), r.choice([2, 3, 4])
        channels, batch, self.count = r.choice([8, 64, 200, 1032, 33]), r.choice([1, 3, 20]), r.choice([1, 2, 4, 9, 16])
        tree, self.silu = r.random() < 0.6, r.random() < 0.7
        draw = lambda t: r.randrange(-1, t) if tree else t - 1  # noqa: E731
        self.parents = [[draw(t) for t in range(self.count)] for _ in range(batch)]
        normal = lambda *shape: torch.randn(*shape).to(device, self.io)  # noqa: E731
        self.x = normal(batch * self.count, channels + r.choice([0, 8]))[:, :channels]
        self.weight, self.bias = normal(channels, width), normal(channels) if r.random() < 0.5 else None
        self.slots = [s if r.random() < 0.85 else -1 for s in r.sample(range(batch + 3), batch)]
        self.states = normal(batch + 3, channels, width - 1)
        self.windows = normal(batch, self.count, channels, width - 1)
        if r.random() < 0.3:
            self.states = self.states.mT.contiguous().mT
        if r.random() < 0.4:
            self.windows = self.windows.mT.contiguous().mT
        elif r.random() < 0.3:
            self.windows = self.windows.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        sees = torch.zeros(batch, self.count, self.count, dtype=torch.bool)
        for b in range(batch):
            for t in range(self.count):
                sees[b, t, self.path(b, t)] = True
        self.tree_mask = pack_tree_mask(sees).to(device) if tree else None

    def path(self, request, t):
        """The drafts from the root to draft t."""
        path = []
        while t >= 0:
            path.insert(0, t)
            t = self.parents[request][t]
        return path

    def run(self, **options):
        given = {"conv_states": self.states, "windows": self.windows, "tree_mask": self.tree_mask}
        given |= {"state_indices": indices(self.slots, self.device), "silu": self.silu, **options}
        return ops.causal_conv1d_update(self.x, self.weight, self.bias, **given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_a_draft_has_the_bits_of_its_path_decoded(seed, device):
    """Out and window of each draft are those of its ancestors, taken one after another from the state."""
    case = Drafts(seed, device)
    before, kept = case.states.clone(), case.windows.clone()
    out = case.run()
    assert torch.equal(case.states, before), "states are only read"
    wide = [None if t is None else t.double().cpu() for t in (case.x, case.weight, case.bias, before)]
    for b, slot in enumerate(case.slots):
        rows = slice(b * case.count, (b + 1) * case.count)
        if slot < 0:
            assert not out[rows].any() and torch.equal(case.windows[b], kept[b]), "padding is not touched"
            continue
        paths = [case.path(b, t) for t in range(case.count)]
        expected = torch.stack([convolve(wide[0][rows][p], *wide[1:3], wide[3][slot], case.silu)[0][-1] for p in paths])
        assert relative(out[rows], expected) < BOUND[case.io]
        for t, path in list(enumerate(paths))[:: max(1, case.count // 3)]:
            state, given = before[slot : slot + 1].clone(), {"state_indices": indices([0], device), "silu": case.silu}
            stepped = ops.causal_conv1d_update(case.x[rows][path], case.weight, case.bias, conv_states=state, **given)
            assert torch.equal(out[rows][t], stepped[-1]) and torch.equal(case.windows[b, t], state[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [False, True], ids=["one layer", "three layers"])
def test_a_commit_copies_the_last_accepted_window(wide, device):
    """`copy_states` from another pool. Nothing accepted is -1: the state stays."""
    torch.manual_seed(3)
    layers, channels, count = 3 if wide else 1, 40, 3
    states = torch.randn(layers, 6, channels, 3, device=device)
    before, windows = states.clone(), torch.randn(layers, 4 * count, channels, 3, device=device)
    slots = indices([5, 0, -1, 2], device)
    ops.copy_states(states, indices([1, 5, 7, -1], device), slots, source=windows)
    before[:, 5], before[:, 0] = windows[:, 1], windows[:, 5]
    assert torch.equal(states, before)
    ops.copy_states(states, indices([0], device), indices([0], device), source=windows)
    assert torch.equal(states[:, 0], windows[:, 0]), "equal numbers name slots of two pools"


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_nothing(device):
    states, weight = torch.ones(3, 16, 3, device=device), torch.ones(16, 4, device=device)

    def call(batch, count, channels=16):
        given = {"windows": torch.ones(batch, count, channels, 3, device=device)}
        given |= {"conv_states": states[:, :channels], "state_indices": indices(range(batch), device)}
        mask = torch.ones(batch, count, (count + 7) // 8, dtype=torch.uint8, device=device)
        x = torch.zeros(batch * count, channels, device=device)
        return ops.causal_conv1d_update(x, weight[:channels], None, tree_mask=mask, **given).shape

    assert call(0, 4) == (0, 16) and call(0, 0) == (0, 16) and call(2, 0) == (0, 16) and call(2, 4, 0) == (8, 0)
    ops.copy_states(states[None], *[indices([], device)] * 2, source=states[None, :0].clone())
    assert states.min() == 1


def test_errors_name_the_argument():
    def call(count=3, slots=(1, 0), **options):
        x = torch.ones(len(slots) * count, 8)
        given = {"conv_states": torch.ones(3, 8, 3), "state_indices": indices(slots, "cpu")}
        given |= {"windows": torch.zeros(len(slots), count, 8, 3), **options}
        return ops.causal_conv1d_update(x, torch.ones(8, 4), None, **given)

    tree = torch.ones(2, 3, 1, dtype=torch.uint8)
    call(tree_mask=tree)
    with pytest.raises(RuntimeError, match=r"causal_conv1d_update: windows must be given with tree_mask.* got None"):
        call(windows=None, tree_mask=tree)
    with pytest.raises(RuntimeError, match=r"windows.shape\[1\] \(drafts\) must be 3 as in x, got 2"):
        call(windows=torch.zeros(2, 2, 8, 3))
    with pytest.raises(RuntimeError, match=r"windows.shape\[3\] \(width - 1\) must be 3 as in weight, got 2"):
        call(windows=torch.zeros(2, 3, 8, 2))
    with pytest.raises(RuntimeError, match="windows must have dtype float32 as x, got float64"):
        call(windows=torch.zeros(2, 3, 8, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"windows.stride\(0\) must not be 0"):
        call(windows=torch.zeros(1, 3, 8, 3).expand(2, 3, 8, 3))
    with pytest.raises(RuntimeError, match=r"tree_mask.shape\[1\] \(drafts\) must be 3"):
        call(tree_mask=tree[:, :2].contiguous())
    with pytest.raises(RuntimeError, match=r"causal_conv1d_update: drafts of a request must be in \[0, 16\], got 17"):
        call(17)
    with pytest.raises(RuntimeError, match=r"causal_conv1d_update: state, request 1, slot.* must be in \[0, 3\)"):
        call(slots=(0, 3))
    with pytest.raises(RuntimeError, match="requests 0 and 1 write the same slot, 2"):
        call(slots=(2, 2))
    states, pair = torch.zeros(2, 3, 4), indices([0, 1], "cpu")
    with pytest.raises(RuntimeError, match=r"copy_states: source.shape\[0\] must be 2 as in states, got 1"):
        ops.copy_states(states, pair, pair, source=torch.zeros(1, 3, 4))
    with pytest.raises(RuntimeError, match="source must hold each slot without gaps"):
        ops.copy_states(states, pair, pair, source=torch.zeros(2, 3, 8)[..., ::2])
    with pytest.raises(RuntimeError, match=r"copy_states: .*request 1.* \[0, 4\) \(num_slots of states, or of source"):
        ops.copy_states(states, indices([0, 5], "cpu"), pair, source=torch.zeros(2, 4, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_the_checked_mode_says_which_slot(device):
    report, x, weight = new_report(device), torch.ones(4, 8, device=device), torch.ones(8, 4, device=device)
    states, windows = torch.ones(3, 8, 3, device=device), torch.full((2, 2, 8, 3), 7.0, device=device)
    given = {"conv_states": states, "windows": windows, "report": report}
    out = ops.causal_conv1d_update(x, weight, None, state_indices=indices([0, 10**6], device), **given)
    assert not out[2:].any() and out[:2].all() and torch.equal(windows[1], torch.full_like(windows[1], 7.0))
    assert "causal_conv1d_update: state slot 1000000 at request 1" in first_fault(report)
    report.zero_()
    ops.copy_states(states[None], indices([9], device), indices([0], device), source=windows[None, 0], report=report)
    assert "copy_states: state slot 9 at request 0" in first_fault(report) and states.min() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_of_anything_stays_among_the_drafts(device):
    """Bits of the draft itself, of later ones and behind the last mean nothing."""
    torch.manual_seed(5)
    x, weight = torch.randn(6, 8, device=device), torch.randn(8, 4, device=device)
    states, slots = torch.randn(4, 8, 3, device=device), indices([2, 0], device)
    clean = torch.tensor([[[1], [1], [2]], [[0], [0], [3]]], dtype=torch.uint8, device=device)
    noise = torch.tensor([[[254], [254], [252]]], dtype=torch.uint8, device=device)
    got = []
    for mask in (clean, clean | noise):
        windows = torch.zeros(2, 3, 8, 3, device=device)
        given = {"conv_states": states, "state_indices": slots, "windows": windows, "tree_mask": mask}
        got.append((ops.causal_conv1d_update(x, weight, None, **given), windows))
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[0][1], got[1][1])
    assert torch.equal(windows[0, 2], torch.stack([states[2, :, 2], x[1], x[2]], 1)), "draft 2 has draft 1 alone"


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_that_none_sees_may_hold_nan(device):
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, 4, device=device)
    x[1] = float("nan")
    mask = torch.tensor([[[1], [3], [5]]], dtype=torch.uint8, device=device)
    states, windows = torch.ones(1, 8, 3, device=device), torch.zeros(1, 3, 8, 3, device=device)
    given = {"conv_states": states, "state_indices": indices([0], device), "windows": windows, "tree_mask": mask}
    out = ops.causal_conv1d_update(x, weight, None, silu=False, **given)
    assert out[[0, 2]].eq(4).all() and out[1].isnan().all() and windows[0, [0, 2]].eq(1).all()
