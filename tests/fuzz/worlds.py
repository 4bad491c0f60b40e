"""An engine's memory and the steps of a backend over it, with their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from attnops.backends import HybridAttnBackend, get_backend_class
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits
from torch import Tensor

from .draw import Draw
from .memory import HUGE_INDEX, bytes_of, fill_pages, poison_value
from .mla import V, stored_latents
from .options import draw_tree, pack, real, stored
from .oracle import Answer, Rules, attend, used_keys, visible

ROWS = 12  # of req_to_token; requests have the first ones, and the last is a graph's padding row
UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True)
class Shape:
    """Of a step.

    Args:
        prefix, new: Tokens of each request that are cached, and that it brings.
        padding: Rows of q, k, v behind the last token; ragged steps only.
        lists: Layers bring lists of rows.
    """

    mode: ForwardMode
    prefix: list[int]
    new: list[int]
    uniform: bool = False
    tree: bool = False
    padding: int = 0
    lists: bool = False


@dataclass
class Step:
    """What a backend gets, and the answer."""

    shape: Shape
    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    answer: Answer
    slots: Tensor  # of the prefixes' tokens that hold something, in the pool that the layer uses
    cached: tuple[Tensor, ...]  # their rows
    table: Tensor  # req_to_token
    slot_map: Tensor | None = None
    lists: Tensor | None = None  # int32 [tokens and padding, sparse_topk] of a sparse layer that brings them

    @property
    def tokens(self) -> int:
        return sum(self.shape.new)


def _listed(keys: Tensor, longest: int) -> Tensor:
    """bool ``[T, longest]`` of lists of keys, negative for none."""
    listed = torch.zeros(len(keys), longest + 1, dtype=torch.bool)
    listed.scatter_(1, torch.where(keys < 0, longest, keys), True)
    return listed[:, :longest]


@dataclass
class World:
    """A backend's model, and the memory of an engine that serves it."""

    draw: Draw
    name: str
    partner: str | None  # of a hybrid: what serves prefill
    verifies: str  # and whether that one or the other serves steps that verify, in every backend that is built
    spec: AttentionSpec
    limits: Limits
    layer: RadixAttention
    pool: MHATokenToKVPool | MLATokenToKVPool | SWAKVPool | None
    req_to_token: Tensor
    modes: list[ForwardMode] = field(default_factory=list)

    def build(self):
        """A fresh backend."""
        one = get_backend_class(self.name)(self.spec, self.limits, device=self.draw.device)
        if self.partner is None:
            return one
        prefill = get_backend_class(self.partner)(self.spec, self.limits, device=self.draw.device)
        return HybridAttnBackend(prefill, one, self.verifies)

    def shape(self, mode: ForwardMode | None = None, like: Shape | None = None) -> Shape:
        """A step's extents; those of a graph keep the requests and the tokens of `like`."""
        draw, limits = self.draw, self.limits
        if like is not None:
            new = list(like.new)
            draw.random.shuffle(new)
            return replace(like, new=new, prefix=self._prefixes(new))
        mode = draw.pick(self.modes) if mode is None else mode
        if mode is ForwardMode.IDLE:
            return Shape(mode, [], [])
        batch = draw.number(1, limits.max_batch_size)
        uniform = mode is not ForwardMode.EXTEND and mode is not ForwardMode.MIXED
        # Backends that only decode refuse ragged steps of bidirectional attention with a window.
        refused = self.spec.sliding_window_size >= 0 and self.spec.attn_type is not AttentionType.DECODER
        uniform = uniform and (mode is not ForwardMode.DRAFT_EXTEND or refused or draw.chance(0.5))
        if uniform:
            count = 1 if mode is ForwardMode.DECODE else draw.number(1, limits.max_tokens_per_request)
            if refused and "trtllm_mha" in (self.name, self.partner):  # and those that windows do not reach
                count = min(count, self.spec.sliding_window_size + 1)
            new = [count] * batch
        else:
            most = limits.max_tokens_per_request if mode is ForwardMode.DRAFT_EXTEND else 40
            new = [draw.number(1, most) for _ in range(batch)]
            if mode is ForwardMode.MIXED:
                new[0] = 1
        while sum(new) > limits.max_num_tokens:
            new.pop()
        tree = mode is ForwardMode.TARGET_VERIFY and self._takes_trees() and draw.chance(0.5)
        padding = 0 if uniform or draw.chance(0.6) else draw.number(0, min(limits.max_num_tokens - sum(new), 9))
        lists = bool(self.spec.sparse_topk) and draw.chance(0.8)  # a draft model may have no indexer
        return Shape(mode, self._prefixes(new), new, uniform, tree, padding, lists)

    def _takes_trees(self) -> bool:
        names = [self.name, *([] if self.partner is None else [self.partner])]
        return self.spec.attn_type is AttentionType.DECODER and all(
            get_backend_class(name).capability.tree_mask for name in names
        )

    def _prefixes(self, new: list[int]) -> list[int]:
        if self.spec.attn_type is AttentionType.ENCODER_ONLY:
            return [0] * len(new)
        return [self.draw.length(self.limits.max_seqlen - count) for count in new]

    def rules(self, shape: Shape) -> Rules:
        layer, spec = self.layer, self.spec
        causal = spec.attn_type is AttentionType.DECODER
        window = layer.sliding_window_size
        tree = draw_tree(self.draw, shape.new, shape.new[0]) if shape.tree else None
        sinks = None if layer.sinks is None else layer.sinks.detach().cpu()
        right = -1 if causal else window
        return Rules(layer.scaling, causal, window, right, layer.logit_cap, sinks, tree)

    def step(self, shape: Shape) -> Step:
        """A step of random requests, in random pages."""
        draw, spec = self.draw, self.spec
        lengths = [prefix + new for prefix, new in zip(shape.prefix, shape.new)]
        rules = self.rules(shape)
        keys = self._draw_lists(shape, lengths, rules) if shape.lists else None
        if keys is not None:
            rules = replace(rules, listed=_listed(keys, max(lengths, default=0)))
        count, total = sum(lengths), sum(shape.new)
        used = used_keys(shape.new, lengths, rules)
        q = draw.normal(total, spec.num_q_heads, spec.head_dim).to(spec.dtype)
        k = draw.normal(count, spec.num_kv_heads, spec.head_dim).to(spec.dtype)
        v = draw.normal(count, spec.num_kv_heads, spec.v_head_dim).to(spec.dtype)
        stored_values, values = self._stored(k, v)
        answer = attend(q.double(), *values, shape.new, lengths, rules)
        k[~used], v[~used] = math.nan, math.nan
        is_new = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, shape.prefix)] or [torch.zeros(0).bool()])
        slots, translated, slot_map = self._place(lengths, shape)
        keep = ~is_new & used
        req_rows = draw.permutation(ROWS - 1)[: len(lengths)]
        table = torch.full((ROWS, self.req_to_token.shape[1]), HUGE_INDEX, dtype=torch.int32)
        table[:, : self.limits.max_tokens_per_request] = 0  # of a graph's padding row: slots of the pool
        begin = 0
        for row, length in zip(req_rows.tolist(), lengths):
            table[row] = HUGE_INDEX
            table[row, :length] = slots[begin : begin + length].int()
            begin += length
        draw.note(mode=shape.mode.name, prefix=shape.prefix, new=shape.new, padding=shape.padding)
        batch = self._batch(shape, lengths, req_rows, slots[is_new], rules)

        def padded(values: Tensor, fill: float = math.nan) -> Tensor:
            return torch.cat([values, values.new_full((shape.padding, *values.shape[1:]), fill)]).to(
                draw.device, non_blocking=True
            )

        lists = None
        if keys is not None:
            request = [index for index, new in enumerate(shape.new) for _ in range(new)]
            rows = table[req_rows][request].gather(1, keys.clamp(min=0)) if total else keys.int()
            lists = padded(torch.where(keys < 0, keys.int(), rows), HUGE_INDEX)
        return Step(
            shape,
            batch,
            padded(q),
            padded(k[is_new]),
            padded(v[is_new]),
            answer,
            translated[keep],
            tuple(stored_rows[keep] for stored_rows in stored_values),
            table,
            slot_map,
            lists,
        )

    def _draw_lists(self, shape: Shape, lengths: list[int], rules: Rules) -> Tensor:
        """int64 ``[T, sparse_topk]``: what each token may see, by places in its request, then negative ones."""
        draw, topk = self.draw, self.spec.sparse_topk
        draw.saw("mode lists of rows")
        seen = visible(shape.new, lengths, rules)
        lists = torch.full((sum(shape.new), topk), draw.pick([-1, -1, -7]), dtype=torch.int64)
        fewer, token = draw.chance(0.4), 0
        for request, new in enumerate(shape.new):
            for i in range(new):
                keys = seen[request, i].nonzero().flatten()
                count = min(len(keys), topk, shape.prefix[request] + i + 1)  # a tree may show a token later ones
                count = draw.number(0, count) if fewer else count
                lists[token, :count] = keys[draw.permutation(len(keys))[:count]]
                token += 1
        return lists

    def _batch(self, shape: Shape, lengths: list[int], rows: Tensor, loc: Tensor, rules: Rules) -> AttentionBatch:
        draw, device = self.draw, self.draw.device
        cached = self.pool is not None
        tokens, longest = sum(shape.new) + shape.padding, max(shape.new, default=0)  # a bound must hold padding, too
        loc = torch.cat([loc, torch.full((shape.padding,), -1, dtype=torch.int64)])
        positions = [p + i for p, n in zip(shape.prefix, shape.new) for i in range(n)] + [0] * shape.padding
        known = draw.chance(0.4)
        mask = None
        if rules.tree is not None:
            bits = pack(draw, rules.tree)[:, : -(-rules.tree.shape[1] // 8)].contiguous()
            mask = bits.view(len(lengths), shape.new[0], -1).to(device, non_blocking=True)
        return AttentionBatch(
            forward_mode=shape.mode,
            req_pool_indices=rows.to(draw.pick([torch.int32, torch.int64])).to(device, non_blocking=True),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32).to(device, non_blocking=True),
            num_tokens=tokens,
            req_to_token=self.req_to_token if cached else None,
            out_cache_loc=loc.to(draw.pick([torch.int32, torch.int64])).to(device, non_blocking=True)
            if cached
            else None,
            tokens_per_request=shape.new[0] if shape.uniform else 0,
            extend_seq_lens=None
            if shape.uniform
            else torch.tensor(shape.new, dtype=torch.int32).to(device, non_blocking=True),
            max_seqlen_q=longest if known and not shape.uniform and tokens <= longest * len(shape.new) else 0,
            max_cache_seqlen=max(lengths) if known and lengths and tokens <= max(lengths) * len(lengths) else None,
            positions=torch.tensor(positions, dtype=torch.int64).to(device, non_blocking=True),
            tree_mask=mask,
            token_to_kv_pool=self.pool,
        )

    def _stored(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """(rows of the cache, float64 values of keys and values)."""
        spec, layer = self.spec, self.layer
        if self.pool is None:
            return (k, v), (k.double(), v.double())
        k_scale = None if layer.k_scale is None else layer.k_scale.detach().cpu()
        v_scale = None if layer.v_scale is None else layer.v_scale.detach().cpu()
        if spec.is_mla:
            rows, values = stored_latents(k.float().squeeze(1), spec.cache_dtype, k_scale)
            return (rows,), (values.unsqueeze(1), values.unsqueeze(1)[..., :V])
        rows = stored(k.float(), spec.cache_dtype, k_scale), stored(v.float(), spec.cache_dtype, v_scale)
        return rows, (real(rows[0], k_scale), real(rows[1], v_scale))

    def _place(self, lengths: list[int], shape: Shape) -> tuple[Tensor, Tensor, Tensor | None]:
        """(slots, slots in the layer's own pool, its slot map): of all tokens, in pages drawn at random."""
        if self.pool is None:
            slots = torch.arange(sum(lengths))
            return slots, slots, None
        size, order = self.spec.page_size, self.draw.permutation(self.pool.num_pages).tolist()
        parts = []
        for length in lengths:
            mine = [order.pop() for _ in range(-(-length // size))]
            parts += [mine[i // size] * size + i % size for i in range(length)]
        slots = torch.tensor(parts, dtype=torch.int64)
        if self.pool.slot_map is None:
            return slots, slots, None
        pages = self.draw.permutation(self.pool.num_pages)
        slot_map = (pages.unsqueeze(1) * size + torch.arange(size)).flatten()
        if not self.pool.is_windowed(self.layer.layer_id):
            return slots, slots, slot_map
        translated, begin = slot_map[slots], 0
        for length, cached in zip(lengths, shape.prefix):  # tokens that no window reaches may have left
            gone = self.draw.number(0, max(cached - self.spec.sliding_window_size, 0))
            slot_map[slots[begin : begin + gone]] = -1
            begin += length
        return slots, translated, slot_map

    def fill(self, step: Step) -> None:
        """Memory as the engine has it before the step: the prefixes, and NaN everywhere else."""
        self.req_to_token.copy_(step.table, non_blocking=True)
        if self.pool is None:
            return
        if step.slot_map is not None:
            self.pool.slot_map.copy_(step.slot_map, non_blocking=True)
        for pages, rows in zip(self.pages(), step.cached):
            whole = bytes_of(pages)
            whole.fill_(0xFF if whole.dtype == torch.uint8 else poison_value(whole.dtype))
            fill_pages(pages, step.slots, rows)

    def pages(self) -> tuple[Tensor, ...]:
        if isinstance(self.pool, MLATokenToKVPool):
            return (self.pool.get_latent_buffer(self.layer.layer_id),)
        return self.pool.get_kv_buffer(self.layer.layer_id)

    def run(self, backend, step: Step, **options) -> Tensor:
        """The layer's output ``[tokens, H_q, D_v]`` without padding."""
        k, v, q = step.k, None if self.spec.is_mla else step.v, step.q
        if options.pop("apart", False):
            options |= {"q_rope": q[..., V:].contiguous(), "k_rope": k[..., V:].contiguous()}
            q, k = q[..., :V].contiguous(), k[..., :V].contiguous()
        if step.lists is not None:
            options["topk_indices"] = step.lists
        out = backend.forward(q, k, v, self.layer, step.batch, **options)
        return out.view(-1, self.spec.num_q_heads, self.spec.v_head_dim)[: step.tokens]
