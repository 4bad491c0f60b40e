"""Loads the compiled modules: `_C` always, `_C_cuda` where torch has CUDA. No driver is needed for an import."""

from __future__ import annotations

from pathlib import Path

import torch

_FOLDER = Path(__file__).parent


def _load_cpu() -> None:
    path = _FOLDER / "_C.so"
    if not path.exists():
        raise ImportError(f"attnops: {path.name} is missing from the package; build it with `make build`")
    torch.ops.load_library(str(path))


def _load_cuda() -> str | None:
    """Why the CUDA kernels are not loaded, or None when they are."""
    path = _FOLDER / "_C_cuda.so"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not path.exists():
        return "this build of attnops has no CUDA kernels (_C_cuda.so is missing)"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return None


def built_archs() -> frozenset[int]:
    """Architectures that the loaded CUDA kernels were built for; empty where none are loaded."""
    if cuda_unavailable_reason is not None:
        return frozenset()
    return frozenset(map(int, torch.ops.attnops.cuda_archs().split()))


def has_code_for(arch: int, built: frozenset[int]) -> bool:
    """Whether a GPU runs kernels of a build: code for an earlier architecture of its generation runs, too."""
    return any(arch // 10 == one // 10 and arch >= one for one in built)


_load_cpu()
cuda_unavailable_reason: str | None = _load_cuda()
