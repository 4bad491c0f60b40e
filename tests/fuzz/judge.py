"""Whether a result is right: by the contract's bounds over the whole, and row by row for what the whole would hide."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .draw import Draw, Failure
from .oracle import Answer

# Over a whole result, as docs/architecture.md and tests/support/checks.py have them.
WHOLE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Of a single row, against its own size and that of the noise that rounded weights leave: 2 to 4 units of the dtype,
# the rounding of the output and of the weights with room for the unluckiest row of many.
ROW = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}
# What an element of the output is off by where the dtype has no normal numbers.
LEAST = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}


def check_attention(
    draw: Draw,
    out: Tensor,
    lse: Tensor | None,
    answer: Answer,
    *,
    looser: float = 1.0,
    lse_atol: float = 1e-4,
    sinks_in_lse: bool = False,
) -> None:
    """Raises for an output or lse that is not the answer.

    Args:
        out, lse: ``[T, H, D_v]`` and ``[T, H]``, on any device.
        looser: Times the bounds, for calls whose contract allows more.
    """
    dtype, out = out.dtype, out.detach().cpu().double()
    if out.shape != answer.out.shape:
        raise Failure(f"out has shape {list(out.shape)}, expected {list(answer.out.shape)}")
    empty = answer.lse == -math.inf
    if bool(out[empty].ne(0).any()):
        raise Failure(f"out of a row without keys is not zero: {place_of(out.ne(0).any(-1) & empty)}")
    if not bool(out.isfinite().all()):
        raise Failure(f"out is not finite: {place_of(~out.isfinite().all(-1))} of {list(out.shape)}")
    error, size = (out - answer.out).norm(dim=-1), answer.out.norm(dim=-1) + answer.noise
    bound = looser * ROW[dtype] * size + LEAST[dtype] * math.sqrt(out.shape[-1]) + 1e-7
    if bool((error > bound).any()):
        worst = int((error / bound).argmax())
        raise Failure(
            f"out differs: {place_of(error > bound)}, worst {error.flatten()[worst]:.3g} of {size.flatten()[worst]:.3g}"
        )
    whole, norm = float(error.norm()), float(size.norm())
    if whole > looser * WHOLE[dtype] * norm + LEAST[dtype] * math.sqrt(out.numel()) + 1e-7:
        raise Failure(f"out differs on the whole: relative error {whole / max(norm, 1e-30):.3g}")
    if lse is not None:
        check_lse(lse, answer.total if sinks_in_lse else answer.lse, lse_atol)


def check_lse(lse: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    got = lse.detach().cpu().double()
    if got.shape != expected.shape:
        raise Failure(f"lse has shape {list(got.shape)}, expected {list(expected.shape)}")
    empty = expected == -math.inf
    if not torch.equal(got == -math.inf, empty):
        raise Failure(f"lse is -inf elsewhere than where no key is seen: {place_of((got == -math.inf) != empty)}")
    error = torch.where(empty, torch.zeros_like(got), got - expected).abs()
    bad = ~(error <= atol + 1e-5 * expected.abs())
    bad &= ~empty
    if bool(bad.any()):
        raise Failure(f"lse differs by {error[bad].max():.3g}: {place_of(bad)}")


def check_same_bits(what: str, a: Tensor, b: Tensor) -> None:
    a, b = a.contiguous(), b.contiguous()
    if a.shape != b.shape:
        raise Failure(f"{what}: shapes {list(a.shape)} and {list(b.shape)}")
    left, right = a.view(torch.uint8), b.view(torch.uint8)
    if not torch.equal(left, right):
        raise Failure(f"{what}: {int((left != right).sum())} of {left.numel()} bytes differ")


def place_of(bad: Tensor) -> str:
    """How many, and the first of them."""
    places = bad.nonzero().tolist()
    return f"{len(places)} of {bad.numel()} rows, first at {places[0] if places else None}"


def check_no_fault(report: Tensor | None) -> None:
    """The checked mode finds nothing wrong with a right call."""
    if report is not None and bool(report.any()):
        raise Failure(f"report of a right call: {report.tolist()}")
