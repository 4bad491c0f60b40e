"""What right calls of `attnops.ops` hand to the ops below: every argument by its name in the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from right_calls import moved, ops_calls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Recorded = tuple[Callable[..., None], dict[str, Any]]


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Recorded] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "attnops":
            schema = function._schema
            given = {argument.name: argument.default_value for argument in schema.arguments}
            given |= dict(zip(given, args)) | (kwargs or {})
            self.calls.setdefault(schema.name.removeprefix("attnops::"), (function, copied(given)))
        return function(*args, **(kwargs or {}))


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


def recorded_calls(device: str = "cpu") -> dict[str, Recorded]:
    """By the name of the op: the op, and its arguments as they were before the call."""
    with _Recording() as recording:
        for function, given in ops_calls().values():
            function(**{name: moved(value, device) for name, value in given.items()})
    return recording.calls


def written(function: Any) -> set[str]:
    """Names of the tensors that an op writes."""
    return {a.name for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def outcome(call: Recorded, **changes: Any) -> dict[str, Tensor]:
    """What a call writes, of tensors that hold what was recorded."""
    function, given = call
    given = copied(given | changes)
    function(**given)
    return {name: given[name] for name in written(function) if isinstance(given[name], Tensor) and name not in changes}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    as_bytes = [{name: t.contiguous().view(torch.uint8) for name, t in of.items()} for of in (a, b)]
    return all(torch.equal(t, as_bytes[1][name]) for name, t in as_bytes[0].items() if name in as_bytes[1])
