"""FlashInfer's older wrapper of MLA decode, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import (
    as_dtype,
    fold_scale,
    refuse,
    require_default,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_mla import BatchMLAPagedAttentionWrapper
from attnops.compat._flashinfer_workspace import Workspaces
from attnops.compat._flashinfer_wrapper import lengths_of


class BatchDecodeMlaWithPagedKVCacheWrapper(Workspaces):
    """The older wrapper, of one query token per request: lengths from `indptr` and `last_page_len`.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
        use_tensor_cores: Taken. paged_kv_indptr_buffer, ...: With `use_cuda_graph`: what `plan` writes into.
    """

    @names_the_peers("BatchDecodeMlaWithPagedKVCacheWrapper")
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        self._device, self._graph = float_workspace_buffer.device, use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        lens = paged_kv_last_page_len_buffer
        buffers = (
            None,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            None if lens is None else torch.empty_like(lens),
        )
        self._wrapper = BatchMLAPagedAttentionWrapper(float_workspace_buffer, use_cuda_graph, *buffers)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @names_the_peers("BatchDecodeMlaWithPagedKVCacheWrapper.plan")
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        head_dim_compressed_kv: int,
        page_size: int,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        data_type: torch.dtype | str = "float16",
        q_data_type: torch.dtype | str | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Prepares `run`; arguments as of `BatchDecodeWithPagedKVCacheWrapper.plan`.

        Args:
            rope_scale, rope_theta: Taken: q_pe and kpe_cache are rotated already. The peer rotates nothing, too.
        """
        name = "BatchDecodeMlaWithPagedKVCacheWrapper.plan"
        require_default(name, {"window_left": "use attnops.ops.mla_decode"}, {"window_left": -1}, locals())
        if logits_soft_cap:
            raise refuse(name, f"logits_soft_cap={logits_soft_cap}", "use attnops.ops.mla_decode")
        kv_dtype = as_dtype(name, "data_type", data_type)
        q_dtype = as_dtype(name, "q_data_type", q_data_type) or kv_dtype
        assert q_dtype is not None and kv_dtype is not None
        bounds = indptr[: last_page_len.shape[0] + 1]
        lens = lengths_of(name, bounds, last_page_len, page_size)
        one_each = torch.arange(bounds.shape[0], dtype=torch.int32)
        self._wrapper.plan(
            one_each,
            bounds,
            indices,
            lens,
            num_qo_heads,
            head_dim_compressed_kv,
            64,
            page_size,
            True,
            sm_scale,
            q_dtype,
            kv_dtype,
        )

    @names_the_peers("BatchDecodeMlaWithPagedKVCacheWrapper.run")
    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        paged_ckv_cache: Tensor,
        paged_kpe_cache: Tensor,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`BatchMLAPagedAttentionWrapper.run`; `enable_pdl` is taken.

        Args:
            q_scale, k_scale: Multiply the scores.
            v_scale: Multiplies the output.
        """
        name = "BatchDecodeMlaWithPagedKVCacheWrapper.run"
        wrapper, scale = self._wrapper, self._wrapper._sm_scale if self._wrapper._plan else 1.0
        factor = (
            fold_scale(name, "q_scale", q_scale, q_pe.device)[0] * fold_scale(name, "k_scale", k_scale, q_pe.device)[0]
        )
        wrapper._sm_scale = scale * factor
        try:
            result = wrapper.run(q_nope, q_pe, paged_ckv_cache, paged_kpe_cache, out, lse, return_lse)
        finally:
            wrapper._sm_scale = scale
        if v_scale is not None and v_scale != 1:
            (result[0] if return_lse else result).mul_(v_scale)  # type: ignore[union-attr]
        return result

    def run_return_lse(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.run(*args, **options, return_lse=True)  # type: ignore[return-value,misc]
