"""What "equal" means: relative Frobenius error against float64, by dtype (see docs/architecture.md, "Numbers")."""

from __future__ import annotations

import torch
from torch import Tensor

# Bounds of the contract: accumulation is float32 and the output is rounded once, so the error is the rounding of the
# dtype (2^-8 for bf16, 2^-11 for fp16) with room for the rounding of the probabilities.
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
MAX_RELATIVE_ERROR_FP8 = 4e-2  # FP8 KV, against the values before quantization


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64. A NaN anywhere gives NaN, which passes no bound."""
    actual, expected = actual.double(), expected.double()
    norm = expected.norm().item()
    return (actual - expected).norm().item() / norm if norm else (actual - expected).norm().item()


def assert_attention_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, bound: float | None = None) -> None:
    bound = MAX_RELATIVE_ERROR[dtype] if bound is None else bound
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    assert error <= bound, f"relative error {error:.3g} above {bound:.3g}"


def assert_lse_close(actual: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    """lse is compared absolutely (it is a logarithm), infinities by place."""
    expected = expected.to(torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol)


def free_bytes(device: str) -> int:
    """Memory that a test may still take, for those that need a very large pool."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
