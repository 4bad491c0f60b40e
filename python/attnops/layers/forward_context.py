"""What a running step makes known to its layers, where a compiled model cannot carry it through its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnops.types import AttentionBatch

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


@dataclass
class ForwardContext:
    """The step now running: its batch (which holds backend and cache) and the layers by `layer_id`."""

    batch: AttentionBatch
    layers: Mapping[int, RadixAttention]
    order: torch.Tensor  # see `kv_order`


_current: ForwardContext | None = None
_orders: dict[torch.device, torch.Tensor] = {}


def kv_order(device: torch.device) -> torch.Tensor:
    """One byte per device that stands for "the caches" in a compiled graph.

    The attention op writes pages that are no argument of it. It says instead that it writes this byte: a compiler then
    neither drops an attention whose output is unused nor swaps two, and copies one byte where it functionalizes.
    """
    if device not in _orders:
        _orders[device] = torch.zeros(1, dtype=torch.uint8, device=device)
    return _orders[device]


def collect_layers(model: torch.nn.Module) -> dict[int, RadixAttention]:
    """The model's attention layers by `layer_id`: once per model, for `forward_context`.

    Raises:
        ValueError: two layers have one id.
    """
    from attnops.layers.radix_attention import RadixAttention

    layers: dict[int, RadixAttention] = {}
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            if module.layer_id in layers:
                raise ValueError(f"attnops: layer_id {module.layer_id} is used twice, again at {name}")
            layers[module.layer_id] = module
    return layers


@contextlib.contextmanager
def forward_context(batch: AttentionBatch, layers: Mapping[int, RadixAttention]) -> Iterator[ForwardContext]:
    """Makes `batch` the running step. Needed around a compiled model; an eager one may pass the batch to its layers."""
    global _current
    previous = _current
    _current = ForwardContext(batch, layers, kv_order(batch.cache_seqlens.device))
    try:
        yield _current
    finally:
        _current = previous


def get_forward_context() -> ForwardContext:
    """The running step.

    Raises:
        RuntimeError: none is running.
    """
    if _current is None:
        raise RuntimeError("attnops: no step is running; call the model inside `with forward_context(batch, layers):`")
    return _current
