"""Triton's interpreter, with products that do not depend on where a row stands in its tile."""

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


def sum_products_in_float64() -> None:
    from triton.runtime import interpreter

    interpreter.np = _WideProducts()
