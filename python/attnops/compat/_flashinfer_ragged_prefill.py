"""FlashInfer's prefill over ragged keys, and of one request, for `attnops.compat.flashinfer`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from attnops.compat._convert import FP4_CACHE, as_int32, check_lse, dequantized, keep_in, require_default
from attnops.compat._errors import names_the_peers
from attnops.compat._extend import varlen
from attnops.compat._flashinfer_prefill import Prefill
from attnops.compat._flashinfer_workspace import ReturnsLse
from attnops.compat._positions import biased_keys, llama_angles, owner_of, rotate


class BatchPrefillWithRaggedKVCacheWrapper(ReturnsLse):
    """Prefill over ragged keys and values, on `attnops.ops.fmha_varlen`. Arguments as of the wrapper over pages."""

    _NAME = "BatchPrefillWithRaggedKVCacheWrapper"

    @names_the_peers("BatchPrefillWithRaggedKVCacheWrapper")
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if use_cuda_graph and (qo_indptr_buf is None or kv_indptr_buf is None):
            raise ValueError("attnops.compat: use_cuda_graph=True needs qo_indptr_buf and kv_indptr_buf")
        self._buffers = (qo_indptr_buf, kv_indptr_buf) if use_cuda_graph else (None, None)
        masks = (custom_mask_buf, mask_indptr_buf)
        kind = (masks, backend, jit_args, jit_kwargs)
        self._prefill = Prefill(self._NAME, float_workspace_buffer, kv_layout, use_cuda_graph, *kind)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._prefill.graph

    @property
    def _plan_info(self) -> Any:
        """What engines look at to learn whether `plan` has run."""
        return self._prefill if self._prefill.planned else None

    @names_the_peers("BatchPrefillWithRaggedKVCacheWrapper.plan")
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Prepares `run`. `kv_indptr`: int32 ``[B + 1]``; `seq_lens` and what follows say the same, and are taken.

        Args:
            qo_indptr, kv_indptr: With `backend="cudnn"` in elements, as that backend's users give them.
            v_indptr, o_indptr: Of that backend, taken: v stands as k does, the output as q. Of others None.
        """
        given = locals()  # before any local of its own: a tracer reads them all
        name, prefill = f"{self._NAME}.plan", self._prefill
        if not prefill.cudnn:
            require_default(name, dict.fromkeys(("v_indptr", "o_indptr"), "v lies as k does, out as q"), {}, given)
        bounds = as_int32(name, "qo_indptr", qo_indptr, prefill.device)
        bounds_k = as_int32(name, "kv_indptr", kv_indptr, prefill.device)
        if prefill.cudnn:
            bounds, bounds_k = bounds // (num_qo_heads * head_dim_qk), bounds_k // (num_kv_heads * head_dim_qk)
        bounds = keep_in(self._buffers[0], bounds, "qo_indptr", True)
        bounds_k = keep_in(self._buffers[1], bounds_k, "kv_indptr", True)
        self._prefill.plan(given, bounds, bounds_k[1:] - bounds_k[:-1], bounds_k)

    begin_forward = plan

    @names_the_peers("BatchPrefillWithRaggedKVCacheWrapper.run")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends: q ``[T, H_q, D]``, k ``[T_k, H_kv, D]``, v ``[T_k, H_kv, D_v]``, HND with heads first.

        Args:
            o_scale: The output is divided by this before it is cast, so real = stored x scale.
        """
        name, prefill = f"{self._NAME}.run", self._prefill
        require_default(name, {"kv_cache_sf": FP4_CACHE}, {}, locals())
        if o_scale is not None and not 0 < o_scale < math.inf:
            raise ValueError(f"attnops.compat: {name}: o_scale must be a finite positive value, got {o_scale}")
        if prefill.kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        window = prefill.check(name, q, k, None)
        check_lse(name, lse, q)
        options = prefill.options(name, q, q_scale, k_scale, v_scale, args)
        rows = prefill.queries(name, dequantized(q, args), options)
        assert prefill.bounds_k is not None
        if prefill.rope is not None or prefill.alibi:
            k, v = _changed(k, prefill.bounds_k, prefill.rope).to(rows.dtype), v.to(rows.dtype)
        bounds = prefill.masked.bounds if prefill.masked is not None else prefill.bounds
        plan = prefill.tiles(rows, window)
        result = varlen(
            rows,
            k,
            v,
            bounds,
            prefill.bounds_k,
            window_left=window,
            plan=plan,
            return_lse=return_lse or lse is not None,
            **options,
        )
        return prefill.finish(result, q, out, lse, return_lse, o_scale)

    @names_the_peers("BatchPrefillWithRaggedKVCacheWrapper.forward")
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=return_lse)


def _changed(k: Tensor, bounds: Tensor, rope: tuple[float | None, float | None] | None) -> Tensor:
    """Ragged keys turned at their positions, or with ALiBi's dimensions."""
    token, bounds = torch.arange(k.shape[0], device=k.device), bounds.long()
    request = owner_of(token, bounds)
    if rope is None:
        return biased_keys(k, token - bounds[request + 1] + 1)
    return rotate(k, *llama_angles(token - bounds[request], k.shape[-1], *rope), interleaved=False)


@names_the_peers("single_prefill_with_kv_cache")
def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One request: q ``[S_q, H_q, D]``, k and v ``[S_k, H_kv, D]`` (HND: ``[H_kv, S_k, D]``).

    Args:
        scale_q, scale_k, scale_v: Of FP8: float32 ``[H_q]``, ``[H_kv]``, ``[H_kv]``.
        custom_mask: bool ``[S_q, S_k]``.
        packed_custom_mask: Its bits. Others as of the wrappers.

    Returns:
        ``out``, or ``(out, lse)``: base 2.
    """
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(q, kv_layout)
    tokens = k.shape[0] if kv_layout == "NHD" else k.shape[1]
    # A mask's lengths are read on the host. Others are made on the device: a graph captures no copy from the host.
    home = q.device if custom_mask is None and packed_custom_mask is None else torch.device("cpu")
    step = torch.arange(2, dtype=torch.int32, device=home)
    bounds, bounds_k = step * q.shape[0], step * tokens
    wrapper.plan(
        bounds,
        bounds_k,
        q.shape[1],
        k.shape[1] if kv_layout == "NHD" else k.shape[0],
        q.shape[2],
        v.shape[2],
        custom_mask,
        packed_custom_mask,
        causal,
        pos_encoding_mode,
        use_fp16_qk_reduction,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        q.dtype,
        k.dtype,
        o_dtype,
    )
    args: list[Tensor] = []
    given = (scale_q, scale_k, scale_v)
    if any(scale is not None for scale in given):
        counts = (q.shape[1], *2 * wrapper._prefill.heads[1:])
        args = [
            torch.ones(count, device=q.device) if scale is None else scale.reshape(-1).expand(count)
            for scale, count in zip(given, counts)
        ]
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_sf": kv_cache_sf}
    return wrapper.run(q, k, v, *args, return_lse=return_lse, **options)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)
