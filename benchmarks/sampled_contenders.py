"""Who runs a cell of `bench_decode_sampled.py`: attnops as its backends call it, and every peer that is found.

A peer is asked for every cell that its interface has room for. It may still refuse: that is an error, which the
benchmark names. FlashInfer compiles nothing here (`FLASHINFER_DISABLE_JIT`), unless that variable is set to "". FA3 and
FlashInfer's fa3 out of a pack of selected kernels (`PEERS_COMMON` is set) end the process when a kernel is missing, so
those cells are refused here.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from attnops import ops
from attnops.plan_buffers import DecodePlans
from attnops.types import AttentionSpec, Limits
from sampled_cells import Cell

INT32, BF16, FP8 = torch.int32, torch.bfloat16, torch.float8_e4m3fn
DTYPES = {"bf16": BF16, "fp16": torch.float16, "e4m3": FP8}
PACKED_FA3 = {("bf16", 64), ("bf16", 128), ("bf16", 256), ("bf16", 576), ("e4m3", 128)}
PACKED_FLASHINFER_FA3 = {("bf16", 128), ("bf16", 576)}
XQA_PAGES = (16, 32, 64, 128)
PLAN_EVERY = 32  # calls
Step = Callable[[int], torch.Tensor]  # makes the r-th call, returns out

os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
os.environ.setdefault("FLASHINFER_DECODE_AUTO_CUDNN", "0")  # cuDNN is a contender of its own


class Pool:
    """Memory of random values, which cells view as their caches."""

    def __init__(self, num_bytes: int) -> None:
        self.raw = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self.kv = ""

    def fill(self, kv: str) -> None:
        if kv == self.kv:
            return
        piece = self.raw[: 1 << 28]
        piece.view(DTYPES[kv]).copy_(torch.randn(piece.numel() // DTYPES[kv].itemsize, device="cuda"))
        for other in self.raw[1 << 28 :].split(1 << 28):
            other.copy_(piece[: other.numel()])
        self.kv = kv


class Problem:
    """A cell's tensors: slices of the pool, read by shuffled pages."""

    def __init__(self, cell: Cell, pool: Pool, wanted_bytes: float = 1.5e9) -> None:
        pool.fill(cell.kv)
        self.cell, device = cell, torch.device("cuda")
        counts = torch.tensor([-(-n // cell.page_size) for n in cell.lengths])
        self.num_pages = max(1, int(counts.sum()))
        order = torch.randperm(self.num_pages, device=device).to(INT32)
        columns = -(-cell.context // cell.page_size)
        self.page_table = torch.zeros(len(counts), columns, dtype=INT32, device=device)
        used = torch.arange(columns, device=device) < counts.to(device)[:, None]
        self.page_table[used] = order[: int(counts.sum())]
        self.kv_indices = order
        self.kv_indptr = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=INT32)
        self.last_page_len = torch.tensor([(n - 1) % cell.page_size + 1 if n else 0 for n in cell.lengths], dtype=INT32)
        self.seqlens = torch.tensor(cell.lengths, dtype=INT32, device=device)
        width, self.q_dtype = cell.head_dim, DTYPES[cell.q_type]
        q = torch.randn(len(counts), cell.seqlen_q, cell.heads[0], width, device=device)
        self.q = q.to(self.q_dtype)
        self.sinks = torch.randn(cell.heads[0], device=device) if cell.sinks else None
        self.scale = 1 / math.sqrt(192 if cell.is_mla else cell.head_dim)
        self.data = pool.raw.view(DTYPES[cell.kv])
        self.slice = self.num_pages * cell.page_size * (576 if cell.is_mla else cell.heads[1] * cell.head_dim)
        of_call = self.slice * (1 if cell.is_mla else 2)
        self.rotation = max(1, min(256, self.data.numel() // of_call, math.ceil(wanted_bytes / max(cell.bytes, 1))))

    def kv(self, r: int, hnd: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        cell, r = self.cell, r % self.rotation
        shape = [self.num_pages, cell.page_size, cell.heads[1], cell.head_dim]
        if hnd:
            shape[1], shape[2] = shape[2], shape[1]
        at = 2 * r * self.slice
        return self.data[at : at + self.slice].view(shape), self.data[at + self.slice : at + 2 * self.slice].view(shape)

    def latents(self, r: int) -> torch.Tensor:
        r = r % self.rotation
        return self.data[r * self.slice : (r + 1) * self.slice].view(self.num_pages, self.cell.page_size, 576)

    def relative_error(self, out: torch.Tensor, request: int, hnd: bool = False) -> float:
        """Of one request and its first and last KV heads, against float64."""
        cell, length = self.cell, self.cell.lengths[request]
        actual = out.reshape(len(cell.lengths), cell.seqlen_q, cell.heads[0], -1)[request].double()
        if length == 0:
            return float(actual.abs().max())
        token = torch.arange(length, device="cuda")
        page, row = self.page_table[request].long()[token // cell.page_size], token % cell.page_size
        group = cell.heads[0] // cell.heads[1]
        position = torch.arange(cell.seqlen_q, device="cuda")[:, None] + length - cell.seqlen_q
        hidden = (token > position) | (token < position - cell.window_left if cell.window_left >= 0 else token < 0)
        worst = 0.0
        for head in {0, cell.heads[1] - 1}:
            if cell.is_mla:
                k = self.latents(0)[page, row].double()
                v = k[:, :512]
            else:
                k, v = ((x.transpose(1, 2) if hnd else x)[page, row, head].double() for x in self.kv(0, hnd))
            of_q = slice(head * group, (head + 1) * group)
            scores = torch.einsum("qhd,kd->hqk", self.q[request, :, of_q].double(), k) * self.scale
            scores.masked_fill_(hidden, -math.inf)
            if self.sinks is not None:
                sink = self.sinks[of_q].double()[:, None, None].expand(-1, cell.seqlen_q, 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = scores.softmax(-1)[..., :length]
            expected = torch.einsum("hqk,kd->qhd", weights, v)
            error = (actual[:, of_q] - expected).norm() / expected.norm()
            worst = max(worst, float(error))
        return worst


def attnops_decode(
    problem: Problem, invariant: bool = False, context: int | None = None, **options: Any
) -> tuple[Step, Callable[[], None]]:
    """The call, and the plan of the step. Plans are made as `DecodeSteps` makes them: for more requests than there are.

    Args:
        context: Of another page table over the same pages.
    """
    cell = problem.cell
    table = problem.page_table
    if context is not None:
        columns = -(-max(context, max(cell.lengths)) // cell.page_size)
        table = torch.zeros(len(cell.lengths), columns, dtype=INT32, device="cuda")
        both = min(columns, problem.page_table.shape[1])
        table[:, :both] = problem.page_table[:, :both]
    dims = dict(num_q_heads=cell.heads[0], num_kv_heads=cell.heads[1], head_dim=cell.head_dim)
    spec = AttentionSpec(
        **dims,
        v_head_dim=512 if cell.is_mla else cell.head_dim,
        dtype=problem.q_dtype,
        kv_dtype=DTYPES[cell.kv],
        page_size=cell.page_size,
        sliding_window_size=cell.window_left,
        is_mla=cell.is_mla,
        deterministic=invariant,
    )
    batch = len(cell.lengths)
    most = batch if invariant else max(64, 1 << (batch - 1).bit_length())
    limits = Limits(
        max_batch_size=most, max_seqlen=table.shape[1] * cell.page_size, max_tokens_per_request=cell.seqlen_q
    )
    plan = DecodePlans(spec, limits, most, cell.seqlen_q, problem.q.device).views(batch)[cell.window_left]
    if cell.is_mla:
        out = problem.q.new_empty(*problem.q.shape[:-1], 512)
        more = dict(softmax_scale=problem.scale, **options)

        def step(r: int) -> torch.Tensor:
            return ops.mla_decode(problem.q, problem.latents(r), table, problem.seqlens, plan, out=out, **more)[0]

        return step, lambda: ops.mla_decode_plan(plan, problem.seqlens)
    out = torch.empty_like(problem.q)
    more = dict(window_left=cell.window_left, sinks=problem.sinks, **options)

    def attend(r: int) -> torch.Tensor:
        return ops.xqa_decode(problem.q, *problem.kv(r), table, problem.seqlens, plan, out=out, **more)[0]

    return attend, lambda: ops.xqa_decode_plan(plan, problem.seqlens)


def planned(made: tuple[Step, Callable[[], None]]) -> Step:
    """The calls with the plan before every 32nd."""
    step, plan = made

    def call(r: int) -> torch.Tensor:
        if r % PLAN_EVERY == 0:
            plan()
        return step(r)

    return call


def planned_once(step: Step) -> Step:
    """The calls of a peer that plans before every 32nd, of which each reads its own slice and none plans."""
    step(0)
    return lambda r: step(r * PLAN_EVERY + 1)


def _require_packed(cell: Cell, kernels: set[tuple[str, int]]) -> None:
    if os.environ.get("PEERS_COMMON") and (cell.kv, cell.head_dim) not in kernels:
        raise NotImplementedError("its pack lacks this kernel")


def fa3(problem: Problem) -> Step:
    cell, q, dtype = problem.cell, problem.q, problem.q_dtype
    _require_packed(cell, PACKED_FA3)
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    options: dict[str, Any] = dict(causal=True, num_splits=0, softmax_scale=problem.scale)
    if cell.kv == "e4m3":
        q, dtype = q.to(FP8), FP8
        one = torch.ones(len(cell.lengths), cell.heads[1], device="cuda")
        options.update(q_descale=one, k_descale=one, v_descale=one)
    if cell.window_left >= 0:
        options["window_size"] = (cell.window_left, 0)
    if problem.sinks is not None:
        options["sinks"] = problem.sinks.to(BF16)
    dims = dict(headdim=cell.head_dim)
    if cell.is_mla:
        dims = dict(headdim=64, headdim_v=512)
        options["qv"], q = q[..., :512].contiguous(), q[..., 512:].contiguous()
    held: list[torch.Tensor | None] = [None]

    def call(r: int) -> torch.Tensor:
        if r % PLAN_EVERY == 0 and cell.window_left < 0:
            held[0] = get_scheduler_metadata(
                batch_size=len(cell.lengths),
                max_seqlen_q=cell.seqlen_q,
                max_seqlen_k=problem.page_table.shape[1] * cell.page_size,
                num_heads=cell.heads[0],
                num_heads_k=cell.heads[1],
                cache_seqlens=problem.seqlens,
                qkv_dtype=dtype,
                page_size=cell.page_size,
                causal=True,
                num_splits=0,
                **dims,
            )
        if cell.is_mla:
            latents = problem.latents(r).unsqueeze(2)
            k, v = latents[..., 512:], latents[..., :512]
        else:
            k, v = problem.kv(r)
        more = dict(cache_seqlens=problem.seqlens, page_table=problem.page_table, scheduler_metadata=held[0])
        return flash_attn_with_kvcache(q, k, v, **more, **options)

    return call


def flashinfer(problem: Problem, tensor_cores: bool, backend: str) -> Step:
    """Its decode wrapper. cuDNN alone has sinks there."""
    import flashinfer.decode as decode

    cell, q = problem.cell, problem.q.flatten(0, 1)
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(
        _workspace("wrapper"), "NHD", use_tensor_cores=tensor_cores, backend=backend
    )
    options: dict[str, Any] = dict(q_data_type=q.dtype, kv_data_type=DTYPES[cell.kv], o_data_type=q.dtype)
    options["window_left"] = cell.window_left
    if cell.seqlen_q > 1:
        options["q_len_per_req"] = cell.seqlen_q
    if backend == "cudnn":
        options["block_tables"] = problem.page_table
    where = (problem.kv_indptr, problem.kv_indices, problem.last_page_len)
    wrapper.plan(*where, *cell.heads, cell.head_dim, cell.page_size, **options)
    out = torch.empty_like(q)
    sinks = {} if problem.sinks is None else dict(sinks=problem.sinks)
    return lambda r: wrapper.run(q, problem.kv(r), out=out, **sinks)


def flashinfer_extend(problem: Problem, backend: str) -> Step:
    """Its wrappers of extends: several tokens of a request, sinks, and all that its fa3 kernels serve."""
    cell, q = problem.cell, problem.q.flatten(0, 1)
    if backend == "fa3":
        _require_packed(cell, PACKED_FLASHINFER_FA3)
    from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    types: dict[str, Any] = dict(q_data_type=q.dtype, kv_data_type=DTYPES[cell.kv])
    if problem.sinks is None:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace("wrapper"), "NHD", backend=backend)
        more: tuple[Any, ...] = ()
    else:
        dims = dict(head_dim_qk=cell.head_dim, head_dim_vo=cell.head_dim, window_left=cell.window_left)
        wrapper = BatchAttentionWithAttentionSinkWrapper(_workspace("wrapper"), "NHD", backend=backend, **types, **dims)
        more = (problem.sinks, problem.scale)
    rows = torch.arange(len(cell.lengths) + 1, dtype=INT32) * cell.seqlen_q
    where = (rows, problem.kv_indptr, problem.kv_indices, problem.last_page_len)
    rules = dict(causal=True, sm_scale=problem.scale, window_left=cell.window_left)
    wrapper.plan(*where, *cell.heads, cell.head_dim, cell.page_size, **rules, **types)
    out = torch.empty_like(q)
    return lambda r: wrapper.run(q, problem.kv(r), *more, out=out)


def xqa(problem: Problem, hnd: bool) -> Step:
    import flashinfer.decode as decode

    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # its modules expect the driver's symbols to be there
    cell, seqlen_q = problem.cell, problem.cell.seqlen_q
    q, out = problem.q.flatten(0, 1), torch.empty_like(problem.q if seqlen_q > 1 else problem.q.squeeze(1))
    options: dict[str, Any] = dict(bmm1_scale=problem.scale, bmm2_scale=1.0, kv_layout="HND" if hnd else "NHD")
    options |= dict(window_left=cell.window_left, sinks=problem.sinks)
    if seqlen_q > 1:
        options |= dict(q_len_per_req=seqlen_q, mask=causal_words(len(cell.lengths), seqlen_q).to(q.device))
    where = (problem.page_table, problem.seqlens, max(cell.lengths))

    def call(r: int) -> torch.Tensor:
        kv = problem.kv(r, hnd)
        decode.xqa_batch_decode_with_kv_cache(q, kv, _workspace("xqa"), *where, out=out, **options)
        return out

    return call


def causal_words(batch_size: int, seqlen_q: int) -> torch.Tensor:
    """uint16 ``[B, seqlen_q, words]``: XQA's mask of draft tokens, each of which sees itself and those before it."""
    words = -(-seqlen_q // 32) * 2
    token, bit = torch.arange(seqlen_q)[:, None], torch.arange(16 * words)
    weights = 1 << (bit % 16)
    packed = ((bit <= token) * weights).view(seqlen_q, words, 16).sum(-1)
    return packed.to(torch.uint16).expand(batch_size, -1, -1).contiguous()


def flashinfer_mla(problem: Problem, backend: str) -> Step:
    cell, q = problem.cell, problem.q.flatten(0, 1)
    if backend == "fa3":
        _require_packed(cell, PACKED_FLASHINFER_FA3)
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    wrapper = BatchMLAPagedAttentionWrapper(_workspace("wrapper"), backend=backend)
    rows = torch.arange(len(cell.lengths) + 1, dtype=INT32) * cell.seqlen_q
    where = MLAPlanMetadata.csr(rows, problem.kv_indptr, problem.kv_indices, problem.seqlens.cpu())
    types = dict(q_data_type=q.dtype, kv_data_type=DTYPES[cell.kv], query_layout="split", kv_cache_layout="split")
    dims = dict(num_heads=cell.heads[0], head_dim_ckv=512, head_dim_kpe=64, page_size=cell.page_size)
    wrapper.plan(metadata=where, causal=cell.seqlen_q > 1, sm_scale=problem.scale, **dims, **types)
    scales = dict(ckv_scale=1.0, kpe_scale=1.0) if cell.kv == "e4m3" else {}
    out, query = q.new_empty(*q.shape[:-1], 512), (q[..., :512], q[..., 512:])

    def call(r: int) -> torch.Tensor:
        latents = problem.latents(r)
        wrapper.run(query=query, kv_cache=(latents[..., :512], latents[..., 512:]), out=out, **scales)
        return out

    return call


def flashmla(problem: Problem) -> Step:
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    cell, q, planned = problem.cell, problem.q, (get_mla_metadata()[0],)
    options: dict[str, Any] = dict(softmax_scale=problem.scale, causal=cell.seqlen_q > 1)
    if cell.kv == "e4m3":
        one = torch.ones(1, dtype=torch.float32, device="cuda")
        planned = get_mla_metadata(problem.seqlens, cell.rows, 1, is_fp8_kvcache=True)
        q = q.to(FP8)
        options.update(is_fp8_kvcache=True, descale_q=one, descale_k=one)
    where = (problem.page_table, problem.seqlens, 512)
    return lambda r: flash_mla_with_kvcache(q, problem.latents(r).unsqueeze(2), *where, *planned, **options)[0]


@functools.cache
def _workspace(owner: str) -> torch.Tensor:
    """XQA keeps semaphores in its own, which must be zero: nobody else may write there."""
    return torch.zeros(768 << 20, dtype=torch.uint8, device="cuda")


def peers(cell: Cell) -> list[tuple[str, Callable[[Problem], Step], bool]]:
    """(name, how to prepare it, whether its pool is HND) of those that may take the cell; each may still refuse."""
    found: list[tuple[str, Callable[[Problem], Step], bool]] = []

    def add(name: str, prepare: Callable[..., Step], *arguments: Any, hnd: bool = False) -> None:
        found.append((name, lambda problem: prepare(problem, *arguments), hnd))

    is_16_bit = cell.kv != "e4m3"
    if cell.is_mla:
        if cell.page_size == 64:
            add("FlashMLA", flashmla)
        if is_16_bit:
            add("FA3 qv", fa3)
        add("FlashInfer fa2", flashinfer_mla, "fa2")
        add("FlashInfer fa3", flashinfer_mla, "fa3")
        return found
    add("FA3", fa3)
    if cell.seqlen_q > 1 or cell.sinks:
        add("FlashInfer fa2", flashinfer_extend, "fa2")
    else:
        add("FlashInfer fa2", flashinfer, True, "fa2")
        add("FlashInfer cuda-core", flashinfer, False, "auto")
    if is_16_bit:
        add("FlashInfer fa3", flashinfer_extend, "fa3")
        if cell.page_size > 1 and cell.head_dim <= 128:
            add("cuDNN", flashinfer, True, "cudnn")
    if cell.page_size in XQA_PAGES:
        add("XQA", xqa, False)
        add("XQA hnd", xqa, True, hnd=True)
    return found
