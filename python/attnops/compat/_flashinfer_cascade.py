"""FlashInfer's cascade wrappers, for `attnops.compat.flashinfer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import (
    Cache,
    as_dtype,
    as_int32,
    check_kv_layout,
    keep_in,
    refuse,
    require_default,
    split_kv,
    to_log2,
)
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import extend
from attnops.compat._flashinfer_workspace import Workspaces, check_workspace
from attnops.compat._flashinfer_wrapper import BatchDecodeWithPagedKVCacheWrapper, lengths_of

_NO_ROPE = "rotate q and k before they are stored"


_MOST_LEVELS = 1 << 10


class MultiLevelCascadeAttentionWrapper(Workspaces):
    """Levels of a shared prefix each attended to by their own requests, and merged.

    Args:
        num_levels: Of the cascade, the first one shared by most.
        float_workspace_buffer: Names the device; its memory is not needed.
        use_cuda_graph: `plan` then writes into the buffers given, one of a kind for each level.
    """

    @names_the_peers("MultiLevelCascadeAttentionWrapper")
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        check_kv_layout(type(self).__name__, kv_layout)
        if not 1 <= num_levels <= _MOST_LEVELS:
            raise ValueError(
                f"attnops.compat: MultiLevelCascadeAttentionWrapper: num_levels must be in [1, {_MOST_LEVELS}], "
                f"got {num_levels}"
            )
        given = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        if use_cuda_graph and any(buffers is None for buffers in given):
            raise ValueError("attnops.compat: use_cuda_graph=True needs the four lists of buffers")
        nothing: list[Any] = [None] * num_levels
        self._buffers = [buffers if use_cuda_graph and buffers is not None else nothing for buffers in given]
        self._num_levels, self._device, self._kv_layout = num_levels, float_workspace_buffer.device, kv_layout
        self._graph = use_cuda_graph
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

    @names_the_peers("MultiLevelCascadeAttentionWrapper.reset_workspace_buffer")
    def reset_workspace_buffer(  # type: ignore[override]
        self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]
    ) -> None:
        """Taken: no memory of a workspace is needed.

        Raises:
            ValueError: an address is no multiple of 16 bytes.
        """
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        for buffer in int_workspace_buffers:
            check_workspace("int_workspace_buffers", buffer)

    @names_the_peers("MultiLevelCascadeAttentionWrapper.plan")
    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        """Prepares `run`; each list has an element for a level.

        Args:
            causal: Of the last level; all see the whole of the others.
            window_left: -1. use_fp16_qk_reduction: Taken: products are summed in float32.
        """
        name = "MultiLevelCascadeAttentionWrapper.plan"
        require_default(
            name,
            {
                "pos_encoding_mode": _NO_ROPE,
                "rope_scale": _NO_ROPE,
                "rope_theta": _NO_ROPE,
                "window_left": "a level does not know how far behind it others end; leave it -1",
            },
            {"pos_encoding_mode": "NONE", "window_left": -1},
            locals(),
        )
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(array) != self._num_levels for array in arrays):
            raise ValueError(f"attnops.compat: {name}: every list must have {self._num_levels} elements, one a level")
        levels = []
        for level, given in enumerate(zip(*arrays)):  # no comprehension: a tracer of `locals` stumbles over its cells
            levels.append(self._kept(name, names, level, given, page_size))
        if self._graph and self._levels:
            for kept, made in zip(self._levels, levels):
                kept[3].copy_(made[3])
        else:
            self._levels = levels
        q_dtype = as_dtype(name, "q_data_type", q_data_type)
        self._expected = (q_dtype, as_dtype(name, "kv_data_type", kv_data_type) or q_dtype, page_size)
        self._causal = causal
        self._options: dict[str, Any] = {
            "softmax_scale": head_dim**-0.5 if sm_scale is None else sm_scale,
            "logit_cap": logits_soft_cap or 0.0,
        }

    def _kept(
        self, name: str, names: tuple[str, ...], level: int, given: tuple[Tensor, ...], page_size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A level's arrays as `run` reads them, and its lengths."""
        tensors = [as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)]
        buffers = [array[level] for array in self._buffers]
        bounds, indptr, cells, last = map(keep_in, buffers, tensors, names, (True, True, False, True))
        return bounds, indptr, cells, lengths_of(name, indptr, last, page_size)

    begin_forward = plan

    @names_the_peers("MultiLevelCascadeAttentionWrapper.run", k_pages="of paged_kv_cache", v_pages="of paged_kv_cache")
    def run(self, q: Tensor, paged_kv_cache: Cache) -> Tensor:
        """Attends: ``[T, H_q, D]`` as `q`."""
        name = "MultiLevelCascadeAttentionWrapper.run"
        if not self._levels:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        k_pages, v_pages = split_kv(name, paged_kv_cache, self._kv_layout)
        got = (q.dtype, k_pages.dtype, k_pages.shape[1])
        if got != self._expected:
            what = "dtype of q, dtype of the cache and page_size"
            raise ValueError(f"attnops.compat: {name}: {what} are {got}, planned were {self._expected}")
        out: Tensor | None = None
        lse: Tensor | None = None
        for level, (bounds, indptr, cells, lens) in enumerate(self._levels):
            causal = self._causal and level == self._num_levels - 1
            part, part_lse = extend(
                q, k_pages, v_pages, cells, lens, bounds, indptr=indptr, causal=causal, return_lse=True, **self._options
            )
            assert part_lse is not None
            out, lse = (part, part_lse) if out is None or lse is None else ops.merge_state(out, lse, part, part_lse)
        assert out is not None
        return out

    forward = run


def _over_shared(
    name: str, q: Tensor, k: Tensor, v: Tensor, kv_layout: str, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """All queries over one piece of keys: ``[S, H_kv, D]`` (NHD) or ``[H_kv, S, D]`` (HND)."""
    k, v = split_kv(name, (k.unsqueeze(0), v.unsqueeze(0)), kv_layout)
    bounds = torch.tensor([0, q.shape[0]], dtype=torch.int32, device=q.device)
    lens = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
    cells = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
    return extend(q, k, v, cells, lens, bounds, causal=False, return_lse=True, **options)


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(Workspaces):
    """Decode of requests that share a prefix, which lies apart from their pages.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
    """

    @names_the_peers("BatchDecodeWithSharedPrefixPagedKVCacheWrapper")
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    @names_the_peers("BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward")
    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: torch.dtype | str = "float16",
    ) -> None:
        """Prepares `forward`; arguments as of `BatchDecodeWithPagedKVCacheWrapper.plan`."""
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        table = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._wrapper.plan(*table, *heads, q_data_type=data_type, kv_data_type=data_type)

    @names_the_peers("BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward")
    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Cache) -> Tensor:
        """Attends.

        Args:
            q: ``[B, H_q, D]``.
            k_shared, v_shared: ``[S, H_kv, D]`` (NHD) or ``[H_kv, S, D]`` (HND).
        """
        name = "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward"
        shared, shared_lse = _over_shared(name, q, k_shared, v_shared, self._kv_layout)
        own, own_log2 = self._wrapper.run_return_lse(q, unique_kv_cache)
        assert shared_lse is not None
        return ops.merge_state(own, own_log2 / to_log2(torch.ones_like(own_log2)), shared, shared_lse)[0]


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(Workspaces):
    """Prefill of requests that share a prefix, which lies apart from their pages.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
    """

    @names_the_peers("BatchPrefillWithSharedPrefixPagedKVCacheWrapper")
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        check_kv_layout(type(self).__name__, kv_layout)
        self._device, self._kv_layout = float_workspace_buffer.device, kv_layout
        self._page_size = 0

    @names_the_peers("BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward")
    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Prepares `forward`: ``[B + 1]``, ``[B + 1]``, ``[num_indices]`` and ``[B]`` int32."""
        name = "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward"
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._bounds, self._indptr, self._cells, last = (
            as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)
        )
        self._lens, self._page_size = lengths_of(name, self._indptr, last, page_size), page_size

    @names_the_peers("BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward")
    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attends; `use_fp16_qk_reduction` is taken, products are summed in float32.

        Args:
            q: ``[T, H_q, D]``.
            k_shared, v_shared: ``[S, H_kv, D]`` (NHD) or ``[H_kv, S, D]`` (HND).
            causal: Of the requests' own keys.
        """
        name = "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward"
        require_default(name, {"rope_scale": _NO_ROPE, "rope_theta": _NO_ROPE}, {}, locals())
        if not self._page_size:
            raise RuntimeError(f"attnops.compat: {name}: begin_forward must run first")
        shared, shared_lse = _over_shared(name, q, k_shared, v_shared, self._kv_layout, softmax_scale=sm_scale)
        k_pages, v_pages = split_kv(name, unique_kv_cache, self._kv_layout)
        if k_pages.shape[1] != self._page_size:
            raise refuse(name, f"pages of {k_pages.shape[1]} tokens", f"begin_forward was told {self._page_size}")
        own, own_lse = extend(
            q,
            k_pages,
            v_pages,
            self._cells,
            self._lens,
            self._bounds,
            indptr=self._indptr,
            causal=causal,
            softmax_scale=sm_scale,
            return_lse=True,
        )
        assert shared_lse is not None and own_lse is not None
        return ops.merge_state(own, own_lse, shared, shared_lse)[0]
