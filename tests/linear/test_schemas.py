"""The schema of every op of linear attention: what it writes, its fake, and its trace."""

from __future__ import annotations

import pytest
import torch
from attnops import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, T, H, HV, K, V, SLOTS, ROWS, M = 2, 3, 1, 2, 16, 8, 7, 8, 2


def normal(*shape):
    return torch.randn(*shape)


def indices(*values):
    return torch.tensor(values, dtype=torch.int32)


def delta(tokens, channels=False):
    """q, k, v, a, b, A_log and dt_bias."""
    gate = [HV, K] if channels else [HV]
    keys = [normal(tokens, H, K), normal(tokens, H, K)]
    return [*keys, normal(tokens, HV, V), normal(tokens, *gate), normal(tokens, HV), normal(HV), normal(*gate)]


def ssd(tokens, gated=True):
    """x, dt, A, B, C, D, dt_bias and z."""
    x, dt, A = normal(tokens, HV, V), normal(tokens, HV), -torch.rand(HV)
    keys = [normal(tokens, H, K), normal(tokens, H, K)]
    rest = [normal(HV), normal(HV), normal(tokens, HV, V)] if gated else [None, None, None]
    return [x, dt if gated else None, A, *keys, *rest]


def pool():
    return normal(SLOTS, HV, V, K)


def ragged(checkpoints=True):
    """cu_seqlens, prefix_lens, state_indices, checkpoint_slots, plan and scratch."""
    cells = torch.tensor([[3, -1], [-1, 4]], dtype=torch.int32) if checkpoints else None
    return [indices(0, 70, 75), indices(0, 64), indices(2, 0), cells, indices(0, 1) if checkpoints else None, None]


def rings(channels=False):
    """ring_u, ring_k and ring_decay."""
    decay = torch.rand(SLOTS, HV, ROWS, K) if channels else torch.rand(SLOTS, HV, ROWS)
    return [normal(SLOTS, HV, ROWS, V), normal(SLOTS, H, ROWS, K), decay]


def tree():
    return torch.tensor([[1], [3], [5]], dtype=torch.uint8).expand(B, T, 1).contiguous()


def accepted():
    """accepted_path and accepted_len."""
    return [torch.tensor([[0, 1, 2], [0, 2, 0]], dtype=torch.int32), indices(3, 2)]


def commit(fold):
    return [pool(), *rings(), torch.zeros(SLOTS, dtype=torch.int32), indices(2, 0), *accepted(), fold]


REPORT = lambda: indices(*[0] * 8)  # noqa: E731
LENGTHS = lambda: torch.zeros(SLOTS, dtype=torch.int32)  # noqa: E731
OUT = lambda tokens: torch.zeros(tokens, HV, V)  # noqa: E731
CHANNELS = 2 * H * K + HV * V
CONV = lambda tokens: [normal(SLOTS, 5, 3), normal(tokens, 5), normal(5, 4)]  # noqa: E731
CALLS = {
    "delta_decode": lambda: [OUT(B), pool(), *delta(B), indices(2, -1), indices(1, -1), 0.25, 0.0, True, REPORT()],
    "delta_decode of channels": lambda: [OUT(B), pool(), *delta(B, True), indices(2, 0), None, 0.25, -5.0, False],
    "delta_decode of gates": lambda: [OUT(B), pool(), *delta(B)[:5], None, None, indices(2, 0), None, 0.25, 0.0, True],
    "delta_conv_decode": lambda: [
        OUT(B), pool(), normal(SLOTS, CHANNELS, 3), normal(B, CHANNELS), normal(CHANNELS, 4), normal(CHANNELS),
        *delta(B)[3:], indices(2, -1), H, True, 0.25, 0.0, True,
    ],
    "ssd_conv_decode": lambda: [
        OUT(B), pool(), normal(SLOTS, CHANNELS, 3), normal(B, CHANNELS), normal(CHANNELS, 4), normal(CHANNELS),
        normal(B, HV), -torch.rand(HV), normal(HV), normal(HV), normal(B, HV, V), indices(2, -1), H, True, 1.0, True,
    ],
    "ssd_decode": lambda: [OUT(B), pool(), *ssd(B), indices(2, -1), indices(1, -1), 1.0, True, REPORT()],
    "ssd_decode of constant decay": lambda: [OUT(B), pool(), *ssd(B, False), indices(2, 0), None, 0.5, False],
    "delta_prefill": lambda: [OUT(75), pool(), *delta(75), *ragged(), 0.25, 0.0, True, REPORT()],
    "delta_prefill of channels": lambda: [OUT(75), pool(), *delta(75, True), *ragged(False), 0.25, -5.0, False],
    "ssd_prefill": lambda: [OUT(75), pool(), *ssd(75), *ragged(), 1.0, True, REPORT()],
    "ssd_prefill of constant decay": lambda: [OUT(75), pool(), *ssd(75, False), *ragged(False), 0.5, False],
    "delta_verify": lambda: [
        OUT(B * T), *rings(), pool(), LENGTHS(), *delta(B * T), indices(2, 0), tree(), 0.25, 0.0, True, REPORT(),
    ],
    "delta_verify of channels": lambda: [
        OUT(B * T), *rings(True), pool(), LENGTHS(), *delta(B * T, True), indices(2, -1), None, 0.25, -5.0, False,
    ],
    "ssd_verify": lambda: [
        OUT(B * T), *rings(), pool(), LENGTHS(), *ssd(B * T), indices(2, 0), tree(), 1.0, True, REPORT(),
    ],
    "ssd_verify of constant decay": lambda: [
        OUT(B * T), *rings(), pool(), LENGTHS(), *ssd(B * T, False), indices(2, 0), None, 0.5, False,
    ],
    "delta_commit": lambda: [*commit(False), REPORT()],
    "delta_commit with a fold": lambda: commit(True),
    "ssd_commit": lambda: [*commit(False), REPORT()],
    "ssd_commit with a fold": lambda: commit(True),
    "delta_draft_step": lambda: [
        OUT(B * T), *rings(), pool(), LENGTHS(), *delta(B * T), indices(2, 0), *accepted(), tree(), 0.25, 0.0, True,
        indices(0, 0, 0, 0), REPORT(),
    ],
    "delta_draft_step of channels": lambda: [
        OUT(B * T), *rings(True), pool(), LENGTHS(), *delta(B * T, True), indices(2, -1), *accepted(), None, 0.25,
        -5.0, False,
    ],
    "ssd_draft_step": lambda: [
        OUT(B * T), *rings(), pool(), LENGTHS(), *ssd(B * T), indices(2, 0), *accepted(), tree(), 1.0, True,
        indices(0, 0, 0, 0), REPORT(),
    ],
    "ssd_draft_step of constant decay": lambda: [
        OUT(B * T), *rings(), pool(), LENGTHS(), *ssd(B * T, False), indices(2, 0), *accepted(), None, 0.5, False,
    ],
    "delta_plan": lambda: [indices(0, 0), indices(0, 3, 75)],
    "ssd_plan": lambda: [indices(0, 0), indices(0, 3, 75)],
    "causal_conv1d": lambda: [
        normal(9, 5), *CONV(9), normal(5), indices(0, 6, 9), indices(2, -1), torch.tensor([1, 0], dtype=torch.uint8),
        True, REPORT(),
    ],
    "causal_conv1d unchecked": lambda: [normal(9, 5), *CONV(9), None, indices(0, 6, 9), indices(2, 0), None, False],
    "causal_conv1d_update": lambda: [normal(6, 5), *CONV(6), normal(5), indices(2, -1), True, REPORT()],
    "causal_conv1d_update unchecked": lambda: [normal(6, 5), *CONV(6), None, indices(2, 0), False],
    "copy_states": lambda: [normal(3, SLOTS, HV, V), indices(1, 2), indices(4, -1), REPORT()],
    "causal_conv1d_update of drafts": lambda: [
        normal(6, 5), *CONV(6), None, indices(2, -1), True, REPORT(), normal(B, T, 5, 3), tree(),
    ],
    "causal_conv1d_update of a chain": lambda: [
        normal(6, 5), *CONV(6), normal(5), indices(2, 0), False, None, normal(B, T, 5, 3), None,
    ],
    "copy_states from elsewhere": lambda: [
        normal(3, SLOTS, HV, V), indices(1, 2), indices(4, -1), None, normal(3, 5, HV, V),
    ],
    "copy_states unchecked": lambda: [normal(3, SLOTS, HV, V), indices(1, 2), indices(4, 0)],
    "clear_states": lambda: [normal(3, SLOTS, HV, V), indices(1, -1), REPORT()],
    "clear_states unchecked": lambda: [normal(3, SLOTS, HV, V), indices(1, 2)],
}  # fmt: skip


def op_of(name):
    return getattr(torch.ops.attnops, name.split()[0]).default


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_schema_and_fake(name, device):
    given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in CALLS[name]()]
    if device == "cuda" and "_conv_decode" in name:
        given.append(torch.zeros(B, CHANNELS, device=device))  # between two launches
    torch.library.opcheck(op_of(name), tuple(given))


def test_there_is_a_call_of_every_op():
    modules = ("attnops.ops.linear", "attnops.ops.linear_prefill", "attnops.ops.linear_verify")
    linear = {name for name in ops.__all__ if getattr(ops, name).__module__ in modules}
    assert {name.split()[0] for name in CALLS} == {name for name in linear if hasattr(torch.ops.attnops, name)}
    assert len({name.split()[0] for name in CALLS}) == 18


def test_the_schema_of_an_op_names_what_it_writes():
    """An op that writes what it does not name would fail above; here what is named is what the reference says."""
    written = {
        name: {a.name for a in op_of(name)._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        for name in {name.split()[0] for name in CALLS}
    }
    rows = {"ring_u", "ring_k", "ring_decay"}
    assert written["delta_verify"] == written["ssd_verify"] == {"out", *rows, "report"}, "states are only read"
    assert written["delta_commit"] == written["ssd_commit"] == {"states", *rows, "ring_len", "report"}
    steps = {"out", "states", *rows, "ring_len", "semaphores", "report"}
    assert written["delta_draft_step"] == written["ssd_draft_step"] == steps
    assert written["causal_conv1d_update"] == {"out", "conv_states", "windows", "report"}
    assert written["copy_states"] == {"states", "report"}
    assert written["delta_plan"] == written["ssd_plan"] == {"plan"}
