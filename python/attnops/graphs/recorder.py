"""What records a region of device work and runs it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """Records once; replays as often as asked, on the memory that the region used then."""

    def capture(self) -> AbstractContextManager[object]:
        """The region to record."""

    def replay(self) -> None:
        """Runs it again. Does not wait for the device."""


# Called once per graph. Graphs of one factory may share memory: they are captured largest first and run one at a time.
# A factory with a pool has `pool_bytes()`, and `borrow(tensor)` for what outlives the region only until the next one.
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

    def pool_bytes(self) -> int:
        """Device memory that the pool holds, in use or ready for the next graph."""
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self.pool))

    @staticmethod
    def borrow(tensor: Tensor) -> Tensor:
        """The same memory without holding it, so that the pool may give it to what is captured later.

        For memory that one graph writes and that is read before the next graph runs. If all run in the order of their
        capture, nobody else has written it by then.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes() // tensor.element_size() * tensor.element_size()
        if not nbytes:
            return tensor
        memory = torch.as_tensor(_Address(storage.data_ptr(), nbytes), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


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


class _Address:
    """Bytes on a GPU, as torch takes them from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def recorder_for(device: torch.device, recorder: RecorderFactory | None) -> RecorderFactory:
    """The caller's, or CUDA graphs with a pool of their own.

    Raises:
        ValueError: the device has no graphs.
    """
    if recorder is not None:
        return recorder
    if device.type != "cuda":
        raise ValueError(
            f"attnops: there are no graphs on {device}; run steps eagerly or with PiecewiseRunner, or pass a recorder"
        )
    return CudaGraphs(device)


def borrower(recorder: RecorderFactory) -> Callable[[Tensor], Tensor]:
    """The recorder's `borrow`; without a pool, tensors are kept as they are."""
    return getattr(recorder, "borrow", lambda tensor: tensor)
