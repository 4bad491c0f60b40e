"""What the functions of this package share: flat tokens by request, fakes of ops, and errors that name an argument."""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

MAX_TREE_TOKENS = 1024  # of a draft tree: csrc/speculation/params.h

# What Python and torch raise for arguments that do not fit one another, without a word of which.
_UNEXPLAINED = (
    AttributeError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)


def shape_by_request(op: str, q: Tensor, seqlen_q: int) -> Sequence[int]:
    """``[B, S_q, H_q, D]`` of queries of that shape, or of ``[B * S_q, H_q, D]``.

    Raises:
        ValueError: they are neither.
    """
    shape = q.shape
    if len(shape) == 4:
        return shape
    if len(shape) == 3 and shape[0] % seqlen_q == 0:
        return (shape[0] // seqlen_q, seqlen_q, *shape[1:])
    raise ValueError(
        f"attnops::{op}: q must be [B, {seqlen_q}, H_q, D] or [B * {seqlen_q}, H_q, D] as its plan, got {list(q.shape)}"
    )


def by_request(op: str, name: str, tensor: Tensor, shape: Sequence[int], flat_dims: int) -> Tensor:
    """A tensor of `flat_dims` dimensions whose first is ``B * S_q``, with the two apart. Any other is as it was: the op
    judges it."""
    own = tensor.shape
    if len(own) != flat_dims:
        return tensor
    if own[0] != shape[0] * shape[1]:
        raise ValueError(
            f"attnops::{op}: {name}.shape[0] must be {shape[0] * shape[1]} (batch_size * seqlen_q as in q), "
            f"got {own[0]}, shape {list(own)}"
        )
    return tensor.view(*shape[:2], *own[1:])


def check_requests(op: str, batch_size: int, cache_seqlens: Tensor) -> None:
    """Raises for lengths of more or fewer requests than a plan is for."""
    if cache_seqlens.shape[0] != batch_size:
        raise ValueError(
            f"attnops::{op}: cache_seqlens.shape[0] must be {batch_size} as in its plan, got {cache_seqlens.shape[0]}"
        )


def lse_like(q: Tensor, lse: Tensor | None, needed: bool) -> Tensor | None:
    """The lse to write: the one given, or a new float32 of q's shape without its last dimension where one is needed."""
    return q.new_empty(q.shape[:-1], dtype=torch.float32) if lse is None and needed else lse


def add_sinks(lse: Tensor | None, sinks: Tensor | None) -> None:
    """`sinks_in_lse`: the sinks' share into an lse. A row that sees no key stays at ``-inf``."""
    if lse is not None and sinks is not None:
        lse.copy_(torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks.detach())))


def register_fake(op: str, on_host: tuple[str, ...] = ()) -> None:
    """Registers the fake of an op that writes into tensors that it is given and returns nothing.

    A meta tensor among real ones brings a real call here, where it would be accepted and do nothing: that is an error.
    The other devices have their own checks.

    Args:
        on_host: Tensors that lie in host memory whatever the device of the others.
    """
    names = [argument.name for argument in getattr(torch.ops.attnops, op).default._schema.arguments]
    home = "q" if "q" in names else names[0]

    def fake(*args: Any, **options: Any) -> None:
        given = dict(zip(names, args)) | options
        device = given[home].device
        for name, value in given.items():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and name not in on_host and tensor.device.type != device.type:
                    raise RuntimeError(f"attnops::{op}: {name} must be on {device} as {home}, got {tensor.device}")

    torch.library.register_fake(f"attnops::{op}", fake)


def names_its_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Errors of a function of this package as `explain` has them, for a microsecond a call on the host."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except Exception as error:
            given = given_arguments(function, args, options)
            explain(error, f"attnops::{function.__name__}", function, given)
            raise

    return call


def given_arguments(function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; none where they do not fit the signature, which Python's own error says."""
    try:
        return inspect.signature(function).bind(*args, **options).arguments
    except TypeError:
        return {}


def explain(error: Exception, name: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Raises a better error than `error` where there is one. That is a TypeError that names an argument of the wrong
    type, or the text of `error` with the arguments that caused it.

    It is asked when a call has failed, so one that does not fail pays nothing for it.

    Args:
        name: Of the function, as messages have it.
        given: Arguments by name, and perhaps more, such as ``locals()``.
    """
    hints = {key: hint for key, hint in typing.get_type_hints(function).items() if key in given}
    for argument, hint in hints.items():
        if not _fits(given[argument], hint):
            message = f"{name}: {argument} must be {_hint_text(hint)}, got {_text(given[argument])}"
            raise TypeError(message) from error
    if not given or "attnops" in str(error) or "Plan.allocate" in str(error) or type(error) not in _UNEXPLAINED:
        return
    tensors = ", ".join(f"{key} {_text(given[key])}" for key in hints if isinstance(given[key], Tensor))
    kind = type(error) if isinstance(error, RuntimeError | TypeError) else ValueError
    raise kind(f"{name}: the arguments do not fit one another: {error}; got {tensors}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as the annotation says without looking into containers."""
    if hint is Any:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(hint))
    if hint in (int, float) and isinstance(value, int | torch.SymInt):
        return True
    if hint is float and isinstance(value, torch.SymFloat):
        return True
    kind = typing.get_origin(hint) or hint
    if not isinstance(value, kind):
        return False
    parts = typing.get_args(hint)
    return kind is not tuple or not parts or parts[-1] is Ellipsis or len(parts) == len(value)


def _hint_text(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_hint_text(choice) for choice in typing.get_args(hint))
    if hint is types.NoneType:
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("torch.", "")


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None:
        return "None"
    kind, text = type(value).__name__, f"{value!r:.80}"
    return text if text.startswith(kind) else f"{kind} {text}"  # a dataclass says its own name
