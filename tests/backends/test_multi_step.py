"""Draft loops over any backend: branches of any page size, captured whole, idle ranks."""

from __future__ import annotations

import random

import pytest
import torch
from attnops.backends import MultiStepDraftBackend, get_backend_class
from attnops.graphs import GraphRunner
from attnops.graphs.static_inputs import StaticInput
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from graph_tape import GraphTape

NAMES = ["torch_native", "intel_amx", "trtllm_mha", "flex_attention"]
CONTEXT, REQUESTS = 160, 5
SPEC = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
SCALE = 0.15


class Loop:
    """A draft model of one layer whose queries, keys and values are given, over pages full of NaN."""

    def __init__(self, name, page_size, topk, draft_steps, kind="mha", seed=0):
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.page_size, self.topk, self.draft_steps = page_size, topk, draft_steps
        self.window = 7 if kind == "window" else -1
        if kind == "mla":
            self.spec = AttentionSpec.mla(4, dtype=torch.float32, page_size=page_size)
        else:
            self.spec = AttentionSpec(**SPEC, page_size=page_size, sliding_window_size=self.window)
        pages = REQUESTS * -(-CONTEXT // page_size) + 3
        size = pages * page_size
        if kind == "mla":
            self.pool = MLATokenToKVPool(size, page_size, torch.float32, 1)
        elif kind == "window":
            self.pool = SWAKVPool(size, size, page_size, torch.float32, 2, 64, [1], [0])
            back = torch.randperm(pages, generator=self.generator).unsqueeze(1) * page_size + torch.arange(page_size)
            self.pool.slot_map.copy_(back.flatten())
        else:
            self.pool = MHATokenToKVPool(size, page_size, torch.float32, 2, 64, 1)
        for buffers in self.pool.all_buffers():
            for buffer in buffers:
                buffer.fill_(float("nan"))
        dims = (576, 576, 512) if kind == "mla" else (64, 64, 64)
        self.kv_heads, self.dims = (1 if kind == "mla" else 2), dims
        self.layer = RadixAttention(
            4, dims[0], SCALE, self.kv_heads, 0, v_head_dim=dims[2], sliding_window_size=self.window
        )
        per_request = -(-CONTEXT // page_size)
        order = torch.randperm(pages, generator=self.generator)[: REQUESTS * per_request].view(REQUESTS, per_request)
        slots = order.repeat_interleave(page_size, 1) * page_size + torch.arange(per_request * page_size) % page_size
        self.table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
        self.table[1:] = slots[:, :CONTEXT]
        limits = Limits(max_batch_size=REQUESTS, max_seqlen=CONTEXT)
        self.backend = MultiStepDraftBackend(
            get_backend_class(name), self.spec, limits, topk=topk, draft_steps=draft_steps
        )

    def most_prefix(self):
        """Tokens that leave cells for the drafts of all branches."""
        pages = 2 + (self.draft_steps - 1) // self.page_size
        return CONTEXT - self.topk * max(pages * self.page_size, self.draft_steps) - self.page_size

    def batch(self, lengths, rows):
        return AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor(rows),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32) + 1,
            num_tokens=len(rows),
            req_to_token=self.table,
            out_cache_loc=torch.zeros(len(rows), dtype=torch.int64),
            positions=torch.tensor(lengths),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def fill(self, lengths, rows):
        """Prefixes of these requests, stored; K and V of each."""
        kept = []
        for length, row in zip(lengths, rows):
            k = self.draw(length, self.kv_heads, self.dims[1])
            v = k[..., :512] if self.dims[1] == 576 else self.draw(length, self.kv_heads, 64)
            self.store(self.table[row, :length].long(), k, v)
            kept.append((k, v))
        return kept

    def store(self, slots, k, v):
        if isinstance(self.pool, MLATokenToKVPool):
            self.pool.set_mla_kv_buffer(self.layer, slots, k.squeeze(1))
            return
        if isinstance(self.pool, SWAKVPool):
            slots = self.pool.slot_map[slots].long()
        self.pool.set_kv_buffer(self.layer, slots, k, v)

    def inputs(self, size):
        """q, k and v of every step and branch: ``[B, steps, topk, H, D]``."""
        shape, dims = (size, self.draft_steps - 1, self.topk), self.dims
        q, k = self.draw(*shape, 4, dims[0]), self.draw(*shape, self.kv_heads, dims[1])
        return q, k, k[..., :512] if dims[1] == 576 else self.draw(*shape, self.kv_heads, 64)

    def model(self, input_ids, positions, batch, *, q, k, v):
        """``[B, steps, topk, H * D_v]``: what a GraphRunner captures."""
        del input_ids, positions, batch
        outs = []
        for index in range(q.shape[1]):
            step = self.backend.step(index)
            flat = [x[:, index].flatten(0, 1) for x in (q, k, v)]
            if self.dims[1] == 576:
                flat[2] = None
            out = self.layer(*flat, step)
            outs.append(out.unflatten(0, (-1, self.topk)))
        return torch.stack(outs, 1)

    def expected(self, prefixes, q, k, v):
        """float64, of every step and branch."""
        size, steps = q.shape[:2]
        out = torch.zeros(size, steps, self.topk, 4, self.dims[2], dtype=torch.float64)
        group = 4 // self.kv_heads
        for b, (keys, values) in enumerate(prefixes):
            for branch in range(self.topk):
                for step in range(steps):
                    all_k = torch.cat([keys, k[b, : step + 1, branch]]).double().repeat_interleave(group, 1)
                    all_v = torch.cat([values, v[b, : step + 1, branch]]).double().repeat_interleave(group, 1)
                    first = 0 if self.window < 0 else max(0, len(all_k) - 1 - self.window)
                    scores = torch.einsum("hd,khd->hk", q[b, step, branch].double(), all_k[first:]) * SCALE
                    out[b, step, branch] = torch.einsum("hk,khd->hd", scores.softmax(-1), all_v[first:])
        return out.flatten(-2)

    def draw_lengths(self, size):
        return [self.rng.choice([0, 1, self.page_size, self.rng.randint(0, self.most_prefix())]) for _ in range(size)]


def run_eagerly(loop, batch, q, k, v):
    loop.backend.init_forward_metadata(batch)
    out = loop.model(None, None, batch, q=q, k=k, v=v)
    loop.backend.raise_on_fault()
    return out


def close(got, expected):
    return bool(((got.double() - expected).norm() <= 1e-5 * expected.norm()).item())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("topk, draft_steps", [(1, 5), (4, 3), (3, 2)])
def test_branches_see_the_prefix_and_their_own_drafts(name, page_size, topk, draft_steps, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    loop = Loop(name, page_size, topk, draft_steps, seed=page_size + topk)
    rows = loop.rng.sample(range(1, REQUESTS + 1), 4)
    lengths = [0, page_size, *loop.draw_lengths(2)]
    prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
    out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
    assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize(
    "kind, names", [("mla", ["torch_native", "intel_amx"]), ("window", ["torch_native", "intel_amx"])]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_latents_and_windows(kind, names, page_size):
    for name in names:
        loop = Loop(name, page_size, 3, 4, kind)
        lengths, rows = [0, 5, 40, 33], [3, 1, 5, 2]
        prefixes, inputs = loop.fill(lengths, rows), loop.inputs(4)
        out = run_eagerly(loop, loop.batch(lengths, rows), *inputs)
        assert close(out, loop.expected(prefixes, *inputs))


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("page_size, topk", [(1, 4), (16, 4), (16, 1)])
def test_one_graph_holds_the_loop(name, page_size, topk):
    """Replays with other lengths, requests and numbers of them, bit for bit as eager ones."""
    loop, eager = Loop(name, page_size, topk, 5), Loop(name, page_size, topk, 5)
    shape = (4, topk)
    rows_of = {"q": (*shape, 4, 64), "k": (*shape, 2, 64), "v": (*shape, 2, 64)}
    runner = GraphRunner(
        loop.model,
        loop.backend,
        loop.table,
        loop.pool,
        # products of torch have other bits in a padded batch
        sizes=range(1, REQUESTS + 1) if name == "torch_native" else [2, REQUESTS],
        inputs={key: StaticInput(rows, per="request") for key, rows in rows_of.items()},
        layers={0: loop.layer},
        recorder=GraphTape,
    )
    runner.capture(progress=False)
    for one in (loop, eager):
        one.generator.manual_seed(1)
    for turn in range(50):
        size = loop.rng.randint(1, REQUESTS)
        rows, lengths = loop.rng.sample(range(1, REQUESTS + 1), size), loop.draw_lengths(size)
        loop.fill(lengths, rows)
        eager.fill(lengths, rows)
        inputs, same = loop.inputs(size), eager.inputs(size)
        batch = loop.batch(lengths, rows)
        got = runner.replay(torch.zeros(size, dtype=torch.int64), batch, **dict(zip("qkv", inputs)))
        expected = run_eagerly(eager, eager.batch(lengths, rows), *same)
        assert torch.equal(got, expected), f"turn {turn}"


def test_idle_ranks_stay_idle():
    loop = Loop("torch_native", 1, 2, 3)
    none = torch.zeros(0, dtype=torch.int32)
    batch = AttentionBatch(forward_mode=ForwardMode.IDLE, req_pool_indices=none, cache_seqlens=none, num_tokens=3)
    loop.backend.init_forward_metadata(batch)
    step = loop.backend.step(0)
    assert step.forward_mode.is_idle() and step.num_tokens == 6
    assert not loop.layer(*(torch.ones(6, heads * 64) for heads in (4, 2, 2)), step).any()


def test_errors_name_what_is_wrong():
    loop = Loop("torch_native", 1, 2, 3)
    with pytest.raises(RuntimeError, match="init_forward_metadata must run before a draft loop's steps"):
        loop.backend.step(0)
    batch = loop.batch([4], [1])
    loop.backend.init_forward_metadata(batch)
    with pytest.raises(RuntimeError, match=r"runs with step\(s\)"):
        loop.layer(torch.ones(1, 256), torch.ones(1, 128), torch.ones(1, 128), batch)
    batch.out_cache_loc = None
    with pytest.raises(ValueError, match="needs req_to_token, out_cache_loc and token_to_kv_pool"):
        loop.backend.init_forward_metadata(batch)
    limits = Limits(max_batch_size=2, max_seqlen=64)
    for topk, steps in ((0, 3), (2, 1)):
        with pytest.raises(ValueError, match="a draft loop needs topk >= 1 and draft_steps >= 2"):
            MultiStepDraftBackend(get_backend_class("torch_native"), loop.spec, limits, topk=topk, draft_steps=steps)
