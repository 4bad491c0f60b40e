"""attnops::build_block_tables: lists as page tables, against plain loops, whatever the values."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INT32 = torch.int32
UNTOUCHED = -7


def expected(lists, table, seqlens, rows_per_request, block, page, steps, new=None, causal=True, window=-1):
    """(keys, cells) of every row and head, by plain loops."""
    unit = math.gcd(block, page) if window < 0 else 1
    found = []
    for b, cached in enumerate(seqlens):
        for i in range(rows_per_request):
            length = max(cached - (rows_per_request - 1 - i if causal else 0), 0)
            first_tail = length // block if not new or not new[b] else max(length - new[b], 0) // block
            first = max(cached - rows_per_request + i - window, 0) if window >= 0 else 0
            for h, mine in enumerate(lists[b]):
                whole = [j for j in mine if first <= j * block and 0 <= j < first_tail]
                cut = next((j for j in mine if 0 <= j < first_tail and j * block < first < (j + 1) * block), None)
                has_tail = bool(new and new[b]) or any(first_tail <= j < -(-length // block) for j in mine)
                units = [j * block // unit + n for j in whole for n in range(block // unit)]
                keys = len(whole) * block
                if cut is not None:
                    units += range(first, (cut + 1) * block)
                    keys += (cut + 1) * block - first
                if has_tail:
                    begin = max(first_tail * block, first)
                    units += range(begin // unit, -(-length // unit))
                    keys += length - begin
                cells = []
                for n in units:
                    cell, inside = n * unit // page, n * unit % page // unit
                    cells.append(table[b][cell] * steps[0] + inside * steps[1] + h * steps[2])
                found.append((keys, cells))
    return found


def build(lists, table, seqlens, device, *, rows_per_request=1, cells=None, bounds=None, layout="rows", **options):
    batch, heads, columns = lists.shape
    block, page = options["block_size"], options["page_size"]
    cells = columns * block // math.gcd(block, page) if cells is None else cells
    shape = (batch * rows_per_request, heads)
    if layout == "heads":  # as fmha_paged has it
        tables = torch.full((heads, shape[0], cells), UNTOUCHED, dtype=INT32, device=device).transpose(0, 1)
        lengths = torch.full((heads, shape[0]), UNTOUCHED, dtype=INT32, device=device).T
    else:
        tables = torch.full((*shape, cells), UNTOUCHED, dtype=INT32, device=device)
        lengths = torch.full(shape, UNTOUCHED, dtype=INT32, device=device)
    ops.build_block_tables(
        lists.to(device),
        table.to(device),
        torch.tensor(seqlens, dtype=INT32, device=device),
        block_tables=tables,
        block_seqlens=lengths,
        cu_seqlens_q=None if bounds is None else bounds.to(device),
        **options,
    )
    return tables.cpu().flatten(0, 1), lengths.cpu().flatten()


def drawn(seed):
    r = random.Random(seed)
    page, block = r.choice([1, 2, 3, 16, 64]), r.choice([1, 2, 4, 16, 24, 64, 128])
    batch, heads, columns = r.choice([0, 1, 3, 9]), r.choice([1, 2, 5]), r.choice([0, 1, 5, 130, 300])
    seqlens = [r.choice([0, 1, block, r.randint(0, 6 * block)]) for _ in range(batch)]
    width = max([-(-n // page) for n in seqlens], default=0) + 1
    table = torch.tensor([r.sample(range(1000), width) for _ in range(batch)], dtype=INT32).view(batch, width)
    lists = torch.full((batch, heads, columns), -1, dtype=INT32)
    for b, length in enumerate(seqlens):
        blocks = -(-length // block)
        for h in range(heads):
            count = r.randint(0, columns) if blocks else 0
            for place in r.sample(range(columns), count):
                lists[b, h, place] = r.randrange(blocks)  # some of them twice
    return r, page, block, lists, table, seqlens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_equals_loops(seed, device):
    r, page, block, lists, table, seqlens = drawn(seed)
    unit, heads = math.gcd(block, page), lists.shape[1]
    steps = r.choice([(page // unit * heads, heads, 1), (page // unit * heads, 1, page // unit), (1, 0, 0)])
    rows, causal = r.choice([1, 1, 2, 4]), r.choice([True, False])
    options = dict(zip(("page_step", "unit_step", "head_step"), steps))
    tables, lengths = build(
        lists,
        table,
        seqlens,
        device,
        rows_per_request=rows,
        block_size=block,
        page_size=page,
        num_pages=1000,
        causal=causal,
        **options,
    )
    found = expected(lists.tolist(), table.tolist(), seqlens, rows, block, page, steps, causal=causal)
    assert len(found) == len(lengths)
    for (keys, cells), got, length in zip(found, tables.tolist(), lengths.tolist()):
        assert length == keys and got[: len(cells)] == cells
        assert all(cell == UNTOUCHED for cell in got[len(cells) :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_windows_equal_loops(seed, device):
    r, page, block, lists, table, seqlens = drawn(seed)
    window, steps = r.choice([0, 1, block - 1, block, r.randint(0, 5 * block)]), (page, 1, 0)
    rows, causal = r.choice([1, 1, 2, 4]), r.choice([True, False])
    options = {"rows_per_request": rows, "block_size": block, "page_size": page, "num_pages": 1000, "causal": causal}
    given = {"cells": lists.shape[2] * block, "page_step": page, "unit_step": 1, "window_left": window}
    tables, lengths = build(lists, table, seqlens, device, **options, **given)
    found = expected(lists.tolist(), table.tolist(), seqlens, rows, block, page, steps, None, causal, window)
    for (keys, cells), got, length in zip(found, tables.tolist(), lengths.tolist()):
        assert length == keys == len(cells) and got[: len(cells)] == cells
        assert all(cell == UNTOUCHED for cell in got[len(cells) :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_new_tokens_are_in_and_come_last(seed, device):
    r, page, block, lists, table, seqlens = drawn(seed)
    new = [min(r.choice([0, 1, r.randint(0, 3 * block)]), length) for length in seqlens]
    bounds = torch.tensor([0, *new]).cumsum(0).int()
    unit = math.gcd(block, page)
    cells = lists.shape[2] * (block // unit) + max([-(-n // block) + 1 for n in new], default=0) * (block // unit)
    tables, lengths = build(
        lists,
        table,
        seqlens,
        device,
        cells=cells,
        bounds=bounds,
        layout="heads",
        block_size=block,
        page_size=page,
        num_pages=1000,
        page_step=page // unit,
        unit_step=1,
    )
    found = expected(lists.tolist(), table.tolist(), seqlens, 1, block, page, (page // unit, 1, 0), new)
    for (keys, row), got, length in zip(found, tables.tolist(), lengths.tolist()):
        assert length == keys and got[: len(row)] == row
        assert all(cell == UNTOUCHED for cell in got[len(row) :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("columns", "block"), [(64, 16), (512, 1), (513, 1), (2048, 1), (2049, 2), (5000, 1)])
def test_long_lists_equal_loops(columns, block, device):
    """Lists of any order, blocks twice and none in between, in one turn of a CTA's threads and in more."""
    r, page, batch, heads = random.Random(columns), 16, 3, 2
    seqlens = [columns * block, columns * block // 2 + 1, 7]
    width = -(-columns * block // page)
    table = torch.tensor([r.sample(range(1000), width) for _ in range(batch)], dtype=INT32)
    lists = torch.randint(-1, columns, (batch, heads, columns), generator=torch.Generator().manual_seed(columns))
    lists = torch.minimum(lists, torch.tensor([-(-n // block) - 1 for n in seqlens]).view(-1, 1, 1)).int()
    unit = math.gcd(block, page)
    given = {"block_size": block, "page_size": page, "num_pages": 1000, "page_step": page // unit, "unit_step": 1}
    tables, lengths = build(lists, table, seqlens, device, **given)
    found = expected(lists.tolist(), table.tolist(), seqlens, 1, block, page, (page // unit, 1, 0))
    for (keys, cells), got, length in zip(found, tables.tolist(), lengths.tolist()):
        assert length == keys and got[: len(cells)] == cells
        assert all(cell == UNTOUCHED for cell in got[len(cells) :])


def hostile(device):
    table = torch.tensor([[3, -1, 2**30, 5], [0, 1, 2, 4]], dtype=INT32)
    lists = torch.tensor([[[0, 1, 2, 3]], [[2**31 - 1, -(2**31), 7, 0]]], dtype=INT32)
    options = {"block_size": 16, "page_size": 16, "num_pages": 6}
    return lists, table, options


@pytest.mark.gpu
def test_hostile_values_stay_inside_on_a_gpu():
    lists, table, options = hostile("cuda")
    windows = [{}, *({"window_left": w, "cells": 64, "rows_per_request": 3} for w in (0, 20, 2**31 - 1))]
    cases = ([64, 64], [2**31 - 1, -5], [-(2**31), 2**31 - 1])
    for seqlens, window in itertools.product(cases, windows):
        tables, lengths = build(lists, table, seqlens, "cuda", **options, **window)
        assert ((lengths >= 0) & (lengths <= 64)).all()
        assert ((tables == UNTOUCHED) | ((tables >= -1) & (tables < 6))).all()
    falling = torch.tensor([9, 3, -8], dtype=INT32)
    build(lists, table, [40, 40], "cuda", bounds=falling, **options)
    report = new_report("cuda")
    build(lists, table, [64, 64], "cuda", report=report, **options)
    fault = first_fault(report)
    assert fault is not None and fault.startswith("attnops::build_block_tables: ")
    assert "(4 faults in all)" in fault  # two pages, two blocks


@pytest.mark.parametrize(
    ("seqlens", "lists", "words"),
    [
        (
            [64, 64],
            None,
            "(page_table, request 0, page 1 must be in .0, 6. .num_pages of k_pages., got -1)|(block_list)",
        ),
        ([16, 65], [[[0]], [[0]]], r"cache_seqlens\[1\] must be below 65"),
        ([16, 33], [[[0]], [[3]]], r"block_list, row 1 .* position 0 must be in \[0, 3\).* got 3"),
    ],
)
def test_values_out_of_range_are_errors_on_a_cpu(seqlens, lists, words):
    given, table, options = hostile("cpu")
    lists = given if lists is None else torch.tensor(lists, dtype=INT32)
    with pytest.raises(RuntimeError, match=f"attnops::build_block_tables: {words}"):
        build(lists, table, seqlens, "cpu", **options)


def test_a_row_without_cells_is_an_error_on_a_cpu_and_leaves_listed_blocks_out():
    lists, table = torch.tensor([[[0, 1, 2]]], dtype=INT32), torch.tensor([[0, 1, 2, 3]], dtype=INT32)
    options = {"block_size": 16, "page_size": 16, "num_pages": 4, "cells": 2, "bounds": torch.tensor([0, 5]).int()}
    with pytest.raises(RuntimeError, match=r"block_tables, row 0 .* needs fewer cells than 3 .* got 4"):
        build(lists, table, [64], "cpu", **options)
    report = new_report()
    tables, lengths = build(lists, table, [64], "cpu", report=report, **options)
    assert tables.tolist() == [[0, 3]] and lengths.tolist() == [32]
    assert "cells of a row 4" in (first_fault(report) or "")


@pytest.mark.parametrize("device", DEVICES)
def test_csr(device):
    lists = torch.tensor([[[1, 0]], [[0, -1]]], dtype=INT32)
    indptr = torch.tensor([1, 3, 5], dtype=INT32, device=device)
    indices = torch.tensor([99, 4, 2, 3, 99], dtype=INT32)
    options = {"block_size": 8, "page_size": 8, "num_pages": 5, "kv_indptr": indptr}
    tables, lengths = build(lists, indices, [12, 8], device, **options)
    assert tables.tolist() == [[4, 2], [3, UNTOUCHED]] and lengths.tolist() == [12, 8]


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_mutation(device):
    tensors = [torch.zeros(2, 1, 2), torch.zeros(2, 1), torch.zeros(2, 1, 2), torch.zeros(2, 3)]
    tables, lengths, lists, table = (x.to(device, INT32) for x in tensors)
    seqlens = torch.tensor([5, 40], dtype=INT32, device=device)
    given = (tables, lengths, lists, table, None, seqlens, None, 16, 1, 16, 1, 0, 0)
    torch.library.opcheck(torch.ops.attnops.build_block_tables.default, given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": 1 << 21}, "block_size must be"),
        ({"page_size": 0}, "page_size must be"),
        ({"num_pages": -1}, "num_pages must be"),
        ({"head_step": -1}, "head_step must be"),
        ({"window_left": -2}, "window_left must be"),
        ({"window_left": 3, "cu_seqlens_q": torch.zeros(3, dtype=INT32)}, "window_left must be -1 with cu_seqlens_q"),
        ({"window_left": 3}, r"block_tables\.shape\[2\] .* at least 32 .*with window_left"),
        ({"page_step": 2**31 - 1}, "page_step, unit_step and head_step must make cells of int32"),
        ({"block_list": torch.zeros(3, 1, 2, dtype=INT32)}, r"block_list\.shape\[0\] \(batch_size\) must be 2"),
        ({"block_list": torch.zeros(2, 1, 2)}, "block_list must have dtype int32"),
        (
            {"block_tables": torch.zeros(3, 1, 2, dtype=INT32), "block_seqlens": torch.zeros(3, 1, dtype=INT32)},
            r"block_tables\.shape\[0\] must be a multiple of 2",
        ),
        ({"block_tables": torch.zeros(2, 1, 1, dtype=INT32)}, r"block_tables\.shape\[2\] .* at least 2"),
        ({"block_seqlens": torch.zeros(2, 2, dtype=INT32)}, r"block_seqlens\.shape\[1\] .* must be 1 "),
        ({"cu_seqlens_q": torch.zeros(2, dtype=INT32)}, r"cu_seqlens_q\.shape\[0\] .* must be 3"),
        ({"report": torch.zeros(7, dtype=INT32)}, "report"),
    ],
)
def test_errors_name_the_argument(change, words):
    given = {
        "block_list": torch.zeros(2, 1, 2, dtype=INT32),
        "page_table": torch.zeros(2, 3, dtype=INT32),
        "cache_seqlens": torch.tensor([5, 40], dtype=INT32),
        "block_size": 16,
        "page_size": 16,
        "num_pages": 9,
        "block_tables": torch.zeros(2, 1, 2, dtype=INT32),
        "block_seqlens": torch.zeros(2, 1, dtype=INT32),
    }
    with pytest.raises(RuntimeError, match=f"attnops::build_block_tables: {words}"):
        ops.build_block_tables(**{**given, **change})
