"""FlashInfer's decode wrapper, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import (
    LEAVE_PDL,
    ONE_KERNEL,
    OUT_16BIT,
    Cache,
    as_dtype,
    as_int32,
    as_scale,
    as_sinks,
    check_kv_layout,
    check_lse,
    keep_in,
    refuse,
    require_default,
    split_kv,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.metadata.plan import XqaDecodePlan

_NO_ROPE = "rotate q and k before they are stored"


def _lengths(function: str, indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens per request of FlashInfer's paging: the pages before the last one are full."""
    if last_page_len.dim() != 1 or indptr.shape != (last_page_len.shape[0] + 1,):
        raise ValueError(
            f"attnops.compat: {function}: indptr must be [B + 1] and last_page_len [B], "
            f"got {list(indptr.shape)} and {list(last_page_len.shape)}"
        )
    if page_size < 1:
        raise ValueError(f"attnops.compat: {function}: page_size must be at least 1, got {page_size}")
    pages = indptr[1:] - indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode over a CSR page table, on `attnops.ops.xqa_decode`.

    With `use_cuda_graph`, `plan` writes into the three given buffers and into memory of its own that never moves,
    outside the graph, and a captured `run` reads them.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
        kv_layout: "NHD" or "HND".
        use_tensor_cores: Taken: attnops chooses.
        backend: "auto". jit_args: None.
    """

    @names_the_peers("BatchDecodeWithPagedKVCacheWrapper")
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        require_default(
            type(self).__name__,
            {"backend": ONE_KERNEL, "jit_args": "attnops compiles nothing at run time; leave it None"},
            {"backend": "auto"},
            locals(),
        )
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and any(buffer is None for buffer in buffers):
            raise ValueError("attnops.compat: use_cuda_graph=True needs the three paged_kv buffers")
        check_kv_layout(type(self).__name__, kv_layout)
        self._device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._buffers = buffers if use_cuda_graph else (None, None, None)
        self._use_cuda_graph = use_cuda_graph
        self._plan: XqaDecodePlan | None = None

    @names_the_peers(
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        cache_seqlens="from indptr and last_page_len",
        num_q_heads="num_qo_heads",
        seqlen_q="q_len_per_req",
    )
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Prepares `run`, from tensors on any device; nothing is read on the host.

        Args:
            indptr: int32 ``[B + 1]``. indices: int32 ``[num_indices]``. last_page_len: int32 ``[B]``, 1 to `page_size`.
            window_left: Keys at ``[p - window_left, p]``; -1: off. logits_soft_cap: None or 0: off.
            non_blocking: Taken.
            q_len_per_req: Query tokens of each request, causal among themselves.
        """
        name = "BatchDecodeWithPagedKVCacheWrapper.plan"
        require_default(
            name,
            {
                "pos_encoding_mode": _NO_ROPE,
                "rope_scale": _NO_ROPE,
                "rope_theta": _NO_ROPE,
                "block_tables": "the CSR table says the same; leave it None",
                "seq_lens": "indptr and last_page_len say the same; leave it None",
                "fixed_split_size": "use attnops.ops with XqaDecodePlan(fixed_split_tokens=...)",
                "disable_split_kv": "use attnops.ops with XqaDecodePlan(fixed_split_tokens=...)",
            },
            {"pos_encoding_mode": "NONE", "disable_split_kv": False},
            locals(),
        )
        self._q_dtype = as_dtype(name, "q_data_type", q_data_type if data_type is None else data_type)
        self._kv_dtype = (
            as_dtype(name, "kv_data_type", kv_data_type if data_type is None else data_type) or self._q_dtype
        )
        if o_data_type is not None and as_dtype(name, "o_data_type", o_data_type) != self._q_dtype:
            raise refuse(name, f"o_data_type={o_data_type}", OUT_16BIT)
        if indices.dim() != 1:
            raise ValueError(f"attnops.compat: {name}: indices must be [num_indices], got {list(indices.shape)}")
        names, given = ("indptr", "indices", "last_page_len"), (indptr, indices, last_page_len)
        tensors = [as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)]
        exact = (True, False, True)
        self._indptr, self._indices, last = map(keep_in, self._buffers, tensors, names, exact)
        self._page_size, self._window = page_size, window_left
        self._cap = logits_soft_cap or 0.0
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        lengths = _lengths(name, self._indptr, last, page_size)
        key: dict[str, Any] = {
            "batch_size": lengths.shape[0],
            "seqlen_q": q_len_per_req,
            "num_q_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "window_left": window_left,
        }
        if self._plan is None or self._plan.key != key:
            if self._plan is not None and self._use_cuda_graph:
                raise ValueError("attnops.compat: use_cuda_graph fixes the geometry: make a wrapper for each")
            self._plan = XqaDecodePlan.allocate(device=self._device, **key)
            self._lens = lengths
        else:
            self._lens.copy_(lengths)
        ops.xqa_decode_plan(self._plan, self._lens)

    begin_forward = plan

    @names_the_peers("BatchDecodeWithPagedKVCacheWrapper.run", k_pages="of paged_kv_cache", v_pages="of paged_kv_cache")
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q: ``[B * q_len_per_req, H_q, D]``.
            paged_kv_cache: ``[P, 2, page_size, H_kv, D]`` (NHD), ``[P, 2, H_kv, page_size, D]`` (HND), or a pair.
            q_scale: Multiplies the scores. k_scale, v_scale: numbers or float32 ``[1]``, of an FP8 cache.
            window_left, q_len_per_req: None, or as planned.

        Returns:
            ``out``, or ``(out, lse)``: float32 ``[B * q_len_per_req, H_q]``, base 2, -inf for an empty row.
        """
        name = "BatchDecodeWithPagedKVCacheWrapper.run"
        require_default(name, {"enable_pdl": LEAVE_PDL}, {}, locals())
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        k_pages, v_pages = split_kv(name, paged_kv_cache, self._kv_layout)
        for what, got, planned in (
            ("window_left", window_left, self._window),
            ("q_len_per_req", q_len_per_req, plan.seqlen_q),
            ("q's dtype", q.dtype, self._q_dtype),
            ("the cache's dtype", k_pages.dtype, self._kv_dtype),
            ("page_size", k_pages.shape[1], self._page_size),
        ):
            if got is not None and got != planned:
                raise ValueError(f"attnops.compat: {name}: {what} is {got}, planned was {planned}")
        if isinstance(q_scale, Tensor):
            raise refuse(name, "q_scale=a tensor", "give a number")
        check_lse(name, lse, q)
        out, natural = ops.xqa_decode(
            q,
            k_pages,
            v_pages,
            self._indices,
            self._lens,
            plan,
            kv_indptr=self._indptr,
            softmax_scale=self._scale * (1.0 if q_scale is None else q_scale),
            window_left=self._window,
            logit_cap=self._cap,
            sinks=as_sinks(sinks, q.shape[1], name),
            k_scale=as_scale(name, "k_scale", k_scale, k_pages),
            v_scale=as_scale(name, "v_scale", v_scale, v_pages),
            out=out,
            return_lse=return_lse or lse is not None,
        )
        return with_lse(out, natural, lse, return_lse)

    forward = run

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.run(*args, return_lse=True, **options)  # type: ignore[return-value]
