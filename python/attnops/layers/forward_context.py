"""What a running step makes known to its layers, where a compiled model cannot carry it through its graph."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from attnops.types import AttentionBatch, LayerServer

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention
    from attnops.layers.radix_linear_attention import RadixLinearAttention

    Layer: TypeAlias = RadixAttention | RadixLinearAttention


@dataclass(frozen=True)
class ForwardContext:
    """The step now running: its batch, which holds the cache, the layers by `layer_id`, and the backend."""

    batch: AttentionBatch
    layers: Mapping[int, Layer]
    backend: LayerServer | None = None


# Of this thread (and of this task): two models may run side by side. Read by the op only, never by traced code.
_current: contextvars.ContextVar[ForwardContext | None] = contextvars.ContextVar("attnops_step", default=None)

# One byte per device that stands for "the caches" in a compiled graph. The attention op writes pages that are no
# argument of it. It says instead that it writes this byte: a compiler then neither drops an attention whose output is
# unused nor swaps two, and copies one byte where it functionalizes. Nobody reads or writes it.
_kv_order: dict[torch.device, torch.Tensor] = {}


def kv_order(device: torch.device) -> torch.Tensor:
    """The byte of a device on which a step has run.

    Raises:
        RuntimeError: none has.
    """
    if device not in _kv_order:
        raise RuntimeError(_NO_STEP)
    return _kv_order[device]


_NO_STEP = "attnops: no step is running; call the model inside `with forward_context(batch, layers):`"


def collect_layers(model: torch.nn.Module) -> dict[int, Layer]:
    """The model's attention layers by `layer_id`, linear ones among them: once per model, for `forward_context`.

    Raises:
        ValueError: two layers have one id.
    """
    from attnops.layers.radix_attention import RadixAttention
    from attnops.layers.radix_linear_attention import RadixLinearAttention

    layers: dict[int, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, (RadixAttention, RadixLinearAttention)):
            if module.layer_id in layers:
                raise ValueError(f"attnops: layer_id {module.layer_id} is used twice, again at {name}")
            layers[module.layer_id] = module
    return layers


@contextlib.contextmanager
def forward_context(
    batch: AttentionBatch, layers: Mapping[int, Layer], backend: LayerServer | None = None
) -> Iterator[ForwardContext]:
    """Makes `batch` the running step. Needed around a compiled model; an eager one may pass the batch to its layers.

    Args:
        layers: By `layer_id`, as `collect_layers` gives them.
        backend: Serves the step; None: the batch's own.
    """
    device = batch.device
    if device not in _kv_order:
        _kv_order[device] = torch.zeros(1, dtype=torch.uint8, device=device)
    context = ForwardContext(batch, layers, batch.attn_backend if backend is None else backend)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The running step.

    Raises:
        RuntimeError: none is running.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError(_NO_STEP)
    return context
