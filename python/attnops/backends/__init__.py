"""Backends: what answers a `RadixAttention` layer. `select_backend` chooses, `register_attention_backend` adds."""

from attnops.backends.base import AttentionBackend
from attnops.backends.capability import Capability, HeadDims, Machine
from attnops.backends.registry import get_backend_class, register_attention_backend, registered_names

__all__ = [
    "AttentionBackend",
    "Capability",
    "HeadDims",
    "Machine",
    "get_backend_class",
    "register_attention_backend",
    "registered_names",
]
