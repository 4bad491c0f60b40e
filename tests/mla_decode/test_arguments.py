"""What attnops::mla_decode and its planner refuse, and what they record in checked mode."""

import re

import pytest
import torch
from attnops import ops
from attnops.metadata.plan import MlaDecodePlan
from mla_calls import SCALE, decode, plan_for, skip_without_kernel
from problems import FP8, mla_problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, SEQLEN_Q, HEADS, PARTS = 3, 2, 5, 4

# core/report.h
OP_MLA_DECODE, KIND_PAGE_INDEX, KIND_LENGTH = 7, 1, 4


def arguments(device="cpu", kv_dtype=None, fixed=0):
    """Every argument of the raw op, right, by name."""
    problem = mla_problem([70, 9, 130], SEQLEN_Q, num_q_heads=HEADS, page_size=16, kv_dtype=kv_dtype).to(device)
    plan = plan_for(problem, num_sm_parts=PARTS, fixed=fixed)
    q = problem.q_by_request
    return {
        "out": q.new_empty(BATCH, SEQLEN_Q, HEADS, 512),
        "lse": torch.empty(BATCH, SEQLEN_Q, HEADS, device=device),
        "q": q,
        "q_pe": None,
        "kv_pages": problem.kv_pages,
        "page_table": problem.page_table,
        "kv_indptr": None,
        "cache_seqlens": problem.cache_seqlens,
        "tile_scheduler_metadata": plan.tile_scheduler_metadata,
        "num_splits": plan.num_splits,
        "out_partial": plan.out_partial,
        "lse_partial": plan.lse_partial,
        "semaphores": plan.semaphores,
        "softmax_scale": SCALE,
        "causal": True,
        "window_left": -1,
        "logit_cap": 0.0,
        "sinks": torch.zeros(HEADS, device=device),
        "tree_mask": torch.full((BATCH, SEQLEN_Q, 1), 0xFF, dtype=torch.uint8, device=device),
        "kv_scale": problem.kv_scale,
        "fixed_split_tokens": fixed,
        "report": torch.zeros(8, dtype=torch.int32, device=device),
    }


# argument, what is done to it, what the message says after "attnops::mla_decode: "
WRONG = [
    ("q", lambda t: t[0], "q must have 4 dimensions, got 3, shape [2, 5, 576]"),
    ("q", lambda t: t.double(), "q must have dtype float32 or float16 or bfloat16, got float64"),
    ("q", lambda t: t[..., :512], "q.shape[3] (head_dim_qk) must be 576 as in MLA, got 512"),
    ("q", lambda t: t.repeat_interleave(2, -1)[..., ::2], "q.stride(3) must be 1"),
    ("q", lambda t: t[:, :0], "q.shape[1] (seqlen_q) must be in [1, 65536], got 0"),
    ("q", lambda t: t[:, :, :0], "q.shape[2] (num_q_heads) must be in [1, 16384], got 0"),
    ("q_pe", lambda t: "pe of 63", "q_pe.shape[3] (head_dim_rope) must be 64 as in MLA, got 63"),
    ("q_pe", lambda t: "pe of another dtype", "q_pe must have dtype bfloat16 as q, got float16"),
    ("q_pe", lambda t: "pe and joint q", "q.shape[3] (latent) must be 512 as in q beside q_pe, got 576"),
    ("out", lambda t: t[:, :1], "out.shape[1] (seqlen_q) must be 2 as in q, got 1"),
    ("out", lambda t: t[..., :511], "out.shape[3] (head_dim_v) must be 512 as in MLA, got 511"),
    ("out", lambda t: t.float(), "out must have dtype bfloat16 as q, got float32"),
    ("out", lambda t: t.repeat_interleave(2, -1)[..., ::2], "out.stride(3) must be 1"),
    ("lse", lambda t: t[..., :4], "lse.shape[2] (num_q_heads) must be 5 as in q, got 4"),
    ("lse", lambda t: t.half(), "lse must have dtype float32, got float16"),
    ("lse", lambda t: t.transpose(0, 2).contiguous().transpose(0, 2), "lse must be contiguous"),
    (
        "kv_pages",
        lambda t: t.half(),
        "kv_pages must have dtype bfloat16 or float8_e4m3fn or float8_e5m2 or uint8, got float16",
    ),
    ("kv_pages", lambda t: t[..., :575], "kv_pages.shape[2] (head_dim_qk) must be 576 as in MLA, got 575"),
    ("kv_pages", lambda t: t.view(torch.uint8), "kv_pages.shape[2] (row bytes) must be 656 as in an FP8 row, got 1152"),
    ("kv_pages", lambda t: t.unsqueeze(2), "kv_pages must have 3 dimensions, got 4"),
    ("kv_pages", lambda t: t[:, :0], "kv_pages.shape[1] (page_size) must be in [1, 2147483647], got 0"),
    ("kv_pages", lambda t: t.repeat_interleave(2, -1)[..., ::2], "kv_pages.stride(2) must be 1"),
    (
        "kv_scale",
        lambda t: torch.ones(1),
        "kv_scale belongs to float8_e4m3fn or float8_e5m2 kv_pages; unquantized kv_pages have none",
    ),
    ("page_table", lambda t: t.long(), "page_table must have dtype int32, got int64"),
    ("page_table", lambda t: t[:2], "page_table.shape[0] (batch_size) must be 3 as in q, got 2"),
    ("page_table", lambda t: t[0], "page_table must have 2 dimensions, got 1"),
    ("page_table", lambda t: t.t().contiguous().t(), "page_table.stride(1) must be 1"),
    ("kv_indptr", lambda t: torch.zeros(4, dtype=torch.int32), "page_table must have 1 dimensions, got 2"),
    ("cache_seqlens", lambda t: t.long(), "cache_seqlens must have dtype int32, got int64"),
    ("cache_seqlens", lambda t: t[:2], "cache_seqlens.shape[0] (batch_size) must be 3 as in q, got 2"),
    ("cache_seqlens", lambda t: t.repeat_interleave(2)[::2], "cache_seqlens must be contiguous"),
    ("tile_scheduler_metadata", lambda t: t[:, :7], "tile_scheduler_metadata.shape[1] (entry) must be 8 as in SplitKv"),
    ("tile_scheduler_metadata", lambda t: t[:0], "tile_scheduler_metadata.shape[0] (num_sm_parts) must be at least 1"),
    ("tile_scheduler_metadata", lambda t: t.long(), "tile_scheduler_metadata must have dtype int32, got int64"),
    ("num_splits", lambda t: t[:3], "num_splits.shape[0] (batch_size + 1) must be 4 as in q, got 3"),
    ("num_splits", lambda t: t.float(), "num_splits must have dtype int32, got float32"),
    ("out_partial", lambda t: t[:7], "out_partial.shape[0] (num_partials) must be at least 8 (two per row of tile_sch"),
    ("out_partial", lambda t: t[:, :63], "out_partial.shape[1] (plan rows) must be 64 as in the plan, got 63"),
    ("out_partial", lambda t: t.half(), "out_partial must have dtype float32, got float16"),
    ("lse_partial", lambda t: t[:7], "lse_partial.shape[0] (num_partials) must be 8 as in out_partial, got 7"),
    ("lse_partial", lambda t: t.double(), "lse_partial must have dtype float32, got float64"),
    (
        "semaphores",
        lambda t: t[:2],
        "semaphores.shape[0] (num_works) must be at least 3 (one per 64 query",
    ),
    ("semaphores", lambda t: t.long(), "semaphores must have dtype int32, got int64"),
    ("softmax_scale", lambda t: float("nan"), "softmax_scale must be finite, got nan"),
    ("causal", lambda t: False, "causal must be True with tree_mask"),
    ("window_left", lambda t: -2, "window_left must be in [-1, 2147418111], got -2"),
    ("logit_cap", lambda t: -1.0, "logit_cap must be 0 (off) or positive, got -1.0"),
    ("logit_cap", lambda t: float("inf"), "logit_cap must be finite, got inf"),
    ("sinks", lambda t: t[:4], "sinks.shape[0] (num_q_heads) must be 5 as in q, got 4"),
    ("sinks", lambda t: t.bfloat16(), "sinks must have dtype float32, got bfloat16"),
    ("tree_mask", lambda t: t.bool(), "tree_mask must have dtype uint8, got bool"),
    ("tree_mask", lambda t: t[..., :0], "tree_mask.shape[2] (mask_bytes) must be at least 1 (one bit per new token)"),
    ("tree_mask", lambda t: t[:, :1], "tree_mask.shape[1] (seqlen_q) must be 2 as in q, got 1"),
    (
        "fixed_split_tokens",
        lambda t: 100,
        "fixed_split_tokens must be 0 (balanced) or a positive multiple of 64, got 100",
    ),
    ("fixed_split_tokens", lambda t: 64, "tile_scheduler_metadata is not the plan of these cache_seqlens"),
    ("report", lambda t: t[:7], "report.shape[0] (report_size) must be 8 as in core/report.h, got 7"),
    ("report", lambda t: t.long(), "report must have dtype int32, got int64"),
]


@pytest.mark.parametrize("name, change, message", WRONG, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)])
def test_error_names_the_argument_and_both_values(name, change, message):
    call = arguments()
    changed = change(call[name])
    if name == "q_pe":
        q = call["q"]
        call["q"] = q if changed == "pe and joint q" else q[..., :512]
        call["q_pe"] = {"pe of 63": q[..., 512:575], "pe of another dtype": q[..., 512:].half()}.get(
            changed, q[..., 512:]
        )
    else:
        call[name] = changed
    with pytest.raises(RuntimeError, match=re.escape("attnops::mla_decode: " + message)):
        torch.ops.attnops.mla_decode(**call)


def test_scale_of_the_wrong_kind_is_refused():
    rows = arguments(kv_dtype=torch.uint8) | {"kv_scale": torch.ones(1)}
    with pytest.raises(
        RuntimeError, match="kv_scale belongs to float8_e4m3fn or float8_e5m2 kv_pages; uint8 rows carry their own"
    ):
        torch.ops.attnops.mla_decode(**rows)
    per_head = arguments(kv_dtype=FP8) | {"kv_scale": torch.ones(HEADS)}
    with pytest.raises(RuntimeError, match=r"kv_scale\.shape\[0\] .* must be 1 as in a scale per tensor, got 5"):
        torch.ops.attnops.mla_decode(**per_head)
    doubles = arguments(kv_dtype=FP8) | {"kv_scale": torch.ones(1, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match="kv_scale must have dtype float32, got float64"):
        torch.ops.attnops.mla_decode(**doubles)


TENSORS = [name for name, value in arguments().items() if isinstance(value, torch.Tensor) and name != "q"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS)
def test_error_names_the_device(name):
    call = arguments("cuda")
    call[name] = call[name].cpu()
    with pytest.raises(RuntimeError, match=rf"{name} must be on cuda:0 as q, got cpu"):
        torch.ops.attnops.mla_decode(**call)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens must have dtype int32, got float32"),
        (
            {"num_splits": torch.zeros(3, dtype=torch.int32)},
            "num_splits.shape[0] (batch_size + 1) must be 4 as in",
        ),
        ({"tile_scheduler_metadata": torch.zeros(4, 9, dtype=torch.int32)}, "tile_scheduler_metadata.shape[1]"),
        ({"seqlen_q": 0}, "seqlen_q must be in [1, 65536], got 0"),
        ({"num_q_heads": 0}, "num_q_heads must be in [1, 16384], got 0"),
        ({"window_left": -5}, "window_left must be in [-1, 2147418111], got -5"),
        ({"fixed_split_tokens": 63}, "fixed_split_tokens must be 0 (balanced) or a positive multiple of 64, got 63"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_planner_error_names_the_argument(change, message):
    call = {
        "tile_scheduler_metadata": torch.zeros(4, 8, dtype=torch.int32),
        "num_splits": torch.zeros(4, dtype=torch.int32),
        "cache_seqlens": torch.zeros(3, dtype=torch.int32),
        "seqlen_q": 1,
        "num_q_heads": 16,
    }
    with pytest.raises(RuntimeError, match=re.escape("attnops::mla_decode_plan: " + message)):
        torch.ops.attnops.mla_decode_plan(**(call | change))


@pytest.mark.parametrize("device", DEVICES)
def test_plan_of_another_geometry_is_refused(device):
    problem = mla_problem([70, 9], 2, num_q_heads=5).to(device)
    other = MlaDecodePlan.allocate(2, num_q_heads=6, seqlen_q=2, device=device)
    with pytest.raises(ValueError, match="another geometry: num_q_heads 6, the call has 5"):
        decode(problem, plan=other)
    with pytest.raises(ValueError, match="window_left -1, the call has 7"):
        decode(problem, plan=plan_for(problem), window_left=7)


def test_flat_queries_that_are_no_whole_requests_are_refused():
    problem = mla_problem([70, 9], 2, num_q_heads=5)
    call = (problem.kv_pages, problem.page_table, problem.cache_seqlens, plan_for(problem))
    with pytest.raises(ValueError, match=r"mla_decode: q must be .* as its plan, got \[3, 5, 576\]"):
        ops.mla_decode(problem.q[:3], *call, softmax_scale=SCALE)


@pytest.mark.parametrize("kv_dtype, name", [(None, "bfloat16"), (torch.uint8, "uint8")])
def test_fp8_products_belong_to_dense_fp8_pages(kv_dtype, name):
    with pytest.raises(RuntimeError, match=f"fp8_products belongs to float8_e4m3fn kv_pages, got {name}"):
        decode(mla_problem([70], num_q_heads=5, kv_dtype=kv_dtype), fp8_products=True)


def test_plan_of_other_lengths_is_refused():
    problem = mla_problem([70, 900], num_q_heads=5)
    plan = plan_for(problem)
    problem.cache_seqlens[1] = 500
    with pytest.raises(RuntimeError, match="is not the plan of these cache_seqlens"):
        decode(problem, plan=plan)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("bad_page", [-1, 2**30])
@pytest.mark.parametrize("kv_dtype", [None, FP8, torch.uint8])
def test_checked_mode_records_a_bad_page_and_skips_it(kv_dtype, bad_page, csr, device):
    problem = mla_problem([40, 60, 100], num_q_heads=5, page_size=16, kv_dtype=kv_dtype).to(device)
    good_out, _ = decode(problem)
    if csr:
        problem.kv_indices[problem.kv_indptr[1] + 2] = bad_page
    else:
        problem.page_table[1, 2] = bad_page
    report = torch.zeros(8, dtype=torch.int32, device=device)
    out, lse = decode(problem, csr=csr, report=report)
    count, *fault = report[:7].tolist()
    assert count > 0
    assert fault == [OP_MLA_DECODE, KIND_PAGE_INDEX, 1, 2, bad_page, problem.kv_pages.shape[0]]
    assert torch.equal(out[[0, 2]], good_out[[0, 2]]) and torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("heads", [5, 70])
def test_more_cuts_than_the_plan_has_room_for(heads, checked, device):
    """NaN, and recorded in checked mode. What the host can see without one, no length on a GPU, is an error."""
    problem = mla_problem([70, 3000, 64, 200], num_q_heads=heads).to(device)
    plan = plan_for(problem, fixed=64, max_seqlen_k=200)
    partials = plan.out_partial.shape[0]
    if device == "cpu" and not checked:
        expected = rf"num_partials\) must be at least .* got {partials}. Request 1 has .* cut every 64"
        with pytest.raises(RuntimeError, match=expected):
            decode(problem, plan=plan)
        return
    report = torch.zeros(8, dtype=torch.int32, device=device)
    out, lse = decode(problem, plan=plan, report=report if checked else None)
    good_out, good_lse = decode(problem, fixed=64)
    for request in (0, 2):
        assert torch.equal(out[request], good_out[request]) and torch.equal(lse[request], good_lse[request])
    for request in (1, 3):  # the last one's cuts have no room behind those of the long one
        assert out[request].isnan().all() and lse[request].isnan().all()
    count, op, kind, request, _, value, limit = report[:7].tolist()
    assert not checked or (count > 0 and (op, kind) == (OP_MLA_DECODE, KIND_LENGTH) and request in (1, 3))
    assert not checked or (value > partials and limit == partials + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, FP8, torch.uint8])
def test_checked_mode_records_a_length_beyond_the_table(kv_dtype, csr, device):
    problem = mla_problem([40, 60, 100], num_q_heads=5, page_size=16, kv_dtype=kv_dtype).to(device)
    good_out, _ = decode(problem)
    if csr:  # request 1 owns one spare cell: give it to the next request
        problem.kv_indptr[2] -= 1
    else:
        problem.page_table[1, 4] = problem.page_table[1, 3]
    problem.cache_seqlens[1] = 1000 if csr else 10_000
    report = torch.zeros(8, dtype=torch.int32, device=device)
    out, _ = decode(problem, csr=csr, report=report, plan=plan_for(problem, max_seqlen_k=1 << 14))
    capacity = (4 if csr else problem.page_table.shape[1]) * 16
    count, op, kind, request, _, value, limit = report[:7].tolist()
    assert count > 0 and (op, kind, request) == (OP_MLA_DECODE, KIND_LENGTH, 1)
    assert (value, limit) == (problem.cache_seqlens[1].item(), capacity + 1)
    assert torch.equal(out[0], good_out[0])


@pytest.mark.parametrize("device", DEVICES)
def test_checked_mode_records_nothing_for_a_right_call(device):
    problem = mla_problem([40, 0, 100], 2, num_q_heads=5, page_size=16).to(device)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    out, _ = decode(problem, report=report)
    assert not report.any()
    assert torch.equal(out, decode(problem)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_more_cuts_than_the_scratch_holds_never_pass_for_an_answer(device):
    problem = mla_problem([40, 500], num_q_heads=5).to(device)
    plan = plan_for(problem, fixed=64, max_seqlen_k=128)
    report = torch.zeros(8, dtype=torch.int32, device=device)
    out, _ = decode(problem, plan=plan, report=report)
    assert report[0] > 0 and report[2] == KIND_LENGTH and report[3] == 1
    assert torch.isfinite(out[0]).all() and out[1].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [0, 64])
@pytest.mark.parametrize("kv_dtype", [None, FP8, torch.uint8])
def test_schema_fake_and_aliasing(kv_dtype, fixed, device):
    call = arguments(device, kv_dtype, fixed)
    skip_without_kernel(call["q"])
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kv_dtype == FP8:
        checks.remove("test_schema")  # which computes with its arguments, and torch has no arithmetic on this dtype
    torch.library.opcheck(torch.ops.attnops.mla_decode.default, (), call, test_utils=checks)
    plan = {name: call[name].clone() for name in ("tile_scheduler_metadata", "num_splits", "cache_seqlens")} | {
        "seqlen_q": SEQLEN_Q,
        "num_q_heads": HEADS,
        "fixed_split_tokens": fixed,
    }
    torch.library.opcheck(torch.ops.attnops.mla_decode_plan.default, (), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, kv_dtype", [(torch.float32, None), (torch.float32, FP8), (torch.float32, torch.uint8)])
def test_cuda_refuses_what_no_kernel_takes_and_says_why(dtype, kv_dtype):
    problem = mla_problem([40], num_q_heads=5, dtype=dtype, kv_dtype=kv_dtype).to("cuda")
    call = (problem.q_by_request, problem.kv_pages, problem.page_table, problem.cache_seqlens, plan_for(problem))
    with pytest.raises(RuntimeError, match=r"no kernel fits(.|\n)*sm90_bf16: takes (q|kv_pages) of bfloat16, got"):
        ops.mla_decode(*call, softmax_scale=0.05, kv_scale=problem.kv_scale)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_graph_break(device):
    problem = mla_problem([40, 9], 2, num_q_heads=5).to(device)
    plan = plan_for(problem)

    def step(q, cache_seqlens):
        ops.mla_decode_plan(plan, cache_seqlens)
        out, _ = ops.mla_decode(q * 2, problem.kv_pages, problem.page_table, cache_seqlens, plan, softmax_scale=0.05)
        return out + 1

    q = problem.q_by_request
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, problem.cache_seqlens), step(q, problem.cache_seqlens))
