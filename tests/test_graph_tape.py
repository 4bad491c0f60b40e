"""The CPU's stand-in for a CUDA graph refuses what a graph cannot hold, and replays what it can."""

import pytest
import torch
from graph_tape import GraphTape, GraphTapeError


def test_replay_reads_what_the_memory_holds_then():
    x = torch.tensor([1.0, 2.0])
    tape = GraphTape()
    with tape.capture():
        y = (x * 2).view(2, 1) + 1
    x.copy_(torch.tensor([5.0, 7.0]))
    tape.replay()
    assert y.flatten().tolist() == [11.0, 15.0]


def test_replay_does_not_see_what_python_computed():
    lengths = torch.tensor([3])
    bound = lengths.max().item()
    tape = GraphTape()
    with tape.capture():
        y = torch.arange(10) < bound
    lengths.fill_(9)
    tape.replay()
    assert y.sum().item() == 3, "a stale value must show, or the tape hides the fault it is there for"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: int(x[0]),
        lambda x: bool(x[0]),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
        lambda x: torch.repeat_interleave(x),
    ],
)
def test_refuses(read):
    x = torch.tensor([2, 1])
    with pytest.raises(GraphTapeError, match="captured region"), GraphTape().capture():
        read(x)
