"""Triton's interpreter, with the arithmetic of a GPU, and without work that it does over and over.

Its products depend on where a row stands in its tile, and it cuts a float32's low bits off on the way to bfloat16.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


class _WideProducts:
    """numpy as the interpreter sees it: `matmul` sums in float64 and rounds once.

    In float32 the bits of a BLAS depend on a row's place, on some processors.
    """

    def __init__(self) -> None:
        self.__dict__.update({name: value for name, value in vars(np).items() if name != "matmul"})

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        wanted = dtype or np.result_type(a, b)
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(wanted)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values as bfloat16, rounded to the nearest, ties to even. A NaN stays one."""
    bits = values.view(np.uint32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def compute_as_a_gpu() -> None:
    """Changes Triton's interpreter in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cut = builder.cast_impl

    def cast_impl(self: object, src: interpreter.TensorHandle, dst_type: object) -> interpreter.TensorHandle:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(bfloat16_bits(src.data), tl.bfloat16)
        return cut(self, src, dst_type)

    interpreter.np = _WideProducts()
    builder.cast_impl = cast_impl
    if hasattr(interpreter, "_LangPatchScope"):
        patch_once_per_kernel(interpreter)
    remember_dtypes(interpreter)


def patch_once_per_kernel(interpreter: Any) -> None:
    """Changes Triton's language when a kernel starts, and not again at every call of a function inside it."""
    language, patch = interpreter.tl, interpreter._patch_lang
    patched: set[str] = set()  # by the kernel that runs

    def patch_lang(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        needed = {module.__name__ for module in modules if module in (language, language.core)}
        if needed and needed <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore
        patched.update(needed)

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang


def remember_dtypes(interpreter: Any) -> None:
    """Looks up numpy's dtype of a scalar. By itself the interpreter makes a table of all of them at every question."""
    known: dict[str, np.dtype] = {}
    pointer, ask = interpreter.tl.pointer_type, interpreter._get_np_dtype

    def get_np_dtype(tt_dtype: Any) -> np.dtype:
        scalar = tt_dtype.scalar
        if isinstance(scalar, pointer):
            return ask(scalar)
        if scalar.name not in known:
            known[scalar.name] = ask(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = get_np_dtype
