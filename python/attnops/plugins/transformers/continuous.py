"""transformers' continuous batching on `attnops.compat`: the library's own wrapper, with our functions behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from attnops.compat import flash_attn_interface


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.compat.flash_attn_interface.flash_attn_varlen_func`; sinks have the name that transformers passes."""
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    bounds = (cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k)
    return flash_attn_interface.flash_attn_varlen_func(
        q, k, v, *bounds, window_size=window_size, sinks=s_aux, **options
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Of requests that are all as long: ``[B, S, H_q, D]`` over ``[B, K, H_kv, D]``."""

    def bounds(tensor: Tensor) -> Tensor:
        return torch.arange(tensor.shape[0] + 1, dtype=torch.int32, device=tensor.device) * tensor.shape[1]

    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    lengths = (bounds(q), bounds(k), q.shape[1], k.shape[1])
    rows = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    out = flash_attn_varlen_func(rows[0], rows[1], rows[2], *lengths, window_size=window_size, s_aux=s_aux, **options)
    assert isinstance(out, Tensor), "lse is not asked for"
    return out.unflatten(0, q.shape[:2])


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.compat.flash_attn_interface.flash_attn_with_kvcache`, likewise. q: ``[B, 1, H_q, D]``."""
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    return flash_attn_interface.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        window_size=window_size,
        sinks=s_aux,
        **options,
    )


def register(name: str) -> None:
    """Makes `name` an implementation of flash attention.

    transformers looks for the functions of such a name among packages that it knows and kernels of its hub, and nowhere
    else. Models with sinks list the names that they take. Both are asked for other names only.
    """
    utils: Any = modeling_flash_attention_utils
    models: Any = PreTrainedModel
    look_up, check = utils._lazy_imports, models._check_and_adjust_attn_implementation
    padding = (utils._pad_input, utils._unpad_input)

    def functions(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Callable, ...]:
        if implementation == name:
            return (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, *padding)
        return look_up(implementation, *args, **kwargs)

    def check_name(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation == name:
            utils.lazy_import_flash_attention(name)  # before a compiler could meet it
            return name
        return check(self, attn_implementation, *args, **kwargs)

    utils._lazy_imports = functions
    models._check_and_adjust_attn_implementation = check_name
    AttentionInterface.register(name, flash_attention_forward)
    AttentionMaskInterface.register(name, flash_attention_mask)
