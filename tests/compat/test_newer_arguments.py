"""An argument that a newer version of a peer may have is refused, by its name or its place: it is no TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from attnops.compat import (
    causal_conv1d,
    deep_gemm,
    fla,
    flash_attn,
    flash_attn_interface,
    flash_mla,
    flashinfer,
    sgl_kernel,
)

MODULES = (causal_conv1d, deep_gemm, fla, flash_attn, flash_attn_interface, flash_mla, flashinfer, sgl_kernel)
SUBMODULES = (sgl_kernel.flash_attn, sgl_kernel.flash_mla, sgl_kernel.sparse_flash_attn)
ANYTHING = {"workspace_size"}  # one answer, whatever is to be planned


def methods(kind: type) -> dict[str, Callable]:
    own = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {f"{kind.__name__}.{name}": method for name, method in own.items() if inspect.isfunction(method)}


def functions() -> dict[str, Callable]:
    """Of the peers' names: functions, constructors and methods."""
    found: dict[str, Callable] = {}
    for module in MODULES + SUBMODULES:
        label = module.__name__.removeprefix("attnops.compat.")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                made = {name: value.__init__} | methods(value)
            else:
                made = {name: value} if inspect.isfunction(value) else {}
            found |= {f"{label}.{key}": function for key, function in made.items()}
    own = ("FlashMLASchedMeta.plan",)  # not the peer's
    return {key: function for key, function in found.items() if not key.endswith((*own, *ANYTHING))}


def arguments(function: Callable) -> tuple[list, dict, bool]:
    """None for all that must be given, and whether any number may be given by position."""
    kinds = inspect.signature(function).parameters.values()
    needed = [p for p in kinds if p.default is p.empty]
    by_place = [None for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: None for p in needed if p.kind is p.KEYWORD_ONLY}
    return by_place, by_name, any(p.kind is p.VAR_POSITIONAL for p in kinds)


@pytest.mark.parametrize("name", sorted(functions()))
def test_an_unknown_name_is_refused_by_name(name):
    function = functions()[name]
    args, options, _ = arguments(function)
    if "lse" in name.rsplit(".", 1)[-1] and args:  # passes all on to `run` or `forward`
        pytest.skip("the same as the function that it calls")
    with pytest.raises(NotImplementedError, match="does not honour some_newer_argument=: leave it out"):
        function(*args, **options, some_newer_argument=1)


@pytest.mark.parametrize("name", sorted(name for name, f in functions().items() if not arguments(f)[2]))
def test_one_argument_too_many_is_refused_by_place(name):
    function = functions()[name]
    places = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    _, options, _ = arguments(function)
    with pytest.raises(NotImplementedError, match=f"does not honour a positional argument behind {places[-1].name}"):
        function(*[None] * len(places), 1, **options)
