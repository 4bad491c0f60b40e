"""FlashInfer's prefill by cuDNN, for `attnops.compat.flashinfer`, on `fmha_paged` and `fmha_varlen`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import as_int32, as_scale, finish, fold_scale, product, split_kv
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import extend, varlen


@names_the_peers(
    "cudnn_batch_prefill_with_kv_cache",
    k="k_cache",
    v="v_cache",
    k_pages="k_cache",
    v_pages="v_cache",
    page_table="block_tables",
    cache_seqlens="actual_seq_lens_kv",
    cu_seqlens_q="batch_offsets_q",
    cu_seqlens_k="batch_offsets_k",
    softmax_scale="scale",
)
def cudnn_batch_prefill_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Tensor | None = None,
    actual_seq_lens_kv: Tensor | None = None,
    block_tables: Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_offsets_q: Tensor | None = None,
    batch_offsets_o: Tensor | None = None,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    batch_offsets_stats: Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Prompts over a paged cache or over ragged keys, requests one after the other without gaps.

    Args:
        q: ``[T, H_q, D]``.
        k_cache, v_cache: ``[P, H_kv, page_size, D]`` with `block_tables`, else ``[T_k, H_kv, D]``.
        scale: Of the scores.
        q_scale, k_scale, v_scale: Of FP8: numbers, or tensors of one.
        workspace_buffer: Its memory is not needed. max_sequence_kv, batch_offsets_o, batch_offsets_v,
            batch_offsets_stats: Nothing depends on them.
        is_cuda_graph_compatible, backend: Taken.
        max_token_per_sequence: The second extent of lse.
        actual_seq_lens_q, actual_seq_lens_kv: ``[B]`` or ``[B, 1, 1, 1]``. None: offsets in tokens say it.
        batch_offsets_q, batch_offsets_k: int32 ``[B + 1]``, read where they are in tokens.
        batch_offsets_units: "elements" or "tokens".

    Returns:
        ``(out [T, H_q, D_v], lse)``: natural log, float32 ``[B, max_token_per_sequence, H_q]``, -inf for an empty row
        and behind a request's last. None without `return_lse`.

    Raises:
        ValueError: neither lengths nor offsets in tokens; other units.
    """
    name = "cudnn_batch_prefill_with_kv_cache"
    if batch_offsets_units not in ("elements", "tokens"):
        raise ValueError(
            f"attnops.compat: {name}: batch_offsets_units must be 'elements' or 'tokens', got {batch_offsets_units!r}"
        )
    in_tokens = batch_offsets_units == "tokens"
    bounds = _bounds(name, "q", actual_seq_lens_q, batch_offsets_q if in_tokens else None, q.device)
    factor, q_tensor = fold_scale(name, "q_scale", q_scale, q.device)
    k_factor, k_tensor = fold_scale(name, "k_scale", k_scale, q.device)
    dtype = o_data_type or q.dtype
    rows = q.to(torch.bfloat16) if q.dtype.itemsize == 1 else q
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": scale * factor * k_factor,
        "k_scale": k_tensor if q_tensor is None else product(q_tensor, k_tensor),
        "v_scale": as_scale(name, "v_scale", v_scale, q.device),
        "out": out if out is not None and out.dtype == rows.dtype else None,
        "return_lse": return_lse or lse is not None,
    }
    if block_tables is None:
        bounds_k = _bounds(name, "kv", actual_seq_lens_kv, batch_offsets_k if in_tokens else None, q.device)
        result, natural = varlen(rows, k_cache, v_cache, bounds, bounds_k, **options)
    else:
        if actual_seq_lens_kv is None:
            raise ValueError(f"attnops.compat: {name}: actual_seq_lens_kv is needed with block_tables")
        k_pages, v_pages = split_kv(name, (k_cache, v_cache), "HND")
        lens = as_int32(name, "actual_seq_lens_kv", actual_seq_lens_kv.reshape(-1), q.device)
        result, natural = extend(rows, k_pages, v_pages, block_tables, lens, bounds, **options)
    result = finish(result, out, dtype)
    return result, None if natural is None else _by_request(name, natural, bounds, max_token_per_sequence, lse)


def _bounds(name: str, of: str, lens: Tensor | None, offsets: Tensor | None, device: torch.device) -> Tensor:
    """int32 ``[B + 1]``: where each request's tokens begin."""
    if offsets is not None:
        return as_int32(name, f"batch_offsets_{of[0]}", offsets.reshape(-1), device)
    if lens is None:
        raise ValueError(
            f"attnops.compat: {name}: actual_seq_lens_{of} may be None only with batch_offsets_units='tokens' and "
            f"batch_offsets_{of[0]}"
        )
    lens = as_int32(name, f"actual_seq_lens_{of}", lens.reshape(-1), device)
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _by_request(name: str, natural: Tensor, bounds: Tensor, most: int, lse: Tensor | None) -> Tensor:
    """lse ``[T, H]`` as ``[B, most, H]``, in `lse` if it is given."""
    shape = (bounds.shape[0] - 1, most, natural.shape[1])
    if lse is None:
        lse = natural.new_empty(shape)
    elif lse.shape != shape:
        raise ValueError(f"attnops.compat: {name}: lse must be {list(shape)}, got {list(lse.shape)}")
    place = torch.arange(most, device=natural.device)
    row = (bounds[:-1].long().unsqueeze(1) + place).clamp(max=max(natural.shape[0] - 1, 0))
    inside = place < (bounds[1:] - bounds[:-1]).unsqueeze(1)
    if natural.shape[0] == 0:
        return lse.fill_(-torch.inf)
    return lse.copy_(torch.where(inside.unsqueeze(-1), natural[row], -torch.inf))
