"""Triton's interpreter, with the arithmetic of a GPU.

Its products depend on where a row stands in its tile, and it cuts a float32's low bits off on the way to bfloat16.
"""

from __future__ import annotations

import numpy as np


class _WideProducts:
    """numpy as the interpreter sees it: `matmul` sums in float64 and rounds once.

    In float32 the bits of a BLAS depend on a row's place, on some processors.
    """

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
