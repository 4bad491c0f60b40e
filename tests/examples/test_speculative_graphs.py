"""A whole speculative step (draft loop, tree, verify with attention, move, draft extend) captured once and replayed."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attnops.graphs import CudaGraphs
from graph_tape import GraphTape

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import speculate

VOCABULARY, WIDTH, REQUESTS, MOST = 12, 4 * 64, 4, 90


class Tiny:
    """Stands for the target and for the draft head: one layer of attention, and no product of matrices."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
        self.embedding = SimpleNamespace(weight=draw(VOCABULARY, WIDTH))
        self.k, self.v, self.out = draw(VOCABULARY, 2, 64), draw(VOCABULARY, 2, 64), draw(VOCABULARY, WIDTH)
        self.config = SimpleNamespace(
            num_heads=4, num_kv_heads=2, head_dim=64, num_layers=1, softmax_scale=0.15, d_model=WIDTH, max_context=4096
        )

    def hidden(self, ids, positions, attend):
        return self(ids, torch.zeros_like(self.embedding.weight[ids]), positions, attend)

    def __call__(self, ids, hidden, positions, attend):
        q = self.embedding.weight[ids] + hidden
        return attend(0, q.view(-1, 4, 64), self.k[ids], self.v[ids]).flatten(1)

    def output(self, hidden):
        return (hidden.float().unsqueeze(-2) * self.out.float()).sum(-1)

    def logits(self, hidden):
        return self.output(hidden)


CASES = [("cpu", "intel_amx", 16, 4, 200), ("cpu", "torch_native", 3, 1, 10), ("cpu", "trtllm_mha", 1, 3, 30)]
GPU_CASES = [("trtllm_mha", 64, 4, 200), ("trtllm_mha", 1, 1, 200), ("fa3", 16, 4, 200)]
CASES += [pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in GPU_CASES]


@pytest.mark.parametrize("device, backend, page_size, topk, turns", CASES)
def test_a_whole_step_is_replayed_with_other_trees_lengths_and_requests(device, backend, page_size, topk, turns):
    """Replays, bit for bit as eager steps of the same numbers of requests: what comes out, and all pages."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one = speculate.Speculator(
        Tiny(device, dtype, 1),
        Tiny(device, dtype, 2),
        topk=topk,
        draft_steps=5,
        num_tokens=6 if topk == 1 else 12,
        page_size=page_size,
        max_requests=REQUESTS,
        max_tokens=MOST,
        backend=backend,
        graphs=True,
        recorder=GraphTape if device == "cpu" else CudaGraphs(device),
    )
    assert one.loop.has_trees == (topk > 1)
    rng, generator = random.Random(0), torch.Generator(device).manual_seed(0)
    buffers = [*one.pages.pool.all_buffers()[0], *one.draft_pages.pool.all_buffers()[0]]
    start = [torch.randn(pages.shape, generator=generator, device=device).to(dtype) for pages in buffers]
    trees, accepted = set(), set()
    verify = one._verify
    one._verify = lambda batch, drafts: trees.add(str(drafts.custom_mask.tolist())) or verify(batch, drafts)
    for turn in range(turns):
        size = rng.choice(list(one.graphs.sizes))
        rows = torch.tensor(rng.sample(range(REQUESTS), size), device=device)
        lengths = [rng.choice([1, page_size, rng.randint(1, MOST)]) for _ in range(size)]
        batch = one._loop_batch(rows, torch.tensor(lengths, dtype=torch.int32, device=device))
        bonus = torch.randint(VOCABULARY, (size,), generator=generator, device=device)
        state = torch.randn(size, WIDTH, generator=generator, device=device).to(dtype)
        results = []
        for graphs in (True, False):
            for pages, old in zip(buffers, start):
                pages.copy_(old)
            if graphs:
                done = one.graphs.replay(bonus, batch, state=state)
            else:
                one.loop.init_forward_metadata(batch)
                done = one._step(bonus, batch.positions, batch, state=state)
            results.append([value.clone() for value in (*done.values(), *buffers)])
        assert all(torch.equal(x, y) for x, y in zip(*results)), f"turn {turn}"
        accepted |= set((results[0][1] >= 0).sum(1).tolist())
    assert len(accepted) > 1 and (topk == 1 or len(trees) > turns // 2)
