"""Steps recorded once and replayed, whole or in pieces, over memory whose addresses never change."""

from attnops.graphs.piecewise import PiecewiseRunner
from attnops.graphs.recorder import CudaGraphs, Recorder, RecorderFactory
from attnops.graphs.runner import GraphRunner, MemoryReport
from attnops.graphs.sizes import default_capture_sizes, pad_to_size
from attnops.graphs.split import PiecewiseBackend
from attnops.graphs.static_step import StaticStep

__all__ = [
    "CudaGraphs",
    "GraphRunner",
    "MemoryReport",
    "PiecewiseBackend",
    "PiecewiseRunner",
    "Recorder",
    "RecorderFactory",
    "StaticStep",
    "default_capture_sizes",
    "pad_to_size",
]
