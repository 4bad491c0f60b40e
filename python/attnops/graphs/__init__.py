"""Steps recorded once and replayed: whole steps per batch size, over memory whose addresses never change."""

from attnops.graphs.recorder import CudaGraphs, Recorder, RecorderFactory
from attnops.graphs.runner import GraphRunner, MemoryReport
from attnops.graphs.sizes import default_capture_sizes, pad_to_size
from attnops.graphs.static_step import StaticStep

__all__ = [
    "CudaGraphs",
    "GraphRunner",
    "MemoryReport",
    "Recorder",
    "RecorderFactory",
    "StaticStep",
    "default_capture_sizes",
    "pad_to_size",
]
