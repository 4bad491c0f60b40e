"""Graphs on a GPU: the pool gives the memory between segments to other layers and buckets."""

from __future__ import annotations

import pytest
import torch
from attnops.graphs import CudaGraphs, PiecewiseRunner, SegmentRunner
from model_zoo import ZOO, Engine

pytestmark = pytest.mark.gpu

MIB = 2**20
LARGE = range(2048, 4097, 256)  # buckets of tokens, of which one attention's q, k, v and out take 3 to 6 MiB


@pytest.mark.parametrize("runner", [SegmentRunner, PiecewiseRunner])
def test_more_buckets_take_no_more_of_the_pool(runner):
    """A bucket's q, k, v and out are borrowed: held, they would take some 70 MiB for 2 layers and 9 buckets."""
    torch._dynamo.reset()
    engine = Engine(ZOO[0], "torch_native", device="cuda")
    sizes = {}
    for buckets in ([max(LARGE)], LARGE):
        graphs = CudaGraphs()
        made = runner(engine.model, engine.backend, sizes=buckets, recorder=graphs)
        report = made.capture(progress=False)
        assert list(report.pieces) == sorted(buckets, reverse=True)
        assert all(len(pieces) == 3 for pieces in report.pieces.values())
        sizes[len(report.pieces)] = report.pool
        assert report.pool == graphs.pool_bytes()
    assert 0 < sizes[9] <= sizes[1] + 24 * MIB, "at most a segment of torch's allocator more"


def test_a_borrowed_tensor_is_the_same_memory_and_holds_nothing():
    whole = torch.arange(24, dtype=torch.bfloat16, device="cuda").view(4, 6)
    strided = whole[1:, ::2]
    borrowed = CudaGraphs.borrow(strided)
    assert borrowed.data_ptr() == strided.data_ptr() and borrowed.stride() == strided.stride()
    assert torch.equal(borrowed, strided)
    strided.zero_()
    assert not borrowed.any()
    large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    kept = CudaGraphs.borrow(large)
    del large
    assert torch.cuda.memory_allocated() <= before - 64 * MIB and kept.numel() == 64 * MIB
    assert CudaGraphs.borrow(torch.empty(0, 3, device="cuda")).shape == (0, 3)
