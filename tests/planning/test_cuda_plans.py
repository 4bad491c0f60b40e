"""The planners of the three families on the GPU: bit for bit what the CPU plans, whatever the batch."""

import itertools

import pytest
import torch
from attnops import ops  # noqa: F401  (loads the ops)

pytestmark = pytest.mark.gpu
OPS = torch.ops.attnops
POISON = -77
BATCHES = {
    "empty": [],
    "one empty request": [0],
    "one token": [1],
    "one long": [131_072],
    "negative counts as empty": [5, -3, 64],
    "one long among short": [65_536] + [4096] * 31,
    "zeros between": [0, 100, 0, 0, 3000, 0],
    "64 ragged": torch.randint(256, 16_385, (64,), generator=torch.Generator().manual_seed(1)).tolist(),
    "65 short and one long": [1] * 64 + [40_000],
    "256 ragged": torch.randint(0, 5000, (256,), generator=torch.Generator().manual_seed(6)).tolist(),
    "257 skewed": (torch.rand(257, generator=torch.Generator().manual_seed(2)) ** 8 * 50_000).int().tolist(),
    "4096 random": torch.randint(0, 3000, (4096,), generator=torch.Generator().manual_seed(3)).tolist(),
    "7777 random": torch.randint(0, 900, (7777,), generator=torch.Generator().manual_seed(4)).tolist(),
}
DECODE_PLANS = ["xqa_decode_plan", "mla_decode_plan"]


def on_both(run):
    """run(device) -> the tensors it wrote, from the CPU and from the GPU."""
    cpu, gpu = run("cpu"), run("cuda")
    for expected, actual in zip(cpu, gpu, strict=True):
        assert torch.equal(actual.cpu(), expected)
    return cpu


def tiles_of(lengths, seqlen_q, window_left):
    begins = [max(n - seqlen_q - window_left, 0) // 64 if window_left >= 0 else 0 for n in lengths]
    return [max(-(-max(n, 0) // 64) - begin, 1) for n, begin in zip(lengths, begins, strict=True)]


def rows_of_one_piece(works, shares):
    """Rows of shares that have a piece each, at most; None where one had too many tiles."""
    even = -(-sum(works) // shares)
    if sum(works) <= shares:
        return None
    fitting = (n for n in range(even, even + min(4, even // 2) + 1) if sum(-(-count // n) for count in works) <= shares)
    longest = next(fitting, None)
    if longest is None:
        return None
    rows = []
    for work, count in enumerate(works):
        cuts, first = -(-count // longest), len(rows)
        for cut in range(cuts):
            begin, end = (i * (count // cuts) + min(i, count % cuts) for i in (cut, cut + 1))
            rows.append([work, begin, *((work, end) if end < count else (work + 1, 0)), cut, cuts, cuts, first])
    rows += [[len(works), 0, len(works), 0, 0, 0, 0, share] for share in range(len(rows), shares)]
    return torch.tensor(rows, dtype=torch.int32)


def xqa_rows_on_a_gpu(lengths, cpu_rows, seqlen_q, num_heads, window_left, shares):
    """What the GPU plans where the CPU's rows are these: no cuts, where they are not worth their merge.

    Where works are no more than the shares no share has two pieces, if that costs at most four tiles.
    """
    tiles = tiles_of(lengths, seqlen_q, window_left)
    works = [count for count in tiles for _ in range(num_heads)]
    overhead = 4 if len(works) > shares else 0
    total = sum(overhead + 8 * count for count in works)
    budget = max(-(-total // shares), 8)
    budget = -(-budget // 8) * 8 if overhead == 0 else budget
    beside = budget + (32 if 2 * len(works) > shares else 16)  # what a share may have that is not cut
    most = (32 + 8 - overhead if len(works) > shares else beside) // 8
    if max(works, default=0) > max(most, 2):
        rows = rows_of_one_piece(works, shares) if len(works) <= shares else None
        return cpu_rows if rows is None else rows
    begins, before, share = [], 0, 0
    for work, count in enumerate(works):  # a share begins with the first work whose last tile it has
        last_tile = before + overhead + 8 * (count - 1)
        while len(works) > shares and share * budget <= last_tile:
            begins.append(work)
            share += 1
        before += overhead + 8 * count
    if len(works) <= shares:
        begins = list(range(len(works)))
    begins = (begins + [len(works)] * (shares + 1))[: shares + 1]
    rows = [
        [begin, 0, end, 0, 0, int(begin < end), int(begin < end), part]
        for part, (begin, end) in enumerate(itertools.pairwise(begins))
    ]
    return torch.tensor(rows, dtype=torch.int32)


def xqa_order(lengths, seqlen_q, num_heads, window_left, num_sm_parts):
    """`num_splits` of a balanced plan of a GPU: zeros, or the order in which works are dealt out."""
    tiles = tiles_of(lengths, seqlen_q, window_left)
    works, nothing = len(tiles) * num_heads, torch.zeros(len(tiles) + 1, dtype=torch.int32)
    if works < 4 * num_sm_parts or not 0 < len(tiles) <= 1024:
        return nothing
    side_by_side = num_heads > 1 and num_sm_parts % num_heads == 0  # a share is then that of whole requests
    each, shares = (1, num_sm_parts // num_heads) if side_by_side else (num_heads, num_sm_parts)
    overhead = 4 if len(tiles) * each > shares else 0
    budget = max(-(-sum(each * (overhead + 8 * n) for n in tiles) // shares), 8)
    if 8 * max(tiles) > (budget if overhead else -(-budget // 8) * 8):
        return nothing

    def steps(n):  # a quarter of the length apart
        octave = max(n.bit_length() - 3, 0)
        return min(4 * octave + (n >> octave), 31)

    order = sorted(range(len(tiles)), key=lambda i: -steps(tiles[i]))
    longer = 1 + sum(n > 2 for n in tiles)
    return torch.tensor([*order, longer if len(set(tiles)) > 1 else -longer], dtype=torch.int32)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("op", DECODE_PLANS)
@pytest.mark.parametrize("fixed_split_tokens", [0, 64, 2048, -1, -32])
@pytest.mark.parametrize(
    ("num_sm_parts", "seqlen_q", "num_heads"), [(132, 1, 8), (1, 4, 1), (264, 2, 128), (2000, 1, 7)]
)
@pytest.mark.parametrize("window_left", [-1, 511])
@pytest.mark.parametrize("batch", BATCHES)
def test_split_kv_plan(batch, window_left, num_sm_parts, seqlen_q, num_heads, fixed_split_tokens, op):
    if fixed_split_tokens < 0 and op == "mla_decode_plan":
        pytest.skip("takes tokens of a cut only")
    lengths = BATCHES[batch]

    def run(device):
        metadata = torch.full((num_sm_parts, 8), POISON, dtype=torch.int32, device=device)
        num_splits = torch.full((len(lengths) + 1,), POISON, dtype=torch.int32, device=device)
        args = (metadata, num_splits, int32(lengths, device), seqlen_q, num_heads, window_left, fixed_split_tokens)
        getattr(OPS, op)(*args)
        return metadata, num_splits

    (metadata, num_splits), (gpu_metadata, gpu_splits) = run("cpu"), run("cuda")
    assert (metadata != POISON).all() and (num_splits != POISON).all()
    if op == "xqa_decode_plan" and fixed_split_tokens == 0:
        metadata = xqa_rows_on_a_gpu(lengths, metadata, seqlen_q, num_heads, window_left, num_sm_parts)
        num_splits = xqa_order(lengths, seqlen_q, num_heads, window_left, num_sm_parts)
    assert torch.equal(gpu_metadata.cpu(), metadata)
    assert torch.equal(gpu_splits.cpu(), num_splits)


@pytest.mark.parametrize(
    ("num_sm_parts", "seqlen_q", "num_heads"),
    [(132, 1, 64), (132, 2, 48), (132, 5, 128), (132, 4, 99), (6, 1, 72), (132, 7, 70)],
)
@pytest.mark.parametrize("law", ["uniform", "empties", "all but one empty", "straggler", "short"])
@pytest.mark.parametrize("requests", [7, 31, 62, 187, 192, 193, 374, 512, 513])
def test_filled_mla_plan(requests, law, num_sm_parts, seqlen_q, num_heads):
    """Where works of several lengths outnumber the shares, which are filled one after another."""
    generator = torch.Generator().manual_seed(requests)
    for longest in (60, 279, 900, 6000):
        lengths = torch.randint(1, longest + 1, (requests,), generator=generator)
        if law == "empties":
            lengths[torch.rand(requests, generator=generator) < 0.25] = 0
        elif law == "all but one empty":
            lengths[1:] = 0
        elif law == "straggler":
            lengths[:] = longest // 16
            lengths[requests // 3] = longest
        elif law == "short":
            lengths = lengths.clamp(max=65)
        plans = []
        for device in ("cpu", "cuda"):
            metadata = torch.full((num_sm_parts, 8), POISON, dtype=torch.int32, device=device)
            num_splits = torch.full((requests + 1,), POISON, dtype=torch.int32, device=device)
            OPS.mla_decode_plan(metadata, num_splits, lengths.int().to(device), seqlen_q, num_heads, -1, 0)
            plans.append((metadata.cpu(), num_splits.cpu()))
        assert torch.equal(plans[0][0], plans[1][0]) and torch.equal(plans[0][1], plans[1][1])


@pytest.mark.parametrize("fixed_split_tokens", [0, 256, -5])
@pytest.mark.parametrize(("num_sm_parts", "num_heads"), [(264, 8), (256, 2), (33, 33), (264, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_xqa_parts_of_a_gpu_come_in_groups_of_a_head_each(batch, num_sm_parts, num_heads, fixed_split_tokens):
    """As many parts as a multiple of the KV heads: each group of them has the share of a plan over whole requests."""
    lengths = BATCHES[batch]

    def plan(device, parts, heads):
        metadata = torch.full((parts, 8), POISON, dtype=torch.int32, device=device)
        num_splits = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
        OPS.xqa_decode_plan(metadata, num_splits, int32(lengths, device), 2, heads, 511, fixed_split_tokens)
        return metadata.cpu()

    groups = num_sm_parts // num_heads
    shares = plan("cpu", groups, 1)
    if fixed_split_tokens == 0:
        shares = xqa_rows_on_a_gpu(lengths, shares, 2, 1, 511, groups)
    assert torch.equal(plan("cuda", num_sm_parts, num_heads), shares.repeat_interleave(num_heads, 0))


@pytest.mark.parametrize(("num_sm_parts", "num_heads"), [(264, 8), (33, 33), (264, 1), (8, 3)])
@pytest.mark.parametrize("rows", [8, 17])
@pytest.mark.parametrize("batch", BATCHES)
def test_works_over_bytes_cost_more(batch, rows, num_sm_parts, num_heads):
    """Three tiles besides its own, of few rows, but where it is decided whether works stay whole."""
    _scheduler = pytest.importorskip("_scheduler", exc_type=ImportError)
    lengths = BATCHES[batch]
    metadata = torch.full((num_sm_parts, 8), POISON, dtype=torch.int32, device="cuda")
    num_splits = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cuda")
    OPS.xqa_decode_plan(metadata, num_splits, int32(lengths, "cuda"), 1, num_heads, -1, 0, rows, 1)
    grouped = num_heads > 1 and num_sm_parts % num_heads == 0
    geometry = _scheduler.SplitKvGeometry(
        works_per_request=1 if grouped else num_heads,
        seqlen_q=1,
        tile_tokens=64,
        num_sm_parts=num_sm_parts,
        work_overhead=24 if rows == 8 else 4,
        whole_overhead=4,
        parts_per_group=num_heads if grouped else 1,
        short_tiles=2,
        dealt_works=4,
        more_of_lone=4,
    )
    fields = ("begin_work", "begin_tile", "end_work", "end_tile")
    fields += ("begin_split", "begin_num_splits", "last_num_splits", "first_part")
    expected = _scheduler.plan_split_kv(geometry, lengths)
    assert metadata.tolist() == [[getattr(entry, field) for field in fields] for entry in expected]
    assert num_splits.tolist() == _scheduler.num_splits(geometry, lengths)


@pytest.mark.parametrize(("rows", "most"), [(32, 3), (64, 3), (65, 8), (256, 8)])
@pytest.mark.parametrize("longest", [3, 4, 6, 7, 8, 9])
def test_works_of_many_rows_stay_whole(longest, rows, most):
    """Where each may have a share, and a merge of so many rows takes longer than their tiles."""
    lengths, heads, groups = [64 * longest, 100, 64, 1], 8, 16
    metadata = torch.full((groups * heads, 8), POISON, dtype=torch.int32, device="cuda")
    num_splits = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cuda")
    OPS.xqa_decode_plan(metadata, num_splits, int32(lengths, "cuda"), 1, heads, -1, 0, rows)
    shares = metadata.cpu()[::heads]
    used = shares[shares[:, 0] * 4096 + shares[:, 1] < shares[:, 2] * 4096 + shares[:, 3]]
    whole = torch.tensor([[i, 0, i + 1, 0] for i in range(len(lengths))], dtype=torch.int32)
    assert torch.equal(used[:, :4], whole) == (longest <= most)


@pytest.mark.parametrize(("num_sm_parts", "num_heads"), [(1, 1), (5, 7), (14, 7), (64, 106), (264, 128), (8, 2)])
@pytest.mark.parametrize("requests", [2, 31, 33, 187, 300, 1024, 1025])
@pytest.mark.parametrize("window_left", [-1, 100])
def test_order_in_which_works_are_dealt_out(requests, num_sm_parts, num_heads, window_left):
    """By classes of lengths, the longest first, in each as they come: every request once, and how many are long."""
    generator = torch.Generator().manual_seed(requests)
    for longest in (1, 90, 1000, 40_000):
        lengths = torch.randint(0, longest + 1, (requests,), generator=generator).tolist()
        metadata = torch.empty(num_sm_parts, 8, dtype=torch.int32, device="cuda")
        num_splits = torch.full((requests + 1,), POISON, dtype=torch.int32, device="cuda")
        OPS.xqa_decode_plan(metadata, num_splits, int32(lengths, "cuda"), 1, num_heads, window_left)
        order = xqa_order(lengths, 1, num_heads, window_left, num_sm_parts)
        assert torch.equal(num_splits.cpu(), order)
        if requests in (187, 300) and window_left < 0 and longest == 1000:
            assert sorted(order[:-1].tolist()) == list(range(requests))
            assert order[-1] == 1 + sum(n > 128 for n in lengths)


@pytest.mark.parametrize("keys", ["cu_seqlens_k", "cache_seqlens", "as queries"])
@pytest.mark.parametrize("tile_q", [1, 16, 64, 128])
@pytest.mark.parametrize(("causal", "window_left"), [(True, -1), (True, 100), (False, -1)])
@pytest.mark.parametrize(("works", "max_pieces"), [(1, 264), (8, 33), (5, 20), (140, 2)])
@pytest.mark.parametrize("batch", BATCHES)
def test_fmha_plan(batch, works, max_pieces, causal, window_left, tile_q, keys):
    lengths_k = [max(length, 0) for length in BATCHES[batch]]
    lengths_q = [length // (1 + i % 3) for i, length in enumerate(lengths_k)]
    if tile_q == 1:
        lengths_q = [min(length, 40) for length in lengths_q]
    num_tiles = sum(-(-length // tile_q) for length in lengths_q)

    def run(device):
        tile_order = torch.full((num_tiles + 5, 2), POISON, dtype=torch.int32, device=device)
        bounds_q = torch.nn.functional.pad(int32(lengths_q, device).cumsum(0), (1, 0)).int()
        bounds_k = torch.nn.functional.pad(int32(lengths_k, device).cumsum(0), (1, 0)).int()
        args = (
            bounds_k if keys == "cu_seqlens_k" else None,
            int32(lengths_k, device) if keys == "cache_seqlens" else None,
        )
        pieces = torch.full((max_pieces + 1, 4), POISON, dtype=torch.int32, device=device)
        OPS.fmha_plan(tile_order, bounds_q, *args, tile_q, causal, window_left, pieces, works, 132)
        count = int(pieces[0, 0])
        assert 0 <= count <= max_pieces and (pieces[1 + count :] == POISON).all()
        return tile_order, pieces

    tile_order, _ = on_both(run)
    assert (tile_order[num_tiles:] == -1).all()
    assert len({tuple(row) for row in tile_order[:num_tiles].tolist()}) == num_tiles


def test_a_table_too_short_is_not_overrun():
    whole = torch.full((40, 2), POISON, dtype=torch.int32, device="cuda")
    OPS.fmha_plan(whole[:20], int32([0, 64 * 30], "cuda"), None, None, 64)
    assert (whole[20:] == POISON).all() and (whole[:20] != POISON).all()


@pytest.mark.parametrize("op", DECODE_PLANS)
def test_batch_beyond_the_planner_is_an_error(op):
    metadata, lengths = int32([[0] * 8] * 132, "cuda"), int32([1] * 20_001, "cuda")
    expected = rf"{op}: cache_seqlens\.shape\[0\] .* at most 1?\d{{4}}, .*, got 20001\. Plan"
    with pytest.raises(RuntimeError, match=expected):
        getattr(OPS, op)(metadata, int32([0] * 20_002, "cuda"), lengths, 1, 8)


@pytest.mark.parametrize("op", DECODE_PLANS)
def test_the_largest_batch_is_planned(op):
    """As many requests as the shared memory of this device holds."""
    most = (torch.cuda.get_device_properties(0).shared_memory_per_block_optin - 10 * 1024 - 8) // 12
    lengths = torch.randint(0, 900, (most,), generator=torch.Generator().manual_seed(5)).tolist()

    def run(device):
        metadata = torch.full((264, 8), POISON, dtype=torch.int32, device=device)
        num_splits = torch.full((most + 1,), POISON, dtype=torch.int32, device=device)
        getattr(OPS, op)(metadata, num_splits, int32(lengths, device), 1, 5, -1, 256)
        return metadata, num_splits

    on_both(run)


def test_one_captured_graph_plans_every_length():
    lengths = torch.zeros(64, dtype=torch.int32, device="cuda")
    metadata = torch.zeros(132, 8, dtype=torch.int32, device="cuda")
    num_splits = torch.zeros(65, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OPS.xqa_decode_plan(metadata, num_splits, lengths, 1, 8)
    for step in range(5):
        fresh = torch.randint(0, 20_000 * step + 1, (64,), dtype=torch.int32)
        lengths.copy_(fresh)
        graph.replay()
        expected = torch.zeros(132, 8, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
        OPS.xqa_decode_plan(*expected, fresh, 1, 8)
        assert torch.equal(metadata.cpu(), expected[0]) and torch.equal(num_splits.cpu(), expected[1])
