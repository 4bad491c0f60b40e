"""A CUDA graph where there is no GPU: records the tensor ops of a region and runs them again on the same memory.

What a step computes in Python is not on the tape. So a replay that equals a fresh eager step shows that everything that
depends on lengths, tables and requests was computed by recorded ops, from tensors whose addresses did not change. What
CUDA graphs cannot hold raises while it is recorded: reading a value on the host, and shapes that depend on values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

HOST_READS = {aten._local_scalar_dense: "a value read on the host (.item())", aten.equal: "torch.equal"}
DATA_DEPENDENT = {
    packet: "a shape that depends on values"
    for packet in (
        aten.nonzero,
        aten.masked_select,
        aten.repeat_interleave,
        aten.unique_dim,
        aten._unique2,
        aten.unique_consecutive,
        aten.bincount,
    )
}
# These never reach the dispatcher with a tensor on the CPU: they read its memory.
HOST_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}


class GraphTapeError(RuntimeError):
    """A region does what a CUDA graph cannot hold."""


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_METHODS:
            raise GraphTapeError(f"{func.__name__}() inside a captured region")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: GraphTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._tape._refuse(func, args)
        result = func(*args, **kwargs)
        self._tape._ops.append((func, args, kwargs, _tensors(result)))
        return result


class GraphTape:
    """`capture()` once, `replay()` as often as you like."""

    def __init__(self) -> None:
        self._ops: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def __len__(self) -> int:
        return len(self._ops)

    @contextlib.contextmanager
    def capture(self) -> Iterator[GraphTape]:
        with _NoHostReads(), _Recorder(self):
            yield self

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._ops:
            for old, new in zip(recorded, _tensors(func(*args, **kwargs)), strict=True):
                # A view of recorded memory, or an in-place result, is there already. Fresh memory must move to the
                # address that the later ops of the tape know.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def _refuse(self, func: Any, args: tuple) -> None:
        reason = {**HOST_READS, **DATA_DEPENDENT}.get(func.overloadpacket)
        if func is aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1]):
            reason = "a shape that depends on values (a boolean index)"
        if reason:
            raise GraphTapeError(f"{func}: {reason} inside a captured region")


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
