"""Directive `attnops-ops`: every op with its schema, its devices and its docstring, from the registered ops."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from attnops import ops
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

CSRC = Path(__file__).parents[2] / "csrc"


def devices_of() -> dict[str, list[str]]:
    """Devices of every op: what the sources register, so that a machine without a GPU tells the same."""
    found: dict[str, list[str]] = {}
    for device in ("CPU", "CUDA"):
        for path in sorted(CSRC.rglob("*.cpp")):
            text = path.read_text(encoding="utf-8")
            for block in re.findall(rf"STABLE_TORCH_LIBRARY_IMPL\(attnops, {device}, m\) \{{([^}}]*)\}}", text):
                for name in re.findall(r'm\.impl\("(\w+)"', block):
                    found.setdefault(name, []).append(device)
    return found


def schema_of(name: str) -> str:
    """The registered schema, an argument a line."""
    schema = str(getattr(torch.ops.attnops, name).default._schema)
    head, arguments, tail = re.fullmatch(r"(.*?\()(.*)(\) -> .*)", schema).groups()
    if not arguments:
        return schema
    parts = re.split(r", (?![^(]*\))", arguments)
    return "\n".join([head, *(f"    {part}," for part in parts), tail])


class Ops(SphinxDirective):
    """A section per op, in the page's Markdown."""

    def run(self) -> list[nodes.Node]:
        devices = devices_of()
        lines: list[str] = []
        for name in ops.__all__:
            lines += [f"## {name}", "", f"Devices: {', '.join(devices[name])}.", ""]
            lines += ["```{eval-rst}", f".. autofunction:: attnops.ops.{name}", "```", "", "The op behind it:", ""]
            lines += ["```{code-block} text", *schema_of(name).splitlines(), "```", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class OtherOps(SphinxDirective):
    """Ops that no function of `attnops.ops` has for its own: a line "name: what it does" each, and its schema."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for line in self.content:
            name, _, text = line.partition(": ")
            lines += [f"### {name}", "", text, "", "```{code-block} text", *schema_of(name).splitlines(), "```", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def tidy(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings write names of arguments as `name`; napoleon's own markup stays."""
    lines[:] = [re.sub(r"(?<![\w:`]):func:`", "`", line) for line in lines]


def setup(app: Sphinx) -> dict:
    app.add_directive("attnops-ops", Ops)
    app.add_directive("attnops-other-ops", OtherOps)
    app.connect("autodoc-process-docstring", tidy, priority=400)
    return {"version": "1", "parallel_read_safe": True}
