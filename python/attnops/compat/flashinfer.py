"""FlashInfer's decode functions and wrappers. lse is ``[T, H]`` in base 2 here, as its users have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import (
    LEAVE_PDL,
    ONE_KERNEL,
    as_int32,
    as_scale,
    as_sinks,
    as_tree_mask,
    from_log2,
    keep_in,
    refuse,
    require_default,
    split_kv,
    to_log2,
    with_log2_lse,
)
from attnops.compat._flashinfer_mla import BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla
from attnops.metadata.plan import XqaDecodePlan

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "merge_state",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa",
]

_NO_ROPE = "rotate q and k before they are stored"
_OUT_16BIT = "the output has q's dtype; quantize it afterwards"

Cache = Tensor | tuple[Tensor, Tensor]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """`attnops.ops.merge_state` of ``[T, H, D]`` and base-2 lse float32 ``[T, H]``."""
    out, lse = ops.merge_state(v_a, from_log2(s_a), v_b, from_log2(s_b))
    return out, to_log2(lse)


def _lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens per request of FlashInfer's paging: the pages before the last one are full."""
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
        self._device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._buffers = buffers if use_cuda_graph else (None, None, None)
        self._use_cuda_graph = use_cuda_graph
        self._plan: XqaDecodePlan | None = None

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
        require_default(
            "BatchDecodeWithPagedKVCacheWrapper.plan",
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
        self._q_dtype = _dtype(q_data_type if data_type is None else data_type)
        self._kv_dtype = _dtype(kv_data_type if data_type is None else data_type) or self._q_dtype
        if o_data_type is not None and _dtype(o_data_type) != self._q_dtype:
            raise refuse("BatchDecodeWithPagedKVCacheWrapper.plan", f"o_data_type={o_data_type}", _OUT_16BIT)
        tensors = [as_int32(tensor, self._device) for tensor in (indptr, indices, last_page_len)]
        names = ("indptr", "indices", "last_page_len")
        exact = (True, False, True)
        self._indptr, self._indices, last = map(keep_in, self._buffers, tensors, names, exact)
        self._page_size, self._window = page_size, window_left
        self._cap = logits_soft_cap or 0.0
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        lengths = _lengths(self._indptr, last, page_size)
        key = {
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
            return_lse=return_lse,
        )
        return with_log2_lse(out, natural, lse)

    forward = run

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.run(*args, return_lse=True, **options)  # type: ignore[return-value]


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    return getattr(torch, name) if isinstance(name, str) else name


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | list[Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """`attnops.ops.xqa_decode` with FlashInfer's folded scales.

    Args:
        query: ``[B * q_len_per_req, H_q, D]``. kv_cache: joint or a pair, HND by default.
        workspace_buffer: Its memory is not needed. max_seq_len: Nothing depends on it.
        block_tables: int32 ``[B, max_pages]``. seq_lens: ``[B]`` int32 or uint32.
        bmm1_scale: q scale x k scale x softmax scale, a number. bmm2_scale: v scale; of an FP8 cache.
        sinks: ``[H_q]``, or a list of one.
        mask: XQA's tree mask, uint16 ``[B, q_len, ceil(q_len / 32) * 2]``.

    Returns:
        As `query`.
    """
    name = "trtllm_batch_decode_with_kv_cache"
    ragged = "every request brings q_len_per_req tokens; use attnops.ops.fmha_paged for ragged queries"
    require_default(
        name,
        {
            "o_sf_scale": _OUT_16BIT,
            "o_sf_vec_size": _OUT_16BIT,
            "o_scale": _OUT_16BIT,
            "enable_pdl": LEAVE_PDL,
            "backend": ONE_KERNEL,
            "max_q_len": ragged,
            "cum_seq_lens_q": ragged,
        },
        {"backend": "auto", "o_scale": 1.0},
        locals(),
    )
    if out_dtype is not None and _dtype(out_dtype) != query.dtype:
        raise refuse(name, f"out_dtype={out_dtype}", _OUT_16BIT)
    if isinstance(bmm1_scale, Tensor):
        raise refuse(name, "bmm1_scale=a tensor", "give a number, with the softmax scale in it")
    k_pages, v_pages = split_kv(name, kv_cache, kv_layout)
    return _paged_decode(
        name,
        query,
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        seqlen_q=q_len_per_req or 1,
        softmax_scale=bmm1_scale,
        window_left=window_left,
        sinks=as_sinks(sinks, query.shape[1], name),
        v_scale=as_scale(name, "bmm2_scale", bmm2_scale, v_pages),
        tree_mask=as_tree_mask(mask),
        out=out,
    )


def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
) -> None:
    """`attnops.ops.xqa_decode` with XQA's axes.

    Args:
        q, output: ``[B, 1, H_q, D]``, or ``[B, 1, q_seq_len, H_q, D]``: the second axis is the beam, of one.
        k_cache, v_cache: ``[P, page_size, H_kv, D]`` (NHD) or ``[P, H_kv, page_size, D]`` (HND).
        page_table: int32 ``[B, max_pages]``. seq_lens: uint32 ``[B, 1]``.
        workspace_buffer, semaphores: Their memory is not needed.
        sinks: float32 ``[H_kv, group]``.
        q_scale: Scores are ``q_scale * kv_scale / sqrt(D) * <q, k>``. kv_scale: of an FP8 cache, K and V.
        sliding_win_size: Keys that a query sees, itself included; 0: off.
        mask: uint16 ``[B, q_seq_len, ceil(q_seq_len / 32) * 2]``.
    """
    require_default(
        "xqa",
        {
            "sm_count": "the plan uses the whole device; leave it None",
            "enable_pdl": LEAVE_PDL,
            "rcp_out_scale": _OUT_16BIT,
            "q_cu_seq_lens": "every request brings q_seq_len tokens; use attnops.ops.fmha_paged for ragged queries",
        },
        {"rcp_out_scale": 1.0},
        locals(),
    )
    if q.shape[1] != 1:
        raise refuse("xqa", f"a beam of {q.shape[1]}", "give each beam as a request, or q_seq_len with a mask")
    if isinstance(q_scale, Tensor):
        raise refuse("xqa", "q_scale=a tensor", "give a number")
    k_pages, v_pages = split_kv("xqa", (k_cache, v_cache), kv_layout)
    for what, given, actual in (
        ("num_kv_heads", num_kv_heads, k_pages.shape[2]),
        ("page_size", page_size, k_pages.shape[1]),
        ("q_seq_len", q_seq_len, 1 if q.dim() == 4 else q.shape[2]),
    ):
        if given != actual:
            raise ValueError(f"attnops.compat: xqa: {what}={given}, the tensors have {actual}")
    num_q_heads, head_dim = q.shape[-2:]
    folded = 1.0 if isinstance(kv_scale, Tensor) else kv_scale  # a number needs no tensor for K
    scale = as_scale("xqa", "kv_scale", kv_scale, v_pages)
    _paged_decode(
        "xqa",
        q.reshape(-1, num_q_heads, head_dim),
        k_pages,
        v_pages,
        page_table,
        seq_lens[:, 0],
        seqlen_q=q_seq_len,
        softmax_scale=q_scale * folded * head_dim**-0.5,
        window_left=sliding_win_size - 1,
        sinks=as_sinks(sinks, num_q_heads, "xqa"),
        k_scale=scale if isinstance(kv_scale, Tensor) else None,
        v_scale=scale,
        tree_mask=as_tree_mask(mask),
        out=output.view(-1, num_q_heads, head_dim),
    )


def _paged_decode(
    name: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    seqlen_q: int,
    **options: Any,
) -> Tensor:
    """One call with a plan of its own."""
    batch_size = table.shape[0]
    if q.shape[0] != batch_size * seqlen_q:
        raise ValueError(f"attnops.compat: {name}: {q.shape[0]} query rows are not {batch_size} requests of {seqlen_q}")
    lens = as_int32(lens, q.device)
    plan = XqaDecodePlan.allocate(
        batch_size,
        num_q_heads=q.shape[1],
        num_kv_heads=k_pages.shape[2],
        head_dim=q.shape[2],
        seqlen_q=seqlen_q,
        window_left=options["window_left"],
        device=q.device,
    )
    ops.xqa_decode_plan(plan, lens)
    return ops.xqa_decode(q, k_pages, v_pages, table, lens, plan, **options)[0]
