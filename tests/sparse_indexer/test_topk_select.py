"""attnops::topk_select: the set and the order of a stable sort, whatever the logits are."""

from __future__ import annotations

import math

import indexer_reference as reference
import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAN, INF = math.nan, math.inf
DISTRIBUTIONS = {
    "normal": lambda *shape: torch.randn(shape),
    "all equal": lambda *shape: torch.full(shape, 2.5),
    "one bin": lambda *shape: 1 + 1e-6 * torch.randint(0, 60, shape),
    "one bin, all different": lambda *shape: 1 + 0.2 * torch.rand(shape),
    "few values": lambda *shape: torch.randint(-3, 4, shape).float(),
    "specials": lambda *shape: torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0])[torch.randint(0, 7, shape)],
    "not one number": lambda *shape: torch.full(shape, NAN),
    "NaN and the lowest": lambda *shape: torch.tensor([NAN, -INF])[torch.randint(0, 2, shape)],
    "any bits": lambda *shape: torch.randint(-(2**31), 2**31, shape, dtype=torch.int32).view(torch.float32),
    "rising": lambda *shape: torch.arange(math.prod(shape)).view(shape).float(),
    "falling": lambda *shape: -torch.arange(math.prod(shape)).view(shape).float(),
    "denormal": lambda *shape: torch.randint(-9, 9, shape, dtype=torch.int32).abs().view(torch.float32),
    "wide": lambda *shape: torch.exp(20 * torch.randn(shape)) * torch.randn(shape).sign(),
}


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(logits, lengths, k, device, **options):
    """Indices and positions in memory full of rubbish, compared with the reference."""
    given = {name: ints(v, device) if isinstance(v, list) else v for name, v in options.items()}
    positions = torch.full((len(lengths), k), -7, dtype=torch.int32, device=device)
    indices = positions.clone()
    ops.topk_select(logits, ints(lengths, device), k, indices=indices, positions=positions, **given)
    expected = reference.topk_select(logits.cpu(), lengths, k, **options)
    assert torch.equal(positions.cpu(), expected[1])
    assert torch.equal(indices.cpu(), expected[0])
    return indices


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 512, 2048])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_is_the_set_of_a_stable_sort(name, k, dtype, device):
    lengths = [0, 1, k - 1, k, k + 1, 4097, 4500, 4500, -3]
    logits = DISTRIBUTIONS[name](len(lengths), 4500).to(dtype).to(device)
    check(logits, lengths, k, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [16384, 16385, 70001, 262144, 300000])
@pytest.mark.parametrize("name", ["normal", "few values", "specials", "all equal"])
def test_long_rows(name, columns, device):
    lengths = [columns, columns // 3, 4096, columns - 1, 8193]
    check(DISTRIBUTIONS[name](5, columns).to(device), lengths, 2048, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("columns", "k"),
    [(8193, 2048), (9000, 1700), (12001, 64), (16385, 2048), (20003, 7), (70001, 2048), (131072, 512), (131073, 512)],
)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_many_long_rows(name, columns, k, dtype):
    """A GPU gives each a CTA, which reads it twice. Ten rows, over and over, that start anywhere."""
    starts = [0, 1, 5, 2, 3, 0, 7, 11, 1, 0]
    lengths = [columns, columns - 1, 5 * k, 5 * k - 1, k, 0, columns // 2, 16000, 6 * k, 6 * k - 1]
    lengths = [min(length, columns - start) for start, length in zip(starts, lengths)]
    rows = len(lengths)
    some = DISTRIBUTIONS[name](rows, columns).to(dtype).cuda()
    times = 3 * torch.cuda.get_device_properties(0).multi_processor_count // rows + 1
    indices = torch.full((rows * times, k), -7, dtype=torch.int32, device="cuda")
    ops.topk_select(
        some.repeat(times, 1),
        ints(lengths * times, "cuda"),
        k,
        row_starts=ints(starts * times, "cuda"),
        indices=indices,
    )
    few = torch.empty_like(indices[:rows])
    ops.topk_select(some, ints(lengths, "cuda"), k, row_starts=ints(starts, "cuda"), indices=few)
    assert torch.equal(indices, few.repeat(times, 1))
    expected = reference.topk_select(some.cpu(), lengths, k, row_starts=starts)
    assert torch.equal(few.cpu(), expected[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 5000, 20001])
def test_rows_start_anywhere_and_what_lies_outside_is_never_looked_at(columns, dtype, device):
    rows = 9
    wide = torch.full((rows, columns + 11), INF)
    starts = torch.randint(0, columns, (rows,)).tolist()
    lengths = [int(torch.randint(0, columns - start + 1, ())) for start in starts]
    wide[:, 3 : 3 + columns] = NAN
    for row, (start, length) in enumerate(zip(starts, lengths)):
        wide[row, 3 : 3 + start] = INF
        wide[row, 3 + start + length :] = INF
        wide[row, 3 + start : 3 + start + length] = torch.randn(length)
    logits = wide.to(dtype).to(device)[:, 3 : 3 + columns]
    check(logits, lengths, min(columns, 300), device, row_starts=starts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 3, 24, 64, 256])
def test_positions_become_slots_of_pages(page_size, device):
    columns, k = 2900, 700
    table = torch.randint(0, 2**31 // page_size, (4, -(-columns // page_size)), dtype=torch.int32)
    used = ints([3, 0, 3, 1, 2, 2], "cpu").tolist()
    lengths = [columns, 699, 700, 701, 0, 2500]
    logits = torch.randn(6, columns).to(device)
    check(logits, lengths, k, device, page_table=table.to(device), row_to_request=used, page_size=page_size)
    check(logits[:4], lengths[:4], k, device, page_table=table.to(device), page_size=page_size)
    table[:, 8:] = -1  # of shorter rows, nothing behind their pages matters
    short = [8 * page_size] * 4 if page_size > 1 else [8, 3, 1, 0]
    check(logits[:4], [min(n, columns) for n in short], k, device, page_table=table.to(device), page_size=page_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (3, 2048), (889, 2048), (889, 890), (889, 889), (2048, 2048)])
def test_rows_without_more_columns_than_k(columns, k, dtype, device):
    """All keys, whatever they are: NaN too. Nothing but their number decides."""
    lengths = [columns, columns - 1, 0, -5, 1, columns // 2, columns, columns] * 20
    starts = [0, 1, 0, 0, columns - 1, columns // 2, 0, 0] * 20
    lengths = [min(length, columns - start) for start, length in zip(starts, lengths)]
    logits = DISTRIBUTIONS["specials"](len(lengths), columns).to(dtype).to(device)
    check(logits, lengths, k, device, row_starts=starts)
    check(logits, lengths, k, device, offsets=list(range(len(lengths))), row_starts=starts)
    for page_size in (1, 3, 64):
        width = -(-columns // page_size)
        table = torch.randint(0, 2**31 // page_size, (9, width + 4), dtype=torch.int32)
        for first in (0, 1):  # a row of the table may begin anywhere
            own = table.to(device)[:, first:]
            used = {"page_table": own, "row_to_request": [row % 9 for row in range(len(lengths))]}
            check(logits, lengths, k, device, page_size=page_size, row_starts=starts, **used)
    wide = torch.full((len(lengths), k + 9), -9, dtype=torch.int32, device=device)
    indices, positions = wide[:, 3 : 3 + k], torch.empty(len(lengths), k, dtype=torch.int32, device=device)
    ops.topk_select(logits, ints(lengths, device), k, indices=indices, positions=positions)
    assert torch.equal(indices.cpu(), reference.topk_select(logits, lengths, k)[0])
    assert torch.equal(positions, indices)
    assert (wide[:, :3] == -9).all() and (wide[:, 3 + k :] == -9).all(), "wrote outside its slice"


@pytest.mark.parametrize("device", DEVICES)
def test_pages_that_no_slot_has_give_no_index(device):
    """Whole groups of four cells, and single ones, that are negative, too high, or not of the table."""
    table = torch.arange(24, dtype=torch.int32).view(2, 12).contiguous()
    table[0, 4:8] = -1
    table[1, 5], table[1, 6] = -7, 2**31 - 1
    for columns in (12, 14):
        logits, lengths = torch.randn(2, columns).to(device), ints([columns, columns], device)
        got = ops.topk_select(logits, lengths, 16, page_table=table.to(device), report=new_report(device)).cpu()
        expected = torch.full((2, 16), -1, dtype=torch.int32)
        expected[:, :12] = table.clamp(min=-1)
        assert torch.equal(got, expected)
        if device == "cuda":  # without a report, four at a time
            assert torch.equal(ops.topk_select(logits, lengths, 16, page_table=table.to(device)).cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_positions_become_rows_of_ragged_keys(device):
    check(torch.randn(3, 900).to(device), [900, 20, 64], 64, device, offsets=[0, 2**31 - 21, 77])


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_may_be_slices_and_positions_left_out(device):
    logits, wide = torch.randn(5, 3000).to(device), torch.full((5, 600), -9, dtype=torch.int32, device=device)
    lengths = [3000, 100, 0, 400, 2999]
    ops.topk_select(logits, ints(lengths, device), 512, indices=wide[:, 40:552])
    assert torch.equal(wide[:, 40:552].cpu(), reference.topk_select(logits, lengths, 512)[0])
    assert (wide[:, :40] == -9).all() and (wide[:, 552:] == -9).all(), "wrote outside its slice"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns", "k"), [(0, 5, 3), (3, 0, 3), (3, 5, 0), (0, 0, 0)])
def test_empty_extents(rows, columns, k, device):
    got = ops.topk_select(torch.randn(rows, columns).to(device), ints([0] * rows, device), k)
    assert got.shape == (rows, k) and (got == -1).all()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_selects_the_same(isa, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CPU_ISA", isa)
    for name, draw in DISTRIBUTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            logits = draw(3, 2500).to(dtype)
            expected = reference.topk_select(logits, [2500, 2499, 1001], 1000)[0]
            assert torch.equal(ops.topk_select(logits, ints([2500, 2499, 1001], "cpu"), 1000), expected), name


FAULTS = {
    "keys of a row 11 at request 1, position 0, must be in [0, 11)": {"lengths": [4, 11, 2]},
    "keys of a row 8 at request 2, position 3, must be in [0, 8)": {"lengths": [4, 2, 8], "row_starts": [0, 0, 3]},
    "first key -1 at request 0": {"row_starts": [-1, 0, 0]},
    "first key 10 at request 1": {"row_starts": [0, 10, 0]},
    "request of a row 3 at request 1, position 0, must be in [0, 3)": {"row_to_request": [0, 3, 1]},
    "request of a row -1 at request 2": {"row_to_request": [0, 1, -1]},
    "page of a key 2 at request 0, position 8, must be in [0, 2)": {"lengths": [9, 2, 2], "row_to_request": [0, 0, 0]},
    "page or offset -1 at request 1, position 4": {"lengths": [1, 5, 1], "row_to_request": [0, 1, 1]},
    "page or offset 2147483647 at request 0, position 4": {"lengths": [5, 1, 1], "row_to_request": [2, 1, 1]},
    "page or offset 2147483648 at request 2, position 1": {"offsets": [0, 0, 2**31 - 1], "lengths": [1, 1, 2]},
    "page or offset -5 at request 0, position 0": {"offsets": [-5, 0, 0], "lengths": [1, 1, 1]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("told", FAULTS)
def test_what_rows_hold_out_of_range_is_recorded_and_gets_no_index(told, device):
    given = {"lengths": [3, 2, 1]} | FAULTS[told]
    options = {name: ints(v, device) for name, v in given.items()}
    if "row_to_request" in given:
        options |= {"page_table": ints([[7, 6], [5, -1], [8, 2**31 - 1]], device), "page_size": 4}
    lengths = options.pop("lengths")
    logits, report = torch.randn(3, 10).to(device), new_report(device)
    got = ops.topk_select(logits, lengths, 10, report=report, **options)
    # The report holds 32 bits.
    assert told.replace("2147483648", "2147483647") in first_fault(report)
    wrong = int(told.split(" at request ")[1].split(",")[0])
    counts = [int((row >= 0).sum()) for row in got]
    kept = {"keys": min(given["lengths"][wrong], 10 - given.get("row_starts", [0] * 3)[wrong]), "page": -1}
    expected = kept.get(told.split()[0], 0)
    assert counts[wrong] == (given["lengths"][wrong] - 1 if expected < 0 else expected)
    assert [n for row, n in enumerate(counts) if row != wrong] == [
        n for row, n in enumerate(given["lengths"]) if row != wrong
    ]
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"attnops::topk_select: .* got"):
            ops.topk_select(logits, lengths, 10, **options)
    else:
        assert torch.equal(ops.topk_select(logits, lengths, 10, **options), got)


@pytest.mark.parametrize(
    ("spoiled", "told"),
    [
        ({"logits": torch.randn(3, 8).half()}, "logits must have dtype float32 or bfloat16, got float16"),
        ({"logits": torch.randn(8, 3).T}, r"logits.stride\(1\) must be 1"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, r"lengths.shape\[0\] \(num_rows\) must be 3 as in logits"),
        ({"lengths": torch.zeros(3)}, "lengths must have dtype int32, got float32"),
        ({"k": 2049}, "k, columns of indices, must be .*2048.* got 2049"),
        ({"page_size": 0}, "page_size must be"),
        ({"row_to_request": torch.zeros(3, dtype=torch.int32)}, "row_to_request must not be given without page_table"),
        (
            {"page_table": torch.zeros(2, 8, dtype=torch.int32)},
            r"page_table.shape\[0\] .* without row_to_request, got 2",
        ),
        (
            {"page_table": torch.zeros(3, 8, dtype=torch.int32), "offsets": torch.zeros(3, dtype=torch.int32)},
            "page_table and offsets must not both be given",
        ),
        ({"positions": torch.zeros(3, 5, dtype=torch.int32)}, r"positions.shape\[1\] \(k\) must be 4 as in indices"),
        ({"indices": torch.zeros(3, 5, dtype=torch.int32)}, r"indices.shape\[1\] must be 4 \(k\), got 5"),
    ],
)
def test_errors_name_the_argument(spoiled, told):
    given = {"logits": torch.randn(3, 8), "lengths": torch.ones(3, dtype=torch.int32), "k": 4} | spoiled
    with pytest.raises((RuntimeError, ValueError), match="attnops::topk_select: " + told):
        ops.topk_select(**given)


@pytest.mark.parametrize("device", DEVICES)
def test_schemas_fakes_and_aliasing(device):
    logits, lengths = torch.randn(3, 40).to(device), ints([40, 3, 0], device)
    table, out = torch.zeros(3, 40, dtype=torch.int32, device=device), torch.zeros(2, 3, 8, dtype=torch.int32)
    indices, positions = out.to(device)
    for arguments in [
        (indices, positions, logits, lengths, lengths, table, lengths.clamp(max=2), 1, None, new_report(device)),
        (indices, None, logits, lengths, None, None, None, 1, lengths),
    ]:
        torch.library.opcheck(torch.ops.attnops.topk_select.default, arguments)


@pytest.mark.gpu
def test_replays_follow_lengths_and_give_the_same_bits():
    logits = torch.randn(6, 40000, device="cuda")
    lengths = ints([40000, 1, 9000, 0, 2048, 17000], "cuda")
    out = torch.empty(6, 2048, dtype=torch.int32, device="cuda")
    ops.topk_select(logits, lengths, 2048, indices=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.topk_select(logits, lengths, 2048, indices=out)
    for step in range(200):
        lengths.copy_(torch.randint(-3, 40001, (6,), dtype=torch.int32))
        logits.copy_(logits.roll(step + 1, 1).round(decimals=step % 4))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, ops.topk_select(logits, lengths, 2048))
    assert torch.equal(replayed.cpu(), reference.topk_select(logits, lengths.tolist(), 2048)[0])
