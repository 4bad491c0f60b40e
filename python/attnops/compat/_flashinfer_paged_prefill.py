"""FlashInfer's prefill over pages, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import (
    FP4_CACHE,
    Cache,
    as_int32,
    check_lse,
    dequantized,
    keep_in,
    require_default,
    split_kv,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import extend
from attnops.compat._flashinfer_prefill import Prefill
from attnops.compat._flashinfer_workspace import ReturnsLse
from attnops.compat._flashinfer_wrapper import lengths_of
from attnops.compat._positions import biased_keys, key_positions, llama_angles, rotate
from attnops.ops._pages import gathered, own_cells

_RUN = {"kv_cache_sf": FP4_CACHE}


def _as_int32s(name: str, names: tuple[str, ...], given: dict[str, Any], device: torch.device) -> list[Tensor]:
    return [as_int32(name, what, given[what], device) for what in names]


class BatchPrefillWithPagedKVCacheWrapper(ReturnsLse):
    """Prefill and extend over a CSR page table, on `attnops.ops.fmha_paged`.

    With `use_cuda_graph`, `plan` writes into the four given buffers, outside the graph; a captured `run` reads them.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
        kv_layout: "NHD" or "HND".
        backend: Taken, but "cudnn" has offsets in elements, and pages in HND.
        jit_args, jit_kwargs: None, or of FlashInfer's variant "AttentionSink", whose `run` takes sink and sm_scale.
        custom_mask_buf, mask_indptr_buf: With `use_cuda_graph` a mask needs both, as the peer's does. What a captured
            `run` reads is smaller, and of attnops' own.
    """

    _NAME = "BatchPrefillWithPagedKVCacheWrapper"

    @names_the_peers("BatchPrefillWithPagedKVCacheWrapper")
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph and any(buffer is None for buffer in buffers):
            raise ValueError("attnops.compat: use_cuda_graph=True needs qo_indptr_buf and the three paged_kv buffers")
        self._buffers = buffers if use_cuda_graph else (None,) * 4
        masks = (custom_mask_buf, mask_indptr_buf)
        kind = (masks, backend, jit_args, jit_kwargs)
        self._prefill = Prefill(self._NAME, float_workspace_buffer, kv_layout, use_cuda_graph, *kind)
        self._lens: Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._prefill.graph

    @property
    def _plan_info(self) -> Any:
        """What engines look at to learn whether `plan` has run."""
        return self._prefill if self._prefill.planned else None

    @names_the_peers("BatchPrefillWithPagedKVCacheWrapper.plan")
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Prepares `run`, from tensors on any device. With a custom mask lengths are read on the host, else nothing is.

        Args:
            qo_indptr: int32 ``[B + 1]``; with `backend="cudnn"` in elements.
            paged_kv_indptr: int32 ``[B + 1]``.
            paged_kv_indices: int32 ``[num_indices]``.
            paged_kv_last_page_len: int32 ``[B]``, 1 to `page_size`.
            custom_mask: bool, every request's ``[q_len, kv_len]`` flattened, one after the other. It replaces `causal`
                and costs a row for every key. With `use_cuda_graph` it costs nothing, may be longer, and may hide new
                tokens alone.
            packed_custom_mask: The bits of `custom_mask`, little-endian, each request from a byte on.
            prefix_len_ptr: uint32 ``[B]``, of multi-item scoring: what every item sees. It costs what a mask does.
            token_pos_in_items_ptr: uint16: of each token behind the prefix its place in its item, 0 for a delimiter.
            token_pos_in_items_len: Where the next request begins in it.
            max_item_len_ptr: Accepted and ignored, since no result depends on it.
            causal: Bottom-right.
            window_left: Keys at ``[p - window_left, ...]``; -1: off.
            seq_lens: int ``[B]``, the lengths; None: from `paged_kv_indptr` and `paged_kv_last_page_len`.
            use_fp16_qk_reduction: Accepted and ignored, since sums are float32.
            fixed_split_size, disable_split_kv: A request's bits do not depend on its batch: its keys are not split.
            non_blocking, seq_lens_q, block_tables: Accepted and ignored, since no result depends on it.
            max_token_per_sequence, max_sequence_kv: Accepted and ignored, since no result depends on it.
        """
        given = locals()  # before any local of its own: a tracer reads them all
        name, device = f"{self._NAME}.plan", self._prefill.device
        if paged_kv_indices.dim() != 1:
            raise ValueError(
                f"attnops.compat: {name}: paged_kv_indices must be [num_indices], got {list(paged_kv_indices.shape)}"
            )
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        tensors = _as_int32s(name, names, given, device)
        if self._prefill.cudnn:
            tensors[0] = tensors[0] // (num_qo_heads * head_dim_qk)
        exact = (True, True, False, True)
        bounds, self._indptr, self._indices, last = map(keep_in, self._buffers, tensors, names, exact)
        lens = lengths_of(name, self._indptr, last, page_size)
        if seq_lens is not None:
            lens = as_int32(name, "seq_lens", seq_lens.reshape(-1), device)[: lens.shape[0]].clone()
        if self._prefill.graph and self._lens is not None:
            lens = self._lens.copy_(lens)  # where a captured run reads them
        self._lens, self._page_size = lens, page_size
        self._prefill.plan(given, bounds, lens, None)

    begin_forward = plan

    @names_the_peers(
        "BatchPrefillWithPagedKVCacheWrapper.run", k_pages="of paged_kv_cache", v_pages="of paged_kv_cache"
    )
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
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q: ``[T, H_q, D]``.
            paged_kv_cache: As of `BatchDecodeWithPagedKVCacheWrapper.run`.
            args: Of FP8, three scales per head, of q, k and v. With the variant: float32 ``[H_q]``, and a number.
            q_scale, k_scale: Multiply the scores.
            v_scale: Multiplies the output. All three are numbers, or tensors of one.
            enable_pdl, use_fp16_softmax, uses_spcompress: Taken: choices among kernels.

        Returns:
            ``out``, or ``(out, lse)``: float32 ``[T, H_q]``, base 2, -inf for an empty row.
        """
        name, prefill = f"{self._NAME}.run", self._prefill
        require_default(name, _RUN, {}, locals())
        k_pages, v_pages = split_kv(name, paged_kv_cache, "HND" if prefill.cudnn else prefill.kv_layout)
        window = prefill.check(name, q, k_pages, window_left)
        if k_pages.shape[1] != self._page_size:
            raise ValueError(f"attnops.compat: {name}: page_size is {k_pages.shape[1]}, planned was {self._page_size}")
        check_lse(name, lse, q)
        options = prefill.options(name, q, q_scale, k_scale, v_scale, args, sinks)
        rows = prefill.queries(name, dequantized(q, args), options)
        cells, indptr = self._indices, self._indptr
        if prefill.rope is not None or prefill.alibi:
            positions, lengths = key_positions(cells, indptr, prefill.k_lens, self._page_size)
            k_pages, v_pages = gathered(k_pages, cells).to(rows.dtype), gathered(v_pages, cells).to(rows.dtype)
            cells = own_cells(cells)
            if prefill.rope is not None:
                angles = llama_angles(positions, k_pages.shape[-1], *prefill.rope)
                k_pages = rotate(k_pages, *angles, interleaved=False)
            else:
                k_pages = biased_keys(k_pages, positions - lengths + 1)
        masked = prefill.masked is not None
        result = extend(
            rows,
            k_pages,
            v_pages,
            cells,
            prefill.k_lens,
            prefill.masked.bounds if prefill.masked is not None else prefill.bounds,
            indptr=indptr,
            window_left=window,
            plan=prefill.tiles(rows, window),
            out=None if masked else out,
            return_lse=return_lse or lse is not None,
            **options,
        )
        return prefill.finish(result, q, out, lse, return_lse)

    @names_the_peers("BatchPrefillWithPagedKVCacheWrapper.forward")
    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        """`run` with options that replace those of `plan`, also where they are left out, as in the peer."""
        self._prefill.choose(f"{self._NAME}.forward", locals())
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
