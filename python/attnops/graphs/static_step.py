"""The inputs of captured steps: one set of tensors, of which each graph sees as many rows as it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.backends.base import AttentionBackend
    from attnops.pools import KVCache

NOT_STORED = -1  # the slot of a padding token


class StaticStep:
    """Inputs of uniform steps (decode, verify, draft extend), at addresses that never change.

    A batch of fewer requests than its graph leaves padding: rows behind it hold `fill_value` as their length, slot -1,
    so that nothing is stored, and `padding_row` of `req_to_token`.

    Args:
        max_batch_size: Requests of the largest graph.
        forward_mode, tokens_per_request: Of every step.
        fill_value: `AttentionBackend.get_cuda_graph_seq_len_fill_value`.
        padding_row: A row of `req_to_token` whose first `fill_value` cells are slots of the pool, anyone's: they are
            only read. Any row of a `ReqToTokenPool` is one.
        tree: The steps have a tree mask.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        req_to_token: Tensor,
        token_to_kv_pool: KVCache,
        *,
        max_batch_size: int,
        forward_mode: ForwardMode,
        tokens_per_request: int,
        fill_value: int,
        padding_row: int = 0,
        tree: bool = False,
    ) -> None:
        if fill_value < tokens_per_request:
            raise ValueError(f"attnops: fill value {fill_value} is below the {tokens_per_request} tokens per request")
        device, tokens = backend.device, max_batch_size * tokens_per_request

        def full(size: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self.backend, self.req_to_token, self.pool = backend, req_to_token, token_to_kv_pool
        self.forward_mode, self.tokens_per_request = forward_mode, tokens_per_request
        self.input_ids = full(tokens, 0)
        self.positions = full(tokens, 0)
        self.out_cache_loc = full(tokens, NOT_STORED)
        self.req_pool_indices = full(max_batch_size, padding_row)
        self.cache_seqlens = full(max_batch_size, fill_value, torch.int32)
        shape = (max_batch_size, tokens_per_request, -(-tokens_per_request // 8))
        self.tree_mask = torch.zeros(shape, dtype=torch.uint8, device=device) if tree else None
        self._padding = {"cache_seqlens": fill_value, "req_pool_indices": padding_row, "out_cache_loc": NOT_STORED}
        self._filled = 0  # requests: rows from here on hold padding, in every graph

    def batch(self, size: int) -> AttentionBatch:
        """The batch of a graph of `size` requests: views of the memory that all share."""
        tokens = size * self.tokens_per_request
        return AttentionBatch(
            forward_mode=self.forward_mode,
            req_pool_indices=self.req_pool_indices[:size],
            cache_seqlens=self.cache_seqlens[:size],
            num_tokens=tokens,
            req_to_token=self.req_to_token,
            out_cache_loc=self.out_cache_loc[:tokens],
            tokens_per_request=self.tokens_per_request,
            positions=self.positions[:tokens],
            tree_mask=None if self.tree_mask is None else self.tree_mask[:size],
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )

    def fill(self, input_ids: Tensor, batch: AttentionBatch) -> None:
        """Copies a step in. Device work only, on the current stream; nothing waits.

        Args:
            input_ids: int64 ``[num_tokens]``.
            batch: With `positions` and `out_cache_loc`, of a `reason_against` that is empty.
        """
        size, tokens = batch.batch_size, batch.num_tokens
        assert batch.positions is not None and batch.out_cache_loc is not None, "reason_against has checked"
        self.input_ids[:tokens].copy_(input_ids, non_blocking=True)
        self.positions[:tokens].copy_(batch.positions, non_blocking=True)
        self.out_cache_loc[:tokens].copy_(batch.out_cache_loc, non_blocking=True)
        self.req_pool_indices[:size].copy_(batch.req_pool_indices, non_blocking=True)
        self.cache_seqlens[:size].copy_(batch.cache_seqlens, non_blocking=True)
        if self.tree_mask is not None and batch.tree_mask is not None:
            self.tree_mask[:size].copy_(batch.tree_mask, non_blocking=True)
        if size < self._filled:  # only rows that the last step used and this one does not
            self._pad(size, self._filled)
        self._filled = size

    def clear(self) -> None:
        """Padding everywhere, as before the first step."""
        self._pad(0, self.cache_seqlens.shape[0])
        self._filled = 0

    def reason_against(self, batch: AttentionBatch) -> str:
        """Why a batch cannot be copied in; empty: it can."""
        got = (batch.forward_mode.name, batch.tokens_per_request)
        here = (self.forward_mode.name, self.tokens_per_request)
        if got != here:
            return f"the graphs are of {here[0]} with {here[1]} tokens per request, the batch is {got[0]} with {got[1]}"
        for name in ("positions", "out_cache_loc"):
            if getattr(batch, name) is None:
                return f"the batch has no {name}"
        if (batch.tree_mask is None) != (self.tree_mask is None):
            which = "without" if self.tree_mask is None else "with"
            return f"the graphs were captured {which} a tree mask"
        table = batch.req_to_token
        if table is None or table.data_ptr() != self.req_to_token.data_ptr() or table.shape != self.req_to_token.shape:
            return "the batch has another req_to_token than the graphs read"
        if batch.token_to_kv_pool is not self.pool:
            return "the batch has another token_to_kv_pool than the graphs read"
        return ""

    def nbytes(self) -> int:
        tensors = (self.input_ids, self.positions, self.out_cache_loc, self.req_pool_indices, self.cache_seqlens)
        trees = () if self.tree_mask is None else (self.tree_mask,)
        return sum(t.numel() * t.element_size() for t in (*tensors, *trees))

    def _pad(self, begin: int, end: int) -> None:
        per_request = self.tokens_per_request
        for name, value in self._padding.items():
            rows = per_request if name == "out_cache_loc" else 1
            getattr(self, name)[begin * rows : end * rows].fill_(value)
        # A model looks these up in tables of its own, so they must be in range.
        self.input_ids[begin * per_request : end * per_request].zero_()
        self.positions[begin * per_request : end * per_request].zero_()
