"""Page tables in the form that FlashInfer's wrappers take."""

import torch


def csr(problem, page_size: int):
    """FlashInfer's three arrays: dense CSR and the tokens in each last page."""
    counts = -(-problem.cache_seqlens // page_size)
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    rows = [problem.page_table[b, :count] for b, count in enumerate(counts.tolist())]
    last = problem.cache_seqlens - (counts - 1).clamp(min=0) * page_size
    return indptr, torch.cat(rows), last.int()
