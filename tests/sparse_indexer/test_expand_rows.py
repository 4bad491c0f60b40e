"""attnops::expand_rows: what each new token of a request sees."""

from __future__ import annotations

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_token_sees_its_request_up_to_itself(ratio, device):
    lengths, counts, spare, topk = [9, 0, 300, 5, 2, -3], [3, 0, 130, 1, 4, 1], 200, 6
    bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
    expected = [(0, 0, 0)] * (bounds[-1] + spare)
    for request, (length, count) in enumerate(zip(lengths, counts)):
        for i in range(count):
            # Entry j is of tokens ratio * j .. ratio * j + ratio - 1, and seen when the last one is.
            position = length - count + i
            seen = sum(ratio * j + ratio - 1 <= position for j in range(max(length, 0)))
            expected[bounds[request] + i] = (seen, request, min(seen, topk))
    got = ops.expand_rows(ints(lengths, device), ints(bounds, device), len(expected), topk, ratio=ratio)
    assert torch.stack(got, 1).tolist() == [list(row) for row in expected]


@pytest.mark.parametrize("device", DEVICES)
def test_empty_batches(device):
    got = ops.expand_rows(ints([], device), ints([0], device), 3, 8)
    assert torch.stack(got).tolist() == [[0, 0, 0]] * 3
    assert all(part.shape == (0,) for part in ops.expand_rows(ints([], device), ints([0], device), 0, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounds", [[0, 5, 3], [0, 2, 5], [1, 2, 3], [0, -1, 3]])
def test_bounds_out_of_range_are_reported(bounds, device):
    report = new_report(device)
    got = ops.expand_rows(ints([9, 9], device), ints(bounds, device), 4, 8, report=report)
    assert "expand_rows: end of tokens" in first_fault(report)
    assert (got[1] >= 0).all() and (got[1] < 2).all() and (got[0] <= 9).all()
    if device == "cpu":
        with pytest.raises(RuntimeError, match="attnops::expand_rows: cu_seqlens"):
            ops.expand_rows(ints([9, 9], device), ints(bounds, device), 4, 8)


def test_errors_name_the_argument():
    given = {"cache_seqlens": ints([3], "cpu"), "cu_seqlens_q": ints([0, 1], "cpu"), "num_rows": 2, "topk": 4}
    for spoiled, told in [
        ({"cu_seqlens_q": ints([0], "cpu")}, r"cu_seqlens_q.shape\[0\] \(batch_size \+ 1\) must be 2"),
        ({"ratio": 0}, "ratio must be"),
        ({"topk": -1}, "topk must be"),
        ({"seqlens": ints([0], "cpu")}, r"seqlens.shape\[0\] must be 2 \(num_rows\)"),
        ({"rows": ints([0], "cpu")}, r"rows.shape\[0\] \(num_rows\) must be 2"),
    ]:
        with pytest.raises((RuntimeError, ValueError), match="attnops::expand_rows: " + told):
            ops.expand_rows(**given | spoiled)


@pytest.mark.parametrize("device", DEVICES)
def test_schemas_fakes_and_aliasing(device):
    out = torch.zeros(3, 4, dtype=torch.int32, device=device).unbind(0)
    given = ints([3, 2], device), ints([0, 1, 3], device), 4, 2, new_report(device)
    torch.library.opcheck(torch.ops.attnops.expand_rows.default, (*(part.clone() for part in out), *given))
