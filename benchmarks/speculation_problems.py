"""Problems of `bench_speculation.py`: what a draft loop has found, and a loop of one layer over random pages."""

from __future__ import annotations

import random

import torch
from attnops import ops
from attnops.backends import MultiStepDraftBackend, select_backend
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

BF16, I32 = torch.bfloat16, torch.int32
HEADS, KV_HEADS, DIM = 32, 8, 128


def draft_loop(batch_size: int, num_tokens: int, topk: int, steps: int, device: str) -> dict:
    """Candidates of a loop and the best of them, closed under parents: the arguments of `build_draft_tree`."""
    rng = random.Random(1)
    groups, chosen = [], []
    for _ in range(batch_size):
        parents, branches, kept = [-1] * topk, list(range(topk)), [-1, *range(topk)]
        for step in range(1, steps):
            first = len(parents)
            for branch in branches:
                parents += [branch] * topk
            branches = sorted(rng.sample(range(first, len(parents)), topk))
            kept += branches if step < steps - 1 else []
        inside: set[int] = set()
        while len(inside) < num_tokens - 1:
            free = [c for c, p in enumerate(parents) if c not in inside and (p < 0 or p in inside)]
            inside.add(rng.choice(free))
        groups.append(kept)
        chosen.append(sorted(inside))
    tokens = torch.randint(0, 3, (batch_size, num_tokens), device=device)
    return {
        "parent_list": torch.tensor(groups, device=device),
        "top_scores_index": torch.tensor(chosen, device=device),
        "cache_seqlens": torch.full((batch_size,), 4096, dtype=I32, device=device),
        "topk": topk,
        "draft_tokens": tokens[:, 1:].contiguous(),
        "bonus_tokens": tokens[:, 0].contiguous(),
    }


def random_tree(batch_size: int, num_tokens: int, device: str) -> torch.Tensor:
    """Packed masks uint8 ``[batch_size, num_tokens, ceil(num_tokens / 8)]`` of such loops."""
    given = draft_loop(batch_size, num_tokens, 4, 5, device)
    return ops.build_draft_tree(**given).tree_mask


class DraftSteps:
    """A draft loop of one layer over random pages."""

    def __init__(
        self,
        batch_size: int,
        length: int,
        page_size: int,
        topk: int,
        device: str,
        draft_steps: int = 6,
        dims: tuple[int, int] = (DIM, DIM),
        trees: bool = True,
        window: int = -1,
    ) -> None:
        self.params = {
            "batch_size": batch_size,
            "length": length,
            "page_size": page_size,
            "topk": topk,
            "draft_steps": draft_steps,
        }
        context = -(-(length + topk * 2 * max(page_size, draft_steps)) // page_size) * page_size
        head_dim, v_dim = dims
        spec = AttentionSpec(
            num_q_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=head_dim,
            v_head_dim=v_dim,
            page_size=page_size,
            dtype=BF16,
            sliding_window_size=window,
        )
        limits = Limits(max_batch_size=batch_size, max_seqlen=context)
        self.loop = MultiStepDraftBackend(
            select_backend, spec, limits, device, topk=topk, draft_steps=draft_steps, trees=trees
        )
        self.pool = MHATokenToKVPool(
            batch_size * context, page_size, BF16, KV_HEADS, head_dim, 1, device, v_head_dim=v_dim
        )
        for pages in (*self.pool.k_buffer, *self.pool.v_buffer):
            pages.normal_()
        order = torch.randperm(batch_size * context // page_size, device=device).view(batch_size, -1, 1)
        slots = (order * page_size + torch.arange(page_size, device=device)).flatten(1).int()
        self.layer = RadixAttention(
            HEADS, head_dim, head_dim**-0.5, KV_HEADS, 0, v_head_dim=v_dim, sliding_window_size=window
        )
        self.batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.arange(batch_size, device=device),
            cache_seqlens=torch.full((batch_size,), length, dtype=I32, device=device),
            num_tokens=batch_size,
            req_to_token=slots,
            out_cache_loc=torch.zeros(batch_size, dtype=torch.int64, device=device),
            positions=torch.full((batch_size,), length - 1, device=device),
            token_to_kv_pool=self.pool,
            attn_backend=self.loop,
        )
        rows = batch_size * topk
        self.q = torch.randn(rows, HEADS, head_dim, device=device).to(BF16)
        self.k, self.v = (torch.randn(rows, KV_HEADS, dim, device=device).to(BF16) for dim in dims)
        self.count = draft_steps - 1

    def prepare(self) -> None:
        self.loop.init_forward_metadata(self.batch)

    def attend(self, index: int) -> None:
        self.layer(self.q, self.k, self.v, self.loop.step(index))

    def attend_all(self) -> None:
        for index in range(self.count):
            self.attend(index)

    def run(self) -> None:
        self.loop.init_forward_metadata_in_graph(self.batch)
        self.attend_all()
