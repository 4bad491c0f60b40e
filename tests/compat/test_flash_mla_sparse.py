"""FlashMLA's functions over lists of rows: conventions converted, every kind of row, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from attnops.compat import _flash_mla_sparse, flash_mla, sgl_kernel
from checks import MAX_RELATIVE_ERROR, assert_lse_close, relative_error
from graph_tape import GraphTape
from sparse_calls import KINDS, SCALE, lse_tolerance, sparse_problem


def call(problem, metadata, function=flash_mla.flash_mla_with_kvcache, **options):
    lists, extra = problem.selected, problem.extra
    if extra is not None:
        options |= {
            "extra_k_cache": extra.kv_pages.unsqueeze(2),
            "extra_indices_in_kvcache": extra.indices,
            "extra_topk_length": None if extra.lengths is None else extra.lengths[:, 0].contiguous(),
        }
    return function(
        problem.q,
        lists.kv_pages.unsqueeze(2),
        None,
        None,
        512,
        *metadata,
        softmax_scale=SCALE,
        is_fp8_kvcache=lists.kv_pages.dtype == torch.uint8,
        indices=lists.indices,
        attn_sink=problem.sinks,
        topk_length=None if lists.lengths is None else lists.lengths[:, 0].contiguous(),
        **options,
    )


def check(problem, out, lse):
    out, lse = out.cpu(), lse.cpu()
    expected, expected_lse, _ = problem.expected()
    out, lse = out.cpu(), lse.cpu()
    assert relative_error(out.flatten(0, 1), expected) <= MAX_RELATIVE_ERROR[problem.q.dtype]
    by_token, empty = lse.transpose(1, 2).flatten(0, 1), expected_lse == -math.inf
    assert (by_token[empty] == math.inf).all(), "FlashMLA marks empty rows with +inf"
    assert_lse_close(by_token[~empty], expected_lse[~empty], lse_tolerance(problem))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra_topk", [0, 90])
@pytest.mark.parametrize("module", [flash_mla, sgl_kernel.flash_mla])
def test_decode_of_every_kind_of_row(kind, extra_topk, module):
    problem = sparse_problem(kind, shape=(4, 1), heads=9, extra_topk=extra_topk, lengths=True, holes=True, sinks=True)
    out, lse = call(problem, module.get_mla_metadata(), module.flash_mla_with_kvcache)
    assert out.shape == (4, 1, 9, 512) and lse.shape == (4, 9, 1) and lse.is_contiguous()
    check(problem, out, lse)


@pytest.mark.parametrize("extra_topk", [0, 70])
def test_requests_may_lie_apart(extra_topk):
    problem = sparse_problem("bytes", shape=(3, 2), heads=9, extra_topk=extra_topk, holes=True)
    apart = lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1]  # noqa: E731
    lists = (problem.selected, problem.extra) if extra_topk else (problem.selected,)
    for each in lists:
        each.indices = apart(each.indices)
    problem.q = apart(problem.q)
    assert not problem.q.is_contiguous()
    check(problem, *call(problem, flash_mla.get_mla_metadata()))


def test_one_schedule_object_serves_lists_pages_and_other_lengths():
    metadata = flash_mla.get_mla_metadata()
    for heads, topk, seqlen_q in ((16, 100, 1), (16, 100, 1), (3, 257, 2), (16, 64, 1)):
        check_of = sparse_problem("bytes", shape=(2, seqlen_q), heads=heads, topk=topk, holes=True, seed=heads + topk)
        check(check_of, *call(check_of, metadata))


def test_the_tensors_of_generation_2_serve_lists_too():
    problem = sparse_problem("bytes", shape=(3, 1), heads=16, topk=128)
    lengths = torch.full((3,), 900, dtype=torch.int32)
    check(problem, *call(problem, flash_mla.get_mla_metadata(lengths, 16, 1, 16, True, 128)))


def test_lengths_of_requests_hold_for_all_their_tokens():
    problem = sparse_problem("own", shape=(3, 2), lengths=True)
    problem.selected.lengths[:, 1] = problem.selected.lengths[:, 0]
    problem.selected.kv_pages.nan_to_num_()
    problem.selected.values = problem.selected.kv_pages.flatten(0, 1).double()
    check(problem, *call(problem, flash_mla.get_mla_metadata()))


def test_a_replay_follows_other_lists_and_lengths():
    static, other = (sparse_problem("bytes", shape=(3, 1), heads=8, lengths=True, holes=True, seed=s) for s in (1, 2))
    metadata, tape = flash_mla.get_mla_metadata(), GraphTape()
    lengths = static.selected.lengths[:, 0]

    def run():
        return flash_mla.flash_mla_with_kvcache(
            static.q, static.selected.kv_pages.unsqueeze(2), None, None, 512, *metadata, softmax_scale=SCALE,
            is_fp8_kvcache=True, indices=static.selected.indices, topk_length=lengths,
        )  # fmt: skip

    with tape.capture():
        out, lse = run()
    for mine, new in ((static.q, other.q), (static.selected.indices, other.selected.indices)):
        mine.copy_(new)
    static.selected.kv_pages.copy_(other.selected.kv_pages)
    lengths.copy_(other.selected.lengths[:, 0])
    tape.replay()
    check(other, out, lse)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("topk", [1, 3])
def test_rows_rounded_as_the_peer_rounds_them(monkeypatch, device, dtype, all_rows, topk):
    """sgl_kernel's tests judge lists of few keys by a bound of lse that exact rows miss, and the peer's rows keep."""
    problem = sparse_problem("bytes", shape=(64, 1), heads=128, topk=topk, dtype=dtype, device=device)
    exact = problem.expected()[1]
    problem.selected.values = problem.selected.values.to(torch.bfloat16).double()
    rounded = problem.expected()[1]

    def misses(lse):
        return ((lse - rounded).abs() > 1e-5 + 8.01 / 65536 * rounded.abs()).sum().item()

    assert misses(exact) > 1000  # float64 over what is stored
    monkeypatch.setattr(_flash_mla_sparse, "BF16_ROWS", all_rows)
    out, lse = call(problem, flash_mla.get_mla_metadata())
    if all_rows:
        check(problem, out, lse)
    else:  # scores alone are over rounded keys on a GPU
        error = relative_error(out.cpu().flatten(0, 1), problem.expected()[0])
        assert error <= max(MAX_RELATIVE_ERROR[dtype], 4e-3)
    assert misses(lse.cpu().transpose(1, 2).flatten(0, 1).double()) == 0


def test_rounded_rows_know_holes_and_lengths(monkeypatch):
    monkeypatch.setattr(_flash_mla_sparse, "BF16_ROWS", True)
    problem = sparse_problem("bytes", shape=(5, 1), heads=9, topk=70, lengths=True, holes=True, sinks=True)
    problem.selected.values = problem.selected.values.to(torch.bfloat16).double()
    check(problem, *call(problem, flash_mla.get_mla_metadata()))


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_prefill_over_ragged_rows(kind):
    problem = sparse_problem(kind, shape=(6, 1), heads=9, page_size=1, lengths=True, holes=True, sinks=True)
    lists = problem.selected
    lists.indices[0, 0, 3] = len(lists.values)  # past the rows: no key
    out, most, lse = flash_mla.flash_mla_sparse_fwd(
        problem.q[:, 0], lists.kv_pages, lists.indices, SCALE, 512, problem.sinks, lists.lengths[:, 0]
    )
    expected, expected_lse, expected_most = problem.expected()
    empty = expected_lse == -math.inf
    assert relative_error(out, expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
    assert (lse[empty] == math.inf).all() and (most[empty] == -math.inf).all() and empty.any()
    assert_lse_close(lse[~empty], expected_lse[~empty])
    assert_lse_close(most[~empty], expected_most[~empty])
    in_base_2 = sgl_kernel.flash_mla.flash_mla_sparse_fwd(
        problem.q[:, 0], lists.kv_pages, lists.indices, SCALE, attn_sink=problem.sinks, topk_length=lists.lengths[:, 0]
    )
    for ours, theirs in zip((out, most * math.log2(math.e), lse * math.log2(math.e)), in_base_2, strict=True):
        torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"causal": True}, NotImplementedError, "does not honour causal=True with indices"),
        ({"descale_k": torch.ones(1)}, NotImplementedError, "does not honour descale_k with indices"),
        ({"extra_topk_length": torch.ones(3).int()}, RuntimeError, "extra_topk_length belongs to extra_indices"),
        ({"extra_k_cache": torch.zeros(3, 7, 656)}, ValueError, r"extra_k_cache must have 4 dimensions"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=f"flash_mla_with_kvcache.*{message}"):
        call(sparse_problem("bytes"), flash_mla.get_mla_metadata(), **change)


def test_arguments_of_lists_without_lists_are_refused():
    with pytest.raises(NotImplementedError, match=r"does not honour topk_length=a tensor: it belongs to `indices`"):
        flash_mla.flash_mla_with_kvcache(
            torch.zeros(1, 1, 1, 576), torch.zeros(1, 1, 1, 576), torch.zeros(1, 1).int(), torch.zeros(1).int(), 512,
            *flash_mla.get_mla_metadata(), topk_length=torch.ones(1).int(),
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="does not honour d_v=256"):
        flash_mla.flash_mla_sparse_fwd(
            torch.zeros(1, 1, 576), torch.zeros(1, 1, 576), torch.zeros(1, 1, 1).int(), 1.0, 256
        )
