"""FlashInfer's decode wrappers, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._attend import Positions, decode, invariant_cuts, is_plain
from attnops.compat._convert import (
    FP4_CACHE,
    Cache,
    as_dtype,
    as_int32,
    as_scale,
    as_sinks,
    check_kv_layout,
    check_lse,
    dequantized,
    finish,
    first_of,
    fold_scale,
    head_scales,
    keep_in,
    product,
    refuse,
    require_default,
    split_kv,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_decode_plans import DecodePlans, Plan
from attnops.compat._flashinfer_workspace import ReturnsLse, check_workspace
from attnops.compat._positions import check_mode
from attnops.metadata.plan import XqaDecodePlan


def lengths_of(function: str, indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
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


class BatchDecodeWithPagedKVCacheWrapper(ReturnsLse):
    """Decode over a CSR page table, on `attnops.ops.xqa_decode`.

    With `use_cuda_graph`, `plan` writes into the three given buffers and into memory of its own that never moves. It
    runs outside the graph. A captured `run` reads what it wrote.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
        kv_layout: "NHD" or "HND".
        use_tensor_cores, backend: Taken: attnops chooses among its kernels.
        jit_args: None.
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
        instead = {"jit_args": "attnops compiles nothing at run time; leave it None"}
        require_default(type(self).__name__, instead, {}, locals())
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and any(buffer is None for buffer in buffers):
            raise ValueError("attnops.compat: use_cuda_graph=True needs the three paged_kv buffers")
        check_kv_layout(type(self).__name__, kv_layout)
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        self._device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._buffers = buffers if use_cuda_graph else (None, None, None)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = buffers
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._plans = DecodePlans(self._device, use_cuda_graph)

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @property
    def _plan_info(self) -> Any:
        """What engines look at to learn whether `plan` has run."""
        return self._plans.planned

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
        window_right: int = 0,
    ) -> None:
        """Prepares `run`, from tensors on any device; nothing is read on the host.

        Args:
            indptr: int32 ``[B + 1]`` or longer.
            indices: int32 ``[num_indices]``.
            last_page_len: int32 ``[B]``, 1 to `page_size`.
            pos_encoding_mode: "NONE"; "ROPE_LLAMA" and "ALIBI" act on a copy of the pages in use, at every `run`.
            window_left: Keys at ``[p - window_left, p]``; -1: off.
            logits_soft_cap: None or 0: off.
            o_data_type: Of the output; None: as q.
            data_type: Of whichever of q and the cache has none.
            non_blocking, block_tables: Taken; the CSR table says what `block_tables` does.
            seq_lens: int ``[B]``, the lengths; None: from `indptr` and `last_page_len`.
            fixed_split_size, disable_split_kv: A batch-invariant plan; the second does not split a request.
            q_len_per_req: Query tokens of each request, causal among themselves.
        """
        name = "BatchDecodeWithPagedKVCacheWrapper.plan"
        if window_right > 0:
            raise refuse(name, f"window_right={window_right}", "a query is its request's last token; leave 0")
        check_mode(name, pos_encoding_mode)
        self._q_dtype = as_dtype(name, "q_data_type", data_type if q_data_type is None else q_data_type)
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        self._kv_dtype = as_dtype(name, "kv_data_type", kv_data_type) or self._q_dtype
        self._o_dtype = as_dtype(name, "o_data_type", o_data_type)
        if indices.dim() != 1:
            raise ValueError(f"attnops.compat: {name}: indices must be [num_indices], got {list(indices.shape)}")
        names = ("indptr", "indices", "last_page_len")
        given = (first_of(indptr, last_page_len.shape[0] + 1), indices, last_page_len)
        tensors = [as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)]
        exact = (True, False, True)
        self._indptr, self._indices, last = map(keep_in, self._buffers, tensors, names, exact)
        if not self._use_cuda_graph:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = self._indptr, self._indices
            self._paged_kv_last_page_len_buf = last
        self._page_size, self._window = page_size, window_left
        self._cap = logits_soft_cap or 0.0
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta)
        lengths = lengths_of(name, self._indptr, last, page_size)
        if seq_lens is not None:
            lengths = as_int32(name, "seq_lens", seq_lens.reshape(-1), self._device)[: lengths.shape[0]].clone()
        cuts = 0
        if disable_split_kv or (fixed_split_size or 0) > 0:
            cuts = invariant_cuts(num_qo_heads, num_kv_heads, head_dim, page_size, disable_split_kv)
        key: dict[str, Any] = {
            "batch_size": lengths.shape[0],
            "seqlen_q": q_len_per_req,
            "num_q_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "window_left": window_left,
        }
        self._plans.set(key, cuts, lengths, page_size)

    begin_forward = plan

    @names_the_peers("BatchDecodeWithPagedKVCacheWrapper.run", k_pages="of paged_kv_cache", v_pages="of paged_kv_cache")
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q: ``[B * q_len_per_req, H_q, D]``.
            paged_kv_cache: ``[P, 2, page_size, H_kv, D]`` (NHD), ``[P, 2, H_kv, page_size, D]`` (HND), or a pair.
            args: Of FP8, three scales per head, of q, k and v: float32 ``[H_q]``, ``[H_kv]``, ``[H_kv]``.
            q_scale, k_scale: Multiply the scores.
            v_scale: Multiplies the output. All three are numbers, or tensors of one.
            enable_pdl: Taken: a choice among launches.
            window_left, q_len_per_req: None, or as planned.

        Returns:
            ``out``, or ``(out, lse)``: float32 ``[B * q_len_per_req, H_q]``, base 2, -inf for an empty row.
        """
        name = "BatchDecodeWithPagedKVCacheWrapper.run"
        if kv_cache_sf is not None:
            raise refuse(name, "kv_cache_sf", FP4_CACHE)
        plan = self._plans.planned
        if plan is None:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        k_pages, v_pages = split_kv(name, paged_kv_cache, self._kv_layout)
        if (
            (window_left is not None and window_left != self._window)
            or (q_len_per_req is not None and q_len_per_req != plan.seqlen_q)
            or q.dtype != self._q_dtype
            or k_pages.dtype != self._kv_dtype
            or k_pages.shape[1] != self._page_size
        ):
            for what, got, planned in (
                ("window_left", window_left, self._window),
                ("q_len_per_req", q_len_per_req, plan.seqlen_q),
                ("q's dtype", q.dtype, self._q_dtype),
                ("the cache's dtype", k_pages.dtype, self._kv_dtype),
                ("page_size", k_pages.shape[1], self._page_size),
            ):
                if got is not None and got != planned:
                    raise ValueError(f"attnops.compat: {name}: {what} is {got}, planned was {planned}")
        k_heads = v_heads = None
        if args:
            k_heads, v_heads = head_scales(name, args)
            q = dequantized(q, args)
        return self._attend(
            name,
            q,
            k_pages,
            v_pages,
            plan,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            return_lse,
            None if sinks is None else as_sinks(sinks, q.shape[1], name),
            k_heads,
            v_heads,
        )

    def _attend(
        self,
        name: str,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: Plan,
        q_scale: float | Tensor | None,
        k_scale: float | Tensor | None,
        v_scale: float | Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        sinks: Tensor | None,
        on_device: Tensor | None = None,
        v_heads: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if q.shape[0] != plan.batch_size * plan.seqlen_q:
            raise ValueError(
                f"attnops.compat: {name}: q must have batch_size * q_len_per_req = {plan.batch_size} * {plan.seqlen_q} "
                f"rows as planned, got {q.shape[0]}"
            )
        check_lse(name, lse, q)
        scale = self._scale
        if q_scale is not None:
            factor, of_queries = fold_scale(name, "q_scale", q_scale, q.device)
            scale *= factor
            on_device = product(on_device, of_queries)
        if k_scale is not None:
            factor, of_keys = fold_scale(name, "k_scale", k_scale, q.device)
            scale *= factor
            on_device = product(on_device, of_keys)
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "window_left": plan.window_left,
            "logit_cap": self._cap,
            "sinks": sinks,
            "k_scale": on_device,
            "v_scale": v_heads if v_scale is None else product(v_heads, as_scale(name, "v_scale", v_scale, q.device)),
            "return_lse": return_lse or lse is not None,
        }
        dtype = self._o_dtype or q.dtype
        plain = dtype == q.dtype and is_plain(q, k_pages, self._positions)
        if plain and isinstance(plan, XqaDecodePlan):
            result, natural = ops.xqa_decode(
                q, k_pages, v_pages, self._indices, self._plans.lens, plan, kv_indptr=self._indptr, out=out, **options
            )
        else:
            result, natural = decode(
                name,
                q,
                k_pages,
                v_pages,
                self._indices,
                self._plans.lens,
                seqlen_q=plan.seqlen_q,
                indptr=self._indptr,
                positions=self._positions,
                plan=plan,
                cuts=self._plans.cuts,
                out=out,
                **options,
            )
            result = finish(result, out, dtype)
        return with_lse(result, natural, lse, return_lse)

    @names_the_peers(
        "BatchDecodeWithPagedKVCacheWrapper.forward", k_pages="of paged_kv_cache", v_pages="of paged_kv_cache"
    )
    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run` with options that replace those of `plan`, also where they are left out, as in the peer.

        Args:
            window_left: Another than the planned one costs a plan at its first call.
            sm_scale: None: ``D ** -0.5``.
        """
        name = "BatchDecodeWithPagedKVCacheWrapper.forward"
        check_mode(name, pos_encoding_mode)
        plan = self._plans.planned
        if plan is None:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        self._window, self._cap = window_left, logits_soft_cap or 0.0
        self._scale = plan.head_dim**-0.5 if sm_scale is None else sm_scale
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta)
        plan = self._plans.for_window(window_left)
        k_pages, v_pages = split_kv(name, paged_kv_cache, self._kv_layout)
        return self._attend(name, q, k_pages, v_pages, plan, q_scale, k_scale, v_scale, None, None, return_lse, None)
