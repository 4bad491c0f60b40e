"""index_topk: the bits of index_logits_paged and topk_select, whatever the scratch holds at a time."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from indexer_problems import FP8, Paged, ints, queries

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SENTINEL = -7


def both(paged, lengths, heads, dim, k, rows_at_once, device):
    """(indices, positions) of the two ops, and of index_topk over a scratch of so many rows, which starts as NaN."""
    batch, seqlen_q = len(lengths), len(lengths[0])
    rows, page_size = batch * seqlen_q, paged.pages.shape[1]
    q, weights = (t.to(device) for t in queries(rows, heads, dim))
    q, seen = q.view(batch, seqlen_q, heads, dim), ints(lengths, device).view(batch, seqlen_q)
    columns = max(max(n) for n in lengths) + 2
    given = (q, paged.pages, paged.table, weights, seen)
    logits = torch.full((rows, columns), math.nan, device=device)
    ops.index_logits_paged(*given, logits=logits)
    outs = [torch.full((rows, k + 3), SENTINEL, dtype=torch.int32, device=device) for _ in range(4)]
    requests = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(seqlen_q)
    where = {"page_table": paged.table, "row_to_request": requests, "page_size": page_size}
    ops.topk_select(logits, seen.flatten(), k, **where, indices=outs[0][:, 1 : 1 + k], positions=outs[1][:, 1 : 1 + k])
    scratch = torch.full((rows_at_once, columns + 5), math.nan, device=device)
    got = ops.index_topk(
        *given, k, indices=outs[2][:, 1 : 1 + k], positions=outs[3][:, 1 : 1 + k], scratch=scratch[:, 1 : 1 + columns]
    )
    assert got.data_ptr() == outs[2][:, 1:].data_ptr()
    assert scratch[:, 0].isnan().all() and scratch[:, 1 + columns :].isnan().all()
    assert torch.equal(ops.index_topk(*given, k, max_seqlen_k=columns), outs[0][:, 1 : 1 + k])
    return outs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize(("seqlen_q", "page_size", "heads", "dim"), [(1, 64, 64, 128), (3, 5, 8, 128), (4, 16, 16, 64)])
def test_any_scratch_gives_the_bits_of_two_calls(seqlen_q, page_size, heads, dim, rows_at_once, device):
    lengths = [[n + i for i in range(seqlen_q)] for n in (300, 0, 17, 129, 64)]
    lengths[1][0] = -4
    paged = Paged(lengths, page_size, dim, device)
    indices, positions, got, got_positions = both(paged, lengths, heads, dim, 24, rows_at_once, device)
    assert torch.equal(got, indices) and torch.equal(got_positions, positions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_at_once", [5, 64])
def test_a_long_prompt_of_one_request(rows_at_once, device):
    lengths = [[200 + i for i in range(60)]]
    paged = Paged(lengths, 64, 128, device)
    indices, positions, got, got_positions = both(paged, lengths, 32, 128, 128, rows_at_once, device)
    assert torch.equal(got, indices) and torch.equal(got_positions, positions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize(("seqlen_q", "page_size", "heads", "dim"), [(1, 64, 64, 128), (3, 5, 8, 128), (4, 16, 16, 64)])
def test_keys_from_a_start_on(seqlen_q, page_size, heads, dim, rows_at_once, device):
    """Starts in front of, at and behind a row's end: the bits of two calls, and slots behind the start."""
    lengths = [[n + i for i in range(seqlen_q)] for n in (700, 0, 17, 129, 640)]
    starts = ints([[s + i % 2 for i in range(seqlen_q)] for s in (257, 0, 17, 5, 600)], device)
    paged = Paged(lengths, page_size, dim, device)
    rows, k, ends = 5 * seqlen_q, 24, ints(lengths, device)
    q, weights = (t.to(device) for t in queries(rows, heads, dim))
    given = (q.view(5, seqlen_q, heads, dim), paged.pages, paged.table, weights, ends)
    logits = ops.index_logits_paged(*given)
    counts = (ends - starts).clamp(min=0).flatten()
    positions = ops.topk_select(logits, counts, k, row_starts=starts.flatten().contiguous())
    requests = torch.arange(5, device=device).repeat_interleave(seqlen_q)
    at = (positions + starts.view(-1, 1)).clamp(min=0, max=paged.table.shape[1] * page_size - 1)
    slots = paged.table[requests].gather(1, (at // page_size).long()) * page_size + at % page_size
    got_positions = torch.full_like(positions, SENTINEL)
    scratch = torch.full((rows_at_once, logits.shape[1]), math.nan, device=device)
    got = ops.index_topk(*given, k, k_start=starts, positions=got_positions, scratch=scratch)
    assert torch.equal(got_positions, positions)
    assert torch.equal(got, torch.where(positions < 0, -1, slots).int())
    assert torch.equal(ops.index_topk(*given, k, k_start=torch.zeros_like(starts)), ops.index_topk(*given, k))


def least_floats(k, page_size):
    """Of a flat scratch: one row's candidates, and a page of logits."""
    return 3 * -(-k // 4) * 4 + 7 + page_size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0, 1, 3, 8, 100])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("from_a_start", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "page_size", "heads", "dim"), [(1, 64, 64, 128), (3, 5, 8, 128), (70, 16, 16, 64)]
)
def test_a_flat_scratch_of_any_size(seqlen_q, page_size, heads, dim, from_a_start, equal, scale, device):
    """Pieces of one page, of some, and whole rows: the bits of whole rows, also where all logits are equal."""
    lengths = [[max(n + i, -4) for i in range(seqlen_q)] for n in (700, 0, 17, 129, 640, -9)]
    paged, rows, k = Paged(lengths, page_size, dim, device), 6 * seqlen_q, 24
    q, weights = (t.to(device) for t in queries(rows, heads, dim))
    if equal:
        weights.zero_()
    given = (q.view(6, seqlen_q, heads, dim), paged.pages, paged.table, weights, ints(lengths, device), k)
    starts = [[(s + i) % 700 for i in range(seqlen_q)] for s in (257, 0, 17, 5, 600, 3)]
    more = {"k_start": ints(starts, device)} if from_a_start else {}
    positions = torch.full((2, rows, k), SENTINEL, dtype=torch.int32, device=device)
    capacity = paged.table.shape[1] * page_size
    expected = ops.index_topk(
        *given, **more, positions=positions[0], scratch=torch.zeros(rows, capacity, device=device)
    )
    floats = least_floats(k, page_size) + scale * 97
    buffer = torch.full((floats + 4,), math.nan, device=device)
    got = ops.index_topk(*given, **more, positions=positions[1], scratch=buffer[:floats])
    assert torch.equal(got, expected) and torch.equal(positions[1], positions[0])
    assert buffer[floats:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [None, 690, 300])
def test_the_scratch_that_is_allocated(columns, device, monkeypatch):
    """Has no more than its bytes where rows and columns are many, and the longest row may be told."""
    lengths = [[min(n, columns or n)] for n in (690, 20, 300, 555)]
    paged = Paged([[690]] * 4, 16, 128, device)
    q, weights = (t.to(device) for t in queries(4, 8, 128))
    given = (q[:, None], paged.pages, paged.table, weights, ints(lengths, device), 32)
    expected = ops.index_topk(*given, scratch=torch.zeros(4, 704, device=device))
    monkeypatch.setattr("attnops.ops.indexer.SCRATCH_BYTES", 2000)
    assert torch.equal(ops.index_topk(*given, max_seqlen_k=columns), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "seqlen_q", "keys"), [(66, 1, 9000), (1, 300, 20000), (3, 2, 70000)])
def test_pieces_of_long_rows(batch, seqlen_q, keys):
    """k 2048, pieces of every kind of selection."""
    lengths = [[keys - 37 * b + i for i in range(seqlen_q)] for b in range(batch)]
    paged, rows = Paged(lengths, 64, 128, "cuda"), batch * seqlen_q
    q, weights = (t.cuda() for t in queries(rows, 64, 128))
    given = (q.view(batch, seqlen_q, 64, 128), paged.pages, paged.table, weights, ints(lengths, "cuda"), 2048)
    expected = ops.index_topk(*given, scratch=torch.empty(rows, paged.table.shape[1] * 64, device="cuda"))
    for floats in (30_000, 400_000, 1_500_000):
        assert torch.equal(ops.index_topk(*given, scratch=torch.empty(floats, device="cuda")), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_at_once", [7, 64])
@pytest.mark.parametrize("page_size", [64, 6])
def test_a_ragged_prompt_as_one_request(page_size, rows_at_once, device):
    """Pages of three requests side by side: each row selects what it selects in a request of its own."""
    new, cached, k = [9, 1, 20], [150, 1, 300], 40
    lengths = [[n] for n in cached]
    paged = Paged(lengths, page_size, 128, device)
    request = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor(new))
    ends = torch.cat([torch.arange(n - m, n) + 1 for n, m in zip(cached, new)]).int().to(device)
    q, weights = (t.to(device) for t in queries(len(request), 16, 128))
    alone = (q[:, None], paged.pages, paged.table[request.to(device)], weights, ends[:, None])
    positions = torch.zeros(len(request), k, dtype=torch.int32, device=device)
    expected = ops.index_topk(*alone, k, positions=positions, max_seqlen_k=300)
    cells = [-(-n // page_size) for n in cached]
    flat = torch.cat([paged.table[i, :count] for i, count in enumerate(cells)])[None]
    first = page_size * torch.tensor([0, *cells[:2]]).cumsum(0).int()
    starts = first[request].to(device)
    scratch = torch.full((rows_at_once, flat.shape[1] * page_size), math.nan, device=device)
    together = (q[None], paged.pages, flat, weights, (starts + ends)[None])
    got_positions = torch.zeros_like(positions)
    got = ops.index_topk(*together, k, k_start=starts[None], positions=got_positions, scratch=scratch)
    assert torch.equal(got, expected) and torch.equal(got_positions, positions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "seqlen_q", "heads"), [(0, 1, 8), (2, 0, 8), (2, 1, 0)])
def test_empty_extents(batch, seqlen_q, heads, device):
    pages, k = 3, 4
    q = torch.zeros(batch, seqlen_q, heads, 128, dtype=torch.uint8, device=device).view(FP8)
    index_pages = torch.zeros(pages, 4, 132, dtype=torch.uint8, device=device)
    table = torch.zeros(batch, pages, dtype=torch.int32, device=device)
    lengths = torch.full((batch, seqlen_q), 9, dtype=torch.int32, device=device)
    out = ops.index_topk(q, index_pages, table, torch.zeros(batch * seqlen_q, heads, device=device), lengths, k)
    assert out.shape == (batch * seqlen_q, k)
    assert (out == torch.arange(k, device=device)).all()  # of equal logits the first


@pytest.mark.parametrize("device", DEVICES)
def test_no_pages_and_no_keys_wanted(device):
    q, weights = (t.to(device) for t in queries(2, 8, 128))
    pages = torch.zeros(0, 4, 132, dtype=torch.uint8, device=device)
    empty = torch.zeros(2, 0, dtype=torch.int32, device=device)
    given = (q.unsqueeze(1), pages, empty, weights, ints([[0], [0]], device))
    assert (ops.index_topk(*given, 3) == -1).all()
    assert ops.index_topk(*given, 0).shape == (2, 0)


FAULTS = {
    "length 9 at request 1, position 0, must be in [0, 9)": {"lengths": [3, 9]},
    "keys of a row 7 at request 0": {"lengths": [7, 2], "columns": 6},
    "page index 2 at request 1, position 1, must be in [0, 2)": {"table": [[0, 1], [0, 2]], "lengths": [2, 5]},
    "first key -3 at request 1": {"starts": [0, -3]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("told", FAULTS)
@pytest.mark.parametrize("flat", [False, True])
def test_faults_name_the_row_of_the_call(flat, told, device):
    """Whichever turn of the scratch the row has, and whichever piece the key."""
    given = {"lengths": [3, 2], "columns": 8, "table": [[0, 1], [1, 0]]} | FAULTS[told]
    pages, report = torch.zeros(2, 4, 132, dtype=torch.uint8, device=device), new_report(device)
    q, weights = (t.to(device) for t in queries(2, 8, 128))
    lengths, table = ints(given["lengths"], device).view(2, 1), ints(given["table"], device)
    arguments = (q.unsqueeze(1), pages, table, weights, lengths, 2)
    if flat and given["columns"] < 8:
        pytest.skip("a flat scratch has columns for all keys of the page table")
    scratch = (
        torch.zeros(least_floats(2, 4), device=device) if flat else torch.zeros(1, given["columns"], device=device)
    )
    more = {"scratch": scratch}
    if "starts" in given:
        more["k_start"] = ints(given["starts"], device).view(2, 1)
    out = ops.index_topk(*arguments, **more, report=report)
    assert out.shape == (2, 2)
    assert "index_topk" in first_fault(report) and told in first_fault(report)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"attnops::index_topk: .*got"):
            ops.index_topk(*arguments, **more)


def test_arguments():
    q, weights = queries(2, 8, 128)
    pages, table = torch.zeros(2, 4, 132, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.int32)
    given = {"q": q.unsqueeze(1), "index_pages": pages, "page_table": table, "weights": weights}
    given |= {"cache_seqlens": ints([[3], [2]]), "k": 2}
    with pytest.raises(ValueError, match=r"attnops::index_topk: indices.shape\[1\] must be 2 \(k\), got 5"):
        ops.index_topk(**given, indices=torch.zeros(2, 5, dtype=torch.int32))
    with pytest.raises(
        RuntimeError, match=r"attnops::index_topk: scratch.shape\[0\] \(rows at once\) must be at least"
    ):
        ops.index_topk(**given, scratch=torch.zeros(0, 8))
    with pytest.raises(RuntimeError, match=r"attnops::index_topk: scratch .*float32"):
        ops.index_topk(**given, scratch=torch.zeros(1, 8, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"attnops::index_topk: scratch.shape\[0\] must be at least 23 .*, got 7"):
        ops.index_topk(**given, scratch=torch.zeros(7))
    with pytest.raises(RuntimeError, match=r"attnops::index_topk: scratch .*contiguous"):
        ops.index_topk(**given, scratch=torch.zeros(200)[::2])
    with pytest.raises(
        RuntimeError, match=r"attnops::index_topk: k_start.shape\[1\] \(seqlen_q\) must be 1 as in q, got 2"
    ):
        ops.index_topk(**given, k_start=torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"attnops::index_topk: k_start must have dtype int32"):
        ops.index_topk(**given, k_start=torch.zeros(2, 1))
    with pytest.raises(RuntimeError, match=r"attnops::index_topk: .*2049"):
        ops.index_topk(**given | {"k": 2049})


@pytest.mark.parametrize("device", DEVICES)
def test_schema_and_fake(device):
    from indexer_calls import indexer_arguments

    given = indexer_arguments()["index_topk"]
    given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    k, positions, k_start = given.pop("k"), given.pop("positions"), given.pop("k_start")
    indices = torch.zeros(2, k, dtype=torch.int32, device=device)
    tests = ("test_faketensor", "test_autograd_registration")  # torch's schema test has no sums of FP8
    scratch = torch.zeros(1, 8, device=device)
    op = torch.ops.attnops.index_topk.default
    torch.library.opcheck(op, (indices, positions, *given.values(), scratch, None, k_start), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("from_a_start", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_replays_with_other_lengths(flat, from_a_start):
    """A recorded call, three turns of the scratch or five pieces of it, over lengths, and first keys, that change."""
    lengths = [[700], [4100], [90], [2500], [1]]
    paged = Paged(lengths, 64, 128, "cuda")
    q, weights = (t.cuda() for t in queries(5, 64, 128))
    seen, own = ints(lengths, "cuda"), torch.empty(2, 4200, device="cuda")
    scratch = torch.empty(5 * (3 * 64 + 7 + 1024), device="cuda") if flat else torch.empty_like(own)
    given = (q.unsqueeze(1), paged.pages, paged.table, weights, seen, 64 if flat else 512)
    starts = {"k_start": torch.zeros_like(seen)} if from_a_start else {}
    out = ops.index_topk(*given, scratch=scratch, **starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.index_topk(*given, indices=out, scratch=scratch, **starts)
    expected, wrong = torch.empty_like(out), torch.zeros((), dtype=torch.int64, device="cuda")
    longest = ints(lengths, "cuda")
    for _ in range(1000):
        seen.copy_(torch.minimum(longest, torch.randint(-1, 4100, (5, 1), device="cuda")))
        for start in starts.values():
            start.random_(0, 3000)
        graph.replay()
        wrong += (out != ops.index_topk(*given, indices=expected, scratch=own, **starts)).sum()
    assert not wrong.item()
