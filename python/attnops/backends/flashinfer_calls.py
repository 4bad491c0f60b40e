"""A step's further calls of a FlashInfer wrapper, without what the first of them has checked and gathered.

A wrapper's `run` ends in one call of its compiled module. Of the layers that share a plan this call differs in the
layer's own tensors alone. So the first layer's is recorded, and the others' are made from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Whose `run` was read: behind the module's call it multiplies by v's scale, where there is one, and does no more.
VERSIONS = frozenset({"0.7.2.post1"})


def repeats(flashinfer: Any) -> bool:
    """Whether calls of the package may be repeated: its version is known, and it logs no calls."""
    log = sys.modules.get("flashinfer.api_logging")
    return getattr(flashinfer, "__version__", "") in VERSIONS and getattr(log, "_API_LOG_LEVEL", 0) == 0


class _Recorder:
    """Stands for a compiled module during one `run`, and keeps the calls that it passes on."""

    def __init__(self, module: Any) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((function, arguments, options))
            return function(*arguments, **options)

        return call if callable(function) else function


class RepeatedRun:
    """The call of the module that a `run` ended in, with room for the tensors of another layer.

    Attributes:
        tokens: Of q and out.
    """

    __slots__ = ("_arguments", "_device", "_dtype", "_function", "_out_dtype", "_places", "_shape", "tokens")

    def __init__(self, function: Callable[..., Any], arguments: list[Any], places: list[int], q: Tensor, out: Tensor):
        for place in places:
            arguments[place] = None  # no layer's tensors outlive it
        self._function, self._arguments, self._places = function, arguments, places
        self._shape, self._dtype, self._out_dtype, self._device = q.shape, q.dtype, out.dtype, q.device
        self.tokens = q.shape[0]

    def takes(self, q: Tensor, out: Tensor) -> bool:
        """Whether the layer brings what the recorded one did; else `run` says what is wrong."""
        alike = q.shape == self._shape and q.dtype is self._dtype and out.dtype is self._out_dtype
        return alike and q.device == self._device == out.device

    def __call__(self, *tensors: Tensor) -> None:
        arguments = self._arguments.copy()
        for place, tensor in zip(self._places, tensors):
            arguments[place] = tensor
        self._function(*arguments)


def _holder(wrapper: Any) -> Any:
    """What calls the compiled module: the wrapper, or of MLA the implementation that its plan chose."""
    for holder in (getattr(wrapper, "_planned_backend", None), wrapper):
        if getattr(holder, "_cached_module", None) is not None:
            return holder
    return None


def record_run(wrapper: Any, run: Callable[[], Any], tensors: tuple[Tensor, ...]) -> RepeatedRun | None:
    """Calls `run`, and returns how to repeat it for another layer of the same plan.

    Args:
        tensors: The layer's own, q first and out last, each as `run` gives it to the wrapper.

    Returns:
        None where this version of the package has another way: no module under the name that is known, several calls
        of it, or calls that do not have each tensor once, as it is.
    """
    holder = _holder(wrapper)
    if holder is None:
        run()
        return None
    module = holder._cached_module
    recorder = _Recorder(module)
    try:
        holder._cached_module = recorder
        run()
    finally:
        holder._cached_module = module
    if len(recorder.calls) != 1:
        return None
    function, arguments, options = recorder.calls[0]
    found = [[i for i, argument in enumerate(arguments) if argument is tensor] for tensor in tensors]
    others = {tensor.data_ptr() for tensor in tensors}
    known = {place for places in found for place in places}
    hidden = any(
        isinstance(argument, torch.Tensor) and argument.data_ptr() in others
        for i, argument in enumerate(arguments)
        if i not in known
    )
    if options or hidden or any(len(places) != 1 for places in found):
        return None
    return RepeatedRun(function, list(arguments), [places[0] for places in found], tensors[0], tensors[-1])
