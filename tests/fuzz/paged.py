"""Right calls of the ops of `paged_kv` and `merge_state`: indices and bytes are compared as they are."""

from __future__ import annotations

import math

import torch
from attnops import ops
from torch import Tensor

from .draw import Draw, Failure
from .judge import ROW, check_lse, check_no_fault
from .memory import E5M2, FP8, FP8_KINDS, HUGE_INDEX, Guarded, bytes_of, strided
from .mla import QK, ROW_BYTES, V, packed_rows
from .options import new_report
from .xqa import PAGE_SIZES

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def right_tables(draw: Draw) -> None:
    """`build_page_table` and `build_kv_indices` of random slots, lengths above what the rows hold among them."""
    page_size = draw.pick(PAGE_SIZES)
    rows, columns = draw.number(1, 9), draw.number(0, 300)
    batch = 0 if draw.chance(0.05) else draw.number(1, 8)
    too_long = draw.chance(0.3)
    report = None if too_long else new_report(draw)
    lengths = [draw.length(columns) for _ in range(batch)]
    if draw.chance(0.4):  # full last pages
        lengths = [length // page_size * page_size for length in lengths]
    if too_long and batch:
        lengths[draw.number(0, batch - 1)] = draw.pick([columns + 1, columns + 77, 2**31 - 1])
    if report is None and batch and draw.chance(0.3):
        lengths[draw.number(0, batch - 1)] = draw.pick([-1, -(2**31)])
    chosen = [draw.number(0, rows - 1) for _ in range(batch)]
    with_map = draw.chance(0.4)
    slots, slot_map = _draw_rows(draw, rows, columns, page_size, with_map)
    draw.note(page=page_size, rows=rows, columns=columns, lengths=lengths, slot_map=with_map)
    held = [min(max(length, 0), columns) for length in lengths]
    table = torch.full((rows, columns), HUGE_INDEX)
    for request, row in enumerate(chosen):
        most = max(held[other] for other in range(batch) if chosen[other] == row)
        table[row, :most] = slots[row, :most]
        del request
    given = {
        "req_to_token": strided(draw, table.to(torch.int32)),
        "req_pool_indices": torch.tensor(chosen, dtype=draw.pick([torch.int32, torch.int64])).to(
            draw.device, non_blocking=True
        ),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32).to(draw.device, non_blocking=True),
        "page_size": page_size,
        "report": report,
    }
    if slot_map is not None:
        given["slot_map"] = slot_map.to(draw.pick([torch.int32, torch.int64])).to(draw.device, non_blocking=True)
    make = _csr if draw.chance(0.5) else _table
    make(draw, given, [slots[row].tolist() for row in chosen], held, None if slot_map is None else slot_map.tolist())
    check_no_fault(report)


def _draw_rows(draw: Draw, rows: int, columns: int, page_size: int, with_map: bool) -> tuple[Tensor, Tensor | None]:
    """(slots ``[rows, columns]``, slot map or None): any pages, whose tokens stand in order, in both pools."""
    num_pages = -(-columns // page_size) + draw.number(1, 20)
    token = torch.arange(columns)
    pages = torch.stack([draw.permutation(num_pages) for _ in range(rows)])
    slots = pages[:, token // page_size] * page_size + token % page_size
    if not with_map:
        return slots, None
    slot_map = draw.permutation(num_pages).unsqueeze(1) * page_size + torch.arange(page_size)
    gone = torch.tensor([draw.pick([0, 0, page_size, draw.number(0, page_size)]) for _ in range(num_pages)])
    slot_map[torch.arange(page_size) < gone.unsqueeze(1)] = -draw.number(1, 5)  # the oldest of a page leave first
    return slots, slot_map.flatten()


def _pages(slots: list[int], length: int, page_size: int, slot_map: list[int] | None) -> list[int]:
    """Of a request, cell by cell."""
    cells = []
    for first in range(0, length, page_size):
        if slot_map is None:
            cells.append(slots[first] // page_size)
        else:
            cells.append(max(slot_map[slots[min(first + page_size, length) - 1]], 0) // page_size)
    return cells


def _table(draw: Draw, given: dict, slots: list[list[int]], held: list[int], slot_map: list[int] | None) -> None:
    draw.saw("op build_page_table")
    page_size, columns = given["page_size"], given["req_to_token"].shape[1]
    needed = -(-columns // page_size)
    wide = draw.number(max(needed - 3, 0), needed + 2)
    if given["report"] is not None:
        wide = needed + draw.number(0, 2)
    page_table = Guarded(draw, (len(held), wide), torch.int32)
    before = page_table.view.clone()
    ops.build_page_table(**given, page_table=page_table.view)
    got = page_table.view.tolist()
    expected = before.tolist()
    for request, length in enumerate(held):
        cells = _pages(slots[request], min(length, wide * page_size), page_size, slot_map)
        expected[request][: len(cells)] = cells
    if got != expected:
        raise Failure(f"page_table is {got}, expected {expected}")
    page_table.check("page_table")


def _csr(draw: Draw, given: dict, slots: list[list[int]], held: list[int], slot_map: list[int] | None) -> None:
    draw.saw("op build_kv_indices")
    page_size, batch = given["page_size"], len(held)
    pages = [_pages(slots[request], length, page_size, slot_map) for request, length in enumerate(held)]
    flat = [cell for cells in pages for cell in cells]
    room = len(flat) + draw.number(0, 3) if draw.chance(0.8) else draw.number(0, len(flat))
    indptr = Guarded(draw, (batch + 1,), torch.int32, dense=True)
    indices = Guarded(draw, (room,), torch.int32, dense=True)
    last = Guarded(draw, (batch,), torch.int32, dense=True)
    expected = indices.view.tolist()
    ops.build_kv_indices(**given, kv_indptr=indptr.view, kv_indices=indices.view, kv_last_page_len=last.view)
    bounds = [0]
    for cells in pages:
        bounds.append(bounds[-1] + len(cells))
    if indptr.view.tolist() != bounds:
        raise Failure(f"kv_indptr is {indptr.view.tolist()}, expected {bounds}")
    expected[: min(room, len(flat))] = flat[:room]
    if indices.view.tolist() != expected:
        raise Failure(f"kv_indices is {indices.view.tolist()}, expected {expected}")
    lasts = [length - (len(cells) - 1) * page_size if length else 0 for length, cells in zip(held, pages)]
    if last.view.tolist() != lasts:
        raise Failure(f"kv_last_page_len is {last.view.tolist()}, expected {lasts}")
    for name, guarded in (("kv_indptr", indptr), ("kv_indices", indices), ("kv_last_page_len", last)):
        guarded.check(name)


def right_scan(draw: Draw) -> None:
    """`build_cu_seqlens` and `translate_slots`."""
    if draw.chance(0.5):
        draw.saw("op build_cu_seqlens")
        seqlens = [draw.number(-5, 5000) for _ in range(draw.pick([0, 1, 2, 31, 32, 33, 300, 1025, 3000]))]
        draw.note(B=len(seqlens))
        cu_seqlens = Guarded(draw, (len(seqlens) + 1,), torch.int32, dense=True)
        given = torch.tensor(seqlens, dtype=torch.int32).to(draw.device, non_blocking=True)
        ops.build_cu_seqlens(given, cu_seqlens=cu_seqlens.view)
        expected = torch.cat([torch.zeros(1, dtype=torch.int64), given.cpu().long().clamp(min=0).cumsum(0)])
        if cu_seqlens.view.tolist() != expected.tolist():
            raise Failure(f"cu_seqlens is {cu_seqlens.view.tolist()[:20]}, expected {expected.tolist()[:20]}")
        cu_seqlens.check("cu_seqlens")
        return
    draw.saw("op translate_slots")
    count, size = draw.pick([0, 1, 5, 300, 3000]), draw.number(0, 400)
    slots = torch.tensor([draw.number(-3, size + 5) for _ in range(count)], dtype=torch.int64)
    report = None if bool((slots >= size).any()) else new_report(draw)
    slot_map = torch.tensor([draw.number(-1, 2**31 - 1) for _ in range(size)], dtype=torch.int64)
    expected = [slot if slot < 0 else int(slot_map[slot]) if slot < size else -1 for slot in slots.tolist()]
    kinds = [torch.int32, torch.int64]
    given = slots.to(draw.pick(kinds)).to(draw.device, non_blocking=True)
    if draw.chance(0.3):
        given = torch.stack([given, given], 1).flatten()[::2]
    out = torch.full_like(given, 77, dtype=draw.pick(kinds)) if draw.chance(0.7) else given.clone()
    ops.translate_slots(given, slot_map.to(draw.pick(kinds)).to(draw.device, non_blocking=True), out=out, report=report)
    if out.tolist() != expected:
        raise Failure(f"translate_slots gives {out.tolist()[:20]}, expected {expected[:20]}")
    check_no_fault(report)


def _hard_values(draw: Draw, *shape: int) -> Tensor:
    """float32: normal ones of any size, zeros, infinities and NaN."""
    values = draw.normal(*shape) * 10.0 ** draw.number(-8, 4)
    if values.numel() and draw.chance(0.5):
        flat = values.flatten()
        for special in (0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, 464.0, 465.0, 2.0**-10, 1e-30):
            flat[draw.number(0, len(flat) - 1)] = special
    return values


def _draw_slots(draw: Draw, count: int, num_slots: int) -> list[int]:
    """Different ones, some of them padding."""
    order = draw.permutation(num_slots).tolist()[:count]
    order += [-1] * (count - len(order))
    return [-draw.number(1, 9) if draw.chance(0.15) else slot for slot in order]


def _same_bytes(name: str, got: Tensor, expected: Tensor) -> None:
    """Bit for bit; of NaN, that it is one."""
    got, expected = got.cpu(), expected.cpu()
    left, right = bytes_of(got), bytes_of(expected)
    if left.dtype.is_floating_point:
        kind = {4: torch.int32, 2: torch.int16}[left.element_size()]
        left, right = left.contiguous().view(kind), right.contiguous().view(kind)
    wrong = left != right
    if got.dtype.is_floating_point:
        wrong &= ~(got.float().isnan() & expected.float().isnan())
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        values = f"{left[tuple(first)].item()} for {right[tuple(first)].item()}"
        raise Failure(f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {first}: {values}")


def right_store_kv(draw: Draw) -> None:
    """Rows into pages, copied or quantized."""
    draw.saw("op store_kv")
    dtype = draw.pick([*FLOATS, *FLOATS, FP8, E5M2])
    page_dtype = draw.pick([FP8, E5M2]) if dtype in FLOATS and draw.chance(0.5) else dtype
    heads, page_size, pages = draw.pick([1, 1, 2, 3, 8]), draw.pick(PAGE_SIZES), draw.number(0, 6)
    dims = [draw.pick([1, 3, 8, 16, 64, 72, 128, 256]) for _ in range(2)]
    tokens = draw.pick([0, 1, 2, 7, 33])
    slots = _draw_slots(draw, tokens, pages * page_size)
    draw.note(dtypes=(dtype, page_dtype), H=heads, page=page_size, P=pages, D=dims, T=tokens)
    report, given, expected = new_report(draw), {}, {}
    targets = {}
    for side, dim in zip("kv", dims):
        rows = _hard_values(draw, tokens, heads, dim).to(dtype)
        scale = None
        if page_dtype != dtype and draw.chance(0.7):
            scale = 10.0 ** draw.number(-3, 2) * (0.5 + torch.rand(draw.pick([1, heads]), generator=_generator(draw)))
            given[f"{side}_scale"] = scale.to(draw.device, non_blocking=True)
        target = Guarded(draw, (pages, page_size, heads, dim), page_dtype)
        whole = target.view.clone()
        stored = rows
        if page_dtype != dtype:
            quotient = rows.float() / (1.0 if scale is None else scale.view(1, -1, 1))
            stored = _quantized(quotient, page_dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                bytes_of(whole)[slot // page_size, slot % page_size] = bytes_of(stored)[token].to(
                    draw.device, non_blocking=True
                )
        given[side], targets[side], expected[side] = strided(draw, rows), target, whole
    kind = draw.pick([torch.int32, torch.int64])
    loc = torch.tensor(slots, dtype=kind).to(draw.device, non_blocking=True)
    ops.store_kv(targets["k"].view, targets["v"].view, given.pop("k"), given.pop("v"), loc, **given, report=report)
    for side in "kv":
        _same_bytes(f"{side}_pages", targets[side].view, expected[side])
        targets[side].check(f"{side}_pages")
    check_no_fault(report)


def _quantized(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest, ties to even; what is too large becomes the largest."""
    largest = torch.finfo(dtype).max
    return quotient.clamp(-largest, largest).to(dtype)


def _generator(draw: Draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw.number(0, 1 << 40))


def right_store_mla(draw: Draw) -> None:
    """Latents into pages of every kind."""
    draw.saw("op store_mla_kv")
    dtype = draw.pick([*FLOATS, *FLOATS, FP8])
    page_dtype = draw.pick([dtype, FP8, E5M2, torch.uint8]) if dtype in FLOATS else dtype
    page_size, pages, tokens = draw.pick(PAGE_SIZES), draw.number(0, 4), draw.pick([0, 1, 2, 7, 33])
    slots = _draw_slots(draw, tokens, pages * page_size)
    width = ROW_BYTES if page_dtype == torch.uint8 else QK
    draw.note(dtypes=(dtype, page_dtype), page=page_size, P=pages, T=tokens)
    if page_dtype == torch.uint8:  # what a group's scale is among infinities and NaN, nobody promises
        latent = (draw.normal(tokens, QK) * 10.0 ** draw.number(-6, 3)).to(dtype)
        if tokens and draw.chance(0.3):
            latent[draw.number(0, tokens - 1), :128] = 0
    else:
        latent = _hard_values(draw, tokens, QK).to(dtype)
    quantizes = page_dtype in FP8_KINDS and page_dtype != dtype
    scale = torch.tensor([10.0 ** draw.number(-3, 1)]) if quantizes and draw.chance(0.7) else None
    if page_dtype == torch.uint8:
        stored = packed_rows(latent.float())
    elif quantizes:
        stored = _quantized(latent.float() / (1.0 if scale is None else scale), page_dtype)
    else:
        stored = latent
    odd = draw.device == "cpu" or page_dtype != torch.uint8
    target, report = Guarded(draw, (pages, page_size, width), page_dtype, odd=odd), new_report(draw)
    whole = target.view.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            bytes_of(whole)[slot // page_size, slot % page_size] = bytes_of(stored)[token].to(
                draw.device, non_blocking=True
            )
    rows = strided(draw, latent)
    apart = draw.chance(0.4)
    given = {"latent": rows[:, :V], "k_pe": strided(draw, latent[:, V:])} if apart else {"latent": rows}
    draw.note(apart=apart)
    loc = torch.tensor(slots, dtype=draw.pick([torch.int32, torch.int64])).to(draw.device, non_blocking=True)
    kv_scale = None if scale is None else scale.to(draw.device, non_blocking=True)
    ops.store_mla_kv(target.view, **given, out_cache_loc=loc, kv_scale=kv_scale, report=report)
    _same_bytes("kv_pages", target.view, whole)
    target.check("kv_pages")
    check_no_fault(report)


def right_merge(draw: Draw) -> None:
    """`merge_state` and `merge_states`."""
    dtype = draw.pick(FLOATS)
    many = draw.chance(0.5)
    states = draw.pick([0, 1, 2, 3, 5, 9]) if many else 2
    tokens, heads, dim = draw.pick([0, 1, 3, 17]), draw.pick([1, 2, 5, 16]), draw.pick([1, 4, 8, 12, 64, 100, 128, 512])
    draw.note(dtype=dtype, states=states, T=tokens, H=heads, D=dim)
    outs = draw.normal(states, tokens, heads, dim).to(dtype)
    lses = draw.normal(states, tokens, heads) * draw.pick([1, 5, 60])
    lses[torch.rand(lses.shape, generator=_generator(draw)) < draw.pick([0.0, 0.3, 0.9])] = -math.inf
    total = torch.logsumexp(lses.double(), 0) if states else torch.full((tokens, heads), -math.inf).double()
    weights = torch.exp(lses.double() - total.masked_fill(total == -math.inf, 0))
    expected = (weights.unsqueeze(-1) * outs.double()).sum(0) if states else outs.new_zeros(tokens, heads, dim).double()
    outs[lses == -math.inf] = math.nan
    out, lse = Guarded(draw, (tokens, heads, dim), dtype), Guarded(draw, (tokens, heads), torch.float32, dense=True)
    destinations = {"out": out.view, "lse": lse.view}
    if many:
        draw.saw("op merge_states")
        ops.merge_states(strided(draw, outs), lses.to(draw.device, non_blocking=True), **destinations)
    else:
        draw.saw("op merge_state")
        sides = [strided(draw, outs[side]) for side in range(2)]
        logs = [lses[side].to(draw.device, non_blocking=True) for side in range(2)]
        if draw.chance(0.3):
            side = draw.number(0, 1)
            destinations = {"out": sides[side], "lse": logs[side]}
            draw.note(in_place=side)
        ops.merge_state(sides[0], logs[0], sides[1], logs[1], **destinations)
    got = destinations["out"].cpu().double()
    sizes = (weights.unsqueeze(-1) * outs.double().nan_to_num()).norm(dim=0).amax(-1, keepdim=True) if states else 0
    error = (got - expected).abs()
    if bool((error > ROW[dtype] * (expected.abs() + sizes) + 1e-7).any()) or not bool(got.isfinite().all()):
        raise Failure(f"out differs by {error.max():.3g}")
    check_lse(destinations["lse"], total)
    out.check("out")
    lse.check("lse")
