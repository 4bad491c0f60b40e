"""States after each draft: chains and trees, beside rings and beside decoding the path token by token."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.reference import pack_tree_mask
from attnops.state_snapshots import accepted_slots, delta_verify_snapshots, ssd_verify_snapshots

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, T, H, HV, K, V, SLOTS = 3, 5, 1, 2, 64, 32, 24
PARENTS = [-1, 0, 0, 1, 2]


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def path_to(draft, tree):
    path = []
    while draft >= 0:
        path.insert(0, draft)
        draft = PARENTS[draft] if tree else draft - 1
    return path


class Case:
    def __init__(self, kind, device, io=torch.bfloat16):
        self.kind, self.device = kind, device
        channels = [K] if kind == "kda" else []
        shapes = [(H, K), (H, K), (HV, V), (HV, *channels), (HV,)]
        self.tokens = [torch.randn(B * T, *shape).to(device, io) for shape in shapes]
        self.rate, self.bias = torch.randn(HV, device=device), torch.randn(HV, *channels, device=device)
        self.states = torch.randn(SLOTS, HV, V, K, device=device)
        self.slots = indices([7, -1, 0], device)
        numbers = [slot for slot in range(1, SLOTS) if slot != 7][: B * T]
        self.cells = indices(numbers, device).view(B, T)

    def tree(self):
        sees = torch.zeros(T, T, dtype=torch.bool)
        for t in range(T):
            sees[t, path_to(t, True)] = True
        return pack_tree_mask(sees.expand(B, T, T)).to(self.device)

    def call(self, delta, ssd, tokens, **options):
        q, k, v, a, b = tokens
        if self.kind == "ssd":
            return ssd(v, a, -self.rate.exp(), k, q, z=v, dt_bias=self.bias, dt_softplus=True, **options)
        return delta(q, k, v, a, b, A_log=self.rate, dt_bias=self.bias, **options)

    def verify(self, tree):
        options = {"states": self.states, "state_indices": self.slots, "snapshot_slots": self.cells}
        options["tree_mask"] = self.tree() if tree else None
        return self.call(delta_verify_snapshots, ssd_verify_snapshots, self.tokens, **options).unflatten(0, (B, T))

    def decoded(self, before, request, draft, tree):
        """Out and state after a path of one request."""
        pool, slot = before.clone(), self.slots[request : request + 1]
        for t in path_to(draft, tree):
            now = [x[request * T + t : request * T + t + 1] for x in self.tokens]
            out = self.call(ops.delta_decode, ops.ssd_decode, now, states=pool, state_indices=slot)
        return out[0], pool[slot.long()][0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_a_state_after_each_draft_has_the_bits_of_decoding(kind, tree, device):
    case = Case(kind, device)
    before = case.states.clone()
    out = case.verify(tree)
    for request in (0, 2):
        for t in range(T):
            row, state = case.decoded(before, request, t, tree)
            assert torch.equal(out[request, t], row) and torch.equal(case.states[case.cells[request, t]], state)
    assert not out[1].any(), "padding gives 0"
    written = case.cells[[0, 2]].flatten().tolist()
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(case.states[others], before[others]), (
        "a request's own state and padding's cells are as they were"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_accepted_state_is_copied_or_named(device):
    case = Case("gdn", device)
    case.slots = indices([7, 23, 0], device)
    case.verify(True)
    path = indices([[0, 2, 4, 99, 99], [0, 0, 0, 0, 0], [0, 1, 9, 9, 9]], device)
    found = accepted_slots(case.cells, path, indices([3, 0, 2], device))
    assert found.tolist() == [case.cells[0, 4], -1, case.cells[2, 1]]
    before = case.states.clone()
    ops.copy_states(case.states[None], found, case.slots)
    assert torch.equal(case.states[[7, 0]], before[case.cells[[0, 2], [4, 1]].long()])
    assert torch.equal(case.states[23], before[23]), "all drafts rolled back"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_drafts_are_those_of_rings(kind, device):
    """States that are read alone give what snapshots give."""
    case, rows = Case(kind, device, torch.float32), T
    case.cells[:, -1] = -1  # the last draft of a chain has no successor
    channels = [K] if kind == "kda" else []
    rings = {"ring_u": torch.zeros(SLOTS, HV, rows, V), "ring_k": torch.zeros(SLOTS, H, rows, K)}
    rings |= {"ring_decay": torch.zeros(SLOTS, HV, rows, *channels), "ring_len": torch.zeros(SLOTS, dtype=torch.int32)}
    rings = {name: ring.to(device) for name, ring in rings.items()}
    given = {"states": case.states, "state_indices": case.slots, **rings}
    expected = case.call(ops.delta_verify, ops.ssd_verify, case.tokens, **given).unflatten(0, (B, T))
    torch.testing.assert_close(case.verify(False), expected, rtol=1e-4, atol=1e-4)


def test_errors_name_what_does_not_fit():
    case = Case("gdn", "cpu")
    with pytest.raises(ValueError, match=r"snapshot_slots must have shape \[3, T\] .*, got \[2, 5\]"):
        case.cells = case.cells[:2]
        case.verify(False)
    case = Case("gdn", "cpu")
    case.tokens[2] = case.tokens[2][:-1]
    with pytest.raises(ValueError, match=r"must have 15 rows \(5 drafts of 3 requests, as snapshot_slots\), got \[14"):
        case.verify(False)
    case = Case("gdn", "cpu")
    given = {"states": case.states, "state_indices": case.slots, "snapshot_slots": case.cells}
    with pytest.raises(ValueError, match=r"tree_mask must have shape \[3, 5, 1\], got \[3, 5, 2\]"):
        delta_verify_snapshots(*case.tokens, tree_mask=torch.zeros(3, 5, 2, dtype=torch.uint8), **given)
    case.cells[0, 0] = SLOTS
    with pytest.raises(RuntimeError, match="delta_decode: state"):
        case.verify(False)
