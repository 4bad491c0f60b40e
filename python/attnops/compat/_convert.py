"""What the modules of this package share: refusals, and conversions of lse, windows, scales, masks and caches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnops.ops._pages import gathered, own_cells

FP8 = torch.float8_e4m3fn
Cache = Tensor | tuple[Tensor, Tensor]
FP4_OUT = "there is no FP4 output; give out_dtype a 16-bit or float8_e4m3fn dtype"
FP4_CACHE = "caches are 16-bit or FP8; leave it None"
E5M2 = torch.float8_e5m2
E4M3_MAX = 448.0
_LARGEST = {FP8: E4M3_MAX, E5M2: 57344.0}


def refuse(function: str, argument: str, instead: str) -> NotImplementedError:
    """The error for an argument that is not honoured."""
    return NotImplementedError(f"attnops.compat: {function} does not honour {argument}: {instead}")


def require_default(function: str, instead: dict[str, str], defaults: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises for the first argument that is not at its default.

    Args:
        instead: What would work, by argument.
        defaults: By argument; None where it is missing.
    """
    for name, advice in instead.items():
        value, default = given[name], defaults.get(name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise refuse(function, f"{name}={shown}", advice)


def to_log2(lse: Tensor) -> Tensor:
    """Natural log to base 2."""
    return lse * (1 / math.log(2))


def from_log2(lse: Tensor) -> Tensor:
    """Base 2 to natural log."""
    return lse * math.log(2)


def empty_is_plus_inf(lse: Tensor) -> Tensor:
    """-inf, attnops' lse of a row without a key, to FlashMLA's +inf."""
    return torch.where(lse == -math.inf, math.inf, lse)


def empty_is_minus_inf(lse: Tensor) -> Tensor:
    """The other way, for what comes in."""
    return torch.where(lse == math.inf, -math.inf, lse)


def heads_first(lse: Tensor) -> Tensor:
    """``[B, S, H]`` to ``[B, H, S]``, ``[T, H]`` to ``[H, T]``, contiguous."""
    return lse.transpose(-1, -2).contiguous()


def as_int32(function: str, name: str, lengths: Tensor, device: torch.device) -> Tensor:
    """Lengths or indices as the ops take them: contiguous int32 on the device, uint32 reinterpreted."""
    if lengths.dtype == torch.int32 and lengths.device == device and lengths.is_contiguous():
        return lengths
    if lengths.dtype == torch.uint32:
        lengths = lengths.view(torch.int32)
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attnops.compat: {function}: {name} must have dtype int32 or int64, got {lengths.dtype}")
    return lengths.to(device=device, dtype=torch.int32, non_blocking=True).contiguous()


def as_dtype(function: str, argument: str, name: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, name, name) if isinstance(name, str) else name
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"attnops.compat: {function}: {argument} must be a torch.dtype or its name, got {name!r}")
    return dtype


def as_sinks(
    sinks: Tensor | list[Tensor] | tuple[Tensor, ...] | None, num_q_heads: int, function: str, name: str = "sinks"
) -> Tensor | None:
    """float32 ``[H_q]`` of any of the forms in use: any float dtype, ``[H_kv, group]``, a list of one."""
    if sinks is None:
        return None
    if isinstance(sinks, list | tuple):
        if len(sinks) != 1:
            raise refuse(function, f"{name} of {len(sinks)} tensors", "give one tensor with a logit per query head")
        sinks = sinks[0]
    if not sinks.is_floating_point():
        raise TypeError(f"attnops.compat: {function}: {name} must have a float dtype, got {sinks.dtype}")
    if sinks.numel() != num_q_heads:
        raise ValueError(f"attnops.compat: {function}: {name} must hold {num_q_heads} logits, got {list(sinks.shape)}")
    return sinks.reshape(-1).float()


def as_scale(function: str, name: str, scale: float | Tensor | None, device: torch.device) -> Tensor | None:
    """A scale as float32 ``[1]`` on the device; None: 1."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise refuse(function, f"{name} of shape {list(scale.shape)}", "give one number or a tensor of one")
        return scale.reshape(1).to(device=device, dtype=torch.float32, non_blocking=True)
    if scale is None or scale == 1:
        return None
    return torch.full((1,), scale, dtype=torch.float32, device=device)


def fold_scale(function: str, name: str, scale: float | Tensor | None, device: torch.device) -> tuple[float, Any]:
    """A factor of the scores: a number to fold into the softmax scale, and float32 ``[1]`` of what is on the device."""
    if isinstance(scale, Tensor):
        return 1.0, as_scale(function, name, scale, device)
    return (1.0 if scale is None else scale), None


def dequantized(q: Tensor, args: tuple) -> Tensor:
    """Float8 queries as bfloat16, with their scales per head, the first of `args`."""
    if q.dtype.itemsize > 1:
        return q
    return (q.float() * args[0].float().view(-1, 1)).to(torch.bfloat16) if args else q.to(torch.bfloat16)


def head_scales(function: str, args: tuple) -> tuple[Tensor, Tensor]:
    """k's and v's of FlashInfer's FP8 scales per head ``[H_q]``, ``[H_kv]``, ``[H_kv]``, which come by position."""
    if len(args) != 3 or not all(isinstance(arg, Tensor) for arg in args):
        raise refuse(function, f"{len(args)} more positional arguments", "FP8 takes three scales per head")
    return args[1].float().contiguous(), args[2].float().contiguous()


def product(*scales: Tensor | None) -> Tensor | None:
    """Of scales on the device; None: 1."""
    given = [scale for scale in scales if scale is not None]
    return math.prod(given[1:], start=given[0]) if given else None


def to_dtype(out: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`out` in another dtype; what a float8 does not hold saturates, as kernels that write it do."""
    if dtype is None or out.dtype == dtype:
        return out
    most = _LARGEST.get(dtype)
    return (out if most is None else out.clamp(-most, most)).to(dtype)


def finish(out: Tensor, destination: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """A result where and in what it was asked for."""
    if destination is None:
        return to_dtype(out, dtype)
    if out is destination:
        return out
    if destination.shape != out.shape:
        raise ValueError(f"attnops.compat: out must have shape {list(out.shape)}, got {list(destination.shape)}")
    return destination.copy_(to_dtype(out, destination.dtype))


def as_tree_mask(function: str, mask: Tensor | None, seqlen_q: int) -> Tensor | None:
    """XQA's ``[B, S_q, ceil(S_q / 32) * 2]`` (or ``[T, ...]``) uint16 words to bytes: the same bits, little-endian."""
    if mask is None:
        return None
    words = -(-seqlen_q // 32) * 2
    if mask.dtype != torch.uint16 or mask.dim() not in (2, 3) or mask.shape[-1] != words:
        raise ValueError(
            f"attnops.compat: {function}: mask must be uint16 [B, S_q, ceil(S_q / 32) * 2], "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    return mask.contiguous().view(torch.uint8)[..., : -(-seqlen_q // 8)].contiguous()


def check_kv_layout(function: str, kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"attnops.compat: {function}: kv_layout must be NHD or HND, got {kv_layout!r}")


def split_kv(function: str, cache: Tensor | tuple[Tensor, Tensor], kv_layout: str) -> tuple[Tensor, Tensor]:
    """Pools ``[num_pages, page_size, H_kv, D]`` of one joint tensor or a pair, NHD or HND, without a copy.

    A pair of three dimensions has pages of one token.
    """
    check_kv_layout(function, kv_layout)
    if isinstance(cache, Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise ValueError(
                f"attnops.compat: {function}: a joint cache has shape [P, 2, ...], got {list(cache.shape)}"
            )
        cache = (cache[:, 0], cache[:, 1])
    k, v = cache
    if k.dim() == v.dim() == 3:
        return k.unsqueeze(1), v.unsqueeze(1)
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def joined_latents(function: str, latent: Tensor, rope: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """``[P, page_size, 576]`` of a cache's two parts, and the page table to read it by.

    A view and `cells` themselves where the parts lie side by side in one pool; else a copy of the pages in `cells`.
    """
    (*rows, latent_dim), (*rope_rows, rope_dim) = latent.shape, rope.shape
    if rows != rope_rows or latent.dtype != rope.dtype:
        raise ValueError(
            f"attnops.compat: {function}: ckv_cache and kpe_cache must agree in pages, page_size and dtype, got "
            f"{latent.dtype} {list(latent.shape)} and {rope.dtype} {list(rope.shape)}"
        )
    shape = (*rows, latent_dim + rope_dim)
    if not torch.compiler.is_compiling():
        strides = latent.stride()
        beside = latent.data_ptr() + latent_dim * latent.element_size()
        if strides == rope.stride() and beside == rope.data_ptr():
            return latent.as_strided(shape, strides), cells
    if latent.shape[0] == 0:
        return latent.new_empty(shape), cells
    return torch.cat([gathered(latent, cells), gathered(rope, cells)], -1), own_cells(cells)


def first_of(values: Tensor, count: int) -> Tensor:
    """The first so many. Without a slice, a microsecond, where there are no more."""
    return values if values.dim() == 1 and values.shape[0] == count else values[:count]


def keep_in(buffer: Tensor | None, values: Tensor, name: str, exact: bool) -> Tensor:
    """`values` as they are, or copied to the start of a graph's buffer, which then is what a call reads."""
    if buffer is None:
        return values
    if values.shape[0] > buffer.shape[0] or (exact and values.shape[0] != buffer.shape[0]):
        raise ValueError(
            f"attnops.compat: plan: {name} has {values.shape[0]} elements, the wrapper's buffer {buffer.shape[0]}; "
            "use_cuda_graph fixes the batch size and the largest number of pages"
        )
    buffer[: values.shape[0]].copy_(values)
    return buffer


def with_lse(
    out: Tensor, natural: Tensor | None, lse: Tensor | None, return_lse: bool, base_on_e: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`out`, and the lse where it was asked for, in base 2 unless `base_on_e`, in its destination if there is one."""
    if natural is None:
        return out
    result = natural if base_on_e else to_log2(natural)
    result = result if lse is None else lse.copy_(result)
    return (out, result) if return_lse else out


def check_lse(function: str, lse: Tensor | None, rows: Tensor) -> None:
    """Raises for an lse that is not float32 in the shape of the query rows."""
    if lse is not None and (lse.dtype != torch.float32 or lse.shape != rows.shape[:2]):
        raise ValueError(
            f"attnops.compat: {function}: lse must be float32 {list(rows.shape[:2])}, got {lse.dtype} {list(lse.shape)}"
        )
