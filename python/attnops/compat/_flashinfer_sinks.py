"""FlashInfer's wrapper with attention sinks, for `attnops.compat.flashinfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from attnops.compat._positions import check_mode


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose `run` takes, by position, sink float32 ``[H_q]`` and sm_scale.

    Args:
        q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left: Taken: `plan` says them again.
        use_fp16_qk_reduction: Taken: sums are float32.
        pos_encoding_mode: As of `plan`, which must say the same.
    """

    _NAME = "BatchAttentionWithAttentionSinkWrapper"

    @names_the_peers(_NAME)
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        check_mode(self._NAME, pos_encoding_mode)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._prefill.takes_sink = True
