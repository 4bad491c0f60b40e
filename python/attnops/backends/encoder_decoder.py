"""Encoder-decoder models over any backend: one serves the decoder's own tokens, another the encoder's.

A request's first cells are its encoder's tokens. Its own tokens begin at the next page. Each of the two is a step that
every backend knows. One has rows of slots of its own tokens, the other has no causal rule.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.backends.base import AttentionBackend, LayerCall
from attnops.backends.multi_step import MakeBackend
from attnops.backends.store import store_rows
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, Limits, device_of

if TYPE_CHECKING:
    from attnops.layers.radix_attention import RadixAttention


class EncoderDecoderBackend(AttentionBackend):
    """Serves steps whose batches have `encoder_lens`, layers with `is_cross_attention` among them.

    Such a layer stores the k and v that it gets, the encoder's, at `encoder_out_cache_loc`. Without them it reads what
    is there. Its queries see all tokens of their request's encoder; where these are none, the output is 0.

    Args:
        make: Makes the two backends: `select_backend`, or a backend's class.
        spec: The model.
        limits: Of its steps; `max_seqlen` counts a request's own tokens.
        device: Where the batches' tensors are.
        max_encoder_tokens: Of a request.

    Raises:
        ValueError: `max_encoder_tokens` is below 1.
        NotImplementedError: the model's cache holds latents, or a backend has no attention without a causal rule.
    """

    name = "encoder_decoder"

    def __init__(
        self,
        make: MakeBackend,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        max_encoder_tokens: int,
    ) -> None:
        if max_encoder_tokens < 1:
            raise ValueError(f"attnops: max_encoder_tokens must be 1 or more, got {max_encoder_tokens}")
        if spec.is_mla:
            raise NotImplementedError("attnops: cross attention needs K and V, the model's cache holds latents (MLA)")
        self.spec, self.limits, self.device = spec, limits, device_of(device)
        self.max_encoder_tokens = max_encoder_tokens
        self.own = make(spec, limits, self.device)
        bidirectional = AttentionType.DECODER_BIDIRECTIONAL
        rules: dict[str, Any] = {"attn_type": bidirectional, "sliding_window_size": -1, "attention_chunk_size": 0}
        cross_limits = dataclasses.replace(limits, max_seqlen=max_encoder_tokens)
        self.cross = make(dataclasses.replace(spec, **rules), cross_limits, self.device)
        self.capability = getattr(self.own, "capability", None)  # type: ignore[misc,assignment]
        size = limits.max_batch_size
        self._rows = torch.zeros(size, limits.max_seqlen, dtype=torch.int32, device=self.device)
        self._requests = torch.arange(size, device=self.device)
        self._columns = torch.arange(limits.max_seqlen, device=self.device)
        self._now: tuple[AttentionBatch, AttentionBatch, AttentionBatch] | None = None

    @property
    def needs_cpu_seq_lens(self) -> bool:  # type: ignore[override]
        return self.own.needs_cpu_seq_lens or self.cross.needs_cpu_seq_lens

    def select(self, mode: Any) -> AttentionBackend:
        """What serves a mode's own tokens."""
        return getattr(self.own, "select", lambda mode: self.own)(mode)

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        """Host work of both.

        Raises:
            ValueError: the batch has no `encoder_lens`, or exceeds the limits.
        """
        if batch.encoder_lens is None:
            raise ValueError("attnops: a step of an encoder-decoder model needs encoder_lens")
        own = dataclasses.replace(
            batch,
            req_pool_indices=self._requests[: batch.batch_size],
            req_to_token=self._rows,
            encoder_lens=None,
            encoder_lens_cpu=None,
            encoder_out_cache_loc=None,
            attn_backend=self.own,
        )
        cross = dataclasses.replace(
            batch,
            cache_seqlens=batch.encoder_lens,
            cache_seqlens_cpu=batch.encoder_lens_cpu,
            out_cache_loc=None,
            max_cache_seqlen=None,
            max_prefix_tokens=None,
            tree_mask=None,
            encoder_lens=None,
            encoder_lens_cpu=None,
            encoder_out_cache_loc=None,
            attn_backend=self.cross,
        )
        self._now = (batch, own, cross)
        self.own.init_forward_metadata_out_graph(own, in_capture)
        self.cross.init_forward_metadata_out_graph(cross, in_capture)

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        own, cross = self._steps_of(batch)
        if batch.batch_size and not batch.forward_mode.is_idle():
            self._fill_rows(batch)
        self.own.init_forward_metadata_in_graph(own)
        self.cross.init_forward_metadata_in_graph(cross)

    def _fill_rows(self, batch: AttentionBatch) -> None:
        """The slots of each request's own tokens, from the page behind its encoder's on."""
        table, pool = batch.req_to_token, batch.token_to_kv_pool
        if table is None or pool is None:
            raise ValueError("attnops: a batch with encoder_lens needs req_to_token and token_to_kv_pool")
        assert batch.encoder_lens is not None, "init_forward_metadata_out_graph has checked"
        pages = (batch.encoder_lens.long().clamp(min=0) + pool.page_size - 1) // pool.page_size
        cells = (pages * pool.page_size).unsqueeze(1) + self._columns
        rows = batch.req_pool_indices.long().unsqueeze(1)
        self._rows[: batch.batch_size].copy_(table[rows, cells.clamp(max=table.shape[1] - 1)])

    def _steps_of(self, batch: AttentionBatch) -> tuple[AttentionBatch, AttentionBatch]:
        if self._now is None or self._now[0] is not batch:
            raise RuntimeError(
                "attnops: the step's plan is stale: init_forward_metadata_out_graph(batch) must run before the rest of "
                "an encoder-decoder step, with the same batch"
            )
        return self._now[1], self._now[2]

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """As of `AttentionBackend.forward`. k and v of a layer with `is_cross_attention` are its encoder's."""
        own, cross = self._steps_of(batch)
        if not layer.is_cross_attention:
            return self.own.forward(q, k, v, layer, own, save_kv_cache, **options)
        if save_kv_cache and k is not None and not batch.forward_mode.is_idle():
            loc = batch.encoder_out_cache_loc
            if v is None or loc is None:
                raise ValueError("attnops: k of cross attention needs v, and encoder_out_cache_loc in the batch")
            store_rows(layer, batch.token_to_kv_pool, loc, k, v, self.fault_report)
        return self.cross.forward(q, None, None, layer, cross, False, **options)

    def attend(self, call: LayerCall) -> None:
        """A call that `AttentionBackend.forward` made."""
        options = {"q_rope": call.q_rope, "k_rope": call.k_rope, "out": call.out}
        self.forward(call.q, call.k, call.v, call.layer, call.batch, call.save_kv_cache, **options)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.own.init_cuda_graph_state(max_bs, max_num_tokens)
        self.cross.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.own.get_cuda_graph_seq_len_fill_value()

    @property
    def fault_report(self) -> Tensor | None:
        return self.own.fault_report

    def raise_on_fault(self) -> None:
        self.own.raise_on_fault()
        self.cross.raise_on_fault()
