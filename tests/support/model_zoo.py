"""Whole models small enough for tests, one per kind of attention, and an engine that serves them step by step.

Random weights, two layers, float32 but for the attention, which has the dtype that is asked for. Each calls
`RadixAttention` as a served model does: with the batch, or without one inside `forward_context`, as a compiled model
does anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attnops.backends import AttentionBackend, HybridAttnBackend, get_backend_class
from attnops.layers import RadixAttention, collect_layers, forward_context
from attnops.pools import KVCache, MHATokenToKVPool, MLATokenToKVPool, PagedTokenToKVPoolAllocator, ReqToTokenPool
from attnops.reference import pack_tree_mask
from attnops.types import MLA_KV_LORA_RANK, MLA_ROPE_DIM, AttentionBatch, AttentionSpec, ForwardMode, Limits
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, PAGE_SIZE, NOPE = 61, 48, 2, 16, 16
LIMITS = Limits(max_batch_size=8, max_seqlen=128, max_num_tokens=160, max_tokens_per_request=3)


@dataclass(frozen=True)
class Config:
    """A kind of model.

    Args:
        qk_norm: RMS norm of each head's q and k before the rotation.
        window: Of every second layer; -1: none.
        logit_cap, final_cap: Soft caps, of scores and of logits; 0.0: off.
        sinks: A learned sink per head.
        mla: Latent attention with absorbed queries; the dims are then those of the latent cache.
    """

    name: str
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    qk_norm: bool = False
    window: int = -1
    logit_cap: float = 0.0
    final_cap: float = 0.0
    sinks: bool = False
    mla: bool = False

    def spec(self, dtype: torch.dtype = torch.float32, page_size: int = PAGE_SIZE) -> AttentionSpec:
        options = {"dtype": dtype, "page_size": page_size}
        if self.mla:
            return AttentionSpec.mla(self.num_heads, **options)
        return AttentionSpec(
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_window_size=self.window,
            logit_cap=self.logit_cap,
            has_sinks=self.sinks,
            **options,
        )


ZOO = [
    Config("llama"),
    Config("qwen3", num_heads=8, num_kv_heads=2, qk_norm=True),
    Config("gemma", num_heads=3, num_kv_heads=1, head_dim=64, window=11, logit_cap=3.0, final_cap=5.0),
    Config("gpt_oss", num_heads=8, num_kv_heads=4, window=7, sinks=True),
    Config("deepseek", mla=True),
]


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``[num_tokens, heads, dim]``."""
    half = x.shape[-1] // 2
    frequency = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (positions.unsqueeze(-1) * frequency).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, config: Config, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = linear(WIDTH, (heads + 2 * kv_heads) * dim)
        self.out = linear(heads * dim, WIDTH)
        self.attention = RadixAttention(
            heads,
            dim,
            dim**-0.5,
            kv_heads,
            layer_id,
            logit_cap=config.logit_cap,
            sliding_window_size=config.window if layer_id % 2 else -1,
            sinks=nn.Parameter(torch.randn(heads)) if config.sinks else None,
        )

    def forward(self, x: Tensor, positions: Tensor, batch: AttentionBatch | None) -> Tensor:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        q, k, v = self.qkv(x).unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        if self.config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        q, k = rotate(q, positions).to(self.dtype), rotate(k, positions).to(self.dtype)
        return self.out(self.attention(q, k, v.contiguous().to(self.dtype), batch).float())


class LatentAttention(nn.Module):
    def __init__(self, config: Config, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads = config.num_heads
        self.heads, self.dtype = heads, dtype
        self.q = linear(WIDTH, heads * (NOPE + MLA_ROPE_DIM))
        self.down = linear(WIDTH, MLA_KV_LORA_RANK + MLA_ROPE_DIM)
        self.k_up = nn.Parameter(torch.randn(heads, NOPE, MLA_KV_LORA_RANK) * MLA_KV_LORA_RANK**-0.5)
        self.v_up = nn.Parameter(torch.randn(heads, MLA_KV_LORA_RANK, NOPE) * MLA_KV_LORA_RANK**-0.5)
        self.out = linear(heads * NOPE, WIDTH)
        dim, scale = MLA_KV_LORA_RANK + MLA_ROPE_DIM, (NOPE + MLA_ROPE_DIM) ** -0.5
        self.attention = RadixAttention(heads, dim, scale, 1, layer_id, v_head_dim=MLA_KV_LORA_RANK)

    def forward(self, x: Tensor, positions: Tensor, batch: AttentionBatch | None) -> Tensor:
        q, q_rope = self.q(x).unflatten(-1, (self.heads, -1)).split([NOPE, MLA_ROPE_DIM], dim=-1)
        latent, k_rope = self.down(x).split([MLA_KV_LORA_RANK, MLA_ROPE_DIM], dim=-1)
        q_rope, k_rope = rotate(q_rope, positions), rotate(k_rope.unsqueeze(1), positions).squeeze(1)
        absorbed = torch.einsum("thn,hnc->thc", q, self.k_up).contiguous().to(self.dtype)
        latent, q_rope, k_rope = rms_norm(latent).to(self.dtype), q_rope.to(self.dtype), k_rope.to(self.dtype)
        out = self.attention(absorbed, latent, None, batch, q_rope=q_rope, k_rope=k_rope).float()
        heads = torch.einsum("thc,hcn->thn", out.unflatten(-1, (self.heads, -1)), self.v_up)
        return self.out(heads.flatten(1))


class TinyModel(nn.Module):
    """``model(input_ids, positions, batch) -> logits [num_tokens, VOCAB]``."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(len(config.name))
        self.config = config
        attention = LatentAttention if config.mla else Attention
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.attentions = nn.ModuleList(attention(config, layer, dtype) for layer in range(LAYERS))
        self.gate_up = nn.ModuleList(linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for attention, gate_up, down in zip(self.attentions, self.gate_up, self.down):
            x = x + attention(rms_norm(x), positions, batch)
            gate, up = gate_up(rms_norm(x)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * up)
        logits = self.head(rms_norm(x))
        cap = self.config.final_cap
        return cap * torch.tanh(logits / cap) if cap else logits


def make_pool(spec: AttentionSpec, tokens: int, device: torch.device | str = "cpu") -> KVCache:
    """A pool full of NaN: what no token was stored to must not show."""
    if spec.is_mla:
        pool: KVCache = MLATokenToKVPool(tokens, spec.page_size, spec.dtype, LAYERS, device)
        buffers = pool.kv_buffer
    else:
        shape = (spec.num_kv_heads, spec.head_dim)
        pool = MHATokenToKVPool(tokens, spec.page_size, spec.dtype, *shape, LAYERS, device)
        buffers = [*pool.k_buffer, *pool.v_buffer]
    for pages in buffers:
        pages.fill_(float("nan"))
    return pool


@dataclass
class Request:
    row: int
    tokens: list[int]
    cached: int = 0


# run(engine, input_ids, batch) -> logits [num_tokens, VOCAB]
Host = Callable[["Engine", Tensor, AttentionBatch], Tensor]


def run_eager(engine: Engine, input_ids: Tensor, batch: AttentionBatch) -> Tensor:
    engine.backend.init_forward_metadata(batch)
    with torch.no_grad(), forward_context(batch, engine.layers):
        return engine.model(input_ids, batch.positions, batch)


def make_backend(name: str, spec: AttentionSpec, device: torch.device | str = "cpu") -> AttentionBackend:
    """A backend by name. One that only decodes leaves prompts to torch_native."""
    backend = get_backend_class(name)(spec, LIMITS, device)
    if not backend.capability.delegates_prefill:
        return backend
    return HybridAttnBackend(get_backend_class("torch_native")(spec, LIMITS, device), backend, "decode")


class Engine:
    """Serves requests greedily over a paged cache. Hosts differ in how a step's model runs, and in nothing else.

    Args:
        backend: Its name.
        device, dtype, page_size: Of the cache; the model's own products are float32.
        model: Of `config` and `dtype`, of another engine; None: a new one.
    """

    def __init__(
        self,
        config: Config,
        backend: str,
        host: Host = run_eager,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = PAGE_SIZE,
        model: TinyModel | None = None,
    ) -> None:
        self.config, self.host, self.device = config, host, torch.device(device)
        self.model = TinyModel(config, dtype).to(device) if model is None else model
        self.layers = collect_layers(self.model)
        spec = config.spec(dtype, page_size)
        self.backend = make_backend(backend, spec, device)
        tokens = 8 * LIMITS.max_seqlen
        self.pool = make_pool(spec, tokens, device)
        self.allocator = PagedTokenToKVPoolAllocator(tokens, page_size)
        self.rows = ReqToTokenPool(12, LIMITS.max_seqlen, device)
        self.running: list[Request] = []

    def add(self, *prompts: list[int]) -> None:
        """Admits requests and computes their prompts, eagerly or as the host does it, and their next tokens."""
        fresh = [Request(self.rows.alloc()[0], list(prompt)) for prompt in prompts]
        logits = self.step(ForwardMode.EXTEND, fresh, [len(request.tokens) for request in fresh])
        last = torch.tensor([len(request.tokens) for request in fresh]).cumsum(0) - 1
        self._sample(fresh, logits[self._put(last)])
        self.running += fresh

    def decode(self) -> Tensor:
        """One token for each running request; the logits."""
        logits = self.step(ForwardMode.DECODE, self.running, [1] * len(self.running))
        self._sample(self.running, logits)
        return logits

    def verify(
        self,
        drafts: list[list[int]],
        mode: ForwardMode = ForwardMode.TARGET_VERIFY,
        *,
        ragged: bool = False,
        tree: Tensor | None = None,
    ) -> Tensor:
        """Logits of each request's next token and its drafts; accepts the drafts, right or not, and one more.

        Args:
            ragged: DRAFT_EXTEND with as many drafts as each request has.
            tree: bool ``[count, count]``, which draft sees which, the next token being the first; of all requests.
        """
        for request, draft in zip(self.running, drafts):
            request.tokens += draft
        counts = [1 + len(draft) for draft in drafts]
        logits = self.step(mode, self.running, counts, ragged=ragged, tree=tree)
        self._sample(self.running, logits[self._put(torch.tensor(counts).cumsum(0) - 1)])
        return logits

    def finish(self, index: int) -> list[int]:
        """A request leaves; its pages and its row are free for others. Its tokens."""
        request = self.running.pop(index)
        self.allocator.free(self.rows.slots(request.row, 0, request.cached))
        self.rows.free(request.row)
        return request.tokens

    def step(
        self,
        mode: ForwardMode,
        requests: list[Request],
        counts: list[int],
        *,
        ragged: bool = False,
        tree: Tensor | None = None,
    ) -> Tensor:
        """Computes `counts[i]` tokens of each request that are not cached yet."""
        begins = [request.cached for request in requests]
        ends = [begin + count for begin, count in zip(begins, counts)]
        last = [int(self.rows.host[r.row, r.cached - 1]) if r.cached else -1 for r in requests]
        slots = self.allocator.alloc_extend(begins, ends, last)
        assert slots is not None, "the test needs a larger pool"
        for request, begin, own in zip(requests, begins, slots.split(counts)):
            self.rows.write(request.row, begin, own)
        ragged = ragged or mode is ForwardMode.EXTEND
        depths = [torch.arange(count) if tree is None else tree.sum(1) - 1 for count in counts]
        mask = None if tree is None else pack_tree_mask(tree.expand(len(counts), -1, -1))
        batch = AttentionBatch(
            forward_mode=mode,
            req_pool_indices=self._put(torch.tensor([request.row for request in requests])),
            cache_seqlens=self._put(torch.tensor(ends, dtype=torch.int32)),
            num_tokens=sum(counts),
            req_to_token=self.rows.req_to_token,
            out_cache_loc=self._put(slots),
            tokens_per_request=0 if ragged else counts[0],
            extend_seq_lens=self._put(torch.tensor(counts, dtype=torch.int32)) if ragged else None,
            max_seqlen_q=max(counts, default=0),
            positions=self._put(torch.cat([begin + depth for begin, depth in zip(begins, depths)])),
            tree_mask=None if mask is None else self._put(mask),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )
        if self.backend.needs_cpu_seq_lens:
            batch.cache_seqlens_cpu = torch.tensor(ends, dtype=torch.int32)
            batch.extend_seq_lens_cpu = torch.tensor(counts, dtype=torch.int32) if ragged else None
        ids = [token for request, begin, end in zip(requests, begins, ends) for token in request.tokens[begin:end]]
        logits = self.host(self, self._put(torch.tensor(ids)), batch).clone()
        for request, end in zip(requests, ends):
            request.cached = end
        return logits

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    @staticmethod
    def _sample(requests: list[Request], logits: Tensor) -> None:
        for request, token in zip(requests, logits.argmax(-1).tolist()):
            request.tokens.append(token)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Of three drafts: the next token, and two that follow it but not one another.
FORK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def speculate(engine: Engine, ragged: bool = True) -> tuple[list[list[int]], list[Tensor]]:
    """Steps of speculative decoding while requests come and go; the tokens of each, and all logits.

    Args:
        ragged: In some steps requests bring different numbers of tokens.
    """
    draft = ForwardMode.DRAFT_EXTEND
    engine.add(prompt(9, 0), prompt(40, 1))
    logits = [engine.verify([prompt(2, 10), prompt(2, 20)])]
    logits.append(engine.verify([prompt(2, 11), prompt(2, 21)], draft))
    logits.append(engine.verify([prompt(2, 12), prompt(0 if ragged else 2, 22)], draft, ragged=ragged))
    engine.add(prompt(17, 2))
    logits.append(engine.verify([prompt(2, 13 + i) for i in range(3)], tree=FORK))
    logits.append(engine.verify([prompt(i if ragged else 2, 23 + i) for i in (1, 0, 2)], draft, ragged=ragged))
    done = [engine.finish(0)]
    logits.append(engine.verify([prompt(2, 33 + i) for i in range(2)]))
    logits.append(engine.verify([prompt(1 if ragged else 2, 43 + i) for i in range(2)], draft, ragged=ragged))
    logits.append(engine.verify([prompt(2, 53 + i) for i in range(2)], tree=FORK))
    logits.append(engine.decode())
    return done + [request.tokens for request in engine.running], logits


def serve(engine: Engine) -> tuple[list[list[int]], list[Tensor]]:
    """Requests of all lengths come and go; the tokens of each, in the order in which they leave, and all logits."""
    logits, done = [], []
    engine.add(prompt(5, 0), prompt(31, 1))
    logits += [engine.decode() for _ in range(3)]
    engine.add(prompt(16, 2))
    logits += [engine.decode() for _ in range(2)]
    done.append(engine.finish(0))
    logits += [engine.decode() for _ in range(2)]
    engine.add(prompt(1, 3), prompt(70, 4), prompt(15, 5))
    logits += [engine.decode() for _ in range(4)]
    while engine.running:
        done.append(engine.finish(len(engine.running) // 2))
        if engine.running:
            logits.append(engine.decode())
    return done, logits


def churn(engine: Engine, steps: int, seed: int = 0) -> tuple[list[list[int]], list[Tensor]]:
    """As `serve`: decode steps of 1 to 6 requests, of which some leave and others come at random before each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    logits, done = [], []
    for step in range(steps):
        full = max((len(request.tokens) for request in engine.running), default=0) >= LIMITS.max_seqlen - 1
        while engine.running and (full or len(engine.running) > 5 or draw(4) == 0):
            longest = max(range(len(engine.running)), key=lambda i: len(engine.running[i].tokens))
            done.append(engine.finish(longest if full else draw(len(engine.running))))
            full = False
        while not engine.running or (len(engine.running) < 6 and draw(3) == 0):
            engine.add(prompt(1 + draw(60), step))
        logits.append(engine.decode())
    return done + [request.tokens for request in engine.running], logits
