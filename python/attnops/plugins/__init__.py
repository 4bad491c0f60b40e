"""Engines as clients: one module per engine, imported by that engine alone.

Registering adds names and changes no default. `engines` says which engines are installed, and which of their versions
are served; `python -m attnops.info --plugins` prints it. How to choose attnops in each engine: docs/engines.md.
"""

from attnops.plugins.engines import ENGINES, Engine, registers, unsupported

__all__ = ["ENGINES", "Engine", "registers", "unsupported"]
