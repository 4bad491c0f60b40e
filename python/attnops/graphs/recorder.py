"""What records a region of device work and runs it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Recorder(Protocol):
    """Records once; replays as often as asked, on the memory that the region used then."""

    def capture(self) -> AbstractContextManager[object]:
        """The region to record."""

    def replay(self) -> None:
        """Runs it again. Does not wait for the device."""


# Called once per graph. Graphs of one factory may share memory: they are captured largest first and run one at a time.
RecorderFactory = Callable[[], Recorder]


class CudaGraphs:
    """A factory of CUDA graphs over one memory pool, captured on one stream.

    Runners that never run at the same time (decode and verify of one engine) share a factory, and so their memory.

    Args:
        device: Where the graphs run.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self) -> Recorder:
        return _CudaGraph(self)


class _CudaGraph:
    def __init__(self, graphs: CudaGraphs) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graphs = graphs

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        with torch.cuda.graph(self._graph, pool=self._graphs.pool, stream=self._graphs.stream):
            yield

    def replay(self) -> None:
        self._graph.replay()
