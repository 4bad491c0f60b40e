"""attnops::label_scores: products of labels, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INT32, UNTOUCHED = torch.int32, 7.0


def problem(device, *, heads=(8, 2), channels=32, page_size=16, dtype=torch.bfloat16, lengths=(300, 0, 129), gap=0):
    """Labels in shuffled pages, NaN wherever no key is."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator).int()
    table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=INT32)
    shape = (len(order), page_size, heads[1], channels + gap)
    pages = torch.full(shape, math.nan, dtype=dtype)[..., :channels]
    q = torch.randn(len(lengths), heads[0], channels, generator=generator).to(dtype)
    taken, expected = 0, []
    for b, (length, count) in enumerate(zip(lengths, counts)):
        table[b, :count] = order[taken : taken + count]
        taken += count
        labels = torch.randn(length, heads[1], channels, generator=generator).to(dtype)
        position = torch.arange(length)
        pages[table[b][position // page_size].long(), position % page_size] = labels
        grouped = q[b].double().unflatten(0, (heads[1], -1))
        expected.append(torch.einsum("hgc,khc->hgk", grouped, labels.double()).amax(1))
    given = (q.to(device), pages.to(device), table.to(device), torch.tensor(lengths, dtype=INT32, device=device))
    return given, expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2), (5, 5), (33, 3), (32, 1)])
@pytest.mark.parametrize(("channels", "gap"), [(32, 0), (64, 8), (128, 0), (16, 0), (16, 3), (5, 0), (130, 6)])
def test_is_the_largest_product_of_a_group(heads, channels, gap, dtype, device):
    given, expected = problem(device, heads=heads, channels=channels, dtype=dtype, gap=gap)
    scores = torch.full((3, heads[1], 310), UNTOUCHED, device=device)
    ops.label_scores(scores, *given)
    for row, answer in zip(scores.cpu(), expected):
        keys = answer.shape[1]
        torch.testing.assert_close(row[:, :keys].double(), answer, rtol=1e-5, atol=1e-4)
        assert (row[:, keys:] == UNTOUCHED).all()


@pytest.mark.gpu
def test_a_request_scores_the_same_alone_and_among_many():
    """So many requests that a warp has several tiles of keys."""
    lengths = torch.randint(0, 330, (520,), generator=torch.Generator().manual_seed(1)).tolist()
    (q, pages, table, cache_seqlens), expected = problem("cuda", heads=(16, 8), page_size=5, lengths=lengths)
    scores = torch.full((len(lengths), 8, 331), UNTOUCHED, device="cuda")
    ops.label_scores(scores, q, pages, table, cache_seqlens)
    alone = torch.full_like(scores[:1], UNTOUCHED)
    for b in (0, 77, 519):
        alone.fill_(UNTOUCHED)
        ops.label_scores(alone, q[b : b + 1], pages, table[b : b + 1], cache_seqlens[b : b + 1])
        assert torch.equal(alone[0], scores[b])
        torch.testing.assert_close(scores[b, :, : lengths[b]].cpu().double(), expected[b], rtol=1e-5, atol=1e-4)
    assert all((row[:, n:] == UNTOUCHED).all() for row, n in zip(scores.cpu(), lengths))


@pytest.mark.parametrize("device", DEVICES)
def test_selection_of_scores_is_a_list_of_blocks_of_one(device):
    given, expected = problem(device)
    scores = torch.full((3, 2, 310), math.nan, device=device)
    ops.label_scores(scores, *given)
    lengths = given[3].unsqueeze(1).expand(3, 2).flatten()
    lists = ops.topk_select(scores.flatten(0, 1), lengths, 20).view(3, 2, 20).cpu()
    for b, answer in enumerate(expected):
        if answer.shape[1] == 0:
            assert (lists[b] == -1).all()
            continue
        best = answer.topk(20, dim=1).indices.sort(dim=1).values
        assert torch.equal(lists[b].long(), best)


@pytest.mark.gpu
def test_bad_pages_and_lengths_are_recorded_and_stay_inside():
    given, _ = problem("cuda")
    given[2][0, 1], given[2][2, 0] = -1, 2**30
    given[3][1] = 2**31 - 1
    scores = torch.full((3, 2, 310), UNTOUCHED, device="cuda")
    ops.label_scores(scores, *given)
    assert (scores[0, :, 16:32] == -math.inf).all() and (scores[2, :, :16] == -math.inf).all()
    report = new_report("cuda")
    ops.label_scores(scores, *given, report=report)
    assert (first_fault(report) or "").startswith("attnops::label_scores: ")


@pytest.mark.parametrize(
    ("cell", "length", "words"),
    [
        (-1, 300, "page_table, request 0, page 1 must be in .0, 30. .num_pages of label_pages., got -1"),
        (None, 999, r"cache_seqlens\[0\] must be below 321"),
        (None, 311, r"cache_seqlens\[0\] must be below 311"),
    ],
)
def test_values_out_of_range_are_errors_on_a_cpu(cell, length, words):
    given, _ = problem("cpu")
    given[3][0] = length
    if cell is not None:
        given[2][0, 1] = cell
    with pytest.raises(RuntimeError, match=f"attnops::label_scores: {words}"):
        ops.label_scores(torch.zeros(3, 2, 310), *given)


@pytest.mark.parametrize("device", DEVICES)
def test_schema_fake_and_mutation(device):
    given, _ = problem(device)
    torch.library.opcheck(torch.ops.attnops.label_scores.default, (torch.zeros(3, 2, 310, device=device), *given))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, torch.zeros(3, 2, 310).half(), "scores must have dtype float32"),
        (0, torch.zeros(3, 3, 310), r"scores\.shape\[1\] \(num_kv_heads\) must be 2"),
        (1, torch.zeros(3, 7, 32).bfloat16(), r"q_labels\.shape\[1\] .* multiple of 2"),
        (1, torch.zeros(3, 8, 31).bfloat16(), r"label_pages\.shape\[3\] \(num_channels\) must be 31"),
        (1, torch.zeros(3, 8, 32), "label_pages must have dtype float32"),
        (3, torch.zeros(2, 9, dtype=INT32), r"page_table\.shape\[0\]"),
        (4, torch.zeros(3), "cache_seqlens must have dtype int32"),
    ],
)
def test_errors_name_the_argument(place, value, words):
    given = [torch.zeros(3, 2, 310), *problem("cpu")[0]]
    given[place] = value
    with pytest.raises(RuntimeError, match=f"attnops::label_scores: {words}"):
        ops.label_scores(*given)
