"""In every process of SGLang's engine: stand-ins for what it imports on a machine without a GPU, and does not use.

torchvision's builds for CUDA do not load beside a CPU build of torch. transformers looks for it, and must find none.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types


class StandIns:
    """Modules of which any name is a class that does nothing."""

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package != "torchvision" and name not in ("vllm", "vllm._custom_ops"):
            return None
        frame = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("transformers"):
                return None
            frame = frame.f_back
        if package == "torchvision":
            import transformers.modeling_utils  # looks for torchvision first, and finds none

            processors = types.SimpleNamespace(register=lambda *args, **options: None)
            transformers.AutoImageProcessor = processors  # its own demands torchvision
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        def stand_in(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module = types.ModuleType(spec.name)
        module.__getattr__, module.__path__ = stand_in, []
        return module

    def exec_module(self, module):
        pass


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.append(StandIns())
