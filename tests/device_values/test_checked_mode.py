"""The checked mode: slots out of the order of their page, rows that are none, pages that torch would clamp."""

from __future__ import annotations

import re

import pytest
import torch
from attnops import ops
from attnops.backends import get_backend_class
from attnops.report import first_fault, new_report, record_pages
from attnops.types import AttentionSpec, ForwardMode
from steps import LIMITS, Model, make_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE, LENGTHS = 16, [40, 33, 16]


def slots_of(device: str) -> torch.Tensor:
    """Whole pages in a shuffled order: int32 ``[3, 64]``."""
    pages = torch.randperm(12).view(3, 4)
    return (pages.unsqueeze(2) * PAGE + torch.arange(PAGE)).flatten(1).int().to(device)


def faults(slots: torch.Tensor, slot_map: torch.Tensor | None = None, lengths: list[int] = LENGTHS) -> list[str | None]:
    """What both forms of a table report."""
    device = slots.device
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    found = []
    for build in (ops.build_page_table, ops.build_kv_indices):
        report = new_report(device)
        build(slots, torch.arange(len(lengths), device=device), seqlens, PAGE, slot_map=slot_map, report=report)
        found.append(first_fault(report))
    return found


def both(text: str) -> list[str]:
    return [f"attnops::{op}: {text}" for op in ("build_page_table", "build_kv_indices")]


CONSECUTIVE = ": the tokens of a page have consecutive slots"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [1, 7, 15, 17, 39])
@pytest.mark.parametrize("step", [1, 3, PAGE, 5 * PAGE])
def test_a_slot_out_of_its_pages_order_is_named(position, step, device):
    """As the branches of a draft tree have them, whose tokens share positions: a kernel reads what lies there."""
    slots = slots_of(device)
    assert faults(slots) == [None, None]
    right = int(slots[0, position])
    slots[0, position] += step
    expected = both(f"token slot {right + step} at request 0, position {position}, must be {right}{CONSECUTIVE}")
    assert faults(slots) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_that_does_not_begin_at_its_first_slot_is_named(device):
    slots = slots_of(device)
    right = int(slots[0, 32])
    slots[0, 32:] += 3
    expected = both(f"token slot {right + 3} at request 0, position 32, must be {right}{CONSECUTIVE}")
    assert faults(slots) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_beyond_the_length_is_not_looked_at(device):
    slots = slots_of(device)
    for request, length in enumerate(LENGTHS):
        slots[request, length:] = -(2**31)
    assert faults(slots) == [None, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [0, 3, 16, 32])
def test_a_negative_slot_is_named_wherever_it_is_in_its_page(position, device):
    slots = slots_of(device)
    slots[1, position] = -5
    expected = both(f"token slot -5 at request 1, position {position}, must be in [0, {2**31 - 1})")
    assert faults(slots) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_slots_of_a_window_pool_are_compared_there(device):
    """The page is that of its last token; tokens that have left the window are not compared."""
    slots = slots_of(device)
    slot_map = torch.arange(12 * PAGE, dtype=torch.int32, device=device).flip(0).view(12, PAGE).flip(1).flatten()
    assert faults(slots, slot_map) == [None, None]
    gone = slots[0, :20].long()
    slot_map[gone] = -1  # the first page, and the first four tokens of the second
    assert faults(slots, slot_map) == [None, None]
    wrong = int(slots[0, 21])
    right = int(slot_map[wrong])
    slot_map[wrong] = right + 2
    expected = both(f"token slot {right + 2} at request 0, position 21, must be {right}{CONSECUTIVE}")
    assert faults(slots, slot_map) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_requests_beside_a_fault_get_their_pages(device):
    """On a GPU, too, where a row outside req_to_token was read before."""
    slots = slots_of(device)
    seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    good = ops.build_page_table(slots, torch.arange(3, device=device), seqlens, PAGE)
    for row in (3, -1, 10**6, 2**31 - 1, -(2**31)):
        rows = torch.tensor([0, row, 2], device=device)
        for report in (new_report(device), None) if device == "cuda" else (new_report(device),):
            table = torch.full_like(good, 77)
            ops.build_page_table(slots, rows, seqlens, PAGE, page_table=table, report=report)
            assert table[0, :3].tolist() == good[0, :3].tolist() and table[2, :1].tolist() == good[2, :1].tolist()
            assert (table[1] == 77).all()
            indptr, _, last = ops.build_kv_indices(slots, rows, seqlens, PAGE, report=report)
            assert indptr.tolist() == [0, 3, 3, 4] and last.tolist() == [8, 0, 16]


@pytest.mark.parametrize("device", DEVICES)
def test_cumulative_lengths_do_not_wrap_around(device):
    most = 2**31 - 1
    seqlens = torch.tensor([5, most, 7, most, -3], dtype=torch.int32, device=device)
    assert ops.build_cu_seqlens(seqlens).tolist() == [0, 5, most, most, most, most]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [10**6, -3, 2**31 - 1])
def test_pages_that_are_read_and_not_in_the_pool_are_recorded_in_torch(page, device):
    report, pages = new_report(device), torch.arange(12, device=device).view(3, 4)
    used = torch.ones(3, 4, dtype=torch.bool, device=device)
    record_pages(report, "torch_native", pages, used, 8, 12)
    assert first_fault(report) is None
    pages[2, 1], pages[0, 3] = page, 99
    used[0, 3] = False
    record_pages(report, "torch_native", pages, used, 8, 12)
    pages[0, 0] = 50
    record_pages(report, "torch_native", pages, used, 0, 12)  # the first fault stays
    expected = f"attnops::torch_native: page index {page} at request 2, position 9, must be in [0, 12)"
    assert first_fault(report) == f"{expected} (3 faults in all)"
    record_pages(report, "torch_native", pages[:0], used[:0], 0, 12)
    record_pages(report, "torch_native", pages[:, :0], used[:, :0], 0, 12)


OPS_OF_BACKENDS = {"torch_native": "torch_native", "intel_amx": "xqa_decode", "trtllm_mha": "xqa_decode"}


@pytest.mark.parametrize("name", OPS_OF_BACKENDS)
def test_every_backend_names_a_page_that_is_not_in_the_pool(name, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    model = Model("gqa", AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=PAGE))
    step = make_step(model, ForwardMode.DECODE, [40, 63], [1, 1])
    backend = get_backend_class(name)(model.spec, LIMITS)
    for spoil in (False, True):
        if spoil:
            size, row = model.spec.page_size, int(step.batch.req_pool_indices[1])
            slots = step.batch.req_to_token[row]
            slots[:size] = torch.arange(10**6 * size, (10**6 + 1) * size)
        backend.init_forward_metadata(step.batch)
        step.run(backend)
        if not spoil:
            backend.raise_on_fault()
    expected = f"attnops::{OPS_OF_BACKENDS[name]}: page index 1000000 at request 1, position 0, must be in [0, "
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        backend.raise_on_fault()
