"""Errors of this package: they name the peer's function and its argument, also where an op below found the fault."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from attnops.compat._convert import refuse
from attnops.ops._arguments import explain, given_arguments

P = ParamSpec("P")
R = TypeVar("R")


class NameNotServed(NotImplementedError, ImportError):
    """A function of a peer that is not here. Who asks for it as an option catches ImportError and goes without."""


_UNKNOWN = re.compile(r"\w+\(\) got an unexpected keyword argument '(\w+)'")
_TOO_MANY = re.compile(r"\w+\(\) takes (?:from \d+ to )?\d+ positional arguments? but \d+ ")
_OURS = ("attnops::", "XqaDecodePlan.", "MlaDecodePlan.", "SparseMlaPlan", "FmhaPlan.")


def _newer(function: Callable, args: tuple, options: dict, error: TypeError) -> str | None:
    """The argument, if any, that the function itself does not know."""
    known = inspect.signature(function).parameters.values()
    unknown = _UNKNOWN.search(str(error))
    if unknown and unknown[1] in options and unknown[1] not in (parameter.name for parameter in known):
        return f"{unknown[1]}="
    most = [parameter.name for parameter in known if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if _TOO_MANY.search(str(error)) and len(args) > len(most):
        return f"a positional argument behind {most[-1]}"
    return None


def names_the_peers(name: str, **peers: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: what an op or plan below says gets the function's name in front, and the peer's words behind.

    Args:
        name: Of the peer's function.
        peers: The peer's argument, by ours: ``page_table="block_tables"``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            try:
                return function(*args, **options)
            except Exception as error:
                newer = _newer(function, args, options, error) if isinstance(error, TypeError) else None
                if newer:
                    raise refuse(name, newer, "leave it out: its library may know it, this does not") from error
                explain(error, f"attnops.compat: {name}", function, given_arguments(function, args, options))
                text = str(error)
                if not text.startswith(_OURS):
                    raise
                words = [f"{ours} is {peer}" for ours, peer in peers.items() if re.search(rf"\b{ours}\b", text)]
                note = f" (of {name}: {', '.join(words)})" if words else ""
                raise type(error)(f"attnops.compat: {name}: {text}{note}") from error

        return call

    return decorate
