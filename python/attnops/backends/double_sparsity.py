"""Double sparsity: a decode step scores all keys by a few channels, and attends to the best of them alone.

Which channels of a KV head are heavy comes from a calibration file. The cache holds them a second time, as labels. A
token of a long request attends to `ds_heavy_token_num` keys of each KV head. A key's score is the largest product of
its label with a query of the head's group. The best keys are a list of blocks of one token (`ops.xqa_decode`).
Requests below `ds_sparse_decode_threshold` tokens, and all other steps, are dense.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import DECODE, AttentionBackend, LayerCall
from attnops.backends.capability import DECODER_MODES, FLOATS, PORTABLE_ARCHS, Capability, HeadDims
from attnops.backends.decode_steps import DecodeStep, DecodeSteps
from attnops.backends.fmha_steps import FmhaSteps
from attnops.backends.prepared import PreparedStep, in_one_thread
from attnops.backends.store import FP8, heads, store_kv
from attnops.metadata.block_plan import BlockDecodePlan
from attnops.metadata.plan import XqaDecodePlan
from attnops.plan_buffers import DecodePlans
from attnops.pools.double_sparse import DoubleSparseTokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

CHANNEL_TYPES = ("q", "k", "qk")
MOST_TOKENS = 2048  # of ops.topk_select
SCORE_BYTES = 64 << 20  # of scores that are held at once


def load_heavy_channels(
    path: str | Path, channel_type: str, channel_num: int, num_kv_heads: int, layer_num: int, start_layer: int = 0
) -> list[Tensor]:
    """Reads a calibration file of double sparsity.

    Args:
        path: JSON: under ``model.layers.N.self_attn.{q,k,qk}_proj``, for each head all its channels, heaviest first.
        channel_type: "q", "k" or "qk": by which of them the channels were ordered.
        channel_num: Channels to take of each head.
        num_kv_heads: Of the model. Where the file has rows of query heads, a KV head takes the channels whose places
            add up to the least over its group.

    Returns:
        int64 ``[num_kv_heads, channel_num]`` for each layer.

    Raises:
        ValueError: naming the key, or the extent, that the file lacks.
    """
    if channel_type not in CHANNEL_TYPES:
        raise ValueError(f"attnops: ds_heavy_channel_type must be one of {', '.join(CHANNEL_TYPES)}: {channel_type!r}")
    with open(path) as file:
        config = json.load(file)
    layers = []
    for index in range(start_layer, start_layer + layer_num):
        key = f"model.layers.{index}.self_attn.{channel_type}_proj"
        if key not in config:
            raise ValueError(f"attnops: {path} has no heavy channels {key}")
        order = torch.tensor(config[key], dtype=torch.int64)
        if order.dim() != 2 or order.shape[0] % num_kv_heads or order.shape[1] < channel_num:
            raise ValueError(
                f"attnops: {key} of {path} must be [a multiple of {num_kv_heads}, at least {channel_num}], "
                f"got {list(order.shape)}"
            )
        layers.append(_of_groups(order, num_kv_heads)[:, :channel_num].contiguous())
    return layers


def _of_groups(order: Tensor, num_kv_heads: int) -> Tensor:
    """Of rows of query heads one for each group: channels by the sum of their places."""
    if order.shape[0] == num_kv_heads:
        return order
    places = order.argsort(dim=1).view(num_kv_heads, -1, order.shape[1]).sum(1)
    return places.argsort(dim=1, stable=True)


class DoubleSparseAttnBackend(AttentionBackend):
    """Every mode but trees of drafts, of layers with K and V of one head dim, over a `DoubleSparseTokenToKVPool`.

    Args:
        spec, limits, device: As of `AttentionBackend`.
        sorted_channels: Of each layer int ``[num_kv_heads, >= ds_heavy_channel_num]``, heaviest first; or
        ds_channel_config_path: The file for `load_heavy_channels`; `layer_num` and `start_layer` say which layers.
        ds_heavy_channel_num: Channels of a label.
        ds_heavy_token_num: Keys that a decoded token attends to, up to 2048.
        ds_heavy_channel_type: "q", "k" or "qk", of the file.
        ds_sparse_decode_threshold: Requests of fewer tokens decode densely.

    Raises:
        NotImplementedError: what `AttentionBackend` refuses.
        ValueError: naming the option that does not fit.
    """

    name = "double_sparsity"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        chosen_on=frozenset(),
        archs=PORTABLE_ARCHS,
        needs_ops=frozenset({"fmha_paged"}),
        modes=DECODER_MODES,
        dtypes=FLOATS,
        kv_dtypes=frozenset({torch.float8_e4m3fn}),
        head_dims=HeadDims(32, 256, 8),
        logit_cap=True,
        sinks=True,
        tree_mask=True,
        cuda_graph=True,
    )

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        sorted_channels: Sequence[Tensor] | None = None,
        ds_channel_config_path: str | Path | None = None,
        layer_num: int = 0,
        start_layer: int = 0,
        ds_heavy_channel_num: int = 32,
        ds_heavy_token_num: int = 256,
        ds_heavy_channel_type: str = "qk",
        ds_sparse_decode_threshold: int = 4096,
    ) -> None:
        super().__init__(spec, limits, device)
        for option, value, least, most in (
            ("ds_heavy_channel_num", ds_heavy_channel_num, 2, spec.head_dim),
            ("ds_heavy_token_num", ds_heavy_token_num, 1, MOST_TOKENS),
            ("ds_sparse_decode_threshold", ds_sparse_decode_threshold, 0, 1 << 30),
        ):
            if not least <= value <= most:
                raise ValueError(f"attnops: {option} must be in [{least}, {most}], got {value}")
        if (sorted_channels is None) == (ds_channel_config_path is None):
            raise ValueError("attnops: double_sparsity needs sorted_channels or ds_channel_config_path, and not both")
        if sorted_channels is None:
            assert ds_channel_config_path is not None
            which = (ds_heavy_channel_num, spec.num_kv_heads, layer_num, start_layer)
            sorted_channels = load_heavy_channels(ds_channel_config_path, ds_heavy_channel_type, *which)
        self._channels = [self._checked(channels, ds_heavy_channel_num) for channels in sorted_channels]
        self._start_layer = start_layer
        self._prepared: PreparedStep[Any] = PreparedStep()
        options: dict[str, Any] = {"modes": DECODER_MODES, "prepared": self._prepared}
        self._decode = DecodeSteps(self.name, spec, limits, self.device, 0, **options)
        self._fmha = FmhaSteps(spec, limits, self.device, self._decode.buffers)
        self._selection = _Selection(spec, limits, self.device, ds_heavy_token_num, ds_sparse_decode_threshold)

    def _checked(self, channels: Tensor, count: int) -> Tensor:
        """int64 ``[num_kv_heads, count]`` on the backend's device."""
        if channels.dim() != 2 or channels.shape[0] != self.spec.num_kv_heads or channels.shape[1] < count:
            raise ValueError(
                f"attnops: sorted_channels must be [{self.spec.num_kv_heads}, at least {count}] for each layer, "
                f"got {list(channels.shape)}"
            )
        channels = channels[:, :count].long()
        if channels.numel() and not 0 <= int(channels.min()) <= int(channels.max()) < self.spec.head_dim:
            raise ValueError(f"attnops: sorted_channels must be in [0, {self.spec.head_dim})")
        return channels.to(self.device).contiguous()

    @property
    def fault_report(self) -> Tensor | None:
        return self._decode.buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        if batch.draft_steps:
            raise NotImplementedError("attnops: backend double_sparsity takes the branches of a draft loop as requests")
        if batch.tokens_per_request > 0:
            self._decode.out_graph(batch)
            return
        self.limits.check(batch)
        self._prepared.begin(batch, self._fmha.step(batch, self._decode.buffers.step(batch)))

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        if batch.tokens_per_request > 0:
            self._decode.in_graph(batch)
            if _selects(batch):
                self._selection.build(batch)
            return
        self._build_ragged(batch)

    @in_one_thread
    def _build_ragged(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens > 0 and batch.forward_mode is not ForwardMode.IDLE:
            self._decode.buffers.build(step.paged, batch)
            self._fmha.plan(step, batch)

    @in_one_thread
    def attend(self, call: LayerCall) -> None:
        batch, layer, step = call.batch, call.layer, self._prepared.of(call.batch)
        if call.q_rope is not None or call.k_rope is not None:
            raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
        pool, place = batch.token_to_kv_pool, layer.layer_id - self._start_layer
        if not isinstance(pool, DoubleSparseTokenToKVPool):
            raise ValueError(f"attnops: double_sparsity needs a DoubleSparseTokenToKVPool, got {type(pool).__name__}")
        if not 0 <= place < len(self._channels):
            raise ValueError(
                f"attnops: double_sparsity has heavy channels of {len(self._channels)} layers, not of "
                f"layer {layer.layer_id}"
            )
        channels = self._channels[place]
        if pool.heavy_channel_num != channels.shape[1]:
            raise ValueError(
                f"attnops: the pool's heavy_channel_num must be {channels.shape[1]} (ds_heavy_channel_num), "
                f"got {pool.heavy_channel_num}"
            )
        if call.save_kv_cache and call.k is not None:
            if batch.out_cache_loc is None:
                raise ValueError("attnops: save_kv_cache=True needs out_cache_loc in the batch")
            k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)
            labels = k.gather(2, channels.expand(k.shape[0], -1, -1))
            pool.set_label_buffer(layer, batch.out_cache_loc, labels, self.fault_report)
        if not _selects(batch):
            if batch.tokens_per_request > 0:
                self._decode.attend(call)
            else:
                self._fmha.attend(call, step)
            return
        if call.save_kv_cache and call.k is not None:
            if call.v is None:
                raise ValueError("attnops: a layer that stores k needs v")
            store_kv(layer, batch, step.paged, call.k, call.v, self.fault_report)
        self._selection.attend(call, step, pool, channels, self.fault_report)


def _selects(batch: AttentionBatch) -> bool:
    """A step of one decoded token for each request."""
    return batch.forward_mode is DECODE and batch.tokens_per_request == 1 and batch.num_tokens > 0


@dataclass(frozen=True)
class _Views:
    """Of one batch size, at addresses that never change."""

    dense_lengths: Tensor  # int32 [B], 0 where a request selects
    lengths: Tensor  # int32 [B], 0 where it does not
    row_lengths: Tensor  # int32 [B, H_kv], the same by row of scores
    lists: Tensor  # int32 [B, H_kv, heavy tokens]
    out: Tensor  # [B, H_q, D], of those that select
    dense: XqaDecodePlan
    plan: BlockDecodePlan


class _Selection:
    """Decode steps of requests that select and of others, side by side: one call for each kind, whatever the lengths.

    A request of the other kind has the length 0 in a call. Its rows are zeros there, so the results are added.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device, tokens: int, threshold: int) -> None:
        size, kv_heads = limits.max_batch_size, spec.num_kv_heads
        self._spec, self._device, self._tokens, self._threshold = spec, device, tokens, threshold
        group = dataclasses.replace(spec, num_q_heads=spec.num_q_heads // kv_heads, num_kv_heads=1)
        self._dense_plans = DecodePlans(spec, limits, size, 1, device)
        self._plans = DecodePlans(group, limits, size * kv_heads, 1, device)
        self._columns = limits.max_pages(spec.page_size) * spec.page_size
        self._requests = max(1, SCORE_BYTES // (4 * self._columns * kv_heads))  # whose scores are held at once
        self._requests = min(self._requests, size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._scores = zeros(self._requests, kv_heads, self._columns, dtype=torch.float32)
        self._lengths, self._row_lengths = zeros(2, size), zeros(size, kv_heads)
        self._lists, self._tables = zeros(size, kv_heads, tokens), zeros(size, kv_heads, tokens)
        self._keys = zeros(size, kv_heads)
        self._sinks = BlockDecodePlan.scratch_of_sinks(size, spec.num_q_heads, kv_heads, spec.head_dim, device)
        self._out = zeros(size, spec.num_q_heads, spec.v_head_dim, dtype=spec.dtype)
        self._views: dict[int, _Views] = {}

    def views(self, size: int) -> _Views:
        if size not in self._views:
            spec = self._spec
            decode, dense = self._plans.views(size * spec.num_kv_heads)[-1], self._dense_plans.views(size)[-1]
            assert isinstance(decode, XqaDecodePlan) and isinstance(dense, XqaDecodePlan)
            plan = BlockDecodePlan(
                batch_size=size,
                seqlen_q=1,
                num_q_heads=spec.num_q_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                num_blocks=self._tokens,
                block_size=1,
                page_size=spec.page_size,
                block_tables=self._tables[:size],
                block_seqlens=self._keys[:size],
                decode=decode,
                sink_lse=self._sinks[0][:, :size],
                no_values=self._sinks[1],
            )
            dense_lengths, lengths = self._lengths[0, :size], self._lengths[1, :size]
            rows, lists, out = self._row_lengths[:size], self._lists[:size], self._out[:size]
            self._views[size] = _Views(dense_lengths, lengths, rows, lists, out, dense, plan)
        return self._views[size]

    def build(self, batch: AttentionBatch) -> None:
        """Device work, recorded in a graph: who selects, and the plan of who does not."""
        views, lengths = self.views(batch.batch_size), batch.cache_seqlens
        selects = lengths >= self._threshold
        torch.mul(lengths, ~selects, out=views.dense_lengths)
        torch.mul(lengths, selects, out=views.lengths)
        views.row_lengths.copy_(views.lengths.unsqueeze(1).expand_as(views.row_lengths))
        ops.xqa_decode_plan(views.dense, views.dense_lengths)

    def attend(
        self,
        call: LayerCall,
        step: DecodeStep,
        pool: DoubleSparseTokenToKVPool,
        channels: Tensor,
        report: Tensor | None,
    ) -> None:
        """A layer, whose keys are stored."""
        layer, batch, table = call.layer, call.batch, step.paged.page_table
        views, spec = self.views(batch.batch_size), self._spec
        assert table is not None
        q = heads("q", call.q, layer.num_heads, layer.head_dim).contiguous()
        k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if pool.dtype in FP8 else (None, None)
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        options: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "logit_cap": layer.logit_cap,
            "sinks": layer.sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "report": report,
        }
        pages = (k_pages, v_pages, table)
        ops.xqa_decode(q, *pages, views.dense_lengths, views.dense, out=out, **options)

        grouped = q.unflatten(1, (spec.num_kv_heads, -1))
        wanted = channels.unsqueeze(1).expand(*grouped.shape[:3], -1)
        q_labels = grouped.gather(3, wanted).flatten(1, 2).to(pool.label_dtype)
        labels = pool.get_label_buffer(layer.layer_id)
        for first in range(0, batch.batch_size, self._requests):
            part = slice(first, min(first + self._requests, batch.batch_size))
            scores = self._scores[: part.stop - first]
            ops.label_scores(scores, q_labels[part], labels, table[part], views.lengths[part], report=report)
            rows = (scores.flatten(0, 1), views.row_lengths[part].flatten(), self._tokens)
            ops.topk_select(*rows, indices=views.lists[part].flatten(0, 1), report=report)
        ops.xqa_decode(q, *pages, views.lengths, views.plan, block_list=views.lists, out=views.out, **options)
        out.add_(views.out)
