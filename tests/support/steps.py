"""Steps of small models with known answers: pools, batches, and attention in float64 over contiguous K and V.

Every page of a pool starts as NaN, and only a request's own tokens are written, so whatever a backend uses beyond them
shows. Page tables are random, and request rows are not in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from attnops import reference
from attnops.layers import RadixAttention
from attnops.pools import (
    DSATokenToKVPool,
    KVCache,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
    SWAKVPool,
)
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits
from draft_trees import attention_over, masks_of_parents, seen_by_walks
from torch import Tensor

FP4 = torch.float4_e2m1fn_x2
LIMITS = Limits(max_batch_size=8, max_seqlen=192, max_num_tokens=256, max_tokens_per_request=5)


@dataclass(frozen=True)
class Model:
    """A layer's worth of a model."""

    name: str
    spec: AttentionSpec
    layout: str = "NHD"
    swa_pool: bool = False
    scale: float = 0.15
    options: dict = field(default_factory=dict)

    def layer(self) -> RadixAttention:
        spec = self.spec
        fp8 = spec.cache_dtype in (torch.float8_e4m3fn, FP4)
        generator = torch.Generator().manual_seed(7)
        return RadixAttention(
            spec.num_q_heads,
            spec.head_dim,
            self.scale,
            spec.num_kv_heads,
            layer_id=1,
            logit_cap=spec.logit_cap,
            v_head_dim=spec.v_head_dim,
            sliding_window_size=spec.sliding_window_size,
            sinks=torch.randn(spec.num_q_heads, generator=generator) if spec.has_sinks else None,
            k_scale=torch.tensor(self.options.get("k_scale", [0.02])) if fp8 else None,
            v_scale=torch.tensor(self.options.get("v_scale", [0.03])) if fp8 and not spec.is_mla else None,
            attn_type=spec.attn_type,
            attention_chunk_size=spec.attention_chunk_size,
        )

    def pool(self, num_pages: int) -> KVCache | None:
        spec, size = self.spec, num_pages * self.spec.page_size
        if spec.attn_type is AttentionType.ENCODER_ONLY:
            return None
        pool: KVCache
        if spec.cache_dtype == FP4:
            shape = () if spec.is_mla else (spec.num_kv_heads, spec.head_dim)
            pool = (MLATokenToKVPoolFP4 if spec.is_mla else MHATokenToKVPoolFP4)(size, spec.page_size, *shape, 2)
            for buffer in pool.all_buffers()[0]:
                buffer.view(torch.uint8).fill_(0xFF)
            return pool
        if spec.is_mla:
            kind = DSATokenToKVPool if self.options.get("index_keys") else MLATokenToKVPool
            pool = kind(size, spec.page_size, spec.cache_dtype, 2)
            for pages in pool.all_buffers()[0]:
                poison(pages)
            return pool
        shape = (spec.page_size, spec.cache_dtype, spec.num_kv_heads, spec.head_dim)
        if self.swa_pool:
            pool = SWAKVPool(size, size, *shape, [0], [1], v_head_dim=spec.v_head_dim, layout=self.layout)
            buffers = [*pool.full_kv_pool.k_buffer, *pool.swa_kv_pool.k_buffer]
            buffers += [*pool.full_kv_pool.v_buffer, *pool.swa_kv_pool.v_buffer]
        else:
            pool = MHATokenToKVPool(size, *shape, 2, v_head_dim=spec.v_head_dim, layout=self.layout)
            buffers = [*pool.k_buffer, *pool.v_buffer]
        for pages in buffers:
            poison(pages)
        return pool


def poison(pages: Tensor) -> None:
    """NaN in every element: 0x7f is NaN in e4m3, and four of them NaN-like in the scales of 656-byte rows."""
    if pages.dtype in (torch.float8_e4m3fn, torch.uint8):
        pages.view(torch.uint8).fill_(0xFF)
    else:
        pages.fill_(float("nan"))


@dataclass
class Step:
    """One step: what a backend gets, and the answer."""

    model: Model
    layer: RadixAttention
    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor  # float64 [num_tokens, H_q, D_v]; zeros for padding tokens
    num_real: int
    lists: Tensor | None = None  # int32 [num_tokens, sparse_topk] of a sparse layer, see sparse_lists.py

    def run(self, backend, **options) -> Tensor:
        v = None if self.model.spec.is_mla else self.v
        if self.lists is not None:
            options = {"topk_indices": self.lists, **options}
        out = backend.forward(self.q, self.k, v, self.layer, self.batch, **options)
        return out.view(-1, self.layer.num_heads, self.layer.v_head_dim)

    def overwrite(self, other: Step) -> None:
        """Fills this step's tensors, and only their contents, with another's, as a graph runner does."""
        for mine, new in zip(self._memory(), other._memory(), strict=True):
            mine.copy_(new)

    def _memory(self) -> list[Tensor]:
        batch, pool = self.batch, self.batch.token_to_kv_pool
        tensors = [self.q, self.k, self.v, batch.req_pool_indices, batch.cache_seqlens]
        tensors += [batch.req_to_token, batch.out_cache_loc, batch.extend_seq_lens, batch.tree_mask, self.lists]
        if hasattr(pool, "get_kv_scale_buffer"):  # of an FP4 pool: codes and scales
            tensors += pool.all_buffers()[0]
        elif isinstance(pool, MLATokenToKVPool):
            tensors += [pages.view(torch.uint8) for pages in pool.kv_buffer]
            tensors += pool.index_k_with_scale_buffer if isinstance(pool, DSATokenToKVPool) else []
        elif pool is not None:
            tensors += [pages.view(torch.uint8) for pages in pool.get_kv_buffer(1)]
            tensors += [pool.slot_map]
        return [tensor for tensor in tensors if tensor is not None]


def rounded(values: Tensor, spec: AttentionSpec, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the cache holds for new rows, and the float64 values that it then stands for."""
    if spec.cache_dtype == torch.uint8:
        rows = reference.pack_mla_fp8_rows(values)
        return rows, reference.unpack_mla_fp8_rows(rows)
    if spec.cache_dtype == FP4:
        packed = reference.quantize_fp4(values, scale)
        return values, reference.dequantize_fp4(*packed, scale)
    if spec.cache_dtype == torch.float8_e4m3fn:
        assert scale is not None
        scale = scale.view(-1, 1)  # one, or one per KV head
        stored = (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return stored, stored.double() * scale.double()
    stored = values.to(spec.cache_dtype)
    return stored, stored.double()


def make_step(
    model: Model,
    mode: ForwardMode,
    prefix_lens: list[int],
    new_lens: list[int],
    *,
    seed: int = 0,
    num_tokens: int | None = None,
    uniform: bool = False,
    tree: bool | list[list[int]] = False,
    max_context: int = LIMITS.max_seqlen,
) -> Step:
    """A step over requests with `prefix_lens` cached and `new_lens` new tokens.

    Args:
        num_tokens: Rows of q, k and v; those beyond the new tokens are a graph's padding, filled with NaN.
        uniform: Every request brings the same number, so `tokens_per_request` is given instead of `extend_seq_lens`.
        tree: A random mask of drafts; or every request's tree by parents, with which the answer is a walk over them.
        max_context: Columns of `req_to_token`.
    """
    generator = torch.Generator().manual_seed(seed)
    spec, layer = model.spec, model.layer()
    # Steps of the contract's shapes get pools of one size: a graph's memory takes the place of another's.
    pool = model.pool(max(512, sum(prefix_lens) + sum(new_lens)) // spec.page_size + 8)
    batch_size, total = len(new_lens), sum(new_lens)
    rows = num_tokens or total

    def values(tokens: int, heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, heads, dim, generator=generator).to(spec.dtype)

    def padded(parts: list[Tensor], heads: int, dim: int) -> Tensor:
        padding = torch.full((rows - total, heads, dim), float("nan"), dtype=spec.dtype)
        return torch.cat([*parts, padding])

    seqlens = [prefix + new for prefix, new in zip(prefix_lens, new_lens)]
    req_to_token = torch.full((2 * LIMITS.max_batch_size, max_context), 2**30, dtype=torch.int32)
    req_rows = torch.randperm(req_to_token.shape[0], generator=generator)[:batch_size]
    slots = _random_slots(spec, pool, seqlens, generator)
    tree_mask = None
    if tree:
        tree_mask = _random_tree(new_lens, generator) if tree is True else masks_of_parents(tree)
    parts: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    expected = torch.zeros(rows, spec.num_q_heads, spec.v_head_dim, dtype=torch.float64)
    begin = 0
    for request, (prefix, new) in enumerate(zip(prefix_lens, new_lens)):
        q = values(new, spec.num_q_heads, spec.head_dim)
        k = values(prefix + new, spec.num_kv_heads, spec.head_dim)
        v = values(prefix + new, spec.num_kv_heads, spec.v_head_dim)
        if pool is not None:
            req_to_token[req_rows[request], : prefix + new] = slots[request].to(torch.int32)
            k_real, v_real = _fill_cache(model, layer, pool, slots[request][:prefix], k, v)
        else:
            k_real, v_real = k.double(), v.double()
        window = layer.sliding_window_size
        if isinstance(tree, list):
            options = {"scale": layer.scaling, "cap": layer.logit_cap, "sinks": layer.sinks}
            walked = seen_by_walks(tree[request], prefix, window)
            expected[begin : begin + new] = attention_over(q, k_real, v_real, walked, **options)[0]
        else:
            expected[begin : begin + new] = reference.attention(
                q,
                k_real,
                v_real,
                softmax_scale=layer.scaling,
                causal=spec.attn_type is AttentionType.DECODER,
                window_left=window,
                chunk_size=spec.attention_chunk_size,
                window_right=-1 if spec.attn_type is AttentionType.DECODER else window,
                logit_cap=layer.logit_cap,
                sinks=layer.sinks,
                tree_mask=None if tree_mask is None else tree_mask[request],
            )[0]
        begin += new
        for name, part in (("q", q), ("k", k[prefix:]), ("v", v[prefix:])):
            parts[name].append(part)
    loc = [s[prefix:] for s, prefix in zip(slots, prefix_lens)]
    loc = torch.cat([*loc, torch.full((rows - total,), -1, dtype=torch.int64)])
    batch = AttentionBatch(
        forward_mode=mode,
        req_pool_indices=req_rows,
        cache_seqlens=torch.tensor(seqlens, dtype=torch.int32),
        num_tokens=rows,
        req_to_token=None if pool is None else req_to_token,
        out_cache_loc=None if pool is None else loc,
        tokens_per_request=new_lens[0] if uniform else 0,
        extend_seq_lens=None if uniform else torch.tensor(new_lens, dtype=torch.int32),
        tree_mask=tree_mask,
        token_to_kv_pool=pool,
    )
    q = padded(parts["q"], spec.num_q_heads, spec.head_dim)
    k = padded(parts["k"], spec.num_kv_heads, spec.head_dim)
    v = padded(parts["v"], spec.num_kv_heads, spec.v_head_dim)
    return Step(model, layer, batch, q, k, v, expected, total)


def _random_slots(
    spec: AttentionSpec, pool: KVCache | None, seqlens: list[int], generator: torch.Generator
) -> list[Tensor]:
    """Slots of every request's tokens, in pages drawn at random; a window pool's pages are drawn apart."""
    if pool is None:
        return [torch.arange(seqlen) for seqlen in seqlens]
    size = spec.page_size
    pages = torch.randperm(pool.num_pages, generator=generator)
    if pool.slot_map is not None:
        window_pages = torch.randperm(pool.num_pages, generator=generator)
        pool.slot_map.copy_((window_pages.unsqueeze(1) * size + torch.arange(size)).flatten())
    out, taken = [], 0
    for seqlen in seqlens:
        count = -(-seqlen // size)
        mine = pages[taken : taken + count]
        taken += count
        assert taken <= pool.num_pages, "the problem needs a larger pool"
        out.append((mine.unsqueeze(1) * size + torch.arange(size)).flatten()[:seqlen])
    return out


def _random_tree(new_lens: list[int], generator: torch.Generator) -> Tensor:
    """Every draft token sees itself and, at random, some before it."""
    count = new_lens[0]
    visible = torch.rand(len(new_lens), count, count, generator=generator) < 0.5
    visible = visible.tril() | torch.eye(count, dtype=torch.bool)
    return reference.pack_tree_mask(visible)


def _fill_cache(
    model: Model, layer: RadixAttention, pool: KVCache, prefix_slots: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the prefix into its pages and returns the float64 K and V that the whole request then has."""
    spec, prefix = model.spec, len(prefix_slots)
    hidden = 0
    if pool.slot_map is not None:
        if model.options.get("drop_window"):  # tokens that no window reaches have no slot any more
            gone = prefix_slots[: max(prefix - spec.sliding_window_size - 1, 0) // spec.page_size * spec.page_size]
            pool.slot_map[gone] = -1
            hidden = max(prefix - spec.sliding_window_size, 0)  # no token of the step sees these: NaN stays there
        prefix_slots = pool.slot_map[prefix_slots].long()
        keep = prefix_slots >= 0
    else:
        keep = torch.ones(prefix, dtype=torch.bool)
    keep[:hidden] = False
    if spec.cache_dtype == FP4:
        store = pool.set_mla_kv_buffer if spec.is_mla else pool.set_kv_buffer
        rows = {"latent": k.squeeze(1)} if spec.is_mla else {"k": k, "v": v}
        scales = {"kv_scale": layer.k_scale} if spec.is_mla else {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        store(layer, prefix_slots[keep], **{name: x[:prefix][keep] for name, x in rows.items()}, **scales)
        _, real_k = rounded(k, spec, layer.k_scale)
        return real_k, real_k[..., : spec.v_head_dim] if spec.is_mla else rounded(v, spec, layer.v_scale)[1]
    page, offset = prefix_slots[keep] // spec.page_size, prefix_slots[keep] % spec.page_size
    if spec.is_mla:
        assert isinstance(pool, MLATokenToKVPool)
        stored, real = rounded(k.squeeze(1), spec, layer.k_scale)  # [tokens, 576]
        _put(pool.get_latent_buffer(layer.layer_id), page, offset, stored[:prefix][keep])
        return real.unsqueeze(1), real.unsqueeze(1)[..., : spec.v_head_dim]
    k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
    stored_k, real_k = rounded(k, spec, layer.k_scale)
    stored_v, real_v = rounded(v, spec, layer.v_scale)
    _put(k_pages, page, offset, stored_k[:prefix][keep])
    _put(v_pages, page, offset, stored_v[:prefix][keep])
    return real_k, real_v


def _put(pages: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    if pages.dtype == torch.float8_e4m3fn:
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    pages[page, offset] = rows
