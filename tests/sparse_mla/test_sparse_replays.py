"""A sparse layer's ops in one CUDA graph, replayed a thousand times; and pools above 2^32 bytes."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops
from attnops.metadata import SparseMlaPlan
from sparse_calls import SCALE, Lists, SparseProblem, assert_right, decode, plan_of, prefill

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


@pytest.mark.parametrize("kind", ["bytes", "own"])
@pytest.mark.parametrize("requests,drafts,heads", [(7, 1, HEADS), (3, 4, 64)], ids=["decode", "verify"])
def test_a_thousand_replays_equal_eager_bit_for_bit(kind, requests, drafts, heads):
    layer = Layer(kind, requests, drafts, heads)
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
        chosen, out = layer.chosen.clone(), layer.out.clone()
        layer.chosen.fill_(-5)
        layer.out.fill_(math.nan)
        graph.replay()
        wrong += (layer.chosen != chosen).sum() + (layer.out != out).sum() + out.isnan().sum()
    assert not wrong.item()


@pytest.mark.parametrize("kind,heads", [("own", 16), ("own", 64), ("shared", 64), ("bytes", 16), ("bytes", 64)])
def test_rows_above_2_to_the_32_bytes(kind, heads):
    """Lists that name rows at both ends of a pool of 4.4 GB, and on both sides of 2^31 and 2^32 bytes."""
    width, dtype = {"own": (576, torch.bfloat16), "shared": (512, torch.bfloat16), "bytes": (656, torch.uint8)}[kind]
    size = width * dtype.itemsize
    page = 64
    pages = int(1.03 * 2**32) // (size * page)
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB")
    pool = torch.empty(pages, page, width, dtype=dtype, device="cuda")
    rows, topk = pages * page, 192
    places = [0, 2**31 // size, 2**32 // size, rows - 30]
    generator = torch.Generator().manual_seed(5)
    named = torch.cat([torch.arange(max(at - 30, 0), min(at + 30, rows)) for at in places])
    values = torch.randn(len(named), width if kind != "bytes" else 576, generator=generator)
    flat = pool.view(rows, width)
    if kind == "bytes":
        from attnops import reference

        stored = reference.pack_mla_fp8_rows(values)
        exact = reference.unpack_mla_fp8_rows(stored).double()
    else:
        stored = values.bfloat16()
        exact = stored.double()
    flat[named.cuda()] = stored.cuda()
    shape = (5, 1)
    chosen = torch.randint(len(named), (*shape, topk), generator=generator)
    q = torch.randn(*shape, heads, values.shape[1], generator=generator).bfloat16().cuda()
    # The expectation knows the named rows alone, by their numbers among them.
    known = SparseProblem(q, Lists(stored, exact, chosen.int(), None), None, None)
    expected = known.expected()
    problem = SparseProblem(q, Lists(pool, exact, named[chosen].int().cuda(), None), None, None)
    problem.expected = lambda: expected
    for parts in (None, 3):
        assert_right(problem, *decode(problem, plan_of(problem, num_sm_parts=parts)))
    assert_right(problem, *prefill(problem, with_most=kind != "bytes"))
