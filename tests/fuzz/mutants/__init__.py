"""Ops made wrong on purpose: what the fuzzer must find. Each takes the right function and gives a wrong one."""

from . import attention, indexer, stores  # noqa: F401  (each names its mutants)
from .registry import CALLERS, MUTANTS, callers_of, living

__all__ = ["CALLERS", "MUTANTS", "callers_of", "living"]
