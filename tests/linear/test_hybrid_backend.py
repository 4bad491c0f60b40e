"""Models that join linear and softmax attention: whole, in chunks and replayed, against float64 token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attnops.backends import (
    GDNAttnBackend,
    HybridLinearAttnBackend,
    KDAAttnBackend,
    LightningAttentionBackend,
    Mamba2AttnBackend,
    ShortConvAttnBackend,
)
from attnops.layers import RadixLinearAttention
from attnops.pools import HybridLinearKVPool, HybridReqToTokenPool, MambaPool
from attnops.types import AttentionBatch, ForwardMode
from graph_tape import GraphTape
from linear_reference import convolve, delta_gates, delta_step, relative, ssd_step
from model_zoo import LIMITS, VOCAB, WIDTH, Attention, Config, Engine, Request, linear, prompt, rms_norm, rotate
from torch import nn

CONFIG = Config("qwen3", num_heads=4, num_kv_heads=2, qk_norm=True)
H, HV, K, V = 2, 4, 16, 24
FULL, LINEAR = [1, 4], [0, 2, 3]
BACKENDS = {
    "gdn": GDNAttnBackend,
    "kda": KDAAttnBackend,
    "mamba2": Mamba2AttnBackend,
    "lightning": LightningAttentionBackend,
    "short_conv": ShortConvAttnBackend,
}


class LinearLayer(nn.Module):
    """A linear layer of any kind, and its own definition in float64."""

    def __init__(self, kind: str, layer_id: int) -> None:
        super().__init__()
        self.kind = kind
        channels = HV * V if kind == "short_conv" else 2 * H * K + HV * V
        self.inner = linear(WIDTH, channels)
        gates = {"gdn": HV, "kda": HV * K, "mamba2": HV}.get(kind, 0)
        self.a = linear(WIDTH, gates) if gates else None
        self.b = linear(WIDTH, HV) if kind in ("gdn", "kda") else None
        self.out = linear(HV * V, WIDTH)
        bias = torch.randn(HV, K) if kind == "kda" else torch.randn(HV) if gates else None
        self.recurrence = RadixLinearAttention(
            layer_id,
            H,
            HV,
            K,
            V,
            conv_weights=None if kind == "lightning" else nn.Parameter(0.5 * torch.randn(channels, 4)),
            bias=nn.Parameter(torch.randn(channels)) if kind == "mamba2" else None,
            A_log=None if kind == "short_conv" else 0.3 * torch.randn(HV) - (3 if kind == "lightning" else 0),
            dt_bias=bias,
            D=torch.randn(HV) if kind == "mamba2" else None,
            scaling=0.25 if kind == "lightning" else None,
        )

    def forward(self, x, positions, batch):
        a = None if self.a is None else self.a(x)
        a = a.unflatten(-1, (HV, K)) if self.kind == "kda" else a
        mixed = F.silu(self.inner(x)) if self.kind == "lightning" else self.inner(x)
        return self.out(self.recurrence(mixed, a, None if self.b is None else self.b(x), batch))

    def reference(self, x):
        """All tokens of one request, one after the other."""
        layer, mixed = self.recurrence, self.inner(x)
        if layer.conv_weights is None:
            mixed = F.silu(mixed)
        else:
            mixed, _ = convolve(mixed, layer.conv_weights, layer.bias, mixed.new_zeros(mixed.shape[1], 3), True)
        if self.kind == "short_conv":
            return self.out(mixed)
        widths = [HV * V, H * K, H * K] if self.kind == "mamba2" else [H * K, H * K, HV * V]
        parts = [p.unflatten(-1, (H, K) if w == H * K else (HV, V)) for p, w in zip(mixed.split(widths, -1), widths)]
        a, b = (None if f is None else f(x) for f in (self.a, self.b))
        a = a.unflatten(-1, (HV, K)) if self.kind == "kda" else a
        S, rows = x.new_zeros(1, HV, V, K), []
        for t in range(len(x)):
            now = [p[t : t + 1] for p in parts]
            if self.kind == "mamba2":
                u, B, C = now
                S, row = ssd_step(S, u, a[t : t + 1], -layer.A_log.exp(), B, C, layer.D, layer.dt_bias, None, 1.0, True)
            elif self.kind == "lightning":
                q, k, v = now
                S, row = ssd_step(S, v, None, -layer.A_log.exp(), k, q, None, None, None, 0.25, False)
            else:
                gates = delta_gates(a[t : t + 1], b[t : t + 1], layer.A_log, layer.dt_bias, 0.0)
                S, row = delta_step(S, *now, *gates, K**-0.5, True)
            rows.append(row.flatten(1))
        return self.out(torch.cat(rows))


class HybridModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        layer = lambda i: Attention(CONFIG, i, torch.float32) if i in FULL else LinearLayer(kind, i)  # noqa: E731
        self.mixers = nn.ModuleList(layer(i) for i in range(5))
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), linear(WIDTH, VOCAB)

    def forward(self, input_ids, positions, batch=None):
        x = self.embedding(input_ids)
        for mixer in self.mixers:
            x = x + mixer(rms_norm(x), positions, batch)
        return self.head(rms_norm(x))

    def reference(self, tokens):
        """Logits of a request's tokens, without a pool."""
        x, positions = self.embedding(torch.tensor(tokens)), torch.arange(len(tokens))
        for mixer in self.mixers:
            y = rms_norm(x)
            x = x + (mixer.reference(y) if isinstance(mixer, LinearLayer) else _softmax(mixer, y, positions))
        return self.head(rms_norm(x))


def _softmax(mixer, x, positions):
    q, k, v = mixer.qkv(x).unflatten(-1, (-1, CONFIG.head_dim)).split([4, 2, 2], dim=1)
    q, k = rotate(rms_norm(q), positions), rotate(rms_norm(k), positions)
    q, k, v = (t.transpose(0, 1).repeat_interleave(4 // t.shape[1], 0) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return mixer.out(out.transpose(0, 1).flatten(1))


def make_engine(kind: str, model: HybridModel | None = None) -> Engine:
    engine = Engine(CONFIG, "intel_amx", model=model or HybridModel(kind))
    channels = HV * V if kind == "short_conv" else 2 * H * K + HV * V
    states = MambaPool(
        12,
        len(LINEAR),
        None if kind == "lightning" else (channels, 3),
        None if kind == "short_conv" else (HV, V, K),
        dtype=torch.float32,
    )
    for pool in states.states:
        if pool is not None:
            pool.fill_(float("nan"))  # what no request has must not show
    engine.rows = HybridReqToTokenPool(12, LIMITS.max_seqlen, states)
    linear_backend = BACKENDS[kind](engine.rows, LIMITS, LINEAR)
    engine.backend = HybridLinearAttnBackend(engine.backend, linear_backend, FULL)
    engine.pool = HybridLinearKVPool(8 * LIMITS.max_seqlen, 16, torch.float32, 2, CONFIG.head_dim, FULL)
    return engine


def reference_logits(model, tokens):
    with torch.no_grad():
        wide = HybridModel(model.mixers[0].kind).double()
        wide.load_state_dict(model.state_dict())
        for own, theirs in zip(wide.mixers, model.mixers):
            if isinstance(own, LinearLayer):
                for name, buffer in theirs.recurrence.named_buffers():
                    setattr(own.recurrence, name, buffer.double())
        return wide.reference(tokens)


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
    with pytest.raises(NotImplementedError, match="gdn serves DECODE, EXTEND and MIXED, got TARGET_VERIFY"):
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
    with pytest.raises(ValueError, match=f"slot {first} of MambaPool is not one writer's alone"):
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
