"""Hybrid models verify drafts: accepted ones are kept, others forgotten, as float64 token by token says."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from attnops import ops
from attnops.backends import GDNAttnBackend
from attnops.pools import HybridReqToTokenPool, MambaPool
from attnops.types import AttentionBatch, ForwardMode
from graph_hosts import Captured, Piecewise, Segments
from hybrid_model import BACKENDS, FULL, HV, H, HybridModel, K, V, keep_drafts, make_engine, reference_logits
from linear_reference import relative
from model_zoo import FORK, LIMITS, prompt, run_eager

MOST = 3  # drafts of a step


class Keeping:
    """A host that keeps the step's batch, for what is said of it afterwards."""

    def __init__(self, host=run_eager):
        self.host, self.batch = host, None

    def __call__(self, engine, input_ids, batch):
        self.batch = batch
        return self.host(engine, input_ids, batch)


def keep(engine, paths):
    keep_drafts(engine, engine.host.batch.tokens_per_request, paths)


def check(engine, logits, requests, parents=None):
    """Each draft's logits against a prompt that ends with it."""
    count = len(logits) // len(requests)
    for i, request in enumerate(requests):
        begin = request.cached - count
        for t in range(count):
            path, at = [], t
            while at >= 0:
                path.insert(0, at)
                at = at - 1 if parents is None else parents[at]
            tokens = request.tokens[:begin] + [request.tokens[begin + j] for j in path]
            assert relative(logits[i * count + t], reference_logits(engine.model, tokens)[-1]) < 2e-4


@pytest.mark.parametrize("kind", BACKENDS)
def test_drafts_are_verified_kept_and_rolled_back(kind):
    """Chains of changing length among other steps; rings run full; a branch and a prompt read what is in them."""
    r = random.Random(1)
    engine = make_engine(kind, host=Keeping(), drafts=MOST)
    engine.add(prompt(20, 1), prompt(3, 2))
    for step in range(6):
        if step == 3:
            engine.add(prompt(65, 3))
        if step == 4:
            engine.decode()
        drafts = r.choice([1, 2])
        logits = engine.verify([prompt(drafts, 10 * step + i) for i in range(len(engine.running))])
        for request in engine.running:
            request.tokens.pop()  # what the engine has drawn
        check(engine, logits, engine.running)
        paths = [list(range(r.randint(1, drafts + 1))) for _ in engine.running]
        rows = torch.tensor(paths[0]) if step == 5 else None
        keep(engine, paths)
        last = [reference_logits(engine.model, request.tokens)[-1] for request in engine.running]
        engine._sample(engine.running, torch.stack(last))
        assert rows is None or len(rows)
    logits = engine.decode()
    for i, request in enumerate(engine.running):
        assert relative(logits[i], reference_logits(engine.model, request.tokens[:-1])[-1]) < 2e-4
    request = engine.running[0]
    request.tokens += prompt(4, 99)
    logits = engine.step(ForwardMode.EXTEND, [request], [5])
    assert relative(logits[-1], reference_logits(engine.model, request.tokens)[-1]) < 2e-4


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("path", [[0, 1], [0, 2], [0], []])
def test_trees_are_verified(kind, path):
    engine = make_engine(kind, host=Keeping(), drafts=MOST)
    engine.add(prompt(9, 1), prompt(30, 2))
    logits = engine.verify([prompt(2, 5), prompt(2, 6)], tree=FORK)
    for request in engine.running:
        request.tokens.pop()
    check(engine, logits, engine.running, [-1, 0, 0])
    keep(engine, [path, [0]])
    for request in engine.running:
        request.tokens.append(7)
    logits = engine.verify([prompt(1, 7), prompt(1, 8)])
    for request in engine.running:
        request.tokens.pop()
    if path:
        check(engine, logits, engine.running)
    else:  # the token that was taken back has its place taken by another
        check(engine, logits[2:], engine.running[1:])


@pytest.mark.parametrize("kind", ["gdn", "short_conv"])
def test_drafts_are_convolved_by_one_op_and_kept_by_one_copy(kind, monkeypatch):
    """A call a layer, and one for all layers."""
    engine = make_engine(kind, host=Keeping(), drafts=MOST)
    engine.add(prompt(9, 1), prompt(4, 2))
    calls = []
    for name in ("causal_conv1d_update", "copy_states", "causal_conv1d"):
        op = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, name=name, op=op, **g: calls.append(name) or op(*a, **g))
    engine.verify([prompt(2, 5), prompt(2, 6)])
    layers = len(engine.backend.linear_attn_backend.layers)
    assert calls == ["causal_conv1d_update"] * layers and layers > 1
    pool, before = engine.rows.mamba_pool, engine.rows.mamba_pool.states.conv.clone()
    keep(engine, [[0, 1], []])
    assert calls[layers:] == ["copy_states"]
    first, second = (engine.rows.mamba_slot(request.row) for request in engine.running)
    assert torch.equal(pool.states.conv[:, second], before[:, second]), "nothing accepted"
    assert not torch.equal(pool.states.conv[:, first], before[:, first])
    assert torch.equal(pool.states.conv[:, first, :, :-2], before[:, first, :, 2:]), "two inputs on"


@pytest.mark.parametrize("host", [partial(Captured, sizes=[3]), Segments, Piecewise])
@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_every_host_of_graphs_verifies(kind, host):
    """As the eager engine; whole captured steps have padding rows."""
    torch.compiler.reset()
    eager = make_engine(kind, host=Keeping(), drafts=MOST)
    captured = make_engine(kind, eager.model, Keeping(host()), drafts=MOST)
    for engine in (eager, captured):
        engine.add(prompt(20, 1), prompt(5, 2))
    for step in range(4):
        logits = []
        for engine in (eager, captured):
            logits.append(engine.verify([prompt(2, 2 * step + i) for i in range(2)]))
            for request in engine.running:
                request.tokens.pop()
            keep(engine, [[0, 1], [0]])
            for request in engine.running:
                request.tokens.append(step)
            logits.append(engine.decode())
        assert relative(logits[2], logits[0]) < 1e-5 and relative(logits[3], logits[1]) < 1e-5


def test_a_branch_and_a_new_request_do_not_see_old_rings():
    pool = MambaPool(3, 1, None, (1, 2, 3), speculative_num_draft_tokens=2)
    first, second = pool.alloc(2)
    for slot in (first, second):
        pool.rings.ring_u[0, slot, 0, 0], pool.rings.ring_k[0, slot, 0, 0] = 2.0, 3.0
        pool.rings.ring_decay[0, slot], pool.rings.ring_len[0, slot] = 1.0, 1
    branch = pool.fork(first)
    assert pool.states.temporal[0, [first, branch]].eq(6).all() and not pool.rings.ring_len[0, [first, branch]].any()
    assert pool.rings.ring_len[0, second] == 1
    pool.free(second)
    assert pool.alloc() == [second] and pool.rings.ring_len[0, second] == 0
    with pytest.raises(ValueError, match=r"place must be in \[0, 1\) of MambaPool, got -1"):
        pool.layer_rings(-1)
    with pytest.raises(ValueError, match=r"speculative_num_draft_tokens must be in \[0, 16\], got 17"):
        MambaPool(1, 1, None, (1, 2, 3), speculative_num_draft_tokens=17)
    with pytest.raises(ValueError, match="ring_rows be at least 4"):
        MambaPool(1, 1, None, (1, 2, 3), speculative_num_draft_tokens=4, ring_rows=3)


@pytest.mark.parametrize("host", [run_eager, partial(Captured, sizes=[4])], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_accepted_tokens_of_a_draft_model_are_a_prompt(kind, host):
    """DRAFT_EXTEND with as many tokens as each request has had accepted. A captured step has a row of padding."""
    engine = make_engine(kind, host=host() if isinstance(host, partial) else host)
    engine.add(prompt(20, 1), prompt(5, 2), prompt(66, 3))
    for drafts in ([2, 0, 1], [0, 1, 2]):
        texts = [prompt(count, 40 + i) for i, count in enumerate(drafts)]
        logits = engine.verify(texts, ForwardMode.DRAFT_EXTEND, ragged=True)
        last = torch.tensor(drafts).add(1).cumsum(0) - 1
        for row, request in zip(last, engine.running):
            expected = reference_logits(engine.model, request.tokens[:-1])[-1]
            assert relative(logits[row], expected) < 2e-4
    logits = engine.decode()
    for i, request in enumerate(engine.running):
        assert relative(logits[i], reference_logits(engine.model, request.tokens[:-1])[-1]) < 2e-4


@pytest.mark.parametrize("host", [run_eager, partial(Captured, sizes=[4]), Segments], ids=["eager", "captured", "cut"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_draft_model_forgets_the_rejected_tokens_of_an_extend_step(kind, host):
    """DRAFT_EXTEND of three tokens each, as `DraftInput` makes it: rings have what a state must not take yet."""
    engine = make_engine(kind, host=Keeping(host() if isinstance(host, (partial, type)) else host), drafts=MOST)
    engine.add(prompt(20, 1), prompt(5, 2), prompt(64, 3))
    for turn, kept in enumerate([[3, 1, 2], [1, 0, 3], [2, 2, 1]]):
        logits = engine.verify([prompt(2, 10 * turn + i) for i in range(3)], ForwardMode.DRAFT_EXTEND)
        for request in engine.running:
            request.tokens.pop()  # what the engine has drawn
        check(engine, logits, engine.running)
        keep(engine, [list(range(count)) for count in kept])
        for request in engine.running:
            request.tokens.append(turn)
    logits = engine.decode()
    for i, request in enumerate(engine.running):
        assert relative(logits[i], reference_logits(engine.model, request.tokens[:-1])[-1]) < 2e-4


class LayersThatAttend(torch.nn.Module):
    """A draft model as MTP's: no layer has a state."""

    def __init__(self, model):
        super().__init__()
        self.mixers = torch.nn.ModuleList(model.mixers[i] for i in FULL)
        self.embedding, self.head = model.embedding, model.head

    forward = HybridModel.forward


@pytest.mark.parametrize("host", [run_eager, partial(Captured, sizes=[2])], ids=["eager", "captured"])
def test_a_draft_model_whose_layers_attend_takes_every_step(host):
    """Through the hybrid backend as through the one for layers that attend."""
    engines = [make_engine("gdn", host=host() if isinstance(host, partial) else host) for _ in range(2)]
    engines[1].backend = engines[1].backend.full_attn_backend
    steps = []
    for engine in engines:
        engine.model = LayersThatAttend(engine.model)
        engine.add(prompt(20, 1), prompt(5, 2))
        steps.append([engine.verify([prompt(2, 3), prompt(2, 4)], ForwardMode.DRAFT_EXTEND), engine.decode()])
    assert all(torch.equal(a, b) for a, b in zip(*steps))


def test_a_draft_loop_is_refused_by_linear_layers():
    engine = make_engine("kda")
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        cache_seqlens=torch.tensor([5], dtype=torch.int32),
        num_tokens=1,
        req_to_token=engine.rows.req_to_token,
        out_cache_loc=torch.tensor([4]),
        tokens_per_request=1,
        draft_steps=2,
        tree_mask=torch.ones(1, 1, 1, dtype=torch.uint8),
        positions=torch.tensor([4]),
        token_to_kv_pool=engine.pool,
        attn_backend=engine.backend,
    )
    linear = engine.backend.linear_attn_backend
    linear.init_forward_metadata(batch)
    layer = engine.model.mixers[0].recurrence
    with pytest.raises(NotImplementedError, match="kda does not serve a draft loop"):
        linear.forward(layer, batch, torch.zeros(1, 2 * H * K + HV * V))


def test_refusals_name_what_is_wrong():
    engine = make_engine("gdn", host=Keeping(), drafts=2)
    engine.add(prompt(5, 1))
    with pytest.raises(NotImplementedError, match="gdn verifies at most 2 tokens of a request"):
        engine.verify([[1, 2]])
    for drafts, text in ((0, [1]), (2, [1, 2])):
        engine = make_engine("gdn", host=Keeping(), drafts=drafts)
        engine.add(prompt(5, 1))
        match = rf"gdn serves DRAFT_EXTEND of at most {drafts} tokens_per_request .*got {1 + len(text)}"
        with pytest.raises(NotImplementedError, match=match):
            engine.verify([text], ForwardMode.DRAFT_EXTEND)
    engine = make_engine("gdn", host=Keeping(), drafts=2)
    engine.add(prompt(5, 1))
    engine.decode()
    path, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="gdn has verified nothing: the last step was of another mode"):
        engine.backend.update_mamba_state_after_mtp_verify(path, lengths)
    engine.verify([[1]])
    with pytest.raises(ValueError, match=r"accepted_path must be \[1, 2\] or of fewer requests, got \[1, 1\]"):
        engine.backend.update_mamba_state_after_mtp_verify(path[:, :1], lengths)
    assert isinstance(engine.backend.linear_attn_backend, GDNAttnBackend) and LIMITS.max_tokens_per_request == MOST
    assert isinstance(engine.rows, HybridReqToTokenPool)
