"""Attention problems that punish every read of memory that does not belong to a request.

Pools hold NaN wherever no token lives (unused pages, tails of pages, gaps of a larger pool), page tables hold 2**30
beyond a request's length, and pages are shuffled. Everything is made on the CPU from a seed, then moved with
`.to(device)`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from attnops import reference
from torch import Tensor

HUGE_INDEX = 2**30
FP8 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_NAN = 0x7F  # of both
FP8_MAX = 448.0
LAYOUTS = ("nhd", "hnd", "joint", "slice")


class _Movable:
    """A dataclass whose tensors move together; views keep their strides."""

    def to(self, device: str):
        if torch.device(device).type == "cpu":
            return self
        moved = {f.name: _move(getattr(self, f.name), device) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **moved)


def _move(value, device: str):
    if not isinstance(value, Tensor):
        return value
    if value.is_contiguous() or value.numel() == 0:
        return value.to(device)
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).to(device)  # all of it, poison included
    moved = torch.empty(0, dtype=value.dtype, device=device)
    return moved.set_(storage.untyped_storage(), value.storage_offset(), value.shape, value.stride())


@dataclasses.dataclass(frozen=True)
class PagedProblem(_Movable):
    """Queries and paged KV of a batch. `expected()` is the float64 answer on the stored (rounded) values."""

    q: Tensor  # [T, H_q, D], contiguous; request b's rows at cu_seqlens_q[b]
    k_pages: Tensor  # [P, page_size, H_kv, D]
    v_pages: Tensor
    page_table: Tensor  # int32 [B, max_pages]
    kv_indptr: Tensor  # int32 [B + 1]: the same pages as CSR
    kv_indices: Tensor  # int32 [num_indices]
    cache_seqlens: Tensor  # int32 [B]
    cu_seqlens_q: Tensor  # int32 [B + 1]
    k_scale: Tensor | None  # float32 [1] or [H_kv]; FP8 pools only
    v_scale: Tensor | None
    k_exact: Tensor  # [sum of cache_seqlens, H_kv, D] float32: what was asked to be stored, before any quantization
    v_exact: Tensor

    @property
    def batch_size(self) -> int:
        return self.cache_seqlens.numel()

    @property
    def q_by_request(self) -> Tensor:
        """[B, S_q, H_q, D]; every request must have the same S_q."""
        return self.q.unflatten(0, (self.batch_size, -1)) if self.batch_size else self.q.unsqueeze(0)[:0]

    def expected(self, **options) -> tuple[Tensor, Tensor]:
        """(out [T, H_q, D], lse [T, H_q]) in float64, on the CPU; `options` of `reference.paged_attention`."""
        cpu = self.to("cpu") if self.q.is_cpu else dataclasses.replace(self, **_on_cpu(self))
        return reference.paged_attention(
            cpu.q,
            cpu.k_pages,
            cpu.v_pages,
            cpu.page_table,
            cpu.cache_seqlens,
            cu_seqlens_q=cpu.cu_seqlens_q,
            k_scale=cpu.k_scale,
            v_scale=cpu.v_scale,
            **options,
        )

    def expected_unquantized(self, **options) -> tuple[Tensor, Tensor]:
        """As `expected`, on the values before quantization."""
        bounds = torch.tensor([0, *itertools.accumulate(self.cache_seqlens.tolist())])
        q, k, v = self.q.cpu(), self.k_exact.cpu(), self.v_exact.cpu()
        return reference.ragged_attention(q, k, v, self.cu_seqlens_q.cpu(), bounds, **options)


@dataclasses.dataclass(frozen=True)
class MlaProblem(_Movable):
    """Absorbed queries and paged latents of a batch."""

    q: Tensor  # [T, H_q, 576]
    kv_pages: Tensor  # [P, page_size, 576], or uint8 [P, page_size, 656]
    page_table: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    kv_scale: Tensor | None  # float32 [1]; FP8 pools only
    latent_exact: Tensor  # [sum of cache_seqlens, 576] float32

    batch_size = PagedProblem.batch_size
    q_by_request = PagedProblem.q_by_request

    def expected(self, **options) -> tuple[Tensor, Tensor]:
        cpu = self if self.q.is_cpu else dataclasses.replace(self, **_on_cpu(self))
        return reference.mla_attention(
            cpu.q,
            cpu.kv_pages,
            cpu.page_table,
            cpu.cache_seqlens,
            cu_seqlens_q=cpu.cu_seqlens_q,
            kv_scale=cpu.kv_scale,
            **options,
        )

    def expected_unquantized(self, **options) -> tuple[Tensor, Tensor]:
        bounds = torch.tensor([0, *itertools.accumulate(self.cache_seqlens.tolist())])
        latent = self.latent_exact.cpu().unsqueeze(1)
        value = latent[..., : reference.MLA_HEAD_DIM_V]
        return reference.ragged_attention(self.q.cpu(), latent, value, self.cu_seqlens_q.cpu(), bounds, **options)


@dataclasses.dataclass(frozen=True)
class RaggedProblem(_Movable):
    """Queries, keys and values of a batch, one request after the other; NaN rows follow the last."""

    q: Tensor  # [T + padding, H_q, D_qk]
    k: Tensor  # [T_k + padding, H_kv, D_qk]
    v: Tensor  # [T_k + padding, H_kv, D_v]
    cu_seqlens_q: Tensor  # int32 [B + 1]
    cu_seqlens_k: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def expected(self, **options) -> tuple[Tensor, Tensor]:
        """(out, lse); rows of no request hold zeros and -inf."""
        cpu = self if self.q.is_cpu else dataclasses.replace(self, **_on_cpu(self))
        return reference.ragged_attention(
            cpu.q, cpu.k, cpu.v, cpu.cu_seqlens_q, cpu.cu_seqlens_k, k_scale=cpu.k_scale, v_scale=cpu.v_scale, **options
        )


def _on_cpu(problem) -> dict:
    values = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisoned(shape, dtype: torch.dtype) -> Tensor:
    """NaN in every element; for uint8 rows 0xFF, which is NaN in e4m3, bf16 and float32 alike."""
    if dtype in (FP8, E5M2):
        return torch.full(shape, FP8_NAN, dtype=torch.uint8).view(dtype)
    return torch.full(shape, 0xFF if dtype == torch.uint8 else math.nan, dtype=dtype)


def write_tokens(pages: Tensor, page: Tensor, offset: Tensor, tokens: Tensor) -> None:
    """pages[page, offset] = tokens, for every dtype."""
    if pages.dtype in (FP8, E5M2):
        pages, tokens = pages.view(torch.uint8), tokens.view(torch.uint8)
    pages[page, offset] = tokens


def quantize(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """[..., H, D] float32 to the stored dtype."""
    quotient = values if scale is None else values / scale.view(-1, 1)
    return (quotient.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else quotient).to(dtype)  # torch makes NaN of more


def empty_pools(num_pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, layout: str):
    """A poisoned K pool and V pool [P, page_size, H_kv, D] with the strides of `layout`."""
    if layout == "joint":
        joint = poisoned((num_pages, 2, page_size, heads, dim), dtype)
        return joint[:, 0], joint[:, 1]
    pools = []
    for _ in range(2):
        if layout == "nhd":
            pools.append(poisoned((num_pages, page_size, heads, dim), dtype))
        elif layout == "hnd":
            pools.append(poisoned((num_pages, heads, page_size, dim), dtype).transpose(1, 2))
        elif layout == "slice":
            wide = poisoned((num_pages + 3, page_size + 1, heads + 2, dim + 16), dtype)
            pools.append(wide[2:-1, :page_size, 1:-1, :dim])
        else:
            raise ValueError(f"layout {layout!r} is not one of {LAYOUTS}")
    return tuple(pools)


class _Paging:
    """Shuffled pages for a batch, in both forms, with huge indices wherever no token lives."""

    def __init__(self, cache_seqlens, page_size: int, spare_pages: int, generator: torch.Generator):
        self.counts = [-(-length // page_size) for length in cache_seqlens]
        self.num_pages = sum(self.counts) + spare_pages
        order = torch.randperm(self.num_pages, generator=generator).to(torch.int32)
        batch, columns = len(self.counts), max(self.counts, default=0) + 1
        self.page_table = torch.full((batch, columns), HUGE_INDEX, dtype=torch.int32)
        cells = [torch.full((1,), HUGE_INDEX, dtype=torch.int32)]  # the first request does not start at 0
        indptr, slots, taken = [1], [], 0
        for request, (length, count) in enumerate(zip(cache_seqlens, self.counts, strict=True)):
            mine = order[taken : taken + count]
            taken += count
            self.page_table[request, :count] = mine
            unused = request % 2  # every other request owns a cell that it does not need
            cells += [mine, torch.full((unused,), HUGE_INDEX, dtype=torch.int32)]
            indptr.append(indptr[-1] + count + unused)
            token = torch.arange(length)
            slots.append(mine.long()[token // page_size] * page_size + token % page_size)
        self.kv_indices = torch.cat(cells)
        self.kv_indptr = torch.tensor(indptr, dtype=torch.int32)
        slot = torch.cat([torch.zeros(0, dtype=torch.long), *slots])
        self.page, self.offset = slot // page_size, slot % page_size  # of every token, requests one after the other


def _cumulative(lengths) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _per_request(seqlen_q, batch: int) -> list[int]:
    return [seqlen_q] * batch if isinstance(seqlen_q, int) else list(seqlen_q)


def paged_problem(
    cache_seqlens,
    seqlen_q=1,
    *,
    num_q_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    scales: str = "tensor",
    layout: str = "nhd",
    spare_pages: int = 3,
    seed: int = 0,
) -> PagedProblem:
    """Random paged attention.

    Args:
        cache_seqlens: Tokens per request, new ones included.
        seqlen_q: Query tokens per request: one number, or one per request.
        kv_dtype: `dtype` when None; `FP8` and `E5M2` add scales.
        scales: "none", "tensor" or "head": which scales an FP8 pool has.
        layout: One of `LAYOUTS`.
    """
    generator = generator_of(seed)
    seqlens_q = _per_request(seqlen_q, len(cache_seqlens))
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    paging = _Paging(cache_seqlens, page_size, spare_pages, generator)
    tokens = sum(cache_seqlens)
    q = torch.randn(sum(seqlens_q), num_q_heads, head_dim, generator=generator).to(dtype)
    k = torch.randn(tokens, num_kv_heads, head_dim, generator=generator).to(dtype).float()
    v = torch.randn(tokens, num_kv_heads, head_dim, generator=generator).to(dtype).float()
    k_scale = v_scale = None
    if kv_dtype in (FP8, E5M2) and scales != "none":
        count = num_kv_heads if scales == "head" else 1
        k_scale = 0.01 + 0.05 * torch.rand(count, generator=generator)
        v_scale = 0.01 + 0.05 * torch.rand(count, generator=generator)
    k_pages, v_pages = empty_pools(paging.num_pages, page_size, num_kv_heads, head_dim, kv_dtype, layout)
    write_tokens(k_pages, paging.page, paging.offset, quantize(k, kv_dtype, k_scale))
    write_tokens(v_pages, paging.page, paging.offset, quantize(v, kv_dtype, v_scale))
    return PagedProblem(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=paging.page_table,
        kv_indptr=paging.kv_indptr,
        kv_indices=paging.kv_indices,
        cache_seqlens=torch.tensor(cache_seqlens, dtype=torch.int32),
        cu_seqlens_q=_cumulative(seqlens_q),
        k_scale=k_scale,
        v_scale=v_scale,
        k_exact=k,
        v_exact=v,
    )


def mla_problem(
    cache_seqlens,
    seqlen_q=1,
    *,
    num_q_heads: int = 16,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    strided: bool = False,
    spare_pages: int = 3,
    seed: int = 0,
) -> MlaProblem:
    """Random MLA decode.

    Args:
        kv_dtype: `dtype` when None; `FP8`, `E5M2`: with one scale; `torch.uint8`: rows of 656 bytes.
        strided: The pool is a slice of a larger one.
    """
    generator = generator_of(seed)
    seqlens_q = _per_request(seqlen_q, len(cache_seqlens))
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    paging = _Paging(cache_seqlens, page_size, spare_pages, generator)
    dim = reference.MLA_HEAD_DIM_QK
    q = torch.randn(sum(seqlens_q), num_q_heads, dim, generator=generator).to(dtype)
    latent = torch.randn(sum(cache_seqlens), dim, generator=generator).to(dtype).float()
    kv_scale = torch.tensor([0.02]) if kv_dtype in (FP8, E5M2) else None
    if kv_dtype == torch.uint8:
        stored = reference.pack_mla_fp8_rows(latent)
    else:
        stored = quantize(latent.unsqueeze(1), kv_dtype, kv_scale).squeeze(1)
    width = stored.shape[-1]
    if strided:
        kv_pages = poisoned((paging.num_pages + 3, page_size + 1, width + 16), kv_dtype)[2:-1, :page_size, :width]
    else:
        kv_pages = poisoned((paging.num_pages, page_size, width), kv_dtype)
    write_tokens(kv_pages, paging.page, paging.offset, stored)
    return MlaProblem(
        q=q,
        kv_pages=kv_pages,
        page_table=paging.page_table,
        kv_indptr=paging.kv_indptr,
        kv_indices=paging.kv_indices,
        cache_seqlens=torch.tensor(cache_seqlens, dtype=torch.int32),
        cu_seqlens_q=_cumulative(seqlens_q),
        kv_scale=kv_scale,
        latent_exact=latent,
    )


def ragged_problem(
    seqlens_q,
    seqlens_k=None,
    *,
    num_q_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    strided: bool = False,
    padding: int = 3,
    seed: int = 0,
) -> RaggedProblem:
    """Random ragged attention.

    Args:
        seqlens_k: As `seqlens_q` when None.
        strided: q, k and v are views into one fused projection [tokens, H_q + 2 H_kv, D]; needs equal lengths and dims.
        padding: NaN rows after the last request.
    """
    generator = generator_of(seed)
    seqlens_k = list(seqlens_q) if seqlens_k is None else list(seqlens_k)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    kv_dtype = dtype if kv_dtype is None else kv_dtype

    def padded(tokens: int, heads: int, dim: int, stored: torch.dtype) -> Tensor:
        rows = poisoned((tokens + padding, heads, dim), stored)
        values = torch.randn(tokens, heads, dim, generator=generator).to(dtype).float()
        write_tokens(rows.unsqueeze(0), torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), values.to(stored))
        return rows

    if strided:
        assert seqlens_k == list(seqlens_q) and head_dim_v == head_dim and kv_dtype == dtype
        fused = padded(sum(seqlens_q), num_q_heads + 2 * num_kv_heads, head_dim, dtype)
        q, k, v = fused.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    else:
        q = padded(sum(seqlens_q), num_q_heads, head_dim, dtype)
        k = padded(sum(seqlens_k), num_kv_heads, head_dim, kv_dtype)
        v = padded(sum(seqlens_k), num_kv_heads, head_dim_v, kv_dtype)
    scaled = kv_dtype in (FP8, E5M2)
    return RaggedProblem(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=_cumulative(seqlens_q),
        cu_seqlens_k=_cumulative(seqlens_k),
        k_scale=torch.full((num_kv_heads,), 1.25) if scaled else None,
        v_scale=torch.full((1,), 0.75) if scaled else None,
    )


def hide_unseen(problem: PagedProblem | MlaProblem, seen: Tensor) -> None:
    """NaN in keys and values of a CPU problem that no row sees: those of the last M whose ``seen [B, M]`` is off."""
    pools = [problem.kv_pages] if isinstance(problem, MlaProblem) else [problem.k_pages, problem.v_pages]
    page_size = pools[0].shape[1]
    for request, length in enumerate(problem.cache_seqlens.tolist()):
        for place in (~seen[request]).nonzero().flatten().tolist():
            position = length - seen.shape[1] + place
            if position < 0:
                continue
            page = int(problem.page_table[request, position // page_size])
            for pool in pools:
                one_byte = pool.dtype in (FP8, E5M2)
                (pool.view(torch.uint8) if one_byte else pool)[page, position % page_size] = (
                    FP8_NAN if one_byte else 0xFF if pool.dtype == torch.uint8 else math.nan
                )


def random_tree_mask(seqlens_q, *, seed: int = 0) -> Tensor:
    """Bits ``[T, ceil(max S_q / 8)]`` uint8 of random trees: token i sees itself and the ancestors that it drew."""
    generator = generator_of(seed)
    width = max(seqlens_q, default=1)
    rows = []
    for seqlen in seqlens_q:
        visible = torch.zeros(seqlen, width, dtype=torch.bool)
        for token in range(seqlen):
            if token:
                visible[token] = visible[int(torch.randint(token, (1,), generator=generator))]
            visible[token, token] = True
        rows.append(visible)
    visible = torch.cat([torch.zeros(0, width, dtype=torch.bool), *rows])
    return reference.pack_tree_mask(visible)
