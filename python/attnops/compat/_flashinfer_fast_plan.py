"""FlashInfer's decode wrapper of graphs, and its plan between their replays, for `attnops.compat.flashinfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.compat._errors import names_the_peers
from attnops.compat._flashinfer_wrapper import BatchDecodeWithPagedKVCacheWrapper


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with `use_cuda_graph`; its buffers come first."""

    @names_the_peers("CUDAGraphBatchDecodeWithPagedKVCacheWrapper")
    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        if any(buffer.dim() != 1 for buffer in buffers):
            raise ValueError(f"attnops.compat: {type(self).__name__}: every buffer must have one dimension")
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


@names_the_peers("fast_decode_plan")
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
    data_type: torch.dtype | str | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """The wrapper's `plan`, which never waits for the device; a copy of `indptr` on the CPU is taken and not needed."""
    if q_data_type is None and data_type is None:
        q_data_type = "float16"
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
