"""Steps recorded once and replayed, whole or in pieces, over memory whose addresses never change."""

from attnops.graphs.memory import MemoryReport
from attnops.graphs.piecewise import PiecewiseRunner
from attnops.graphs.recorder import CudaGraphs, Recorder, RecorderFactory
from attnops.graphs.runner import GraphRunner
from attnops.graphs.segments import SegmentRunner
from attnops.graphs.sizes import capture_sizes, pad_to_size, token_buckets
from attnops.graphs.split import SPLIT_OP, SPLIT_OPS, PiecewiseBackend
from attnops.graphs.static_inputs import StaticInput
from attnops.graphs.static_step import StaticStep

__all__ = [
    "SPLIT_OP",
    "SPLIT_OPS",
    "CudaGraphs",
    "GraphRunner",
    "MemoryReport",
    "PiecewiseBackend",
    "PiecewiseRunner",
    "Recorder",
    "RecorderFactory",
    "SegmentRunner",
    "StaticInput",
    "StaticStep",
    "capture_sizes",
    "pad_to_size",
    "token_buckets",
]
