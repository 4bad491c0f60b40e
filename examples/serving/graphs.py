"""How a server's steps run: eagerly, or through one of the runners of `attnops.graphs`, which share an interface."""

from __future__ import annotations

from attnops.backends import AttentionBackend
from attnops.graphs import CudaGraphs, GraphRunner, PiecewiseRunner, SegmentRunner, capture_sizes, token_buckets
from attnops.pools import KVCache, ReqToTokenPool

from .model import PagedModel

MODES = ("full", "segments", "piecewise", "off")
Runner = GraphRunner | SegmentRunner | PiecewiseRunner


def make_graphs(
    mode: str,
    model: PagedModel,
    backend: AttentionBackend,
    rows: ReqToTokenPool,
    pool: KVCache,
    *,
    chunk: int,
    compiler: str = "eager",
) -> Runner | None:
    """What replays steps, not yet captured; None: all of them run eagerly.

    Args:
        mode: "full": decode steps, each in one graph; steps with prompts run eagerly. "segments": every step, in
            graphs around eager attention. "piecewise": the same, cut by torch.compile, and recorded where there are
            CUDA graphs. "off".
        chunk: Most tokens per step.
        compiler: Of pieces: "eager", "aot_eager", "inductor".
    """
    if mode == "full":
        sizes = capture_sizes(backend.limits.max_batch_size)
        return GraphRunner(model, backend, rows.req_to_token, pool, sizes=sizes)
    if mode == "segments":
        return SegmentRunner(model, backend, sizes=token_buckets(chunk))
    if mode == "piecewise":
        sizes = [size for size in token_buckets(chunk) if size > 1]
        recorder = CudaGraphs(backend.device) if backend.device.type == "cuda" else None
        return PiecewiseRunner(model, backend, sizes=sizes, inner=compiler, recorder=recorder)
    return None
