"""The steps of a backend that only decodes: buffers, plans and calls, which such backends share by composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.backends.base import LayerCall, sees_past_window
from attnops.backends.bound_layer import BoundLayer, bind_layer
from attnops.backends.draft_windows import DecodeWindows, WindowStep
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.store import heads
from attnops.graph_buffers import MAX_CACHED_STEPS, PagedBuffers, PagedStep
from attnops.plan_buffers import BlockBuffers, DecodePlan, DecodePlans, TokenBlocks
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention

IDLE = ForwardMode.IDLE  # looked up once, not in every layer
MODES = frozenset({ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND})


@dataclass(frozen=True)
class DecodeStep:
    """Views for one shape of a step.

    Attributes:
        plans: Of each window of the model.
        blocks: Of a ragged step: its tokens in blocks, each of which a decode op takes for a request.
        layers: Bound at their first call. By layer, not by id: two models may take turns.
        windows: What layers with a window have in place of page table, lengths and mask, in a draft step.
    """

    paged: PagedStep
    plans: dict[int, DecodePlan]
    blocks: TokenBlocks | None
    layers: dict[RadixAttention, BoundLayer] = field(default_factory=dict)
    windows: WindowStep | None = None


class DecodeSteps:
    """Decode, verify and draft extend through `xqa_decode` or `mla_decode`.

    A backend's `forward` is the one here, without a call between: ``self.forward = steps.forward``.

    Uniform steps go to the op as they are. A ragged draft extend is padded. A request's tokens become the last rows of
    a block of `draft_width` tokens, because the op aligns queries and keys at the end.
    Rows before them belong to no token and are dropped afterwards. This holds for any lengths, also unexpected ones.

    Args:
        owner: The backend's name, for messages.
        draft_width: Tokens of a block; None: what fills a work of `mla_decode`; 0: no ragged steps come here.
        modes: Those that come here.
        prepared: Shared with others who serve steps of the same backend, each those of its own kind.
    """

    def __init__(
        self,
        owner: str,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device,
        draft_width: int | None = None,
        *,
        modes: frozenset[ForwardMode] = MODES,
        prepared: PreparedStep[Any] | None = None,
    ) -> None:
        self._owner, self._spec, self._limits, self._device = owner, spec, limits, device
        self._is_mla = spec.is_mla
        self.buffers = PagedBuffers(spec, limits, device)
        self._modes = modes
        # A block begins with rows of no token. Their windows would reach further back than any token's.
        self._lacks_rows = spec.sliding_window_size >= 0 and spec.attn_type is not AttentionType.DECODER
        no_blocks = draft_width == 0 or self._lacks_rows
        self._blocks = None if no_blocks else BlockBuffers(spec, limits, device, draft_width)
        self._plans: dict[int, DecodePlans] = {}
        for seqlen_q in {1, limits.max_tokens_per_request}:
            self._plans_for(seqlen_q)
        self._steps: dict[tuple[int, int, int, int, int | None, bool], DecodeStep] = {}
        self._windows = DecodeWindows(spec, limits, device)
        self._borrows = False
        self.prepared: PreparedStep[DecodeStep] = PreparedStep() if prepared is None else prepared
        if device.type == "cpu":  # where a layer is done when its call returns; on a GPU the stream keeps the order
            self.forward = self._alone(self.forward)  # type: ignore[method-assign]

    def borrow(self, other: object) -> None:
        """Page tables and plans of uniform steps: see `AttentionBackend.prepare_with`.

        With a window nothing is shared: what it leaves of the prefix differs from step to step.
        """
        if isinstance(other, DecodeSteps) and self._spec.sliding_window_size < 0:
            self.buffers, self._plans, self._borrows = other.buffers, other._plans, True

    def out_graph(self, batch: AttentionBatch) -> None:
        """Host work of a step: limits and views.

        Raises:
            NotImplementedError: the batch is prefill. Or the model is bidirectional with a sliding window, and the step
                ragged, or of more tokens of a request than the window reaches.
            ValueError: it exceeds the limits.
        """
        if batch.forward_mode not in self._modes:
            raise NotImplementedError(
                f"attnops: backend {self._owner} decodes, the batch is {batch.forward_mode.name}; select_backend or "
                "HybridAttnBackend joins it with a backend for prefill"
            )
        if self._lacks_rows and not batch.is_uniform and batch.num_tokens:
            raise NotImplementedError(
                f"attnops: backend {self._owner} serves no ragged {batch.forward_mode.name} of bidirectional attention "
                "with a sliding window; give all requests of the step as many tokens"
            )
        if sees_past_window(self._spec, batch):
            window = self._spec.sliding_window_size
            raise NotImplementedError(
                f"attnops: backend {self._owner} serves no {batch.forward_mode.name} of {batch.tokens_per_request} "
                f"tokens of bidirectional attention with sliding_window_size {window}: the decode ops bound a window "
                f"on the left alone. At most {window + 1} tokens of a request, or another backend, would do"
            )
        self._limits.check(batch)
        paged = self.buffers.step(batch)
        windowed = paged.window_out_cache_loc is not None
        drafts = (batch.draft_steps, batch.draft_step)
        key = (batch.batch_size, batch.num_tokens, batch.tokens_per_request, *drafts, windowed)
        if key not in self._steps:
            if len(self._steps) >= MAX_CACHED_STEPS:
                self._steps.clear()
            self._steps[key] = self._make(batch, paged)
        self.prepared.begin(batch, self._steps[key])

    @in_one_thread
    def in_graph(self, batch: AttentionBatch) -> None:
        """Device work of a step: page tables, blocks, plans."""
        step = self.prepared.plan(batch)
        if batch.num_tokens == 0 or (self._borrows and step.blocks is None):
            return
        self.buffers.build(step.paged, batch)
        cache_seqlens = batch.cache_seqlens
        if step.blocks is not None:
            step.blocks.build(batch, step.paged)
            cache_seqlens = step.blocks.cache_seqlens
        self._windows.plan(step.windows, step.plans, batch, cache_seqlens, self.buffers.report)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        *,
        out: Tensor | None = None,
        **ropes: Tensor | None,
    ) -> Tensor:
        """`AttentionBackend.forward` of a backend that only decodes: one layer, stored and attended in one call.

        Written in one piece: a server runs it once per layer, and each Python call costs a tenth of a kernel's launch.

        Args:
            ropes: `q_rope` and `k_rope` of MLA's layers.
        """
        q_rope = k_rope = None
        if ropes:
            q_rope, k_rope = ropes.pop("q_rope", None), ropes.pop("k_rope", None)
            if ropes:
                raise TypeError(f"attnops: forward got an unexpected argument {next(iter(ropes))}")
        if out is None:
            like_q = q.dim() == 2 and layer.v_head_dim == layer.head_dim  # made sooner than by a shape
            out = torch.empty_like(q) if like_q else q.new_empty(q.shape[0], layer.num_heads * layer.v_head_dim)
        if batch.num_tokens == 0 or batch.forward_mode is IDLE:
            return out.zero_()  # an idle rank's rows are padding
        step, cache_seqlens = self.prepared.of(batch), batch.cache_seqlens
        rows = tokens = out
        blocks, pool = step.blocks, batch.token_to_kv_pool
        if not save_kv_cache:
            k = None
        if blocks is not None:
            # A ragged step: queries are gathered into the blocks' rows, and results taken from there.
            q = blocks.gather(q.view(q.shape[0], layer.num_heads, -1))
            if q_rope is not None:
                q_rope = blocks.gather(q_rope.view(q_rope.shape[0], layer.num_heads, -1))
            tokens = heads("out", out, layer.num_heads, layer.v_head_dim)
            rows, cache_seqlens = blocks.results_for(tokens), blocks.cache_seqlens
        tree_mask, windows = batch.tree_mask, step.windows
        if windows is not None:
            if layer.sliding_window_size < 0:
                windows = None
            else:
                _, cache_seqlens, tree_mask = windows.of(batch)
        bound = step.layers.get(layer)
        if (
            bound is None
            or bound.version != layer.version
            or bound.pool is not pool
            or bound.buffers_version != pool.buffers_version
        ):
            report = self.buffers.report
            shared = (step.paged, step.plans, blocks, q, q_rope, rows, cache_seqlens, report)
            fp8, tree_keys = self._spec.fp8_products, batch.tree_keys
            bound = bind_layer(layer, pool, *shared, fp8_products=fp8, tree_keys=tree_keys, windows=windows)
            step.layers[layer] = bound
        slots = step.paged.window_out_cache_loc if bound.windowed else batch.out_cache_loc
        sinks = None if bound.sinks is None else bound.sinks["sinks"]
        k_scale = None if bound.k_scale is None else bound.k_scale["k_scale"]
        if self._is_mla:
            bound.call(rows, q, q_rope, k, k_rope, slots, cache_seqlens, tree_mask, sinks, k_scale)
        else:
            if q_rope is not None or k_rope is not None:
                raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
            v_scale = None if bound.v_scale is None else bound.v_scale["v_scale"]
            bound.call(rows, q, k, v, slots, cache_seqlens, tree_mask, sinks, k_scale, v_scale)
        if blocks is not None:
            blocks.scatter(rows, tokens)
        return out

    def _alone(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **options: Any) -> Tensor:
            with self.prepared.in_use():
                return forward(*args, **options)

        return run

    def attend(self, call: LayerCall) -> None:
        """`forward` of a call that was made by `AttentionBackend.forward`."""
        options = {"q_rope": call.q_rope, "k_rope": call.k_rope, "out": call.out}
        self.forward(call.q, call.k, call.v, call.layer, call.batch, call.save_kv_cache, **options)

    def _make(self, batch: AttentionBatch, paged: PagedStep) -> DecodeStep:
        if batch.is_uniform:
            plans = self._plans_for(batch.tokens_per_request).views(batch.batch_size)
            return DecodeStep(paged, plans, None, windows=self._windows.views(batch, plans))
        if batch.num_tokens == 0:
            return DecodeStep(paged, {}, None)
        assert self._blocks is not None, "a backend whose draft_width is 0 serves ragged steps elsewhere"
        blocks = self._blocks.blocks(batch.batch_size, batch.num_tokens)
        return DecodeStep(paged, self._blocks.plans.views(blocks.num_blocks), blocks)

    def _plans_for(self, seqlen_q: int) -> DecodePlans:
        """Plans exist for one token and for the limit; any other number gets its own at its first step."""
        if seqlen_q not in self._plans:
            size = self._limits.max_batch_size
            self._plans[seqlen_q] = DecodePlans(self._spec, self._limits, size, seqlen_q, self._device)
        return self._plans[seqlen_q]
