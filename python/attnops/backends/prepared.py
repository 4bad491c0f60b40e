"""Whose metadata a backend holds: a plan that belongs to another step is refused, not used."""

from __future__ import annotations

from typing import Generic, TypeVar

from attnops.types import AttentionBatch

Views = TypeVar("Views")


class PreparedStep(Generic[Views]):
    """The views of the step that a backend has prepared, and the batch that they are for.

    Plans and page tables are device memory that each step writes anew. A layer that runs with another batch than the
    one they were made for would read pages and lengths of the wrong requests, so it is told which half is missing.

    Attributes:
        planned: The batch for which both halves have run, if any. A layer whose batch this is need not ask `of`.
    """

    def __init__(self) -> None:
        self.views: Views | None = None
        self.planned: AttentionBatch | None = None
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch, views: Views) -> None:
        """The out-graph half has run."""
        self.views, self._batch, self.planned = views, batch, None

    def plan(self, batch: AttentionBatch) -> Views:
        """The in-graph half runs.

        Raises:
            RuntimeError: the out-graph half has not, or for another batch.
        """
        if self.views is None or self._batch is not batch:
            raise RuntimeError(
                "attnops: init_forward_metadata_out_graph(batch) must run before init_forward_metadata_in_graph, with "
                "the same batch; init_forward_metadata(batch) does both"
            )
        self.planned = batch
        return self.views

    def of(self, batch: AttentionBatch) -> Views:
        """A layer runs.

        Raises:
            RuntimeError: the metadata is missing, half made, or another batch's.
        """
        if self.planned is batch:
            assert self.views is not None
            return self.views
        if self._batch is None:
            raise RuntimeError("attnops: init_forward_metadata must run before a step's layers")
        if self._batch is batch:
            raise RuntimeError(
                "attnops: the step's plan is stale: only init_forward_metadata_out_graph has run for this batch. Run "
                "init_forward_metadata(batch) before an eager step's layers, or replay the graph that holds them"
            )
        raise RuntimeError(
            f"attnops: the step's plan is stale: it was made for {_shape(self._batch)}, the layer runs with another "
            f"batch, {_shape(batch)}. Call init_forward_metadata(batch) once per step, before its layers, and pass "
            "that batch to them"
        )


def _shape(batch: AttentionBatch) -> str:
    return f"{batch.forward_mode.name} of {batch.batch_size} requests and {batch.num_tokens} tokens"
