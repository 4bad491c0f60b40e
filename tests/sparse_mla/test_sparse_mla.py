"""attnops::sparse_mla_decode and sparse_mla_prefill on every device, against float64 over the listed rows."""

import math

import pytest
import torch
from attnops import ops
from attnops.metadata import SparseMlaPlan
from attnops.report import first_fault, new_report
from sparse_calls import KINDS, SCALE, assert_right, decode, plan_of, prefill, sparse_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]


def skip_without_kernel(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("no CUDA kernel takes q of float32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,heads,topk", [((3, 1), 5, 100), ((2, 3), 16, 64), ((1, 2), 130, 257), ((4, 1), 64, 1)])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_equals_attention_over_the_listed_rows(device, kind, dtype, shape, heads, topk, page_size):
    skip_without_kernel(device, dtype)
    problem = sparse_problem(kind, dtype, shape, heads, topk, page_size, lengths=True, holes=True, device=device)
    assert_right(problem, *decode(problem))
    assert_right(problem, *prefill(problem))
    assert_right(problem, *prefill(problem, with_most=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [False, True])
def test_a_second_list_and_sinks(device, kind, lengths):
    problem = sparse_problem(
        kind, shape=(5, 1), heads=8, topk=70, extra_topk=150, lengths=lengths, holes=True, sinks=True, device=device
    )
    assert_right(problem, *decode(problem))
    assert_right(problem, *decode(problem, plan_of(problem, fixed=64)))
    assert_right(problem, *prefill(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set(isa, kind, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CPU_ISA", isa)
    problem = sparse_problem(kind, shape=(2, 2), heads=70, topk=130, lengths=True, holes=True, sinks=True)
    assert_right(problem, *decode(problem))
    assert_right(problem, *prefill(problem))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["own", "bytes"])
def test_the_rope_part_may_lie_apart(device, kind):
    problem = sparse_problem(kind, shape=(2, 2), heads=20, device=device)
    for run in (decode, prefill):
        assert all(torch.equal(a, b) for a, b in zip(run(problem), run(problem, apart=True), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_ragged_rows_are_a_pool_of_pages_of_one_row(device):
    problem = sparse_problem(page_size=1, device=device)
    expected = prefill(problem)
    problem.selected.kv_pages = problem.selected.kv_pages.squeeze(1)
    assert all(torch.equal(a, b) for a, b in zip(prefill(problem), expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_twice_counts_twice_and_order_hardly_matters(device, kind):
    problem = sparse_problem(kind, topk=40, device=device)
    once = decode(problem)[1]
    indices = problem.selected.indices
    problem.selected.indices = torch.cat([indices, indices.flip(-1)], -1)
    out, lse = decode(problem)
    assert_right(problem, out, lse)
    torch.testing.assert_close(lse, once + math.log(2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [64, 128])
def test_batch_invariant_plans_give_a_token_the_same_bits_alone(device, fixed):
    problem = sparse_problem("bytes", shape=(4, 1), heads=16, topk=300, lengths=True, holes=True, device=device)
    out, lse = decode(problem, plan_of(problem, fixed=fixed))
    assert_right(problem, out, lse)
    for token in range(4):
        alone = sparse_problem("bytes", shape=(4, 1), heads=16, topk=300, lengths=True, holes=True, device=device)
        alone.q = alone.q[token : token + 1]
        alone.selected.indices = alone.selected.indices[token : token + 1]
        alone.selected.lengths = alone.selected.lengths[token : token + 1]
        assert torch.equal(decode(alone, plan_of(alone, fixed=fixed))[0][0], out[token])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_past_the_pool_is_skipped_and_reported(device, kind):
    problem = sparse_problem(kind, topk=80, holes=True, device=device)
    rows = len(problem.selected.values)
    problem.selected.indices[1, 0, 5] = rows
    problem.selected.indices[1, 0, 70] = 2**31 - 1
    for run, name in ((decode, "sparse_mla_decode"), (prefill, "sparse_mla_prefill")):
        report = new_report(device)
        assert_right(problem, *run(problem, report=report))
        fault = first_fault(report)
        assert fault is not None and f"attnops::{name}: row index " in fault and "request 1" in fault
        assert f"must be in [0, {rows})" in fault
        if device == "cuda":
            assert_right(problem, *run(problem))
        else:
            message = rf"{name}: indices, token 1, position (5|70) must be in \[0, {rows}\)"
            with pytest.raises(RuntimeError, match=message):
                run(problem)


@pytest.mark.parametrize("device", DEVICES)
def test_a_length_beyond_its_list_counts_as_all_of_it(device):
    problem = sparse_problem(topk=30, lengths=True, device=device)
    problem.selected.lengths[0] = 31
    for run in (decode, prefill):
        report = new_report(device)
        assert_right(problem, *run(problem, report=report))
        assert "list length 31" in (first_fault(report) or "")
        if device == "cpu":
            with pytest.raises(RuntimeError, match=r"topk_length, token 0 must be below 31 .* got 31"):
                run(problem)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape,heads,topk", [((0, 1), 8, 64), ((2, 1), 8, 0)])
def test_no_tokens_and_no_keys(device, shape, heads, topk):
    problem = sparse_problem(shape=shape, heads=heads, topk=topk, sinks=True, device=device)
    out, lse = decode(problem)
    assert out.eq(0).all() and lse.eq(-math.inf).all() and len(out) == shape[0]
    out, lse, most = prefill(problem)
    assert out.eq(0).all() and lse.eq(-math.inf).all() and most.eq(-math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_queries_and_outputs(device):
    problem = sparse_problem("bytes", shape=(2, 2), heads=16, device=device)
    expected = decode(problem)[0]
    wide = torch.full((2, 2, 20, 600), math.nan, device=device, dtype=problem.q.dtype)
    wide[:, :, 2:18, 8:584] = problem.q
    out = torch.full((2, 2, 20, 640), math.nan, device=device, dtype=problem.q.dtype)
    ops.sparse_mla_decode(
        wide[:, :, 2:18, 8:584],
        problem.selected.kv_pages,
        problem.selected.indices,
        plan_of(problem),
        softmax_scale=SCALE,
        out=out[:, :, 2:18, 64:576],
    )
    assert torch.equal(out[:, :, 2:18, 64:576].flatten(0, 1), expected)
    out[:, :, 2:18, 64:576] = math.nan
    assert out.isnan().all(), "wrote outside its slice"


def test_plan_of_other_lengths_is_refused():
    problem = sparse_problem(topk=200, lengths=True)
    plan = plan_of(problem)
    problem.selected.lengths[1] = 150
    with pytest.raises(RuntimeError, match="tile_scheduler_metadata is not the plan of these lengths"):
        decode(problem, plan)
    with pytest.raises(ValueError, match="topk 200, the call has 100"):
        problem.selected.indices = problem.selected.indices[..., :100]
        decode(problem, plan)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q_pe": torch.zeros(3, 1, 5, 64).bfloat16()}, r"q\.shape\[3\] \(head_dim_qk\) must be 512 as in q beside"),
        ({"kv_pages": torch.zeros(3, 7, 500).bfloat16()}, r"kv_pages\.shape\[-1\] must be 576 or 512 .*, got 500"),
        ({"kv_pages": torch.zeros(3, 7, 600).byte()}, r"kv_pages\.shape\[-1\] must be 656 or 584 \(bytes of a row\)"),
        ({"kv_pages": torch.zeros(3, 7, 576)}, r"kv_pages must have dtype bfloat16 or uint8, got float32"),
        ({"extra_kv_pages": torch.zeros(3, 7, 576).bfloat16()}, "extra_kv_pages and extra_indices must be given toge"),
        ({"extra_topk_length": torch.zeros(3, 1).int()}, "extra_topk_length belongs to extra_indices"),
        ({"topk_length": torch.zeros(3, 2).int()}, r"topk_length\.shape\[1\] \(seqlen_q\) must be 1 as in q, got 2"),
        ({"sinks": torch.zeros(4)}, r"sinks\.shape\[0\] \(num_q_heads\) must be 5 as in q, got 4"),
        ({"softmax_scale": math.inf}, "softmax_scale must be finite"),
    ],
)
def test_errors_name_argument_expected_and_got(change, message):
    problem = sparse_problem()
    arguments = {
        "q": problem.q,
        "kv_pages": problem.selected.kv_pages,
        "indices": problem.selected.indices,
        "plan": plan_of(problem),
        "softmax_scale": SCALE,
    } | change
    with pytest.raises(RuntimeError, match=message):
        ops.sparse_mla_decode(**arguments)


def test_rows_of_584_bytes_must_fill_their_page():
    problem = sparse_problem("shared_bytes", page_size=4)
    pages = torch.zeros(3, 4, 600, dtype=torch.uint8)[..., :584]
    with pytest.raises(RuntimeError, match=r"kv_pages\.stride\(1\) must be 584"):
        ops.sparse_mla_decode(problem.q, pages, problem.selected.indices, plan_of(problem), softmax_scale=1.0)
    with pytest.raises(RuntimeError, match=r"kv must be .num_pages, page_size, 584."):
        ops.sparse_mla_prefill(
            problem.q.flatten(0, 1), pages[0], problem.selected.indices.flatten(0, 1), softmax_scale=1.0
        )


def test_plan_arguments():
    with pytest.raises(ValueError, match=r"SparseMlaPlan: topk must be in \[0, "):
        SparseMlaPlan.allocate(1, num_q_heads=1, topk=-1)
    plan = SparseMlaPlan.allocate(2, num_q_heads=8, topk=64, seqlen_q=2)
    with pytest.raises(ValueError, match=r"topk_length\.shape\[0\] must be 4"):
        ops.sparse_mla_plan(plan, topk_length=torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_schema_and_fake(device):
    problem = sparse_problem("bytes", topk=40, extra_topk=10, lengths=True, sinks=True, device=device)
    plan, lists, extra = plan_of(problem), problem.selected, problem.extra
    planned = (plan.tile_scheduler_metadata, plan.num_splits)
    lengths = (lists.lengths, extra.lengths)
    torch.library.opcheck(torch.ops.attnops.sparse_mla_plan.default, (*planned, *lengths, 40, 10, 1, 5, 0))
    out, lse = problem.q.new_zeros(3, 1, 5, 512), torch.zeros(3, 1, 5, device=device)
    scratch = (plan.out_partial.zero_(), plan.lse_partial.zero_(), plan.semaphores)
    first = (out, lse, problem.q, None, lists.kv_pages, lists.indices, lists.lengths)
    second = (extra.kv_pages, extra.indices, extra.lengths)
    options = (SCALE, problem.sinks, 0, new_report(device))
    torch.library.opcheck(torch.ops.attnops.sparse_mla_decode.default, (*first, *second, *planned, *scratch, *options))
    results = (out[:, 0], lse[:, 0], lse[:, 0].clone())
    given = (
        problem.q[:, 0],
        None,
        lists.kv_pages,
        lists.indices[:, 0],
        lists.lengths[:, 0],
        extra.kv_pages,
        extra.indices[:, 0],
        extra.lengths[:, 0],
        SCALE,
        problem.sinks,
        None,
    )
    torch.library.opcheck(torch.ops.attnops.sparse_mla_prefill.default, (*results, *given))
