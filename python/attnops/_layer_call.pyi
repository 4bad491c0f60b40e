"""A layer's call without torch's dispatcher: csrc/layer_call/python_module.cpp."""

from collections.abc import Callable

from torch import Tensor

def setup(tensor: type, parameter: type, watchers: tuple[Callable[[], object], ...]) -> bool:
    """Tells the module torch's types, and whom to ask whether somebody watches ops. False: torch is too old."""

class LayerCall:
    def __init__(self, op: Callable[..., None], bound: Tensor, address: int) -> None: ...
    def run(self, *tensors: Tensor | None) -> None: ...
