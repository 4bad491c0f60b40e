"""Decode steps whose requests, lengths and page tables are all drawn anew, over one engine's memory."""

from __future__ import annotations

import torch
from attnops.types import AttentionBatch, ForwardMode
from model_zoo import LIMITS, VOCAB, Engine
from torch import Tensor


class RandomSteps:
    """Its cache starts full of random rows, so that any length may be drawn."""

    def __init__(self, engine: Engine) -> None:
        self.engine, pool = engine, engine.pool
        self.page_size = pool.page_size
        for pages in pool.kv_buffer if engine.config.mla else [*pool.k_buffer, *pool.v_buffer]:
            pages.normal_()
        self.random = torch.Generator().manual_seed(1)

    def draw(self, size: int | None = None) -> tuple[Tensor, AttentionBatch]:
        """(input ids, batch) of `size` requests, or of any number; `req_to_token` is rewritten, all of it."""
        engine, random, page_size = self.engine, self.random, self.page_size
        size = self.number(1, LIMITS.max_batch_size) if size is None else size
        pages = torch.randperm(engine.pool.num_pages, generator=random).view(-1, LIMITS.max_seqlen // page_size)
        slots = (pages.unsqueeze(-1) * page_size + torch.arange(page_size)).flatten(1)[:size]
        rows = torch.randperm(engine.rows.size, generator=random)[:size]
        table = torch.zeros(engine.rows.size, LIMITS.max_seqlen, dtype=torch.int32)
        table[rows] = slots.int()
        engine.rows.req_to_token.copy_(table, non_blocking=True)
        lengths = torch.randint(1, LIMITS.max_seqlen + 1, (size,), generator=random)

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(engine.device, non_blocking=True)

        batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=put(rows),
            cache_seqlens=put(lengths.int()),
            num_tokens=size,
            req_to_token=engine.rows.req_to_token,
            out_cache_loc=put(slots.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)),
            positions=put(lengths - 1),
            token_to_kv_pool=engine.pool,
            attn_backend=engine.backend,
        )
        return put(torch.randint(0, VOCAB, (size,), generator=random)), batch

    def number(self, low: int, high: int) -> int:
        """Of [low, high]."""
        return int(torch.randint(low, high + 1, (1,), generator=self.random))
