"""Inputs of steps that are padded to a number of tokens, whatever their mode; attention sees the step's own batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from attnops.graphs.static_inputs import StaticInput, StaticInputs
from attnops.types import AttentionBatch, ForwardMode


class TokenStep:
    """Ids, positions and more inputs of a model, at addresses that never change.

    Args:
        max_tokens: Of the largest bucket.
        inputs: More inputs of the model, by name; per token or per step.
        position_axes: As of `StaticStep`.

    Raises:
        ValueError: an input per request: a bucket may hold any number of requests.
    """

    def __init__(
        self,
        device: torch.device,
        max_tokens: int,
        inputs: Mapping[str, StaticInput] | None = None,
        position_axes: int = 0,
    ) -> None:
        inputs = inputs or {}
        for name, one in inputs.items():
            if one.per == "request":
                raise ValueError(
                    f"attnops: static input {name} is per request, but buckets count tokens; give each token its row"
                )
            if name in ("input_ids", "positions"):
                raise ValueError(f"attnops: {name} comes with the step; name the static input otherwise")
        positions = StaticInput(dtype=torch.int64, lead=(position_axes,) if position_axes else ())
        own = {"input_ids": StaticInput(dtype=torch.int64), "positions": positions}
        self.device = device
        self.inputs = StaticInputs({**own, **inputs}, device, max_tokens, 0)

    def model_inputs(self, size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a bucket: ids, and the inputs beside ids and positions."""
        views = self.inputs.views(size, 0)
        return views.pop("input_ids"), {name: view for name, view in views.items() if name != "positions"}

    def positions(self, size: int) -> Tensor:
        return self.inputs.views(size, 0)["positions"]

    def fill(self, input_ids: Tensor, batch: AttentionBatch, inputs: Mapping[str, Tensor]) -> None:
        """Copies a step in, of a `reason_against` that is empty."""
        self.inputs.fill(self._values(input_ids, batch, inputs), batch.num_tokens, 0)

    def clear(self) -> None:
        self.inputs.clear()

    def reason_against_batch(self, batch: AttentionBatch) -> str:
        """Why no step of a batch can be copied in; empty: its ids and inputs decide."""
        return "the batch has no positions" if batch.positions is None else ""

    def reason_against(self, input_ids: Tensor, batch: AttentionBatch, inputs: Mapping[str, Tensor]) -> str:
        """Why a step cannot be copied in; empty: it can."""
        return self.inputs.reason_against(self._values(input_ids, batch, inputs), batch.num_tokens, 0)

    def nbytes(self) -> int:
        return self.inputs.nbytes()

    @staticmethod
    def _values(input_ids: Tensor, batch: AttentionBatch, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert batch.positions is not None, "reason_against_batch has checked"
        return {"input_ids": input_ids, "positions": batch.positions, **inputs}


class BucketBatch:
    """What a model sees of its batch while a bucket is captured: only what all steps of the bucket have in common.

    Anything else would be recorded as it was at capture and be wrong at every replay, so asking for it is an error.
    """

    def __init__(self, static: TokenStep, size: int, modes: Collection[ForwardMode], attn_backend: Any) -> None:
        self.device, self.num_tokens, self.attn_backend = static.device, size, attn_backend
        self.positions = static.positions(size)
        self._modes = modes

    @property
    def forward_mode(self) -> ForwardMode:
        if len(self._modes) == 1:
            return next(iter(self._modes))
        raise ValueError(
            "attnops: the model asks for the batch's forward_mode, but these graphs serve several; build a runner for "
            "each mode with forward_modes=[...]"
        )

    def __getattr__(self, name: str) -> Any:
        if name not in AttentionBatch.__dataclass_fields__ and not isinstance(
            getattr(AttentionBatch, name, 0), property
        ):
            raise AttributeError(name)
        raise ValueError(
            f"attnops: the model uses batch.{name} outside its attention layers, and a graph would keep that of its "
            "capture; pass it as a static input (inputs=...)"
        )
