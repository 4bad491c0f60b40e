"""attnops::compress_plan and compress_kv: entries of pooled tokens, however a prompt is cut."""

from __future__ import annotations

import indexer_reference
import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from checks import MAX_RELATIVE_ERROR, relative_error
from compress_calls import cache, compress_arguments, entries, model
from sparse_calls import shared_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Chunks of three requests: prompts that end within a group, single tokens, chunks longer than a state, padding.
STEPS = [[5, 1, 0], [1, 1, 3], [1, 1, 1], [30, 2, 1], [0, 0, 0], [3, 140, 1], [1, 1, 1]]
SHAPES = [(64, 4, True), (128, 4, True), (512, 4, True), (512, 128, False), (64, 1, False), (192, 3, True)]


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def values(dtype, dim, device="cpu", page_size=5):
    return torch.full((130, page_size, dim), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entries_in_any_chunks(shape, dtype, device):
    given = model(*shape, dtype=dtype, interleaved=shape[0] != 128)
    held = cache(given, 3, 200, values(dtype, shape[0], device), device=device)
    for counts in STEPS:
        held.step(counts, device)
    for request in range(3):
        expected = entries(given, held.tokens[request])
        got = held.pages.flatten(0, 1)[held.slots_of(request).to(device).long()].cpu()
        assert relative_error(got, expected) <= MAX_RELATIVE_ERROR[dtype]
        # One prompt, and chunks: the same bits.
        whole = cache(given, 1, 200, values(dtype, shape[0], device), device=device)
        whole.tokens = [held.tokens[request]]
        whole.call(whole.tokens, device)
        assert torch.equal(whole.pages.flatten(0, 1)[whole.slots_of(0).to(device).long()].cpu(), got)
    written = sum(len(held.slots_of(request)) for request in range(3))
    assert int((~held.pages.isnan()).any(-1).sum()) == written, "an entry that no group completes was written"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_584_bytes(device):
    given, page_size = model(512, 4, True), 7
    pool = torch.full((40, page_size * 584 + 56), 0x7F, dtype=torch.uint8, device=device)
    held = cache(given, 2, 200, pool[:, : page_size * 584].view(40, page_size, 584), device=device)
    for counts in ([70, 3], [1, 1], [0, 30]):
        held.step(counts, device)
    plain = cache(given, 2, 200, values(torch.float32, 512, device), device=device)
    plain.tokens = held.tokens
    plain.call(held.tokens, device)
    for request in range(2):
        slots = held.slots_of(request)
        x = plain.pages.flatten(0, 1)[plain.slots_of(request).to(device).long()].cpu()
        data, scales, _ = shared_bytes(x)
        pages, place = pool.cpu()[slots // page_size], slots % page_size
        got = pages[:, : page_size * 576].view(-1, page_size, 576)[torch.arange(len(slots)), place]
        got_scales = pages[:, page_size * 576 : page_size * 584].view(-1, page_size, 8)[torch.arange(len(slots)), place]
        assert torch.equal(got, data)
        assert torch.equal(got_scales[:, :7], scales[:, :7])
    assert bool((pool[:, page_size * 584 :] == 0x7F).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim, rotate, ue8m0", [(128, True, True), (128, False, False), (64, True, False)])
def test_index_keys(dim, rotate, ue8m0, device):
    given, page_size = model(dim, 4, True), 6
    pages = torch.full((40, page_size, dim + 4), 0x7F, dtype=torch.uint8, device=device)
    held = cache(given, 2, 200, pages, device=device)
    held.step([70, 9], device, hadamard=rotate, ue8m0=ue8m0)
    plain = cache(given, 2, 200, values(torch.float32, dim, device), device=device)
    plain.tokens = held.tokens
    plain.call(held.tokens, device)
    for request in range(2):
        x = plain.pages.flatten(0, 1)[plain.slots_of(request).to(device).long()].cpu()
        keys, scales = indexer_reference.quantize(x, rotate=rotate, ue8m0=ue8m0)
        slots = held.slots_of(request)
        flat = pages.cpu().view(40, -1)[slots // page_size]
        place, each = slots % page_size, torch.arange(len(slots))
        assert torch.equal(flat[:, : page_size * dim].view(-1, page_size, dim)[each, place], keys.view(torch.uint8))
        got = flat[:, page_size * dim :].contiguous().view(torch.float32).view(-1, page_size)[each, place]
        assert torch.equal(got, scales)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_instruction_set_has_these_bits(dtype, isa, monkeypatch):
    """Of the scalar form: pages of every kind, scores of any size, channels that see nothing, subnormals of float16."""
    for width, dim in {64: 64, 128: 128, 512: 512, 584: 512, 132: 128}.items():
        for ratio, overlap in [(4, True), (9, False)]:
            given = model(dim, ratio, overlap, dtype=dtype)
            new = torch.randn(50, given.row)
            half = given.row // 2
            new[:, half:] *= torch.tensor([1.0, 30.0, 200.0, 0.0]).repeat(half // 4)
            new[:, 3] *= 1e-6
            new[5:, half + 8 :: 16], new[7, half + 1 :: 16], new[9, 2] = float("-inf"), 6e4, float("inf")
            new[9, half + 2] = float("-inf")
            pools = []
            for which in ("scalar", isa):
                monkeypatch.setenv("ATTNOPS_CPU_ISA", which)
                if width in (132, 584):
                    pages = torch.full((8, 7, width), 0x7F, dtype=torch.uint8)
                else:
                    pages = torch.full((8, 7, width), 7.0, dtype=torch.float32)
                torch.manual_seed(1)
                held = cache(given, 1, 60, pages)
                held.tokens = [new.to(dtype)]
                held.call(held.tokens)
                pools.append(pages)
            assert not (pools[0] == pages.new_full((), 0x7F if width in (132, 584) else 7)).all()
            assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
            if pages.dtype == torch.float32:
                assert not pages.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_rejected_drafts_are_overwritten(device):
    given = model(64, 4, True)
    held = cache(given, 1, 100, values(torch.float32, 64, device), drafts=5, device=device)
    held.step([6], device)
    for accepted in (1, 3, 2, 5, 1, 4):
        kept = held.tokens[0]
        held.step([5], device)
        held.tokens = [torch.cat([kept, held.tokens[0][len(kept) :][:accepted]])]
    got = held.pages.flatten(0, 1)[held.slots_of(0).to(device).long()].cpu()
    # The entries of complete groups were written last by accepted tokens, or are from before them.
    expected = entries(given, held.tokens[0])
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_padding_touches_nothing(device):
    given = model(64, 4, True)
    held = cache(given, 2, 100, values(torch.float32, 64, device), device=device)
    held.slots = [-1, 1]
    held.step([9, 9], device)
    assert held.state[0].isnan().all()
    assert held.state[2:].isnan().all()
    assert held.pages[held.page_table[0].long()].isnan().all()
    assert not held.state[1].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_are_no_numbers(device):
    given = model(64, 4, False)
    held = cache(given, 1, 100, values(torch.float32, 64, device), device=device)
    new = torch.randn(12, given.row)
    new[0:4, 64:] = float("-inf")  # nothing weighs anything
    new[4, 64 + 3], new[4, 3] = float("-inf"), float("inf")  # a value that weighs nothing
    new[8, 64 + 5] = float("nan")
    held.tokens = [new]
    held.call([new], device)
    got = held.pages.flatten(0, 1)[held.slots_of(0).to(device).long()].cpu()
    assert (got[0] == 0).all()
    assert got[1].isfinite().all()
    assert got[2].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_plan_counts_entries(device):
    lengths, counts = [9, 4, 300, 0, 130], [9, 1, 130, 0, 3]
    bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
    for ratio in (1, 4, 128):
        got = ops.compress_plan(ints(lengths, device), ints(bounds, device), ratio=ratio)
        each = [n // ratio - (n - new) // ratio for n, new in zip(lengths, counts)]
        assert got.tolist() == torch.tensor([0, *each]).cumsum(0).tolist()
    many = torch.full((3000,), 8, device=device).int()
    got = ops.compress_plan(many, torch.arange(3001, device=device).int() * 4, ratio=4)
    assert torch.equal(got, torch.arange(3001, device=device).int())
    assert ops.compress_plan(ints([], device), ints([0], device), ratio=4).tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "spoiled, told",
    [
        ({"state_indices": [3, 0]}, "slot"),
        ({"state_indices": [0, 0]}, "slot"),
        ({"cache_seqlens": [2, 2]}, "length|cache_seqlens"),
        ({"cu_seqlens_q": [0, 5, 3], "entry_indptr": [0, 2, 2]}, "end of tokens|cu_seqlens"),
        ({"entry_indptr": [0, 4, 5]}, "bound of entries|entry_indptr"),
        ({"entry_indptr": [0, 0, -7]}, "bound of entries|entry_indptr"),
        ({"page_table": [[0], [9]]}, "page"),
        ({"page_table": [[-1], [2]]}, "page"),
        (
            {"cache_seqlens": [35, 2], "entry_indptr": [0, 1, 2]},
            "page of a key|position of an entry|page_table|cos_sin",
        ),
    ],
)
def test_values_out_of_range(spoiled, told, device):
    given = compress_arguments()["compress_kv"] | {name: torch.tensor(value).int() for name, value in spoiled.items()}
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    if device == "cpu":
        with pytest.raises(RuntimeError, match="attnops::compress_kv: .*(" + told + ")"):
            ops.compress_kv(**given)
    else:
        ops.compress_kv(**given)  # nothing outside the tensors is read or written
    report = new_report(device)
    ops.compress_kv(**given, report=report)
    assert torch.tensor([part in first_fault(report) for part in told.split("|")]).any(), first_fault(report)


def test_errors_name_the_argument():
    given = compress_arguments()["compress_kv"]
    for spoiled, told in [
        ({"kv_pages": torch.zeros(4, 3, 48)}, r"kv_pages.shape\[2\]"),
        ({"kv_pages": torch.zeros(4, 3, 100, dtype=torch.uint8)}, r"kv_pages.shape\[2\] must be 584"),
        ({"kv_score": torch.randn(5, 192)}, r"kv_score.shape\[1\] must be 128"),
        ({"state": torch.zeros(3, 3, 256)}, r"state.shape\[1\] \(state_tokens\) must be at least 4"),
        ({"ape": torch.zeros(3, 128)}, "ape"),
        ({"cos_sin": torch.zeros(16, 32)}, "cos_sin"),
        ({"ratio": 0}, "ratio must be"),
        ({"entry_indptr": ints([0, 1])}, "entry_indptr"),
    ]:
        with pytest.raises(RuntimeError, match="attnops::compress_kv: " + told):
            ops.compress_kv(**(given | spoiled))


def test_schemas():
    given = compress_arguments()
    plan = given["compress_plan"]
    torch.library.opcheck(
        torch.ops.attnops.compress_plan.default,
        (plan["entry_indptr"], plan["cache_seqlens"], plan["cu_seqlens_q"], plan["ratio"]),
    )
    names = ["kv_pages", "state", "kv_score", "ape", "norm_weight", "cos_sin", "page_table", "state_indices"]
    names += ["cache_seqlens", "cu_seqlens_q", "entry_indptr", "ratio"]
    torch.library.opcheck(torch.ops.attnops.compress_kv.default, tuple(given["compress_kv"][name] for name in names))
