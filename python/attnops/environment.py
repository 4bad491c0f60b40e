"""The environment variables that attnops reads: one list, each with its type, its meaning and what it makes of text.

A variable that is set and malformed is an error where it is read: what a user asked for is never dropped in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable.

    Args:
        name: Of the variable.
        meaning: For people.
        parse: Text to value; raises ValueError saying what was expected.
        default: Its value where it is not set.
    """

    name: str
    meaning: str
    parse: Callable[[str], T] = field(repr=False)
    default: T

    def value(self) -> T:
        """What it says now.

        Raises:
            ValueError: it is set to something else than it takes; names it, what it takes, and what it was.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text.strip())
        except ValueError as error:
            raise ValueError(f"attnops: environment variable {self.name} must be {error}, got {text!r}") from None


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "0": False, "false": False, "": False}
    if text.lower() not in known:
        raise ValueError("0 or 1 (false or true)")
    return known[text.lower()]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("a positive integer")
    return int(text)


def _isa(text: str) -> str:
    known = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
    if text and text not in known:
        raise ValueError(f"one of {', '.join(known)}")
    return text


def _arch(text: str) -> int | None:
    if text and (not text.isdecimal() or not 80 <= int(text) <= 999):
        raise ValueError("a compute capability times ten from 80 on")
    return int(text) if text else None


CHECK = Variable("ATTNOPS_CHECK", "checked mode of backends built from now on", _flag, False)
CPU_ISA = Variable("ATTNOPS_CPU_ISA", "caps the instruction set of CPU kernels", _isa, "")
CUDA_ARCH = Variable[int | None]("ATTNOPS_CUDA_ARCH", "caps the GPU architecture whose kernels ops choose", _arch, None)
COMPAT_BF16_ROWS = Variable(
    "ATTNOPS_COMPAT_BF16_ROWS", "compat: lists of rows of 656 bytes are rounded to bf16, as FlashMLA does", _flag, False
)
VLLM_CPU = Variable("ATTNOPS_VLLM_CPU", "vLLM's CPU platform uses attnops in place of its backend", _flag, False)
TRITON_INTERPRET = Variable("TRITON_INTERPRET", "Triton's kernels run in its interpreter, on the CPU", _flag, False)
TRITON_NUM_KV_SPLITS = Variable[int | None](
    "SGLANG_TRITON_ATTENTION_NUM_KV_SPLITS", "backend triton: most splits of a request in decode", _positive, None
)
TRITON_SPLIT_TILE_SIZE = Variable[int | None](
    "SGLANG_TRITON_ATTENTION_SPLIT_TILE_SIZE", "backend triton: tokens of a split, whatever the batch", _positive, None
)
TRITON_DECODE_SPLIT_TILE_SIZE = Variable[int | None](
    "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE", "backend triton: tokens of a split in deterministic mode", _positive, None
)
FLASHINFER_WORKSPACE = Variable[int | None](
    "SGLANG_FLASHINFER_WORKSPACE_SIZE", "backend flashinfer: bytes of its workspace", _positive, None
)
FLASHINFER_WORKSPACE_OWN = Variable[int | None](
    "FLASHINFER_WORKSPACE_SIZE", "as SGLANG_FLASHINFER_WORKSPACE_SIZE, which wins", _positive, None
)
FLASHINFER_DECODE_SPLIT_TILE = Variable[int | None](
    "SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE",
    "backend flashinfer: tokens of a decode split in deterministic mode",
    _positive,
    None,
)
FLASHINFER_PREFILL_SPLIT_TILE = Variable[int | None](
    "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE",
    "backend flashinfer: tokens of an extend split in deterministic mode",
    _positive,
    None,
)
FLASHINFER_TENSOR_CORE = Variable[bool | None](
    "SGLANG_FLASHINFER_USE_TENSOR_CORE", "backend flashinfer: decode on tensor cores, or not", _flag, None
)

VARIABLES: tuple[Variable, ...] = tuple(one for one in list(globals().values()) if isinstance(one, Variable))


def describe() -> list[str]:
    """Every variable that is set, with its value and meaning; a malformed one with its error."""
    lines = []
    for variable in VARIABLES:
        if variable.name in os.environ:
            try:
                lines.append(f"  {variable.name}={variable.value()}: {variable.meaning}")
            except ValueError as error:
                lines.append(f"  {error}")
    return lines
