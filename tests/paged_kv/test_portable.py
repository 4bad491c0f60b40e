"""`paged_kv` in plain torch writes the bytes of the compiled kernels; hostile values count as the nearest legal."""

from __future__ import annotations

import pytest
import torch
from attnops import _load, ops
from attnops.ops import portable

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
HUGE = 2**31 - 1


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def requests(page_size: int, seed: int, hostile: bool):
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = 7, 5 * page_size + 3
    pages = torch.randperm(400, generator=generator)[: rows * 6].view(rows, 6, 1)
    slots = (pages * page_size + torch.arange(page_size)).flatten(1)[:, :tokens].int().contiguous()
    index = torch.randperm(rows, generator=generator)[:4]
    lengths = torch.randint(0, tokens + 1, (4,), generator=generator, dtype=torch.int32)
    legal = (slots, index, lengths)
    if hostile:  # what the CPU's kernels refuse counts as the nearest that they take
        legal_lengths = lengths.clone()
        legal_lengths[0], legal_lengths[1], legal_lengths[2] = 0, tokens, 0
        legal = (slots, index.clone(), legal_lengths)
        index[0], lengths[1], lengths[2] = 99, HUGE, -5
    return (slots, index, lengths), legal


def a_map(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 300, (6400,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tables_and_indices(page_size, mapped, hostile):
    for seed in range(10):
        given, legal = ((*one, page_size) for one in requests(page_size, seed, hostile))
        slot_map = a_map(torch.Generator().manual_seed(seed)) if mapped else None
        ours, theirs = (torch.full((4, 6), -9, dtype=torch.int32) for _ in "ab")
        ops.build_page_table(*legal, page_table=theirs, slot_map=slot_map)
        portable.build_page_table(ours, *given, slot_map)
        assert torch.equal(ours, theirs)
        found = [torch.full((n,), -9, dtype=torch.int32) for n in (5, 20, 4)]
        expected = [one.clone() for one in found]
        ops.build_kv_indices(*legal, kv_indptr=expected[0], kv_indices=expected[1], kv_last_page_len=expected[2],
                             slot_map=slot_map)  # fmt: skip
        portable.build_kv_indices(*found, *given, slot_map)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        begins = torch.randint(-3, given[0].shape[1] + 3, (4,), generator=torch.Generator().manual_seed(seed)).int()
        ops.build_kv_indices(*legal, kv_indptr=expected[0], kv_indices=expected[1], kv_last_page_len=expected[2],
                             slot_map=slot_map, kv_start_idx=begins)  # fmt: skip
        portable.build_kv_indices(*found, *given, slot_map, None, begins)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_lengths_and_slots():
    lengths = torch.tensor([3, -1, 0, HUGE, HUGE], dtype=torch.int32)
    ours = torch.empty(6, dtype=torch.int32)
    portable.build_cu_seqlens(ours, lengths)
    assert torch.equal(ours, ops.build_cu_seqlens(lengths))
    slots = torch.tensor([5, -2, 6399, 6399, 17, 0])
    slot_map = a_map(torch.Generator().manual_seed(0))
    out = torch.empty_like(slots)
    portable.translate_slots(out, slots, slot_map)
    assert torch.equal(out, ops.translate_slots(slots, slot_map))


@pytest.mark.parametrize("slots", [[5, -1, 0, 31, 1000, 7], [-1] * 6, [HUGE] * 6, [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("kind", ["copy", "e4m3", "e4m3_per_head", "e5m2"])
def test_store_kv(kind, slots):
    dtype = {"copy": BF16, "e5m2": E5M2}.get(kind, E4M3)
    k, v = torch.randn(6, 2, 8, dtype=BF16) * 300, torch.randn(6, 2, 4, dtype=BF16)
    k[0, 0, 0] = float("nan")
    scales = {"copy": (None, None), "e4m3": (torch.tensor([0.5]), None)}.get(kind, (torch.tensor([0.5, 2.0]),) * 2)
    ours, theirs = ([torch.randn(8, 4, 2, d).to(dtype) for d in (8, 4)] for _ in "ab")
    for a, b in zip(ours, theirs):
        a.view(torch.uint8).copy_(b.view(torch.uint8))
    loc = torch.tensor(slots)
    ops.store_kv(*theirs, k, v, loc, k_scale=scales[0], v_scale=scales[1])
    portable.store_kv(*ours, k, v, loc, *scales)
    assert all(same(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("kind", ["copy", "e4m3", "e5m2", "rows"])
@pytest.mark.parametrize("apart", [False, True])
def test_store_mla_kv(kind, apart):
    shape, dtype = (8, 4, 576), {"copy": BF16, "e5m2": E5M2}.get(kind, E4M3)
    if kind == "rows":
        shape, dtype = (8, 4, 656), torch.uint8
    latent = torch.randn(5, 576, dtype=BF16) * 50
    latent[1, :128], latent[2, 5] = 0, float("nan")
    k_pe = latent[:, 512:].contiguous() if apart else None
    latent = latent[:, :512].contiguous() if apart else latent
    scale = torch.tensor([0.25]) if kind in ("e4m3", "e5m2") else None
    ours, theirs = (torch.zeros(shape).to(dtype) for _ in "ab")
    loc = torch.tensor([9, -1, 3, 31, 64])
    ops.store_mla_kv(theirs, latent, loc, k_pe=k_pe, kv_scale=scale)
    portable.store_mla_kv(ours, latent, k_pe, loc, scale)
    assert same(ours, theirs)


@pytest.mark.parametrize(
    ("arch", "built", "runs"),
    [(86, {80, 90}, True), (90, {80, 90}, True), (80, {90}, False), (100, {80, 90}, False), (120, {120}, True)],
)
def test_a_gpu_gets_it_where_the_build_has_no_code_for_it(arch, built, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(arch, 10))
    monkeypatch.setattr(_load, "built_archs", lambda: frozenset(built))
    registered = []
    monkeypatch.setattr(portable, "_register", registered.append)
    portable.serve(torch.device("cuda"))
    assert registered == ([] if runs else ["CUDA"])


def test_the_checked_mode_is_refused_by_name():
    report = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"translate_slots: the checked mode .* needs the compiled kernels"):
        portable.translate_slots(*(torch.zeros(3, dtype=torch.int32) for _ in "abc"), report)


def test_registered_for_a_device_without_kernels():
    """On a device that has none the op is found; on the CPU nothing changes."""
    portable.serve(torch.device("cpu"))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("attnops::store_kv", "XPU")
    portable.serve(torch.device("xpu"))
    for op in ("build_cu_seqlens", "build_page_table", "build_kv_indices", "translate_slots", "store_mla_kv"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"attnops::{op}", "XPU")
    test_store_kv("copy", [0, 1, 2, 3, 4, 5])
