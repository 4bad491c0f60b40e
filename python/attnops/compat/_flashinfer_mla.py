"""FlashInfer's wrappers of MLA decode, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._attend import padded_rows
from attnops.compat._convert import (
    E5M2,
    FP8,
    as_int32,
    as_scale,
    check_lse,
    finish,
    first_of,
    joined_latents,
    keep_in,
    refuse,
    require_default,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._wide import wide_latents
from attnops.metadata.plan import MlaDecodePlan
from attnops.ops._pages import gathered, own_cells

_GROUP = 128  # latents of a scale


def _check_scales(
    name: str,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    ckv_scale: float | Tensor | None,
    ckv_scale_arr: Tensor | None,
    kpe_scale: float | Tensor | None,
) -> None:
    """Raises for scales that an FP8 cache does not have, or lacks."""
    if (ckv_scale is None) == (ckv_scale_arr is None):
        raise ValueError(
            f"attnops.compat: {name}: Exactly one of ckv_scale or ckv_scale_arr is needed with an FP8 cache"
        )
    if kpe_scale is None and kpe_cache.shape[-1] > 0:
        raise ValueError(f"attnops.compat: {name}: kpe_scale is needed with an FP8 cache")
    for what, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if isinstance(scale, int | float) and not 0 < scale < float("inf"):
            raise ValueError(f"attnops.compat: {name}: {what} must be a finite positive value, got {scale}")
    if ckv_scale_arr is None:
        return
    shape = (*ckv_cache.shape[:-1], ckv_cache.shape[-1] // _GROUP)
    if ckv_scale_arr.shape != shape or ckv_cache.shape[-1] % _GROUP or ckv_scale_arr.dtype != torch.float32:
        raise ValueError(
            f"attnops.compat: {name}: Invalid shape of ckv_scale_arr: it must be float32 {list(shape)}, "
            f"got {ckv_scale_arr.dtype} {list(ckv_scale_arr.shape)}"
        )


def _dequantized(
    caches: tuple[Tensor, Tensor],
    cells: Tensor,
    ckv_scale: float | Tensor | None,
    ckv_scale_arr: Tensor | None,
    kpe_scale: float | Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Copies of the pages in use of an FP8 cache's two parts, in q's dtype."""
    latents, rope = (gathered(cache, cells).float() for cache in caches)
    if ckv_scale_arr is not None:
        latents = latents * gathered(ckv_scale_arr, cells).repeat_interleave(_GROUP, -1)
    elif ckv_scale is not None:
        latents = latents * ckv_scale
    return latents.to(dtype), (rope if kpe_scale is None else rope * kpe_scale).to(dtype)


def _checked_o_scale(name: str, o_scale: float | None, out: Tensor | None) -> float | None:
    """Of an FP8 destination; None: 1.

    Raises:
        ValueError: it is not above 0 and finite, or there is no such destination.
    """
    if o_scale is None:
        return None
    if not 0 < o_scale < float("inf"):
        raise ValueError(f"attnops.compat: {name}: o_scale must be a finite positive value, got {o_scale}")
    if out is None or out.dtype.itemsize > 1:
        got = None if out is None else out.dtype
        raise ValueError(f"attnops.compat: {name}: out must be an FP8 tensor with o_scale, got {got}")
    return o_scale


class _Module:
    """What engines call to plan between the replays of a graph: SGLang's `fast_mla_decode_plan` and its kin."""

    def __init__(self, wrapper: BatchMLAPagedAttentionWrapper) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: Tensor | None,
        int_workspace_buffer: Tensor | None,
        pin_memory_int_workspace_buffer: Tensor | None,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> None:
        """Plans for these lengths, of tensors on the CPU. The pages are those in the wrapper's buffers already.

        Raises:
            RuntimeError: the wrapper's own `plan` has not run.
            ValueError: the geometry is not that of the wrapper's own `plan`.
        """
        self._wrapper._plan_again(qo_indptr, kv_indptr, kv_len_arr, num_heads)


class BatchMLAPagedAttentionWrapper:
    """MLA over a CSR page table, on `attnops.ops.mla_decode`.

    `plan` reads `qo_indptr` on the host, as FlashInfer's does; a copy on the CPU costs no synchronization. Requests
    with fewer query tokens than others cost as much as these.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: With `use_cuda_graph`: buffers that `plan` writes into.
        backend: Taken: attnops chooses among its kernels.
    """

    @names_the_peers("BatchMLAPagedAttentionWrapper")
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph and any(buffer is None for buffer in buffers[1:]):
            raise ValueError("attnops.compat: use_cuda_graph=True needs kv_indptr, kv_indices and kv_len_arr")
        self._device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._buffers = buffers if use_cuda_graph else (None,) * 4
        self._plan: MlaDecodePlan | None = None
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._cached_module = _Module(self)
        self._qo_indptr_buf, self._kv_indptr_buf, self._kv_indices_buf, self._kv_len_arr_buf = buffers

    @names_the_peers("BatchMLAPagedAttentionWrapper.plan", cache_seqlens="kv_len_arr", num_q_heads="num_heads")
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Prepares `run`.

        Args:
            qo_indptr, kv_indptr: int32 ``[B + 1]``.
            kv_indices: int32.
            kv_len_arr: int32 ``[B]``, tokens per request.
            head_dim_ckv, head_dim_kpe: 512 and 64; others, up to 576 together, take a slow row of `fmha_paged`.
            q_data_type: float8 queries are widened, and give outputs of the cache's dtype, or bfloat16.
            kv_data_type: q's dtype, float8_e4m3fn or float8_e5m2.

        Raises:
            NotImplementedError: an argument is not honoured.
            ValueError: q is not bfloat16 over a float8_e4m3fn cache.
        """
        name = "BatchMLAPagedAttentionWrapper.plan"
        require_default(name, {"use_profiler": "use a profiler of CUDA"}, {"use_profiler": False}, locals())
        self._wide = (head_dim_ckv, head_dim_kpe) != (512, 64)
        self._widened = q_data_type  # what q is multiplied in
        if q_data_type.itemsize == 1:
            self._widened = torch.bfloat16 if kv_data_type.itemsize == 1 else kv_data_type
        if self._wide and kv_data_type not in (self._widened, FP8, E5M2):
            dims = f"head_dim_ckv={head_dim_ckv}, head_dim_kpe={head_dim_kpe}"
            raise refuse(name, f"{dims} with kv_data_type={kv_data_type}", "q's dtype, float8_e4m3fn or float8_e5m2")
        bounds = (kv_len_arr.shape[0] + 1,) if kv_len_arr.dim() == 1 else None
        kv_indptr = first_of(kv_indptr, kv_len_arr.numel() + 1)  # the peer reads no further
        if qo_indptr.shape != bounds or kv_indptr.shape != bounds or kv_indices.dim() != 1:
            raise ValueError(
                f"attnops.compat: {name}: qo_indptr and kv_indptr must be [B + 1], kv_indices [n] and kv_len_arr [B], "
                f"got {', '.join(str(list(t.shape)) for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))}"
            )
        if kv_data_type == FP8 and self._widened != torch.bfloat16:
            raise ValueError(
                f"attnops.compat: {name}: an FP8 cache needs q_data_type=torch.bfloat16, got {q_data_type}"
            )
        names, given = (
            ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
            (qo_indptr, kv_indptr, kv_indices, kv_len_arr),
        )
        tensors = [as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)]
        exact = (True, True, False, True)
        self._bounds, self._indptr, self._indices, self._lens = map(keep_in, self._buffers, tensors, names, exact)
        if not self._use_cuda_graph:
            self._qo_indptr_buf, self._kv_indptr_buf, self._kv_indices_buf = self._bounds, self._indptr, self._indices
            self._kv_len_arr_buf = self._lens
        self._page_size, self._causal, self._sm_scale = page_size, causal, sm_scale
        self._dtypes = (q_data_type, kv_data_type)
        self._plan_for(qo_indptr, num_heads)

    def _plan_again(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_len_arr: Tensor, num_heads: int) -> None:
        if self._plan is None:
            raise RuntimeError("attnops.compat: BatchMLAPagedAttentionWrapper: plan must run first")
        for kept, given in zip((self._bounds, self._indptr, self._lens), (qo_indptr, kv_indptr, kv_len_arr)):
            kept.copy_(given, non_blocking=True)
        self._plan_for(qo_indptr, num_heads)

    def _plan_for(self, qo_indptr: Tensor, num_heads: int) -> None:
        """The plan of the lengths that are kept."""
        counts = qo_indptr.diff().tolist()
        most = max(counts, default=1)
        self._ragged = most == 0 or min(counts, default=1) != most
        key = {
            "batch_size": self._lens.shape[0],
            "seqlen_q": max(most, 1),
            "num_q_heads": num_heads,
            "window_left": -1,
        }
        if self._plan is None or self._plan.key != key:
            if self._plan is not None and self._use_cuda_graph:
                raise ValueError("attnops.compat: use_cuda_graph fixes the geometry: make a wrapper for each")
            self._plan = MlaDecodePlan.allocate(device=self._device, **key)
        ops.mla_decode_plan(self._plan, self._lens)

    begin_forward = plan

    @names_the_peers(
        "BatchMLAPagedAttentionWrapper.run",
        q="q_nope",
        kv_pages="ckv_cache and kpe_cache",
        page_table="kv_indices of plan",
        cache_seqlens="kv_len_arr of plan",
    )
    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | Tensor | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q_nope, q_pe: ``[T, H, 512]`` and ``[T, H, 64]``.
            ckv_cache, kpe_cache: ``[P, page_size, 512]`` and ``[P, page_size, 64]``. Neighbours in one pool of 576 are
                read where they lie; of two pools the pages in use are copied.
            out: Of q's dtype; another costs a copy. FP8 saturates.
            return_lse_base_on_e: Natural log; base 2 otherwise.
            o_scale: Of an FP8 `out`: real = stored x scale.
            ckv_scale, kpe_scale: Of an FP8 cache's two parts. float8_e4m3fn needs both, float8_e5m2 has 1 without.
            ckv_scale_arr: instead of the first, float32 ``[P, page_size, 4]``, one per 128 latents of a token.

        Returns:
            ``out [T, H, 512]``, or ``(out, lse)``: float32 ``[T, H]``, -inf for an empty row.
        """
        name = "BatchMLAPagedAttentionWrapper.run"
        plan = self._plan
        if profiler_buffer is not None or kv_len is not None or page_table is not None:
            planned = "plan has been told; leave it None"
            instead = {"profiler_buffer": "use a profiler of CUDA", "kv_len": planned, "page_table": planned}
            require_default(name, instead, {}, locals())
        if plan is None:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        q_dtype, kv_dtype = self._dtypes
        got = (q_nope.dtype, q_pe.dtype, ckv_cache.dtype, kpe_cache.dtype, ckv_cache.shape[1])
        expected = (q_dtype, q_dtype, kv_dtype, kv_dtype, self._page_size)
        if got != expected:
            words = ("q_nope.dtype", "q_pe.dtype", "ckv_cache.dtype", "kpe_cache.dtype", "page_size")
            wrong = [f"{word} is {a}, planned was {b}" for word, a, b in zip(words, got, expected) if a != b]
            raise ValueError(f"attnops.compat: {name}: {'; '.join(wrong)}")
        check_lse(name, lse, q_nope)
        if (out is not None and out.dtype is not self._widened) or o_scale is not None:
            given = (q_nope, q_pe, ckv_cache, kpe_cache, None, lse, return_lse)
            scales: dict[str, Any] = {"ckv_scale": ckv_scale, "ckv_scale_arr": ckv_scale_arr, "kpe_scale": kpe_scale}
            factor = _checked_o_scale(name, o_scale, out)
            converted = self.run(*given, return_lse_base_on_e=return_lse_base_on_e, **scales)
            rows, natural = converted if isinstance(converted, tuple) else (converted, None)
            rows = finish(rows if factor is None else rows.float() / factor, out, None)
            return rows if natural is None else (rows, natural)
        if q_dtype is not self._widened:
            q_nope, q_pe = q_nope.to(self._widened), q_pe.to(self._widened)
        one_byte = ckv_cache.dtype.itemsize == 1
        if one_byte and ckv_cache.dtype == E5M2:
            ckv_scale = 1.0 if ckv_scale is None and ckv_scale_arr is None else ckv_scale
            kpe_scale = 1.0 if kpe_scale is None else kpe_scale
        if self._wide:
            caches, cells = (ckv_cache, kpe_cache), self._indices
            if one_byte:
                _check_scales(name, ckv_cache, kpe_cache, ckv_scale, ckv_scale_arr, kpe_scale)
                caches = _dequantized(caches, cells, ckv_scale, ckv_scale_arr, kpe_scale, q_nope.dtype)
                cells = own_cells(cells)
            parts = ((q_nope, q_pe), caches, cells, self._indptr, self._lens, self._bounds)
            options: dict[str, Any] = {"softmax_scale": self._sm_scale, "causal": self._causal, "out": out}
            wide, natural = wide_latents(name, *parts, return_lse=return_lse or lse is not None, **options)
            return with_lse(wide, natural, lse, return_lse, return_lse_base_on_e)
        kv_scale = None
        if one_byte:
            q_pe, pages, cells, kv_scale = self._quantized(
                name, q_pe, ckv_cache, kpe_cache, ckv_scale, ckv_scale_arr, kpe_scale
            )
        elif ckv_scale is not None or ckv_scale_arr is not None or kpe_scale is not None:
            raise ValueError(
                f"attnops.compat: {name}: ckv_scale, ckv_scale_arr and kpe_scale are those of an FP8 cache"
            )
        else:
            pages, cells = joined_latents(name, ckv_cache, kpe_cache, self._indices)
        if self._ragged:
            return self._run_ragged(
                q_nope, q_pe, pages, cells, plan, kv_scale, out, lse, return_lse, return_lse_base_on_e
            )
        result, natural = ops.mla_decode(
            q_nope,
            pages,
            cells,
            self._lens,
            plan,
            kv_indptr=self._indptr,
            softmax_scale=self._sm_scale,
            q_pe=q_pe,
            causal=self._causal,
            kv_scale=kv_scale,
            out=out,
            return_lse=return_lse or lse is not None,
        )
        return with_lse(result, natural, lse, return_lse, return_lse_base_on_e)

    def _run_ragged(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        pages: Tensor,
        cells: Tensor,
        plan: MlaDecodePlan,
        kv_scale: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        base_on_e: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Requests that bring different numbers of query tokens: all get the most of them, in front of their own."""
        rows, places, padding = padded_rows(self._bounds, q_nope.shape[0], plan.seqlen_q)
        if q_nope.shape[0] == 0:
            empty = q_nope.new_empty(0, q_nope.shape[1], q_nope.shape[2])
            return with_lse(empty, empty.new_empty(empty.shape[:2], dtype=torch.float32), lse, return_lse)
        result, natural = ops.mla_decode(
            q_nope[rows],
            pages,
            cells,
            self._lens,
            plan,
            kv_indptr=self._indptr,
            softmax_scale=self._sm_scale,
            q_pe=q_pe[rows],
            causal=self._causal,
            kv_scale=kv_scale,
            return_lse=True,
        )
        assert natural is not None
        result = result[places].masked_fill(padding.view(-1, 1, 1), 0)
        natural = natural[places].masked_fill(padding.unsqueeze(1), -torch.inf)
        result = result if out is None else out.copy_(result)
        return with_lse(result, natural, lse, return_lse, base_on_e)

    def _quantized(
        self,
        name: str,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        ckv_scale: float | Tensor | None,
        ckv_scale_arr: Tensor | None,
        kpe_scale: float | Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """An FP8 cache as the op takes it: q_pe, pages, page table and scale."""
        _check_scales(name, ckv_cache, kpe_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        if ckv_scale_arr is None:
            assert ckv_scale is not None and kpe_scale is not None
            if isinstance(ckv_scale, Tensor) or ckv_scale != kpe_scale:  # the op has one scale
                q_pe = (q_pe.float() * (kpe_scale / ckv_scale)).to(q_pe.dtype)
            pages, cells = joined_latents(name, ckv_cache, kpe_cache, self._indices)
            return q_pe, pages, cells, as_scale(name, "ckv_scale", ckv_scale, q_pe.device)
        assert kpe_scale is not None
        if ckv_cache.dtype == E5M2:
            scales_of = (ckv_scale, ckv_scale_arr, kpe_scale, q_pe.dtype)
            both = _dequantized((ckv_cache, kpe_cache), self._indices, *scales_of)
            return q_pe, torch.cat(both, -1), own_cells(self._indices), None
        latents, scales = gathered(ckv_cache, self._indices), gathered(ckv_scale_arr, self._indices)
        rope = (gathered(kpe_cache, self._indices).float() * kpe_scale).to(torch.bfloat16)
        parts = [part.contiguous().view(torch.uint8) for part in (latents, scales, rope)]
        return q_pe, torch.cat(parts, -1), own_cells(self._indices), None

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.run(*args, **options, return_lse=True)  # type: ignore[return-value,misc]

    forward = run
