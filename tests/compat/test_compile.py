"""Functions of `attnops.compat` that read nothing on the host trace whole: `torch.compile(fullgraph=True)`."""

from __future__ import annotations

import pytest
import torch
from right_calls import compat_calls
from torch import Tensor

# Plans keep Python state, and two of them read on the host, as the peers' do: they run between compiled steps.
CALLED = sorted(
    name
    for name in compat_calls()
    if not name.endswith(("Wrapper", ".plan", ".begin_forward", "_plan", "_size", "_metadata", "BatchAttention"))
)


def tensors_of(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, (tuple, list)) else []


def written(given: dict) -> list[Tensor]:
    """What a call may have written, but for scratch."""
    return [tensor for name, value in given.items() if "workspace" not in name for tensor in tensors_of(value)]


def call_of(name: str):
    torch.manual_seed(0)
    return compat_calls()[name]


@pytest.mark.parametrize("name", CALLED)
def test_traces_whole(name):
    torch._dynamo.reset()
    function, given = call_of(name)
    eager = tensors_of(function(**given)) + written(given)
    function, given = call_of(name)
    compiled = torch.compile(lambda **options: function(**options), fullgraph=True, backend="eager")
    traced = tensors_of(compiled(**given)) + written(given)
    assert len(eager) == len(traced)
    for ours, expected in zip(traced, eager):
        assert torch.equal(ours.float().nan_to_num(9.0), expected.float().nan_to_num(9.0))
