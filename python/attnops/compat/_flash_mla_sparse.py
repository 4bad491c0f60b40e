"""FlashMLA's attention over lists of rows: what `flash_mla_with_kvcache` does with `indices`, and its prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import environment, ops
from attnops.compat._convert import as_sinks, empty_is_plus_inf, heads_first, refuse
from attnops.compat._errors import names_the_peers
from attnops.metadata.plan import MLA_HEAD_DIM_V
from attnops.metadata.sparse_plan import SparseMlaPlan

BF16_ROWS = environment.COMPAT_BF16_ROWS.value()
_ROW_BYTES, _SCALES, _ROPE = 656, 512, 528  # of a row, and where its scales and its rope part begin


class SparsePlans:
    """The memory of a schedule for the last geometry."""

    def __init__(self) -> None:
        self._plan: SparseMlaPlan | None = None

    def plan(self, key: dict[str, int], device: torch.device) -> SparseMlaPlan:
        plan = self._plan
        if plan is None or plan.key != key or plan.out_partial.device != device:
            plan = SparseMlaPlan.allocate(**key, device=device)
            self._plan = plan
        return plan


def decode_lists(
    name: str,
    plans: SparsePlans,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    softmax_scale: float | None,
    attn_sink: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    topk_length: Tensor | None,
    extra_topk_length: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out [B, S_q, H_q, 512], lse [B, H_q, S_q])``, ``+inf`` for a row without a key."""
    batch_size, seqlen_q, num_q_heads, head_dim = q.shape
    key = {
        "batch_size": batch_size,
        "seqlen_q": seqlen_q,
        "num_q_heads": num_q_heads,
        "topk": indices.shape[-1],
        "extra_topk": 0 if extra_indices is None else extra_indices.shape[-1],
    }
    plan = plans.plan(key, q.device)
    lengths = _per_token(name, "topk_length", topk_length, batch_size, seqlen_q)
    extra_lengths = _per_token(name, "extra_topk_length", extra_topk_length, batch_size, seqlen_q)
    ops.sparse_mla_plan(plan, topk_length=lengths, extra_topk_length=extra_lengths)
    pages, rows = _one_head(name, "k_cache", k_cache), _evenly(indices)
    if BF16_ROWS and pages.shape[-1] == _ROW_BYTES and extra_k_cache is None:
        pages, rows = _rounded_rows(pages, rows, q.dtype)
    out, lse = ops.sparse_mla_decode(
        _evenly(q),
        pages,
        rows,
        plan,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        topk_length=lengths,
        extra_kv_pages=None if extra_k_cache is None else _one_head(name, "extra_k_cache", extra_k_cache),
        extra_indices=None if extra_indices is None else _evenly(extra_indices),
        extra_topk_length=extra_lengths,
        sinks=as_sinks(attn_sink, num_q_heads, name, "attn_sink"),
        return_lse=True,
        rounded_keys=True,
    )
    assert lse is not None
    return out, heads_first(empty_is_plus_inf(lse))


@names_the_peers("flash_mla_sparse_fwd", softmax_scale="sm_scale", sinks="attn_sink")
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attnops.ops.sparse_mla_prefill` over ragged rows.

    Args:
        q: ``[s_q, H_q, 576]`` or 512 wide, bf16 or fp16, any number of heads.
        kv: ``[s_kv, 1, 576]`` or 512 wide, in q's dtype.
        indices: int32 ``[s_q, 1, topk]``, any topk; below 0 or from s_kv on: no key.
        d_v: 512.
        attn_sink: ``[H_q]``, any float dtype.
        topk_length: int32 ``[s_q]``.

    Returns:
        ``(out [s_q, H_q, 512], max_logits [s_q, H_q], lse [s_q, H_q])``. A row without a key has lse ``+inf`` and
        max_logits ``-inf``.

    Raises:
        NotImplementedError: naming the argument that is not honoured.
    """
    name = "flash_mla_sparse_fwd"
    if d_v != MLA_HEAD_DIM_V:
        raise refuse(name, f"d_v={d_v}", "values are the first 512 of a row")
    max_logits = q.new_empty(q.shape[:2], dtype=torch.float32)
    # An index past the rows is no key here. That is an error on a CPU, unless somebody asks to be told.
    report = None if q.is_cuda else torch.zeros(8, dtype=torch.int32, device=q.device)
    out, lse = ops.sparse_mla_prefill(
        q,
        _one_head(name, "kv", kv, dim=1, rank=3),
        _one_head(name, "indices", indices, dim=1, rank=3),
        softmax_scale=sm_scale,
        topk_length=topk_length,
        sinks=as_sinks(attn_sink, q.shape[1], name, "attn_sink"),
        max_logits=max_logits,
        return_lse=True,
        report=report,
    )
    assert lse is not None
    return out, max_logits, empty_is_plus_inf(lse)


def _rounded_rows(pages: Tensor, indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The listed rows of 656 bytes, each rounded to bf16, in a pool of their own, and the lists over it.

    FlashMLA's kernels multiply such rows. `sparse_mla_decode` multiplies what is stored, which is not the same number.
    """
    size = pages.shape[1]
    known = (indices >= 0) & (indices < pages.shape[0] * size)
    listed = torch.where(known, indices, 0).flatten().long()
    rows = pages[listed // size, listed % size]
    values = rows[:, :_SCALES].view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    values = values * rows[:, _SCALES:_ROPE].view(torch.float32).unsqueeze(2)
    rope = rows[:, _ROPE:].view(torch.bfloat16)
    made = torch.cat([values.flatten(1).to(torch.bfloat16), rope], 1).to(dtype)
    at = torch.arange(listed.shape[0], dtype=torch.int32, device=indices.device)
    return made.unsqueeze(1), torch.where(known, at.view_as(indices), -1)


def _one_head(name: str, argument: str, tensor: Tensor, dim: int = 2, rank: int = 4) -> Tensor:
    """Without its dimension of one KV head; rows of bytes as uint8."""
    if tensor.dim() != rank or tensor.shape[dim] != 1:
        raise ValueError(
            f"attnops.compat: {name}: {argument} must have {rank} dimensions, and 1 in shape[{dim}] (KV heads), got "
            f"{list(tensor.shape)}"
        )
    one_byte = tensor.element_size() == 1
    return (tensor.view(torch.uint8) if one_byte else tensor).squeeze(dim)


def _evenly(tensor: Tensor) -> Tensor:
    """With all tokens of all requests at one distance, as the op needs them: a copy where they are not."""
    even = tensor.shape[1] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor if even else tensor.contiguous()


def _per_token(name: str, argument: str, lengths: Tensor | None, batch_size: int, seqlen_q: int) -> Tensor | None:
    """int32 ``[B]`` for every query token of its request."""
    if lengths is None:
        return None
    if lengths.shape != (batch_size,):
        raise ValueError(f"attnops.compat: {name}: {argument} must be [{batch_size}], got {list(lengths.shape)}")
    return lengths.unsqueeze(1).expand(batch_size, seqlen_q).contiguous()
