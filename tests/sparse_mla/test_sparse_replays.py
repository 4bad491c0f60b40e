"""Sparse layers' ops in a CUDA graph, replayed a thousand times: decode, verify, chains of drafts, prompts, entries."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops
from attnops.metadata import SparseMlaPlan
from compress_calls import model
from sparse_calls import SCALE, shared_bytes

pytestmark = pytest.mark.gpu
REPLAYS, KEYS, TOPK, PAGE, INDEX_HEADS, HEADS = 1000, 700, 256, 16, 8, 16


class Layer:
    """Store, quantize, logits, selection, plan and attention of `tokens` rows: requests, or a request's drafts."""

    def __init__(self, kind: str, requests: int, drafts: int, heads: int) -> None:
        self.requests, self.drafts, rows = requests, drafts, requests * drafts
        pages = requests * -(-KEYS // PAGE) + 3
        cuda = {"device": "cuda"}
        self.index_pages = torch.zeros(pages, PAGE, 132, dtype=torch.uint8, **cuda)
        wide = {"bytes": (656, torch.uint8), "own": (576, torch.bfloat16)}[kind]
        self.pool = torch.zeros(pages, PAGE, wide[0], dtype=wide[1], **cuda)
        self.table = torch.zeros(rows, -(-KEYS // PAGE), dtype=torch.int32, **cuda)
        self.lengths = torch.ones(rows, dtype=torch.int32, **cuda)
        self.slots = torch.zeros(rows, dtype=torch.int64, **cuda)
        self.index_k = torch.zeros(rows, 128, dtype=torch.bfloat16, **cuda)
        self.latent = torch.zeros(rows, 576, dtype=torch.bfloat16, **cuda)
        self.index_q = torch.zeros(rows, INDEX_HEADS, 128, dtype=torch.bfloat16, **cuda)
        self.weights = torch.zeros(rows, INDEX_HEADS, **cuda)
        self.q = torch.zeros(requests, drafts, heads, 576, dtype=torch.bfloat16, **cuda)
        shape = {"num_q_heads": heads, "topk": TOPK, "seqlen_q": drafts}
        self.plan = SparseMlaPlan.allocate(requests, **shape, **cuda)
        self.logits = torch.zeros(rows, self.table.shape[1] * PAGE, **cuda)
        self.chosen = torch.zeros(requests, drafts, TOPK, dtype=torch.int32, **cuda)
        self.count = torch.zeros(rows, dtype=torch.int32, **cuda)
        self.out = torch.zeros(requests, drafts, heads, 512, dtype=torch.bfloat16, **cuda)
        self.generator = torch.Generator("cuda").manual_seed(3)
        self.results = (self.chosen, self.out)

    def draw(self) -> None:
        """Another step: lengths, tables and values, in place."""
        rows, generator = len(self.lengths), self.generator
        order = torch.randperm(len(self.pool), device="cuda", generator=generator).int()
        tables = order[: self.requests * self.table.shape[1]].view(self.requests, -1)
        self.table.copy_(tables.repeat_interleave(self.drafts, 0))
        last = torch.randint(self.drafts, KEYS + 1, (self.requests,), device="cuda", generator=generator)
        steps = torch.arange(1 - self.drafts, 1, device="cuda")
        self.lengths.copy_((last.unsqueeze(1) + steps).flatten())
        position = self.lengths.long() - 1
        self.slots.copy_(
            self.table.gather(1, (position // PAGE).unsqueeze(1)).squeeze(1).long() * PAGE + position % PAGE
        )
        for x in (self.index_k, self.latent, self.index_q, self.weights, self.q):
            x.normal_(generator=generator)
        assert rows == self.requests * self.drafts

    def run(self) -> None:
        ops.store_index_k(self.index_pages, self.index_k, self.slots)
        ops.store_mla_kv(self.pool, self.latent, self.slots)
        q_fp8, folded = ops.quantize_index_q(self.index_q, self.weights, scale=0.01)
        lengths, pages = self.lengths, self.table
        ops.index_logits_paged(q_fp8[:, None], self.index_pages, pages, folded, lengths[:, None], logits=self.logits)
        chosen = self.chosen.view(-1, TOPK)
        ops.topk_select(self.logits, lengths, TOPK, page_table=pages, page_size=PAGE, indices=chosen)
        self.count.copy_(lengths.clamp(max=TOPK))
        ops.sparse_mla_plan(self.plan, topk_length=self.count)
        count = self.count.view(self.requests, self.drafts)
        given = (self.q, self.pool, self.chosen, self.plan)
        ops.sparse_mla_decode(*given, softmax_scale=SCALE, topk_length=count, out=self.out)


class Chain(Layer):
    """A chain of drafts: each step stores its token, and lists among what came before it and itself."""

    STEPS = 3

    def __init__(self, kind: str, requests: int, heads: int) -> None:
        super().__init__(kind, requests, 1, heads)
        self.base = self.lengths.clone()
        self.results = tuple(x.new_zeros(self.STEPS, *x.shape) for x in self.results)

    def draw(self) -> None:
        super().draw()
        self.base.copy_(self.lengths.clamp(max=KEYS - self.STEPS + 1))

    def run(self) -> None:
        for step in range(self.STEPS):
            self.lengths.copy_(self.base + step)
            position = self.lengths.long() - 1
            page = self.table.gather(1, (position // PAGE).unsqueeze(1)).squeeze(1).long()
            self.slots.copy_(page * PAGE + position % PAGE)
            super().run()
            for kept, one in zip(self.results, (self.chosen, self.out)):
                kept[step].copy_(one)


class Prompt:
    """A ragged step of some requests: rows, `index_topk` over each row's keys, and prefill over their lists."""

    def __init__(self, kind: str, heads: int) -> None:
        self.tokens, self.requests = 48, 3
        layer = Layer(kind, self.requests, 1, heads)
        self.pool, self.index_pages, self.generator = layer.pool, layer.index_pages, layer.generator
        cuda = {"device": "cuda"}
        rows = self.requests * KEYS
        slots = torch.arange(len(self.pool) * PAGE, **cuda)
        ops.store_index_k(self.index_pages, torch.randn(len(slots), 128, **cuda), slots)
        ops.store_mla_kv(self.pool, torch.randn(len(slots), 576, **cuda).bfloat16(), slots)
        assert len(slots) >= rows
        self.table = torch.zeros_like(layer.table)
        self.lengths, self.bounds = torch.ones(3, dtype=torch.int32, **cuda), torch.zeros(4, dtype=torch.int32, **cuda)
        self.index_q = torch.zeros(self.tokens, INDEX_HEADS, 128, dtype=torch.bfloat16, **cuda)
        self.weights = torch.zeros(self.tokens, INDEX_HEADS, **cuda)
        self.q = torch.zeros(self.tokens, heads, 576, dtype=torch.bfloat16, **cuda)
        self.scratch = torch.zeros(20, self.table.shape[1] * PAGE, **cuda)
        self.chosen = torch.zeros(self.tokens, TOPK, dtype=torch.int32, **cuda)
        self.out = torch.zeros(self.tokens, heads, 512, dtype=torch.bfloat16, **cuda)
        self.results = (self.chosen, self.out)

    def draw(self) -> None:
        generator, cuda = self.generator, {"device": "cuda", "generator": self.generator}
        order = torch.randperm(len(self.pool), **cuda).int()
        self.table.copy_(order[: self.table.numel()].view_as(self.table))
        counts = torch.randint(0, self.tokens // 3 + 1, (3,), **cuda)
        self.bounds[1:] = counts.cumsum(0)
        self.lengths.copy_(counts + torch.randint(0, KEYS - self.tokens // 3, (3,), **cuda))
        for x in (self.index_q, self.weights, self.q):
            x.normal_(generator=generator)

    def run(self) -> None:
        seen, request, count = ops.expand_rows(self.lengths, self.bounds, self.tokens, TOPK)
        q_fp8, folded = ops.quantize_index_q(self.index_q, self.weights, scale=0.01)
        table = self.table[request.long()]
        ops.index_topk(
            q_fp8[:, None],
            self.index_pages,
            table,
            folded,
            seen[:, None],
            TOPK,
            indices=self.chosen,
            scratch=self.scratch,
        )
        ops.sparse_mla_prefill(self.q, self.pool, self.chosen, softmax_scale=SCALE, topk_length=count, out=self.out)


def _pages_of_584(pages: int, page_size: int) -> torch.Tensor:
    data, scales, _ = shared_bytes(torch.randn(pages * page_size, 512))
    parts = (data.view(pages, -1), scales.view(pages, -1))
    return torch.cat(parts, 1).view(pages, page_size, 584).cuda()


class Entries:
    """A layer of DeepSeek-V4: tokens pooled into rows of 584 bytes, and decode over a window's rows and these."""

    def __init__(self, heads: int) -> None:
        self.requests, self.ratio, self.topk, cuda = 5, 4, 64, {"device": "cuda"}
        given = model(512, self.ratio, True, dtype=torch.bfloat16)
        self.weights = {name: getattr(given, name).cuda() for name in ("ape", "norm_weight", "cos_sin")}
        columns = KEYS // self.ratio // PAGE + 1
        self.cached = _pages_of_584(self.requests * columns + 2, PAGE)
        self.entries = self.cached.clone()
        self.window = _pages_of_584(self.requests * 2, 64)
        self.state = torch.randn(self.requests, 2 * self.ratio, given.row, **cuda).bfloat16()
        self.before = self.state.clone()
        self.kv_score = torch.zeros(self.requests, given.row, dtype=torch.bfloat16, **cuda)
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.table = torch.zeros(self.requests, columns, **ints)
        self.lengths, self.bounds = torch.ones(self.requests, **ints), torch.arange(self.requests + 1, **ints)
        self.states = torch.arange(self.requests, **ints)
        self.lists = torch.zeros(self.requests, 1, 128, **ints)
        self.places = torch.zeros(self.requests, self.topk, **ints)
        self.q = torch.zeros(self.requests, 1, heads, 512, dtype=torch.bfloat16, **cuda)
        self.out = torch.zeros_like(self.q)
        self.plan = SparseMlaPlan.allocate(
            self.requests, num_q_heads=heads, topk=128, extra_topk=self.topk, device="cuda"
        )
        self.generator = torch.Generator("cuda").manual_seed(3)
        self.results = (self.entries, self.state, self.out)

    def draw(self) -> None:
        cuda = {"device": "cuda", "generator": self.generator}
        self.before.normal_(generator=self.generator)
        self.table.copy_(torch.randperm(len(self.entries), **cuda)[: self.table.numel()].view_as(self.table))
        self.lengths.copy_(torch.randint(1, KEYS, (self.requests,), **cuda))
        self.lists.copy_(torch.randint(self.requests * 128, self.lists.shape, **cuda))
        self.places.copy_(torch.randint(1 << 30, self.places.shape, **cuda))
        for x in (self.kv_score, self.q):
            x.normal_(generator=self.generator)

    def run(self) -> None:
        lengths, bounds, ratio = self.lengths, self.bounds, self.ratio
        self.state.copy_(self.before)
        self.entries.copy_(self.cached)
        indptr = ops.compress_plan(lengths, bounds, ratio=ratio)
        ops.compress_kv(
            self.entries,
            self.state,
            self.kv_score,
            page_table=self.table,
            state_indices=self.states,
            cache_seqlens=lengths,
            cu_seqlens_q=bounds,
            entry_indptr=indptr,
            ratio=ratio,
            **self.weights,
        )
        seen, _, count = ops.expand_rows(lengths, bounds, self.requests, self.topk, ratio=ratio)
        place = self.places % seen.clamp(min=1).unsqueeze(1)
        slots = self.table.gather(1, (place // PAGE).long()) * PAGE + place % PAGE
        lengths_of = {"topk_length": lengths.clamp(max=128), "extra_topk_length": count}
        ops.sparse_mla_plan(self.plan, **lengths_of)
        ops.sparse_mla_decode(
            self.q,
            self.window,
            self.lists,
            self.plan,
            softmax_scale=SCALE,
            extra_kv_pages=self.entries,
            extra_indices=slots.unsqueeze(1),
            out=self.out,
            **lengths_of,
        )


def check_a_thousand_replays(layer) -> None:
    """Each draws another step in place, runs it, spoils the results, replays it, and finds the same bits."""
    layer.draw()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        layer.draw()
        layer.run()
        expected = [result.clone() for result in layer.results]
        for result in layer.results:
            result.fill_(math.nan if result.is_floating_point() else 77)
        graph.replay()
        wrong += sum((got != one).sum() for got, one in zip(layer.results, expected))
    assert not wrong.item()


@pytest.mark.parametrize("kind", ["bytes", "own"])
@pytest.mark.parametrize("requests,drafts,heads", [(7, 1, HEADS), (3, 4, 64)], ids=["decode", "verify"])
def test_a_thousand_replays_equal_eager_bit_for_bit(kind, requests, drafts, heads):
    check_a_thousand_replays(Layer(kind, requests, drafts, heads))


@pytest.mark.parametrize("kind,heads", [("bytes", HEADS), ("own", 64)])
def test_a_thousand_replays_of_a_chain_of_drafts(kind, heads):
    check_a_thousand_replays(Chain(kind, 4, heads))


@pytest.mark.parametrize("kind,heads", [("bytes", HEADS), ("own", HEADS), ("bytes", 64), ("own", 64)])
def test_a_thousand_replays_of_prompts_that_select(kind, heads):
    check_a_thousand_replays(Prompt(kind, heads))


@pytest.mark.parametrize("heads", [HEADS, 64])
def test_a_thousand_replays_over_entries_of_584_bytes(heads):
    check_a_thousand_replays(Entries(heads))
