"""What the ops of this package check before a launch: errors name op, argument, dimension, expected and got."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from attnops.triton_kernels.core.kernel import attend_kernel

Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

RUNS_ON_CPU = not isinstance(attend_kernel, triton.JITFunction)  # it is Triton's interpreter's

library = torch.library.Library("attnops", "FRAGMENT")


class Checks:
    """Checks of one call: an extent is bound by the tensor that names it first, and every later one must agree."""

    def __init__(self, op: str, home: Tensor) -> None:
        self._op, self._device = op, home.device
        on_cpu = home.device.type == "cpu"
        self.require(RUNS_ON_CPU or not on_cpu, "runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1")
        self.extents: dict[str, int] = {}
        self._bound_by: dict[str, str] = {}

    def tensor(
        self, name: str, tensor: Tensor | None, dims: Sequence[str], dtypes: Sequence[torch.dtype], dense: bool = True
    ) -> None:
        """`dims` are names of extents; a name that is a number is that number. None is no tensor: nothing to check."""
        if tensor is None:
            return
        label = f"attnops::{self._op}: {name}"
        if tensor.device.type != self._device.type:
            raise RuntimeError(f"{label} must be on {self._device} as q, got {tensor.device}")
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise RuntimeError(f"{label} must have dtype {expected}, got {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.dim() != len(dims):
            raise RuntimeError(f"{label} must have {len(dims)} dimensions, got {tensor.dim()}")
        for axis, (dim, got) in enumerate(zip(dims, tensor.shape)):
            expected_extent = int(dim) if dim.isdecimal() else self.extents.setdefault(dim, got)
            by = self._bound_by.setdefault(dim, name)
            if got != expected_extent:
                origin = "" if by == name or dim.isdecimal() else f" as in {by}"
                raise RuntimeError(f"{label}.shape[{axis}] ({dim}) must be {expected_extent}{origin}, got {got}")
        if dense and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise RuntimeError(f"{label} must have stride 1 in its last dimension, got {tensor.stride(-1)}")

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise RuntimeError(f"attnops::{self._op}: {message}")

    def heads(self) -> None:
        q, kv = self.extents["num_q_heads"], self.extents["num_kv_heads"]
        self.require(kv > 0 and q % kv == 0, f"num_q_heads ({q}) must be a multiple of num_kv_heads ({kv})")

    def queries(self, q: Tensor, q_pe: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
        """Flat queries and their destination; with `q_pe`, a head dim in two parts."""
        self.tensor("q", q, ("num_tokens", "num_q_heads", "head_dim_q"), Q_DTYPES)
        self.tensor("q_pe", q_pe, ("num_tokens", "num_q_heads", "head_dim_pe"), (q.dtype,))
        self.extents["head_dim"] = q.shape[-1] + (0 if q_pe is None else q_pe.shape[-1])
        self._bound_by["head_dim"] = "q" if q_pe is None else "q and q_pe"
        self.tensor("out", out, ("num_tokens", "num_q_heads", "head_dim_v"), (q.dtype,))
        self.tensor("lse", lse, ("num_tokens", "num_q_heads"), (torch.float32,))

    def pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, cache_seqlens: Tensor) -> None:
        stored = (q.dtype, *FP8)
        self.tensor("k_pages", k_pages, ("num_pages", "page_size", "num_kv_heads", "head_dim"), stored)
        self.tensor("v_pages", v_pages, ("num_pages", "page_size", "num_kv_heads", "head_dim_v"), (k_pages.dtype,))
        self.tensor("page_table", page_table, ("batch_size", "max_pages"), (torch.int32,))
        self.tensor("cache_seqlens", cache_seqlens, ("batch_size",), (torch.int32,))
        self.heads()

    def options(
        self, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, window_left: int, logit_cap: float
    ) -> None:
        self.tensor("sinks", sinks, ("num_q_heads",), (torch.float32,))
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and scale.numel() != 1:
                self.tensor(name, scale, ("num_kv_heads",), (torch.float32,))
        self.require(window_left >= -1, f"window_left must be -1 (off) or more, got {window_left}")
        self.require(0 <= logit_cap < float("inf"), f"logit_cap must be 0 (off) or positive, got {logit_cap}")

    def bounds(self, name: str, cu_seqlens: Tensor) -> None:
        """Cumulative lengths of the batch's requests."""
        requests = self.extents.setdefault("batch_size", cu_seqlens.shape[0] - 1)
        self.tensor(name, cu_seqlens, (str(requests + 1),), (torch.int32,))

    def tree(self, tree_mask: Tensor | None, seqlen_q: int, tree_keys: int) -> None:
        self.require(
            tree_keys == seqlen_q or (tree_keys > seqlen_q and tree_mask is not None),
            f"tree_keys must be 0 or seqlen_q ({seqlen_q}), or more beside a tree_mask, got {tree_keys}",
        )
        width = -(-tree_keys // 8)
        self.tensor("tree_mask", tree_mask, ("batch_size", str(seqlen_q), str(width)), (torch.uint8,))
        dense = tree_mask is None or tree_mask.stride(2) == 1
        self.require(dense, "the last dimension of tree_mask must be contiguous")


def register(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as op of that schema, on every device, with a fake that does nothing.

    The op writes into tensors that it is given, so a tracer needs to know no shape.
    """
    name = schema.split("(", 1)[0]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"attnops::{name}", lambda *args, **options: None)
        op = getattr(torch.ops.attnops, name).default

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> None:
            op(*args, **options)

        return call

    return decorate
