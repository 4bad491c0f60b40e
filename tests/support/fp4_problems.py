"""Pages of four bits whose scales are NaN where nobody stored, and requests over them."""

from __future__ import annotations

import torch
from attnops import ops, reference

FP4, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
LENGTHS = [0, 1, 5, 63, 64, 150]


def pools(num_pages: int, page_size: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages whose every scale is NaN."""
    codes = torch.full((num_pages, page_size, heads, dim // 2), 0xFF, dtype=torch.uint8)
    return codes.view(FP4), torch.full((num_pages, page_size, heads, dim // 16), 0x7F, dtype=torch.uint8).view(E4M3)


def real(codes, scales, scale=None):
    return reference.dequantize_fp4(codes.view(torch.uint8), scales, scale)


def problem(page_size, heads, kv_heads, dim, seqlen_q, dtype, *, mla=False, seed=0):
    """Requests over shuffled pages; what belongs to nobody is NaN and huge indices."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [prefix + seqlen_q for prefix in LENGTHS]
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    k_pools, v_pools = (pools(len(order), page_size, kv_heads, dim) for _ in range(2))
    scales = torch.tensor([0.8]), torch.tensor([1.3])
    keys, begin = [], 0
    for request, (length, count) in enumerate(zip(lengths, counts)):
        table[request, :count] = order[begin : begin + count].int()
        begin += count
        token = torch.arange(length)
        slots = table[request].long()[token // page_size] * page_size + token % page_size
        k, v = torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype)
        given = (k, None, None) if mla else (k, v, v_pools)
        pages_v, scales_v = (None, None) if mla else v_pools
        ops.store_kv_fp4(
            k_pools[0], pages_v, k_pools[1], scales_v, given[0], given[1], slots,
            k_scale=scales[0], v_scale=None if mla else scales[1],
        )  # fmt: skip

        def of(pool, scale, slots=slots):
            codes = pool[0].view(torch.uint8).flatten(0, 1)[slots]
            return real(codes, pool[1].view(torch.uint8).flatten(0, 1)[slots].view(E4M3), scale)

        k_real = of(k_pools, scales[0])
        keys.append((k_real, k_real[..., :512] if mla else of(v_pools, scales[1])))
    q = torch.randn(len(lengths), seqlen_q, heads, dim, generator=generator).to(dtype)
    return q, k_pools, None if mla else v_pools, table, torch.tensor(lengths, dtype=torch.int32), scales, keys
