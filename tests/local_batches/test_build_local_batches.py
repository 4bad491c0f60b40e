"""attnops::build_local_batches: chunks of requests as requests, whatever the lengths."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.ops.local_batches import max_local_batches

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INT32 = torch.int32
UNTOUCHED = -7


def expected(new, seqlens, table, page, chunk):
    """(first query row, keys, cells) of every virtual request, by plain loops over tokens."""
    found, row = [], 0
    for b, (count, length) in enumerate(zip(new, seqlens)):
        pieces: dict[int, int] = {}
        for i in range(count):
            position = max(length - count + i, 0)  # before the first key: with the first chunk, where it sees nothing
            pieces[position // chunk] = pieces.get(position // chunk, 0) + 1
        for index, rows in sorted(pieces.items()):
            keys = max(min((index + 1) * chunk, length) - index * chunk, 0)
            cells = table[b, index * chunk // page :][: -(-keys // page)].tolist()
            found.append((row, keys, cells))
            row += rows
    return found, row


def build(new, seqlens, table, page, chunk, device, room=None):
    total = sum(new)
    count = max_local_batches(total, len(new), chunk) if room is None else room
    bounds = torch.tensor([0, *new]).cumsum(0).to(device, INT32)
    out = [torch.full(shape, UNTOUCHED, dtype=INT32, device=device) for shape in ((count + 1,), (count,))]
    out.append(torch.full((count, chunk // page), UNTOUCHED, dtype=INT32, device=device))
    destinations = dict(zip(("local_cu_seqlens_q", "local_cache_seqlens", "local_page_table"), out))
    lens = torch.tensor(seqlens, dtype=INT32, device=device)
    ops.build_local_batches(bounds, lens, table.to(device), page, chunk, **destinations)
    return [x.cpu() for x in out]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_equals_a_loop_over_tokens(seed, device):
    r = random.Random(seed)
    page = r.choice([1, 3, 16])
    chunk = page * r.choice([1, 2, 7])
    batch = r.choice([0, 1, 5, 300])
    new = [r.choice([0, 1, 2, r.randint(0, 3 * chunk)]) for _ in range(batch)]
    seqlens = [count + r.choice([0, 1, r.randint(0, 5 * chunk)]) for count in new]
    width = max([-(-n // page) for n in seqlens], default=0) + r.randint(0, 2)
    table = torch.arange(batch * width, dtype=INT32).view(batch, width)
    bounds, lens, cells = build(new, seqlens, table, page, chunk, device)
    found, total = expected(new, seqlens, table, page, chunk)
    assert len(found) <= len(lens), "there is room for every batch of this shape"
    for v, (row, keys, mine) in enumerate(found):
        assert (bounds[v], lens[v], cells[v, : len(mine)].tolist()) == (row, keys, mine)
        assert (cells[v, len(mine) :] == UNTOUCHED).all()
    assert (bounds[len(found) :] == total).all() and (lens[len(found) :] == 0).all()
    assert (cells[len(found) :] == UNTOUCHED).all()


@pytest.mark.parametrize("device", DEVICES)
def test_hostile_values_stay_inside(device):
    """Lengths below zero, beyond the table and below the new tokens; bounds that fall; too little room."""
    table = torch.arange(8, dtype=INT32).view(2, 4)
    for seqlens in ([-5, 2**31 - 1], [3, 64], [-(2**31), 0]):
        bounds, lens, cells = build([5, 4], seqlens, table, 16, 32, device, room=3)
        assert ((lens >= 0) & (lens <= 32)).all() and (bounds >= 0).all() and (bounds <= 9).all()
        assert ((cells == UNTOUCHED) | ((cells >= 0) & (cells < 8))).all()
    out = [torch.zeros(n, dtype=INT32, device=device) for n in (4, 3)]
    out.append(torch.zeros(3, 2, dtype=INT32, device=device))
    falling = torch.tensor([9, 3, -8], dtype=INT32, device=device)
    lens = torch.tensor([40, 40], dtype=INT32, device=device)
    torch.ops.attnops.build_local_batches(*out, falling, lens, table.to(device), 16, 32)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_mutation(device):
    bounds, lens = (torch.tensor(x, dtype=INT32, device=device) for x in ([0, 5, 9], [40, 7]))
    out = [torch.zeros(shape, dtype=INT32, device=device) for shape in ((5,), (4,), (4, 2))]
    table = torch.arange(6, dtype=INT32, device=device).view(2, 3)
    torch.library.opcheck(torch.ops.attnops.build_local_batches.default, (*out, bounds, lens, table, 16, 32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_size": 40}, "chunk_size must be a multiple of page_size 16, got 40"),
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"page_size": 0}, "page_size must be"),
        ({"cu_seqlens_q": torch.zeros(4, dtype=INT32)}, r"cu_seqlens_q\.shape\[0\] \(batch_size \+ 1\) must be 3"),
        ({"local_page_table": torch.zeros(4, 3, dtype=INT32)}, r"local_page_table\.shape\[1\] .* must be 2"),
        ({"local_cu_seqlens_q": torch.zeros(4, dtype=INT32)}, r"local_cu_seqlens_q\.shape\[0\] .* must be 5"),
        ({"page_table": torch.zeros(2, 3)}, "page_table must have dtype int32"),
    ],
)
def test_errors_name_the_argument(change, words):
    given = {
        "cu_seqlens_q": torch.tensor([0, 5, 9], dtype=INT32),
        "cache_seqlens": torch.tensor([40, 7], dtype=INT32),
        "page_table": torch.zeros(2, 3, dtype=INT32),
        "page_size": 16,
        "chunk_size": 32,
        "local_cu_seqlens_q": torch.zeros(5, dtype=INT32),
        "local_cache_seqlens": torch.zeros(4, dtype=INT32),
        "local_page_table": torch.zeros(4, 2, dtype=INT32),
    }
    with pytest.raises(RuntimeError, match=f"attnops::build_local_batches: {words}"):
        ops.build_local_batches(**{**given, **change})
