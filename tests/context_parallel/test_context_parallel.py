"""Lengths and slots of a rank: against the rule, token by token, on every device."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from graph_tape import GraphTape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARES = [(1, 1), (2, 1), (2, 16), (3, 5), (4, 64), (8, 7)]  # (world_size, interleave)


def owners(num_tokens: int, world_size: int, interleave: int) -> list[int]:
    return [(token // interleave) % world_size for token in range(num_tokens)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens_per_request", [1, 4])
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_every_token_is_counted_by_its_rank(share, tokens_per_request, device):
    world_size, interleave = share
    lengths = [0, -3, 1, 2, interleave, interleave + 1, 300, 17, *torch.randint(0, 999, (50,)).tolist()]
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    for rank in range(world_size):
        got = ops.context_parallel_seqlens(seqlens, rank, world_size, interleave, tokens_per_request=tokens_per_request)
        expected = [
            owners(max(n - tokens_per_request + 1 + i, 0), world_size, interleave).count(rank)
            for n in lengths
            for i in range(tokens_per_request)
        ]
        assert got.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_slots_of_the_ranks_are_disjoint_and_complete(share, dtype, device):
    world_size, interleave = share
    page_size, pages = 2 * interleave, 5
    slots = torch.arange(pages * page_size * world_size, dtype=dtype, device=device)
    slots = torch.cat([slots, slots.new_tensor([-1, -7])])
    holders = torch.zeros(slots.shape[0] - 2, dtype=torch.int64)
    for rank in range(world_size):
        local = ops.context_parallel_slots(slots, rank, world_size, interleave).cpu()
        assert local.dtype == dtype and local[-2:].tolist() == [-1, -1]
        mine = local[:-2] >= 0
        holders += mine
        assert local[:-2][mine].tolist() == list(range(pages * page_size)), "side by side, in their order"
        page = torch.arange(mine.shape[0])[mine] // (page_size * world_size)
        assert torch.equal(local[:-2][mine] // page_size, page.to(dtype)), "page p is page p on every rank"
    assert (holders == 1).all()
    in_place = slots.clone()
    assert ops.context_parallel_slots(in_place, 0, world_size, interleave, local_slots=in_place) is in_place


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_lengths_and_slots_do_not_overflow(device):
    seqlens = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    assert ops.context_parallel_seqlens(seqlens, 1, 2, 2**31 - 1).tolist() == [0, 0]
    assert ops.context_parallel_seqlens(seqlens, 0, 2, tokens_per_request=2).tolist() == [2**30 - 1, 2**30, 0, 0]
    slots = torch.tensor([2**62], dtype=torch.int64, device=device)
    assert ops.context_parallel_slots(slots, 0, 4, 8).tolist() == [2**60]


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_read_on_the_host_and_the_ops_pass_opcheck(device):
    seqlens, slots = torch.tensor([5, 9], dtype=torch.int32, device=device), torch.arange(9, device=device)
    with GraphTape().capture():
        ops.context_parallel_seqlens(seqlens, 0, 2, tokens_per_request=3)
        ops.context_parallel_slots(slots, 0, 2)
    op = torch.ops.attnops
    torch.library.opcheck(op.context_parallel_seqlens.default, (seqlens.new_empty(6), seqlens, 0, 2, 1, 3))
    torch.library.opcheck(op.context_parallel_slots.default, (torch.empty_like(slots), slots, 1, 2, 4))
    assert ops.context_parallel_seqlens(seqlens[:0], 0, 2).shape == (0,)
    assert ops.context_parallel_slots(slots[:0], 0, 2).shape == (0,)


def test_errors_name_the_argument():
    seqlens = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"context_parallel_seqlens: rank must be in \[0, 1\], got 2"):
        ops.context_parallel_seqlens(seqlens, 2, 2)
    with pytest.raises(RuntimeError, match="interleave must be"):
        ops.context_parallel_slots(torch.arange(3), 0, 2, 0)
    with pytest.raises(RuntimeError, match=r"local_seqlens\.shape\[0\] .* must be 2"):
        ops.context_parallel_seqlens(seqlens, 0, 2, tokens_per_request=2, local_seqlens=seqlens)
    with pytest.raises(RuntimeError, match="local_slots must have dtype int64"):
        ops.context_parallel_slots(torch.arange(3), 0, 2, local_slots=seqlens.new_empty(3))
