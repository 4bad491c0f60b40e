"""FlashInfer's functions of pages and of states, for `attnops.compat.flashinfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import Cache, as_int32, from_log2, split_kv, to_log2
from attnops.compat._errors import names_the_peers


@names_the_peers("get_seq_lens")
def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens per request ``[B]``: the pages before the last one are full."""
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


@names_the_peers("get_batch_indices_positions")
def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Request and position of every appended token: a request's are its last ones.

    Args:
        append_indptr: ``[B + 1]``.
        seq_lens: ``[B]``, with the appended tokens.
        nnz: Rows of the results.
        batch_indices, positions: int32 destinations ``[nnz]``; allocated when None.

    Returns:
        int32 ``[nnz]`` each; rows behind the last request have -1 and 0.
    """
    for what, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is not None and (given.shape != (nnz,) or given.dtype != torch.int32):
            raise ValueError(
                f"attnops.compat: get_batch_indices_positions: {what} must be int32 [{nnz}], "
                f"got {given.dtype} {list(given.shape)}"
            )
    bounds = append_indptr.long()
    index = torch.arange(nnz, device=bounds.device)
    owner = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    padding = owner >= bounds.shape[0] - 1
    request = owner.clamp(max=max(bounds.shape[0] - 2, 0))
    if bounds.shape[0] > 1:
        place = index - bounds[request + 1] + seq_lens.to(bounds.device).long()[request]
    else:
        place = torch.zeros_like(index)
    found = owner.masked_fill(padding, -1).int(), place.masked_fill(padding, 0).int()
    return (
        found[0] if batch_indices is None else batch_indices.copy_(found[0]),
        found[1] if positions is None else positions.copy_(found[1]),
    )


def _slots(
    name: str,
    batch_indices: Tensor,
    positions: Tensor,
    indices: Tensor,
    indptr: Tensor,
    page_size: int,
    device: torch.device,
) -> Tensor:
    """Token slot of every row; -1 for what has no request, or no page there."""
    table = as_int32(name, "kv_indices", indices, device).long()
    bounds = as_int32(name, "kv_indptr", indptr, device).long()
    request, position = batch_indices.to(device).long(), positions.to(device).long()
    if table.shape[0] == 0 or bounds.shape[0] < 2:
        return torch.full_like(position, -1)
    inside = (request >= 0) & (request < bounds.shape[0] - 1) & (position >= 0)
    request = request.clamp(0, bounds.shape[0] - 2)
    cell = bounds[request] + torch.div(position, page_size, rounding_mode="floor")
    inside &= cell < bounds[request + 1]
    page = table[cell.clamp(0, table.shape[0] - 1)]
    return torch.where(inside, page * page_size + position.remainder(page_size), -1)


@names_the_peers("append_paged_kv_cache", k="append_key", v="append_value", k_pages="of paged_kv_cache")
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Cache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Stores rows ``[T, H_kv, D]`` in place, by `attnops.ops.store_kv`.

    Args:
        append_key, append_value: In the cache's dtype, or to be rounded to float8_e4m3fn.
        batch_indices, positions: ``[T]``; a negative request: not stored.
        paged_kv_cache: Joint or a pair.
        kv_indices, kv_indptr: Its CSR table.
        kv_last_page_len: Taken.
    """
    k_pages, v_pages = split_kv("append_paged_kv_cache", paged_kv_cache, kv_layout)
    slots = _slots(
        "append_paged_kv_cache", batch_indices, positions, kv_indices, kv_indptr, k_pages.shape[1], k_pages.device
    )
    ops.store_kv(k_pages, v_pages, append_key, append_value, slots)


@names_the_peers("append_paged_mla_kv_cache", k="append_ckv", v="append_kpe", k_pages="ckv_cache", v_pages="kpe_cache")
def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Stores rows ``[T, 512]`` and ``[T, 64]`` in place, in one pool or in two; arguments as above.

    Args:
        ckv_cache, kpe_cache: ``[P, page_size, 512]`` and ``[P, page_size, 64]``.
    """
    name = "append_paged_mla_kv_cache"
    if ckv_cache is None or kpe_cache is None:
        raise ValueError(f"attnops.compat: {name}: ckv_cache and kpe_cache are both needed")
    slots = _slots(name, batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1], ckv_cache.device)
    ops.store_kv(
        ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2), append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), slots
    )


@names_the_peers("merge_state", out_a="v_a", lse_a="s_a", out_b="v_b", lse_b="s_b")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """`attnops.ops.merge_state` of ``[T, H, D]`` and base-2 lse float32 ``[T, H]``."""
    if s_a.dtype != torch.float32 or s_b.dtype != torch.float32:
        s_a, s_b = s_a.float(), s_b.float()
    natural = from_log2(s_a)
    out, lse = ops.merge_state(v_a, natural, v_b, from_log2(s_b), lse=natural)
    return out, to_log2(lse)


@names_the_peers("merge_state_in_place", out_a="v", lse_a="s", out_b="v_other", lse_b="s_other")
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """`merge_state` into `v` and `s`; where `mask` ``[T]`` is 0, a row stays as it is."""
    other = from_log2(s_other.float())
    if mask is not None:
        other = other.masked_fill(mask.view(-1, 1) == 0, -torch.inf)
    natural = from_log2(s.float())
    ops.merge_state(v, natural, v_other, other, out=v, lse=natural)
    merged = to_log2(natural)
    s.copy_(merged if mask is None else torch.where(mask.view(-1, 1) == 0, s, merged))


@names_the_peers("merge_states", outs="v", lses="s")
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """`attnops.ops.merge_states` of ``[T, num_states, H, D]`` and base-2 lse ``[T, num_states, H]``."""
    if v.shape[1] == 0:  # no keys at all
        return v.new_zeros(v.shape[0], *v.shape[2:]), s.new_full((s.shape[0], s.shape[2]), -torch.inf)
    out, lse = ops.merge_states(v.transpose(0, 1), from_log2(s.float()).transpose(0, 1).contiguous())
    return out, to_log2(lse)


@names_the_peers("variable_length_merge_states")
def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merges each token's states, as many as it has.

    Args:
        v: ``[nnz, H, D]``.
        s: float32 ``[nnz, H]``, base 2.
        indptr: int32 ``[T + 1]``: the states of token t are the rows ``[indptr[t], indptr[t + 1])``.

    Returns:
        ``[T, H, D]`` and ``[T, H]``; zeros and -inf for a token without states.
    """
    tokens, heads = indptr.shape[0] - 1, s.shape[1]
    owner = torch.searchsorted(indptr[1:].long().contiguous(), torch.arange(s.shape[0], device=s.device), right=True)
    states, index = s.float(), owner.clamp(max=tokens)  # rows behind the last token gather in one more
    top = states.new_full((tokens + 1, heads), -torch.inf)
    top = top.scatter_reduce(0, index.unsqueeze(1).expand_as(states), states, "amax")
    weight = torch.where(states == -torch.inf, 0.0, torch.exp2(states - top[index]))
    total = states.new_zeros(tokens + 1, heads).index_add(0, index, weight)
    rows = torch.where(weight.unsqueeze(2) > 0, v.float() * weight.unsqueeze(2), 0.0)
    out = states.new_zeros(tokens + 1, heads, v.shape[2]).index_add(0, index, rows)
    out = torch.where(total.unsqueeze(2) > 0, out / total.unsqueeze(2), 0.0)
    return out[:tokens].to(v.dtype), (top + torch.log2(total))[:tokens].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
