"""FlashInfer's holistic wrapper, for `attnops.compat.flashinfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._convert import (
    FP4_CACHE,
    Cache,
    as_int32,
    as_scale,
    check_kv_layout,
    check_lse,
    require_default,
    split_kv,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import extend


class BatchAttention:
    """Decode and prefill in one batch, on `attnops.ops.fmha_paged`.

    Args:
        kv_layout: "NHD" or "HND".
        device: Of the tensors to come.
    """

    @names_the_peers("BatchAttention")
    def __init__(self, kv_layout: str = "NHD", device: str | torch.device = "cuda") -> None:
        check_kv_layout("BatchAttention", kv_layout)
        self._kv_layout, self._device = kv_layout, torch.device(device)
        self._planned = False

    @names_the_peers("BatchAttention.plan")
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Prepares `run`, from tensors on any device; nothing is read on the host.

        Args:
            qo_indptr, kv_indptr: int32 ``[B + 1]``.
            kv_indices: int32.
            kv_len_arr: int32 ``[B]``.
            sm_scale: None: ``head_dim_qk ** -0.5``.
        """
        name = "BatchAttention.plan"
        require_default(name, {"use_profiler": "use a profiler of CUDA"}, {"use_profiler": False}, locals())
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        tensors = [as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)]
        self._bounds, self._indptr, self._indices, self._lens = tensors
        self._expected = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)
        self._causal, self._cap = causal, logits_soft_cap or 0.0
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._planned = True

    @names_the_peers("BatchAttention.run", k_pages="of kv_cache", v_pages="of kv_cache")
    def run(
        self,
        q: Tensor,
        kv_cache: Cache,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q: ``[T, H_q, D]``.
            kv_cache: Joint or a pair.
            k_scale, v_scale: Numbers or tensors of one.
            logits_soft_cap: 0: that of `plan`.

        Returns:
            ``(out, lse)``: float32 ``[T, H_q]``, base 2, -inf for an empty row.
        """
        name = "BatchAttention.run"
        instead = {"profiler_buffer": "use a profiler of CUDA", "kv_cache_sf": FP4_CACHE}
        require_default(name, instead, {}, locals())
        if not self._planned:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        k_pages, v_pages = split_kv(name, kv_cache, self._kv_layout)
        got = (q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1], q.dtype, k_pages.dtype)
        if got != self._expected:
            what = "heads of q and the cache, head_dim, page_size and both dtypes"
            raise ValueError(f"attnops.compat: {name}: {what} are {got}, planned were {self._expected}")
        check_lse(name, lse, q)
        result, natural = extend(
            q,
            k_pages,
            v_pages,
            self._indices,
            self._lens,
            self._bounds,
            indptr=self._indptr,
            causal=self._causal,
            softmax_scale=self._scale,
            logit_cap=logits_soft_cap or self._cap,
            k_scale=as_scale(name, "k_scale", k_scale, q.device),
            v_scale=as_scale(name, "v_scale", v_scale, q.device),
            out=out,
            return_lse=True,
        )
        return with_lse(result, natural, lse, True)  # type: ignore[return-value]
