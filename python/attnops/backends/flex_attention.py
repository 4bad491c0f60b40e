"""PyTorch's flex_attention over keys gathered from their pages: every mode, by one mask function.

On a GPU it is compiled by `torch.compile` at its first call; on a CPU it runs uncompiled, as torch defines it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from attnops.backends.gathered import CAPABILITY, Chunks, GatheredBackend, Queries, visible_keys
from attnops.backends.registry import register_attention_backend
from attnops.layers.radix_attention import RadixAttention


@functools.cache
def _compiled(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


# Of wide rows: for float32 torch tries tiles of 64 in three stages, which do not fit an SM's shared memory, and has no
# other choice. A head dim is padded to a power of two, and values may be wider than keys.
_SMALL_TILES: Any = {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1, "num_warps": 4}
_WIDEST_OF_TORCHS_TILES = 64
_SMALLEST_TILES: Any = {**_SMALL_TILES, "BLOCK_M": 16, "BLOCK_N": 16}  # of latents, 1024 wide when padded
_WIDEST_OF_SMALL_TILES = 256
# Of short queries torch takes all rows of a KV head in one tile, where it knows batch and heads: at most that many.
_ROWS_OF_TORCHS_SHORT_QUERIES = 128


def _kernel_options(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any] | None:
    width = max(q.shape[-1], v.shape[-1])
    if width > _WIDEST_OF_TORCHS_TILES:
        return _SMALL_TILES if width <= _WIDEST_OF_SMALL_TILES else _SMALLEST_TILES
    rows = q.shape[2] * q.shape[1] // k.shape[1]
    return {"FORCE_USE_FLEX_ATTENTION": True} if rows > _ROWS_OF_TORCHS_SHORT_QUERIES else None


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
    out, aux = _compiled(q.device.type)(
        q,
        k,
        v,
        score_mod=cap if layer.logit_cap else None,
        block_mask=block_mask,
        scale=layer.scaling,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
        return_aux=AuxRequest(lse=True),
        kernel_options=_kernel_options(q, k, v) if q.is_cuda else None,
    )
    if layer.sinks is not None:  # a logit that takes probability and gives no value
        out = out * torch.sigmoid(aux.lse - layer.sinks.float().view(1, -1, 1)).unsqueeze(-1)
    seen = visible.any(-1).unsqueeze(1).unsqueeze(-1)
    return out.masked_fill(~seen, 0.0).transpose(1, 2)


@register_attention_backend("flex_attention")
class FlexAttentionBackend(GatheredBackend):
    """Block masks for causal layers, windows, trees and ragged requests; the soft cap is a score function."""

    capability = dataclasses.replace(
        CAPABILITY, chosen_on=frozenset(), compiles_at_run_time=True, needs_cuda_kernels=True
    )
    softmax = staticmethod(_flex)
