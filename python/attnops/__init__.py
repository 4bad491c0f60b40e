"""attnops: attention ops for LLM inference, compiled ahead of time."""

import importlib
from types import ModuleType

from attnops import _load, ops

__version__ = "0.1.0"

__all__ = ["__version__", "cuda_unavailable_reason", "ops"]

cuda_unavailable_reason = _load.cuda_unavailable_reason

# Imported when first used, so that `import attnops` costs the ops only.
_SUBMODULES = frozenset(
    {
        "backends",
        "compat",
        "distributed",
        "explain",
        "graphs",
        "info",
        "layers",
        "metadata",
        "plugins",
        "pools",
        "reference",
        "report",
        "triton_kernels",
        "types",
    }
)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"attnops.{name}")
    raise AttributeError(f"module 'attnops' has no attribute {name!r}")
