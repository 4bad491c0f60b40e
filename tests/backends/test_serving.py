"""Requests that come, reuse prefixes, are prefilled in chunks, decode and go, over real pools and allocators.

Every step's output is compared with float64 attention over each request's own contiguous keys and values.
"""

from __future__ import annotations

import random

import pytest
import torch
from attnops import reference
from attnops.backends import AttentionBackend, get_backend_class
from attnops.layers import RadixAttention
from attnops.pools import (
    MHATokenToKVPool,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    SWAKVPool,
    SWATokenToKVPoolAllocator,
)
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error

PAGE, HEADS, KV_HEADS, DIM, WINDOW, TOKENS = 4, 4, 2, 32, 9, 640
LIMITS = Limits(max_batch_size=6, max_seqlen=160, max_num_tokens=128)
DTYPE = torch.float32


class Request:
    """A row of the pool, and the truth about its tokens."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.k = torch.empty(0, KV_HEADS, DIM)
        self.v = torch.empty(0, KV_HEADS, DIM)
        self.left_window = 0  # tokens whose window pages were given back

    def __len__(self) -> int:
        return self.k.shape[0]


class Server:
    def __init__(self, windowed: bool, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        window = WINDOW if windowed else -1
        spec = AttentionSpec(
            num_q_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=DTYPE,
            page_size=PAGE,
            sliding_window_size=window,
        )
        self.windowed = windowed
        self.layer = RadixAttention(HEADS, DIM, 0.3, KV_HEADS, 1, sliding_window_size=window)
        self.rows = ReqToTokenPool(LIMITS.max_batch_size, LIMITS.max_seqlen)
        shape = (PAGE, DTYPE, KV_HEADS, DIM)
        if windowed:
            # Far too small for all tokens: it works only while pages that left the window are given back.
            self.pool = SWAKVPool(TOKENS, TOKENS // 3, *shape, [0], [1])
            self.allocator = SWATokenToKVPoolAllocator(self.pool)
        else:
            self.pool = MHATokenToKVPool(TOKENS, *shape, 2)
            self.allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE)
        for pages in self.pool.get_kv_buffer(1):
            pages.fill_(float("nan"))
        self.backend: AttentionBackend = get_backend_class("intel_amx")(spec, LIMITS)
        self.live: list[Request] = []
        self.reused = 0

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, DIM, generator=self.generator)

    def admit(self) -> None:
        """A new request, with whole pages of a living one's prefix where that is allowed."""
        rows = self.rows.alloc()
        if rows is None:
            return
        request = Request(rows[0])
        parent = self.rng.choice(self.live) if self.live else None
        if parent is not None and not self.windowed:
            reuse = self.rng.randrange(0, len(parent) // PAGE + 1) * PAGE
            slots = self.rows.slots(parent.row, 0, reuse).clone()
            self.allocator.share(slots)
            self.rows.write(request.row, 0, slots)
            request.k, request.v = parent.k[:reuse].clone(), parent.v[:reuse].clone()
            self.reused += reuse
        self.live.append(request)

    def finish(self, request: Request) -> None:
        self.allocator.free(self.rows.slots(request.row, 0, len(request)))
        self.rows.free(request.row)
        self.live.remove(request)

    def step(self, mode: ForwardMode, requests: list[Request], counts: list[int]) -> float | None:
        """One step of new tokens; the relative error of its output, or None when there was no room."""
        prefix = [len(request) for request in requests]
        after = [old + new for old, new in zip(prefix, counts)]
        last = [int(self.rows.host[r.row, old - 1]) if old else -1 for r, old in zip(requests, prefix)]
        if mode is ForwardMode.DECODE:
            slots = self.allocator.alloc_decode(after, last)
        else:
            slots = self.allocator.alloc_extend(prefix, after, last)
        if slots is None:
            return None
        for request, old, mine in zip(requests, prefix, slots.split(counts)):
            self.rows.write(request.row, old, mine)
        q, k, v = self.random(sum(counts), HEADS), *(self.random(sum(counts), KV_HEADS) for _ in range(2))
        batch = AttentionBatch(
            forward_mode=mode,
            req_pool_indices=torch.tensor([request.row for request in requests]),
            cache_seqlens=torch.tensor(after, dtype=torch.int32),
            num_tokens=sum(counts),
            req_to_token=self.rows.req_to_token,
            out_cache_loc=slots,
            extend_seq_lens=None if mode is ForwardMode.DECODE else torch.tensor(counts, dtype=torch.int32),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )
        self.backend.init_forward_metadata(batch)
        out = self.layer(q, k, v, batch).view(-1, HEADS, DIM)
        expected = []
        for request, new_q, new_k, new_v in zip(requests, q.split(counts), k.split(counts), v.split(counts)):
            request.k, request.v = torch.cat([request.k, new_k]), torch.cat([request.v, new_v])
            window = self.layer.sliding_window_size
            expected.append(reference.attention(new_q, request.k, request.v, softmax_scale=0.3, window_left=window)[0])
            self._leave_window(request)
        return relative_error(out, torch.cat(expected))

    def _leave_window(self, request: Request) -> None:
        """Whole pages that the next token's window does not reach go back."""
        gone = max(len(request) - WINDOW, 0) // PAGE * PAGE
        if self.windowed and gone > request.left_window:
            self.allocator.free_swa(self.rows.slots(request.row, request.left_window, gone))
            request.left_window = gone


@pytest.mark.parametrize("windowed", [False, True])
def test_a_hundred_steps_of_serving_are_right_and_leak_nothing(windowed):
    server = Server(windowed, seed=5)
    refused = 0
    for _ in range(100):
        if len(server.live) < LIMITS.max_batch_size and server.rng.random() < 0.4:
            server.admit()
        for request in [r for r in server.live if len(r) > 120]:
            server.finish(request)
        fresh = [r for r in server.live if len(r) < 40]
        old = [r for r in server.live if len(r) >= 40]
        if fresh and server.rng.random() < 0.6:  # a chunk of each prompt, beside the others' decoding
            mode = ForwardMode.MIXED if old else ForwardMode.EXTEND
            counts = [server.rng.randrange(1, 17) for _ in fresh] + [1] * len(old)
            error = server.step(mode, fresh + old, counts)
        else:
            ready = [r for r in server.live if len(r)]
            error = server.step(ForwardMode.DECODE, ready, [1] * len(ready)) if ready else 0.0
        if error is None:
            refused += 1
            server.finish(server.rng.choice(server.live))
        else:
            assert error <= MAX_RELATIVE_ERROR[DTYPE]
    assert windowed or server.reused > 0, "no prefix was reused: the test tests less than it says"
    for request in list(server.live):
        server.finish(request)
    assert server.allocator.available_size() == (TOKENS // 3 // PAGE * PAGE if windowed else TOKENS)
    assert server.rows.available_size() == LIMITS.max_batch_size
    assert refused < 20, "most steps found room"
