"""build_page_table, build_kv_indices, build_cu_seqlens, translate_slots on every device: against plain loops."""

import itertools

import pytest
import torch
from attnops import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE_SIZES = [1, 3, 16, 64]
LENGTHS = [[], [0], [1], [5, 0, 64, 1, 129], [200] * 33]
UNTOUCHED = -12345  # poison: what a cell that nobody may write holds


def ceil_div(a, b):
    return -(-a // b)


def request_pool(lengths, page_size, max_context=200, spare_requests=3, spare_pages=5):
    """req_to_token and rows of a batch whose requests own random pages. Positions past a length hold huge slots."""
    pages_each = ceil_div(max_context, page_size)
    max_requests = len(lengths) + spare_requests
    pages = torch.randperm(max_requests * pages_each + spare_pages)[: max_requests * pages_each]
    offsets = torch.arange(page_size)
    req_to_token = (pages.view(max_requests, pages_each, 1) * page_size + offsets).flatten(1)[:, :max_context]
    rows = torch.randperm(max_requests)[: len(lengths)]
    for row, length in zip(rows.tolist(), lengths, strict=True):
        req_to_token[row, length:] = 2**31 - 1
    return req_to_token.int().contiguous(), rows


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def plain_pages(req_to_token, row, length, page_size):
    return [int(req_to_token[row, first]) // page_size for first in range(0, length, page_size)]


def tensors(device, lengths, rows, index_dtype):
    return rows.to(device, index_dtype), torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"batch{len(lengths)}")
def test_page_table_equals_plain_loops_and_leaves_the_rest(lengths, page_size, index_dtype, device):
    req_to_token, rows = request_pool(lengths, page_size)
    wide = torch.full((len(lengths), 300), UNTOUCHED, dtype=torch.int32, device=device)
    table = wide[:, 7 : 7 + ceil_div(200, page_size)]  # strided, and not at a vector's boundary
    ops.build_page_table(
        req_to_token.to(device), *tensors(device, lengths, rows, index_dtype), page_size, page_table=table
    )
    expected = torch.full((len(lengths), 300), UNTOUCHED, dtype=torch.int32)
    for b, length in enumerate(lengths):
        pages = plain_pages(req_to_token, rows[b], length, page_size)
        expected[b, 7 : 7 + len(pages)] = torch.tensor(pages, dtype=torch.int32)
    assert torch.equal(wide.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"batch{len(lengths)}")
def test_kv_indices_equal_plain_loops_and_leave_the_rest(lengths, page_size, index_dtype, device):
    req_to_token, rows = request_pool(lengths, page_size)
    needed = sum(ceil_div(length, page_size) for length in lengths)
    kv_indices = torch.full((needed + 9,), UNTOUCHED, dtype=torch.int32, device=device)
    kv_indptr, _, last = ops.build_kv_indices(
        req_to_token.to(device), *tensors(device, lengths, rows, index_dtype), page_size, kv_indices=kv_indices
    )
    pages = [plain_pages(req_to_token, row, length, page_size) for row, length in zip(rows, lengths, strict=True)]
    starts = [0]
    for own in pages:
        starts.append(starts[-1] + len(own))
    assert kv_indptr.tolist() == starts
    assert kv_indices.tolist() == flat(pages) + [UNTOUCHED] * 9
    assert last.tolist() == [0 if length == 0 else (length - 1) % page_size + 1 for length in lengths]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requests_may_begin_within_their_rows(page_size, device):
    """As a decoder's tokens do behind their encoder's; a beginning outside the row counts as the row's own bound."""
    starts, lengths = [0, 3 * page_size, page_size, 200, 100], [129, 40, 0, 7, 150]
    req_to_token, rows = request_pool([200] * 5, page_size)
    served = [129, min(40, 200 - 3 * page_size), 0, 0, 100]
    given = torch.tensor([-5, *starts[1:3], 2**31 - 1, 100], dtype=torch.int32, device=device)
    args = (req_to_token.to(device), *tensors(device, lengths, rows, torch.int64), page_size)
    kv_indptr, kv_indices, last = ops.build_kv_indices(*args, kv_start_idx=given)
    pages = [
        plain_pages(req_to_token[:, start:], row, length, page_size)
        for start, row, length in zip(starts, rows, served, strict=True)
    ]
    assert kv_indptr.diff().tolist() == [len(own) for own in pages]
    assert kv_indices[: int(kv_indptr[-1])].tolist() == flat(pages)
    assert last.tolist() == [0 if length == 0 else (length - 1) % page_size + 1 for length in served]
    report = torch.zeros(8, dtype=torch.int32, device=device)
    indptr, _, _ = ops.build_kv_indices(*args, kv_start_idx=given, report=report)
    assert int(report[0]) >= 2 and int(report[1]) == 2  # those that begin outside, and lengths beyond what is left
    assert indptr.diff().tolist()[0] == 0 and indptr.diff().tolist()[3] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [2**30, 2**31 - 1])
def test_a_page_may_be_longer_than_any_request(page_size, device):
    slots = torch.tensor([[5, 6, 7], [2**31 - 2, 9, 8]], dtype=torch.int32, device=device)
    given = (slots, *tensors(device, [3, 1], torch.arange(2), torch.int64), page_size)
    table = ops.build_page_table(*given, page_table=torch.full((2, 1), UNTOUCHED, dtype=torch.int32, device=device))
    assert table.tolist() == [[0], [(2**31 - 2) // page_size]]
    indptr, indices, last = ops.build_kv_indices(*given)
    assert (indptr.tolist(), indices[:2].tolist()) == ([0, 1, 2], [0, (2**31 - 2) // page_size])
    assert last.tolist() == [3, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_large_batches_and_long_rows(device):
    """More requests than one block has threads, and rows that several blocks share."""
    lengths = torch.randint(0, 70, (3000,)).tolist()
    req_to_token, rows = request_pool(lengths, page_size=3, max_context=70)
    table = torch.full((3000, 24), UNTOUCHED, dtype=torch.int32, device=device)
    args = (req_to_token.to(device), *tensors(device, lengths, rows, torch.int64), 3)
    ops.build_page_table(*args, page_table=table)
    pages = [plain_pages(req_to_token, row, length, 3) for row, length in zip(rows, lengths, strict=True)]
    assert table.tolist() == [own + [UNTOUCHED] * (24 - len(own)) for own in pages]
    kv_indptr, kv_indices, _ = ops.build_kv_indices(*args)
    assert kv_indices[: int(kv_indptr[-1])].tolist() == flat(pages)

    lengths = [100_000, 3, 99_999, 0, 65_537]
    req_to_token, rows = request_pool(lengths, page_size=1, max_context=100_000)
    args = (req_to_token.to(device), *tensors(device, lengths, rows, torch.int32), 1)
    table = ops.build_page_table(*args).cpu()
    kv_indptr, kv_indices, last = ops.build_kv_indices(*args)
    kv_indices, starts = kv_indices.cpu(), kv_indptr.tolist()
    for b, length in enumerate(lengths):
        expected = req_to_token[rows[b], :length]
        assert torch.equal(table[b, :length], expected)
        assert torch.equal(kv_indices[starts[b] : starts[b + 1]], expected)
    assert last.tolist() == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slot_map_translates_pages_and_tokens_out_of_the_window_cost_nothing(page_size, map_dtype, device):
    lengths, window = [5, 0, 64, 1, 129, 200], 37
    req_to_token, rows = request_pool(lengths, page_size)
    num_slots = int(req_to_token[req_to_token < 2**31 - 1].max()) + 1
    slot_map = torch.full((num_slots,), -1)  # everything has left, then the window's tokens come back
    swa_pages = torch.randperm(ceil_div(num_slots, page_size)) + 1
    expected = []
    for b, length in enumerate(lengths):
        inside = req_to_token[rows[b], max(length - window, 0) : length].long()
        slot_map[inside] = swa_pages[inside // page_size] * page_size + inside % page_size
        first_visible_page = max(length - window, 0) // page_size
        own = plain_pages(req_to_token, rows[b], length, page_size)
        expected.append([int(swa_pages[page]) if j >= first_visible_page else 0 for j, page in enumerate(own)])
    args = (req_to_token.to(device), *tensors(device, lengths, rows, torch.int64), page_size)
    slot_map = slot_map.to(device, map_dtype)
    table = ops.build_page_table(*args, slot_map=slot_map)
    assert [row[: len(own)] for row, own in zip(table.tolist(), expected, strict=True)] == expected
    kv_indptr, kv_indices, _ = ops.build_kv_indices(*args, slot_map=slot_map)
    assert kv_indices[: int(kv_indptr[-1])].tolist() == flat(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_too_small_is_not_overrun(device):
    lengths = [40, 200, 17]
    req_to_token, rows = request_pool(lengths, 16)
    wide = torch.full((3, 12), UNTOUCHED, dtype=torch.int32, device=device)
    args = (req_to_token.to(device), *tensors(device, lengths, rows, torch.int32), 16)
    ops.build_page_table(*args, page_table=wide[:, :4])
    assert (wide[:, 4:] == UNTOUCHED).all()
    assert wide[1, :4].tolist() == plain_pages(req_to_token, rows[1], 64, 16)

    room = torch.full((12,), UNTOUCHED, dtype=torch.int32, device=device)
    kv_indptr, _, _ = ops.build_kv_indices(*args, kv_indices=room[:10])
    assert kv_indptr.tolist() == [0, 3, 16, 18]
    assert room.tolist() == (
        plain_pages(req_to_token, rows[0], 40, 16) + plain_pages(req_to_token, rows[1], 112, 16) + [UNTOUCHED] * 2
    )
    # A length beyond req_to_token is served as far as the row goes.
    args = (*args[:2], torch.tensor([40, 2**30, 17], dtype=torch.int32, device=device), 16)
    kv_indptr, _, _ = ops.build_kv_indices(*args)
    assert kv_indptr.tolist() == [0, 3, 16, 18]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [0, 1, 2, 31, 32, 33, 1023, 1024, 1025, 5000])
def test_cu_seqlens_is_an_exclusive_prefix_sum(batch_size, device):
    seqlens = torch.randint(-2, 3000, (batch_size,), dtype=torch.int32, device=device)
    cu_seqlens = ops.build_cu_seqlens(seqlens)
    expected = torch.nn.functional.pad(seqlens.clamp(min=0).cumsum(0), (1, 0))
    assert torch.equal(cu_seqlens, expected.int())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_translate_slots(slot_dtype, map_dtype, device):
    slot_map = torch.randint(-1, 900, (1000,), dtype=map_dtype, device=device)
    slots = torch.randint(-3, 1000, (2 * 777,), dtype=slot_dtype, device=device)[::2]
    expected = torch.where(slots < 0, slots, slot_map[slots.clamp(min=0).long()].to(slot_dtype))
    assert torch.equal(ops.translate_slots(slots, slot_map), expected)
    wide = torch.full((3 * 777,), UNTOUCHED, device=device)
    ops.translate_slots(slots, slot_map, out=wide[::3])
    assert torch.equal(wide[::3], expected.long())
    assert (wide[1::3] == UNTOUCHED).all() and (wide[2::3] == UNTOUCHED).all()
    ops.translate_slots(slots, slot_map, out=slots)
    assert torch.equal(slots, expected)
    assert ops.translate_slots(slots[:0], slot_map).numel() == 0
    beyond = torch.tensor([5, 1000, 2**31 - 1], dtype=slot_dtype, device=device)
    assert ops.translate_slots(beyond, slot_map).tolist() == [int(slot_map[5]), -1, -1]


@pytest.mark.parametrize("device", DEVICES)
def test_checked_mode_records_the_first_fault_and_leaves_the_request_out(device):
    lengths = [40, 33, 17]
    req_to_token, rows = request_pool(lengths, 16)

    def run(req_to_token=req_to_token, rows=rows, lengths=lengths, **options):
        report = torch.zeros(8, dtype=torch.int32, device=device)
        table = torch.full((3, 13), UNTOUCHED, dtype=torch.int32, device=device)
        args = (req_to_token.to(device), *tensors(device, lengths, rows, torch.int64), 16)
        ops.build_page_table(*args, page_table=table, report=report, **options)
        by_csr = torch.zeros(8, dtype=torch.int32, device=device)
        kv_indptr, kv_indices, last = ops.build_kv_indices(*args, report=by_csr, **options)
        return report.tolist(), table.cpu(), by_csr.tolist(), kv_indptr.tolist(), kv_indices.cpu(), last.tolist()

    assert run()[0] == [0] * 8 and run()[2] == [0] * 8

    # count, op, kind, request, position, value, limit: as core/report.h numbers them
    report, table, by_csr, kv_indptr, _, last = run(rows=torch.tensor([int(rows[0]), 6, int(rows[2])]))
    assert report == [1, 1, 3, 1, 0, 6, 6, 0] and by_csr == [1, 2, 3, 1, 0, 6, 6, 0]
    assert (table[1] == UNTOUCHED).all() and table[2, 0] >= 0
    assert kv_indptr == [0, 3, 3, 5] and last == [8, 0, 1]

    report, table, by_csr, kv_indptr, _, _ = run(lengths=[40, 201, 17])
    assert report == [1, 1, 4, 1, 0, 201, 201, 0] and by_csr == [1, 2, 4, 1, 0, 201, 201, 0]
    assert (table[1] == UNTOUCHED).all() and kv_indptr == [0, 3, 3, 5]

    broken = req_to_token.clone()
    broken[rows[1], 16] = -7
    report, table, by_csr, kv_indptr, kv_indices, _ = run(req_to_token=broken)
    assert report == [1, 1, 2, 1, 16, -7, 2**31 - 1, 0] and by_csr == [1, 2, 2, 1, 16, -7, 2**31 - 1, 0]
    assert table[1, 1] == 0 and kv_indices[kv_indptr[1] + 1] == 0

    slot_map = torch.arange(4, device=device)  # nearly every slot is outside this map
    report, table, _, _, _, _ = run(slot_map=slot_map)
    assert report[:3] == [8, 1, 2] and report[6] == 4
    assert table[0, :3].tolist() == [0, 0, 0]

    report = torch.zeros(8, dtype=torch.int32, device=device)
    out = ops.translate_slots(torch.tensor([3, 9, -1], device=device), slot_map, report=report)
    assert out.tolist() == [3, -1, -1] and report.tolist() == [1, 5, 2, 1, 1, 9, 4, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_aliasing(device):
    req_to_token, rows = request_pool([5, 64], 16)
    args = (req_to_token.to(device), *tensors(device, [5, 64], rows, torch.int64), 16)
    slot_map = torch.arange(4000, device=device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    i32 = {"dtype": torch.int32, "device": device}
    namespace = torch.ops.attnops
    for options in ((), (slot_map,), (slot_map, report)):
        torch.library.opcheck(namespace.build_page_table.default, (torch.zeros(2, 13, **i32), *args, *options))
        for last in (None, torch.zeros(2, **i32)):
            outputs = torch.zeros(3, **i32), torch.zeros(26, **i32), last
            torch.library.opcheck(namespace.build_kv_indices.default, (*outputs, *args, *options))
    begins = (*outputs, *args, slot_map, report, torch.zeros(2, **i32))
    torch.library.opcheck(namespace.build_kv_indices.default, begins)
    torch.library.opcheck(namespace.build_cu_seqlens.default, (torch.zeros(3, **i32), args[2]))
    slots = torch.tensor([1, -1, 3], device=device)
    torch.library.opcheck(namespace.translate_slots.default, (torch.zeros(3, **i32), slots, slot_map, report))
