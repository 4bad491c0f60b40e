"""What a model would run on: device, architecture, and the optional packages that backends wrap."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from attnops import _load
from attnops.environment import TRITON_INTERPRET

# Modules that optional backends wrap, and the packages that bring them.
PACKAGES = {
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "flash_attn.cute": "flash-attn-4",
    "aiter": "amd-aiter",
    "wave_lang": "wave-lang",
    "torch_npu": "torch-npu",
    "sgl_kernel": "sglang-kernel-xpu",
}
KERNEL_OPS = ("fmha_varlen", "fmha_paged", "mla_decode", "xqa_decode")  # a build may leave families out
DEVICES = ("cpu", "cuda", "hip", "xpu", "npu")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a model would run on.

    Args:
        device: One of `DEVICES`.
        arch: CUDA compute capability, 90 for Hopper; 0 elsewhere.
        name: For people.
        has_cuda_kernels: `_C_cuda` is loaded.
        missing_ops: Those of `KERNEL_OPS` of which the loaded `_C_cuda` has no kernel.
        built_archs: Architectures that the loaded `_C_cuda` was built for; empty: not known.
        packages: Those keys of `PACKAGES` that can be imported.
        interprets_triton: Triton's kernels run in its interpreter, on the CPU.
    """

    device: str
    arch: int = 0
    name: str = ""
    has_cuda_kernels: bool = False
    missing_ops: frozenset[str] = frozenset()
    built_archs: frozenset[int] = frozenset()
    packages: frozenset[str] = frozenset()
    interprets_triton: bool = False

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"attnops: a machine's device is one of {', '.join(DEVICES)}, got {self.device}")

    @property
    def runs_built_kernels(self) -> bool:
        """Whether the loaded kernels have code for `arch`: that of an earlier one of the same generation runs, too."""
        return not self.built_archs or _load.has_code_for(self.arch, self.built_archs)

    @property
    def torch_device(self) -> str:
        """The type of `torch.device` that names it: torch calls a GPU of AMD cuda, too."""
        return "cuda" if self.device == "hip" else self.device


def has_package(module: str) -> bool:
    """Whether a module can be found. Nothing is imported but the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def detect_machine(device: torch.device | str | None = None) -> Machine:
    """What this process would run on; the current GPU when there is one and no device is named."""
    kind = torch.device(device).type if device is not None else _device_here()
    packages = frozenset(module for module in PACKAGES if has_package(module))
    found = {"packages": packages, "interprets_triton": TRITON_INTERPRET.value()}
    if kind == "cpu":
        return Machine(device=kind, name=torch.backends.cpu.get_cpu_capability(), **found)  # type: ignore[arg-type]
    if kind == "cuda" and torch.version.hip is not None:
        name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no HIP device here"
        return Machine(device="hip", name=name, **found)  # type: ignore[arg-type]
    if kind != "cuda":
        return Machine(device=kind, **found)  # type: ignore[arg-type]
    if not torch.cuda.is_available():  # asked about a GPU from a machine without one
        return Machine(device="cuda", name="no CUDA device here", **found)  # type: ignore[arg-type]
    index = torch.device(device).index if device is not None else None
    major, minor = torch.cuda.get_device_capability(index)
    return Machine(
        device="cuda",
        arch=major * 10 + minor,
        name=torch.cuda.get_device_name(index),
        has_cuda_kernels=_load.cuda_unavailable_reason is None,
        missing_ops=frozenset(op for op in KERNEL_OPS if not _has_cuda_kernel(op)),
        built_archs=_load.built_archs(),
        **found,  # type: ignore[arg-type]
    )


def _has_cuda_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"attnops::{op}", "CUDA")


def _device_here() -> str:
    if torch.cuda.is_available():
        return "cuda"
    for kind in ("xpu", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"
