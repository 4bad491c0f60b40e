"""FlashInfer's MLA decode, for `attnops.compat.flashinfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops import ops
from attnops.compat._convert import (
    LEAVE_PDL,
    ONE_KERNEL,
    as_int32,
    as_scale,
    as_sinks,
    check_lse,
    joined_latents,
    keep_in,
    refuse,
    require_default,
    with_lse,
)
from attnops.compat._errors import names_the_peers
from attnops.metadata.plan import MlaDecodePlan


class BatchMLAPagedAttentionWrapper:
    """MLA over a CSR page table, on `attnops.ops.mla_decode`.

    `plan` reads `qo_indptr` on the host, as FlashInfer's does; a copy on the CPU costs no synchronization.
    Every request must bring the same number of query tokens.

    Args:
        float_workspace_buffer: Names the device; its memory is not needed.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: With `use_cuda_graph`: buffers that `plan` writes into.
        backend: "auto".
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
        require_default(type(self).__name__, {"backend": ONE_KERNEL}, {"backend": "auto"}, locals())
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph and any(buffer is None for buffer in buffers[1:]):
            raise ValueError("attnops.compat: use_cuda_graph=True needs kv_indptr, kv_indices and kv_len_arr")
        self._device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._buffers = buffers if use_cuda_graph else (None,) * 4
        self._plan: MlaDecodePlan | None = None

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
            qo_indptr, kv_indptr: int32 ``[B + 1]``. kv_indices: int32. kv_len_arr: int32 ``[B]``, tokens per request.
            head_dim_ckv, head_dim_kpe: 512 and 64.

        Raises:
            NotImplementedError: requests bring different numbers of query tokens, or an argument is not honoured.
        """
        name = "BatchMLAPagedAttentionWrapper.plan"
        require_default(name, {"use_profiler": "use a profiler of CUDA"}, {"use_profiler": False}, locals())
        if (head_dim_ckv, head_dim_kpe) != (512, 64):
            raise refuse(name, f"head_dim_ckv={head_dim_ckv}, head_dim_kpe={head_dim_kpe}", "MLA is 512 and 64 here")
        bounds = (kv_len_arr.shape[0] + 1,) if kv_len_arr.dim() == 1 else None
        if qo_indptr.shape != bounds or kv_indptr.shape != bounds or kv_indices.dim() != 1:
            raise ValueError(
                f"attnops.compat: {name}: qo_indptr and kv_indptr must be [B + 1], kv_indices [n] and kv_len_arr [B], "
                f"got {', '.join(str(list(t.shape)) for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))}"
            )
        counts = set(qo_indptr.diff().tolist())
        if len(counts) > 1 or counts == {0}:
            raise refuse(
                name,
                f"qo_indptr with {sorted(counts)} tokens per request",
                "plan requests of one number of tokens together, or use a backend of attnops.backends",
            )
        names, given = (
            ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
            (qo_indptr, kv_indptr, kv_indices, kv_len_arr),
        )
        tensors = [as_int32(name, what, tensor, self._device) for what, tensor in zip(names, given)]
        exact = (True, True, False, True)
        _, self._indptr, self._indices, self._lens = map(keep_in, self._buffers, tensors, names, exact)
        self._page_size, self._causal, self._scale = page_size, causal, sm_scale
        self._dtypes = (q_data_type, kv_data_type)
        key = {
            "batch_size": self._lens.shape[0],
            "seqlen_q": counts.pop() if counts else 1,
            "num_q_heads": num_heads,
            "window_left": -1,
        }
        if self._plan is None or self._plan.key != key:
            if self._plan is not None and self._use_cuda_graph:
                raise ValueError("attnops.compat: use_cuda_graph fixes the geometry: make a wrapper for each")
            self._plan = MlaDecodePlan.allocate(device=self._device, **key)
        ops.mla_decode_plan(self._plan, self._lens)

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q_nope, q_pe: ``[T, H, 512]`` and ``[T, H, 64]``.
            ckv_cache, kpe_cache: ``[P, page_size, 512]`` and ``[P, page_size, 64]``: neighbours in one pool of 576.
            return_lse_base_on_e: Natural log; base 2 otherwise.

        Returns:
            ``out [T, H, 512]``, or ``(out, lse)``: float32 ``[T, H]``, -inf for an empty row.
        """
        name = "BatchMLAPagedAttentionWrapper.run"
        planned = "plan has been told; leave it None"
        instead = {"profiler_buffer": "use a profiler of CUDA", "kv_len": planned, "page_table": planned}
        require_default(name, instead, {}, locals())
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"attnops.compat: {name}: plan must run first")
        pages = joined_latents(name, ckv_cache, kpe_cache)
        got = (q_nope.dtype, pages.dtype, pages.shape[1])
        expected = (*self._dtypes, self._page_size)
        if got != expected:
            raise ValueError(
                f"attnops.compat: {name}: dtype of q_nope, dtype of ckv_cache and page_size are {got}, "
                f"planned were {expected}"
            )
        check_lse(name, lse, q_nope)
        out, natural = ops.mla_decode(
            q_nope,
            pages,
            self._indices,
            self._lens,
            plan,
            kv_indptr=self._indptr,
            softmax_scale=self._scale,
            q_pe=q_pe,
            causal=self._causal,
            out=out,
            return_lse=return_lse or lse is not None,
        )
        return with_lse(out, natural, lse, return_lse, return_lse_base_on_e)


@names_the_peers(
    "trtllm_batch_decode_with_kv_cache_mla",
    q="query",
    kv_pages="kv_cache",
    page_table="block_tables",
    cache_seqlens="seq_lens",
    kv_scale="bmm2_scale",
)
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    *,
    return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnops.ops.mla_decode` with FlashInfer's folded scales; several query tokens are causal among themselves.

    Args:
        query: ``[B, q_len, H, 576]``. kv_cache: ``[P, page_size, 576]`` or ``[P, 1, page_size, 576]``.
        workspace_buffer: Its memory is not needed. qk_nope_head_dim, max_seq_len: Nothing depends on them.
        kv_lora_rank, qk_rope_head_dim: 512 and 64.
        block_tables: int32 ``[B, max_pages]``. seq_lens: int32 ``[B]``.
        bmm1_scale: q scale x k scale x softmax scale, a number. bmm2_scale: of the values; with an FP8 cache the scale
            of the latents, which bmm1_scale must hold, too.
        is_var_seq: Taken: lengths may always differ.
        lse: float32 ``[B, q_len, H]`` or ``[B * q_len, H]``, written when given.
        return_lse_base: "base2" or "basee"; None is base 2.

    Returns:
        ``[B, q_len, H, 512]``, or with `return_lse` ``(out, lse)``, lse in the shape of the given one or
        ``[B * q_len, H]``, -inf for an empty row.
    """
    name = "trtllm_batch_decode_with_kv_cache_mla"
    require_default(
        name,
        {
            "sparse_mla_top_k": "attnops has no sparse MLA; leave it 0",
            "skip_softmax_threshold_scale_factor": "no probability is dropped here; leave it None",
            "enable_pdl": LEAVE_PDL,
            "backend": ONE_KERNEL,
            "uses_shared_paged_kv_idx": "a latent is key and value at once; leave it True",
        },
        {"sparse_mla_top_k": 0, "backend": "auto", "uses_shared_paged_kv_idx": True},
        locals(),
    )
    if (kv_lora_rank, qk_rope_head_dim) != (512, 64):
        raise refuse(name, f"kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}", "512 and 64 are served")
    if isinstance(bmm1_scale, Tensor) or isinstance(bmm2_scale, Tensor):
        raise refuse(name, "bmm1_scale or bmm2_scale=a tensor", "give numbers, with the softmax scale in bmm1_scale")
    if return_lse_base not in (None, "base2", "basee"):
        raise ValueError(
            f"attnops.compat: {name}: return_lse_base must be base2, basee or None, got {return_lse_base!r}"
        )
    if bmm2_scale == 0:
        raise ValueError(f"attnops.compat: {name}: bmm2_scale must not be 0")
    pages = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
    kv_scale = as_scale(name, "bmm2_scale", bmm2_scale, pages)  # the op scales keys by it, too, so bmm1 leaves it out
    batch_size, seqlen_q, num_q_heads, _ = query.shape
    rows = query.flatten(0, 1)
    flat_lse = lse.view(rows.shape[:2]) if lse is not None and lse.shape == query.shape[:3] else lse
    check_lse(name, flat_lse, rows)
    lens = as_int32(name, "seq_lens", seq_lens, query.device)
    plan = MlaDecodePlan.allocate(batch_size, seqlen_q=seqlen_q, num_q_heads=num_q_heads, device=query.device)
    ops.mla_decode_plan(plan, lens)
    result, natural = ops.mla_decode(
        query,
        pages,
        block_tables,
        lens,
        plan,
        softmax_scale=bmm1_scale / bmm2_scale,
        sinks=as_sinks(sinks, num_q_heads, name),
        kv_scale=kv_scale,
        out=out,
        return_lse=return_lse or lse is not None,
    )
    if natural is None:
        return result
    given = with_lse(result, natural.flatten(0, 1), flat_lse, True, return_lse_base == "basee")
    return (result, given[1] if lse is None else lse) if return_lse else result
