"""What stands between the steps of a speculative step, captured once and replayed with other trees and lengths."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.graphs import CudaGraphs
from attnops.pools import MHATokenToKVPool
from attnops.speculative import DraftInput, VerifyInput, keep_accepted
from attnops.types import AttentionBatch, ForwardMode
from draft_trees import draw_tree, expected_tree, greedy_path, stack, unpack
from graph_tape import GraphTape

TOPK, STEPS, NODES, BATCH, CONTEXT, PAGE = 3, 4, 12, 5, 256, 16
VOCABULARY = 5


class Glue:
    """Tree, verify step, judgement, moves and the draft model's input, of tensors that stay where they are."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device, self.rng = device, random.Random(seed)
        order = torch.randperm((BATCH + 1) * CONTEXT // PAGE, generator=torch.Generator().manual_seed(seed))
        slots = order.view(BATCH + 1, -1, 1) * PAGE + torch.arange(PAGE)
        self.table = slots.flatten(1).int().to(device)
        self.pool = MHATokenToKVPool((BATCH + 1) * CONTEXT, PAGE, torch.float32, 2, 8, 3, device=device)
        self.start = [torch.rand(pages.shape).to(device) for pages in self.pool.all_buffers()[0]]
        self.target = torch.zeros(BATCH * NODES, dtype=torch.int64, device=device)
        self.hidden = torch.arange(BATCH * NODES * 2.0, device=device).view(-1, 2)
        self.draw()

    def draw(self) -> None:
        """Other trees, lengths, requests and predictions; pages as at the start."""
        self.trees = [draw_tree(self.rng, TOPK, STEPS, NODES, VOCABULARY) for _ in range(BATCH)]
        for tree in self.trees:
            tree.length = self.rng.randrange(CONTEXT - NODES)
        given = stack(self.trees, self.device)
        self.rows = self.rng.sample(range(BATCH + 1), BATCH)
        self.predicted = [[self.rng.randrange(VOCABULARY) for _ in range(NODES)] for _ in range(BATCH)]
        batch = {"cache_seqlens": given["cache_seqlens"] + 1, "req_pool_indices": torch.tensor(self.rows)}
        if not hasattr(self, "given"):
            self.given, loc = given, torch.zeros(BATCH, dtype=torch.int64, device=self.device)
            batch = {name: value.to(self.device) for name, value in batch.items()}
            self.batch = AttentionBatch(
                forward_mode=ForwardMode.DECODE,
                num_tokens=BATCH,
                req_to_token=self.table,
                out_cache_loc=loc,
                **batch,
            )
        for name, value in given.items():
            self.given[name].copy_(value)
        for name, value in batch.items():
            getattr(self.batch, name).copy_(value)
        self.target.copy_(torch.tensor(self.predicted).flatten())
        for pages, start in zip(self.pool.all_buffers()[0], self.start):
            pages.copy_(start)

    def run(self) -> list[torch.Tensor]:
        tree = ops.build_draft_tree(**self.given, topk=TOPK)
        drafts = VerifyInput.of_tree(tree, STEPS + 1)
        step = drafts.prepare_for_verify(self.batch, self.pool, None)
        verified = drafts.verify(self.target)
        keep_accepted(verified, step)
        draft = DraftInput.after_verify(verified, self.hidden, self.batch)
        extend = draft.prepare_for_extend(self.batch, self.pool, None)
        out = [*tree, *verified, step.out_cache_loc, extend.out_cache_loc, extend.cache_seqlens]
        return [*out, draft.input_ids, draft.hidden_states, draft.last_row, draft.bonus_token, draft.new_seqlens]

    def check(self, out: list[torch.Tensor]) -> None:
        """Against walks over the trees."""
        mask, positions, _, _, _, _, _, accept_index, _, slots = out[:10]
        expected = expected_tree(self.trees)
        assert unpack(mask).tolist() == expected["mask"]
        assert positions.tolist() == expected["positions"]
        moved = [start.cpu().clone().flatten(0, 1) for start in self.start]
        table, bonus, lengths = self.table.cpu().long(), [], []
        for b, tree in enumerate(self.trees):
            path = greedy_path(tree, self.predicted[b], STEPS + 1)
            assert accept_index[b].tolist() == [b * NODES + n for n in path] + [-1] * (STEPS + 1 - len(path))
            bonus.append(self.predicted[b][path[-1]])
            lengths.append(tree.length + len(path))
            cells = table[self.rows[b], tree.length : tree.length + NODES]
            assert slots[b * NODES : (b + 1) * NODES].tolist() == cells.tolist()
            for old, new in zip(self.start, moved):
                new[cells[: len(path)]] = old.cpu().flatten(0, 1)[cells[path]]
        assert out[-2].tolist() == bonus and out[-1].tolist() == lengths
        for pages, right in zip(self.pool.all_buffers()[0], moved):
            assert torch.equal(pages.cpu().flatten(0, 1), right)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_graph_serves_any_trees_and_lengths(device):
    """200 replays, each as walks over its trees have it and bit for bit as eager."""
    glue = Glue(device)
    glue.check(glue.run())  # and a warm-up
    recorder = (GraphTape if device == "cpu" else CudaGraphs(device))()
    with recorder.capture():
        captured = glue.run()
    for _ in range(200):
        glue.draw()
        recorder.replay()
        glue.check(captured)
        kept = [value.clone() for value in captured]
        for pages, start in zip(glue.pool.all_buffers()[0], glue.start):
            pages.copy_(start)
        assert all(torch.equal(x, y) for x, y in zip(glue.run(), kept))
