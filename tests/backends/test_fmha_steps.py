"""The views that `FmhaSteps` keeps: steps share them unless their plans differ."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends.fmha_steps import FmhaSteps
from attnops.graph_buffers import PagedBuffers
from attnops.metadata import fmha_plan
from attnops.types import AttentionSpec, ForwardMode
from steps import LIMITS, Model, make_step

MODEL = Model("gqa", AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=32, page_size=16))


@pytest.mark.parametrize(
    ("hopper", "tokens"),
    [
        (False, {1: None, 2: None, 3: None, 7: None, 9: None}),
        (True, {1: 1, 2: 2, 3: 4, 4: 4, 7: 8, 9: 16, 17: (4, 2), 40: (4, 2)}),
    ],
)
def test_steps_share_views_unless_they_go_by_other_kernels(hopper, tokens, monkeypatch):
    monkeypatch.setattr(fmha_plan, "runs_hopper_kernels", lambda device: hopper)
    cpu = torch.device("cpu")
    buffers = PagedBuffers(MODEL.spec, LIMITS, cpu)
    steps = FmhaSteps(MODEL.spec, LIMITS, cpu, buffers)
    batch = make_step(MODEL, ForwardMode.EXTEND, [40, 63], [1, 1]).batch
    views = {}
    for most, expected in tokens.items():
        step = steps.step(dataclasses.replace(batch, max_seqlen_q=most), buffers.step(batch))
        decode, chunks = step.plans[-1].decode, step.plans[-1].chunks
        found = None if decode is None else decode.seqlen_q
        assert (found if chunks is None else (found, decode.batch_size)) == expected
        assert views.setdefault(expected, step) is step
