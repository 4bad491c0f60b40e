"""PyTorch's flex_attention over keys gathered from their pages: every mode, by one mask function.

On a GPU it is compiled by `torch.compile` at its first call; on a CPU it runs uncompiled, as torch defines it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from typing import Any

import torch
from torch import Tensor

from attnops.backends.gathered import CAPABILITY, Chunks, GatheredBackend, Queries, visible_keys
from attnops.backends.registry import register_attention_backend
from attnops.layers.radix_attention import RadixAttention
from attnops.types import AttentionSpec, Limits


def _attend(q: Tensor, k: Tensor, v: Tensor, cap: Any, block_mask: Any, options: dict[str, Any]) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod=cap, block_mask=block_mask, **options)


class _Compiled:
    """`_attend`, compiled for one kind of call. torch keeps a few versions for each code object (8, its
    `recompile_limit`) and runs any further call uncompiled. So every kind has a code object of its own, and one that is
    full gives way to a new one, with a warning."""

    def __init__(self, kind: tuple[Any, ...], **options: Any) -> None:
        self.kind, self.options, self.made = kind, options, 0
        self.call = self._new()

    def _new(self) -> Any:
        self.made += 1
        code = _attend.__code__.replace(co_name=f"flex_attention_{self.made}")
        # A whole graph: where torch would go on uncompiled, it raises.
        return torch.compile(types.FunctionType(code, _attend.__globals__), fullgraph=True, **self.options)

    def __call__(self, *args: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        try:
            return self.call(*args)
        except FailOnRecompileLimitHit:
            if self.made == 1:
                warnings.warn(
                    f"attnops: torch keeps no more compiled versions of flex_attention for {self.kind}: attnops "
                    "compiles anew, which takes seconds; torch._dynamo.config.recompile_limit sets how many it keeps",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.call = self._new()
            return self.call(*args)


@functools.cache
def _compiled(kind: tuple[Any, ...]) -> _Compiled:
    # One kernel is compiled: worker processes, one a core by default, would each import torch and have nothing to do.
    return _Compiled(kind, dynamic=True, options={"compile_threads": 1})


def _kind(q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention) -> tuple[Any, ...]:
    """What one compiled function serves: a kind of layer and, of its calls, those for one token or one request."""
    heads = f"{q.shape[1]}/{k.shape[1]} heads of {q.shape[-1]}/{v.shape[-1]}"
    return (
        heads,
        q.dtype,
        q.device,
        f"cap {layer.logit_cap}",
        f"scale {layer.scaling}",
        q.shape[0] == 1,
        q.shape[2] == 1,
    )


# Tiles by the wider of keys and values, padded to a power of two: queries and keys (square), by 4 warps, in one stage.
# torch's own of float32 do not fit an SM's shared memory above a head dim of 64, and it has no other choice then.
_TILES = ((64, 64), (256, 32), (1024, 16))
_LEAST_DIM = 16  # of a tile's product
# float32 products by three of tf32: right to some 21 bits, on tensor cores. torch's default unrolls one instruction for
# each product of a tile, which takes longer to compile (`docs/log/triton.md`).
_PRECISION = "'tf32x3'"


def _tile(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Rows of a tile, and the bytes of shared memory that its queries, keys and values take."""
    dim, v_dim = (1 << (d - 1).bit_length() for d in (head_dim, v_head_dim))
    rows = next(rows for widest, rows in _TILES if max(dim, v_dim) <= widest)
    return rows, 4 * rows * (2 * dim + v_dim)


def _kernel_options(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Of a GPU: the same kernel for short queries as for others, so that nothing is left to torch's choice."""
    rows, _ = _tile(q.shape[-1], v.shape[-1])
    options = {"BLOCK_M": rows, "BLOCK_N": rows, "num_stages": 1, "num_warps": 4, "FORCE_USE_FLEX_ATTENTION": True}
    return options if torch.version.hip else {**options, "FLOAT32_PRECISION": _PRECISION}


def _reason_against(spec: AttentionSpec, shared_memory: int) -> str:
    """Why torch's kernel for GPUs does not take a model's rows; empty: it does."""
    dims = f"head_dim/v_head_dim {spec.head_dim}/{spec.v_head_dim}"
    if min(spec.head_dim, spec.v_head_dim) < _LEAST_DIM:
        return f"takes {_LEAST_DIM} dimensions and more on a GPU, got {dims}"
    _, needs = _tile(spec.head_dim, spec.v_head_dim)
    if needs > shared_memory:
        return f"needs {needs} bytes of shared memory for {dims}, this GPU has {shared_memory}"
    return ""


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def _flex(queries: Queries, chunks: Chunks, layer: RadixAttention) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    gathered = list(chunks)
    q = queries.q.transpose(1, 2)
    k = torch.cat([keys for keys, _, _ in gathered], 1).transpose(1, 2)
    v = torch.cat([values for _, values, _ in gathered], 1).transpose(1, 2)
    visible = visible_keys(queries, layer, gathered[0][2], k.shape[2])  # [B, S_q, N]
    if queries.drafts is not None:  # a token outside every mask may hold NaN, which a weight of 0 does not hide
        hidden = ~visible.any(1).view(k.shape[0], 1, -1, 1)
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)

    def mask(request: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return visible[request, row, key]

    limit = torch.full((), layer.logit_cap, device=q.device)  # a number would be compiled as an unknown, which fails

    def cap(score: Tensor, request: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    block_mask = create_block_mask(mask, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))
    options: dict[str, Any] = {"scale": layer.scaling, "enable_gqa": layer.num_heads != layer.num_kv_heads}
    options |= {"return_aux": AuxRequest(lse=True), "kernel_options": _kernel_options(q, v) if q.is_cuda else None}
    attend = _compiled(_kind(q, k, v, layer)) if q.is_cuda else _attend
    out, aux = attend(q, k, v, cap if layer.logit_cap else None, block_mask, options)
    if layer.sinks is not None:  # a logit that takes probability and gives no value
        out = out * torch.sigmoid(aux.lse - layer.sinks.float().view(1, -1, 1)).unsqueeze(-1)
    seen = visible.any(-1).unsqueeze(1).unsqueeze(-1)
    return out.masked_fill(~seen, 0.0).transpose(1, 2)


@register_attention_backend("flex_attention")
class FlexAttentionBackend(GatheredBackend):
    """Block masks for causal layers, windows, trees and ragged requests; the soft cap is a score function.

    Raises:
        NotImplementedError: also of rows that are too narrow for a GPU's kernel, or too wide for its shared memory.
    """

    capability = dataclasses.replace(
        CAPABILITY, chosen_on=frozenset(), compiles_at_run_time=True, needs_cuda_kernels=True
    )
    softmax = staticmethod(_flex)
    ends_early = False  # it takes all keys at once, and their number chooses a compiled kernel

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        if self.device.type == "cuda" and (reason := _reason_against(spec, _shared_memory(self.device))):
            raise NotImplementedError(f"attnops: backend flex_attention {reason}")
