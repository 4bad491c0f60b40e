"""transformers' attention and mask functions: what each query sees becomes lists of keys, once per step.

A mask of theirs is one bool per query and key. Almost every batch needs less: a length, or a list of keys per request,
which also leaves out left padding. Any other mask becomes a list per query, which is exact, and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from attnops.plugins.transformers.attention import padded_attention

_ADVICE = 'use attn_implementation="eager" or "sdpa" for it'
_PAGED = ("cache", "read_index", "block_table")  # the first up to transformers 5.23, one of the others since
_REFUSED = {"output_attentions", "position_bias", "head_mask", *_PAGED}  # where they say something


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "attnops".

    Args:
        query: ``[B, H_q, S, D]``.
        key, value: ``[B, H_kv, K, D]``, ``[B, H_kv, K, D_v]``.
        attention_mask: Of `key_lists`; or bool ``[B, 1, S, K]``, a user's own; or None: every key is there, and
            `is_causal`, or the module's, says what a query sees.
        sliding_window: Keys that a query sees, itself included.
        s_aux: ``[H_q]``, a logit per head with no value.

    Returns:
        ``[B, S, H_q, D_v]`` in q's dtype, and None in place of attention weights.

    Raises:
        NotImplementedError: for dropout, weights, biases, other masks, gradients and paged caches.
    """
    _refuse(query, key, value, attention_mask, dropout, kwargs)
    keys = attention_mask
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        keys = _listed(attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = padded_attention(
        query,
        key,
        value,
        keys,
        softmax_scale=scaling,
        causal=causal,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logit_cap=softcap or 0.0,
        sinks=s_aux,
    )
    return out, None


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> None:
    plain = dropout == 0.0 and not torch.is_grad_enabled() and not _REFUSED.intersection(options)
    if plain and (mask is None or (mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1] == 1)):
        return
    reasons = {
        f"dropout={dropout}": dropout != 0.0,
        "output_attentions=True": bool(options.get("output_attentions")),
        "position_bias": options.get("position_bias") is not None,
        "head_mask": options.get("head_mask") is not None,
        'a paged cache (there the name is "attnops_flash_attention_3")': any(
            options.get(name) is not None for name in _PAGED
        ),
        "gradients (use torch.no_grad())": torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad),
    }
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.dtype not in (torch.bool, torch.int32)):
        reasons[f"a mask of {mask.dtype} {list(mask.shape)}, only bool [B, 1, S, K]"] = True
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(f"attnops: the transformers plug-in does not serve {reason}: {_ADVICE}")


def key_lists(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function "attnops": which keys each query sees.

    Args:
        batch_size, q_length, kv_length: Requests, new tokens, and places in the cache with them.
        q_offset: Tokens before the new ones; a tensor where the cache is static.
        kv_offset: Position of the cache's first place.
        mask_function: Of (batch, head, query, key); causal and its windows are known, any other is evaluated.
        attention_mask: bool ``[B, positions]``, False where there is padding. Outside a compiled region it is read on
            the host, once per step, as transformers' own functions do.
        allow_is_bidirectional_skip: Without padding, None will do for a bidirectional mask.

    Returns:
        What `padded_attention` calls `keys`; or None: every place holds a key that the module's own rule may see.
    """
    compiling = torch.compiler.is_compiling()
    padded = attention_mask is not None and (compiling or not bool(attention_mask.all()))
    last = q_offset + q_length - kv_offset  # places that hold a key
    if mask_function is masking_utils.bidirectional_mask_function and kv_offset == 0:
        if allow_is_bidirectional_skip and not padded:
            return None
    elif not padded and _is_causal(mask_function):
        return _lengths(last, batch_size, kv_length, device)
    elif padded and q_length > 1 and not compiling and _is_causal(mask_function):
        assert attention_mask is not None
        held: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        held = held[:, kv_offset : kv_offset + kv_length]
        if _in_one_piece(held):
            return _ranges(held, last)
    evaluate: Any = masking_utils.sdpa_mask
    mask = evaluate(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    if mask_function is masking_utils.bidirectional_mask_function:  # every query of a request sees the same
        return _listed(mask[:, :, :1]).expand(-1, -1, q_length, -1)
    return _listed(mask)


def _is_causal(mask_function: Callable) -> bool:
    """Causal, with a window or without, which the attention function is told."""
    if mask_function is masking_utils.causal_mask_function:
        return True
    if torch.compiler.is_compiling():
        return False
    # A window is `and_masks` of two functions that transformers makes anew for every step.
    parts = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    if mask_function.__qualname__ != _AND or len(parts) != 1 or len(parts[0]) != 2:
        return False
    window, causal = parts[0]
    return causal is masking_utils.causal_mask_function and getattr(window, "__qualname__", "") == _WINDOW


_AND = masking_utils.and_masks().__qualname__
_WINDOW = masking_utils.sliding_window_overlay(1).__qualname__


def _lengths(last: int | Tensor, batch_size: int, kv_length: int, device: torch.device | str) -> Tensor | None:
    if isinstance(last, int):
        if last == kv_length:
            return None
        return torch.full((batch_size, 1, 1, 1), last, dtype=torch.int32, device=device)
    return last.to(device=device, dtype=torch.int32).reshape(-1, 1, 1, 1).expand(batch_size, 1, 1, 1)


def _in_one_piece(held: Tensor) -> bool:
    """Padding is before and behind a request's tokens, never among them."""
    before = torch.nn.functional.pad(held, (1, 0))[:, :-1]
    return int((held & ~before).sum(dim=1).max()) <= 1


def _ranges(held: Tensor, last: int | Tensor) -> Tensor:
    """From each request's first token to the last place written. Padding behind the tokens is behind every query."""
    places = torch.arange(held.shape[1], dtype=torch.int32, device=held.device)
    first = torch.where(held.any(dim=1), held.int().argmax(dim=1), last).to(torch.int32).unsqueeze(1)
    count = (last - first).to(torch.int32)
    listed = (first + places).clamp(max=held.shape[1] - 1)
    return torch.cat([count, listed], dim=1)[:, None, None]


def _listed(mask: Tensor) -> Tensor:
    """int32 ``[B, 1, S, 1 + K]`` of bool ``[B, 1, S, K]``: how many are seen, then which, in their order."""
    rank = mask.cumsum(dim=-1, dtype=torch.int32)
    target = torch.where(mask, rank, 0).to(torch.int64)  # cell 0 takes those that are not seen, and then the count
    places = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device).expand(mask.shape)
    listed = torch.zeros(*mask.shape[:-1], 1 + mask.shape[-1], dtype=torch.int32, device=mask.device)
    listed = listed.scatter(-1, target, places)
    return torch.cat([rank[..., -1:], listed[..., 1:]], dim=-1)
