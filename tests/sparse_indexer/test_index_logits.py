"""index_logits_paged and index_logits: against float64 on the same bytes."""

from __future__ import annotations

import math

import indexer_reference as reference
import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from indexer_problems import FP8, Paged, ints, keys_of, queries

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(got, expected, seen, dtype):
    """Where a row sees a key, within 1e-3 of float64 (bf16: of its rounding); elsewhere as it was, NaN."""
    got = got.cpu()
    assert got[~seen].isnan().all(), "wrote a column that no row sees"
    if not seen.any():
        return
    assert got[seen].isfinite().all()
    error = (got.double() - expected)[seen].norm() / expected[seen].norm()
    assert error < (1e-3 if dtype == torch.float32 else 4e-3), f"relative error {error:.2e}"


def run_paged(lengths, heads, dim, page_size, device, dtype=torch.float32, columns=None, paged=None):
    """`lengths` of each token of each request."""
    batch, seqlen_q = len(lengths), len(lengths[0])
    paged = paged or Paged(lengths, page_size, dim, device)
    q, weights = queries(batch * seqlen_q, heads, dim)
    columns = columns or max(max(n) for n in lengths) + 3
    wide = torch.full((batch * seqlen_q, columns + 5), math.nan, dtype=dtype, device=device)
    got = ops.index_logits_paged(
        q.view(batch, seqlen_q, heads, dim).to(device),
        paged.pages,
        paged.table,
        weights.to(device),
        ints(lengths, device),
        logits=wide[:, 2 : 2 + columns],
    )
    expected = torch.zeros(batch * seqlen_q, columns, dtype=torch.float64)
    seen = torch.zeros(batch * seqlen_q, columns, dtype=torch.bool)
    for request, per_token in enumerate(lengths):
        for token, length in enumerate(per_token):
            row, length = request * seqlen_q + token, max(length, 0)
            k, k_scale = paged.of(request)
            expected[row, :length] = reference.logits(
                q[row : row + 1], k[:length], k_scale[:length], weights[row : row + 1]
            )
            seen[row, :length] = True
    check(got, expected, seen, dtype)
    assert wide[:, :2].isnan().all() and wide[:, 2 + columns :].isnan().all()
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 7, 8, 12, 16, 32, 33, 64])
@pytest.mark.parametrize(("dim", "page_size"), [(128, 64), (64, 16)])
def test_heads_and_dims(dim, page_size, heads, device):
    run_paged([[300], [0], [64], [1], [257]], heads, dim, page_size, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_sizes(dtype, page_size, device):
    run_paged([[130], [700], [5]], 64, 128, page_size, device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlen_q", [2, 3, 4, 5, 6, 8, 11, 32])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_tokens_of_a_request_see_different_lengths(heads, seqlen_q, device):
    lengths = [[n + i for i in range(seqlen_q)] for n in (0, 253, 600, 64)]
    lengths[1][0], lengths[3] = -5, [0] * seqlen_q
    run_paged(lengths, heads, 128, 64, device)


@pytest.mark.parametrize("device", DEVICES)
def test_many_requests_share_multiprocessors_and_long_ones_are_divided(device):
    lengths = torch.randint(-2, 900, (150, 1)).tolist()
    lengths[17] = [20000]
    run_paged(lengths, 16, 128, 64, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_rows(dtype, compressed, heads, device):
    rows, count, dim = 77, 1500, 128
    k, k_scale = keys_of(count, dim)
    q, weights = queries(rows, heads, dim)
    starts = torch.randint(0, count, (rows,)).tolist()
    ends = [min(count, s + int(torch.randint(-5, 700, ()))) for s in starts]
    starts[3], ends[3], starts[4], ends[4] = 0, count, count, count
    got = torch.full((rows, count), math.nan, dtype=dtype, device=device)
    moved = (t.to(device) for t in (q, k, k_scale, weights, ints(starts), ints(ends)))
    ops.index_logits(*moved, compressed=compressed, logits=got)
    right, seen = reference.logits(q, k, k_scale, weights), torch.zeros(rows, count, dtype=torch.bool)
    expected = torch.zeros(rows, count, dtype=torch.float64)
    for row, (start, end) in enumerate(zip(starts, ends)):
        if end > start:
            at = slice(0, end - start) if compressed else slice(start, end)
            expected[row, at], seen[row, at] = right[row, start:end], True
    check(got, expected, seen, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (33, 64), (32, 128), (16, 128)])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [0, 1])
def test_many_rows_and_keys(odd, dtype, compressed, heads, dim):
    """Enough for tokens that keys pass; scales on any 4 bytes; and a row has the same bits alone."""
    rows, count = 203 if heads > 32 else 403, 2901
    k, k_scale = keys_of(count, dim)
    q, weights = queries(rows, heads, dim)
    starts = [0] * 60 + torch.randint(0, count // 2, (rows - 60,)).tolist()
    ends = [min(count, s + int(torch.randint(-9, 2500, ()))) for s in starts]
    starts[-9:], ends[-9:] = [count] * 9, [0] * 9
    wide_scale = torch.zeros(count + odd, device="cuda")[odd:].copy_(k_scale)
    bounds = (ints(starts, "cuda"), ints(ends, "cuda"))
    q, k, weights = (t.to("cuda") for t in (q, k, weights))
    got = torch.full((rows, count + 3), math.nan, dtype=dtype, device="cuda")
    ops.index_logits(q, k, wide_scale, weights, *bounds, compressed=compressed, logits=got)
    right, seen = reference.logits(q.cpu(), k.cpu(), k_scale, weights.cpu()), torch.zeros(got.shape, dtype=torch.bool)
    expected = torch.zeros(got.shape, dtype=torch.float64)
    for row, (start, end) in enumerate(zip(starts, ends)):
        if end > start:
            at = slice(0, end - start) if compressed else slice(start, end)
            expected[row, at], seen[row, at] = right[row, start:end], True
    check(got, expected, seen, dtype)
    for row in (0, 7, 100):
        one, alone = slice(row, row + 1), torch.full_like(got[:1], math.nan)
        given = (q[one], k, wide_scale, weights[one], *(bound[one] for bound in bounds))
        ops.index_logits(*given, compressed=compressed, logits=alone)
        assert torch.equal(alone.nan_to_num(), got[one].nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_strided_by_four_bytes(device):
    k, k_scale = keys_of(300, 128)
    q, weights = queries(5, 16, 128)
    wide_k = torch.zeros(300, 132, dtype=torch.uint8, device=device).view(FP8)[:, 4:]
    wide_q = torch.zeros(5, 16, 132, dtype=torch.uint8, device=device).view(FP8)[..., 4:]
    wide_k.view(torch.uint8).copy_(k.view(torch.uint8))
    wide_q.view(torch.uint8).copy_(q.view(torch.uint8))
    got = ops.index_logits(
        wide_q, wide_k, k_scale.to(device), weights.to(device), ints([0] * 5, device), ints([300] * 5, device)
    )
    check(got, reference.logits(q, k, k_scale, weights), torch.ones(5, 300, dtype=torch.bool), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_alone_and_in_a_batch(device):
    lengths = [[700], [40], [3000]]
    paged = Paged(lengths, 64, 128, device)
    q, weights = (t.to(device) for t in queries(3, 64, 128))
    q, ends = q.unsqueeze(1), ints(lengths, device)
    together = ops.index_logits_paged(q, paged.pages, paged.table, weights, ends)
    for i, (length,) in enumerate(lengths):
        one = slice(i, i + 1)
        alone = ops.index_logits_paged(q[one], paged.pages, paged.table[one], weights[one], ends[one])
        assert torch.equal(alone[0, :length], together[i, :length])


MORE_ROWS = [(64, 1, 520), (33, 1, 520), (64, 2, 260), (64, 3, 180), (64, 4, 150), (32, 3, 190), (16, 2, 270)]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "seqlen_q", "batch"), MORE_ROWS)
@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_the_kernel_of_few_tokens_takes(dtype, page_size, heads, seqlen_q, batch):
    """Another kernel has them, with the same bits."""
    lengths = [[max(0, n + i) for i in range(seqlen_q)] for n in torch.randint(-9, 400, (batch,)).tolist()]
    paged = Paged(lengths, page_size, 128, "cuda")
    q, weights = (t.to("cuda") for t in queries(batch * seqlen_q, heads, 128))
    q, ends = q.view(batch, seqlen_q, heads, 128), ints(lengths, "cuda")
    columns = 400 + seqlen_q

    def logits(requests: slice):
        rows = slice(requests.start * seqlen_q, requests.stop * seqlen_q)
        out = torch.full((rows.stop - rows.start, columns), math.nan, dtype=dtype, device="cuda")
        given = (q[requests], paged.pages, paged.table[requests], weights[rows], ends[requests])
        return ops.index_logits_paged(*given, logits=out).float().nan_to_num(-7e9)

    together = logits(slice(0, batch))
    for first, last in ((0, 1), (3, 140), (batch - 7, batch)):
        assert torch.equal(logits(slice(first, last)), together[first * seqlen_q : last * seqlen_q])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "heads", "pages"), [(0, 1, 8, 3), (2, 0, 8, 3), (2, 1, 0, 3), (2, 1, 8, 0)]
)
def test_empty_extents(batch, seqlen_q, heads, pages, device):
    q = torch.zeros(batch, seqlen_q, heads, 128, dtype=torch.uint8, device=device).view(FP8)
    index_pages = torch.zeros(pages, 4, 132, dtype=torch.uint8, device=device)
    table = torch.zeros(batch, pages, dtype=torch.int32, device=device)
    lengths = torch.full((batch, seqlen_q), 4 * (pages > 0), dtype=torch.int32, device=device)
    weights = torch.zeros(batch * seqlen_q, heads, device=device)
    out = torch.full((batch * seqlen_q, 8), 7.0, device=device)
    ops.index_logits_paged(q, index_pages, table, weights, lengths, logits=out)
    assert (out[:, 4 * (pages > 0) :] == 7).all() and (out[:, : 4 * (pages > 0)] == 0).all()


PAGED_FAULTS = {
    "length 9 at request 1, position 0, must be in [0, 9)": {"lengths": [3, 9]},
    "keys of a row 7 at request 0": {"lengths": [7, 2], "columns": 6},
    "page index 2 at request 0, position 1, must be in [0, 2)": {"table": [[0, 2], [1, 0]], "lengths": [5, 2]},
    "page index -1 at request 1, position 0": {"table": [[0, 1], [-1, 0]], "lengths": [5, 2]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("told", PAGED_FAULTS)
def test_lengths_and_pages_out_of_range(told, device):
    given = {"lengths": [3, 2], "columns": 8, "table": [[0, 1], [1, 0]]} | PAGED_FAULTS[told]
    pages, report = torch.zeros(2, 4, 132, dtype=torch.uint8, device=device), new_report(device)
    q, weights = (t.to(device) for t in queries(2, 8, 128))
    lengths, table = ints(given["lengths"], device).view(2, 1), ints(given["table"], device)
    out = torch.full((2, given["columns"]), 7.0, device=device)
    arguments = (q.unsqueeze(1), pages, table, weights, lengths)
    ops.index_logits_paged(*arguments, logits=out, report=report)
    assert told in first_fault(report)
    assert (out[1, max(0, min(given["lengths"][1], 8)) :] == 7).all()
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"attnops::index_logits_paged: .*got"):
            ops.index_logits_paged(*arguments, logits=out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("start", "end", "compressed", "columns"),
    [(-1, 3, False, 9), (2, 10, False, 12), (2, 9, False, 8), (2, 9, True, 6)],
)
def test_ranges_out_of_range(start, end, compressed, columns, device):
    k, k_scale = (t.to(device) for t in keys_of(9, 128))
    q, weights = (t.to(device) for t in queries(2, 8, 128))
    out, report = torch.full((2, columns), 7.0, device=device), new_report(device)
    arguments = (q, k, k_scale, weights, ints([0, start], device), ints([0, end], device))
    ops.index_logits(*arguments, compressed=compressed, logits=out, report=report)
    assert f"end of keys {end} at request 1, position {start}, must be in [0, " in first_fault(report)
    assert (out[0] == 7).all()
    if device == "cpu":
        with pytest.raises(RuntimeError, match="attnops::index_logits: k_start and k_end, row 1 must be keys"):
            ops.index_logits(*arguments, compressed=compressed, logits=out)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512_bf16", "amx"])
def test_every_instruction_set(isa, monkeypatch):
    """Also: a row has the same bits alone, and a NaN in a query stays one."""
    monkeypatch.setenv("ATTNOPS_CPU_ISA", isa)
    run_paged([[300], [17]], 20, 128, 64, "cpu")
    run_paged([[n + i for i in range(11)] for n in (90, 640)], 13, 64, 5, "cpu")
    q, weights = queries(19, 40, 128)
    q[7, 39, 5] = math.nan
    k, k_scale = keys_of(333, 128)
    bounds = (ints([i for i in range(19)]), ints([333 - 2 * i for i in range(19)]))
    together = ops.index_logits(q, k, k_scale, weights, *bounds, logits=torch.zeros(19, 333))
    assert together[7, 7:319].isnan().all() and together.isnan().sum() == 312
    for row in (0, 7, 8, 18):
        one = slice(row, row + 1)
        given = (q[one], k, k_scale, weights[one], *(bound[one] for bound in bounds))
        alone = ops.index_logits(*given, logits=torch.zeros(1, 333))
        assert torch.equal(alone.nan_to_num(), together[one].nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
def test_schemas_and_fakes(device):
    from indexer_calls import indexer_arguments

    tests = ("test_faketensor", "test_autograd_registration")  # torch's schema test has no sums of FP8
    for op in ("index_logits_paged", "index_logits"):
        given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in indexer_arguments()[op].items()}
        out = given.pop("logits")
        torch.library.opcheck(getattr(torch.ops.attnops, op).default, (out, *given.values()), test_utils=tests)
