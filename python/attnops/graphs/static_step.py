"""The inputs of captured steps: one set of tensors, of which each graph sees as many rows as it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.graphs.static_inputs import StaticInput, StaticInputs
from attnops.types import AttentionBatch, ForwardMode

if TYPE_CHECKING:
    from attnops.backends.base import AttentionBackend
    from attnops.pools import KVCache

NOT_STORED = -1  # the slot of a padding token


class StaticStep:
    """Inputs of steps of one mode (decode, verify, draft extend), at addresses that never change.

    A batch of fewer requests than its graph leaves padding. Padding rows have the length `fill_value`, the slot -1, so
    that nothing is stored, and `padding_row` of `req_to_token`. In ragged steps padding requests bring no token, and
    tokens behind the batch's own belong to no request.

    Args:
        max_batch_size: Requests of the largest graph.
        forward_mode, tokens_per_request: Of every step.
        fill_value: `AttentionBackend.get_cuda_graph_seq_len_fill_value`.
        padding_row: A row of `req_to_token` whose first `fill_value` cells are slots of the pool, anyone's: they are
            only read. Any row of a `ReqToTokenPool` is one.
        tree: The steps have a tree mask.
        ragged: Requests bring different numbers of tokens, `tokens_per_request` at most.
        inputs: More inputs of the model, by name.
        position_axes: 3 for M-RoPE: positions are ``[3, num_tokens]``; 0: ``[num_tokens]``.
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
        ragged: bool = False,
        inputs: Mapping[str, StaticInput] | None = None,
        position_axes: int = 0,
    ) -> None:
        if fill_value < tokens_per_request:
            raise ValueError(f"attnops: fill value {fill_value} is below the {tokens_per_request} tokens per request")
        self.backend, self.req_to_token, self.pool = backend, req_to_token, token_to_kv_pool
        self.buffers_version = token_to_kv_pool.buffers_version  # at the capture
        self.forward_mode, self.tokens_per_request = forward_mode, tokens_per_request
        self.is_ragged = ragged
        own = {
            "input_ids": StaticInput(dtype=torch.int64),
            # A model looks ids and positions up in tables of its own, so those of padding must be in range, too.
            "positions": StaticInput(dtype=torch.int64, lead=(position_axes,) if position_axes else ()),
            "out_cache_loc": StaticInput(dtype=torch.int64, padding=NOT_STORED),
            "req_pool_indices": StaticInput(dtype=torch.int64, per="request", padding=padding_row),
            "cache_seqlens": StaticInput(dtype=torch.int32, per="request", padding=fill_value),
        }
        if tree:
            shape = (tokens_per_request, -(-tokens_per_request // 8))
            own["tree_mask"] = StaticInput(shape, torch.uint8, per="request")
        if getattr(backend, "max_encoder_tokens", 0):
            own["encoder_lens"] = StaticInput(dtype=torch.int32, per="request")
        if ragged:
            own["extend_seq_lens"] = StaticInput(dtype=torch.int32, per="request")
        inputs = inputs or {}
        if taken := sorted(own.keys() & inputs.keys()):
            raise ValueError(f"attnops: {', '.join(taken)} comes with the batch; name the static input otherwise")
        self._own = tuple(own)
        self.inputs = StaticInputs(
            {**own, **inputs}, backend.device, max_batch_size * tokens_per_request, max_batch_size
        )

    def __getattr__(self, name: str) -> Tensor:
        """The whole memory of an input."""
        tensors = self.__dict__["inputs"].tensors if "inputs" in self.__dict__ else {}
        if name not in tensors:
            raise AttributeError(name)
        return tensors[name]

    def batch(self, size: int) -> AttentionBatch:
        """The batch of a graph of `size` requests: views of the memory that all share."""
        tokens = size * self.tokens_per_request
        views = self.inputs.views(tokens, size)
        return AttentionBatch(
            forward_mode=self.forward_mode,
            req_pool_indices=views["req_pool_indices"],
            cache_seqlens=views["cache_seqlens"],
            num_tokens=tokens,
            req_to_token=self.req_to_token,
            out_cache_loc=views["out_cache_loc"],
            tokens_per_request=0 if self.is_ragged else self.tokens_per_request,
            extend_seq_lens=views.get("extend_seq_lens"),
            max_seqlen_q=self.tokens_per_request,
            positions=views["positions"],
            tree_mask=views.get("tree_mask"),
            encoder_lens=views.get("encoder_lens"),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )

    def model_inputs(self, size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a graph of `size` requests: ids, and the inputs beside those of the batch."""
        views = self.inputs.views(size * self.tokens_per_request, size)
        return views["input_ids"], {name: view for name, view in views.items() if name not in self._own}

    def fill(self, input_ids: Tensor, batch: AttentionBatch, inputs: Mapping[str, Tensor]) -> None:
        """Copies a step in, of a `reason_against` that is empty. Device work on the current stream; nothing waits."""
        self.inputs.fill(self._values(input_ids, batch, inputs), batch.num_tokens, batch.batch_size)

    def fill_lengths(self, own: AttentionBatch, batch: AttentionBatch) -> None:
        """The host's copies of a step's lengths into a graph's batch, for backends that plan with them.

        What the step does not bring stays absent, which such a backend then names. An idle step has padding alone.
        """
        rest, names = own.batch_size - batch.batch_size, ("cache_seqlens", "extend_seq_lens", "encoder_lens")
        lengths = {name: getattr(batch, f"{name}_cpu") for name in names}
        if batch.forward_mode.is_idle():
            rest = own.batch_size
            lengths = {name: torch.zeros(0, dtype=torch.int32) if name in self._own else None for name in names}
        for name, values in lengths.items():
            padding = self.inputs.declared[name].padding if name in self._own else 0
            setattr(own, f"{name}_cpu", _longer(values, rest, padding))

    def clear(self) -> None:
        """Padding everywhere, as before the first step."""
        self.inputs.clear()

    def reason_against(self, input_ids: Tensor, batch: AttentionBatch, inputs: Mapping[str, Tensor]) -> str:
        """Why a step cannot be copied in; empty: it can."""
        if reason := self.reason_against_batch(batch):
            return reason
        values = self._values(input_ids, batch, inputs)
        return self.inputs.reason_against(values, batch.num_tokens, batch.batch_size)

    def reason_against_idle(self, batch: AttentionBatch) -> str:
        """Why no step of rows of padding can be; empty: it can."""
        return self._reason_against_buffers() if batch.num_tokens else "an idle batch of no rows has nothing to replay"

    def reason_against_batch(self, batch: AttentionBatch) -> str:
        """Why no step of a batch can be; empty: its ids and inputs decide."""
        here = f"the graphs are of {self.forward_mode.name}"
        if batch.forward_mode is not self.forward_mode:
            return f"{here}, the batch is {batch.forward_mode.name}; a runner serves one mode"
        if self.is_ragged and batch.is_uniform:
            return f"{here} with ragged=True, the batch is uniform; give it extend_seq_lens, not tokens_per_request"
        if not self.is_ragged and batch.tokens_per_request != self.tokens_per_request:
            got = f"{batch.tokens_per_request} tokens per request" if batch.is_uniform else "a ragged batch"
            return f"{here} with {self.tokens_per_request} tokens per request, got {got}"
        if self.is_ragged and batch.max_seqlen_q > self.tokens_per_request:
            return (
                f"a request of the batch may bring {batch.max_seqlen_q} tokens, the graphs hold "
                f"{self.tokens_per_request} of each; set max_seqlen_q to the largest of extend_seq_lens"
            )
        for name in ("positions", "out_cache_loc", *({"encoder_lens"} & self.inputs.declared.keys())):
            if getattr(batch, name) is None:
                return f"the batch has no {name}"
        has_tree = "tree_mask" in self.inputs.declared
        if (batch.tree_mask is None) == has_tree:
            return f"the graphs were captured {'with' if has_tree else 'without'} a tree mask (GraphRunner's tree=...)"
        table = batch.req_to_token
        if table is None or table.data_ptr() != self.req_to_token.data_ptr() or table.shape != self.req_to_token.shape:
            return "the batch has another req_to_token than the graphs read; keep one table and change its cells"
        if batch.token_to_kv_pool is not self.pool:
            return "the batch has another token_to_kv_pool than the graphs read; capture again for another pool"
        return self._reason_against_buffers()

    def _reason_against_buffers(self) -> str:
        if self.pool.buffers_version != self.buffers_version:
            return "buffers of the pool were replaced since the capture, the graphs read the old ones; capture again"
        return ""

    def nbytes(self) -> int:
        return self.inputs.nbytes()

    def _values(self, input_ids: Tensor, batch: AttentionBatch, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: input_ids if name == "input_ids" else getattr(batch, name) for name in self._own}
        return {**own, **inputs}


def _longer(lengths: Tensor | None, rest: int, fill: float) -> Tensor | None:
    return None if lengths is None else torch.nn.functional.pad(lengths, (0, rest), value=fill)
