"""One call of decode over pages with a plan of its own, of uniform queries or of ragged ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops import ops
from attnops.compat._attend import decode, new_plan, ragged_decode
from attnops.compat._convert import as_int32, as_tree_mask
from attnops.metadata.plan import MAX_HEAD_DIM


def paged_decode(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lens: Tensor,
    seqlen_q: int | None,
    bounds: Tensor | None,
    max_q_len: int | None,
    mask: Tensor | None,
    out: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """One call with a plan of its own: out and natural lse, of uniform queries or of ragged ones."""
    lens = as_int32(name, "seq_lens", lens if lens.dim() == 1 else lens.reshape(-1), q.device)
    if bounds is not None:
        if max_q_len is None:
            raise ValueError(f"attnops.compat: {name}: ragged queries need max_q_len")
        bounds = as_int32(name, "cum_seq_lens_q", bounds, q.device)
        tree = as_tree_mask(name, mask, max_q_len)
        if tree is not None:
            tree = tree.reshape(-1, tree.shape[-1])
        return ragged_decode(
            name,
            q,
            k_pages,
            v_pages,
            table,
            lens,
            bounds,
            max_q_len,
            tree_mask=tree,
            **options,
        )
    if max_q_len is not None and seqlen_q is None:
        seqlen_q = max_q_len
    batch_size, seqlen_q = table.shape[0], 1 if seqlen_q is None else seqlen_q
    if seqlen_q < 1:
        raise ValueError(f"attnops.compat: {name}: a request must bring at least 1 query token, got {seqlen_q}")
    if q.shape[0] != batch_size * seqlen_q:
        raise ValueError(
            f"attnops.compat: {name}: query must have {batch_size * seqlen_q} rows (q_len_per_req {seqlen_q} for "
            f"each of the {batch_size} rows of the page table), got {q.shape[0]}"
        )
    same = q.dtype == k_pages.dtype and q.dtype.itemsize > 1
    if same and mask is None and q.shape[-1] == v_pages.shape[-1] <= MAX_HEAD_DIM:
        plan = new_plan(q, k_pages, lens, seqlen_q, options.get("window_left", -1))
        out = None if out is None or out.dtype != q.dtype else out  # else the caller casts
        return ops.xqa_decode(q, k_pages, v_pages, table, lens, plan, out=out, **options)
    return decode(
        name,
        q,
        k_pages,
        v_pages,
        table,
        lens,
        seqlen_q=seqlen_q,
        tree_mask=as_tree_mask(name, mask, seqlen_q),
        out=out,
        **options,
    )
