"""FlashInfer's wrappers of block-sparse attention, for `attnops.compat.flashinfer`.

A row of blocks is a request, and the blocks that it sees are its pages: both are prefill over a CSR page table.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import refuse, require_default, to_dtype
from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from attnops.compat._flashinfer_workspace import Workspaces

_MOST_KEYS = 1 << 28  # a length counts as no more: docs/architecture.md


class _BlockSparse(Workspaces):
    """What both wrappers keep: a wrapper of paged prefill, and a name."""

    _NAME: str
    _causal: bool

    def _make(self, float_workspace_buffer: Tensor, backend: str) -> None:
        if backend.startswith("vsa_"):
            raise refuse(self._NAME, f"backend={backend}", "it is for Blackwell; auto")
        self._device = float_workspace_buffer.device
        self._paged = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD")

    def _check_planned(self, name: str) -> None:
        if self._paged._plan_info is None:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")

    def _choose(self, name: str, given: dict[str, Any]) -> None:
        """What `forward` may choose anew after `plan`."""
        self._check_planned(name)
        self._paged._prefill.choose(name, {**given, "causal": self._causal, "window_left": -1})


def _checked_keys(name: str, seen: Tensor, heights: Tensor, widths: Tensor) -> int:
    """The number of keys that all rows of blocks see, where no size is out of range. It is read on the host, once."""
    sizes = torch.cat([heights.flatten(), widths.flatten()])
    sane = sizes.clamp(0, _MOST_KEYS + 1)  # so that sums do not wrap around
    keys = (seen * widths.clamp(0, _MOST_KEYS + 1).unsqueeze(1)).sum()
    wrong, most, total = torch.stack([(sizes != sane).sum(), sane.sum(), keys]).tolist()
    if wrong or max(most, total) > _MOST_KEYS:
        raise ValueError(
            f"attnops.compat: {name}: block_row_sz and block_col_sz must hold sizes from 0, in all at most "
            f"{_MOST_KEYS}, got {wrong} out of range and {most} in all. Rows see {total} keys of at most {_MOST_KEYS}"
        )
    return int(total)


class BlockSparseAttentionWrapper(_BlockSparse):
    """Attention of one sequence under a matrix of blocks, the same for all heads. `backend` chooses nothing."""

    _NAME = "BlockSparseAttentionWrapper"

    @names_the_peers("BlockSparseAttentionWrapper")
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self._make(float_workspace_buffer, backend)

    @names_the_peers("BlockSparseAttentionWrapper.plan")
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
    ) -> None:
        """Prepares `run`. With a mask inside blocks lengths are read on the host, else nothing is.

        Args:
            indptr, indices: Of the matrix in blocks of R rows and C columns: int32 ``[MB + 1]`` and ``[nnz]``.
            M, N: Rows and columns; C divides N.
            mask: bool ``[nnz, R, C]``, inside blocks.
            packed_mask: The bits of all rows of blocks, as of `BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal: Among the keys that a row of blocks sees.
            use_fp16_qk_reduction, non_blocking: Accepted and ignored, since no result depends on it.
        """
        name = f"{self._NAME}.plan"
        require_default(name, {"block_mask": "give indptr and indices"}, {}, locals())
        if N % C:
            raise ValueError(f"attnops.compat: {name}: N must be a multiple of C={C}, got {N}")
        rows = indptr.shape[0] - 1
        if rows != -(-M // R):
            raise ValueError(
                f"attnops.compat: {name}: indptr must be [ceil(M / R) + 1 = {-(-M // R) + 1}], got [{rows + 1}]"
            )
        bounds = (torch.arange(rows + 1, dtype=torch.int32, device=self._device) * R).clamp(max=M)
        last = torch.full((rows,), C, dtype=torch.int32, device=self._device)
        if mask is not None and packed_mask is None:
            mask = _by_row(mask.to(torch.bool), indptr.tolist(), M, R)
        self._blocks, self._columns, self._causal = C, N, causal
        self._paged.plan(
            bounds,
            indptr,
            indices,
            last,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            C,
            custom_mask=mask,
            packed_custom_mask=packed_mask,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )

    begin_forward = plan

    @names_the_peers("BlockSparseAttentionWrapper.run", k_pages="k", v_pages="v")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends: q ``[M, H_q, D]``, k and v ``[N, H_kv, D]``.

        Args:
            scale_q, scale_k, scale_v: Of FP8, per head: float32 ``[H_q]``, ``[H_kv]``, ``[H_kv]``.

        Returns:
            ``[M, H_q, D]``, or ``(out, lse)``: float32 ``[M, H_q]``, base 2.
        """
        name = f"{self._NAME}.run"
        self._check_planned(name)
        if k.shape[0] != self._columns:
            raise ValueError(f"attnops.compat: {name}: k must have N={self._columns} rows as planned, got {k.shape[0]}")
        scales = []
        if any(scale is not None for scale in (scale_q, scale_k, scale_v)):
            for scale, heads in ((scale_q, q.shape[1]), (scale_k, k.shape[1]), (scale_v, k.shape[1])):
                scales.append(torch.ones(heads, device=q.device) if scale is None else scale)
        cache = tuple(x.unflatten(0, (-1, self._blocks)) for x in (k, v))
        return self._paged.run(q, cache, *scales, out=out, lse=lse, return_lse=return_lse)

    @names_the_peers("BlockSparseAttentionWrapper.forward")
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with options that replace those of `plan`, also where they are left out, as in the peer."""
        self._choose(f"{self._NAME}.forward", locals())
        return self.run(q, k, v, scale_q, scale_k, scale_v)


def _by_row(mask: Tensor, indptr: list[int], num_rows: int, block_rows: int) -> Tensor:
    """Masks inside blocks ``[nnz, R, C]`` as every row of blocks' own matrix, flat, one after the other."""
    parts = []
    for row, (begin, end) in enumerate(itertools.pairwise(indptr)):
        rows = min(block_rows, num_rows - row * block_rows)
        parts.append(mask[begin:end, :rows].transpose(0, 1).reshape(-1))
    return torch.cat([mask.new_empty(0), *parts])


class VariableBlockSparseAttentionWrapper(_BlockSparse):
    """Attention of one sequence under a matrix of blocks of any sizes for every KV head. `backend` chooses nothing."""

    _NAME = "VariableBlockSparseAttentionWrapper"

    @names_the_peers("VariableBlockSparseAttentionWrapper")
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self._make(float_workspace_buffer, backend)

    @names_the_peers("VariableBlockSparseAttentionWrapper.plan")
    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Prepares `run`. The number of keys that are seen is read on the host.

        Args:
            block_mask_map: bool ``[H_kv, MB, NB]``.
            block_row_sz, block_col_sz: int ``[H_kv, MB]`` and ``[H_kv, NB]``; their sums are the same for all heads.
            causal: Among the keys that a row of blocks sees.
            use_fp16_qk_reduction, non_blocking: Accepted and ignored, since no result depends on it.

        Raises:
            ValueError: a size of a block is below 0, or all sizes or the keys that are seen come to more than 2^28.
        """
        name = f"{self._NAME}.plan"
        rows, columns = block_row_sz.shape[-1], block_col_sz.shape[-1]
        if num_qo_heads % num_kv_heads or block_mask_map.shape != (num_kv_heads, rows, columns):
            raise ValueError(
                f"attnops.compat: {name}: block_mask_map must be [num_kv_heads={num_kv_heads}, {rows}, {columns}] with "
                f"num_qo_heads a multiple of it, got {list(block_mask_map.shape)} and num_qo_heads={num_qo_heads}"
            )
        seen = block_mask_map.to(self._device, torch.bool)
        heights, widths = block_row_sz.to(self._device).long(), block_col_sz.to(self._device).long()
        total = _checked_keys(name, seen, heights, widths)
        head, _, column = seen.nonzero(as_tuple=True)
        width = widths[head, column]
        first = widths.flatten().cumsum(0).view_as(widths) - widths  # among the keys of all heads
        ahead = width.cumsum(0) - width
        index = torch.arange(total, device=self._device)
        block = torch.repeat_interleave(torch.arange(width.shape[0], device=self._device), width, output_size=total)
        keys = first[head, column][block] + index - ahead[block]
        counts = (seen * widths.unsqueeze(1)).sum(-1).flatten()
        zero = counts.new_zeros(1)
        self._group, self._causal = num_qo_heads // num_kv_heads, causal
        self._paged.plan(
            torch.cat([zero, heights.flatten().cumsum(0)]),
            torch.cat([zero, counts.cumsum(0)]),
            keys,
            torch.ones_like(counts),
            self._group,
            1,
            head_dim,
            1,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    begin_forward = plan

    @names_the_peers("VariableBlockSparseAttentionWrapper.run", k_pages="k", v_pages="v")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends: q ``[H_q, S_q, D]``, k and v ``[H_kv, S_k, D]``.

        Returns:
            ``[H_q, S_q, D]``, or ``(out, lse)``: float32 ``[H_q, S_q]``, base 2.
        """
        self._check_planned(f"{self._NAME}.run")
        rows = q.unflatten(0, (-1, self._group)).transpose(1, 2).flatten(0, 1)
        cache: tuple[Any, Any] = (k.flatten(0, 1)[:, None, None], v.flatten(0, 1)[:, None, None])
        result, exponents = self._paged.run(rows, cache, return_lse=True)
        shape = (k.shape[0], q.shape[1], self._group)
        result = result.unflatten(0, shape[:2]).transpose(1, 2).flatten(0, 1)
        exponents = exponents.unflatten(0, shape[:2]).transpose(1, 2).flatten(0, 1)
        result = result if out is None else out.copy_(to_dtype(result, out.dtype))
        if lse is not None:
            exponents = lse.copy_(exponents)
        return (result, exponents) if return_lse else result

    @names_the_peers("VariableBlockSparseAttentionWrapper.forward")
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with options that replace those of `plan`, also where they are left out, as in the peer."""
        self._choose(f"{self._NAME}.forward", locals())
        return self.run(q, k, v)
