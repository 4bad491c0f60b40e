"""The book's reference names every op and every public class, and an op's docstring says what the book promises."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import attnops.ops
import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/reference").glob("*.md")))
# Modules whose public names users import, by their `__all__`.
PACKAGES = ("attnops.backends", "attnops.graphs", "attnops.layers", "attnops.metadata", "attnops.pools")
PACKAGES += ("attnops.state_snapshots",)
# Modules without one: the classes that they define.
MODULES = ("attnops.distributed", "attnops.speculative", "attnops.types")
# Classes whose members the reference brings: all ("") or some, by name. Modes of ForwardMode speak for themselves.
CLASSES = [
    (name, members)
    for name, members, undocumented in re.findall(
        r"^\.\. autoclass:: (\S+)\n   :members:(.*)\n(   :undoc-members:)?", REFERENCE, re.MULTILINE
    )
    if not undocumented
]
COMPAT = ("causal_conv1d", "deep_gemm", "fla", "flash_attn", "flash_attn_interface", "flash_mla", "flashinfer")


def registered() -> set[str]:
    """The compiled ops. Layers and plugins register more, in Python, for torch.compile alone."""
    text = (ROOT / "csrc/torch_bindings/schemas.cpp").read_text(encoding="utf-8")
    return set(re.findall(r'm\.def\(\s*"(\w+)\(', text))


def named(module: str, name: str) -> bool:
    """Whether a directive of the reference brings `name` of `module`."""
    if re.search(rf"^\.\. auto(class|function|data):: {re.escape(module)}\.{name}$", REFERENCE, re.MULTILINE):
        return True
    whole = re.search(rf"^\.\. automodule:: {re.escape(module)}\n   :members:(.*)$", REFERENCE, re.MULTILINE)
    return whole is not None and (not whole[1].strip() or name in re.split(r"[, ]+", whole[1].strip()))


def public(module: str) -> list[str]:
    """Classes and functions that a module offers."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None)
    if names is not None:
        return [name for name in names if inspect.isclass(getattr(found, name)) or callable(getattr(found, name))]
    return [name for name, value in vars(found).items() if inspect.isclass(value) and value.__module__ == module]


def test_every_op_is_in_the_reference():
    others = re.search(r"```{attnops-other-ops}\n(.*?)```", REFERENCE, re.DOTALL)
    listed = {line.partition(":")[0] for line in others[1].splitlines()}
    assert registered() == set(attnops.ops.__all__) | listed
    assert "```{attnops-ops}" in REFERENCE


@pytest.mark.parametrize("module", [*PACKAGES, *MODULES])
def test_every_public_name_is_in_the_reference(module):
    missing = [name for name in public(module) if not name.startswith("_") and not named(module, name)]
    assert not missing, f"add them to docs/reference: {module}: {', '.join(missing)}"


@pytest.mark.parametrize("library", COMPAT)
def test_every_library_of_compat_is_in_the_reference(library):
    assert re.search(rf"^\.\. automodule:: attnops\.compat\.{library}$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("name", attnops.ops.__all__)
def test_an_ops_docstring_has_its_arguments_and_errors(name):
    function = getattr(attnops.ops, name)
    text = inspect.getdoc(function)
    assert "Args:" in text and "Raises:" in text, text
    arguments = text[text.index("Args:") : text.index("Raises:")]
    for argument in inspect.signature(function).parameters:
        as_there = re.search(r"(arguments|Args|rest).*(are those|as) (of|in|there)|[Aa]s (there|in|of) ", arguments)
        assert as_there or re.search(rf"\b{argument}\b", arguments), argument


@pytest.mark.parametrize("name", [name for name, _ in CLASSES])
def test_every_public_member_of_a_class_has_a_docstring(name):
    """Without one it is missing from the page."""
    module, _, attribute = name.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    listed = re.findall(r"\w+", dict(CLASSES)[name])
    for member in listed or [member for member in vars(cls) if not member.startswith("_")]:
        found = inspect.getattr_static(cls, member)
        if inspect.isfunction(found) or isinstance(found, (property, classmethod, staticmethod)):
            assert inspect.getdoc(getattr(cls, member)), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", attnops.ops.__all__)
def test_an_op_has_devices(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    pytest.importorskip("sphinx")
    devices = __import__("attnops_reference").devices_of()
    assert devices[name], "no STABLE_TORCH_LIBRARY_IMPL names it"
    assert sys.modules["attnops_reference"].schema_of(name).startswith(f"attnops::{name}(")
