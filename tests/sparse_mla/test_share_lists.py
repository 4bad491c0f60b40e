"""Lists of neighbouring tokens as one, and prefill over them: each token gets what its own list gives it."""

from __future__ import annotations

import math

import pytest
import torch
from attnops import ops
from attnops.report import first_fault, new_report
from sparse_calls import SCALE, SparseProblem, assert_right, sparse_problem
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16 = torch.bfloat16, torch.float16


def expected_lists(indices: Tensor, lengths: Tensor | None, together: int) -> list[list[tuple[int, int]]]:
    """(row, mask) of each group."""
    groups = []
    for first in range(0, len(indices), together):
        lists = []
        for token in range(first, first + together):
            length = indices.shape[1] if lengths is None else max(int(lengths[token]), 0)
            lists.append([row for row in indices[token, :length].tolist() if row >= 0])
        if any(len(set(rows)) < len(rows) for rows in lists):
            groups.append([(row, 1 << i) for i, rows in enumerate(lists) for row in rows])
            continue
        masks: dict[int, int] = {}
        for i, rows in enumerate(lists):
            for row in rows:
                masks[row] = masks.get(row, 0) | 1 << i
        groups.append(list(masks.items()))
    return groups


def overlapping(tokens: int, topk: int, rows: int, twice: bool, seed: int = 0) -> Tensor:
    """Lists of neighbours have most rows in common; one in six entries is no key."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.arange(rows).float() + torch.rand(tokens, rows, generator=generator) * rows * 0.3
    indices = near.sort(1)[1][:, :topk].int()
    no_key = torch.randint(6, indices.shape, generator=generator) == 0
    indices = torch.where(no_key, -1 - indices, indices)
    if twice and topk > 1:
        indices[::3, -1] = indices[::3, 0]
    return indices


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("topk", [0, 1, 64, 701, 2048])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_rows_once_in_the_order_of_their_names(with_lengths, twice, topk, together, device):
    tokens = 3 * together
    indices = overlapping(tokens, topk, max(3 * topk, 8), twice)
    if topk > 8:
        indices[1] = (1 << 31) - 1 - torch.arange(topk).int()  # of a pool as large as can be
    lengths = torch.tensor([topk, 0, -3, topk // 2, topk]).int().repeat(tokens)[:tokens] if with_lengths else None
    width = together * topk
    shared = torch.full((3, width + 3), -7, dtype=torch.int32, device=device)
    masks = torch.full((3, width + 1), 77, dtype=torch.uint8, device=device)
    given = {"topk_length": None if lengths is None else lengths.to(device)}
    outs = {"shared": shared[:, 1 : 1 + width], "masks": masks[:, 1 : 1 + width]}
    for _ in range(3 if device == "cuda" else 1):
        found = ops.share_lists(indices.to(device), together, **given, **outs)
        for group, expected in enumerate(expected_lists(indices, lengths, together)):
            count = int(found[2][group])
            assert list(zip(found[0][group, :count].tolist(), found[1][group, :count].tolist())) == expected
            assert (found[0][group, count:] == -7).all() and (found[1][group, count:] == 77).all()
    assert (shared[:, 0] == -7).all() and (shared[:, 1 + width :] == -7).all() and (masks[:, 0] == 77).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("topk,together", [(2049, 7), (5000, 3), (16384, 1)])
def test_long_lists(topk, together, device):
    indices = overlapping(2 * together, topk, 2 * topk, False)
    shared, masks, lengths = ops.share_lists(indices.to(device), together)
    for group, expected in enumerate(expected_lists(indices, None, together)):
        count = int(lengths[group])
        assert list(zip(shared[group, :count].tolist(), masks[group, :count].tolist())) == expected


@pytest.mark.gpu
def test_more_rows_than_a_gpu_shares():
    with pytest.raises(RuntimeError, match=r"attnops::share_lists: together \* topk must be .*16384.*, got 16386"):
        ops.share_lists(torch.zeros(2, 8193, dtype=torch.int32, device="cuda"), 2)


def give_overlapping(problem: SparseProblem) -> None:
    """Lists whose neighbours have most rows in common, of rows that are no NaN."""
    tokens, _, topk = problem.selected.indices.shape
    used = torch.cat([problem.selected.rows_of(token) for token in range(tokens)]).unique()
    lists = overlapping(tokens, min(topk, len(used) * 2 // 3), len(used), False)
    rows = torch.where(lists < 0, -1, used[lists.clamp(min=0).long()]).int()
    problem.selected.indices = torch.nn.functional.pad(rows, (0, topk - rows.shape[1]), value=-1)[:, None].to(
        problem.q.device
    )


def together_of(problem: SparseProblem, together: int, apart: bool = False, **options) -> tuple[Tensor, ...]:
    """(out [T, H, 512], lse [T, H], max_logits [T, H]) of prefill over shared lists."""
    tokens, heads = problem.q.shape[0], problem.q.shape[2]
    q = problem.q.view(tokens // together, together * heads, -1)
    lengths = problem.selected.lengths
    shared, masks, shared_length = ops.share_lists(
        problem.selected.indices[:, 0], together, topk_length=None if lengths is None else lengths[:, 0].contiguous()
    )
    out = q.new_full((*q.shape[:2], 512), math.nan)
    lse, most = (torch.full(q.shape[:2], math.nan, device=q.device) for _ in range(2))
    ops.sparse_mla_prefill(
        q[..., :512] if apart else q,
        problem.selected.kv_pages,
        shared,
        softmax_scale=SCALE,
        q_pe=q[..., 512:] if apart else None,
        topk_length=shared_length,
        sinks=None if problem.sinks is None else problem.sinks.repeat(together),
        out=out,
        lse=lse,
        max_logits=most,
        head_masks=masks,
        head_groups=together,
        **options,
    )
    return out.view(tokens, heads, 512), lse.view(tokens, heads), most.view(tokens, heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads,together", [(16, 4), (8, 8), (32, 2), (5, 6), (64, 1), (20, 3), (3, 1)])
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("dtype,page_size", [(BF16, 64), (FP16, 7)])
@pytest.mark.parametrize("topk", [40, 300])
@pytest.mark.parametrize("twice", [False, True])
def test_each_token_attends_to_its_own_list(twice, topk, dtype, page_size, kind, heads, together, device):
    shape = (together * 5, 1)
    problem = sparse_problem(kind, dtype, shape, heads, topk, page_size, lengths=topk == 300, holes=twice, sinks=twice)
    if not twice:
        give_overlapping(problem)
    problem = problem.to(device)
    out, lse, most = together_of(problem, together, apart=kind == "own" and twice)
    assert_right(problem, out, lse, most)


@pytest.mark.parametrize("kind", ["bytes", "shared_bytes"])
def test_rows_of_bytes_on_a_cpu(kind):
    problem = sparse_problem(kind, BF16, (8, 1), 16, 100, 64, lengths=True)
    assert_right(problem, *together_of(problem, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("kind,heads", [("bytes", 16), ("own", 32)])
def test_what_a_gpu_has_no_kernel_for(kind, heads):
    problem = sparse_problem(kind, BF16, (8, 1), heads, 100, 64, device="cuda")
    with pytest.raises(RuntimeError, match=r"head_masks"):
        together_of(problem, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("heads,together", [(16, 4), (8, 8), (32, 2)])
def test_many_tokens(heads, together):
    """More works than parts, lists of many tiles: against lists of their own."""
    problem = sparse_problem("own", BF16, (together * 150, 1), heads, 700, 64, lengths=True, device="cuda")
    give_overlapping(problem)
    out, lse, _ = together_of(problem, together)
    alone = ops.sparse_mla_prefill(
        problem.q[:, 0], problem.selected.kv_pages, problem.selected.indices[:, 0], softmax_scale=SCALE,
        topk_length=problem.selected.lengths[:, 0].contiguous(), return_lse=True,
    )  # fmt: skip
    assert torch.allclose(out.float(), alone[0].float(), atol=2e-2, rtol=2e-2)
    finite = alone[1].isfinite()
    assert torch.equal(finite, lse.isfinite()) and torch.allclose(lse[finite], alone[1][finite], atol=1e-3)
    again = together_of(problem, together)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.gpu
def test_replays_with_other_lists():
    """Sharing and attention in one graph, over lists that change."""
    problem = sparse_problem("own", BF16, (32, 1), 16, 256, 64, device="cuda")
    q, lists, pages = problem.q.view(8, 64, 576), problem.selected.indices[:, 0].clone(), problem.selected.kv_pages
    used = torch.cat([problem.selected.rows_of(token) for token in range(32)]).unique().int().cuda()
    out = q.new_empty(8, 64, 512)

    def call() -> None:
        shared, masks, lengths = ops.share_lists(lists, 4)
        more = {"topk_length": lengths, "head_masks": masks, "head_groups": 4}
        ops.sparse_mla_prefill(q, pages, shared, softmax_scale=SCALE, out=out, **more)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        lists.copy_(used[torch.randint(len(used), lists.shape, device="cuda")])
        graph.replay()
        replayed = out.clone()
        call()
        wrong += (replayed.view(torch.int16) != out.view(torch.int16)).sum()
    assert not wrong.item()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_past_the_pool_is_reported(device):
    problem = sparse_problem("own", BF16, (8, 1), 16, 100, 64, device=device)
    problem.selected.indices[5, 0, 3] = 100_000
    report = new_report(device)
    out, lse, _ = together_of(problem, 4, report=report)
    assert "sparse_mla_prefill" in first_fault(report) and "100000" in first_fault(report)
    assert_right(problem, out, lse)


def test_arguments():
    indices = torch.zeros(8, 5, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"attnops::share_lists: together must be .*\[1, 8\], got 9"):
        ops.share_lists(indices, 9)
    with pytest.raises(RuntimeError, match=r"attnops::share_lists: indices.shape\[0\] .* multiple of 3 .*, got 8"):
        ops.share_lists(indices, 3)
    with pytest.raises(RuntimeError, match=r"attnops::share_lists: masks .*uint8"):
        ops.share_lists(indices, 2, masks=torch.zeros(4, 10, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"attnops::share_lists: topk_length.shape\[0\]"):
        ops.share_lists(indices, 2, topk_length=torch.zeros(4, dtype=torch.int32))
    problem = sparse_problem("own", BF16, (8, 1), 6, 10, 4)
    lists = problem.selected
    masks = torch.zeros(8, 10, dtype=torch.uint8)
    given = (problem.q[:, 0], lists.kv_pages, lists.indices[:, 0])

    def refused(message: str, **options: object) -> None:
        with pytest.raises(RuntimeError, match=message):
            ops.sparse_mla_prefill(*given, softmax_scale=SCALE, **options)

    refused(r"attnops::sparse_mla_prefill: head_groups belongs to head_masks", head_groups=2)
    refused(r"attnops::sparse_mla_prefill: head_groups must divide 6 .*, got 4", head_masks=masks, head_groups=4)
    refused(r"attnops::sparse_mla_prefill: head_groups must be .*, got 9", head_masks=masks, head_groups=9)
    refused(r"attnops::sparse_mla_prefill: head_masks.shape\[1\] \(topk\) must be 10", head_masks=masks[:, :9])
    refused(r"attnops::sparse_mla_prefill: head_masks .*uint8", head_masks=masks.int())
    extra = {"extra_kv": lists.kv_pages, "extra_indices": given[2]}
    refused(r"attnops::sparse_mla_prefill: head_masks and extra_kv must not both", head_masks=masks, **extra)


@pytest.mark.parametrize("device", DEVICES)
def test_schema_and_fake(device):
    indices = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    outs = (indices.new_zeros(2, 20), indices.new_zeros(2, 20, dtype=torch.uint8), indices.new_zeros(2))
    torch.library.opcheck(torch.ops.attnops.share_lists.default, (*outs, indices, None, 2))
