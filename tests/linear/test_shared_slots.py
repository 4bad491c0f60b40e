"""Slots that two rows of a call name, on the CPU: the first fault of any call, and calls of many rows."""

from __future__ import annotations

import random
import re
import time

import pytest
import torch
from attnops import ops

SLOTS = 12


def indices(values):
    return torch.tensor(values, dtype=torch.int32)


def drawn(r):
    """Slots of a call: mostly apart, some twice, below 0 or outside the pool."""
    slots = r.sample(range(SLOTS), r.randrange(1, 9))
    for i in range(len(slots)):
        if r.random() < 0.12:
            slots[i] = r.choice([-1, -(2**31), SLOTS, 2**31 - 1, *slots])
    return slots


def first_fault_of(slots):
    for i, slot in enumerate(slots):
        if slot >= SLOTS:
            return f"request {i}, slot"
        if slot >= 0 and slot in slots[:i]:
            return f"requests {slots.index(slot)} and {i} write the same slot, {slot}"
    return None


def first_fault_of_pairs(src, dst):
    """copy_states: what a pair writes no other may write or read."""
    moves = [0 <= s < SLOTS and 0 <= d < SLOTS and s != d for s, d in zip(src, dst)]
    for i, slot in enumerate(dst):
        if slot >= SLOTS or src[i] >= SLOTS:
            return f"request {i}, slot"
        if not moves[i]:
            continue
        for other in range(len(dst)):
            if other != i and moves[other] and (src[other] == slot or (other < i and dst[other] == slot)):
                return f"requests {other} and {i} write the same slot, {slot}"
    return None


def gives(call, fault):
    if fault is None:
        call()
        return
    with pytest.raises(RuntimeError, match=re.escape(fault)):
        call()


def calls(slots):
    """Each op that writes one slot a request."""
    n, at = len(slots), {"state_indices": indices(slots)}
    q, v, gate = torch.zeros(n, 1, 16), torch.zeros(n, 1, 4), torch.zeros(n, 1)
    states = torch.zeros(SLOTS, 1, 4, 16)
    conv = {"conv_states": torch.zeros(SLOTS, 4, 3), **at}
    x, weight, bounds = torch.zeros(n, 4), torch.zeros(4, 4), torch.arange(n + 1, dtype=torch.int32)
    rings = {"ring_u": torch.zeros(SLOTS, 1, 5, 4), "ring_k": torch.zeros(SLOTS, 1, 5, 16), **at}
    rings |= {"ring_decay": torch.zeros(SLOTS, 1, 5), "ring_len": torch.zeros(SLOTS, dtype=torch.int32)}
    prompts = {"cu_seqlens": bounds, "prefix_lens": torch.zeros_like(bounds[1:]), "plan": ops.delta_plan(bounds)}
    return {
        "decode": lambda: ops.delta_decode(q, q, v, gate, gate, states=states, **at),
        "branch": lambda: ops.delta_decode(
            q, q, v, gate, gate, states=states, state_indices=indices([0] * n), out_state_indices=indices(slots)
        ),
        "convolve": lambda: ops.causal_conv1d(x, weight, None, cu_seqlens=bounds, **conv),
        "update": lambda: ops.causal_conv1d_update(x, weight, None, **conv),
        "drafts": lambda: ops.causal_conv1d_update(x, weight, None, windows=torch.zeros(n, 1, 4, 3), **conv),
        "windows": lambda: ops.copy_states(states[None], indices([0] * n), indices(slots), source=states[None].clone()),
        "prefill": lambda: ops.delta_prefill(q, q, v, gate, gate, states=states, **prompts, **at),
        "verify": lambda: ops.delta_verify(q, q, v, gate, gate, states=states, **rings),
        "commit": lambda: ops.delta_commit(states, torch.zeros(n, 1, dtype=torch.int32), indices([1] * n), **rings),
        "clear": lambda: ops.clear_states(states[None], indices(slots)),
    }


@pytest.mark.parametrize("op", calls([0]))
def test_the_first_fault_is_named(op):
    r = random.Random(op)
    found = set()
    for _ in range(200):
        slots = drawn(r)
        fault = first_fault_of(slots)
        gives(calls(slots)[op], fault)
        found.add(fault and fault[:8])
    assert len(found) == 3, "no fault, a slot outside and a slot twice"


def test_the_first_fault_of_copies_is_named():
    r = random.Random(1)
    found = []
    for _ in range(1000):
        src, dst = drawn(r), drawn(r)
        n = min(len(src), len(dst), r.choice([2, 3, 9]))
        src, dst = src[:n], dst[:n]
        fault = first_fault_of_pairs(src, dst)
        gives(lambda: ops.copy_states(torch.zeros(1, SLOTS, 2), indices(src), indices(dst)), fault)  # noqa: B023
        found.append(fault and fault[:8])
    assert min(found.count(kind) for kind in (None, "request ", "requests")) > 50


def test_checkpoints_and_plans_count_as_slots():
    """A request's checkpoints belong to it alone, too."""
    r, tokens = random.Random(2), 130  # two checkpoints each
    found = set()
    for _ in range(200):
        batch = r.randrange(1, 4)
        states = r.sample(range(SLOTS), batch)
        cells = [[r.choice([-1, *range(SLOTS)]) for _ in range(2)] for _ in range(batch)]
        plan = r.sample(range(batch), batch) if r.random() < 0.7 else [r.randrange(batch) for _ in range(batch)]
        fault, named, planned = None, {}, set()
        for i in range(batch):
            if fault is None and plan[i] in planned:
                fault = f"plan[{i}] must be in"
            planned.add(plan[i])
            for slot in (states[i], *cells[i]):
                if fault is None and slot in named:
                    fault = f"requests {named[slot]} and {i} write the same slot, {slot}"
                if slot >= 0:
                    named.setdefault(slot, i)
        q, gate = torch.zeros(tokens * batch, 1, 8), torch.zeros(tokens * batch, 1)
        given = {"cu_seqlens": [tokens * i for i in range(batch + 1)], "prefix_lens": [0] * batch, "plan": plan}
        given |= {"state_indices": states, "checkpoint_slots": cells}
        given = {name: indices(values) for name, values in given.items()}
        gives(lambda: ops.delta_prefill(q, q, q, gate, gate, states=torch.zeros(SLOTS, 1, 8, 8), **given), fault)  # noqa: B023
        found.add(fault and fault[:4])
    assert len(found) == 3


def test_many_rows_take_no_walk_over_pairs():
    """100,000 copies took 40 s when each was compared with all others."""
    n = 100_000
    states, src = torch.arange(2 * n, dtype=torch.float32).view(1, 2 * n, 1), torch.arange(n, dtype=torch.int32)
    begin = time.perf_counter()
    ops.copy_states(states, src, src + n)
    with pytest.raises(RuntimeError, match="requests 0 and 1 write the same slot, 7"):
        ops.clear_states(states, torch.full((n,), 7, dtype=torch.int32))
    assert time.perf_counter() - begin < 10
    assert torch.equal(states[0, :n], states[0, n:])
