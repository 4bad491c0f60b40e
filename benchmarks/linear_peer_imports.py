"""How the peers of `linear_peers.py` are found: stand-ins for what SGLang's files ask of its server, and requests."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

SGLANG = "sglang.kernels.ops"


class _Settings(types.ModuleType):
    """A module that answers whatever is asked of a server that runs on CUDA without options."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "torch_release":
            return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if name == "register_custom_op":
            return lambda *args, **options: args[0] if args and callable(args[0]) else lambda function: function
        if name == "get_device_sm":
            return lambda *_: 90
        if name in ("is_cuda", "is_arch_support_pdl", "is_sm90_supported", "is_gather_supported"):
            return lambda *_: True
        if name == "cdiv":
            return lambda a, b: -(-a // b)
        if name == "next_power_of_2":
            return lambda n: 1 << (n - 1).bit_length()
        return lambda *_, **__: False


class StandIns:
    """Finds SGLang's modules outside its kernels: none of them is run."""

    KEPT = tuple(
        f"{SGLANG}.{kept}"
        for kept in ("attention.fla.", "attention.linear.", "mamba.triton_ops.", "mamba.causal_conv1d_triton")
    )

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "sglang" or name.startswith(self.KEPT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Settings(spec.name)
        module.__path__ = [str(self.root / Path(*spec.name.split(".")[1:]))]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def imported(name: str, function: str) -> Callable[..., object] | None:
    try:
        return getattr(importlib.import_module(name), function)
    except Exception as error:  # a peer that does not import is no peer
        print(f"{name}: not found ({type(error).__name__}: {error})")
        return None


# What may be requested: its name in results, its package, and functions by the names of attributes of `Peers`.
REQUESTED = {
    "mamba": ("mamba_ssm", "mamba-ssm", {
        "mamba_step": ("mamba_ssm.ops.triton.selective_state_update", "selective_state_update"),
        "mamba_scan": ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
    }),
    "causal_conv1d": ("causal-conv1d", "causal-conv1d", {
        "conv1d": ("causal_conv1d", "causal_conv1d_fn"),
        "conv1d_step": ("causal_conv1d", "causal_conv1d_update"),
    }),
    "flashkda": ("FlashKDA", "tokenspeed-flashkda", {"flash_kda": ("flash_kda", "fwd")}),
    "cudnn": ("cuDNN", "nvidia-cudnn-frontend", {
        "cudnn_kda": ("cudnn.linear_attention.ops", "kimi_delta_attention"),
    }),
}  # fmt: skip


def started(request: str) -> dict[str, Callable[..., object]]:
    """The functions of a peer that was requested: one that does not start is an error."""
    if request not in REQUESTED:
        raise SystemExit(f"--also: expected some of {', '.join(REQUESTED)}, got {request}")
    _, package, functions = REQUESTED[request]
    try:
        if request == "mamba":
            _without_its_init("mamba_ssm")
        return {name: getattr(importlib.import_module(path), of) for name, (path, of) in functions.items()}
    except Exception as error:
        raise SystemExit(f"--also {request}: {package} does not start: {type(error).__name__}: {error}") from error


def _without_its_init(package: str) -> None:
    """Makes a package's modules importable where its `__init__` needs a compiled part that they do not."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {package}")
    module = types.ModuleType(package)
    module.__path__ = list(found.submodule_search_locations)
    sys.modules[package] = module
