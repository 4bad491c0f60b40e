"""Draft loops with known answers: one layer whose queries, keys and values are given, over pages full of NaN."""

from __future__ import annotations

import random

import torch
from attnops.backends import MultiStepDraftBackend, get_backend_class
from attnops.graphs import GraphRunner
from attnops.graphs.static_inputs import StaticInput
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error

REQUESTS = 5
SPEC = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
SCALE = 0.15
TOPK = 24  # rows that a token of a sparse model lists


class Loop:
    """A draft model of one layer whose queries, keys and values are given, over pages full of NaN.

    Args:
        kind: "mha", "two dims", "mla", "sparse"; and "window", "mha" over a pool of two parts.
        window: The layer's; None: 7 where the kind is "window", else none. What it never reaches is not stored.
        kv_dtype: Of the pages, with scales for K and V.
    """

    def __init__(
        self,
        name,
        page_size,
        topk,
        draft_steps,
        kind="mha",
        seed=0,
        *,
        device="cpu",
        dtype=torch.float32,
        trees=True,
        deterministic=False,
        window=None,
        sinks=False,
        kv_dtype=None,
        layout="NHD",
    ):
        self.device, self.dtype = device, dtype
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.page_size, self.topk, self.draft_steps = page_size, topk, draft_steps
        self.window = (7 if kind == "window" else -1) if window is None else window
        self.has_lists = kind == "sparse"
        kind = "mla" if self.has_lists else kind
        options = {"dtype": dtype, "page_size": page_size, "deterministic": deterministic, "kv_dtype": kv_dtype}
        options |= {"sliding_window_size": self.window, "has_sinks": sinks}
        if kind == "mla":
            self.spec = AttentionSpec.mla(4, **options, sparse_topk=TOPK if self.has_lists else 0)
        else:
            self.spec = AttentionSpec(**SPEC, **options, v_head_dim=32 if kind == "two dims" else 64)
        self.context = max(160, 11 * page_size)  # room for branches on pages of their own
        pages = REQUESTS * -(-self.context // page_size) + 3
        size = pages * page_size
        if kind == "mla":
            self.pool = MLATokenToKVPool(size, page_size, self.spec.cache_dtype, 1, device=device)
        elif kind == "window":
            shape = (page_size, self.spec.cache_dtype, 2, 64)
            self.pool = SWAKVPool(size, size, *shape, [1], [0], device=device, layout=layout)
            back = torch.randperm(pages, generator=self.generator).unsqueeze(1) * page_size + torch.arange(page_size)
            self.pool.slot_map.copy_(back.flatten())
        else:
            shape = (page_size, self.spec.cache_dtype, 2, 64, 1)
            self.pool = MHATokenToKVPool(size, *shape, device=device, v_head_dim=self.spec.v_head_dim, layout=layout)
        for buffers in self.pool.all_buffers():
            for buffer in buffers:
                buffer.copy_(torch.full(buffer.shape, float("nan"), device=device))
        dims = (576, 576, 512) if kind == "mla" else (64, 64, self.spec.v_head_dim)
        self.kv_heads, self.dims = (1 if kind == "mla" else 2), dims
        tensors = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])} if kv_dtype else {}
        if sinks:
            tensors["sinks"] = torch.tensor([0.5, -1.0, 3.0, 20.0])
        self.layer = RadixAttention(
            4, dims[0], SCALE, self.kv_heads, 0, v_head_dim=dims[2], sliding_window_size=self.window, **tensors
        ).to(device)
        per_request = -(-self.context // page_size)
        order = torch.randperm(pages, generator=self.generator)[: REQUESTS * per_request].view(REQUESTS, per_request)
        slots = order.repeat_interleave(page_size, 1) * page_size + torch.arange(per_request * page_size) % page_size
        self.table = torch.zeros(REQUESTS + 1, self.context, dtype=torch.int32, device=device)
        self.table[1:] = slots[:, : self.context].to(device)
        limits = Limits(max_batch_size=REQUESTS, max_seqlen=self.context)
        self.backend = MultiStepDraftBackend(
            get_backend_class(name), self.spec, limits, device, topk=topk, draft_steps=draft_steps, trees=trees
        )

    def most_prefix(self):
        """Tokens that leave cells for the drafts of all branches."""
        pages = 2 + (self.draft_steps - 1) // self.page_size
        return self.context - self.topk * max(pages * self.page_size, self.draft_steps) - self.page_size

    def batch(self, lengths, rows):
        return AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor(rows, device=self.device),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=self.device) + 1,
            cache_seqlens_cpu=torch.tensor(lengths, dtype=torch.int32) + 1,  # for backends that plan on the host
            num_tokens=len(rows),
            req_to_token=self.table,
            out_cache_loc=torch.zeros(len(rows), dtype=torch.int64, device=self.device),
            positions=torch.tensor(lengths, device=self.device),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def fill(self, lengths, rows):
        """Prefixes of these requests, stored; K and V of each."""
        kept, self.lengths = [], lengths
        for length, row in zip(lengths, rows):
            k = self.draw(length, self.kv_heads, self.dims[1])
            v = k[..., :512] if self.dims[1] == 576 else self.draw(length, self.kv_heads, self.dims[2])
            first = 0 if self.window < 0 else max(0, length - self.window)
            self.store(self.table[row, first:length].long(), k[first:], v[first:])
            kept.append((k, v))
        return kept

    def store(self, slots, k, v):
        scales = (self.layer.k_scale, self.layer.v_scale)
        if isinstance(self.pool, MLATokenToKVPool):
            self.pool.set_mla_kv_buffer(self.layer, slots, k.squeeze(1), None, scales[0])
            return
        if isinstance(self.pool, SWAKVPool):
            slots = self.pool.slot_map[slots].long()
        self.pool.set_kv_buffer(self.layer, slots, k, v, *scales)

    def inputs(self, size):
        """q, k and v of every step and branch: ``[B, steps, topk, H, D]``; and what its list names, by position."""
        shape, dims = (size, self.draft_steps - 1, self.topk), self.dims
        q, k = self.draw(*shape, 4, dims[0]), self.draw(*shape, self.kv_heads, dims[1])
        v = k[..., :512] if dims[1] == 576 else self.draw(*shape, self.kv_heads, dims[2])
        if not self.has_lists:
            return q, k, v
        lists = torch.full((*shape, TOPK), -1, dtype=torch.int32)
        for b, length in enumerate(self.lengths):
            for step in range(shape[1]):
                for branch in range(self.topk):
                    seen = torch.randperm(length + step + 1, generator=self.generator)[:TOPK]
                    lists[b, step, branch, : len(seen)] = seen
        return q, k, v, lists.to(self.device)

    def model(self, input_ids, positions, batch, *, q, k, v, lists=None):
        """``[B, steps, topk, H * D_v]``: what a GraphRunner captures."""
        del input_ids, positions, batch
        outs = []
        for index in range(q.shape[1]):
            step = self.backend.step(index)
            flat = [x[:, index].flatten(0, 1) for x in (q, k, v)]
            if self.dims[1] == 576:
                flat[2] = None
            out = self.layer(*flat, step, **({} if lists is None else self.slots_of(step, lists[:, index])))
            outs.append(out.unflatten(0, (-1, self.topk)))
        return torch.stack(outs, 1)

    def slots_of(self, step, lists):
        """The option of a layer: lists of positions as slots of the step's branches."""
        lists = lists.flatten(0, 1)
        slots = step.req_to_token[step.req_pool_indices].gather(1, lists.clamp(min=0).long())
        return {"topk_indices": torch.where(lists < 0, lists, slots)}

    def expected(self, prefixes, q, k, v, lists=None):
        """float64, of every step and branch."""
        size, steps = q.shape[:2]
        out = torch.zeros(size, steps, self.topk, 4, self.dims[2], dtype=torch.float64, device=self.device)
        group, mla = 4 // self.kv_heads, self.dims[1] == 576
        sinks = self.layer.sinks.double().view(4, 1) if self.spec.has_sinks else q.new_zeros(4, 0).double()
        for b, (keys, values) in enumerate(prefixes):
            for branch in range(self.topk):
                for step in range(steps):
                    all_k = self.stored(torch.cat([keys, k[b, : step + 1, branch]]), self.layer.k_scale)
                    all_v = torch.cat([values, v[b, : step + 1, branch]])
                    all_v = self.stored(all_v, self.layer.k_scale if mla else self.layer.v_scale)
                    all_k, all_v = all_k.repeat_interleave(group, 1), all_v.repeat_interleave(group, 1)
                    if lists is not None:
                        named = lists[b, step, branch].long()
                        all_k, all_v = all_k[named[named >= 0]], all_v[named[named >= 0]]
                    first = 0 if self.window < 0 else max(0, len(all_k) - 1 - self.window)
                    scores = torch.einsum("hd,khd->hk", q[b, step, branch].double(), all_k[first:]) * SCALE
                    weights = torch.cat([scores, sinks], 1).softmax(-1)[:, : scores.shape[1]]
                    out[b, step, branch] = torch.einsum("hk,khd->hd", weights, all_v[first:])
        return out.flatten(-2)

    def stored(self, rows, scale):
        """float64, of what pages hold."""
        if scale is None:
            return rows.double()
        return (rows.float() / scale).to(self.spec.cache_dtype).double() * scale

    def draw_lengths(self, size):
        return [self.rng.choice([0, 1, self.page_size, self.rng.randint(0, self.most_prefix())]) for _ in range(size)]


def named(inputs):
    return dict(zip(("q", "k", "v", "lists"), inputs))


def run_eagerly(loop, batch, *inputs):
    loop.backend.init_forward_metadata(batch)
    out = loop.model(None, None, batch, **named(inputs))
    loop.backend.raise_on_fault()
    return out


def close(got, expected):
    return relative_error(got, expected) <= MAX_RELATIVE_ERROR[got.dtype]


def check_replays(
    name,
    page_size,
    topk,
    *,
    kind="mha",
    turns,
    recorder,
    sizes,
    device="cpu",
    dtype=torch.float32,
    trees=True,
    agrees=torch.equal,
    **more,
):
    """One graph per size holds a loop of 5 drafts: replays with other lengths, requests and numbers of them have the
    bits of eager loops, or agree otherwise. more: Of `Loop`."""
    options = {"kind": kind, "device": device, "dtype": dtype, "trees": trees, **more}
    loop, eager = (Loop(name, page_size, topk, 5, **options) for _ in range(2))
    shape, dims = (4, topk), loop.dims
    rows_of = {"q": (*shape, 4, dims[0]), "k": (*shape, loop.kv_heads, dims[1]), "v": (*shape, loop.kv_heads, dims[2])}
    lists_of = {"lists": StaticInput((*shape, TOPK), dtype=torch.int32, per="request")} if loop.has_lists else {}
    runner = GraphRunner(
        loop.model,
        loop.backend,
        loop.table,
        loop.pool,
        sizes=sizes,
        inputs={key: StaticInput(rows, dtype=dtype, per="request") for key, rows in rows_of.items()} | lists_of,
        layers={0: loop.layer},
        recorder=recorder,
    )
    runner.capture(progress=False)
    for one in (loop, eager):
        one.generator.manual_seed(1)
    for turn in range(turns):
        size = loop.rng.randint(1, REQUESTS)
        rows, lengths = loop.rng.sample(range(1, REQUESTS + 1), size), loop.draw_lengths(size)
        loop.fill(lengths, rows)
        eager.fill(lengths, rows)
        inputs, same = loop.inputs(size), eager.inputs(size)
        batch, ids = loop.batch(lengths, rows), torch.zeros(size, dtype=torch.int64, device=device)
        got = runner.replay(ids, batch, **named(inputs))
        expected = run_eagerly(eager, eager.batch(lengths, rows), *same)
        assert agrees(got, expected), f"turn {turn}"
