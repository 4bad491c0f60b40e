"""The model, cache and decode step that bench_step_overhead.py times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from attnops.backends import select_backend
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from torch import Tensor, nn

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, WIDTH, HIDDEN, VOCAB = 32, 8, 128, 4096, 14336, 8192
PAGE_SIZE = 64


class Block(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        options = {"bias": False, "dtype": BF16, "device": DEVICE}
        self.norm = nn.Parameter(torch.ones(WIDTH, dtype=BF16, device=DEVICE))
        self.mlp_norm = nn.Parameter(torch.ones(WIDTH, dtype=BF16, device=DEVICE))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, **options)
        self.out = nn.Linear(HEADS * DIM, WIDTH, **options)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, **options)
        self.down = nn.Linear(HIDDEN, WIDTH, **options)
        self.attention: nn.Module = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch | None) -> Tensor:
        rows = self.qkv(F.rms_norm(x, (WIDTH,), self.norm)).view(-1, HEADS + 2 * KV_HEADS, DIM)
        turned = rotate(rows[:, : HEADS + KV_HEADS], cos, sin)
        q, k, v = turned[:, :HEADS], turned[:, HEADS:], rows[:, HEADS + KV_HEADS :]
        x = x + self.out(self.attention(q, k, v, batch))
        gate, up = self.gate_up(F.rms_norm(x, (WIDTH,), self.mlp_norm)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Model(nn.Module):
    """``model(input_ids, positions, batch) -> logits``. Random weights: only the time matters here."""

    def __init__(self, layers: int, max_context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, dtype=BF16, device=DEVICE)
        self.blocks = nn.ModuleList(Block(i) for i in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=BF16, device=DEVICE)
        angle = torch.outer(torch.arange(max_context), 1e4 ** (-torch.arange(DIM // 2) / (DIM // 2))).to(DEVICE)
        self.register_buffer("cos", angle.cos().to(BF16).unsqueeze(1))
        self.register_buffer("sin", angle.sin().to(BF16).unsqueeze(1))

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch | None = None) -> Tensor:
        x, cos, sin = self.embedding(input_ids), self.cos[positions], self.sin[positions]
        for block in self.blocks:
            x = block(x, cos, sin, batch)
        return self.head(x)


class Setup:
    """A model, a paged cache of random rows, and one decode step of equal lengths."""

    def __init__(self, layers: int, batch_size: int, length: int) -> None:
        self.layers, self.batch_size, self.length = layers, batch_size, length
        context = -(-length // PAGE_SIZE) * PAGE_SIZE
        self.context = context
        self.model = Model(layers, context)
        spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE_SIZE, dtype=BF16)
        self.backend = select_backend(spec, Limits(max_batch_size=batch_size, max_seqlen=context), DEVICE)
        self.pool = MHATokenToKVPool(batch_size * context, PAGE_SIZE, BF16, KV_HEADS, DIM, layers, DEVICE)
        for pages in (*self.pool.k_buffer, *self.pool.v_buffer):
            pages.normal_()
        pages = torch.randperm(batch_size * context // PAGE_SIZE, device=DEVICE).view(batch_size, -1, 1)
        slots = (pages * PAGE_SIZE + torch.arange(PAGE_SIZE, device=DEVICE)).flatten(1)
        self.req_to_token = slots.int()
        self.page_table = pages.squeeze(-1).int()
        self.input_ids = torch.randint(0, VOCAB, (batch_size,), device=DEVICE)
        self.batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.arange(batch_size, device=DEVICE),
            cache_seqlens=torch.full((batch_size,), length, dtype=torch.int32, device=DEVICE),
            num_tokens=batch_size,
            req_to_token=self.req_to_token,
            out_cache_loc=slots[:, length - 1].contiguous(),
            positions=torch.full((batch_size,), length - 1, device=DEVICE),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )

    @property
    def params(self) -> dict:
        return {"layers": self.layers, "batch": self.batch_size, "s_k": self.length, "width": WIDTH}

    @contextmanager
    def attention(self, make: Callable[[int], nn.Module]) -> Iterator[None]:
        """The model with other attention for a while."""
        own = [block.attention for block in self.model.blocks]
        for i, block in enumerate(self.model.blocks):
            block.attention = make(i)
        try:
            yield
        finally:
            for block, attention in zip(self.model.blocks, own, strict=True):
                block.attention = attention
