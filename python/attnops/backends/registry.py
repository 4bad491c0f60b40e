"""Backends by name. Names as in SGLang; a backend's module is imported when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from attnops.backends.base import AttentionBackend

# Where each backend of this package is; its module registers it.
_MODULES = {
    "intel_amx": "attnops.backends.intel_amx",
    "torch_native": "attnops.backends.torch_native",
    "fa3": "attnops.backends.fa3",
    "trtllm_mha": "attnops.backends.decode_backends",
    "flashmla": "attnops.backends.decode_backends",
    "cutlass_mla": "attnops.backends.decode_backends",
    "trtllm_mla": "attnops.backends.decode_backends",
    "triton": "attnops.backends.triton",
    "flex_attention": "attnops.backends.flex_attention",
    "flashinfer": "attnops.backends.flashinfer",
    "nsa": "attnops.backends.nsa",
    "dsv4": "attnops.backends.dsv4",
    "wave": "attnops.backends.wave",
    **dict.fromkeys(("fa4", "aiter", "intel_xpu", "ascend"), "attnops.backends.vendors"),
}

# Second names of backends.
ALIASES = {"flashinfer_mla": "flashinfer", "dsa": "nsa", "compressed": "dsv4"}

# Names that users of SGLang know, whose classes need more than (spec, limits, device): each with what to write.
NOT_BUILT = {
    "dual_chunk_flash_attn": "its q has five parts; build it with DualChunkFlashAttentionBackend(spec, limits, device)",
    "double_sparsity": "it needs heavy channels; build it with DoubleSparseAttnBackend(spec, limits, device, ...)",
    "hybrid_linear": "it joins two backends; build it with HybridLinearAttnBackend(full, linear, layers)",
    "tbo": "it joins three backends; build it with TboAttnBackend(primary, children)",
    "hybrid": "it joins two backends; build it with HybridAttnBackend(prefill, decode)",
}

_classes: dict[str, type[AttentionBackend]] = {}


def register_attention_backend(name: str) -> Callable[[type[AttentionBackend]], type[AttentionBackend]]:
    """Class decorator: makes a backend known as `name`.

    Raises:
        ValueError: the name is taken by another class, or the class declares no `capability`.
    """

    def register(cls: type[AttentionBackend]) -> type[AttentionBackend]:
        known = _classes.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"attnops: backend name {name} is taken by {known.__qualname__}")
        if not hasattr(cls, "capability"):
            raise ValueError(f"attnops: backend {cls.__qualname__} declares no capability")
        cls.name = name
        _classes[name] = cls
        return cls

    return register


def registered_names() -> list[str]:
    """Every name that `get_backend_class` answers: this package's backends, then those that users registered."""
    return list(dict.fromkeys([*_MODULES, *_classes]))


def get_backend_class(name: str) -> type[AttentionBackend]:
    """The class of a backend; imports its module.

    Raises:
        NotImplementedError: the name is known, but needs more than the three arguments: says what.
        ValueError: nobody knows the name: lists those that are known.
    """
    name = ALIASES.get(name, name)
    if name not in _classes and name in _MODULES:
        importlib.import_module(_MODULES[name])
    if name in _classes:
        return _classes[name]
    if name in NOT_BUILT:
        raise NotImplementedError(f"attnops: backend {name} is not made by its name alone: {NOT_BUILT[name]}")
    raise ValueError(f"attnops: no backend is called {name}; there are {', '.join(registered_names())}")
