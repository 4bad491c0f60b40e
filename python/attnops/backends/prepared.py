"""Whose metadata a backend holds: a plan that belongs to another step is refused, not used."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

from attnops.types import AttentionBatch

Views = TypeVar("Views")
Method = TypeVar("Method", bound=Callable[..., Any])


def in_one_thread(method: Method) -> Method:
    """A method of a backend that has `prepared` or `_prepared`, while which no other thread may prepare a step."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        prepared = self.prepared if hasattr(self, "prepared") else self._prepared
        with prepared.in_use():
            return method(self, *args, **options)

    return run  # type: ignore[return-value]


class PreparedStep(Generic[Views]):
    """The views of the step that a backend has prepared, and the batch that they are for.

    Plans and page tables are device memory that each step writes anew. A layer that runs with another batch would read
    pages and lengths of the wrong requests. So it is refused, and the error names the missing half.

    Three mistakes are seen: another batch, other lengths in the same batch, and another thread that prepares a step
    meanwhile. Lengths count as other when the tensor is another one, or torch has written to it since. Not
    seen are lengths that something else than torch wrote, lengths that are inference tensors, other rows of
    `req_to_token`, and other streams.

    Attributes:
        planned: The batch for which both halves have run, if any.
    """

    def __init__(self) -> None:
        self.views: Views | None = None
        self.planned: AttentionBatch | None = None
        self._batch: AttentionBatch | None = None
        self._seqlens: Tensor | None = None  # that was planned with,
        self._version: int | None = None  # as it was then; None: nobody counts
        self._lock = threading.Lock()
        self._users: list[int] = []  # threads that are in `in_use`

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the in-graph half or a layer runs on the host: no other thread may prepare a step meanwhile."""
        thread = threading.get_ident()
        with self._lock:
            self._users.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._users.remove(thread)

    def begin(self, batch: AttentionBatch, views: Views) -> None:
        """The out-graph half has run.

        Raises:
            RuntimeError: another thread is in the midst of its step.
        """
        with self._lock:
            self._check_alone()
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
        seqlens = batch.cache_seqlens
        with self._lock:
            self._check_alone()
            self._seqlens, self._version = seqlens, None if seqlens.is_inference() else seqlens._version
            self.planned = batch
        return self.views

    def _check_alone(self) -> None:
        others = [thread for thread in self._users if thread != threading.get_ident()]
        if others:
            raise RuntimeError(
                f"attnops: thread {threading.get_ident()} prepares a step while thread {others[0]} runs one with the "
                "same backend. Page tables and plans hold one step: give each thread a backend of its own"
            )

    def of(self, batch: AttentionBatch) -> Views:
        """A layer runs.

        Raises:
            RuntimeError: the metadata is missing, half made, or another batch's.
        """
        if self.planned is batch:
            seqlens, version = batch.cache_seqlens, self._version
            if seqlens is self._seqlens and (version is None or version == seqlens._version):
                return self.views  # type: ignore[return-value]
            raise RuntimeError(
                f"attnops: the step's plan is stale: the batch, {_shape(batch)}, has other cache_seqlens than those "
                "that it was made for. Call init_forward_metadata(batch) after the lengths have changed"
            )
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
