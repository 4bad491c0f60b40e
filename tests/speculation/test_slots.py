"""Slots of drafts: moves of accepted tokens, pages' tails in front of branches, and the indices of draft steps."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.compat import sgl_kernel
from attnops.report import first_fault, new_report

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POOLS = {
    "mha": [((16, 3, 64), torch.bfloat16), ((16, 3, 32), torch.bfloat16)],
    "fp8": [((16, 2, 128), torch.float8_e4m3fn)] * 3,
    "mla": [((16, 576), torch.float16)],
    "rows of 656 bytes": [((16, 656), torch.uint8)] * 2,
    "odd": [((3, 1, 5), torch.float32), ((3, 7), torch.uint8)],
    "pages of one": [((1, 2, 64), torch.bfloat16)],
}


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def make_pool(kind, slots, device, generator, by_head=False):
    """Random pages of at least `slots` slots; `by_head`: heads before tokens in memory."""
    pages = []
    for (page_size, *rest), dtype in POOLS[kind]:
        count = -(-slots // page_size)
        size = torch.empty(0, dtype=dtype).element_size()
        values = torch.randint(0, 256, (count, page_size, *rest[:-1], rest[-1] * size), generator=generator)
        values = values.to(torch.uint8).view(dtype).to(device)
        if by_head and len(rest) == 2:
            values = values.transpose(1, 2).contiguous().transpose(1, 2)
        pages.append(values)
    return pages


def dense(tensor):
    return tensor.clone(memory_format=torch.contiguous_format)


def row(pages, slot):
    """Of dense pages, as a view."""
    return as_bytes(pages)[slot // pages.shape[1], slot % pages.shape[1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("by_head", [False, True])
def test_accepted_tokens_move_in_their_order(kind, by_head, device):
    rng, generator = random.Random(len(kind)), torch.Generator().manual_seed(2)
    batch, nodes, path_length = 5, 20, 12
    pages = make_pool(kind, batch * nodes + 30, device, generator, by_head)
    window = make_pool(kind, batch * nodes, device, generator)
    slots = rng.sample(range(batch * nodes + 30), batch * nodes)
    slot_map = torch.randperm(batch * nodes + 30, generator=generator) % (batch * nodes)
    taken = {}
    for slot in slots:  # no two of these share a place in the window's pool
        taken.setdefault(int(slot_map[slot]), slot)
    slot_map = torch.tensor([s if taken.get(int(s)) == i else -1 for i, s in enumerate(slot_map)])
    accepted = []
    for b in range(batch):
        path = [0, *sorted(rng.sample(range(1, nodes), rng.randint(0, path_length - 1)))] if b else []
        accepted.append([b * nodes + node for node in path] + [-1] * (path_length - len(path)))
    before, window_before = ([dense(p) for p in pool] for pool in (pages, window))
    table = torch.full((7, 64), -5, dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 0, 40, 64 - path_length, 1], dtype=torch.int32, device=device)
    rows = torch.tensor([6, 0, 2, 1, 4], device=device)
    report = new_report(device)
    loc = torch.tensor(slots, device=device)
    ops.move_kv(
        torch.tensor(accepted, device=device, dtype=torch.int32),
        loc,
        pages,
        window_pages=window,
        slot_map=slot_map.to(device),
        req_to_token=table,
        req_pool_indices=rows,
        cache_seqlens=lengths,
        report=report,
    )
    assert first_fault(report) is None
    expected_table = torch.full((7, 64), -5)
    moved, window_moved = ([p.clone() for p in pool] for pool in (before, window_before))
    for b in range(batch):
        for i, source in enumerate(a for a in accepted[b] if a >= 0):
            expected_table[rows[b], lengths[b] + i] = slots[b * nodes + i]
            for old, new in zip(before, moved):
                row(new, slots[b * nodes + i]).copy_(row(old, slots[source]))
            places = [int(slot_map[slots[at]]) for at in (source, b * nodes + i)]
            for old, new in zip(window_before, window_moved):
                if min(places) >= 0:
                    row(new, places[1]).copy_(row(old, places[0]))
    assert torch.equal(table.cpu().long(), expected_table)
    for got, expected in zip([*pages, *window], [*moved, *window_moved]):
        assert torch.equal(as_bytes(got), as_bytes(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_more_buffers_than_a_launch_takes(device):
    pages = [torch.arange(8.0, device=device).view(8, 1, 1).clone() for _ in range(163)]
    ops.move_kv(torch.tensor([[0, 2, 3]], device=device), torch.arange(4, 8, device=device), pages)
    assert all(p.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 7] for p in pages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("accepted", "slots", "told"),
    [
        ([[0, 4, -1]], [0, 1, 2, 3], "accepted row 4 at request 0, position 1, must be in [1, 4)"),
        ([[0, 2, 1]], [0, 1, 2, 3], "accepted row 1 at request 0, position 2"),
        ([[0, 2**40, -1]], [0, 1, 2, 3], "accepted row"),
        ([[0, 3, -1]], [0, 1, 2, 2**33], "token slot"),
        ([[0, 3, -1]], [0, 8, 2, 3], "token slot 8 at request 0, position 1, must be in [0, 8)"),
    ],
)
def test_rows_and_slots_out_of_range(accepted, slots, told, device):
    pages = torch.arange(8.0, device=device).view(4, 2, 1)
    given = (torch.tensor(accepted, device=device), torch.tensor(slots, device=device), [pages])
    report = new_report(device)
    ops.move_kv(*given, report=report)
    assert told in first_fault(report)
    assert pages.flatten()[3:].tolist() == [3, 4, 5, 6, 7]
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"attnops::move_kv: (accept_index|out_cache_loc), request 0, p"):
            ops.move_kv(*given)


def branch_cells(length, topk, steps, page_size):
    """First cell of every branch's drafts."""
    if page_size == 1 or topk == 1:
        return [length + k * steps for k in range(topk)]
    tail = length % page_size
    pages = -(-(tail + steps) // page_size)
    return [length // page_size * page_size + k * pages * page_size + tail for k in range(topk)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("topk, steps", [(1, 5), (4, 5), (8, 1), (3, 20)])
def test_indices_of_draft_steps(topk, steps, page_size, device):
    rng = random.Random(page_size * topk)
    for batch in (0, 1, 6, 300):
        columns = 900
        table = torch.randint(0, 10**6, (batch + 2, columns), dtype=torch.int32)
        rows = rng.sample(range(batch + 2), batch)
        lengths = [rng.choice([0, 1, page_size, rng.randint(0, 200)]) for _ in rows]
        report = new_report(device)
        given = (table.to(device), torch.tensor(rows, dtype=torch.int64, device=device))
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        indptr, indices = ops.generate_draft_decode_kv_indices(*given, lens, topk, steps, page_size, report=report)
        assert first_fault(report) is None
        for step in {0, steps - 1}:
            bounds, at = indptr[step].tolist(), 0
            for b, length in enumerate(lengths):
                for k, cell in enumerate(branch_cells(length, topk, steps, page_size)):
                    expected = torch.cat([table[rows[b], :length], table[rows[b], cell : cell + step + 1]])
                    assert bounds[b * topk + k] == at
                    at += len(expected)
                    assert torch.equal(indices[step, bounds[b * topk + k] : at].cpu(), expected)
            assert bounds[-1] == at
            assert not indices[step, at:].any()


def sglang_arguments(device, page_size, wide):
    """Of SGLang's kernel, as its backends call it, for 3 requests, 2 branches and 4 steps; buffers are larger."""
    table = torch.randperm(6 * 64, generator=torch.Generator().manual_seed(1)).view(6, 64).int()
    lengths = torch.tensor([17, 0, 33], dtype=torch.int64 if wide else torch.int32)
    positions = torch.cat([lengths.repeat_interleave(2), torch.full((3,), 10**6)])
    buffers = [torch.full((6, n), -7, dtype=torch.int64 if wide else torch.int32) for n in (200, 9)]
    given = [torch.tensor([4, 1, 2]), table, lengths, *buffers, positions]
    return [*(x.to(device) for x in given), 64, 200, 9, 4, 4, 8, page_size]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("wide", [False, True])
def test_sglangs_kernel_by_name(page_size, wide, device):
    """By its grid and order of arguments; the first cell of kv_indptr is left alone, and so is what lies behind."""
    arguments = sglang_arguments(device, page_size, wide)
    rows, table, lengths, indices, indptr = arguments[:5]
    sgl_kernel.generate_draft_decode_kv_indices[(4, 3, 2)](*arguments)
    bounds, expected = ops.generate_draft_decode_kv_indices(table, rows, lengths.int(), 2, 4, page_size)
    for step in range(4):
        end = int(bounds[step, -1])
        assert torch.equal(indices[step, :end], expected[step, :end].to(indices.dtype))
        assert (indices[step, end:] == -7).all()
    assert torch.equal(indptr[:4, 1:7], bounds[:, 1:].to(indptr.dtype))
    assert (indptr[:, 0] == -7).all() and (indptr[:4, 7:] == -7).all()
    assert (indptr[4:] == -7).all() and (indices[4:] == -7).all()


@pytest.mark.parametrize(
    "place, value, message",
    [
        (6, 63, "pool_len must be 64, got 63"),
        (7, 100, "kv_indices_stride must be 200, got 100"),
        (8, 7, "kv_indptr_stride must be 9, got 7"),
        (5, torch.zeros(5), r"positions.shape\[0\] must be 6 or more \(of the grid \(4, 3, 2\)\), got 5"),
        (12, 0, "page_size must be"),
    ],
)
def test_sglangs_kernel_names_what_is_wrong(place, value, message):
    arguments = sglang_arguments("cpu", 16, False)
    arguments[place] = value
    with pytest.raises((ValueError, RuntimeError), match=f"generate_draft_decode_kv_indices.*{message}"):
        sgl_kernel.generate_draft_decode_kv_indices[(4, 3, 2)](*arguments)
    with pytest.raises(ValueError, match=r"the grid must be \(steps, requests, topk\), got \(4, 3\)"):
        sgl_kernel.generate_draft_decode_kv_indices[(4, 3)]
    with pytest.raises(NotImplementedError, match="a positional argument behind page_size"):
        sgl_kernel.generate_draft_decode_kv_indices[(4, 3, 2)](*sglang_arguments("cpu", 16, False), 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["mha", "odd", "pages of one"])
@pytest.mark.parametrize("topk, steps", [(1, 4), (4, 5), (3, 40)])
def test_every_branch_has_the_prefixs_partial_page(kind, topk, steps, device):
    generator = torch.Generator().manual_seed(topk)
    lengths, columns = [0, 1, 33, 47, 64], 64 + 4 * 64
    total = len(lengths) * columns
    pages = make_pool(kind, total, device, generator, by_head=True)
    page_size = pages[0].shape[1]
    order = torch.randperm(total, generator=generator)
    table = order.view(len(lengths), columns)
    before = [dense(p) for p in pages]
    given = [table.int(), torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int32)]
    report = new_report(device)
    ops.copy_page_tail(*(t.to(device) for t in given), pages, topk, steps, report=report)
    assert first_fault(report) is None
    expected = [p.clone() for p in before]
    for b, length in enumerate(lengths):
        tail = length % page_size
        for cell in branch_cells(length, topk, steps, page_size)[1:] if page_size > 1 else []:
            for i in range(tail):
                for old, new in zip(before, expected):
                    source = table[b, length - tail + i]
                    row(new, table[b, cell - tail + i]).copy_(row(old, source))
    for got, right in zip(pages, expected):
        assert torch.equal(as_bytes(got), as_bytes(right))


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_beyond_the_row_are_told(device):
    """As where lengths count the drafts already."""
    table = torch.arange(80, dtype=torch.int32, device=device).view(2, 40)
    rows, pages = torch.tensor([0, 1], device=device), [torch.zeros(5, 16, 4, device=device)]
    lens = torch.tensor([3, 30], dtype=torch.int32, device=device)
    calls = {
        "generate_draft_decode_kv_indices": lambda **o: ops.generate_draft_decode_kv_indices(
            table, rows, lens, 2, 6, 16, **o
        ),
        "copy_page_tail": lambda **o: ops.copy_page_tail(table, rows, lens, pages, 2, 6, **o),
    }
    for name, call in calls.items():
        report = new_report(device)
        call(report=report)
        assert f"attnops::{name}: cells of prefix and drafts 68 at request 1" in first_fault(report)
        if device == "cpu":
            with pytest.raises(RuntimeError, match=rf"attnops::{name}: cache_seqlens\[1\].* below 41 .*got 68"):
                call()
        else:
            call()
    rows[0] = 7
    report = new_report(device)
    calls["generate_draft_decode_kv_indices"](report=report)
    assert "request row 7 at request 0" in first_fault(report)


ERRORS = [
    (
        "move_kv",
        {"pages": [torch.zeros(8, 16, 4), torch.zeros(8, 8, 4)]},
        r"pages\.shape\[1\] \(page_size\) must be 16",
    ),
    ("move_kv", {"pages": [torch.zeros(8, 16, 4).long()]}, "pages must have dtype"),
    ("move_kv", {"out_cache_loc": torch.arange(7)}, r"out_cache_loc\.shape\[0\] must be batch_size 2 times"),
    ("move_kv", {"req_pool_indices": None}, "req_to_token, req_pool_indices and cache_seqlens must be given together"),
    ("move_kv", {"slot_map": torch.arange(9)}, "slot_map must be given where window_pages are"),
    ("copy_page_tail", {"pages": []}, "pages must hold at least one buffer"),
    ("copy_page_tail", {"draft_steps": 33}, r"topk \* draft_steps must be at most 64 .*got 2 \* 33"),
    (
        "generate_draft_decode_kv_indices",
        {"num_steps": 4},
        r"num_steps must be in \[0, 3\], got 4",
    ),
    (
        "generate_draft_decode_kv_indices",
        {"num_steps": 4, "kv_indptr": torch.zeros(4, 5).int(), "kv_indices": torch.zeros(4, 8).int()},
        r"kv_indptr.shape\[0\] \(num_steps\) must be in \[0, 3\], got 4",
    ),
    # Memory of these sizes is not even asked for.
    ("generate_draft_decode_kv_indices", {"topk": 2**31}, r"topk must be in \[1, 1024\], got 2147483648"),
    ("generate_draft_decode_kv_indices", {"draft_steps": 2**31}, r"draft_steps must be in \[1, 32\], got 2147483648"),
    ("generate_draft_decode_kv_indices", {"topk": 0}, r"topk must be in \[1, 1024\], got 0"),
]


@pytest.mark.parametrize("name, change, message", ERRORS)
def test_errors_name_the_argument(name, change, message):
    from right_calls import ops_calls

    function, given = ops_calls()[name]
    with pytest.raises((RuntimeError, ValueError), match=f"attnops::{name}: {message}"):
        function(**{**given, **change})


@pytest.mark.parametrize("device", DEVICES)
def test_schemas_fakes_and_mutation(device):
    from right_calls import speculation_arguments

    def on_device(name, *order):
        given = speculation_arguments()[name]
        values = [given.get(key, [] if key == "window_pages" else None) for key in order]
        move = lambda v: v.to(device) if isinstance(v, torch.Tensor) else v  # noqa: E731
        return [[move(one) for one in value] if isinstance(value, list) else move(value) for value in values]

    lists = ("pages", "window_pages")
    moves = on_device("move_kv", "accept_index", "out_cache_loc", *lists)
    torch.library.opcheck(torch.ops.attnops.move_kv.default, tuple(moves))
    requests = ("req_to_token", "req_pool_indices", "cache_seqlens")
    tail = on_device("copy_page_tail", *requests, *lists, "topk", "draft_steps")
    torch.library.opcheck(torch.ops.attnops.copy_page_tail.default, tuple(tail))
    out = [torch.zeros(3, 5, dtype=torch.int32, device=device), torch.zeros(3, 90, dtype=torch.int32, device=device)]
    steps = on_device("generate_draft_decode_kv_indices", *requests, "topk", "draft_steps", "page_size")
    torch.library.opcheck(torch.ops.attnops.generate_draft_decode_kv_indices.default, (*out, *steps))
