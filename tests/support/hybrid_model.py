"""Small models that join linear and softmax attention, their definition in float64, and an engine that serves them."""

from __future__ import annotations

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
from linear_reference import convolve, delta_gates, delta_step, ssd_step
from model_zoo import LIMITS, VOCAB, WIDTH, Attention, Config, Engine, linear, rms_norm, rotate, run_eager
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
    """A linear layer of any kind, and its own definition in float64. `dtype`: of what the backend is given."""

    def __init__(self, kind: str, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
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
            conv_weights=None if kind == "lightning" else nn.Parameter((0.5 * torch.randn(channels, 4)).to(dtype)),
            bias=nn.Parameter(torch.randn(channels).to(dtype)) if kind == "mamba2" else None,
            A_log=None if kind == "short_conv" else 0.3 * torch.randn(HV) - (3 if kind == "lightning" else 0),
            dt_bias=bias,
            D=torch.randn(HV) if kind == "mamba2" else None,
            scaling=0.25 if kind == "lightning" else None,
        )

    def forward(self, x, positions, batch):
        a, b = (None if f is None else f(x).to(self.dtype) for f in (self.a, self.b))
        a = a.unflatten(-1, (HV, K)) if self.kind == "kda" else a
        mixed = F.silu(self.inner(x)) if self.kind == "lightning" else self.inner(x)
        return self.out(self.recurrence(mixed.to(self.dtype), a, b, batch).to(x.dtype))

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
    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        layer = lambda i: Attention(CONFIG, i, dtype) if i in FULL else LinearLayer(kind, i, dtype)  # noqa: E731
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


def make_engine(
    kind: str,
    model: HybridModel | None = None,
    host=run_eager,
    drafts: int = 0,
    checkpoints: int = 0,
    backend: str = "intel_amx",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Engine:
    """`dtype`: of what backends are given; the model's own products are float32, as are states."""
    model = HybridModel(kind, dtype).to(device) if model is None else model
    engine = Engine(CONFIG, backend, host, device=device, dtype=dtype, model=model)
    channels = HV * V if kind == "short_conv" else 2 * H * K + HV * V
    states = MambaPool(
        12,
        len(LINEAR),
        None if kind == "lightning" else (channels, 3),
        None if kind == "short_conv" else (HV, V, K),
        dtype=dtype,
        device=device,
        speculative_num_draft_tokens=drafts,
        num_k_heads=H,
        gate_per_channel=kind == "kda",
        ring_rows=drafts + 2,
    )
    for pool in states.states:
        if pool is not None:
            pool.fill_(float("nan"))  # what no request has must not show
    engine.rows = HybridReqToTokenPool(12, LIMITS.max_seqlen, states, device, max_checkpoints=checkpoints)
    linear_backend = BACKENDS[kind](engine.rows, LIMITS, LINEAR)
    engine.backend = HybridLinearAttnBackend(engine.backend, linear_backend, FULL)
    engine.pool = HybridLinearKVPool(8 * LIMITS.max_seqlen, 16, dtype, 2, CONFIG.head_dim, FULL, device)
    return engine


def keep_drafts(engine: Engine, count: int, paths: list[list[int]]) -> None:
    """Says which drafts count, moves the accepted keys side by side, and takes the rest of the tokens back.

    Args:
        count: Tokens of each request in the step that has just verified them.
        paths: The accepted ones of each request.
    """
    path = torch.tensor([(p + [99] * count)[:count] for p in paths], dtype=torch.int32)
    lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32)
    engine.backend.update_mamba_state_after_mtp_verify(path.to(engine.device), lengths.to(engine.device))
    for request, own in zip(engine.running, paths):
        begin = request.cached - count
        slots, drafts = engine.rows.slots(request.row, begin, request.cached), request.tokens[begin : begin + count]
        for layer in FULL:
            for pages in engine.pool.get_kv_buffer(layer):
                flat = pages.view(-1, *pages.shape[2:])
                flat[slots[: len(own)]] = flat[slots[torch.tensor(own, dtype=torch.int64)]].clone()
        request.tokens = request.tokens[:begin] + [drafts[i] for i in own]
        request.cached = begin + len(own)


def reference_logits(model, tokens):
    with torch.no_grad():
        wide = HybridModel(model.mixers[0].kind, torch.float64).double()
        wide.load_state_dict(model.state_dict())
        for own, theirs in zip(wide.mixers, model.mixers):
            if isinstance(own, LinearLayer):
                for name, buffer in theirs.recurrence.named_buffers():
                    setattr(own.recurrence, name, buffer.double().cpu())
        return wide.reference(tokens)
