"""Models that join linear and softmax attention: whole, in chunks and replayed, against float64 token by token."""

from __future__ import annotations

import pytest
import torch
from attnops.backends import GDNAttnBackend, HybridLinearAttnBackend
from attnops.layers import RadixLinearAttention
from attnops.pools import HybridReqToTokenPool, MambaPool
from attnops.types import AttentionBatch, ForwardMode
from graph_hosts import Captured, Compiled, Piecewise, Segments
from graph_tape import GraphTape
from hybrid_model import BACKENDS, HV, H, K, V, make_engine, reference_logits
from linear_reference import relative
from model_zoo import LIMITS, Request, prompt, run_eager, serve


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_model_serves_as_float64_says(kind):
    """Prompts together and alone, decode, requests that leave and come."""
    engine = make_engine(kind)
    engine.add(prompt(70, 1), prompt(3, 2), prompt(64, 3))
    for _ in range(3):
        engine.decode()
    gone = engine.finish(1)
    engine.add(prompt(1, 4), prompt(20, 5))
    logits = engine.decode()
    for i, request in enumerate(engine.running):
        expected = reference_logits(engine.model, request.tokens[:-1])
        assert relative(logits[i], expected[-1]) < 2e-4
        assert request.tokens[-1] == int(expected[-1].argmax())
    assert gone[-1] == int(reference_logits(engine.model, gone[:-1])[-1].argmax())


@pytest.mark.parametrize("kind", BACKENDS)
def test_prompts_in_chunks_give_the_tokens_of_the_whole(kind):
    whole = make_engine(kind)
    whole.add(prompt(100, 9))
    parts = make_engine(kind, whole.model)
    request = Request(parts.rows.alloc()[0], prompt(100, 9))
    for count in (64, 1, 30, 5):
        logits = parts.step(ForwardMode.EXTEND, [request], [count])
    parts._sample([request], logits[-1:])
    parts.running.append(request)
    for engine in (whole, parts):
        for _ in range(4):
            engine.decode()
    assert parts.running[0].tokens == whole.running[0].tokens


@pytest.mark.parametrize("host", [Captured, Segments, Piecewise, Compiled])
@pytest.mark.parametrize("kind", BACKENDS)
def test_every_host_of_graphs_serves_as_an_eager_engine(kind, host):
    """While requests come and go. Row 0, which pads a captured step, is a request's."""
    torch.compiler.reset()
    eager = make_engine(kind)
    hosted = make_engine(kind, eager.model, host())
    tokens, logits = serve(eager)
    theirs, other = serve(hosted)
    assert theirs == tokens and all(relative(b, a) < 1e-5 for a, b in zip(logits, other))
    assert host is Piecewise or host is Compiled or hosted.host.replays > 10


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_a_branch_goes_on_from_a_copy(kind):
    """A second request shares the pages and forks the states of a prefix."""
    engine = make_engine(kind)
    engine.add(prompt(64, 9))
    row = engine.running[0].row
    branch = Request(engine.rows.alloc()[0], [*prompt(64, 9), 5], cached=64)
    slots = engine.rows.slots(row, 0, 64).clone()
    engine.allocator.share(slots)
    engine.rows.write(branch.row, 0, slots)
    engine.rows.start_from(branch.row, engine.rows.mamba_slot(row))
    engine.running.append(branch)
    engine.decode()
    for request in engine.running:
        assert request.tokens[-1] == int(reference_logits(engine.model, request.tokens[:-1])[-1].argmax())


@pytest.mark.parametrize("host", [None, Captured])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_request_goes_on_from_a_state_of_another_prompts_way(kind, host):
    """Kept at 64 and 128 tokens of a prompt in chunks; bits and tokens are those of the whole prompt."""
    engine = make_engine(kind, checkpoints=2, host=host() if host else run_eager)
    pool, rows = engine.rows.mamba_pool, engine.rows
    text = prompt(128, 9)
    first = Request(rows.alloc()[0], list(text))
    kept = pool.alloc(2)
    rows.keep_at(first.row, [64, 128], kept)
    others = Request(rows.alloc()[0], prompt(90, 4))  # in the same steps, and keeps nothing
    for counts in ((63, 40), (2, 50), (63, 0)):
        live = [(r, n) for r, n in zip((first, others), counts) if n]
        logits = engine.step(ForwardMode.EXTEND, [r for r, _ in live], [n for _, n in live])
    twin = make_engine(kind, engine.model)
    alone = Request(twin.rows.alloc()[0], list(text))
    for count, slot in ((64, kept[0]), (64, kept[1])):
        twin.step(ForwardMode.EXTEND, [alone], [count])
        for states, expected in zip(pool.states, twin.rows.mamba_pool.states):
            if states is not None:
                own = expected[:, twin.rows.mamba_slot(alone.row)]
                assert relative(states[:, slot], own) < 1e-6 and bool(states[:, slot].isfinite().all())
    branch = Request(rows.alloc()[0], list(text), cached=64)
    slots = rows.slots(first.row, 0, 64).clone()
    engine.allocator.share(slots)
    rows.write(branch.row, 0, slots)
    rows.start_from(branch.row, kept[0])
    again = engine.step(ForwardMode.EXTEND, [branch], [64])
    assert relative(again[-1], logits[-1]) < 1e-5


def test_wishes_that_cannot_be_are_errors():
    engine = make_engine("gdn", checkpoints=2)
    rows, pool = engine.rows, engine.rows.mamba_pool
    row, slots = rows.alloc()[0], pool.alloc(3)
    for tokens, given, message in (
        ([64], slots[:2], "one place each, at most 2"),
        ([64, 128, 192], slots, "one place each, at most 2"),
        ([65], slots[:1], "positive multiples of 64, got 65"),
        ([0], slots[:1], "positive multiples of 64, got 0"),
        ([64, 128], [slots[0]] * 2, "is given twice"),
        ([64], [rows.mamba_slot(row)], "or is the row's own"),
        ([64], [11], "is not in use"),
    ):
        with pytest.raises(ValueError, match=message):
            rows.keep_at(row, tokens, given)
    pool.share(slots[:1])
    with pytest.raises(ValueError, match="has 2 holders: copy it before you write to it"):
        rows.keep_at(row, [64], slots[:1])
    rows.keep_at(row, [64], slots[1:2])
    assert rows.checkpoints[row].tolist() == [[64, slots[1]], [-1, -1]]
    rows.free(row)
    assert (rows.checkpoints == -1).all()


def test_a_captured_decode_step_serves_other_requests():
    """Recorded with padding rows, replayed with requests and one row of padding."""
    engine, twin = make_engine("gdn"), make_engine("gdn")
    for e in (engine, twin):
        e.add(prompt(20, 1), prompt(5, 2))
    size = 3
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.full((size,), 11),  # a free row: no state
        cache_seqlens=torch.ones(size, dtype=torch.int32),
        num_tokens=size,
        req_to_token=engine.rows.req_to_token,
        out_cache_loc=torch.full((size,), -1),
        positions=torch.zeros(size, dtype=torch.int64),
        token_to_kv_pool=engine.pool,
        attn_backend=engine.backend,
    )
    ids, tape = torch.zeros(size, dtype=torch.int64), GraphTape()
    before = engine.rows.mamba_pool.states.temporal.clone()
    engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with torch.no_grad(), tape.capture():
        engine.backend.init_forward_metadata_in_graph(batch)
        out = engine.model(ids, batch.positions, batch)
    assert torch.equal(before.nan_to_num(), engine.rows.mamba_pool.states.temporal.nan_to_num()), "padding is nobody's"
    for _ in range(3):
        slots = []
        for i, request in enumerate(engine.running):
            last = int(engine.rows.host[request.row, request.cached - 1])
            slot = engine.allocator.alloc_extend([request.cached], [request.cached + 1], [last])
            engine.rows.write(request.row, request.cached, slot)
            slots.append(int(slot))
            batch.req_pool_indices[i], ids[i] = request.row, request.tokens[-1]
            batch.cache_seqlens[i], batch.positions[i] = request.cached + 1, request.cached
            request.cached += 1
        batch.out_cache_loc[:2] = torch.tensor(slots)
        engine.backend.init_forward_metadata_out_graph(batch)
        with torch.no_grad():
            tape.replay()
        assert relative(out[:2], twin.decode()) < 1e-5, "the rest of the model multiplies three rows, not two"
        engine._sample(engine.running, out[:2])
        assert [r.tokens for r in engine.running] == [r.tokens for r in twin.running]


def test_refusals_name_what_is_wrong():
    engine = make_engine("gdn")
    with pytest.raises(
        NotImplementedError,
        match="gdn verifies at most 0 tokens of a request",
    ):
        engine.add(prompt(5, 1))
        engine.verify([[1, 2]])
    layer = RadixLinearAttention(0, H, HV, K, V)
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        cache_seqlens=torch.ones(1, dtype=torch.int32),
        num_tokens=1,
        attn_backend=engine.backend.full_attn_backend,
    )
    with pytest.raises(ValueError, match="layer 0 is linear, and the batch's attn_backend serves no such layers"):
        layer(torch.zeros(1, 10), None, None, batch)
    with pytest.raises(ValueError, match=r"layers must name the 3 linear layers of MambaPool, got \[0\]"):
        GDNAttnBackend(engine.rows, LIMITS, [0])
    with pytest.raises(ValueError, match=r"layers \[0\] cannot be attention layers and linear ones"):
        HybridLinearAttnBackend(engine.backend.full_attn_backend, engine.backend.linear_attn_backend, [0, 1])
    with pytest.raises(ValueError, match=r"layer_id must be one of \[1, 4\], the layers that attend, got 2"):
        engine.pool.get_kv_buffer(2)


def test_states_have_holders():
    pool = MambaPool(3, 2, (4, 3), (1, 2, 3))
    first, second = pool.alloc(2)
    pool.states.temporal[:, first] = 5
    branch = pool.fork(first)
    assert pool.states.temporal[:, branch].eq(5).all() and pool.alloc() is None and pool.fork(first) is None
    pool.share([first])
    with pytest.raises(ValueError, match=f"slot {first} of MambaPool has 2 holders"):
        pool.copy_from([second], [first])
    pool.free(first)
    assert pool.available_size() == 0
    pool.free([first])
    with pytest.raises(ValueError, match=f"slot {first} of MambaPool is not in use"):
        pool.free(first)
    assert pool.alloc() == [first] and not pool.states.temporal[:, first].any(), "a new request's states are zero"
    rows = HybridReqToTokenPool(4, 8, MambaPool(2, 1, None, (1, 2, 3)))
    (row,) = rows.alloc()
    assert rows.req_index_to_mamba_index_mapping.tolist().count(-1) == 3 and rows.mamba_slot(row) >= 0
    assert rows.alloc(2) is None, "there is one state left"
    rows.free(row)
    assert rows.req_index_to_mamba_index_mapping.tolist() == [-1] * 4 and rows.mamba_pool.available_size() == 2
