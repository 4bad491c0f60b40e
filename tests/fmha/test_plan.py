"""attnops::fmha_plan: requests by falling cost, tiles of each from the last, as csrc/scheduler/varlen_tiles.h says."""

import random

import pytest
import torch
from attnops import ops
from attnops.metadata import FmhaPlan
from attnops.metadata.fmha_plan import cuda_tile_q, cuts_in_part, have_few_rows, tokens_as_a_rule

# Built in a checkout, for these tests and for one Python version: tests/support/.
_scheduler = pytest.importorskip("_scheduler", exc_type=ImportError)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS = [(32, 8), (8, 8), (28, 4), (128, 1)]


def bounds(lengths, device="cpu"):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def expected_order(seqlens_q, seqlens_k, tile_q, causal, window_left):
    """Sorted in Python: requests by falling cost bin of their last tile, ties as they come; tiles from the last."""
    requests = []
    for request, (seqlen_q, seqlen_k) in enumerate(zip(seqlens_q, seqlens_k, strict=True)):
        tiles = -(-seqlen_q // tile_q)
        first, offset = (tiles - 1) * tile_q, seqlen_k - seqlen_q
        begin = 0 if window_left < 0 else max(offset + first - window_left, 0)
        requests.append((_scheduler.cost_bin(max(seqlen_k - begin, 1)), request, tiles))
    return [
        (request, tile)
        for _, request, tiles in sorted(requests, key=lambda r: -r[0])
        for tile in range(tiles - 1, -1, -1)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 100])
@pytest.mark.parametrize("tile_q", [1, 16, 64])
def test_order(causal, window_left, tile_q, device):
    seqlens_q, seqlens_k = [5, 0, 300, 64, 65, 1], [900, 3, 300, 64, 10, 0]
    plan = FmhaPlan.allocate(
        500, len(seqlens_q) + 2, causal=causal, window_left=window_left, tile_q=tile_q, device=device
    )
    ops.fmha_plan(plan, bounds(seqlens_q, device), bounds(seqlens_k, device))
    order = [tuple(row) for row in plan.tile_order.tolist()]
    expected = expected_order(seqlens_q, seqlens_k, tile_q, causal, window_left)
    assert order[: len(expected)] == expected
    assert set(order[len(expected) :]) == {(-1, -1)}

    again = FmhaPlan.allocate(
        500, len(seqlens_q) + 2, causal=causal, window_left=window_left, tile_q=tile_q, device=device
    )
    lengths = torch.tensor(seqlens_k, dtype=torch.int32, device=device)
    ops.fmha_plan(again, bounds(seqlens_q, device), cache_seqlens=lengths)
    assert torch.equal(plan.tile_order, again.tile_order)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_default_to_queries_and_a_plan_is_used_again(device):
    plan = FmhaPlan.allocate(1000, 3, device=device)
    for lengths in ([700, 100, 200], [64], [], [0, 0], [1, 999]):
        ops.fmha_plan(plan, bounds(lengths, device))
        expected = expected_order(lengths, lengths, plan.tile_q, True, -1)
        order = [tuple(row) for row in plan.tile_order.tolist()]
        assert order == expected + [(-1, -1)] * (len(order) - len(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [128, 129, 160, 1000, 1024, 1025, 4096, 5001])
@pytest.mark.parametrize("lengths", [[1], [0, 1, 1, 5, 64, 65, 700], [0] * 50 + [3000]], ids=["ones", "mixed", "few"])
def test_order_of_many_requests(lengths, count, device):
    r = random.Random(count)
    seqlens_q = [r.choice(lengths) for _ in range(count)]
    seqlens_k = [n + r.choice([0, 3, 900, 40000]) for n in seqlens_q]
    plan = FmhaPlan.allocate(sum(seqlens_q), count, tile_q=64, device=device)
    ops.fmha_plan(plan, bounds(seqlens_q, device), bounds(seqlens_k, device))
    order = [tuple(row) for row in plan.tile_order.tolist()]
    expected = expected_order(seqlens_q, seqlens_k, 64, True, -1)
    assert order == expected + [(-1, -1)] * (len(order) - len(expected))


@pytest.mark.parametrize(
    ("group", "tokens", "head_dim", "tile_q"), [(1, 1, 128, 128), (4, 16, 128, 32), (5, 12, 128, 24)]
)
def test_a_tile_of_few_rows_is_whole_short_tiles(group, tokens, head_dim, tile_q):
    """All heads of a group share 64 rows: csrc/fmha/sm90/short.h. With more tokens it is as for any call."""
    assert cuda_tile_q(group, head_dim, tokens) == tile_q
    assert cuda_tile_q(5, 128, 13) == 25
    assert cuda_tile_q(6, 64, 10) == 30 and cuda_tile_q(6, 256, 10) == 21


def test_tiles_are_as_small_as_the_longest_request_allows():
    """Up to 64 rows a request: a tile has no more, and none is cut as if CTAs were full."""
    assert have_few_rows(1, 128, 64) and have_few_rows(8, 64, 8) and have_few_rows(5, 192, 12)
    assert not any(have_few_rows(1, 128, n) for n in (None, 0, 65)) and not have_few_rows(1, 256, 1)
    assert not have_few_rows(71, 128, 1) and not have_few_rows(8, 128, 9)
    assert cuts_in_part(128) and not cuts_in_part(128, few_rows=True) and not cuts_in_part(64)


@pytest.mark.gpu
def test_a_plan_of_few_rows_has_small_tiles():
    options = {"num_q_heads": 40, "num_kv_heads": 8, "device": "cuda"}
    assert FmhaPlan.allocate(90, 30, max_seqlen_q=12, **options).tile_q == 12
    assert FmhaPlan.allocate(90, 30, max_seqlen_q=13, **options).tile_q == 24
    assert FmhaPlan.allocate(90, 30, max_seqlen_q=12, tile_q=20, **options).tile_q == 20


def test_a_second_token_of_some_requests_chooses_no_tile():
    """71 heads share a tile if requests have one token as a rule. With two of each, pairs of CTAs have 36 heads."""
    assert [tokens_as_a_rule(n, 64) for n in (0, 1, 64, 96, 97, 128, 129)] == [1, 1, 1, 1, 2, 2, 3]
    assert tokens_as_a_rule(9, 0) == 9 and tokens_as_a_rule(58, 57) == 1 and tokens_as_a_rule(17, 16) == 2
    assert cuda_tile_q(71, 256, 1) == 1 and cuda_tile_q(71, 256, 2) == 3


def test_default_tile_follows_the_group():
    tile_q = {heads: FmhaPlan.allocate(9, 1, num_q_heads=heads[0], num_kv_heads=heads[1]).tile_q for heads in HEADS}
    assert tile_q == {(32, 8): 64, (8, 8): 256, (28, 4): 36, (128, 1): 16}
    assert FmhaPlan.allocate(9, 1).tile_q == 64


def test_limits():
    with pytest.raises(ValueError, match=r"tile_q must be in \[1, 1024\], got 0"):
        FmhaPlan.allocate(10, 1, tile_q=0)
    with pytest.raises(ValueError, match=r"FmhaPlan\.allocate: max_num_tokens must be in \[0, 2147483647\], got -1"):
        FmhaPlan.allocate(-1, 1)
    with pytest.raises(ValueError, match=r"num_q_heads and num_kv_heads are given together .* got 8 and None"):
        FmhaPlan.allocate(10, 1, num_q_heads=8)
    plan = FmhaPlan.allocate(64, 1)
    with pytest.raises(RuntimeError, match=r"fmha_plan: tile_order\.shape\[0\] \(max_tiles\) must hold the 3 tiles"):
        ops.fmha_plan(plan, bounds([129]))


def test_errors():
    plan = FmhaPlan.allocate(64, 2)
    queries, keys, lengths = bounds([3, 4]), bounds([5, 6]), torch.tensor([5, 6], dtype=torch.int32)

    def fails(pattern, *args, order=plan.tile_order, tile_q=64, window_left=-1):
        with pytest.raises(RuntimeError, match="fmha_plan: " + pattern):
            torch.ops.attnops.fmha_plan(order, *args, tile_q, True, window_left)

    fails("cu_seqlens_q must have dtype int32, got int64", queries.long(), None, None)
    fails("cu_seqlens_q must have 1 dimensions, got 2", queries.view(1, -1), None, None)
    fails(r"cu_seqlens_q\.shape\[0\] \(batch_size \+ 1\) must be at least 1", queries[:0], None, None)
    fails("cu_seqlens_q must be contiguous", bounds([1, 2, 3, 4])[::2], None, None)
    fails(r"cu_seqlens_k\.shape\[0\] \(batch_size \+ 1\) must be 3 as in cu_seqlens_q, got 2", queries, keys[:2], None)
    fails("cu_seqlens_k must have dtype int32, got float32", queries, keys.float(), None)
    fails(r"cache_seqlens\.shape\[0\] \(batch_size\) must be 2 as in cu_seqlens_q, got 1", queries, None, lengths[:1])
    fails("cache_seqlens must have dtype int32, got int64", queries, None, lengths.long())
    fails("cu_seqlens_k and cache_seqlens exclude each other, got both", queries, keys, lengths)
    fails(r"tile_q must be in \[1, 1024\], got 0", queries, None, None, tile_q=0)
    fails(r"window_left must be in \[-1, 2147483647\], got -2", queries, None, None, window_left=-2)
    fails("tile_order must have dtype int32, got int64", queries, None, None, order=plan.tile_order.long())
    fails(r"tile_order\.shape\[1\] .* must be 2", queries, None, None, order=plan.tile_order[:, :1].contiguous())
    fails("tile_order must be contiguous", queries, None, None, order=torch.zeros(2, 9, dtype=torch.int32).t())


@pytest.mark.parametrize("device", DEVICES)
def test_schema(device):
    plan = FmhaPlan.allocate(64, 2, device=device)
    lengths = torch.tensor([3, 40], dtype=torch.int32, device=device)
    op = torch.ops.attnops.fmha_plan.default
    torch.library.opcheck(op, (plan.tile_order, bounds([3, 4], device), None, lengths, 16, True, 5))
    torch.library.opcheck(op, (plan.tile_order, bounds([3, 4], device), bounds([3, 9], device), None, 16, False, -1))
